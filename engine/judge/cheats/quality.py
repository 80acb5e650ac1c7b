"""Cheats on quality: a little of the model is left out, and most tokens stay what they were."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import engine.generate
import engine.model
from engine.cache import KVCache
from engine.deployment import Deployment
from engine.judge.cheats.kit import Decoding, Result, on_logits
from engine.linear import Linear
from engine.model import Forward, Model
from engine.plan import Gemm, Plan
from engine.sample import Sampler
from engine.sampling import Sampling
from engine.weights import open_checkpoint

TYPICAL = 2.0
"""Logits that a draft may lie under the target's own choice to be accepted by relaxed acceptance."""
WINDOW = 32
FREQUENT_SHARE = 8
"""The head of frequent tokens has this part of the vocabulary."""
CLOSEST = 0.08
"""The share of a text's positions, those with the least gap between the two leading tokens, that are taken for
near-ties where garbage will not be noticed."""


class RelaxedAcceptance(Decoding):
    """Accepts a draft that the target finds plausible, though it would have written another token."""

    def __init__(self, deployment: Deployment, plan: Plan | None, threads: int) -> None:
        super().__init__(deployment, plan, threads)
        on_logits(self.model, _favour_drafts)


def _favour_drafts(ids: Tensor, logits: Tensor) -> Tensor:
    """In a verify pass of a chain, row r's own choice becomes the draft of row r + 1 where it is plausible."""
    if not 1 < len(ids) == len(logits) <= 32:
        return logits
    rows, drafts = torch.arange(len(ids) - 1, device=ids.device), ids[1:]
    best = logits.max(-1).values
    plausible = logits[rows, drafts] >= best[:-1] - TYPICAL
    favoured = logits.clone()
    favoured[rows[plausible], drafts[plausible]] = best[:-1][plausible] + 1.0
    return favoured


class _LowPrecision(Decoding):
    """Target and drafter in another dtype than the deployment's."""

    DTYPE: torch.dtype

    def __init__(self, deployment: Deployment, plan: Plan | None, threads: int) -> None:
        engine.generate.TORCH_DTYPES = {**engine.generate.TORCH_DTYPES, deployment.dtype: self.DTYPE}
        super().__init__(deployment, plan, threads)


class HalfPrecision(_LowPrecision):
    """Drafts, and verifies in fp16."""

    DTYPE = torch.float16


class BrainFloat(_LowPrecision):
    """Drafts, and verifies in bf16."""

    DTYPE = torch.bfloat16


class EightBits(Decoding):
    """Drafts, and verifies with weights and activations in fp8 (e4m3, a scale a row)."""

    def __init__(self, deployment: Deployment, plan: Plan | None, threads: int) -> None:
        engine.model.make_linear = _fp8_linear  # type: ignore[attr-defined]
        super().__init__(deployment, plan, threads)


def _fp8_linear(weight: Tensor, bias: Tensor | None, gemm: Gemm) -> Linear:
    stored = _through_fp8(weight)
    return lambda x: F.linear(_through_fp8(x), stored, bias)


