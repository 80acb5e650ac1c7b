"""The machine while answers are timed: counters against processes that really burn CPU, and what follows from them.
NVML's values are those of nvml.h."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.judge import conditions, gpu, load
from engine.judge.conditions import Watch, disturbance
from engine.judge.costs import CostClock
from engine.judge.gpu import Gpu, Others, Process, Reading
from engine.judge.load import Counters, Load, Quota

linux = pytest.mark.skipif(not Path("/proc/stat").is_file(), reason="needs Linux's /proc")
BURN = "import sys; print(flush=True)\nwhile True: pass"


def spin(seconds: float) -> None:
    """Burn this process's CPU: seconds of CPU time, however long that takes."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


@contextmanager
def burner(*, ours: bool) -> Iterator[int]:
    """A process that burns a core: our child, or one that its parent has left to init. Its pid once it runs."""
    if ours:
        child = subprocess.Popen([sys.executable, "-c", BURN], stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
        try:
            yield child.pid
        finally:
            child.kill()
            child.communicate()
        return
    command = ["sh", "-c", '"$0" -c "$1" & echo $!', sys.executable, BURN]
    shell = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert shell.stdout is not None
    pid = int(shell.stdout.readline())
    shell.stdout.readline()
    shell.wait()  # an orphan now
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        shell.stdout.close()


def until_used(pid: int, seconds: float) -> None:
    """Wait until a process has used so much more CPU time."""
    clock = (~pid << 3) | 2
    end = time.clock_gettime(clock) + seconds
    while time.clock_gettime(clock) < end:
        pass  # this burns our own time: it must be told apart from the other's


def during(work: Callable[[], None]) -> Load:
    before = load.read_counters()
    work()
    after = load.read_counters()
    assert before is not None
    assert after is not None
    return load.difference(before, after)


@linux
def test_a_stranger_counts_as_foreign_and_our_own_does_not() -> None:
    with burner(ours=False) as pid:
        found = during(lambda: until_used(pid, 0.4))
    assert found.foreign * found.seconds > 0.35
    assert found.trees == {}
    with burner(ours=True) as pid:
        before = load.read_counters()
        used = time.clock_gettime((~pid << 3) | 2)
        until_used(pid, 0.4)
        used = time.clock_gettime((~pid << 3) | 2) - used
        after = load.read_counters()
    assert before is not None
    assert after is not None
    found = load.difference(before, after)
    assert found.trees[pid] * found.seconds == pytest.approx(used, abs=0.05)
    ours = after.own + after.trees[pid] - before.own - before.trees[pid]
    assert ours == pytest.approx(2 * used, rel=0.5)  # the child, and this test, which waited in a loop


@linux
def test_a_child_that_ended_meanwhile_was_ours() -> None:
    work = "import time\nwhile time.process_time() < 0.4: pass"

    def grandchild() -> None:
        subprocess.run(
            [sys.executable, "-c", f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {work!r}])"]
        )

    before = load.read_counters()
    grandchild()
    after = load.read_counters()
    assert before is not None
    assert after is not None
    assert after.own - before.own > 0.38
    with burner(ours=True) as pid:
        until_used(pid, 0.3)
        before = load.read_counters()
    after = load.read_counters()  # killed and reaped: what it had used before must not count again
    assert before is not None
    assert after is not None
    assert after.trees == {}
    assert -0.05 < after.own - before.own - before.trees[pid] < 0.3
    assert load.difference(before, after).foreign * (after.at - before.at) < after.busy - before.busy + 0.05


