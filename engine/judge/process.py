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
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from engine.errors import ChildError
from engine.judge import protocol
from engine.judge.protocol import Closed, Invalid
from engine.paths import REPOSITORY

PASSED_ON = (
    "PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "SPECPILOT_DATA",
    "SPECPILOT_DEMO_TARGET", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OMP_WAIT_POLICY",
    "GOMP_CPU_AFFINITY", "KMP_AFFINITY", "KMP_BLOCKTIME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR",
    "XDG_CACHE_HOME",
)  # fmt: skip
"""Environment variables that a child may see. Nothing else of the judge's environment reaches it."""

LOG_TAIL_BYTES = 4000
LOG_TAIL_LINES = 8
_spawners: dict[int, ThreadPoolExecutor] = {}


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What a child gets of `environment`: the allow-list, the import path of this code, and no model hub."""
    kept = {name: environment[name] for name in PASSED_ON if name in environment}
    return kept | {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(REPOSITORY), environment.get("PYTHONPATH")))),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


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


class Child:
    """One child process. `role` names it in sentences ("candidate"); `log` gets its standard output and error.

    Every failure raises ChildFailed ("crashed", "timed out", "invalid") with the reason in words and the last log
    lines, after the whole process tree has been killed.
    """

    def __init__(self, role: str, log: Path) -> None:
        self.role = role
        self.log = log
        self._pending: int | None = None
        self._sent = 0.0
        question_read, self._questions = os.pipe()
        self._answers, answer_write = os.pipe()
        try:
            self._process = self._spawn(question_read, answer_write)
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

    def _spawn(self, question_read: int, answer_write: int) -> subprocess.Popen[bytes]:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        command = [
            *(sys.executable, "-P", "-m", "engine.judge.child"),
            *("--questions", str(question_read), "--answers", str(answer_write), "--parent", str(os.getpid())),
        ]
        with self.log.open("ab") as log:
            return (
                _spawner()
                .submit(
                    subprocess.Popen,
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=child_environment(os.environ),
                    pass_fds=(question_read, answer_write),
                    start_new_session=True,
                )
                .result()
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._open and self._process.poll() is None

    def ask(self, question: dict[str, Any], timeout: float) -> Answer:
        """Ask and wait for the answer, at most `timeout` seconds; the child is stopped again afterwards."""
        self._resume()
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
            frame = protocol.encode_frame({"request": self._pending, **question})
            self._resume()
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
        try:
            answer = protocol.read_frame(self._answers, self._sent + timeout)
            end = time.perf_counter()
            payload = protocol.unwrap(answer, self._pending)
        except (ChildError, Closed) as error:
            raise self._failed(error, timeout) from None
        except BaseException:
            self.kill()
            raise
        self._pending = None
        self._stop()
        return payload, end

    def refuse(self, error: ChildError) -> ChildFailed:
        """Kill the child for an answer whose content broke the protocol; returns the error to raise."""
        return self._failed(error)

    def kill(self) -> None:
        """Kill the process, its group and every descendant that can still be found, and reap it. Idempotent."""
        if not self._open:
            return
        self._open = False
        descendants = _descendants(self._process.pid)
        self._signal(signal.SIGKILL)
        for process in descendants:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self._process.wait()
        os.close(self._questions)
        os.close(self._answers)

    def log_tail(self) -> str:
        """The last lines that the child wrote, without control characters, or ""."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
                text = file.read().decode(errors="replace")
        except OSError:
            return ""
        lines = [
            "".join(c for c in line.rsplit("\r", 1)[-1] if c.isprintable() or c == "\t")[:300]
            for line in text.split("\n")
        ]
        return "\n".join([line for line in lines if line.strip()][-LOG_TAIL_LINES:])

    def _unread_bytes(self) -> int:
        return int.from_bytes(fcntl.ioctl(self._answers, termios.FIONREAD, bytes(4)), sys.byteorder)

    def _failed(self, error: ChildError | Closed, timeout: float = 0.0) -> ChildFailed:
        """Kill everything and say in words what happened, with the last log lines."""
        if isinstance(error, Closed):
            kind, sentence = "crashed", f"The {self.role} {self._how_it_ended()}."
        elif error.kind == "crashed":
            kind, sentence = error.kind, f"The {self.role} failed: {error.reason}"
        elif error.kind == "timed out":
            kind, sentence = error.kind, f"The {self.role} {error.reason} ({timeout:.0f} s)."
        else:
            kind, sentence = error.kind, f"The {self.role} {error.reason}."
        self.kill()
        tail = self.log_tail()
        return ChildFailed(kind, f"{sentence}\nLast log lines:\n{tail}" if tail else sentence, self.role)

    def _how_it_ended(self) -> str:
        try:
            status = self._process.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            return "closed its pipe"
        if status < 0:
            name = signal.Signals(-status).name
            return f"was killed by {name}" + (" (often: out of memory)" if status == -signal.SIGKILL else "")
        return f"exited with status {status}"

    def _stop(self) -> None:
        """Stop the group and wait until its leader really stands still (or is gone)."""
        self._signal(signal.SIGSTOP)
        if self._process.returncode is None and hasattr(os, "waitid"):
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def _resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _spawner() -> ThreadPoolExecutor:
    """The one thread of this process that starts children, alive as long as the process.

    The kernel ties PR_SET_PDEATHSIG to the thread that started a child, not to its process: a child started by a
    thread that ends would be killed with it.
    """
    if os.getpid() not in _spawners:
        _spawners.clear()  # after a fork, the other process's thread is not here
        _spawners[os.getpid()] = ThreadPoolExecutor(max_workers=1, thread_name_prefix="judge-spawner")
    return _spawners[os.getpid()]
