"""Honest candidates: lossless, faster than the self-test's incumbent, and unlike stock in what a judge must forgive."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.cache import KVCache
from engine.deployment import Deployment
from engine.judge.cheats.kit import INCUMBENT_PASSES, Decoding, Result, say
from engine.model import Forward
from engine.plan import Plan
from engine.sampling import Sampling
from engine.weights import open_checkpoint

CHUNK = 24
"""Tokens of a prompt that are read in one pass."""


class Incumbent(Decoding):
    """What candidates are compared with: plain decoding that computes every pass twice, so that gains exist."""

    passes = INCUMBENT_PASSES


class Engine(Decoding):
    """The engine as it is, with the plan that it is given."""


class DoubleHead(Decoding):
    """Computes logits in double precision: closer to the truth than stock, and so not always what stock has."""

    def __init__(self, deployment: Deployment, plan: Plan | None, threads: int) -> None:
        super().__init__(deployment, plan, threads)
        model = self.model
        tied = model.config.tie_embeddings
        weight = model.embedding if tied else open_checkpoint(deployment.target).tensor("lm_head.weight")
        wide = weight.to(model.device, torch.float64)
        model._head = lambda hidden: F.linear(hidden.double(), wide).to(model.dtype)


class ChunkedPrefill(Decoding):
    """Reads prompts of every length in chunks: the last one is as uneven as the prompt."""

    def __init__(self, deployment: Deployment, plan: Plan | None, threads: int) -> None:
        super().__init__(deployment, plan, threads)
        forward = self.model.forward

        def chunked(ids: Tensor, positions: Tensor, cache: KVCache, **options: Any) -> Forward:
            if cache.length > 0 or len(ids) <= CHUNK:
                return forward(ids, positions, cache, **options)
            starts = range(0, len(ids), CHUNK)
            for start in starts[:-1]:
                forward(ids[start : start + CHUNK], positions[start : start + CHUNK], cache, logits="none")
                cache.commit(CHUNK)
            last = starts[-1]
            out = forward(ids[last:], positions[last:], cache, **options)
            cache.truncate(0)
            cache.slots(len(ids))  # all chunks lie where one pass would have written them: the caller commits them
            return out

        self.model.forward = chunked  # type: ignore[method-assign]


class SlowStart(Decoding):
    """Traces and compiles its elementwise parts before its first answer, which takes seconds."""

    def answer(self, prompt: Sequence[int], limit: int, stop_ids: tuple[int, ...], sampling: Sampling | None) -> Result:
        if self.calls == 1:
            start = time.perf_counter()
            ops = self.model._ops
            ops.silu_mul = torch.compile(ops.silu_mul, dynamic=True, backend="aot_eager")
            self.honest(prompt, 2, stop_ids, sampling)
            say(f"compiled in {time.perf_counter() - start:.1f} s")
        return self.honest(prompt, limit, stop_ids, sampling)