@linux
def test_whole_trees_are_counted() -> None:
    inner = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {BURN!r}], stdout=sys.stdout)"
    child = subprocess.Popen([sys.executable, "-c", inner], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        found = during(lambda: spin(0.3))
        assert len(load.descendants(child.pid)) == 1
        assert found.trees[child.pid] * found.seconds > 0.1
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()


STAT = """cpu  100 0 0 0 0 0 0 0 0 0
cpu0 1000 200 300 9000 50 10 20 30 500 0
cpu1 1 1 1 1 1 1 1 1 0 0
cpu12 7 0 0 0 0 0 0 0 0 0
intr 5
"""


def test_only_usable_cores_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "TICK_S", 0.01)
    assert load.parse_stat(STAT, frozenset({0})) == (pytest.approx(15.3), pytest.approx(0.3), 1)
    assert load.parse_stat(STAT, frozenset({0, 12, 40})) == (pytest.approx(15.37), pytest.approx(0.3), 2)
    with pytest.raises(ValueError, match="no usable core"):
        load.parse_stat(STAT, frozenset({3}))


def test_difference_of_counters() -> None:
    before = Counters(10.0, 2, busy=100.0, steal=1.0, own=5.0, trees={7: 20.0, 8: 3.0}, quota=Quota(2.0, 50.0, 1.0))
    after = Counters(12.0, 2, busy=103.0, steal=1.2, own=8.5, trees={7: 21.5, 9: 0.1}, quota=Quota(2.0, 53.0, 1.5))
    found = load.difference(before, after)  # 8 ended (3.0 moved to own), 9 is new: ours are 0.5 + 1.5 + 0.1
    assert found.foreign == pytest.approx((3.0 + 0.2 - 2.1) / 2.0)
    assert found.steal == pytest.approx(0.1)
    assert found.group == pytest.approx((3.0 - 2.1) / 2.0)
    assert found.held == pytest.approx(0.25)
    assert found.trees == {7: pytest.approx(0.75), 9: pytest.approx(0.05)}
    orphaned = Counters(12.1, 2, busy=103.05, steal=1.2, own=8.5)  # 7 and 9 left orphans, whose time nobody has
    assert load.difference(after, orphaned).foreign == pytest.approx(0.5)
    lagging = Counters(12.1, 2, busy=103.0, steal=1.2, own=8.7, trees=after.trees)
    assert load.difference(after, lagging).foreign == 0.0


