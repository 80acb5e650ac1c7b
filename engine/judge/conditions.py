"""The state of the machine while answers are timed: was it ours alone, and at what clocks.

A *block* is one timed answer. Before a round of blocks the watch waits for an idle machine; around each block it reads
the counters of `load.py`, and on a GPU who else computes there. A block during which something else ran is void: its
round is thrown away and asked again, whoever of the two sides it hit. Nothing here decides which side is faster.

How much foreign load is too much was measured on two cores with the demo model (tests/judge/record_noise.py, whose
trace is tests/judge/data/noise.json; the machine was not ours alone, so the figures are rough): with a second process
on 0.05, 0.1 and 0.2 cores an answer took 1.07, 1.11 and 1.24 times as long, for threads wait for each other; without
it 0.02 cores were read in the median and under 0.06 in nine blocks of ten. So 0.1 cores, at which a block may
be a tenth too long, is the limit.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from engine.judge.gpu import Gpu, Reading, sentence
from engine.judge.load import Counters, Load, descendants, difference, read_counters, total, usable
from engine.judge.report import Conditions

FOREIGN_LIMIT = 0.1
"""Cores that other processes may use on average during a block."""
TICK_ALLOWANCE_S = 0.02
"""CPU seconds that coarse counters may invent in one reading: two ticks of 10 ms, one a core of a side's two threads.
In a block of 50 ms this is 0.4 cores, so short blocks are judged together as well (WINDOW_S)."""
WINDOW_S = 0.5
"""Short blocks are judged over the newest ones that add up to this many seconds, too."""
LOOK_S = 0.1
"""One look at an idle machine: long enough that two invented ticks (0.2 cores) stay under a busy process's load."""
FRESH_S = 2.0
"""Counters that reach back no further than this stand for a look."""
WAIT_S = 20.0
"""How long a round waits for the machine to become idle."""
HELD_LIMIT = 0.02
"""Average number of processes held back by a control group's CPU limit from which the report mentions it."""
GPU_HOST_CORES = 2
"""Cores that a decoder on a GPU needs: the loop, and the driver's thread."""
SAMPLE_S = 0.25
"""Between two readings of a GPU while a block runs."""
CPU = Path("/sys/devices/system/cpu")


@dataclass(frozen=True)
class BlockReport:
    """One block: its load (None where this system has no counters), why it is void (None: it counts), and which other
    children of the judge ran though it was not their turn."""

    load: Load | None
    reason: str | None
    out_of_turn: tuple[int, ...] = ()


def disturbance(load: Load, cores: int, needed: int) -> str | None:
    """Why a stretch with this load says nothing of a decoder that needs `needed` of `cores` usable cores, or None.

    Foreign load on cores that are not needed is let pass: on a large or shared host it is always there. Inside a
    control group with a CPU limit every other process takes from the same share, so there nothing is spare.
    """
    allowed = FOREIGN_LIMIT + TICK_ALLOWANCE_S / load.seconds
    if load.foreign - max(0, cores - needed) > allowed:
        if load.steal > load.foreign / 2:
            return f"the hypervisor took {load.steal:.2f} of {cores} cores away"
        return f"other processes used {load.foreign:.2f} of {cores} cores"
    if load.group > allowed:
        return f"other processes used {load.group:.2f} cores of this container's CPU limit"
    return None


def out_of_turn(load: Load, active: int | None) -> tuple[int, ...]:
    """Pids of the judge's children other than `active` that used CPU; all of them should have stood still."""
    allowed = FOREIGN_LIMIT + TICK_ALLOWANCE_S / load.seconds
    return tuple(pid for pid, cores in load.trees.items() if pid != active and cores > allowed)


