"""The lookout of a sandbox for which no cgroup can be had: a process of its own that kills a tree at its limits.

Run as `python -m engine.judge.lookout`. It is no thread of the judge, since a fork bomb's thousands take the cores from
whichever of the judge's threads holds the interpreter's lock, and no priority of one thread would get it back. Here
there is one thread alone, in front of all others where the system allows it.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from engine.judge import tree

LOOK_SECONDS = 0.25
GLANCE_SECONDS = 0.01
"""Between two glances at how many threads the whole system has: a fork bomb takes no longer to be dangerous."""
READY, PAUSE, GO_ON = b"ready", b"pause", b"go on"


class Bounds(NamedTuple):
    """What the tree may hold: bytes of memory, and processes and threads in all. 0: not looked at."""

    memory: int
    tasks: int


def breaches(root: int, bounds: Bounds) -> Iterator[str]:
    """The limits that the tree of `root` has run into, in words."""
    if bounds.tasks and tree.tasks(root) > bounds.tasks:
        yield f"it reached its limit of {bounds.tasks} processes and threads"
    if bounds.memory and tree.holds_more(root, bounds.memory):
        yield f"it needed more than its {bounds.memory / (1 << 30):.1f} GiB of memory"


def watch(root: int, root_file: int, bounds: Bounds, judge: socket.socket) -> None:
    """Look until the judge hangs up, or until a limit is reached: then tell the judge which, and kill `root`, whose
    pidfd is `root_file`. `judge` is a SOCK_SEQPACKET socket; between PAUSE and GO_ON nothing is looked at."""
    tasks = tree.tasks_of_all()
    next_look = 0.0
    judge.send(READY)
    while True:
        judge.settimeout(GLANCE_SECONDS)
        with suppress(TimeoutError):
            message = judge.recv(64)
            if message == PAUSE:
                judge.settimeout(None)
                message = judge.recv(64)
            if not message:
                return
        now = time.monotonic()
        if now < next_look and not (bounds.tasks and tree.tasks_of_all() > tasks + bounds.tasks):
            continue
        next_look = now + LOOK_SECONDS
        if reason := next(breaches(root, bounds), ""):
            with suppress(OSError):  # the judge has just hung up
                judge.send(reason.encode())
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(root_file, signal.SIGKILL)
            return


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("root", "root-file", "judge", "memory", "tasks"):
        parser.add_argument(f"--{name}", type=int, required=True)
    told = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the judge's to handle; it hangs up
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    watch(told.root, told.root_file, Bounds(told.memory, told.tasks), socket.socket(fileno=told.judge))


if __name__ == "__main__":
    main()
