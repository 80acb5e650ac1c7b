"""Limits that the kernel keeps over a whole process tree: cgroups, version 2 and, for memory and counts, version 1.

Groups are made under the judge's own (or, where version 2 forbids limits there, under the nearest one above it that
has them), named `specpilot-PID-NUMBER`. Every step may be refused on a given machine; what then holds is in `holds`.
Files and rules: kernel documentation, admin-guide/cgroup-v2 and cgroup-v1.
"""

from __future__ import annotations

import itertools
import os
import select
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Ability = Literal["memory", "processes", "freeze"]
PREFIX = "specpilot-"
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Hierarchy:
    """One mounted hierarchy. `own` is the judge's group in it, `top` the mount point; `controllers` those of version 1,
    empty for version 2."""

    top: Path
    own: Path
    controllers: frozenset[str] = frozenset()


def hierarchies() -> list[Hierarchy]:
    """What is mounted here; none on a system without cgroups."""
    try:
        return parse_hierarchies(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text())
    except OSError:
        return []


def parse_hierarchies(mountinfo: str, membership: str) -> list[Hierarchy]:
    """Hierarchies from the texts of /proc/self/mountinfo and /proc/self/cgroup."""
    groups: dict[str, str] = {}
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        groups.update(dict.fromkeys(controllers.split(","), path))  # version 2 has the empty name
    found = []
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, (kind, _, *options) = before.split(), after.split()
        if kind not in ("cgroup", "cgroup2"):
            continue
        names = frozenset(options[0].split(",")) & groups.keys() if kind == "cgroup" else frozenset()
        group = groups.get(next(iter(names)) if names else "")
        root, top = fields[3], Path(fields[4])
        if (kind == "cgroup" and not names) or group is None or not Path(group).is_relative_to(root) or ".." in group:
            continue
        found.append(Hierarchy(top, top / Path(group).relative_to(root), names))
    return found


class Cgroup:
    """Groups that hold one process and all that it will start. `holds` says which limits are kept by them."""

    def __init__(self) -> None:
        self._folders: dict[Ability, Path] = {}

    def take(self, pid: int, memory_bytes: int, processes: int) -> None:
        """Make the groups and move `pid` in. `memory_bytes` is for anonymous memory, tmpfs files and page cache
        together, without swap; `processes` counts threads too."""
        name = f"{PREFIX}{os.getpid()}-{next(_numbers)}"
        limits = {
            "memory.max": str(memory_bytes),
            "memory.swap.max": "0",
            "memory.oom.group": "1",
            "pids.max": str(processes),
            "memory.limit_in_bytes": str(memory_bytes),
            "memory.memsw.limit_in_bytes": str(memory_bytes),
        }
        for hierarchy in hierarchies():
            best: dict[Ability, Path] = {}
            for base in _bases(hierarchy):
                _sweep(base)
                made = _make(base / name, hierarchy, limits, pid)  # which moves `pid` out of an earlier one
                if len(made) <= len(best):
                    if best:
                        _write(next(iter(best.values())) / "cgroup.procs", str(pid))
                    _remove(base / name)
                    continue
                for folder in set(best.values()):
                    _remove(folder)
                best = made
                if {"memory", "processes"} <= made.keys() | self._folders.keys():
                    break
            self._folders |= {ability: folder for ability, folder in best.items() if ability not in self._folders}

    @property
    def holds(self) -> frozenset[Ability]:
        return frozenset(self._folders)

    def freeze(self, seconds: float = 10.0) -> bool:
        """Stop everything in the group, also against SIGCONT; False where that did not come about in time."""
        folder = self._folders["freeze"]
        (folder / "cgroup.freeze").write_text("1")
        deadline = time.monotonic() + seconds
        with (folder / "cgroup.events").open() as events:
            poller = select.poll()
            poller.register(events, select.POLLPRI)
            while "frozen 1" not in events.read():
                if time.monotonic() > deadline:
                    return False
                poller.poll(1)  # the kernel holds notices back for up to 10 ms
                events.seek(0)
        return True

    def thaw(self) -> None:
        (self._folders["freeze"] / "cgroup.freeze").write_text("0")

    def memory_ran_out(self) -> bool:
        """Whether the kernel killed a process of the group for its memory limit."""
        folder = self._folders.get("memory")
        files = () if folder is None else (folder / "memory.events", folder / "memory.oom_control")
        return any(_counter(file, "oom_kill") > 0 for file in files)

    def processes_ran_out(self) -> bool:
        """Whether a fork was refused for the limit of processes."""
        folder = self._folders.get("processes")
        return folder is not None and _counter(folder / "pids.events", "max") > 0

    def remove(self) -> None:
        """Remove the groups; their processes must be dead."""
        for folder in set(self._folders.values()):
            deadline = time.monotonic() + 2.0
            while not _remove(folder) and time.monotonic() < deadline:
                time.sleep(0.01)  # the kernel lets the last members go a moment after they are reaped
        self._folders = {}


def _bases(hierarchy: Hierarchy) -> Iterator[Path]:
    """Groups under which a new one may be made, nearest first. In version 2 a group that holds processes cannot limit
    those below it, unless it is the root."""
    yield hierarchy.own
    if not hierarchy.controllers:
        yield from (folder for folder in hierarchy.own.parents if folder.is_relative_to(hierarchy.top))


def _make(folder: Path, hierarchy: Hierarchy, limits: dict[str, str], pid: int) -> dict[Ability, Path]:
    """A group with those of `limits` that it knows, and with `pid` in it; what it can hold."""
    if hierarchy.controllers and not hierarchy.controllers & {"memory", "pids"}:
        return {}
    try:
        folder.mkdir()
        if not hierarchy.controllers and not (folder / "memory.max").exists():
            _write(folder.parent / "cgroup.subtree_control", "+memory +pids")
        kept = {name for name, value in limits.items() if (folder / name).exists() and _write(folder / name, value)}
        (folder / "cgroup.procs").write_text(str(pid))
    except OSError:
        _remove(folder)
        return {}
    abilities: dict[Ability, Path] = {}
    if {"memory.max", "memory.limit_in_bytes"} & kept:
        abilities["memory"] = folder
    if "pids.max" in kept:
        abilities["processes"] = folder
    if (folder / "cgroup.freeze").exists():
        abilities["freeze"] = folder
    return abilities


def _sweep(base: Path) -> None:
    """Remove what judges left here that were killed; their children died with them."""
    for folder in base.glob(f"{PREFIX}*-*"):
        pid = folder.name.removeprefix(PREFIX).split("-")[0]
        if pid.isdigit() and not Path("/proc", pid).exists():
            _remove(folder)


def _write(file: Path, text: str) -> bool:
    try:
        file.write_text(text)
    except OSError:
        return False
    return True


def _remove(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _counter(file: Path, name: str) -> int:
    try:
        rows = dict(line.split() for line in file.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(rows.get(name, "0"))