class Watch:
    """Watches the machine of one comparison. `threads` is how many cores a decoder on a CPU uses (None: all that are
    usable). `read`, `gpu` and `sleep` stand in for the real machine in tests.

    Use `block` around each timed answer and give the watch to `rounds.timed_rounds`, which calls `before_round` and
    `after_round`. `conditions` tells what was seen.
    """

    def __init__(
        self,
        platform: str,
        threads: int | None = None,
        *,
        wait_s: float = WAIT_S,
        read: Callable[[], Counters | None] = read_counters,
        gpu: Gpu | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        on_gpu = platform.startswith("cuda")
        self._needed = GPU_HOST_CORES if on_gpu else threads
        self._wait_s = wait_s
        self._read = read
        self._gpu = gpu or (Gpu.open(platform, os.environ.get("CUDA_VISIBLE_DEVICES")) if on_gpu else None)
        self._sleep = sleep
        self._last: Counters | None = None
        self._calm = False
        self._recent: deque[Load] = deque()
        self._readings: list[Reading] = []
        self._void: list[str] = []
        self._throttled: dict[str, None] = {}
        self._offenders: set[int] = set()
        self.disturbed: Counter[int] = Counter()
        """Void blocks by the pid of whose turn it was."""
        self._heat = heat_events()

    def before_round(self) -> str | None:
        """Wait until nothing else runs, at most `wait_s` seconds; why the machine is not idle, or None."""
        self._void.clear()
        now = self._read()
        if now is None:
            return self._gpu_reason()
        reason: str | None = "not looked at"
        if self._last is not None and now.at - self._last.at <= FRESH_S:
            if now.at - self._last.at >= LOOK_S:
                reason = self._idle_reason(self._last, now)
            elif self._calm:  # the block that has just ended was a look itself
                reason = self._gpu_reason()
        deadline = now.at + self._wait_s
        while reason is not None:
            self._sleep(LOOK_S)
            before, now = now, self._read()
            if now is None:
                return None
            reason = self._idle_reason(before, now)
            if reason is not None and now.at >= deadline:
                return reason
        return None

    def after_round(self) -> str | None:
        """Why the round's blocks are void, or None."""
        return self._void[0] if self._void else None

    @contextmanager
    def block(self, active: int | None) -> Iterator[None]:
        """One timed answer of the judge's child with pid `active`. Nothing is judged where it raises."""
        before = self._read()
        with self._sampling():
            yield
        self.ended(before, self._read(), active)

    def ended(self, before: Counters | None, after: Counters | None, active: int | None) -> BlockReport:
        """Judge the block between two readings; a reason voids the round."""
        self._last = after
        load: Load | None = None
        reason: str | None = None
        offenders: tuple[int, ...] = ()
        if before is not None and after is not None:
            load = difference(before, after)
            needed = after.cores if self._needed is None else min(self._needed, after.cores)
            self._remember(load)
            reason = disturbance(load, after.cores, needed) or disturbance(total(self._recent), after.cores, needed)
            offenders = out_of_turn(load, active)
            if offenders:
                used = max(load.trees[pid] for pid in offenders)
                reason = f"a process that had been stopped used {used:.2f} cores in another's turn"
            if load.held > HELD_LIMIT:
                self._throttled["held back by this container's CPU limit"] = None
        reason = reason or self._gpu_reason()
        if reason is not None:
            self._void.append(reason)
            if active is not None:
                self.disturbed[active] += 1
            self._recent.clear()  # a disturbance that is over must not void what comes after it
        self._calm = reason is None
        self._offenders.update(offenders)
        if self._gpu is None:
            self._readings.append(Reading(clock_mhz=core_mhz()))
        return BlockReport(load, reason, offenders)

    def ran_out_of_turn(self, pid: int) -> bool:
        """Whether this child of the judge used CPU while another was being timed: it was stopped, and must not."""
        return pid in self._offenders

    def conditions(self, void: Sequence[str] = (), reference_slowdown: float | None = None) -> Conditions:
        """What was seen so far; `void` are the reasons of the rounds that were thrown away."""
        throttled = {words: None for reading in self._readings for words in reading.throttled}
        if heat_events() > self._heat:
            throttled["too hot (the processor's own count)"] = None
        clocks = [reading.clock_mhz for reading in self._readings if reading.clock_mhz is not None]
        heat = [reading.temperature_c for reading in self._readings if reading.temperature_c is not None]
        power = [reading.power_w for reading in self._readings if reading.power_w is not None]
        return Conditions(
            void=tuple(void),
            throttled=tuple(throttled | self._throttled),
            clock_mhz=(min(clocks), max(clocks)) if clocks else None,
            temperature_c=max(heat, default=None),
            power_w=max(power, default=None),
            reference_slowdown=reference_slowdown,
        )

    def _idle_reason(self, before: Counters, after: Counters) -> str | None:
        needed = after.cores if self._needed is None else min(self._needed, after.cores)
        return disturbance(difference(before, after), after.cores, needed) or self._gpu_reason()

    def _remember(self, load: Load) -> None:
        self._recent.append(load)
        while len(self._recent) > 1 and sum(each.seconds for each in list(self._recent)[1:]) >= WINDOW_S:
            self._recent.popleft()

    def _gpu_reason(self) -> str | None:
        if self._gpu is None:
            return None
        me = os.getpid()
        found = self._gpu.others({me, *descendants(me)})
        return sentence(found.busy) if found.known and found.busy else None

    @contextmanager
    def _sampling(self) -> Iterator[None]:
        """Read the GPU now and then while a block runs: between blocks it idles, and says so."""
        gpu = self._gpu
        if gpu is None:
            yield
            return
        over = threading.Event()

        def sample() -> None:
            while not over.wait(SAMPLE_S):
                self._readings.append(gpu.reading())

        thread = threading.Thread(target=sample, name="judge-gpu-readings", daemon=True)
        thread.start()
        try:
            yield
            self._readings.append(gpu.reading())
        finally:
            over.set()
            thread.join()


def unwatched(platform: str) -> Watch:
    """A watch that sees no other process: for decoders of tests, whose times are made up."""
    return Watch(platform, read=lambda: None)


def core_mhz() -> int | None:
    """Highest clock of the usable cores now, MHz; None where the system does not say."""
    found: list[float] = []
    for core in usable():
        try:
            found.append(int((CPU / f"cpu{core}" / "cpufreq" / "scaling_cur_freq").read_text()) / 1e3)
        except (OSError, ValueError):
            continue
    if not found:
        try:
            clock = psutil.cpu_freq()
        except (OSError, NotImplementedError, AttributeError):
            return None
        return round(clock.current) if clock else None
    return round(max(found))


def heat_events() -> int:
    """How often the usable cores were slowed for heat since boot, by their own count; 0 where they keep none."""
    events = 0
    for core in usable():
        for name in ("core_throttle_count", "package_throttle_count"):
            try:
                events += int((CPU / f"cpu{core}" / "thermal_throttle" / name).read_text())
            except (OSError, ValueError):
                continue
    return events
