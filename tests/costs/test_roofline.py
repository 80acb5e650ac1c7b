"""Floors never lie above what was measured, gaps are sorted, and draft options are weighed correctly."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.codec import from_json, to_json
from engine.config import DraftConfig, ModelConfig, RopeConfig
from engine.costs import StageCost, StepShape, stage_costs
from engine.errors import UserError
from engine.hardware import HardwareProfile
from engine.levers import ALGORITHM
from engine.plan import Plan
from engine.roofline import (
    Rates,
    StageProfile,
    analyse,
    draft_options,
    floor_seconds,
    floors,
    gaps,
    profiled_event,
)
from engine.stages import STAGE_NAMES

SMOL = ModelConfig(
    architecture="llama",
    vocab_size=49152,
    hidden_size=576,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    intermediate_size=1536,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=1e5),
    max_positions=8192,
    tie_embeddings=True,
)
DRAFTER = DraftConfig(
    dataclasses.replace(SMOL, num_layers=4, qk_norm=True),
    block_size=8,
    mask_token_id=7,
    target_layer_ids=(1, 7, 14, 20, 27),
    num_target_layers=30,
)
HARDWARE = HardwareProfile(
    device="cpu",
    kind="cpu",
    name="a test machine",
    cores=2,
    memory_bytes=1 << 34,
    free_bytes=1 << 33,
    read_gb_s=40.0,
    matmul_gflop_s=150.0,
    llc_bytes=32 << 20,
    dtype="fp32",
    versions={},
    samples={},
)
RATES = Rates(40e9, 150e9, 32 << 20)
PLAN = Plan()
TREE = ((4, 2.2), (8, 2.6), (16, 2.9), (32, 3.1), (64, 3.2))


def simulate(
    rng: random.Random, plan: Plan, *, slower: float = 1.0, tree: tuple[tuple[int, float], ...] = TREE
) -> StageProfile:
    """A profile whose stages take between once and several times their true cost on `HARDWARE`."""
    steps = rng.randint(3, 40)
    drafts = plan.source != "none"
    nodes = (plan.tree_rows - 1 if plan.tree_rows else plan.draft_tokens) if drafts else 0
    emitted = [rng.randint(1, 1 + min(nodes, plan.draft_tokens)) if drafts else 1 for _ in range(steps)]
    depth = min(nodes, plan.draft_tokens)
    shape = StepShape(nodes + 1, 100.0, depth, sum(emitted) / steps)
    floor = floors(stage_costs(SMOL, DRAFTER, plan, "fp32", shape), RATES)
    seconds = {name: (floor[name] * rng.uniform(1, 4) * slower + 1e-5) * steps for name in STAGE_NAMES}
    return StageProfile(
        stage_seconds=seconds,
        decode_s=sum(seconds.values()),
        prefill_s=0.2,
        emitted_per_step=tuple(emitted),
        drafted_per_step=(nodes,) * steps,
        acceptance_by_position=tuple(sum(count > at for count in emitted) / steps for at in range(1, depth + 1)),
        context_tokens=100.0,
        tree_oracle=tree if drafts else (),
        verify_ms=((1, 40.0), (4, 42.0), (8, 45.0), (16, 60.0), (32, 90.0), (64, 150.0)),
        replay_ms_per_token=9.5,
    )


@pytest.mark.parametrize(
    "changes",
    [{}, {"source": "none"}, {"source": "ngram"}, {"source": "hybrid"}, {"tree_rows": 16}, {"verify_widths": "8"}],
)
@given(seed=st.integers(0, 2**32 - 1), slower=st.floats(0.6, 5))
@settings(max_examples=20, deadline=None)
def test_measured_is_never_below_own_nor_own_below_reachable(
    changes: dict[str, object], seed: int, slower: float
) -> None:
    plan = PLAN.with_changes(changes)
    profile = simulate(random.Random(seed), plan, slower=slower)
    roofline = analyse(profile, SMOL, DRAFTER, plan, "fp32", HARDWARE)
    for row in roofline.gaps:
        assert row.measured_ms >= row.own_floor_ms >= row.reachable_floor_ms >= 0
        assert row.gap_ms == pytest.approx(row.measured_ms - row.reachable_floor_ms)
    stages = [row for row in roofline.gaps if row.stage != ALGORITHM]
    assert sorted(row.stage for row in stages) == sorted(STAGE_NAMES)
    assert sum(row.measured_ms for row in stages) == pytest.approx(profile.ms_per_token)
    assert roofline.own_floor_ms == pytest.approx(sum(row.own_floor_ms for row in stages))
    assert roofline.ms_per_token >= roofline.own_floor_ms >= roofline.reachable_floor_ms > 0


def test_gaps_are_sorted_and_follow_the_time_lost() -> None:
    rng = random.Random(11)
    profile = simulate(rng, PLAN)
    order = [row.gap_ms for row in gaps(profile, SMOL, DRAFTER, PLAN, "fp32", HARDWARE)]
    assert order == sorted(order, reverse=True)
    for stage in ("verify.o", "draft", "host"):
        lost = {**profile.stage_seconds, stage: profile.stage_seconds[stage] + 100.0}
        slow = dataclasses.replace(profile, stage_seconds=lost, decode_s=profile.decode_s + 100.0, tree_oracle=())
        stages = [row.stage for row in gaps(slow, SMOL, DRAFTER, PLAN, "fp32", HARDWARE) if row.stage != ALGORITHM]
        assert stages[0] == stage


def test_floor_by_hand() -> None:
    """100 bytes at 10 bytes/s, a quarter of the step's bytes kept by the cache; or 60 operations at 5 a second."""
    rates = Rates(bytes_s=10.0, flops_s=5.0, cache_bytes=100.0)
    assert floor_seconds(StageCost(100, 30), rates, step_bytes=400) == pytest.approx(7.5)
    assert floor_seconds(StageCost(100, 60), rates, step_bytes=400) == pytest.approx(12.0)
    assert floor_seconds(StageCost(100, 0), rates, step_bytes=80) == 0


