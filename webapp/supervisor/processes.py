"""The processes that a supervisor starts: kept running, and stopped to the last one, theirs included.

Each child is started through `launch.py`, in a session of its own (a Ctrl-C in the terminal reaches the supervisor
only), and dies with the supervisor even where that is killed (Linux). The supervisor adopts what its children leave
behind (subreaper), so nothing that was started here can hide from `stop`.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import psutil

from engine.paths import REPOSITORY

LAUNCH = Path(__file__).with_name("launch.py")
PR_SET_CHILD_SUBREAPER = 36
LONGEST_PAUSE = 30.0
STEADY_SECONDS = 60.0
LOG_BYTES = 5 * 2**20
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Spec:
    """One process to keep running. `rank` orders the stop: lower ones first. `grace` is in seconds."""

    name: str
    argv: tuple[str, ...]
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)
    nice: int = 0
    rank: int = 0
    grace: float = 8.0
    death: signal.Signals = signal.SIGKILL  # sent by the kernel when the supervisor dies
    fds: tuple[int, ...] = ()


class Process:
    """One running, or about to be restarted, child."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.popen: subprocess.Popen[bytes] | None = None
        self.restarts = 0
        self._pause = 0.5
        self._started = 0.0
        self._due = 0.0

    @property
    def running(self) -> bool:
        return self.popen is not None and self.popen.poll() is None

    def start(self) -> None:
        spec = self.spec
        tie = ["--nice", str(spec.nice), "--death", str(int(spec.death)), "--parent", str(os.getpid())]
        with _log_file(spec.log) as output:
            self.popen = subprocess.Popen(
                [sys.executable, "-I", "-S", str(LAUNCH), *tie, *spec.argv],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **spec.env},
                cwd=REPOSITORY,
                pass_fds=spec.fds,
                start_new_session=True,
            )
        self._started = time.monotonic()

    def look(self) -> str | None:
        """Restart the process where it has ended, after a pause that grows; what to tell, where there is news."""
        now = time.monotonic()
        if self.popen is None:
            if now >= self._due:
                self.start()
                self.restarts += 1
            return None
        code = self.popen.poll()
        if code is None:
            return None
        if now - self._started > STEADY_SECONDS:
            self._pause = 0.5
        pause, self._pause = self._pause, min(LONGEST_PAUSE, 2 * self._pause)
        self.popen, self._due = None, now + pause
        return f"{self.spec.name} ended ({_ending(code)}) and starts again in {pause:g} s; its log is {self.spec.log}"


class Processes:
    """All children of this supervisor. Use from the main thread: the kernel ties a child to the thread that made it."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._all: list[Process] = []
        _become_subreaper()

    def __len__(self) -> int:
        return len(self._all)

    def start(self, spec: Spec) -> Process:
        process = Process(spec)
        self._all.append(process)
        process.start()
        return process

    def look(self) -> None:
        """Restart what has ended, and bury what children left behind. Call it a few times a second."""
        for process in self._all:
            news = process.look()
            if news:
                self._say(news)
        self._bury_orphans()

    def stop(self, *, hurry: Callable[[], bool] = lambda: False) -> None:
        """End every process, rank by rank: politely, then by force when its grace is over or `hurry` says so."""
        for rank in sorted({process.spec.rank for process in self._all}):
            ending = [p for p in self._all if p.spec.rank == rank and p.running]
            for process in ending:
                assert process.popen is not None
                process.popen.terminate()
            begun = time.monotonic()
            while any(p.running and time.monotonic() - begun < p.spec.grace for p in ending) and not hurry():
                time.sleep(0.05)
            for process in ending:
                if process.running and process.popen is not None:
                    _kill_tree(process.popen.pid)
                    process.popen.wait()
        self._all.clear()
        self._kill_descendants()

    def _own(self) -> set[int]:
        return {p.popen.pid for p in self._all if p.popen is not None}

    def _bury_orphans(self) -> None:
        own = self._own()
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess, ChildProcessError):
                if child.pid not in own and child.status() == psutil.STATUS_ZOMBIE:
                    os.waitpid(child.pid, os.WNOHANG)

    def _kill_descendants(self) -> None:
        """What is left of our children's children: adopted by us, so it is ours to end."""
        me = psutil.Process()
        while left := me.children(recursive=True):
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            for child in me.children():
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(child.pid, 0)


def _kill_tree(pid: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def _become_subreaper() -> None:
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl")


def _log_file(path: Path) -> BinaryIO:
    """The log at `path`, opened to append; one that has grown large is put aside first."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    if path.exists() and path.stat().st_size > LOG_BYTES:
        path.replace(path.with_suffix(".old"))
    return path.open("ab")


def _ending(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
