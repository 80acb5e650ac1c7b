"""Bytes and operations against counts made by hand, and against the tensors of a real module."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import DraftConfig, ModelConfig, RopeConfig
from engine.costs import StageCost, StepShape, memory_estimate, padded_rows, stage_costs, total
from engine.deployment import Regime
from engine.plan import Plan

TINY = ModelConfig(
    architecture="llama",
    vocab_size=11,
    hidden_size=6,
    num_layers=2,
    num_heads=3,
    num_kv_heads=1,
    head_dim=4,
    intermediate_size=5,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=1e4),
    max_positions=64,
    tie_embeddings=True,
)
DRAFT_LAYERS = dataclasses.replace(
    TINY, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=3, intermediate_size=7, qk_norm=True
)
DFLASH = DraftConfig(DRAFT_LAYERS, block_size=4, mask_token_id=1, target_layer_ids=(0, 1), num_target_layers=2)
DRAFT_MODEL = dataclasses.replace(TINY, num_layers=1)

shapes = st.builds(
    StepShape,
    rows=st.floats(1, 64),
    context=st.floats(0, 4000),
    drafted=st.floats(0, 16),
    committed=st.floats(1, 17),
    neural_share=st.floats(0, 1),
)


def test_target_stages_by_hand() -> None:
    """Layer: q 12 x 6, k and v 4 x 6 each, o 6 x 12, gate and up 5 x 6 each, down 6 x 5. fp32, 3 rows, 10 in cache."""
    costs = stage_costs(TINY, None, Plan(source="none"), "fp32", StepShape(rows=3, context=10))
    assert costs["verify.qkv"] == StageCost(bytes=2 * (72 + 24 + 24 + 6) * 4, flops=2 * 3 * 2 * 120)
    # 13 keys of one KV head with 4 numbers, K and V, two layers; 3 heads x 3 rows x 13 keys x 4, twice, times two
    assert costs["verify.attention"] == StageCost(bytes=2 * 2 * 4 * 13 * 4, flops=2 * 2 * 2 * 3 * 3 * 13 * 4)
    assert costs["verify.o"] == StageCost(bytes=2 * 72 * 4, flops=2 * 3 * 2 * 72)
    assert costs["verify.mlp"] == StageCost(bytes=2 * (90 + 6) * 4, flops=2 * 3 * 2 * 90)
    # head 11 x 6, the final norm's 6, and 3 rows of 11 logits
    assert costs["verify.lm_head"] == StageCost(bytes=(66 + 6 + 33) * 4, flops=2 * 3 * 66)
    assert costs["host"] == StageCost(bytes=3 * 6 * 4)
    assert costs["draft"] == costs["accept"] == StageCost()


def test_biases_and_head_norms_add_bytes_only() -> None:
    rich = dataclasses.replace(TINY, qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True)
    shape = StepShape(rows=2, context=5)
    plain, biased = (stage_costs(config, None, Plan(), "bf16", shape) for config in (TINY, rich))
    extra = {name: biased[name].bytes - plain[name].bytes for name in plain}
    assert extra["verify.qkv"] == 2 * 2 * ((12 + 4 + 4) + 2 * 4)
    assert extra["verify.o"] == 2 * 2 * 6
    assert extra["verify.mlp"] == 2 * 2 * (5 + 5 + 6)
    assert sum(extra.values()) == extra["verify.qkv"] + extra["verify.o"] + extra["verify.mlp"]
    assert all(biased[name].flops == plain[name].flops for name in plain)


def test_block_drafter_by_hand() -> None:
    """3 drafts: a block of 4. Layer: q, k, v 6 x 6 each, o 6 x 6, MLP 3 x 42: 270. fc is 6 x 12. 2 tokens committed."""
    shape = StepShape(rows=4, context=10, drafted=3, committed=2)
    cost = stage_costs(TINY, DFLASH, Plan(), "fp32", shape)["draft"]
    weights = 270 + 72 + 66  # layer, fc, the target's head
    kv = 2 * 6 * (10 + 4)
    logits = 3 * 11
    assert cost.bytes == (weights + kv + logits) * 4
    block = 2 * 4 * 270 + 4 * 6 * 4 * 14
    context = 2 * 2 * (72 + 2 * 36)
    head = 2 * 3 * 66
    assert cost.flops == block + context + head


def test_draft_model_runs_once_for_every_draft() -> None:
    shape = StepShape(rows=6, context=10, drafted=5)
    cost = stage_costs(TINY, DRAFT_MODEL, Plan(), "fp32", shape)["draft"]
    weights = (120 + 72 + 90) + 66
    keys = 11 + 12 + 13 + 14 + 15
    assert cost.bytes == (5 * (weights + 11) + 2 * 4 * keys) * 4
    assert cost.flops == 5 * 2 * weights + 4 * 12 * keys


@pytest.mark.parametrize("source", ["none", "ngram"])
def test_a_drafter_that_is_not_used_costs_nothing(source: str) -> None:
    plan = Plan(source=source)  # type: ignore[arg-type]
    assert stage_costs(TINY, DFLASH, plan, "fp32", StepShape(4, 9, drafted=3))["draft"] == StageCost()


def test_a_hybrid_pays_for_the_steps_in_which_it_drafted() -> None:
    shape = StepShape(4, 9, drafted=3)
    whole = stage_costs(TINY, DFLASH, Plan(source="hybrid"), "fp32", shape)["draft"]
    part = stage_costs(TINY, DFLASH, Plan(source="hybrid"), "fp32", dataclasses.replace(shape, neural_share=0.25))
    assert part["draft"] == whole.scaled(0.25)


@given(shape=shapes, more=st.floats(0.5, 20), source=st.sampled_from(["none", "neural", "ngram", "hybrid"]))
def test_more_rows_context_or_drafts_never_cost_less(shape: StepShape, more: float, source: str) -> None:
    plan = Plan(source=source)  # type: ignore[arg-type]
    base = stage_costs(TINY, DFLASH, plan, "fp32", shape)
    for field in ("rows", "context", "drafted"):
        grown = stage_costs(
            TINY, DFLASH, plan, "fp32", dataclasses.replace(shape, **{field: getattr(shape, field) + more})
        )
        for name, cost in base.items():
            assert grown[name].bytes >= cost.bytes, (field, name)
            assert grown[name].flops >= cost.flops, (field, name)


@given(shape=shapes)
def test_half_the_element_is_half_the_bytes(shape: StepShape) -> None:
    wide, narrow = (total(stage_costs(TINY, DFLASH, Plan(), dtype, shape)) for dtype in ("fp32", "bf16"))  # type: ignore[arg-type]
    assert narrow.bytes == pytest.approx(wide.bytes / 2)
    assert narrow.flops == wide.flops


@pytest.mark.parametrize(
    ("widths", "rows", "expected"),
    [("exact", 5, 5), ("4", 5, 8), ("4", 8, 8), ("8", 1, 8), ("8", 9, 16), ("8", 16, 16)],
)
def test_padding(widths: str, rows: float, expected: float) -> None:
    assert padded_rows(rows, Plan(verify_widths=widths)) == expected  # type: ignore[arg-type]


def test_weights_of_a_step_are_those_of_the_model() -> None:
    """SmolLM2's shape: what is read in a one-row step without context is all of its 134.5 M parameters, once."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {
        "vocab_size": 320,
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 72,
    }
    model = LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=True))
    config = dataclasses.replace(
        TINY,
        vocab_size=320,
        hidden_size=48,
        num_layers=3,
        num_heads=6,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=72,
    )
    costs = stage_costs(config, None, Plan(source="none"), "fp32", StepShape(rows=1, context=0))
    beside = 4 * (2 * 3 * 2 * 8 + 320 + 48)  # one row of K and V, of logits, of the embedding
    assert total(costs).bytes - beside == 4 * sum(parameter.numel() for parameter in model.parameters())