def test_one_row_step_floor_is_bytes_over_bandwidth() -> None:
    """The published way to state a decode floor: weight bytes over bandwidth, here less what the cache may keep."""
    profile = simulate(random.Random(2), Plan(source="none"), slower=3)
    roofline = analyse(profile, SMOL, None, Plan(source="none"), "fp32", HARDWARE)
    step_bytes = sum(row.bytes_per_step for row in roofline.gaps)
    assert step_bytes == pytest.approx(134.5e6 * 4, rel=0.02)
    assert roofline.own_floor_ms == pytest.approx(1e3 * (step_bytes - (32 << 20)) / 40e9)
    assert roofline.reachable_accept_length == 1.0


def test_padding_is_in_the_own_floor_and_not_in_the_reachable_one() -> None:
    profile = simulate(random.Random(4), Plan(draft_tokens=2), slower=50, tree=())
    exact, padded = (
        analyse(profile, SMOL, DRAFTER, Plan(draft_tokens=2, verify_widths=widths), "fp32", HARDWARE)  # type: ignore[arg-type]
        for widths in ("exact", "8")
    )
    assert padded.own_floor_ms > exact.own_floor_ms
    assert padded.reachable_floor_ms == pytest.approx(exact.reachable_floor_ms)


def test_the_best_tree_sets_the_reachable_floor() -> None:
    """With bandwidth bound steps the tree with the highest accept length wins; the floor follows from it by hand."""
    fast, rates = dataclasses.replace(HARDWARE, matmul_gflop_s=1e9), Rates(40e9, 1e18, 32 << 20)
    profile = simulate(random.Random(5), PLAN, slower=50)
    profile = dataclasses.replace(profile, tree_oracle=((8, 6.0), (64, 9.0)))
    roofline = analyse(profile, SMOL, DRAFTER, PLAN, "fp32", fast)
    assert roofline.best_option == "a tree of 64 rows"
    step = floors(stage_costs(SMOL, DRAFTER, PLAN, "fp32", StepShape(64, 100.0, 7, 9.0)), rates)
    own = {row.stage: row.own_floor_ms for row in roofline.gaps}
    for row in roofline.gaps:
        if row.stage != ALGORITHM:
            wanted = min(1e3 * step[row.stage] / 9.0, own[row.stage])
            assert row.reachable_floor_ms == pytest.approx(wanted), row.stage


def test_algorithm_row_by_hand() -> None:
    """Step 100 ms at 2 tokens: 50 ms per token. A tree of 16 rows costs 60 - 45 ms more and emits 4: 28.75 ms."""
    seconds = dict.fromkeys(STAGE_NAMES, 0.0) | {"verify.mlp": 0.7, "draft": 0.3}
    profile = StageProfile(
        stage_seconds=seconds,
        decode_s=1.0,
        prefill_s=0.1,
        emitted_per_step=(2,) * 10,
        drafted_per_step=(7,) * 10,
        acceptance_by_position=(1.0, 0, 0, 0, 0, 0, 0),
        context_tokens=10.0,
        tree_oracle=((16, 4.0), (64, 4.1)),
        verify_ms=((1, 40.0), (8, 45.0), (16, 60.0), (64, 150.0)),
    )
    roofline = analyse(profile, SMOL, DRAFTER, PLAN, "fp32", HARDWARE)
    row = next(row for row in roofline.gaps if row.stage == ALGORITHM)
    assert row.measured_ms == row.own_floor_ms == pytest.approx(50.0)
    assert row.reachable_floor_ms == pytest.approx((100 + 15) / 4)
    assert roofline.reachable_accept_length == 4.0
    alone = dataclasses.replace(profile, tree_oracle=())
    # the chain of one draft has all of the acceptance: (100 - 45 + 40 + 5 / 7) / 2
    row = next(r for r in gaps(alone, SMOL, DRAFTER, PLAN, "fp32", HARDWARE) if r.stage == ALGORITHM)
    assert row.reachable_floor_ms == pytest.approx((100 - 45 + 40 + 5 / 7) / 2)


