"""The judge's side of `lookout.py`: starts the process, pauses it, and hears what it saw."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import suppress

from engine.errors import ChildError
from engine.judge.lookout import GO_ON, PAUSE, READY, Bounds
from engine.judge.spawn import child_environment, spawn

READY_SECONDS = 20.0


class TreeWatch:
    """A lookout that watches one tree. Not for several threads."""

    def __init__(self, root: int, root_file: int, bounds: Bounds, output: int) -> None:
        """Returns once it looks. `root_file` is the pidfd of `root`; `output` takes what the lookout prints, which is
        nothing unless it fails. Raises OSError where it cannot be started."""
        self._heard, self._over = "", False
        self._socket, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-P", "-S", "-m", "engine.judge.lookout"]
        numbers = {
            "root": root, "root-file": root_file, "judge": its.fileno(), "memory": bounds.memory, "tasks": bounds.tasks,
        }  # fmt: skip
        for name, number in numbers.items():
            command += [f"--{name}", str(number)]
        with its:
            self._process = spawn(command, child_environment(os.environ), output, (root_file, its.fileno()))
        self._socket.settimeout(READY_SECONDS)
        try:
            if self._socket.recv(64) != READY:
                raise OSError("the lookout did not start")
        except OSError:
            self.end()
            raise
        self._socket.setblocking(False)

    def pause(self) -> None:
        """Look no more until `go_on`: the tree stands still, and looking would take time from who is measured."""
        with suppress(OSError):  # it has found something and ended: `go_on` tells
            self._socket.send(PAUSE)

    def go_on(self) -> None:
        """Raises ChildError("crashed") where nothing watches the tree any more."""
        try:
            self._socket.send(GO_ON)
        except OSError:
            raise ChildError("crashed", self.reason() or "could not be watched any more") from None

    def reason(self) -> str:
        """The limit for which it killed the tree, or ""."""
        if not self._heard and not self._over:
            with suppress(OSError):
                self._heard = self._socket.recv(1024).decode()
        return self._heard

    def end(self) -> None:
        """Hang up, which ends it. Idempotent."""
        if self._over:
            return
        self.reason()
        self._over = True
        self._socket.close()
        try:
            self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