def test_memory_by_hand() -> None:
    regime = Regime(max_prompt_tokens=20, max_new_tokens=10)
    plan = Plan(source="none", draft_tokens=3, head_rows="needed")
    weights = 2 * 282 + 66  # tied head
    kv = 2 * 2 * 4 * (30 + 4)
    transient, logits = 66, 11 * 4
    base = memory_estimate(TINY, None, plan, "fp32", regime)
    other = memory_estimate(TINY, None, plan, "bf16", regime)
    assert base - other == (weights + kv + transient + logits) * 2
    assert memory_estimate(TINY, DFLASH, plan, "fp32", regime) == base  # a drafter that is not used


@pytest.mark.parametrize(
    "changes",
    [{"gemm": "packed"}, {"head_rows": "all"}, {"draft_tokens": 6}, {"source": "neural"}, {"tree_rows": 32}],
)
@pytest.mark.parametrize("drafter", [DFLASH, DRAFT_MODEL])
def test_what_needs_memory_is_counted(changes: dict[str, object], drafter: DraftConfig | ModelConfig) -> None:
    plan = Plan(source="none", draft_tokens=2, head_rows="needed")
    before = memory_estimate(TINY, drafter, plan, "fp32", Regime())
    assert memory_estimate(TINY, drafter, plan.with_changes(changes), "fp32", Regime()) > before
