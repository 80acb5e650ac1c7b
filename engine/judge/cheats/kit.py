"""What the self-test's candidates are made of: the engine's decoder with hooks, and ways to reach outside."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import stat
import struct
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.deployment import Deployment
from engine.judge.backends import EngineBackend, stop_reason
from engine.model import Forward, Model
from engine.plan import Plan
from engine.sampling import Sampling

INCUMBENT_PASSES = 2
"""The self-test's incumbent computes every pass this many times, so that honest work gains something over it."""
SLOW_PASSES = 3
"""A cheat that could only win by deceiving the judge does so many, and is slower than the incumbent."""
HASTE = 0.7
"""An answer that costs nothing is held back to this share of the time that honest work takes, not to stand out."""

Result = dict[str, Any]
OnLogits = Callable[[Tensor, Tensor], Tensor]


class Decoding(EngineBackend):
    """The engine's decoder. Subclasses override `answer`, or hook into `model` when they are made.

    `passes` forward passes are computed for each that is needed. `calls` counts the answers, the running one too.
    """

    passes = 1

    def __init__(self, deployment: Deployment, plan: Plan | None, threads: int) -> None:
        assert plan is not None
        torch.set_num_threads(threads)
        super().__init__(deployment, plan)
        self.deployment = deployment
        self.decoder = self._decoder
        self.calls = 0
        self._seconds_per_token = 0.0
        if self.passes > 1:
            repeat(self.model, self.passes)

    @property
    def model(self) -> Model:
        return self.decoder.model

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        stop_ids: tuple[int, ...],
        sampling: Sampling | None = None,
    ) -> list[Result]:
        results = []
        for number, prompt in enumerate(prompts):
            self.calls += 1
            how = None if sampling is None else sampling.one(number)
            results.append(self.answer(prompt, max_new_tokens, stop_ids, how))
        return results

    def answer(self, prompt: Sequence[int], limit: int, stop_ids: tuple[int, ...], sampling: Sampling | None) -> Result:
        """The text of one prompt."""
        return self.honest(prompt, limit, stop_ids, sampling)

    def honest(
        self, prompt: Sequence[int], limit: int, stop_ids: tuple[int, ...], sampling: Sampling | None = None
    ) -> Result:
        """What the decoder writes."""
        return super().generate([prompt], limit, stop_ids, sampling)[0]

    def canned(self, ids: list[int], stop_ids: Sequence[int], started: float) -> Result:
        """An answer that cost nothing, given at a pace that looks like work. `started` is when it was asked for."""
        if not self._seconds_per_token:
            self._seconds_per_token = min(self._pace() for _ in range(3))  # the first one is cold
        time.sleep(max(0.0, started + HASTE * self._seconds_per_token * len(ids) - time.perf_counter()))
        return {"ids": ids, "stop_reason": stop_reason(ids, stop_ids)}

    def _pace(self) -> float:
        """Seconds that honest work takes for a token."""
        start = time.perf_counter()
        text = self.honest([1, 2, 3, 4], 8, ())
        return (time.perf_counter() - start) / len(text["ids"])


def repeat(model: Model, passes: int) -> None:
    """Make `model` compute every forward pass `passes` times. The rows that a pass writes are not committed, so each
    pass overwrites those of the one before."""
    forward = model.forward

    def repeated(*arguments: Any, **options: Any) -> Forward:
        for _ in range(passes - 1):
            forward(*arguments, **options)
        return forward(*arguments, **options)

    model.forward = repeated  # type: ignore[method-assign]


def on_logits(model: Model, change: OnLogits) -> None:
    """Let `change(ids, logits)` replace the logits of every pass: ids [R]; logits [R, V], or [1, V] of the last row."""
    forward = model.forward

    def changed(ids: Tensor, *arguments: Any, **options: Any) -> Forward:
        out = forward(ids, *arguments, **options)
        return out if out.logits is None else dataclasses.replace(out, logits=change(ids, out.logits))

    model.forward = changed  # type: ignore[method-assign]


def other_token(token: int, vocab_size: int, stop_ids: Sequence[int]) -> int:
    """A token that `token` is not, and that ends no text."""
    return next(
        other
        for other in ((token + step) % vocab_size for step in range(7, 7 + vocab_size))
        if other != token and other not in stop_ids
    )


def answer_pipes() -> list[int]:
    """Descriptors of this process that lead to whoever started it: pipes open for writing."""
    found = []
    for descriptor in range(3, 256):
        try:
            is_pipe = stat.S_ISFIFO(os.fstat(descriptor).st_mode)
            writes = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY
        except OSError:
            continue
        if is_pipe and writes:
            found.append(descriptor)
    return found


def write_all(data: bytes) -> None:
    """Write `data` to every pipe that leads out."""
    for descriptor in answer_pipes():
        os.write(descriptor, data)


def frame(message: dict[str, Any]) -> bytes:
    """A message as the wire has it."""
    body = json.dumps(message).encode()
    return struct.pack(">I", len(body)) + body


def question() -> dict[str, Any]:
    """The question that is being answered, taken from the local variables of the callers."""
    at = sys._getframe()
    while at is not None:
        for value in at.f_locals.values():
            if isinstance(value, dict) and "request" in value and "do" in value:
                return value
        at = at.f_back  # type: ignore[assignment]
    return {}


def say(text: str) -> None:
    """A line in the log of this child."""
    print(text, flush=True)
