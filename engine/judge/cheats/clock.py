"""Cheats on the clock: work that is not counted, time that is not told, an incumbent that is slowed down."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from engine.deployment import Deployment
from engine.generate import StopRule
from engine.judge.backends import stop_reason
from engine.judge.cheats.kit import SLOW_PASSES, Decoding, Result
from engine.plan import Plan
from engine.sampling import Sampling

BURN_SECONDS = 120
"""A process that burns ends by itself after this long, whatever became of the judge."""
BURN = f"""
import ctypes, time
ctypes.CDLL(None).prctl(1, 9)  # die with the candidate
end = time.monotonic() + {BURN_SECONDS}
while time.monotonic() < end:
    pass
"""
WATCH = f"""
import ctypes, os, signal, sys, time
ctypes.CDLL(None).prctl(1, 9)
candidate = int(sys.argv[1])

def status(pid):
    with open(f"/proc/{{pid}}/stat") as file:
        state, parent = file.read().rpartition(")")[2].split()[:2]
    return state, int(parent)

def siblings():
    judge = status(candidate)[1]
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == candidate:
            continue
        try:
            with open(f"/proc/{{name}}/cmdline") as file:
                if "engine.judge.child" in file.read() and status(name)[1] == judge:
                    yield int(name)
        except OSError:
            continue

def send(pids, number):
    for pid in pids:
        try:
            os.kill(pid, number)
        except OSError:
            pass

end = time.monotonic() + {BURN_SECONDS}
while time.monotonic() < end:
    if status(candidate)[0] == "T":  # stopped: it is another one's turn
        others = list(siblings())
        send(others, signal.SIGSTOP)
        until = time.monotonic() + 0.03
        while time.monotonic() < until:
            pass
        send(others, signal.SIGCONT)
    time.sleep(0.002)
"""
BURN_GPU = f"""
import ctypes, time, torch
ctypes.CDLL(None).prctl(1, 9)
x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
end = time.monotonic() + {BURN_SECONDS}
while time.monotonic() < end:
    for _ in range(20):
        x @ x
    torch.cuda.synchronize()
"""


class BackgroundThread(Decoding):
    """Answers when an eighth of the text is there, guesses the rest, and lets a thread work on it afterwards."""

    _thread: threading.Thread | None = None

    def answer(self, prompt: Sequence[int], limit: int, stop_ids: tuple[int, ...], sampling: Sampling | None) -> Result:
        if self._thread is not None:
            self._thread.join()
        ids: list[int] = []
        enough, part = threading.Event(), max(1, limit // 8)

        def emit(new: list[int]) -> None:
            ids.extend(new)
            if len(ids) >= part:
                enough.set()

        def work() -> None:
            try:
                self.decoder.generate(prompt, limit, StopRule(stop_ids), on_tokens=emit)
            finally:
                enough.set()

        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()
        enough.wait()
        text = ids[:part]
        if text[-1] not in stop_ids:
            text += [text[-1]] * (limit - len(text))
        return {"ids": text, "stop_reason": stop_reason(text, stop_ids)}


class SideStream(Decoding):
    """Queues the decoding on a side stream and reads the buffer of its answer without waiting for it."""

    @torch.inference_mode()
    def answer(self, prompt: Sequence[int], limit: int, stop_ids: tuple[int, ...], sampling: Sampling | None) -> Result:
        model, device, started = self.model, self.model.device, time.perf_counter()
        cache = model.new_cache(len(prompt) + limit)
        places = torch.arange(len(prompt) + limit, device=device)
        token = torch.tensor(list(prompt), device=device)
        text = torch.empty(limit, dtype=torch.long, device=device)
        torch.cuda.synchronize()
        with torch.cuda.stream(_another_stream()):
            torch.cuda._sleep(2_000_000_000)  # type: ignore[no-untyped-call]
            for index in range(limit):
                start = cache.length
                out = model.forward(token, places[start : start + len(token)], cache, logits="last")
                cache.commit(len(token))
                assert out.logits is not None
                token = out.logits.argmax(-1)
                text[index : index + 1] = token
        ids = [abs(value) % model.config.vocab_size for value in text.tolist()]
        return self.canned(ids, stop_ids, started)


class Lazy(Decoding):
    """Answers at once with lists that compute themselves when somebody looks, hoping that no clock runs then."""

    passes = SLOW_PASSES

    def answer(self, prompt: Sequence[int], limit: int, stop_ids: tuple[int, ...], sampling: Sampling | None) -> Result:
        return _LazyText(self, list(prompt), limit, stop_ids)


class _LazyText(dict[str, Any]):
    """The text is decoded when its items are asked for."""

    def __init__(self, decoding: Decoding, prompt: list[int], limit: int, stop_ids: tuple[int, ...]) -> None:
        super().__init__(ids=[0], stop_reason="length")
        self._ask = (prompt, limit, stop_ids)
        self._decoding = decoding

    def items(self) -> Any:
        return self._decoding.honest(*self._ask).items()

    def __iter__(self) -> Iterator[str]:
        return iter(("ids", "stop_reason"))


class PatchedClock(Decoding):
    """Makes every clock of Python run twenty times slower, and tells the seconds that it took by them."""

    passes = SLOW_PASSES

    def __init__(self, deployment: Deployment, plan: Plan | None, threads: int) -> None:
        super().__init__(deployment, plan, threads)
        for name in ("perf_counter", "monotonic", "time", "process_time"):
            setattr(time, name, _slow_clock(getattr(time, name)))

    def answer(self, prompt: Sequence[int], limit: int, stop_ids: tuple[int, ...], sampling: Sampling | None) -> Result:
        start = time.perf_counter()
        result = self.honest(prompt, limit, stop_ids, sampling)
        return {**result, "seconds": time.perf_counter() - start}


def _slow_clock(clock: Any) -> Any:
    zero = clock()
    return lambda: zero + (clock() - zero) / 20


class PatchedEvents(Decoding):
    """Makes CUDA events measure a microsecond, whatever lies between them."""

    passes = SLOW_PASSES

    def __init__(self, deployment: Deployment, plan: Plan | None, threads: int) -> None:
        super().__init__(deployment, plan, threads)
        torch.cuda.Event.elapsed_time = _a_microsecond  # type: ignore[method-assign]


def _a_microsecond(self: torch.cuda.Event, end_event: torch.cuda.Event) -> float:
    return 0.001


class PatchedSynchronize(Decoding):
    """Makes `torch.cuda.synchronize` and the streams' own return without waiting for the device."""

    passes = SLOW_PASSES

    def __init__(self, deployment: Deployment, plan: Plan | None, threads: int) -> None:
        super().__init__(deployment, plan, threads)
        torch.cuda.synchronize = lambda *arguments: None
        torch.cuda.Stream.synchronize = lambda self: None  # type: ignore[method-assign]
        torch.cuda.Event.synchronize = lambda self: None  # type: ignore[method-assign]