@pytest.mark.parametrize("version", [1, 2])
def test_quota_of_a_container(version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    monkeypatch.setattr(load, "PROC", proc)
    monkeypatch.setattr(load, "CGROUP", groups)
    assert load.read_quota() is None
    if version == 2:
        (proc / "self" / "cgroup").write_text("0::/box/inner\n")
        folder = groups / "box"
        (folder / "inner").mkdir(parents=True)
        (folder / "inner" / "cpu.max").write_text("max 100000\n")
        (folder / "inner" / "cpu.stat").write_text("usage_usec 1\n")
        (folder / "cpu.max").write_text("250000 100000\n")
        (folder / "cpu.stat").write_text("usage_usec 7000000\nuser_usec 1\nthrottled_usec 500000\n")
    else:
        (proc / "self" / "cgroup").write_text("5:devices:/\n4:cpu,cpuacct:/box\n0::/\n")
        folder = groups / "cpu,cpuacct" / "box"
        folder.mkdir(parents=True)
        (folder / "cpu.cfs_quota_us").write_text("250000\n")
        (folder / "cpu.cfs_period_us").write_text("100000\n")
        (folder / "cpuacct.usage").write_text("7000000000\n")
        (folder / "cpu.stat").write_text("nr_periods 3\nthrottled_time 500000000\n")
    assert load.read_quota() == Quota(pytest.approx(2.5), pytest.approx(7.0), pytest.approx(0.5))


@pytest.mark.parametrize(
    ("found", "cores", "needed", "words"),
    [
        (Load(2.0, 0.05), 2, 2, None),
        (Load(2.0, 0.2), 2, 2, "other processes used 0.20 of 2 cores"),
        (Load(0.05, 0.4), 2, 2, None),  # two ticks of 10 ms, which may not have been
        (Load(0.05, 1.0), 2, 2, "other processes used 1.00 of 2 cores"),
        (Load(2.0, 5.0), 64, 2, None),  # a shared host with cores to spare
        (Load(2.0, 62.5), 64, 2, "other processes used 62.50 of 64 cores"),
        (Load(2.0, 5.0), 64, 64, "other processes used 5.00 of 64 cores"),
        (Load(2.0, 0.5, steal=0.4), 2, 2, "the hypervisor took 0.40 of 2 cores away"),
        (Load(2.0, 5.0, group=0.7), 64, 2, "other processes used 0.70 cores of this container's CPU limit"),
    ],
)
def test_what_disturbs_a_block(found: Load, cores: int, needed: int, words: str | None) -> None:
    assert disturbance(found, cores, needed) == words


class Machine:
    """Counters that a test turns forward; sleeping turns them too."""

    def __init__(self, foreign: float = 0.0) -> None:
        self.at, self.busy, self.trees = 100.0, 0.0, {5: 0.0, 6: 0.0}
        self.foreign = foreign
        self.slept = 0.0

    def read(self) -> Counters:
        return Counters(self.at, 2, self.busy, 0.0, 0.0, dict(self.trees))

    def run(self, seconds: float, **cores: float) -> None:
        self.at += seconds
        self.busy += seconds * (self.foreign + sum(cores.values()))
        for name, used in cores.items():
            self.trees[int(name[3:])] += seconds * used

    def sleep(self, seconds: float) -> None:
        self.slept += seconds
        self.run(seconds)

    def watch(self, **kwargs: float) -> Watch:
        return Watch("cpu", read=self.read, sleep=self.sleep, **kwargs)


def test_a_watch_waits_for_an_idle_machine_up_to_a_bound() -> None:
    machine = Machine()
    assert machine.watch().before_round() is None
    assert machine.slept == pytest.approx(conditions.LOOK_S)
    machine = Machine(foreign=0.9)
    assert machine.watch(wait_s=3.0).before_round() == "other processes used 0.90 of 2 cores"
    assert machine.slept == pytest.approx(3.0, abs=1.5 * conditions.LOOK_S)

    class Leaves(Machine):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            self.foreign = 0.9 if self.slept < 1.0 else 0.0

    machine = Leaves(foreign=0.9)
    assert machine.watch(wait_s=3.0).before_round() is None
    assert 1.0 <= machine.slept < 1.5


def test_the_time_since_the_last_block_saves_a_look() -> None:
    machine = Machine()
    watch = machine.watch()
    watch.before_round()
    with watch.block(5):
        machine.run(1.0, pid5=2.0)
    slept = machine.slept
    machine.run(0.01)
    assert watch.before_round() is None
    machine.run(0.5, pid6=1.0)  # stock scores meanwhile: ours
    assert watch.before_round() is None
    assert machine.slept == slept
    machine.run(60.0)
    watch.before_round()
    assert machine.slept > slept  # too long ago to say anything


def test_a_disturbed_block_voids_its_round_and_no_other() -> None:
    machine = Machine()
    watch = machine.watch()
    busy = "other processes used 0.50 of 2 cores"
    for foreign, reason, looks in ((0.0, None, True), (0.5, busy, False), (0.0, None, True), (0.0, None, False)):
        slept = machine.slept
        watch.before_round()
        assert (machine.slept > slept) is looks
        with watch.block(5):
            machine.run(1.0, pid5=2.0)
        machine.foreign = foreign
        with watch.block(6):
            machine.run(1.0, pid6=1.5)
        machine.foreign = 0.0
        assert watch.after_round() == reason
    assert watch.conditions(("x",)).void == ("x",)
    assert not watch.ran_out_of_turn(5)


def test_a_small_load_is_seen_over_several_short_blocks() -> None:
    machine = Machine(foreign=0.3)
    watch = machine.watch()
    reasons = []
    for _ in range(10):
        with watch.block(5):
            machine.run(0.05, pid5=1.5)
        reasons.append(watch.after_round())
    assert reasons[0] is None  # 15 ms could be ticks
    assert reasons[-1] == "other processes used 0.30 of 2 cores"


def test_a_stopped_child_that_runs_is_named() -> None:
    machine = Machine()
    watch = machine.watch()
    with watch.block(5):
        machine.run(1.0, pid5=1.0, pid6=0.8)
    assert watch.after_round() == "a process that had been stopped used 0.80 cores in another's turn"
    assert watch.ran_out_of_turn(6)
    assert not watch.ran_out_of_turn(5)


@linux
def test_a_real_stranger_voids_a_real_block() -> None:
    watch = Watch("cpu")
    with burner(ours=False) as pid, watch.block(None):
        until_used(pid, 0.3)
    reason = watch.after_round()
    assert reason is not None
    assert reason.startswith(("other processes used", "the hypervisor"))
    seen = watch.conditions()
    assert seen.clock_mhz is None or seen.clock_mhz[0] <= seen.clock_mhz[1]


def test_a_system_without_counters_makes_nothing_void() -> None:
    watch = Watch("cpu", read=lambda: None)
    assert watch.before_round() is None
    with watch.block(5):
        pass
    assert watch.after_round() is None


# The values are those of nvml.h, not of this code.
@pytest.mark.parametrize(
    ("bits", "words"),
    [
        (0x0, ()),
        (0x1, ()),  # nvmlClocksEventReasonGpuIdle
        (0x4, ("power limit",)),  # SwPowerCap
        (0x8 | 0x40, ("hardware slowdown", "too hot (hardware limit)")),  # HwSlowdown, HwThermalSlowdown
        (0x20 | 0x80, ("too hot (software limit)", "power brake from outside")),
        (0x2 | 0x10 | 0x100, ("clocks set by an application", "clocks synchronised with another device",
                              "clocks set by a display")),
        (0x4 | 0x1000, ("power limit", "reason 0x1000")),
    ],
)  # fmt: skip
def test_throttle_reasons(bits: int, words: tuple[str, ...]) -> None:
    assert gpu.reasons(bits) == words


def test_which_device_is_meant() -> None:
    assert gpu.device_key("cuda:2", None) == 2
    assert gpu.device_key("cuda", "") == 0
    assert gpu.device_key("cuda:1", "5,3") == 3
    assert gpu.device_key("cuda:0", "GPU-8a1b") == "GPU-8a1b"
    for platform, visible in (("cpu", None), ("cuda:2", "0,1")):
        with pytest.raises(ValueError, match="CUDA"):
            gpu.device_key(platform, visible)


def test_others_on_the_device() -> None:
    mine, busy, idle = Process(10, 1, 90), Process(20, 2 << 30, 40, "python"), Process(30, None, 0)
    assert gpu.others([mine], {10, 11}) == Others()
    found = gpu.others([mine, busy, idle], {10})
    assert found.processes == (busy, idle)
    assert found.busy == (busy,)
    assert gpu.sentence(found.busy) == ("another process computes on the device: pid 20 (python, 2.1 GB, 40 % busy)")
    assert gpu.others([mine, Process(40)], {10}).busy == (Process(40),)  # use unknown: a context is enough
    assert not gpu.others([busy, idle], {10}).known  # none of ours is listed: pids of another namespace
    assert gpu.others([], {10}) == Others()


class FakeNvml:
    """The binding as far as it is used, with a device that throttles and a stranger on it."""

    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU, NVML_ERROR_NOT_FOUND = 1, 0, 6

    class NVMLError(Exception):
        def __init__(self, value: int) -> None:
            self.value = value

    def __init__(self, pids: list[int], use: dict[int, int] | None) -> None:
        self.pids, self.use = pids, use

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:
        raise self.NVMLError(13)  # an older driver

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        return 0x4

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return 654_321

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        return {1: 1755}[kind]

    def nvmlDeviceGetTemperature(self, handle: str, kind: int) -> int:
        raise self.NVMLError(3)  # not supported

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=None) for pid in self.pids]

    def nvmlDeviceGetProcessUtilization(self, handle: str, since: int) -> list[SimpleNamespace]:
        if self.use is None:
            raise self.NVMLError(3)
        if not self.use:
            raise self.NVMLError(self.NVML_ERROR_NOT_FOUND)
        now = int(time.time() * 1e6)
        return [
            SimpleNamespace(pid=pid, timeStamp=now + i, smUtil=use) for i, (pid, use) in enumerate(self.use.items())
        ]


