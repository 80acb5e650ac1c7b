"""The lookout of a sandbox for which no cgroup can be had: a process of its own that kills a tree at its limits.

Run as `python -m engine.judge.lookout`. It is no thread of the judge, since a fork bomb's thousands take the cores from
whichever of the judge's threads holds the interpreter's lock, and no priority of one thread would get it back. Here
nothing computes, and it stands in front of all others where the system allows it. Memory is looked at in a second
thread: to read what processes share the kernel takes locks that a tree which forks holds for seconds on end, and the
count of processes, which takes none, must not wait for it.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import socket
import threading
import time
from contextlib import suppress
from typing import NamedTuple

from engine.judge import tree

LOOK_SECONDS = 0.25
GLANCE_SECONDS = 0.01
"""Between two glances at how many threads the whole system has: a fork bomb takes no longer to be dangerous."""
READY, PAUSE, GO_ON, HUNG_UP = b"ready", b"pause", b"go on", b"hung up"


class Bounds(NamedTuple):
    """What the tree may hold: bytes of memory, and processes and threads in all. 0: not looked at."""

    memory: int
    tasks: int


class Lookout:
    """Looks at the tree of `root`, whose pidfd is `root_file`, for the judge at the other end of a SOCK_SEQPACKET
    socket."""

    def __init__(self, root: int, root_file: int, bounds: Bounds, judge: socket.socket) -> None:
        self._root = root
        self._root_file = root_file
        self._bounds = bounds
        self._judge = judge
        self._looking = threading.Event()

    def watch(self) -> None:
        """Look until the judge hangs up. Between PAUSE and GO_ON nothing is looked at."""
        tasks = tree.tasks_of_all()
        next_look = 0.0
        self._looking.set()
        if self._bounds.memory:
            threading.Thread(target=self._watch_memory, daemon=True).start()
        self._judge.send(READY)
        while True:
            seconds = GLANCE_SECONDS if self._bounds.tasks and self._looking.is_set() else None
            if message := _heard(self._judge, seconds):
                if message == HUNG_UP:
                    return
                (self._looking.clear if message == PAUSE else self._looking.set)()
                continue
            now = time.monotonic()
            if now < next_look and tree.tasks_of_all() <= tasks + self._bounds.tasks:
                continue
            next_look = now + LOOK_SECONDS
            if tree.tasks(self._root) > self._bounds.tasks:
                self._end(f"it reached its limit of {self._bounds.tasks} processes and threads")
                return

    def _watch_memory(self) -> None:
        while self._looking.wait():
            if tree.holds_more(self._root, self._bounds.memory):
                self._end(f"it needed more than its {self._bounds.memory / (1 << 30):.1f} GiB of memory")
                return
            time.sleep(LOOK_SECONDS)

    def _end(self, reason: str) -> None:
        """Tell the judge why, and kill the tree. Where the judge hears several reasons, the first one killed it."""
        with suppress(OSError):  # the judge has just hung up
            self._judge.send(reason.encode())
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._root_file, signal.SIGKILL)


def _heard(judge: socket.socket, seconds: float | None) -> bytes:
    """What the judge says within `seconds` (None: however long it takes); b"" where it says nothing."""
    ready, _, _ = select.select([judge], [], [], seconds)
    return (judge.recv(64) or HUNG_UP) if ready else b""


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("root", "root-file", "judge", "memory", "tasks"):
        parser.add_argument(f"--{name}", type=int, required=True)
    told = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the judge's to handle; it hangs up
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    judge = socket.socket(fileno=told.judge)
    Lookout(told.root, told.root_file, Bounds(told.memory, told.tasks), judge).watch()


if __name__ == "__main__":
    main()
