"""The view-model: complete in every state, JSON-ready, and true to the state."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from search_world import Shell, World, at_random

from engine.deployment import Deployment
from engine.search.events import StatusChanged, TrialStarted
from engine.search.policy import decide
from engine.search.state import State, fold_all
from engine.search.view import LABELS, reachable_ms, title, view
from engine.stages import STAGE_NAMES

SHAPE: dict[str, Any] = {
    "budget": {"seconds", "seconds_used", "trials", "trials_used"},
    "headline": {
        "over_autoregressive", "over_speculative", "over_own_autoregressive", "tok_s", "accept_length",
        "stock_accept_length", "roofline_share", "ceiling_ratio", "forcing",
    },
    "stages": {"name", "label"},
    "stocks": {"name", "implementation", "tok_s", "accept_length"},
    "largest_gap": {"stage", "label", "gap_ms", "sentence"},
    "gaps": {
        "stage", "label", "measured_ms", "own_floor_ms", "reachable_floor_ms", "gap_ms", "bytes_per_step",
        "flops_per_step", "bound",
    },
    "gap_history": {"round", "ms_per_token", "reachable_ms"},
    "points": {"trial", "round", "kind", "ratio", "verdict"},
    "incumbents": {"trial", "round", "ratio", "low", "high"},
    "accept": {"histogram", "by_position", "accept_length"},
    "first_profile_accept": {"histogram", "by_position", "accept_length"},
    "candidates": {
        "trial", "round", "kind", "agent", "arm", "stage", "changes", "rationale", "predicted", "status", "phase",
        "verdict", "reason", "ratio", "low", "high", "accept_length", "forcing", "seconds",
    },
    "bundle": {"file", "sha256", "bytes"},
    "finished": {"reason", "sentence"},
}  # fmt: skip
PLAIN = {"seq", "status", "sentence", "deployment", "title", "round"}


def finished(seed: int) -> Shell:
    world = World(seed)
    shell = Shell(world, at_random(world), seed=seed)
    shell.run()
    return shell


def successful() -> Shell:
    """A search that adopted something."""
    return next(shell for seed in range(100) if len((shell := finished(seed)).state.incumbents) > 1)


@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_the_shape_is_the_same_after_any_event(seed: int) -> None:
    shell = finished(seed)
    for count in range(1, len(shell.events) + 1):
        state = fold_all(shell.events[:count])
        shown = view(state)
        assert json.loads(json.dumps(shown, allow_nan=False)) == shown
        assert shown.keys() == SHAPE.keys() | PLAIN
        for key, fields in SHAPE.items():
            rows = shown[key] if isinstance(shown[key], list) else [shown[key]]
            assert all(row is None or row.keys() == fields for row in rows), key
        assert shown["seq"] == count
        assert shown["sentence"]


def test_stages_come_in_order_with_the_algorithm_last() -> None:
    names = [row["name"] for row in view(finished(1).state)["stages"]]
    assert names == [*STAGE_NAMES, "algorithm"]


def test_the_headline_is_the_incumbents_measurement() -> None:
    shell = successful()
    state, shown = shell.state, view(shell.state)
    incumbent = state.incumbent
    over = incumbent.over_autoregressive
    assert shown["headline"]["over_autoregressive"] == {"ratio": over.ratio, "low": over.low, "high": over.high}
    assert shown["headline"]["over_speculative"]["ratio"] == incumbent.over_speculative.ratio
    assert shown["headline"]["tok_s"] == over.candidate_tok_s
    assert shown["headline"]["forcing"] == {"exact": 200, "near_tie": 0, "error": 0, "near_tie_limit": 2}
    assert [row["trial"] for row in shown["incumbents"]] == [i.trial for i in state.incumbents]
    assert shown["finished"]["sentence"] == shown["sentence"]
    assert shown["bundle"]["file"] == "bundle.zip"


def test_points_put_every_timed_trial_on_one_scale() -> None:
    shell = successful()
    state, points = shell.state, {row["trial"]: row for row in view(shell.state)["points"]}
    timed = {n for n, t in state.trials.items() if t.ratio is not None} | {0}
    assert points.keys() == timed
    truth = shell.world
    for number, point in points.items():
        assert point["ratio"] == pytest.approx(1.3 * truth.speed(state.trials[number].plan), rel=0.08)
        assert point["verdict"] == state.trials[number].judgement.verdict


def test_candidates_tell_what_changed_from_what() -> None:
    state = successful().state
    for row in view(state)["candidates"]:
        proposal = state.trials[row["trial"]].proposal
        (parent,) = {i.plan for i in state.incumbents if i.plan.digest == proposal.parent}
        assert {c["lever"]: c["to"] for c in row["changes"]} == proposal.changes
        for change in row["changes"]:
            assert change["from"] == getattr(parent, change["lever"]) != change["to"]


def test_ceilings_follow_from_the_profile() -> None:
    shell = finished(3)
    profile = shell.state.profiles[-1]
    floors = sum(gap.reachable_floor_ms for gap in profile.stages if gap.stage != "algorithm")
    assert reachable_ms(profile) == pytest.approx(floors)
    assert reachable_ms(replace(profile, stages=())) is None
    before = fold_all(shell.events[: next(e.seq for e in shell.events if e.body.type == "profiled")])
    headline, first = view(before)["headline"], before.profiles[0]
    assert headline["roofline_share"] == pytest.approx(reachable_ms(first) / first.ms_per_token)
    over = before.incumbent.over_autoregressive.ratio
    assert headline["ceiling_ratio"] == pytest.approx(over / headline["roofline_share"])
    gap = view(before)["largest_gap"]
    assert gap["gap_ms"] == max(g.gap_ms for g in first.stages)
    assert gap["label"] == LABELS[gap["stage"]]
    assert f"{gap['gap_ms']:.2f}" in gap["sentence"]


def test_the_sentence_says_what_goes_on() -> None:
    world = World(4)
    shell = Shell(world, at_random(world), seed=4)
    said: dict[str, str] = {}
    while shell.state.finished is None:
        action = decide(shell.state)[0]
        said.setdefault(action.kind, view(shell.state)["sentence"])
        shell.act(action)
    assert said["probe"] == "Measuring what this hardware can do."
    assert said["stock"] == "Measuring stock autoregressive decoding."
    assert said["trial"] == "Judging the initial plan."
    assert said["profile"] == "Round 1: profiling the incumbent stage by stage."
    assert said["bundle"] == "Writing the bundle."

    shell = Shell(world, at_random(world), seed=4)
    shell.run(lambda state: bool(state.rounds) and state.rounds[0].proposed is not None)
    shell.emit(TrialStarted(1, "w", 1))
    assert view(shell.state)["sentence"] == "Round 1: judging candidate 1."
    shell.emit(next(iter(shell.work(decide(shell.state)[0])))[0])
    shell.emit(StatusChanged("paused", "x"))
    assert view(shell.state)["sentence"].startswith("Paused in round 1")
    assert view(shell.state)["status"] == "paused"
    shell.emit(StatusChanged("cancelling", "x"))
    assert view(shell.state)["sentence"].startswith("Cancelling: ")


@pytest.mark.parametrize(
    ("deployment", "expected"),
    [
        (Deployment(), "SmolLM2-135M-Instruct with the DFlash demo drafter, fp32 on cpu"),
        (
            Deployment("/a/My-7B/", "ngram", dtype="bf16", platform="cuda:0"),
            "My-7B with n-gram drafts, bf16 on cuda:0",
        ),
        (Deployment("/a/b/tiny.gguf", "/x/draft"), "tiny with draft, fp32 on cpu"),
    ],
)
def test_titles_are_short_and_name_the_parts(deployment: Deployment, expected: str) -> None:
    assert title(deployment) == expected


def test_views_of_unfinished_states_use_nothing_from_later() -> None:
    shell = finished(random.randrange(1000))
    state: State = fold_all(shell.events[:1])
    shown = view(state)
    assert shown["gaps"] == shown["points"] == shown["candidates"] == shown["incumbents"] == []
    assert shown["headline"] == dict.fromkeys(SHAPE["headline"])
    assert shown["accept"] == {"histogram": [], "by_position": [], "accept_length": None}
    assert shown["first_profile_accept"] is shown["bundle"] is shown["finished"] is shown["largest_gap"] is None