def test_readings_that_a_device_refuses_are_unknown() -> None:
    device = Gpu(FakeNvml([], {}), "handle")
    assert device.reading() == Reading(1755, None, pytest.approx(654.321), ("power limit",))


@pytest.mark.parametrize(
    ("pids", "use", "void"),
    [
        ([os.getpid()], {os.getpid(): 90}, False),
        ([os.getpid(), 2**22 + 1], {os.getpid(): 90}, False),  # it holds memory and computes nothing
        ([os.getpid(), 2**22 + 1], {2**22 + 1: 60}, True),
        ([os.getpid(), 2**22 + 1], None, True),
        ([2**22 + 1], {2**22 + 1: 60}, False),  # who is who cannot be told
    ],
)
def test_a_stranger_on_the_gpu_voids_a_block(pids: list[int], use: dict[int, int] | None, void: bool) -> None:
    machine = Machine()
    watch = Watch("cuda:0", read=machine.read, sleep=machine.sleep, gpu=Gpu(FakeNvml(pids, use), "handle"))
    with watch.block(5):
        machine.run(1.0, pid5=1.0)
    reason = watch.after_round()
    assert (reason is not None) is void
    assert reason is None or f"pid {2**22 + 1}" in reason
    seen = watch.conditions((), reference_slowdown=1.01)
    assert (seen.throttled, seen.clock_mhz, seen.power_w) == (("power limit",), (1755, 1755), pytest.approx(654.321))
    assert (seen.temperature_c, seen.reference_slowdown) == (None, 1.01)


