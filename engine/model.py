"""The decoder: Llama, Qwen2 and Qwen3 as one function over rows of one request.

A row is one token at one position. Prefill, one-token decode and the verification of a draft tree are the same call
with other rows and another mask. Activations are [R, hidden]; there is no batch axis.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.cache import KVCache
from engine.config import ModelConfig
from engine.layers import Attention, Elementwise, attend
from engine.linear import Linear, make_linear
from engine.plan import Plan
from engine.rope import RopeTable
from engine.stages import NULL_CLOCK, NullClock, StageClock
from engine.weights import Checkpoint

Logits = Literal["all", "last", "none"]


@dataclass(frozen=True)
class Forward:
    """`logits`: [R, vocab] for "all", [1, vocab] for "last", None for "none", in the model's dtype.
    `taps`: [R, n * hidden], or None where none were asked for."""

    logits: Tensor | None
    taps: Tensor | None


@dataclass(frozen=True)
class _Layer:
    input_norm: Tensor
    qkv: tuple[Linear, ...]  # one fused projection, or three
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Linear
    mlp_norm: Tensor
    gate_up: tuple[Linear, ...]  # one fused projection, or two
    down: Linear


class Model:
    """A checkpoint on a device, computed as `plan` says.

    Raises UserError where the checkpoint does not hold what its configuration asks for, or a lever of the plan
    cannot be had on this device.
    """

    def __init__(self, checkpoint: Checkpoint, *, device: torch.device | str, dtype: torch.dtype, plan: Plan) -> None:
        checkpoint.check()
        self.config: ModelConfig = checkpoint.config
        self.device = torch.device(device)
        self.dtype = dtype
        self.plan = plan
        config = self.config
        if self.device.type == "cuda":
            # cuDNN plans its attention anew for every key length, about 40 ms each on an H200: every decode step has
            # a new one. The other fused kernels of PyTorch need no plan.
            torch.backends.cuda.enable_cudnn_sdp(False)

        def load(name: str) -> Tensor:
            return checkpoint.tensor(name).to(self.device, dtype)

        def linear(*names: str, biased: bool) -> Linear:
            weights = [load(f"{name}.weight") for name in names]
            biases = [load(f"{name}.bias") for name in names] if biased else []
            weight = weights[0] if len(weights) == 1 else torch.cat(weights)
            return make_linear(weight, torch.cat(biases) if biases else None, plan.gemm)

        def group(names: list[str], *, fused: bool, biased: bool) -> tuple[Linear, ...]:
            if fused:
                return (linear(*names, biased=biased),)
            return tuple(linear(name, biased=biased) for name in names)

        self.embedding = load("model.embed_tokens.weight")
        self._layers: list[_Layer] = []
        for number in range(config.num_layers):
            at = f"model.layers.{number}"
            qkv = [f"{at}.self_attn.{part}_proj" for part in "qkv"]
            gate_up = [f"{at}.mlp.gate_proj", f"{at}.mlp.up_proj"]
            self._layers.append(
                _Layer(
                    input_norm=load(f"{at}.input_layernorm.weight"),
                    qkv=group(qkv, fused=plan.fuse_qkv, biased=config.qkv_bias),
                    q_norm=load(f"{at}.self_attn.q_norm.weight") if config.qk_norm else None,
                    k_norm=load(f"{at}.self_attn.k_norm.weight") if config.qk_norm else None,
                    o=linear(f"{at}.self_attn.o_proj", biased=config.o_bias),
                    mlp_norm=load(f"{at}.post_attention_layernorm.weight"),
                    gate_up=group(gate_up, fused=plan.fuse_gate_up, biased=config.mlp_bias),
                    down=linear(f"{at}.mlp.down_proj", biased=config.mlp_bias),
                )
            )
        self.final_norm = load("model.norm.weight")
        head = self.embedding if config.tie_embeddings else load("lm_head.weight")
        self._head = make_linear(head, None, plan.gemm)
        self.rope = RopeTable(config.rope, config.head_dim, config.max_positions, self.device, dtype)
        self._ops = Elementwise(config.rms_norm_eps, compiled=plan.compile)

    def embed(self, ids: Tensor) -> Tensor:
        """Embedding rows [R, hidden] of token ids [R]."""
        return F.embedding(ids, self.embedding)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [R, vocab] of normed hidden states [R, hidden]; the final norm is not included."""
        return self._head(hidden)

    def new_cache(self, capacity: int) -> KVCache:
        return KVCache(self.config, capacity, self.device, self.dtype)

    @torch.inference_mode()
    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        cache: KVCache,
        *,
        tree_mask: Tensor | None = None,
        logits: Logits = "all",
        taps: tuple[int, ...] = (),
        clock: StageClock | NullClock = NULL_CLOCK,
    ) -> Forward:
        """Run R rows: token ids [R] at positions [R] (both int64, on the model's device).

        Row r sees all committed slots of `cache` and, of the R new rows, those j with tree_mask[r, j] (bool [R, R];
        None is causal). Keys and values of the rows are written behind the committed ones and not committed.
        `taps` are layers (0-based) whose output is returned. Raises ValueError where the cache is full.
        """
        config, ops = self.config, self._ops
        rows = ids.shape[0]
        new_k, new_v = cache.slots(rows)
        all_k, all_v = cache.visible(rows)
        attention = Attention(
            self.plan.attention, rows, cache.length, config.num_heads // config.num_kv_heads, tree_mask, self.device
        )
        cos, sin = self.rope.at(positions)
        tapped: dict[int, Tensor] = {}
        hidden = self.embed(ids)
        for number, layer in enumerate(self._layers):
            with clock.stage("verify.qkv"):
                q, k, v = self._project(layer, ops.rms_norm(hidden, layer.input_norm), cos, sin)
                new_k[number].copy_(k.transpose(0, 1))
                new_v[number].copy_(v.transpose(0, 1))
            with clock.stage("verify.attention"):
                mixed = attend(q, all_k[number], all_v[number], attention)
            with clock.stage("verify.o"):
                hidden = hidden + layer.o(mixed)
            with clock.stage("verify.mlp"):
                x = ops.rms_norm(hidden, layer.mlp_norm)
                if len(layer.gate_up) == 1:
                    gate, up = layer.gate_up[0](x).chunk(2, dim=-1)
                else:
                    gate, up = layer.gate_up[0](x), layer.gate_up[1](x)
                hidden = hidden + layer.down(ops.silu_mul(gate, up))
            if number in taps:
                tapped[number] = hidden
        with clock.stage("verify.lm_head"):
            result = None
            if logits != "none":
                last = hidden if logits == "all" else hidden[-1:]
                result = self._head(ops.rms_norm(last, self.final_norm))
        joined = torch.cat([tapped[tap] for tap in taps], dim=-1) if taps else None
        return Forward(result, joined)

    def _project(self, layer: _Layer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated q [R, q_heads, head_dim] and k, and v [R, kv_heads, head_dim], of normed hidden states x."""
        config, ops = self.config, self._ops
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        counts = (heads, kv_heads, kv_heads)
        if len(layer.qkv) == 1:
            qkv = layer.qkv[0](x).view(-1, heads + 2 * kv_heads, head_dim)
            if layer.q_norm is None:  # q and k are rotated as one
                qk = ops.apply_rope(qkv[:, : heads + kv_heads], cos, sin)
                return qk[:, :heads], qk[:, heads:], qkv[:, heads + kv_heads :]
            q, k, v = torch.split(qkv, list(counts), dim=1)
        else:
            q, k, v = (project(x).view(-1, n, head_dim) for project, n in zip(layer.qkv, counts, strict=True))
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = ops.rms_norm(q, layer.q_norm), ops.rms_norm(k, layer.k_norm)
        return ops.apply_rope(q, cos, sin), ops.apply_rope(k, cos, sin), v
