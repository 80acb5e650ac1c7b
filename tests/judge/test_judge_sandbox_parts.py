"""What the sandbox is made of, without a sandbox: paths, cgroups as they are told, GPU nodes, the filter, the log,
and the looks at a tree."""

from __future__ import annotations

import errno
import os
import platform
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from engine.errors import UserError
from engine.judge import cgroup, confinement, seccomp, tree, view
from engine.judge.cgroup import Hierarchy, parse_hierarchies
from engine.judge.childlog import TAIL_BYTES, Pump
from engine.judge.confinement import Gpu, gpu_nodes
from engine.paths import REPOSITORY

# Paths


def kinds(entries: list[view.Entry]) -> dict[str, str]:
    return {str(entry.path): entry.kind for entry in entries}


def test_links_are_followed_one_by_one(tmp_path: Path) -> None:
    real = tmp_path.resolve()
    (real / "blobs").mkdir()
    (real / "blobs" / "abc").write_text("weights")
    (real / "snapshots" / "v1").mkdir(parents=True)
    (real / "snapshots" / "v1" / "model").symlink_to("../../blobs/abc")
    (real / "current").symlink_to(real / "snapshots" / "v1")
    links, end = view.follow(real / "current" / "model")
    assert end == real / "blobs" / "abc"
    assert links == {
        real / "current": str(real / "snapshots" / "v1"),
        real / "snapshots" / "v1" / "model": "../../blobs/abc",
    }
    (real / "round").symlink_to("round")
    with pytest.raises(UserError, match="symbolic links"):
        view.follow(real / "round")


def test_deepest_entry_wins(tmp_path: Path) -> None:
    """A repository below a folder that is shown: covered, and in it only what is shown by itself."""
    base = tmp_path.resolve() / "opt"
    repository = base / "src"
    for folder in (base / "lib", repository / "engine", repository / "tests", repository / ".venv" / "lib"):
        folder.mkdir(parents=True)
    shown = [base, base / "lib", repository / "engine", repository / ".venv", repository / ".venv" / "lib"]
    entries = view.plan(shown, [repository, tmp_path / "data that is nowhere shown"])
    assert kinds(entries) == {
        "/tmp": "scratch",
        str(base): "bind",
        str(repository): "cover",
        str(repository / "engine"): "bind",
        str(repository / ".venv"): "bind",
    }
    places = [str(entry.path) for entry in entries]
    assert places.index(str(base)) < places.index(str(repository)) < places.index(str(repository / "engine"))


def test_search_paths_show_libraries_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    (home / "site").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    entries = [home / "site", home, tmp_path, REPOSITORY, REPOSITORY / "tests", "/", tmp_path / "nowhere", ""]
    outside = {"PYTHONPATH": os.pathsep.join(map(str, entries)), "CUDA_VISIBLE_DEVICES": "3", "LANG": "C"}
    inside = view.environment(outside)
    assert inside["PYTHONPATH"] == os.pathsep.join([str(REPOSITORY), str(home / "site")])
    assert "CUDA_VISIBLE_DEVICES" not in inside  # inside there is only its own GPU
    assert inside["LANG"] == "C"


# Cgroups


MOUNT = "30 24 0:26 {root} {top} rw,nosuid - {kind} {kind} rw{options}\n"


def mount(top: str, kind: str = "cgroup2", options: str = "", root: str = "/") -> str:
    return MOUNT.format(top=top, kind=kind, options=options, root=root)