def test_no_device_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Gpu.open("cpu", None) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    assert Gpu.open("cuda:0", None) is None


@pytest.mark.gpu
@pytest.mark.skipif(Gpu.open("cuda:0", os.environ.get("CUDA_VISIBLE_DEVICES")) is None, reason="needs a CUDA device")
def test_a_real_gpu() -> None:
    """A child of ours computes on the device: it is busy, at a clock, and nobody else's."""
    work = (
        "import sys, torch\nx = torch.randn(4096, 4096, device='cuda:0')\nprint(flush=True)\n"
        "while not sys.stdin.closed: y = x @ x; torch.cuda.synchronize()"
    )
    device = Gpu.open("cuda:0", os.environ.get("CUDA_VISIBLE_DEVICES"))
    assert device is not None
    watch = Watch("cuda:0", gpu=device)
    with subprocess.Popen([sys.executable, "-c", work], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        with watch.block(child.pid):
            until_used(child.pid, 1.5)
        ours = device.others({os.getpid(), child.pid})
        assert not ours.known or not ours.busy
        stranger = device.others({os.getpid()})
        assert not stranger.known or child.pid in {each.pid for each in stranger.processes}
        child.kill()
    seen = watch.conditions()
    print(ours, stranger, seen, watch.after_round())
    assert seen.clock_mhz is not None
    assert 100 < seen.clock_mhz[0] <= seen.clock_mhz[1] < 5000
    assert seen.temperature_c is None or 10 < seen.temperature_c < 120
    assert seen.power_w is None or 20 < seen.power_w < 2000


def test_costs_count_every_second_once() -> None:
    now = [0.0]
    costs = CostClock(lambda: now[0])

    def later(seconds: float) -> None:
        now[0] += seconds

    later(5.0)  # outside of every phase
    with costs.phase("start"):
        later(1.0)
        with costs.phase("forcing"):
            later(2.0)
            costs.generated(1.5)
        later(0.25)

    def fails() -> None:
        with costs.phase("timing"):
            later(4.0)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    later(100.0)
    with costs.phase("timing"):
        later(0.5)
        with costs.phase("warmup"):
            later(0.125)
        found = costs.costs()
    assert (found.start_s, found.forcing_s, found.timing_s, found.warmup_s) == (1.25, 2.0, 4.5, 0.125)
    assert found.generating_s == 1.5
