"""A child process as the judge sees it: start, ask, stop between questions, kill with everything it started.

A child runs only while it owes an answer. Between questions its whole process group is stopped (SIGSTOP), so
that whatever it left running cannot slow the other side of a comparison or do work on time that nobody counts.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import signal
import subprocess
import sys
import termios
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from engine.errors import ChildError, UserError
from engine.judge import protocol
from engine.judge.childlog import Pump, tail
from engine.judge.confinement import Confinement
from engine.judge.protocol import Closed, Invalid
from engine.judge.sandbox import Holds, NotSetUp, Sandbox
from engine.judge.spawn import child_command, child_environment, spawn


class ChildFailed(ChildError):
    """A child crashed, hung or broke the protocol, and has been killed. `role` says which one."""

    def __init__(self, kind: str, reason: str, role: str) -> None:
        super().__init__(kind, reason)
        self.role = role


@dataclass(frozen=True)
class Answer:
    """A checked frame's payload, and the seconds from asking to its last byte on the judge's clock."""

    payload: dict[str, Any]
    seconds: float


class Group:
    """A trusted child: one process in a session of its own, with what it starts."""

    def __init__(self, questions: int, answers: int, output: object) -> None:
        self.process = spawn(
            child_command(questions, answers, os.getpid()),
            child_environment(os.environ),
            output,
            (questions, answers),
        )

    def stop(self) -> None:
        """Stop the group and wait until its leader really stands still (or is gone)."""
        self._signal(signal.SIGSTOP)
        if self.process.returncode is None and hasattr(os, "waitid"):
            os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the process, its group and every descendant that can still be found, and reap it."""
        descendants = _descendants(self.process.pid)
        self._signal(signal.SIGKILL)
        for process in descendants:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.process.wait()

    def why(self) -> str:
        """The limit that it ran into, in words: such a child has none."""
        return ""

    def _signal(self, number: int) -> None:
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            return


