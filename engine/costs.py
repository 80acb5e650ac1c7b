"""What a decode step must move and compute: bytes and operations by stage, and the memory that a plan needs.

Pure arithmetic over model shapes, no torch. Counted are the weights (read once a step), the KV cache of the
context, the logits and the embedding rows. Left out are activations between two matrices: a step has a few
dozen rows, so they stay in the cache and need not move. Every count is a lower bound, as a floor needs.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import DraftConfig, ModelConfig
from engine.deployment import Dtype, Regime
from engine.plan import Plan

ELEMENT_BYTES: dict[Dtype, int] = {"fp32": 4, "bf16": 2}
PROCESS_BYTES = {"cpu": 450_000_000, "cuda": 1_000_000_000}
"""Resident size of a child before it holds weights: interpreter, torch, tokenizer; on CUDA its context too."""


@dataclass(frozen=True)
class StageCost:
    """Bytes that one step reads or writes in memory, and its floating-point operations (a multiply-add is two)."""

    bytes: float = 0.0
    flops: float = 0.0

    def __add__(self, other: StageCost) -> StageCost:
        return StageCost(self.bytes + other.bytes, self.flops + other.flops)

    def scaled(self, factor: float) -> StageCost:
        return StageCost(self.bytes * factor, self.flops * factor)


@dataclass(frozen=True)
class StepShape:
    """What one average step does. All are mean counts of tokens or rows, so they need not be whole.

    `rows` verify rows, anchor included; `context` tokens in the target's KV cache before the step; `drafted`
    depth of the draft; `committed` tokens that a step adds to the text; `neural_share` the share of steps in
    which the neural drafter ran (below 1 in a hybrid).
    """

    rows: float
    context: float
    drafted: float = 0.0
    committed: float = 1.0
    neural_share: float = 1.0


def padded_rows(rows: float, plan: Plan) -> float:
    """Rows that a verify pass of `rows` computes under the plan's `verify_widths`."""
    if plan.verify_widths == "exact":
        return rows
    multiple = int(plan.verify_widths)
    return float(-(-rows // multiple) * multiple)


def stage_costs(
    config: ModelConfig, drafter: DraftConfig | ModelConfig | None, plan: Plan, dtype: Dtype, shape: StepShape
) -> dict[str, StageCost]:
    """Cost of one step by stage name (`engine.stages`), for the rows that `shape` gives (pad them first).

    `drafter` is a block drafter's or a draft model's config; it costs nothing where the plan's source does
    not use it.
    """
    element = ELEMENT_BYTES[dtype]
    rows = shape.rows
    hidden, layers = config.hidden_size, config.num_layers
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    qkv_extra = hidden + (q + 2 * kv if config.qkv_bias else 0) + (2 * config.head_dim if config.qk_norm else 0)
    mlp_extra = hidden + (2 * config.intermediate_size + hidden if config.mlp_bias else 0)
    head = StageCost(config.vocab_size * hidden * element, 2 * rows * config.vocab_size * hidden)
    logits = StageCost(rows * config.vocab_size * element)
    costs = {
        "draft": _draft_cost(config, drafter, plan, element, shape),
        "verify.qkv": _matrix(layers, hidden, q + 2 * kv, rows, element, extra=qkv_extra),
        "verify.attention": _attention(layers, q, kv, rows, shape.context + rows, element),
        "verify.o": _matrix(layers, q, hidden, rows, element, extra=hidden if config.o_bias else 0),
        "verify.mlp": _matrix(layers, hidden, 3 * config.intermediate_size, rows, element, extra=mlp_extra),
        "verify.lm_head": head + logits + StageCost(hidden * element),
        "accept": StageCost(),
        "host": StageCost(rows * hidden * element),  # embedding rows
    }
    return costs


def total(costs: dict[str, StageCost]) -> StageCost:
    """Sum over stages."""
    return sum(costs.values(), StageCost())


def _matrix(layers: int, inner: int, outer: int, rows: float, element: int, extra: int = 0) -> StageCost:
    """`layers` matrices [outer, inner], with `extra` elements of bias or norm each, over `rows` rows."""
    weights = inner * outer
    return StageCost(layers * (weights + extra) * element, 2 * rows * layers * weights)


def _attention(layers: int, q: int, kv: int, rows: float, keys: float, element: int) -> StageCost:
    """Scores and weighted sum of `rows` queries over `keys` keys; K and V are read once."""
    return StageCost(2 * layers * kv * keys * element, 4 * layers * q * rows * keys)


def _draft_cost(
    config: ModelConfig, drafter: DraftConfig | ModelConfig | None, plan: Plan, element: int, shape: StepShape
) -> StageCost:
    if drafter is None or plan.source in ("none", "ngram") or shape.drafted <= 0:
        return StageCost()
    if isinstance(drafter, DraftConfig):
        once = _block_drafter(config, drafter, element, shape)
    else:
        once = _draft_model(drafter, element, shape)
    return once.scaled(shape.neural_share)


def _block_drafter(config: ModelConfig, drafter: DraftConfig, element: int, shape: StepShape) -> StageCost:
    """One pass of a block (anchor and masks), K/V of the newly committed tokens from their taps, and the
    target's head over the drafted positions."""
    model = drafter.model
    hidden = model.hidden_size
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    block = shape.drafted + 1
    layers = StageCost(
        model.num_layers * model.layer_parameters * element, 2 * block * model.num_layers * model.layer_parameters
    )
    attention = _attention(model.num_layers, q, kv, block, shape.context + block, element)
    taps = len(drafter.target_layer_ids) * config.hidden_size * hidden
    context = StageCost(
        taps * element,  # the K/V projections are counted with the layers
        2 * shape.committed * (taps + model.num_layers * hidden * 2 * kv),
    )
    vocabulary = config.vocab_size * hidden
    head = StageCost(vocabulary * element, 2 * shape.drafted * vocabulary)
    logits = StageCost(shape.drafted * config.vocab_size * element)
    return layers + attention + context + head + logits


def _draft_model(model: ModelConfig, element: int, shape: StepShape) -> StageCost:
    """One pass of the whole model for every draft token, each with one more key than the last."""
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    weights = model.num_layers * model.layer_parameters + model.vocab_size * model.hidden_size
    keys = shape.context + (shape.drafted + 1) / 2
    attention = _attention(model.num_layers, q, kv, 1, keys, element)
    one = StageCost(weights * element, 2 * weights) + attention + StageCost(model.vocab_size * element)
    return one.scaled(shape.drafted)


def memory_estimate(
    config: ModelConfig,
    drafter: DraftConfig | ModelConfig | None,
    plan: Plan,
    dtype: Dtype,
    regime: Regime,
    *,
    device_kind: str = "cpu",
) -> int:
    """Bytes that a child needs to serve this plan: weights, drafter, KV caches, logits and the process itself.

    A packed GEMM keeps its own copy of a tied head, since the embedding table stays; taps of the prompt and
    the largest transient matrix of loading are counted too.
    """
    element = ELEMENT_BYTES[dtype]
    rows = plan.tree_rows or plan.draft_tokens + 1
    tokens = regime.max_prompt_tokens + regime.max_new_tokens + rows
    embedding = config.vocab_size * config.hidden_size
    elements = config.parameters + config.kv_bytes_per_token_per_byte * tokens * regime.batch
    if config.tie_embeddings and plan.gemm == "packed":
        elements += embedding
    elements += embedding  # the largest matrix, held twice while it is converted, packed or moved
    elements += config.vocab_size * (regime.max_prompt_tokens if plan.head_rows == "all" else rows)
    if drafter is not None and plan.source in ("neural", "hybrid"):
        model = drafter.model if isinstance(drafter, DraftConfig) else drafter
        elements += model.kv_bytes_per_token_per_byte * tokens
        if isinstance(drafter, DraftConfig):
            width = len(drafter.target_layer_ids) * config.hidden_size
            elements += model.num_layers * model.layer_parameters + width * (model.hidden_size + tokens)
            elements += rows * config.vocab_size
            if plan.draft_gemm != plan.gemm and plan.draft_gemm == "packed":
                elements += embedding  # its own packed copy of the target's head
        else:
            elements += model.parameters
            if model.tie_embeddings and plan.draft_gemm == "packed":
                elements += model.vocab_size * model.hidden_size
    return elements * element + PROCESS_BYTES[device_kind]
