"""The lookout: which limits it sees, that nothing the tree does keeps it from looking, and that it is missed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from engine.errors import ChildError
from engine.judge import lookout, tree
from engine.judge.lookout import Bounds, Lookout
from engine.judge.treewatch import TreeWatch

FORKS = """
import os, signal, sys
for command in sys.stdin:
    for _ in range(int(command)):
        if not os.fork():
            signal.pause()
"""
ALLOCATES = """
import signal, sys
held = [b"x" * int(command) for command in sys.stdin.readline().split()]
signal.pause()
"""
ROOM = 1 << 40


class Root:
    """A process at the head of a tree, which does what it is told, and its pidfd."""

    def __init__(self, process: subprocess.Popen[bytes], file: int) -> None:
        self.process = process
        self.file = file

    def tell(self, count: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"%d\n" % count)
        self.process.stdin.flush()


@contextmanager
def running(script: str) -> Iterator[Root]:
    process = subprocess.Popen([sys.executable, "-I", "-S", "-c", script], stdin=subprocess.PIPE, process_group=0)
    file = os.pidfd_open(process.pid)
    try:
        yield Root(process, file)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdin.close()
        os.close(file)


@pytest.fixture
def forking() -> Iterator[Root]:
    with running(FORKS) as root:
        yield root


@pytest.fixture
def watched(forking: Root) -> Iterator[TreeWatch]:
    watch = TreeWatch(forking.process.pid, forking.file, Bounds(0, 5), sys.stderr.fileno())
    yield watch
    watch.end()


def killed(root: Root) -> bool:
    return root.process.wait(timeout=30) == -signal.SIGKILL


def test_processes_are_counted_while_a_look_at_memory_blocks(forking: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel makes whoever reads a forking process's memory wait for it."""
    looked, over = threading.Event(), threading.Event()

    def blocks(root: int, limit: int) -> bool:
        looked.set()
        over.wait()
        return False

    monkeypatch.setattr(tree, "holds_more", blocks)
    judge, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    judge.settimeout(30)
    watch = threading.Thread(target=Lookout(forking.process.pid, forking.file, Bounds(ROOM, 5), its).watch)
    with judge, its:
        watch.start()
        try:
            assert judge.recv(64) == lookout.READY
            assert looked.wait(30)
            forking.tell(10)
            assert judge.recv(200) == b"it reached its limit of 5 processes and threads"
            assert killed(forking)
        finally:
            judge.shutdown(socket.SHUT_RDWR)
            over.set()
            watch.join()


def test_memory_beyond_the_limit_is_seen() -> None:
    with running(ALLOCATES) as root:
        watch = TreeWatch(root.process.pid, root.file, Bounds(64 << 20, 1000), sys.stderr.fileno())
        root.tell(100 << 20)
        assert killed(root)
        watch.end()
        assert watch.reason() == "it needed more than its 0.1 GiB of memory"


def test_a_paused_lookout_looks_again(forking: Root, watched: TreeWatch) -> None:
    watched.pause()
    forking.tell(10)
    watched.go_on()
    assert killed(forking)
    watched.end()
    assert watched.reason() == "it reached its limit of 5 processes and threads"


def test_a_tree_that_nothing_watches_does_not_go_on(watched: TreeWatch) -> None:
    watched.pause()
    watched._process.kill()
    watched._process.wait()
    with pytest.raises(ChildError, match="could not be watched any more") as told:
        watched.go_on()
    assert told.value.kind == "crashed"


def test_the_limit_is_told_to_who_goes_on_too_late(forking: Root, watched: TreeWatch) -> None:
    forking.tell(10)
    assert killed(forking)
    watched._process.wait()
    with pytest.raises(ChildError, match="it reached its limit of 5 processes and threads"):
        watched.go_on()


def test_a_lookout_ends_with_its_judge(watched: TreeWatch) -> None:
    watched.end()
    assert watched._process.returncode == 0
    watched.end()