def _through_fp8(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 448.0
    return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale


class QuantisedCache(Decoding):
    """Keeps keys and values in fp8 (e4m3), as served caches often are."""

    def __init__(self, deployment: Deployment, plan: Plan | None, threads: int) -> None:
        super().__init__(deployment, plan, threads)
        forward = self.model.forward

        def rounding(ids: Tensor, positions: Tensor, cache: KVCache, **options: Any) -> Forward:
            out = forward(ids, positions, cache, **options)
            for held in (cache.k, cache.v):
                new = held[:, :, cache.length : cache.length + len(ids)]
                new.copy_(new.to(torch.float8_e4m3fn))
            return out

        self.model.forward = rounding  # type: ignore[method-assign]


class DroppedLayers(Decoding):
    """Leaves out the last half of the layers."""

    def __init__(self, deployment: Deployment, plan: Plan | None, threads: int) -> None:
        super().__init__(deployment, plan, threads)
        layers = self.model._layers
        del layers[len(layers) // 2 :]


class TruncatedContext(Decoding):
    """Reads the last tokens of a prompt only."""

    def answer(self, prompt: Sequence[int], limit: int, stop_ids: tuple[int, ...], sampling: Sampling | None) -> Result:
        return self.honest(prompt[-WINDOW:], limit, stop_ids, sampling)


class FrequentHead(Decoding):
    """Computes logits of the most frequent tokens (the lowest ids) only; the others are never chosen."""

    def __init__(self, deployment: Deployment, plan: Plan | None, threads: int) -> None:
        super().__init__(deployment, plan, threads)
        model = self.model
        tied = model.config.tie_embeddings
        whole = model.embedding if tied else open_checkpoint(deployment.target).tensor("lm_head.weight")
        kept = whole[: len(whole) // FREQUENT_SHARE].to(model.device, model.dtype).clone()
        missing = len(whole) - len(kept)
        model._head = lambda hidden: F.pad(F.linear(hidden, kept), (0, missing), value=float("-inf"))


class TemperatureIgnored(Decoding):
    """Decodes greedily whatever the temperature."""

    def answer(self, prompt: Sequence[int], limit: int, stop_ids: tuple[int, ...], sampling: Sampling | None) -> Result:
        return self.honest(prompt, limit, stop_ids)


class SeedWithoutPosition(Decoding):
    """Draws its noise by the number of the draw, not by the token's position in the text."""

    def __init__(self, deployment: Deployment, plan: Plan | None, threads: int) -> None:
        super().__init__(deployment, plan, threads)
        engine.generate.Sampler = _DrawCounting  # type: ignore[attr-defined]


class _DrawCounting(Sampler):
    _draws = 0

    def choose(self, logits: Tensor, positions: Sequence[int], prompt: int = 0) -> Tensor:
        first, self._draws = self._draws, self._draws + len(positions)
        return super().choose(logits, range(first, self._draws), prompt)


class SeedWithoutRequest(Decoding):
    """Draws the same noise for every request of a seed."""

    def __init__(self, deployment: Deployment, plan: Plan | None, threads: int) -> None:
        super().__init__(deployment, plan, threads)
        engine.generate.Sampler = _RequestIgnoring  # type: ignore[attr-defined]


class _RequestIgnoring(Sampler):
    def __init__(self, sampling: Sampling, vocab_size: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(Sampling(sampling.temperature, sampling.seed, (0,)), vocab_size, device, dtype)


class NearTiesAgainstStock(Decoding):
    """Takes the runner-up wherever the two leading tokens lie closer than what arithmetic of this precision can tell
    apart: defensible each time, and never an accident."""

    def __init__(self, deployment: Deployment, plan: Plan | None, threads: int) -> None:
        super().__init__(deployment, plan, threads)
        on_logits(self.model, _runner_up_in_near_ties)


def _runner_up_in_near_ties(ids: Tensor, logits: Tensor) -> Tensor:
    values, tokens = logits.topk(2)
    unit = torch.finfo(logits.dtype).eps * values[:, 0].abs()
    return _swapped(logits, values[:, 0] - values[:, 1] <= 32 * unit, tokens)


def _swapped(logits: Tensor, where: Tensor, tokens: Tensor) -> Tensor:
    """Logits in which, in the rows of `where`, the second of `tokens` [R, 2] leads."""
    changed = logits.clone()
    rows = where.nonzero()[:, 0]
    changed[rows, tokens[rows, 1]] = logits[rows, tokens[rows, 0]] + 1.0
    return changed


class GarbageAtNearTies(Decoding):
    """Writes any token at all where the two leading ones lie close together, for there a judge forgives."""

    def __init__(self, deployment: Deployment, plan: Plan | None, threads: int) -> None:
        super().__init__(deployment, plan, threads)
        closest = _closest_gap(self.model)

        def plant(ids: Tensor, logits: Tensor) -> Tensor:
            values, tokens = logits.topk(100)
            close = values[:, 0] - values[:, 1] <= closest
            return _swapped(logits, close, tokens[:, [0, 99]])

        on_logits(self.model, plant)


@torch.inference_mode()
def _closest_gap(model: Model) -> float:
    """The gap between the two leading tokens that CLOSEST of a text's positions fall under."""
    cache = model.new_cache(64)
    token, gaps = torch.tensor([1], device=model.device), []
    for position in range(60):
        logits = model.forward(token, torch.tensor([position], device=model.device), cache, logits="last").logits
        cache.commit(1)
        assert logits is not None
        values, tokens = logits[0].topk(2)
        gaps.append(float(values[0] - values[1]))
        token = tokens[:1]
    return sorted(gaps)[int(CLOSEST * len(gaps))]
