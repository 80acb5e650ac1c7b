"""The parts of a decoder layer that target and drafters share: RMSNorm, rotation, gated activation, attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from engine import rope

AttentionKind = Literal["sdpa", "grouped"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, in float32 and rounded to x's dtype before the weight,
    as transformers does."""
    if x.dtype == torch.float32:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    return plain_rms_norm(x, weight, eps)


def plain_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The same, written out. A compiler fuses it; PyTorch 2.11 cannot compile its own fused operator for row counts
    that vary on a GPU."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return F.silu(gate).mul_(up)


class Elementwise:
    """The elementwise functions of a layer, plain or through torch.compile (one graph for every row count)."""

    def __init__(self, eps: float, *, compiled: bool) -> None:
        def norm(x: Tensor, weight: Tensor) -> Tensor:
            return (plain_rms_norm if compiled else rms_norm)(x, weight, eps)

        def build(function: Callable[..., Tensor]) -> Any:
            return torch.compile(function, dynamic=True) if compiled else function

        self.rms_norm: Callable[[Tensor, Tensor], Tensor] = build(norm)
        self.silu_mul: Callable[[Tensor, Tensor], Tensor] = build(silu_mul)
        self.apply_rope: Callable[[Tensor, Tensor, Tensor], Tensor] = build(rope.apply_rope)


class Attention:
    """How the R rows of one pass attend, prepared once and used by every layer.

    `committed` slots are seen by every row; the R new slots by `tree_mask` (bool [R, R], True = seen), or causally
    where it is None. `causal=False` with no mask lets every row see every slot (a drafter's block).
    """

    def __init__(
        self,
        kind: AttentionKind,
        rows: int,
        committed: int,
        group: int,
        tree_mask: Tensor | None,
        device: torch.device,
        *,
        causal: bool = True,
    ) -> None:
        self.kind, self.group = kind, group
        self.mask: Tensor | None = None  # bool [R, committed + R]
        if rows > 1 and (causal or tree_mask is not None):
            self.mask = torch.ones(rows, committed + rows, dtype=torch.bool, device=device)
            if tree_mask is None:
                self.mask[:, committed:].tril_()
            else:
                self.mask[:, committed:] = tree_mask
        if kind == "grouped" and self.mask is not None:
            self.mask = ~self.mask


def attend(q: Tensor, k: Tensor, v: Tensor, attention: Attention) -> Tensor:
    """Attention of q [R, q_heads, head_dim] over k, v [kv_heads, T, head_dim] -> [R, q_heads * head_dim].

    Query head i uses KV head i // group. Keys and values are never expanded: "sdpa" takes the query heads of a
    group as heads of one batch entry with stride-0 keys; "grouped" takes them as further rows of one product.
    """
    rows, heads, head_dim = q.shape
    kv_heads, slots, _ = k.shape
    group = attention.group
    q = q.view(rows, kv_heads, group, head_dim).permute(1, 2, 0, 3)  # [kv_heads, group, R, head_dim]
    if attention.kind == "sdpa":
        wide_k = k[:, None].expand(kv_heads, group, slots, head_dim)
        wide_v = v[:, None].expand(kv_heads, group, slots, head_dim)
        out = F.scaled_dot_product_attention(q, wide_k, wide_v, attn_mask=attention.mask)
    else:
        scores = torch.matmul(q.reshape(kv_heads, group * rows, head_dim) * (1 / math.sqrt(head_dim)), k.mT)
        if attention.mask is not None:
            scores = scores.view(kv_heads, group, rows, slots).masked_fill_(attention.mask, -math.inf)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype)
        out = torch.matmul(weights.view(kv_heads, group * rows, slots), v).view(kv_heads, group, rows, head_dim)
    return out.permute(2, 0, 1, 3).reshape(rows, heads * head_dim)