def test_drafting_that_does_not_pay_shows_as_an_algorithm_gap() -> None:
    seconds = dict.fromkeys(STAGE_NAMES, 0.0) | {"verify.mlp": 0.5, "draft": 0.5}
    profile = StageProfile(
        stage_seconds=seconds,
        decode_s=1.0,
        prefill_s=0.1,
        emitted_per_step=(1,) * 9 + (2,),
        drafted_per_step=(7,) * 10,
        acceptance_by_position=(0.1, 0, 0, 0, 0, 0, 0),
        context_tokens=10.0,
        verify_ms=((1, 40.0), (8, 45.0)),
    )
    roofline = analyse(profile, SMOL, DRAFTER, PLAN, "fp32", HARDWARE)
    row = next(row for row in roofline.gaps if row.stage == ALGORITHM)
    assert row.reachable_floor_ms == pytest.approx(100 - 5 - 50)
    assert roofline.reachable_accept_length == 1.0


def test_chain_options_come_from_acceptance_by_position() -> None:
    profile = simulate(random.Random(8), Plan(draft_tokens=3), tree=())
    options = {option.rows: option for option in draft_options(profile) if option.label.startswith("a chain")}
    accepted = profile.acceptance_by_position
    assert options[2].accept_length == pytest.approx(1 + accepted[0])
    assert options[3].accept_length == pytest.approx(1 + accepted[0] + accepted[1])
    assert set(options) == {2, 3}
    tree = simulate(random.Random(8), Plan(draft_tokens=3, tree_rows=16))
    assert not any(option.label.startswith("a chain") for option in draft_options(tree))


def test_a_stage_faster_than_the_probe_raises_the_rates() -> None:
    profile = simulate(random.Random(9), PLAN)
    slow = dataclasses.replace(HARDWARE, read_gb_s=28.0, matmul_gflop_s=105.0)
    lifted = analyse(profile, SMOL, DRAFTER, PLAN, "fp32", slow)
    row = max(lifted.gaps, key=lambda row: row.own_floor_ms / row.measured_ms if row.stage != ALGORITHM else 0)
    assert row.own_floor_ms / row.measured_ms == pytest.approx(1.0, rel=1e-6)


def test_a_probe_far_too_low_is_refused() -> None:
    profile = simulate(random.Random(9), PLAN)
    wrong = dataclasses.replace(HARDWARE, read_gb_s=4.0, matmul_gflop_s=15.0)
    with pytest.raises(UserError, match=r"times faster than the probed rates of a test machine .*--refresh") as caught:
        analyse(profile, SMOL, DRAFTER, PLAN, "fp32", wrong)
    assert caught.value.code == "implausible-hardware"


def test_a_profile_without_steps_is_refused() -> None:
    profile = dataclasses.replace(simulate(random.Random(1), PLAN), emitted_per_step=(), drafted_per_step=())
    with pytest.raises(UserError, match="no decode step"):
        analyse(profile, SMOL, DRAFTER, PLAN, "fp32", HARDWARE)


def test_the_event_holds_the_profile() -> None:
    profile = simulate(random.Random(12), PLAN)
    event = profiled_event(profile, SMOL, DRAFTER, PLAN, "fp32", HARDWARE, 2)
    assert from_json(type(event), json.loads(json.dumps(to_json(event)))) == event
    assert event.round == 2
    assert event.plan == PLAN
    assert sum(event.accept_histogram) == profile.steps
    assert sum(n * steps for n, steps in enumerate(event.accept_histogram)) == profile.tokens
    assert event.accept_length == pytest.approx(1 + sum(event.acceptance_by_position))
    assert event.ms_per_token == pytest.approx(1e3 * profile.decode_s / profile.tokens)
    assert event.oracle_ms_per_token == 9.5
    assert event.prefill_ms == pytest.approx(200.0)


def test_a_stage_profile_survives_json() -> None:
    profile = simulate(random.Random(13), PLAN.with_changes({"tree_rows": 8}))
    assert from_json(StageProfile, json.loads(json.dumps(to_json(profile)))) == profile
