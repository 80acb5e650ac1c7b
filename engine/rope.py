"""Rotary position embedding: default, Llama-3 and YaRN, as transformers defines them.

Llama-3 scaling: "The Llama 3 Herd of Models" (Meta, 2024). YaRN: Peng et al., arXiv 2309.00071.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Angle per position of each pair, float32 [head_dim / 2], and the factor on cosine and sine."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "llama3":
        return _llama3(rope, frequencies), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, head_dim), _yarn_attention_factor(rope)
    return frequencies, 1.0


def _llama3(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    wavelengths = 2 * math.pi / frequencies
    longest_kept = rope.original_max_positions / rope.high_freq_factor
    shortest_stretched = rope.original_max_positions / rope.low_freq_factor
    blend = (rope.original_max_positions / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - blend) * frequencies / rope.factor + blend * frequencies
    result = torch.where(wavelengths > shortest_stretched, frequencies / rope.factor, blended)
    return torch.where(wavelengths < longest_kept, frequencies, result)


def _yarn(rope: RopeConfig, head_dim: int) -> Tensor:
    """Interpolates pairs that turn less than `beta_slow` times in the original context, keeps those that turn
    more than `beta_fast` times, and ramps between."""

    def pair_that_turns(turns: float) -> float:
        return head_dim * math.log(rope.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a division by zero
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    spread = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    kept = 1 - ramp
    return 1.0 / (rope.factor * spread) * (1 - kept) + 1.0 / spread * kept


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def scale(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)


class RopeTable:
    """Cosines and sines of all positions, computed in float32 and kept in `dtype`.

    `at(positions)` gives (cos, sin), each [R, 1, head_dim], for `apply_rope`. The first half of `sin` is negated,
    so that rotating is a swap of halves without a sign.
    """

    def __init__(self, rope: RopeConfig, head_dim: int, positions: int, device: torch.device, dtype: torch.dtype):
        frequencies, factor = inverse_frequencies(rope, head_dim)
        angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies
        cos, sin = angles.cos() * factor, angles.sin() * factor
        self.cos = torch.cat((cos, cos), dim=1).to(device, dtype)[:, None]
        self.sin = torch.cat((-sin, sin), dim=1).to(device, dtype)[:, None]

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.cos[positions], self.sin[positions]


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [R, heads, head_dim] by a RopeTable's cos, sin [R, 1, head_dim]."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)
