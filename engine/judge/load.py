"""CPU time: of everything that ran on the usable cores, and of the judge's own process trees. Linux only.

The kernel counts a core's busy time in ticks of 10 ms (`/proc/stat`), a process's exactly; what is left after
subtracting the second from the first is foreign. Time of a process that ended moves to whoever reaped it, so a
tree's sum never falls, and a child that the judge has killed goes on counting as the judge's own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")
TICK_S = 1.0 / (os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100)


@dataclass(frozen=True)
class Quota:
    """A control group with a CPU limit that this process lives in: CPU seconds used by all its processes, seconds that
    they were held back by the limit, and the limit in cores."""

    cores: float
    used_s: float
    held_s: float


@dataclass(frozen=True)
class Counters:
    """CPU seconds since boot at one moment (`at`, monotonic seconds).

    `busy` and `steal` are of the `cores` usable cores: running anything, and taken away by a hypervisor. `own` is the
    judge and what it has reaped; `trees` maps each living direct child's pid to its whole tree.
    """

    at: float
    cores: int
    busy: float
    steal: float
    own: float
    trees: Mapping[int, float] = field(default_factory=dict)
    quota: Quota | None = None


@dataclass(frozen=True)
class Load:
    """What happened between two readings, in average cores over `seconds`.

    `foreign` is everything on the usable cores that is not the judge's or its children's, stolen time included;
    `steal` is that part of it. `group` is the foreign load inside a control group with a CPU limit, 0 without one,
    and `held` the average number of processes that the limit held back. `trees` is each child's own load by pid.
    """

    seconds: float
    foreign: float
    steal: float = 0.0
    group: float = 0.0
    held: float = 0.0
    trees: Mapping[int, float] = field(default_factory=dict)


def difference(before: Counters, after: Counters) -> Load:
    """The load between two readings. Coarse ticks may make it a little negative: cut off at 0."""
    seconds = max(after.at - before.at, 1e-9)
    trees = {pid: max(0.0, used - before.trees.get(pid, 0.0)) for pid, used in after.trees.items()}
    # A child that ended has moved to `own`, with what it had used before. Orphans that it left are nobody's.
    ended = sum(used for pid, used in before.trees.items() if pid not in after.trees)
    ours = max(0.0, after.own - before.own - ended) + sum(trees.values())
    steal = max(0.0, after.steal - before.steal)
    foreign = after.busy - before.busy + steal - ours
    group = held = 0.0
    if before.quota is not None and after.quota is not None:
        group = after.quota.used_s - before.quota.used_s - ours
        held = after.quota.held_s - before.quota.held_s
    return Load(
        seconds=seconds,
        foreign=max(0.0, foreign / seconds),
        steal=steal / seconds,
        group=max(0.0, group / seconds),
        held=max(0.0, held / seconds),
        trees={pid: used / seconds for pid, used in trees.items()},
    )


def total(loads: Iterable[Load]) -> Load:
    """Several stretches as one, weighted by their seconds. At least one."""
    each = list(loads)
    seconds = sum(load.seconds for load in each)

    def mean(name: str) -> float:
        return float(sum(getattr(load, name) * load.seconds for load in each) / seconds)

    return Load(seconds, mean("foreign"), mean("steal"), mean("group"), mean("held"))


def read_counters() -> Counters | None:
    """The counters now; None where this system does not offer them."""
    try:
        busy, steal, cores = parse_stat((PROC / "stat").read_text(), usable())
    except (OSError, ValueError, IndexError):
        return None
    me = os.getpid()
    trees = {child: sum(_process_seconds(pid) for pid in (child, *descendants(child))) for child in children(me)}
    own = time.process_time() + _reaped_seconds(me)
    return Counters(time.monotonic(), cores, busy, steal, own, trees, read_quota())


def usable() -> frozenset[int]:
    """Numbers of the logical cores that this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)
    return frozenset(affinity(0)) if affinity else frozenset(range(os.cpu_count() or 1))


