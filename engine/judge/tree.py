"""A process tree by its root's process id: stop all of it with signals, and measure what it uses.

For where no cgroup can be had. The root is the init of a process namespace, so nothing can leave the tree. Fields of
/proc: man proc(5). Written for speed, since there may be thousands of processes when it matters.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ChildError

_STILL = "TtZX"  # stopped, stopped by a tracer, zombie, dead
_TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Member:
    """A process of the tree. `started` (clock ticks since boot) tells it from a later one of the same number."""

    pid: int
    started: int


@dataclass(frozen=True)
class _Seen:
    member: Member
    parent: int
    state: str
    threads: int


def _look(root: int) -> list[_Seen]:
    """The root and every descendant that is there at this moment."""
    seen = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - names alone, fast
        if name.isdigit() and (process := _read(int(name))) is not None:
            seen[process.member.pid] = process
    below: dict[int, list[int]] = {}
    for pid, process in seen.items():
        below.setdefault(process.parent, []).append(pid)
    found, waiting = [], [root] if root in seen else []
    while waiting:
        pid = waiting.pop()
        found.append(seen[pid])
        waiting += below.get(pid, ())
    return found


def _read(pid: int) -> _Seen | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 - fast
            fields = file.read().rpartition(b") ")[2].split()
        return _Seen(Member(pid, int(fields[19])), int(fields[1]), fields[0].decode(), int(fields[17]))
    except (OSError, IndexError):
        return None


def members(root: int) -> set[Member]:
    return {seen.member for seen in _look(root)}


def stop(root: int, seconds: float = 2.0) -> None:
    """SIGSTOP to all members until two looks in a row find the same ones and none that runs. A process that forks and
    ends faster than it can be looked at leaves a trail, so the looks differ: raises ChildError("invalid") for one that
    does not come to a stand. Only a look that found all of them still counts as the first of the two, since a root that
    runs reaps the trail."""
    deadline = time.monotonic() + seconds
    before: set[Member] | None = None
    while True:
        look = _look(root)
        found = {seen.member for seen in look}
        running = [seen.member.pid for seen in look if seen.state not in _STILL]
        if not running and found == before:
            return
        if time.monotonic() > deadline:
            raise ChildError("invalid", "did not stand still when it was stopped")
        _send(running, signal.SIGSTOP)
        before = None if running else found


def resume(root: int) -> None:
    """SIGCONT to all members. They have stood still, so none is missed."""
    _send((member.pid for member in members(root)), signal.SIGCONT)


def cpu_seconds(root: int) -> float:
    """Processor time of all threads that live in the tree: exact to nanoseconds, or to a clock tick where the kernel
    keeps no schedstat."""
    return sum(_cpu_seconds(member.pid) for member in members(root))


def holds_more(root: int, limit: int) -> bool:
    """Whether the tree holds more than `limit` bytes of memory that is no file's: anonymous and shared. What several
    processes share is counted once, which takes longer to find out and is done only where it decides."""
    found = members(root)
    return _memory(found, "status", ("RssAnon:", "RssShmem:")) > limit and (
        _memory(found, "smaps_rollup", ("Pss_Anon:", "Pss_Shmem:")) > limit
    )


def tasks(root: int) -> int:
    """Threads of the tree."""
    return sum(seen.threads for seen in _look(root))


def tasks_of_all() -> int:
    """Threads of the whole system, at the cost of one small file."""
    return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[2])


def _memory(found: Iterable[Member], file: str, names: tuple[str, ...]) -> int:
    total = 0
    for member in found:
        try:
            lines = Path("/proc", str(member.pid), file).read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith(names))
    return total


def _send(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _cpu_seconds(pid: int) -> float:
    with suppress(OSError, ValueError, IndexError):
        if files := list(Path("/proc", str(pid), "task").glob("*/schedstat")):
            return sum(int(file.read_text().split()[0]) for file in files) / 1e9
        fields = Path("/proc", str(pid), "stat").read_bytes().rpartition(b") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICK
    return 0.0
