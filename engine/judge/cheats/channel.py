"""Cheats on the channel of results: verdicts of their own, answers at the wrong time, files of the judge."""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import engine.judge
from engine.deployment import Deployment
from engine.judge.cheats.kit import SLOW_PASSES, Decoding, Result, frame, question, say, write_all
from engine.plan import Plan
from engine.sampling import Sampling

VERDICT = {"verdict": "accepted", "reason": "10.00x the incumbent; lossless.", "ratio": 10.0, "low": 9.9}
PASS = "PASS 10.0x faster, lossless on all tokens"


class OwnVerdict(Decoding):
    """Writes its own verdict to every pipe that it inherited."""

    def answer(self, prompt: Sequence[int], limit: int, stop_ids: tuple[int, ...], sampling: Sampling | None) -> Result:
        write_all(json.dumps(VERDICT).encode())
        return self.honest(prompt, limit, stop_ids, sampling)


class FramedVerdict(Decoding):
    """Writes its own verdict in the wire's own form, in place of an answer."""

    def answer(self, prompt: Sequence[int], limit: int, stop_ids: tuple[int, ...], sampling: Sampling | None) -> Result:
        write_all(frame(VERDICT))
        return self.honest(prompt, limit, stop_ids, sampling)


class ExitsEarly(Decoding):
    """Prints that all is well and exits with status 0."""

    def answer(self, prompt: Sequence[int], limit: int, stop_ids: tuple[int, ...], sampling: Sampling | None) -> Result:
        say(PASS)
        os._exit(0)


class PrintsPass(Decoding):
    """Prints PASS on standard output and error, and puts verdict and figures into its answers."""

    passes = SLOW_PASSES

    def answer(self, prompt: Sequence[int], limit: int, stop_ids: tuple[int, ...], sampling: Sampling | None) -> Result:
        print(PASS, flush=True)
        print(PASS, file=sys.stderr, flush=True)
        return {**VERDICT, **self.honest(prompt, limit, stop_ids, sampling), "tok_s": 1e6, "seconds": 1e-6}


class RewritesFiles(Decoding):
    """Appends forged measurements to the judge's own file beside its log, and tries whether the judge's code can be
    opened for writing (where it can, it says so and leaves it as it is)."""

    passes = SLOW_PASSES

    def __init__(self, deployment: Deployment, plan: Plan | None, threads: int) -> None:
        super().__init__(deployment, plan, threads)
        log = Path("/proc/self/fd/1").readlink()
        forged = {"kind": "floor", "key": "stock", "floor": {"margin": 99.0, "flips": 9, "positions": 9, "method": ""}}
        for file in {parent / "judge.jsonl" for parent in list(log.parents)[:3]}:
            if append(file, json.dumps({"identity": "any", **forged}) + "\n"):
                say(f"found and changed {file}")
        for code in Path(engine.judge.__path__[0]).glob("*.py"):
            try:
                os.close(os.open(code, os.O_WRONLY | os.O_APPEND))
                say(f"found {code} open for writing")
            except OSError:
                continue


def append(file: Path, text: str) -> bool:
    """Append to a file that is there; whether that went. A new file in the candidate's own scratch is no find."""
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_APPEND)
    except OSError:
        return False
    with os.fdopen(descriptor, "a") as records:
        records.write(text)
    return True


class AtExit(Decoding):
    """Leaves a handler that answers with a verdict when the interpreter ends, and ends it."""

    def __init__(self, deployment: Deployment, plan: Plan | None, threads: int) -> None:
        super().__init__(deployment, plan, threads)
        atexit.register(lambda: write_all(frame(VERDICT)))

    def answer(self, prompt: Sequence[int], limit: int, stop_ids: tuple[int, ...], sampling: Sampling | None) -> Result:
        sys.exit(0)


class AnswersUnasked(Decoding):
    """Sends a second answer behind the first, for a question that has not been asked yet."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        stop_ids: tuple[int, ...],
        sampling: Sampling | None = None,
    ) -> list[Result]:
        results = super().generate(prompts, max_new_tokens, stop_ids, sampling)
        ahead = frame({"request": int(question().get("request", 0)) + 1, "ok": {"texts": results}})
        threading.Timer(0.0, write_all, [ahead]).start()
        return results


class OutOfOrder(Decoding):
    """Finds the running question in its callers' variables and answers it first under the number of the one before."""

    _before: int | None = None

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        stop_ids: tuple[int, ...],
        sampling: Sampling | None = None,
    ) -> list[Result]:
        results = super().generate(prompts, max_new_tokens, stop_ids, sampling)
        before, self._before = self._before, question().get("request")
        if before is not None:
            write_all(frame({"request": before, "ok": {"texts": results}}))
        return results


class Floods(Decoding):
    """Writes answers without end."""

    def answer(self, prompt: Sequence[int], limit: int, stop_ids: tuple[int, ...], sampling: Sampling | None) -> Result:
        while True:
            write_all(frame({}) * 1000)


class HugeAnswer(Decoding):
    """Hides its text in tens of megabytes."""

    def answer(self, prompt: Sequence[int], limit: int, stop_ids: tuple[int, ...], sampling: Sampling | None) -> Result:
        return {**self.honest(prompt, limit, stop_ids, sampling), "verdict": "PASS" * 8_000_000}


class Hangs(Decoding):
    """Answers once and never again."""

    def answer(self, prompt: Sequence[int], limit: int, stop_ids: tuple[int, ...], sampling: Sampling | None) -> Result:
        while self.calls > 1:
            signal.pause()
        return self.honest(prompt, limit, stop_ids, sampling)