class Child:
    """One child process. `role` names it in sentences ("candidate"); `log` gets its standard output and error. With
    a `confinement` it runs in a sandbox, in which the whole tree stands still between questions.

    Every failure raises ChildFailed ("crashed", "timed out", "invalid") with the reason in words and the last log
    lines, after the whole process tree has been killed. A sandbox that cannot be had or made raises UserError.
    """

    def __init__(self, role: str, log: Path, confinement: Confinement | None = None) -> None:
        self.role = role
        self.log = log
        self.confinement = confinement
        self._pending: int | None = None
        self._answered = False  # it did, once: it had been set up
        self._sent = 0.0
        self._pump: Pump | None = None
        self.log.parent.mkdir(parents=True, exist_ok=True)
        question_read, self._questions = os.pipe()
        self._answers, answer_write = os.pipe()
        try:
            self._body = self._start(question_read, answer_write)
        except BaseException:
            os.close(self._questions)
            os.close(self._answers)
            raise
        finally:
            os.close(question_read)
            os.close(answer_write)
        os.set_blocking(self._questions, False)
        os.set_blocking(self._answers, False)
        self._open = True

    def _start(self, question_read: int, answer_write: int) -> Group | Sandbox:
        if self.confinement is None:
            with self.log.open("ab") as log:
                return Group(question_read, answer_write, log)
        pump = Pump(self.log, self.confinement.limits.log_bytes)
        try:
            body = Sandbox(self.confinement, question_read, answer_write, pump.write_end)
        except NotSetUp:
            pump.start()
            pump.join()
            raise self._not_set_up() from None
        except BaseException:
            pump.abandon()
            raise
        pump.start()
        self._pump = pump
        return body

    def _not_set_up(self) -> UserError:
        return UserError(f"The sandbox of the {self.role} could not be set up: {self.log_tail()}", code="sandbox")

    @property
    def holds(self) -> Holds | None:
        """What keeps it confined; None for a child that is not."""
        return self._body.holds if isinstance(self._body, Sandbox) else None

    @property
    def pid(self) -> int:
        return self._body.process.pid

    @property
    def alive(self) -> bool:
        return self._open and self._body.process.poll() is None

    @property
    def owes(self) -> bool:
        """Whether it was asked something that it has not answered."""
        return self._open and self._pending is not None

    def ask(self, question: dict[str, Any], timeout: float) -> Answer:
        """Ask and wait for the answer, at most `timeout` seconds; the child is stopped again afterwards."""
        self._wake()
        start = time.perf_counter()
        self.send(question, timeout)
        payload, end = self._receive(timeout)
        return Answer(payload, end - start)

    def send(self, question: dict[str, Any], timeout: float = 10.0) -> None:
        """Ask without waiting; `receive` collects the answer."""
        if not self._open:
            raise ChildFailed("crashed", f"The {self.role} is not running.", self.role)
        if self._pending is not None:
            raise RuntimeError(f"the {self.role} still owes an answer")
        self._sent = time.monotonic()
        try:
            if self._unread_bytes():
                raise Invalid("wrote an answer that was not asked for")
            self._pending = secrets.randbelow(1 << 53)
            if self.confinement is not None:
                question = self.confinement.translate(question)
            frame = protocol.encode_frame({"request": self._pending, **question})
            self._body.resume()
            protocol.write_frame(self._questions, frame, self._sent + timeout)
        except (ChildError, Closed) as error:
            raise self._failed(error, timeout) from None
        except BaseException:
            self.kill()  # an exchange broken in the middle cannot be taken up again
            raise

    def receive(self, timeout: float) -> dict[str, Any]:
        """The answer to what was sent last, within `timeout` seconds of sending it."""
        return self._receive(timeout)[0]

    def _receive(self, timeout: float) -> tuple[dict[str, Any], float]:
        if self._pending is None:
            raise RuntimeError(f"the {self.role} was not asked anything")
        if not self._open:  # it failed at an answer that it owed
            raise ChildFailed("crashed", f"The {self.role} is not running.", self.role)
        try:
            answer = protocol.read_frame(self._answers, self._sent + timeout)
            end = time.perf_counter()
            payload = protocol.unwrap(answer, self._pending)
            self._body.stop()
        except (ChildError, Closed) as error:
            raise self._failed(error, timeout) from None
        except BaseException:
            self.kill()
            raise
        self._pending = None
        self._answered = True
        return payload, end

    def refuse(self, error: ChildError) -> ChildFailed:
        """Kill the child for an answer whose content broke the protocol; returns the error to raise."""
        return self._failed(error)

    def kill(self) -> None:
        """Kill the process and everything that it started, and reap it. Idempotent."""
        if not self._open:
            return
        self._open = False
        self._body.kill()
        os.close(self._questions)
        os.close(self._answers)
        if self._pump is not None:
            self._pump.join()

    def log_tail(self) -> str:
        """The last lines that the child wrote, without control characters, or ""."""
        return tail(self.log)

    def _wake(self) -> None:
        try:
            if self._open:
                self._body.resume()
        except ChildError as error:
            raise self._failed(error) from None

    def _unread_bytes(self) -> int:
        return int.from_bytes(fcntl.ioctl(self._answers, termios.FIONREAD, bytes(4)), sys.byteorder)

    def _failed(self, error: ChildError | Closed, timeout: float = 0.0) -> ChildFailed:
        """Kill everything and say in words what happened, with the last log lines."""
        if isinstance(error, Closed):
            kind, sentence = "crashed", f"The {self.role} {self._how_it_ended()}"
        elif error.kind == "crashed":
            kind, sentence = error.kind, f"The {self.role} failed: {error.reason}"
        elif error.kind == "timed out":
            kind, sentence = error.kind, f"The {self.role} {error.reason} ({timeout:.0f} s)"
        else:
            kind, sentence = error.kind, f"The {self.role} {error.reason}"
        self.kill()
        why, lines = self._body.why(), self.log_tail()
        if isinstance(self._body, Sandbox):
            if isinstance(error, Closed) and not self._answered and not self._body.set_up:
                raise self._not_set_up()
            kind = "timed out" if self._body.overdue else kind
        if why:
            sentence += f": {why}."
        elif not isinstance(error, ChildError) or error.kind != "crashed":
            sentence += "."
        return ChildFailed(kind, f"{sentence}\nLast log lines:\n{lines}" if lines else sentence, self.role)

    def _how_it_ended(self) -> str:
        try:
            status = self._body.process.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            return "closed its pipe"
        if isinstance(self._body, Sandbox) and status > 128:
            status = 128 - status  # bwrap tells a signal as a shell does
        if status >= 0:
            return f"exited with status {status}"
        likely = " (often: out of memory)" if status == -signal.SIGKILL and not self._body.why() else ""
        return f"was killed by {_signal_name(-status)}{likely}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no names, and an exit status may only look like a signal
        return f"signal {number}"


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