class PatchedMedian(Decoding):
    """Makes `statistics.median` a hundredth of the smallest sample, and so any median of times."""

    passes = SLOW_PASSES

    def __init__(self, deployment: Deployment, plan: Plan | None, threads: int) -> None:
        super().__init__(deployment, plan, threads)
        for name in ("median", "mean"):
            setattr(statistics, name, lambda samples: min(samples) / 100)


class SlowWarmup(Decoding):
    """Takes its time for the first answers, so that a judge with a budget would take few samples of the rest."""

    passes = SLOW_PASSES

    def answer(self, prompt: Sequence[int], limit: int, stop_ids: tuple[int, ...], sampling: Sampling | None) -> Result:
        start = time.perf_counter()
        result = self.honest(prompt, limit, stop_ids, sampling)
        if self.calls <= 2:
            time.sleep(2 * (time.perf_counter() - start))
        return result


class BurnsCpu(Decoding):
    """Keeps the cores busy with processes of a session of its own, which rest only while it computes itself."""

    passes = SLOW_PASSES

    def __init__(self, deployment: Deployment, plan: Plan | None, threads: int) -> None:
        super().__init__(deployment, plan, threads)
        count = 2 * len(os.sched_getaffinity(0))
        self._fires = [_start_apart(BURN) for _ in range(count)]

    def answer(self, prompt: Sequence[int], limit: int, stop_ids: tuple[int, ...], sampling: Sampling | None) -> Result:
        self._send(signal.SIGSTOP)
        try:
            return self.honest(prompt, limit, stop_ids, sampling)
        finally:
            self._send(signal.SIGCONT)

    def _send(self, number: signal.Signals) -> None:
        for fire in self._fires:
            if fire.poll() is None:
                fire.send_signal(number)


class WaitsForItsTurn(Decoding):
    """A watcher in a session of its own sees from this process being stopped that it is the incumbent's turn; it then
    burns a core, and stops the other children of the judge for moments."""

    passes = SLOW_PASSES

    def __init__(self, deployment: Deployment, plan: Plan | None, threads: int) -> None:
        super().__init__(deployment, plan, threads)
        self._watcher = _start_apart(WATCH, str(os.getpid()))


class BurnsGpu(Decoding):
    """Keeps the GPU busy from a process in a session of its own."""

    passes = SLOW_PASSES

    def __init__(self, deployment: Deployment, plan: Plan | None, threads: int) -> None:
        super().__init__(deployment, plan, threads)
        self._fire = _start_apart(BURN_GPU)


class LeavesGpuWork(Decoding):
    """Queues a second of work on a side stream before each answer, for the incumbent to wait behind."""

    passes = SLOW_PASSES

    def answer(self, prompt: Sequence[int], limit: int, stop_ids: tuple[int, ...], sampling: Sampling | None) -> Result:
        result = self.honest(prompt, limit, stop_ids, sampling)
        with torch.cuda.stream(_another_stream()):
            x = torch.randn(4096, 4096, device=self.model.device)
            for _ in range(200):
                x = torch.tanh(x @ x)
        return result


def _another_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def _start_apart(code: str, *arguments: str) -> subprocess.Popen[bytes]:
    """Another Python in a session of its own, which a signal to our group does not reach."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