def test_version_2_alone() -> None:
    found = parse_hierarchies("21 1 8:1 / / rw - ext4 /dev/sda rw\n" + mount("/sys/fs/cgroup"), "0::/user.slice/a b\n")
    assert found == [Hierarchy(Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/user.slice/a b"))]


def test_version_1_beside_version_2() -> None:
    top = "/sys/fs/cgroup"
    mounts = mount(f"{top}/memory", "cgroup", ",memory") + mount(f"{top}/unified")
    mounts += mount(f"{top}/cpu,cpuacct", "cgroup", ",cpu,cpuacct") + mount(f"{top}/systemd", "cgroup", ",name=systemd")
    told = "9:name=systemd:/s\n4:memory:/job/7\n3:cpu,cpuacct:/\n0::/\n"
    found = {hierarchy.top.name: hierarchy for hierarchy in parse_hierarchies(mounts, told)}
    assert found["memory"] == Hierarchy(Path(top, "memory"), Path(top, "memory/job/7"), frozenset({"memory"}))
    assert found["unified"] == Hierarchy(Path(top, "unified"), Path(top, "unified"))
    assert found["cpu,cpuacct"].controllers == {"cpu", "cpuacct"}


def test_groups_outside_of_what_is_mounted_are_left_alone() -> None:
    """In a container: the mount shows one branch, and another namespace's groups begin with dots."""
    assert parse_hierarchies(mount("/sys/fs/cgroup", root="/docker/1"), "0::/docker/1/x\n") == [
        Hierarchy(Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/x"))
    ]
    assert parse_hierarchies(mount("/sys/fs/cgroup", root="/docker/1"), "0::/docker/2\n") == []
    assert parse_hierarchies(mount("/sys/fs/cgroup"), "0::/../../x\n") == []


def test_left_groups_are_swept(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-I", "-S", "-c", "pass"])
    ended.wait()
    for pid in (ended.pid, os.getpid()):
        (tmp_path / f"{cgroup.PREFIX}{pid}-1").mkdir()
    cgroup._sweep(tmp_path)
    assert [folder.name for folder in tmp_path.iterdir()] == [f"{cgroup.PREFIX}{os.getpid()}-1"]


# GPU nodes


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of device nodes, and three GPUs whose node numbers are not in the order of the bus."""
    for name in ("nvidiactl", "nvidia-uvm", "nvidia0", "nvidia1", "nvidia2", "nvidia-caps"):
        (tmp_path / name).touch()
    gpus = [Gpu("H200", "GPU-aaa1", 2), Gpu("H200", "GPU-bbb2", 0), Gpu("H200", "GPU-abc3", 1)]
    monkeypatch.setattr(confinement, "_gpus", lambda: gpus)
    return tmp_path


@pytest.mark.parametrize(
    ("platform_name", "visible", "node"),
    [
        ("cuda:0", None, "nvidia2"),
        ("cuda:1", None, "nvidia0"),
        ("cuda", "2", "nvidia1"),
        ("cuda:1", "2,0", "nvidia2"),
        ("cuda:0", "GPU-bb", "nvidia0"),
        ("cuda:0", "GPU-a", None),  # two begin so
        ("cuda:0", "MIG-1", None),
        ("cuda:2", "0,1", None),
        ("cuda:0", "", None),
    ],
)
def test_one_gpu_and_no_other(machine: Path, platform_name: str, visible: str | None, node: str | None) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    if node is None:
        with pytest.raises(UserError, match=f"Which device node is {platform_name}"):
            gpu_nodes(platform_name, environment, machine)
    else:
        names = [path.name for path in gpu_nodes(platform_name, environment, machine)]
        assert names == ["nvidiactl", "nvidia-uvm", node]


def test_unequal_gpus_need_an_order(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confinement, "_gpus", lambda: [Gpu("A", "GPU-1", 1), Gpu("B", "GPU-2", 0)])
    with pytest.raises(UserError, match="CUDA_VISIBLE_DEVICES"):
        gpu_nodes("cuda:0", {}, machine)
    assert gpu_nodes("cuda:0", {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, machine)[-1].name == "nvidia1"


def test_a_single_node_needs_no_list(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confinement, "_gpus", list)
    for name in ("nvidia0", "nvidia1"):
        (machine / name).unlink()
    assert gpu_nodes("cuda:0", {}, machine)[-1].name == "nvidia2"


# The filter of system calls


def run(program: bytes, number: int, architecture: int, second: int = 0, first: int = 0) -> int:
    """A plain interpreter of the few BPF instructions that the filter uses."""
    data = struct.pack("<IIQ6Q", number, architecture, 0, first, second, 0, 0, 0, 0)
    lines = [struct.unpack_from("<HBBI", program, at) for at in range(0, len(program), 8)]
    at, value = 0, 0
    while True:
        code, yes, no, constant = lines[at]
        at += 1
        if code == 0x20:
            (value,) = struct.unpack_from("<I", data, constant)
        elif code == 0x15:
            at += yes if value == constant else no
        elif code == 0x35:
            at += yes if value >= constant else no
        else:
            assert code == 0x06
            return int(constant)


@pytest.mark.parametrize(
    ("machine_name", "architecture", "fcntl", "socket"),
    [("x86_64", 0xC000003E, 72, 41), ("aarch64", 0xC00000B7, 25, 198)],
)
def test_filter_refuses_what_it_lists_and_nothing_else(
    machine_name: str, architecture: int, fcntl: int, socket: int
) -> None:
    program = seccomp.program(machine_name)
    assert program is not None
    allowed, refused = 0x7FFF0000, 0x00050000 | errno.EPERM
    listed = {call[machine_name] for call in seccomp.DENIED.values()}
    for number in range(500):
        assert run(program, number, architecture) == (refused if number in listed else allowed)
    assert run(program, fcntl, architecture, second=10) == refused  # F_SETSIG
    assert run(program, fcntl, architecture, second=4) == allowed
    assert run(program, socket, architecture, first=40) == refused  # AF_VSOCK
    assert run(program, socket, architecture, first=1, second=40) == allowed
    assert run(program, 0, 0x40000003) == refused  # 32 bit
    assert run(program, 0x40000000 + 101, architecture) == refused  # x32


def test_no_filter_where_the_numbers_are_unknown() -> None:
    assert seccomp.program("riscv64") is None
    assert platform.machine() not in ("x86_64", "aarch64") or seccomp.program() is not None


# The log


def test_pump_keeps_beginning_and_end(tmp_path: Path) -> None:
    pump = Pump(tmp_path / "log", 100)
    end = os.dup(pump.write_end)
    pump.start()
    text = os.urandom(30_000).hex().encode()
    with os.fdopen(end, "wb") as file:
        file.write(text)
    pump.join()
    kept = (tmp_path / "log").read_bytes()
    note = f"\n[{len(text) - 100 - TAIL_BYTES:,} bytes left out]\n".encode()
    assert kept == text[:100] + note + text[-TAIL_BYTES:]


# Stopping by signals


def test_a_look_at_a_running_root_proves_no_standstill(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reaped what forked, between the looks, so that both of them found the same processes; one more forked on."""

    def seen(pid: int, state: str) -> tree._Seen:
        return tree._Seen(tree.Member(pid, 0), 0, state, 1)

    root, child, dead = seen(1, "T"), seen(2, "T"), seen(3, "Z")
    looks = [
        [seen(1, "S"), seen(2, "S"), dead],
        [root, child, dead],
        [root, child, dead, seen(5, "R")],
        [root, child, dead, seen(5, "T")],
        [root, child, dead, seen(5, "T")],
    ]
    sent: list[int] = []
    monkeypatch.setattr(tree, "_look", lambda pid: looks.pop(0))
    monkeypatch.setattr(tree, "_send", lambda pids, number: sent.extend(pids))
    tree.stop(1)
    assert not looks
    assert sent == [1, 2, 5]