def parse_stat(text: str, cores: frozenset[int]) -> tuple[float, float, int]:
    """Busy seconds, stolen seconds and number of `cores` listed in /proc/stat. Raises ValueError where none is.

    Columns (man 5 proc): user nice system idle iowait irq softirq steal guest guest_nice; guest is in user already.
    """
    busy = steal = 0.0
    listed = 0
    for line in text.splitlines():
        name, _, rest = line.partition(" ")
        if not (name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cores):
            continue
        columns = [int(value) * TICK_S for value in rest.split()] + [0.0] * 8
        user, nice, system, _idle, _iowait, irq, softirq, stolen = columns[:8]
        busy += user + nice + system + irq + softirq
        steal += stolen
        listed += 1
    if not listed:
        raise ValueError("no usable core is listed in /proc/stat")
    return busy, steal, listed


def children(pid: int) -> list[int]:
    """Direct children of a process, [] where it is gone."""
    found: list[int] = []
    try:
        for task in (PROC / str(pid) / "task").iterdir():
            found += [int(child) for child in (task / "children").read_text().split()]
    except FileNotFoundError:
        try:
            return [process.pid for process in psutil.Process(pid).children()]
        except psutil.NoSuchProcess:
            return []
    except (OSError, ValueError):
        return []
    return found


def descendants(pid: int) -> list[int]:
    """Children, their children, and so on."""
    found = children(pid)
    for child in found:
        found += children(child)
    return found


def _process_seconds(pid: int) -> float:
    """CPU seconds of a process, all its threads, ended ones too, and of the children that it has reaped."""
    try:
        # The kernel's clock of another process: ((~pid) << 3) | CPUCLOCK_SCHED, in nanoseconds (posix-timers.h).
        own = time.clock_gettime((~pid << 3) | 2)
    except OSError:
        own = 0.0
    ticks = _stat_ticks(pid)
    return max(own, (ticks[0] + ticks[1]) * TICK_S) + (ticks[2] + ticks[3]) * TICK_S


def _reaped_seconds(pid: int) -> float:
    return sum(_stat_ticks(pid)[2:]) * TICK_S


def _stat_ticks(pid: int) -> tuple[int, int, int, int]:
    """utime, stime, cutime, cstime of /proc/PID/stat; zeros where the process is gone."""
    try:
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        return int(fields[11]), int(fields[12]), int(fields[13]), int(fields[14])
    except (OSError, ValueError, IndexError):
        return 0, 0, 0, 0


def read_quota() -> Quota | None:
    """The nearest control group above this process that has a CPU limit; None where there is none."""
    try:
        lines = (PROC / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mounts = [CGROUP] if not controllers else [CGROUP / controllers, CGROUP / "cpu,cpuacct", CGROUP / "cpu"]
        for mount in mounts:
            inside = mount / path.lstrip("/")
            for folder in (inside, *inside.parents):
                quota = _quota_of(folder)
                if quota is not None:
                    return quota
                if folder == mount:
                    break
    return None


def _quota_of(folder: Path) -> Quota | None:
    """cgroup v2: cpu.max and cpu.stat; v1: cpu.cfs_quota_us, cpuacct.usage and cpu.stat."""
    try:
        if (folder / "cpu.max").is_file():
            limit, period = (folder / "cpu.max").read_text().split()
            used_name, used_unit, held_name, held_unit = "usage_usec", 1e-6, "throttled_usec", 1e-6
        else:
            limit = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text()
            used_name, used_unit, held_name, held_unit = "", 1e-9, "throttled_time", 1e-9
        if limit in ("max", "-1"):
            return None
        stat = dict(line.split() for line in (folder / "cpu.stat").read_text().splitlines())
        used = int(stat[used_name]) if used_name else int((folder / "cpuacct.usage").read_text())
        return Quota(int(limit) / int(period), used * used_unit, int(stat.get(held_name, 0)) * held_unit)
    except (OSError, ValueError, KeyError):
        return None
