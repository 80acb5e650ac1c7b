"""DFlash: a block drafter that reads the target's hidden states and drafts a whole block in one pass.

The layout is z-lab's, as PyPI `dflash` 0.1.0 defines it. Hidden states tapped from a few target layers are projected,
normed and turned into keys and values of every drafter layer: that is the context. A block of the anchor and mask
tokens, embedded by the target, attends to all of the context and to all of itself, and the target's head reads
one marginal for each mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.cache import KVCache
from engine.config import DraftConfig
from engine.drafters.contract import EMPTY, DraftShape, DraftTree
from engine.layers import Attention, Elementwise, attend, rms_norm
from engine.linear import Linear, make_linear
from engine.model import Model
from engine.plan import Plan
from engine.rope import RopeTable
from engine.sample import choose
from engine.tree import best_first, chain
from engine.weights import Checkpoint

MARGINAL_TOP_K = 16
"""Tokens of each marginal that a tree may use; of 64 rows over 7 positions, ranks beyond this are rare."""

TOP_BLOCK = 64
"""Block of the vocabulary that a top-k looks at by its maximum first. Published vocabularies are multiples of it."""


@dataclass(frozen=True)
class _Layer:
    """One drafter layer. q, k and v are one GEMM, gate and up another; [R, K] -> [R, N]."""

    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor
    k_norm: Tensor
    o: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class DFlashDrafter:
    """Drafts for `target`, whose embedding and head it shares (the head as the target's own plan computes it).

    Work is lazy: `observe` keeps the taps, and `propose` projects all that have come since the last one in one pass,
    so a step served by another drafter costs nothing here.

    A block always has the size that it was trained with, however few drafts are asked for; the head is computed for
    those only. The released loop cuts the block itself, near the end of a text and for a smaller block size, which
    costs drafts: on text of the demo target, 3 drafts accept 1.76 tokens from a block of 4, 1.87 from one of 8.

    `checkpoint` must have been checked against `config` and the target (`engine.check`). `capacity` is the number of
    tokens, block included, that the cache holds from the start; it grows when it must.
    """

    name = "dflash"

    def __init__(
        self, checkpoint: Checkpoint, config: DraftConfig, target: Model, plan: Plan, *, capacity: int = 256
    ) -> None:
        self.config = config
        self.taps = config.target_layer_ids
        self.max_depth = config.block_size - 1
        self._target, self._plan = target, plan
        self._load(checkpoint)
        shape = config.model
        self._ops = Elementwise(shape.rms_norm_eps, compiled=plan.compile)
        self._rope = RopeTable(shape.rope, shape.head_dim, target.config.max_positions, target.device, target.dtype)
        self._cache = KVCache(shape, capacity, target.device, target.dtype)
        self._scale = config.extra.get("input_embedding_scale", 1.0)
        self._multiplier = config.extra.get("output_multiplier", 1.0)
        self._softcap = config.extra.get("final_logit_softcapping", 0.0)
        self._pending: list[Tensor] = []

    def _load(self, checkpoint: Checkpoint) -> None:
        device, dtype, shape = self._target.device, self._target.dtype, self.config.model
        stored = set(checkpoint.names())

        def tensor(name: str) -> Tensor:
            return checkpoint.tensor(name).to(device, dtype)

        def linear(*names: str) -> Linear:
            weights = [tensor(f"{name}.weight") for name in names]
            biases = [tensor(f"{name}.bias") for name in names if f"{name}.bias" in stored]
            return make_linear(torch.cat(weights), torch.cat(biases) if biases else None, self._plan.draft_gemm)

        layers = [f"layers.{number}" for number in range(shape.num_layers)]
        self._fc = linear("fc")
        self._hidden_norm = tensor("hidden_norm.weight")
        self._norm = tensor("norm.weight")
        # Keys and values of the context do not depend on the block, so those of all layers are one GEMM.
        self._context_kv = linear(*(f"{at}.self_attn.{part}_proj" for at in layers for part in "kv"))
        self._layers = [
            _Layer(
                input_norm=tensor(f"{at}.input_layernorm.weight"),
                qkv=linear(*(f"{at}.self_attn.{part}_proj" for part in "qkv")),
                q_norm=tensor(f"{at}.self_attn.q_norm.weight"),
                k_norm=tensor(f"{at}.self_attn.k_norm.weight"),
                o=linear(f"{at}.self_attn.o_proj"),
                mlp_norm=tensor(f"{at}.post_attention_layernorm.weight"),
                gate_up=linear(f"{at}.mlp.gate_proj", f"{at}.mlp.up_proj"),
                down=linear(f"{at}.mlp.down_proj"),
            )
            for at in layers
        ]

    def begin(self) -> None:
        self._pending = []
        self._cache.truncate(0)

    def observe(self, ids: list[int], taps: Tensor | None) -> None:
        if taps is None or taps.shape[0] != len(ids):
            raise ValueError("a DFlash drafter needs the taps of every committed token")
        self._pending.append(taps)

    @torch.inference_mode()
    def propose(self, anchor: int, shape: DraftShape) -> DraftTree:
        depth = min(shape.depth, self.max_depth, shape.depth if shape.tree else shape.rows - 1)
        if depth < 1 or shape.rows < 2:
            return EMPTY
        logits = self._logits(anchor, depth)
        if not shape.tree:  # log-probabilities would cost a pass over all logits, and a chain needs none
            return chain(choose(logits, self._target.dtype).tolist())
        return best_first(*top_marginals(logits, min(MARGINAL_TOP_K, shape.rows - 1)), shape)

    @torch.inference_mode()
    def marginals(
        self, anchor: int, depth: int, top_k: int, *, block: int | None = None
    ) -> tuple[list[list[float]], list[list[int]]]:
        """What `propose` would draft from: log-probabilities (nats) and tokens, [depth, top_k] each, descending.

        `block` is the number of rows of the block, anchor included, where it is not to be the trained one.
        """
        return top_marginals(self._logits(anchor, min(depth, self.max_depth), block), top_k)

    def _logits(self, anchor: int, depth: int, block: int | None = None) -> Tensor:
        """Logits [depth, V] of the positions after the anchor, in the target's dtype."""
        target, ops, shape = self._target, self._ops, self.config.model
        committed = self._cache.length + sum(taps.shape[0] for taps in self._pending)
        block = min(block or self.config.block_size, target.config.max_positions - committed)
        self._absorb(block)
        cache = self._cache
        new_k, new_v = cache.slots(block)
        all_k, all_v = cache.visible(block)
        attention = Attention(
            self._plan.attention,
            block,
            cache.length,
            shape.num_heads // shape.num_kv_heads,
            None,
            target.device,
            causal=False,
        )
        cos, sin = self._rope.at(torch.arange(cache.length, cache.length + block, device=target.device))
        x = target.embed(torch.tensor([anchor, *[self.config.mask_token_id] * (block - 1)], device=target.device))
        if self._scale != 1.0:
            x = x * self._scale
        for number, layer in enumerate(self._layers):
            qkv = layer.qkv(ops.rms_norm(x, layer.input_norm))
            heads = qkv.view(block, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
            q, k, v = torch.split(heads, [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)
            q = ops.apply_rope(ops.rms_norm(q, layer.q_norm), cos, sin)
            k = ops.apply_rope(ops.rms_norm(k, layer.k_norm), cos, sin)
            new_k[number].copy_(k.transpose(0, 1))
            new_v[number].copy_(v.transpose(0, 1))
            x = x + layer.o(attend(q, all_k[number], all_v[number], attention))
            gate, up = layer.gate_up(ops.rms_norm(x, layer.mlp_norm)).chunk(2, dim=-1)
            x = x + layer.down(ops.silu_mul(gate, up))
        logits = target.head(ops.rms_norm(x[1 : depth + 1], self._norm))
        if self._multiplier != 1.0:
            logits = logits * self._multiplier
        if self._softcap > 0:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits

    def _absorb(self, block: int) -> None:
        """Turn the taps of newly committed tokens into context, and make room for `block` more slots."""
        new = sum(taps.shape[0] for taps in self._pending)
        self._reserve(self._cache.length + new + block)
        if not new:
            return
        cache, ops, shape = self._cache, self._ops, self.config.model
        features = ops.rms_norm(self._fc(self._normed_last(torch.cat(self._pending))), self._hidden_norm)
        kv = self._context_kv(features).view(new, shape.num_layers, 2, shape.num_kv_heads, shape.head_dim)
        cos, sin = self._rope.at(torch.arange(cache.length, cache.length + new, device=features.device))
        new_k, new_v = cache.slots(new)
        for number, layer in enumerate(self._layers):
            k = ops.apply_rope(ops.rms_norm(kv[:, number, 0], layer.k_norm), cos, sin)
            new_k[number].copy_(k.transpose(0, 1))
            new_v[number].copy_(kv[:, number, 1].transpose(0, 1))
        cache.commit(new)
        self._pending = []

    def _normed_last(self, taps: Tensor) -> Tensor:
        """transformers lists the last layer's output after the final norm, and drafters are trained on that."""
        target = self._target.config
        last = target.num_layers - 1
        if last not in self.taps:
            return taps
        parts = list(torch.split(taps, target.hidden_size, dim=-1))
        for index, layer in enumerate(self.taps):
            if layer == last:
                parts[index] = rms_norm(parts[index], self._target.final_norm, target.rms_norm_eps)
        return torch.cat(parts, dim=-1)

    def _reserve(self, slots: int) -> None:
        """Grow the cache, to twice its size at least, where `slots` do not fit."""
        old = self._cache
        if slots <= old.capacity:
            return
        new = KVCache(self.config.model, max(slots, 2 * old.capacity), self._target.device, self._target.dtype)
        new.slots(old.length)
        new.k[:, :, : old.length] = old.k[:, :, : old.length]
        new.v[:, :, : old.length] = old.v[:, :, : old.length]
        new.commit(old.length)
        self._cache = new


def top_marginals(logits: Tensor, top_k: int) -> tuple[list[list[float]], list[list[int]]]:
    """Log-probabilities (nats) and tokens of the `top_k` most probable tokens in each row of `logits` [D, V], in
    descending order. Probabilities are over the whole vocabulary, in float32."""
    logprobs = logits.float().log_softmax(dim=-1)
    values, tokens = _top(logprobs, min(top_k, logits.shape[-1]))
    return values.tolist(), tokens.tolist()


def _top(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`x.topk(k)` of [D, V]. On a CPU, where that is slow, only the k blocks with the largest maxima are searched: they
    hold the k largest values."""
    rows, length = x.shape
    if x.device.type != "cpu" or length % TOP_BLOCK or length // TOP_BLOCK <= k:
        values, tokens = x.topk(k, dim=-1)
        return values, tokens
    blocks = x.view(rows, -1, TOP_BLOCK)
    best = blocks.amax(dim=-1).topk(k, dim=-1).indices
    inside = blocks.gather(1, best[..., None].expand(-1, -1, TOP_BLOCK)).flatten(1)
    values, at = inside.topk(k, dim=-1)
    return values, best.gather(1, at // TOP_BLOCK) * TOP_BLOCK + at % TOP_BLOCK
