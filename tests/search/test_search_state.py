"""The fold: deterministic, total, and strict about contradictions."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from search_world import AMPLE, Shell, World, at_random, comparison, forcing

from engine.deployment import Deployment
from engine.judge.report import Judgement
from engine.search.events import (
    Body,
    BundleWritten,
    CandidateProposed,
    Event,
    HardwareProbed,
    IncumbentChanged,
    Note,
    Profiled,
    ProposalsMade,
    RoundEnded,
    RoundStarted,
    SearchFinished,
    SearchStarted,
    StatusChanged,
    StockMeasured,
    TrialJudged,
    TrialProgress,
    TrialStarted,
)
from engine.search.policy import decide
from engine.search.state import FoldError, State, fold, fold_all


def in_round(seed: int, proposals_made: bool = True) -> Shell:
    """A search in its first round, with candidates that no one has started."""
    world = World(seed)
    shell = Shell(world, at_random(world), seed=seed)
    if proposals_made:
        shell.run(lambda state: bool(state.rounds) and state.rounds[0].proposed is not None)
    else:
        shell.run(lambda state: bool(state.profiles))
    return shell


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_any_prefix_folds_to_the_state_that_it_was_and_survives_json(seed: int) -> None:
    world = World(seed)
    shell = Shell(world, at_random(world), seed=seed)
    states: list[State] = []
    while shell.state.finished is None:
        shell.act(decide(shell.state)[0])
        states.append(shell.state)
    wire = [Event.from_json(json.loads(json.dumps(event.to_json()))) for event in shell.events]
    for state in states:
        assert fold_all(wire[: state.seq]) == state
    middle = states[len(states) // 2]
    assert fold_all(wire[middle.seq :], middle) == states[-1]


def test_a_fold_changes_no_earlier_state() -> None:
    shell = in_round(1)
    before, copy = shell.state, fold_all(shell.events)
    shell.run()
    assert before == copy
    assert before != shell.state


def candidate(state: State, **changes: object) -> CandidateProposed:
    plan = state.initial_plan.with_changes({"draft_tokens": 2})
    fields = {
        "trial": state.next_trial,
        "round": len(state.rounds),
        "kind": "candidate",
        "agent": "x",
        "plan": plan,
        "parent": state.initial_plan.digest,
        "changes": {"draft_tokens": 2},
        "stage": "draft",
        "arm": "random",
        "rationale": "",
    }
    return CandidateProposed(**{**fields, **changes})  # type: ignore[arg-type]


GOOD = Judgement("accepted", "", forcing=forcing(), comparison=comparison(1.2))
CONTRADICTIONS: dict[str, Callable[[Shell], list[Body]]] = {
    "the hardware was already probed": lambda s: [HardwareProbed({})],
    "stock speculative was already measured": lambda s: [StockMeasured("speculative", "x", 1.0, (1.0,))],
    "search_started for": lambda s: [SearchStarted(Deployment(), AMPLE, 0, s.world.initial, "test")],
    "a round started before": lambda s: [RoundStarted(2)],
    "round 3 does not follow": lambda s: [RoundEnded(1, False), RoundStarted(3)],
    "round 2 is not the one": lambda s: [RoundEnded(2, False)],
    "round 1 was already profiled": lambda s: [s.world.profile(s.world.initial, 1)],
    "trial 9 does not follow": lambda s: [candidate(s.state, trial=9)],
    "round 7 is not the one": lambda s: [candidate(s.state, round=7)],
    "were already complete": lambda s: [candidate(s.state)],
    "only trial 0": lambda s: [candidate(s.state, kind="baseline")],
    "there is no trial 99": lambda s: [TrialStarted(99, "w", 1)],
    "already has a verdict": lambda s: [TrialJudged(1, GOOD), TrialJudged(1, GOOD)],
    "started after its verdict": lambda s: [TrialJudged(1, GOOD), TrialStarted(1, "w", 2)],
    "went back from attempt 2": lambda s: [TrialStarted(1, "w", 2), TrialStarted(1, "w", 1)],
    "trial 0 was already incumbent": lambda s: [IncumbentChanged(0, s.world.initial, 1.0)],
    "trial 1 was not accepted": lambda s: [IncumbentChanged(1, s.state.trials[1].plan, 1.1)],
    "is not the plan of trial 1": lambda s: [TrialJudged(1, GOOD), IncumbentChanged(1, s.world.initial, 1.1)],
    "is not of the incumbent": lambda s: [
        TrialJudged(1, GOOD),
        IncumbentChanged(1, s.state.trials[1].plan, 1.1, final=True),
    ],
    "closing measurement was already made": lambda s: [IncumbentChanged(0, s.world.initial, 1.0, final=True)] * 2,
    "cancelled cannot become paused": lambda s: [StatusChanged("cancelling", "x"), StatusChanged("paused", "x")],
    "cancelled cannot become running": lambda s: [StatusChanged("cancelling", "x"), StatusChanged("running", "x")],
    "the bundle was already written": lambda s: [BundleWritten("b.zip", "0", 1)] * 2,
    "bundle_written after the search": lambda s: [SearchFinished("plateau", ""), BundleWritten("b.zip", "0", 1)],
    "search_finished after the search": lambda s: [SearchFinished("plateau", "")] * 2,
}


@pytest.mark.parametrize("words", CONTRADICTIONS)
def test_a_contradiction_is_refused_by_name(words: str) -> None:
    shell = in_round(3)
    *allowed, refused = CONTRADICTIONS[words](shell)
    for body in allowed:
        shell.emit(body)
    before = shell.state
    with pytest.raises(FoldError, match=words) as caught:
        shell.emit(refused)
    assert caught.value.seq == before.seq + 1
    assert shell.state is before


def test_a_wrong_count_of_proposals_is_refused() -> None:
    shell = in_round(3, proposals_made=False)
    with pytest.raises(FoldError, match="round 1 has 0 candidates, not 2"):
        shell.emit(ProposalsMade(1, 2))


def test_a_gap_a_repeat_and_a_wrong_start_are_refused() -> None:
    shell = in_round(4)
    for seq in (shell.state.seq, shell.state.seq + 2):
        with pytest.raises(FoldError, match="does not follow"):
            fold(shell.state, Event(seq, shell.now, Note("x")))
    with pytest.raises(FoldError, match="first event must be search_started"):
        fold(None, Event(1, 0.0, Note("x")))
    with pytest.raises(FoldError, match="first event must be search_started"):
        fold_all(shell.events[1:])
    with pytest.raises(FoldError, match="without events"):
        fold_all([])


def test_a_resumed_worker_starts_a_trial_again() -> None:
    shell = in_round(5)
    shell.emit(TrialStarted(1, "first", 1), 1.0)
    shell.emit(TrialProgress(1, "timing 3/6"), 1.0)
    shell.emit(TrialStarted(1, "second", 2), 1.0)
    trial = shell.state.trials[1]
    assert (trial.attempts, trial.worker, trial.phase, trial.status) == (2, "second", "", "running")
    shell.emit(TrialJudged(1, GOOD), 1.0)
    shell.emit(TrialProgress(1, "the last words of the first worker"), 1.0)
    assert shell.state.trials[1].status == "judged"
    assert shell.state.trials[1].phase == ""


def test_what_comes_late_changes_nothing() -> None:
    shell = in_round(6)
    shell.emit(SearchFinished("cancelled", "Enough."))
    trials, seconds = shell.state.trials, shell.state.seconds
    late: list[Body] = [TrialStarted(1, "w", 1), TrialProgress(1, "x"), TrialJudged(1, GOOD), Note("x")]
    for body in [*late, StatusChanged("paused", "x"), shell.world.profile(shell.world.initial, 1)]:
        shell.emit(body, 10.0)
    assert shell.state.trials == trials
    assert shell.state.status == "finished"
    assert shell.state.seconds == seconds


@settings(max_examples=25, deadline=None)
@given(steps=st.lists(st.tuples(st.sampled_from(("work", "pause", "resume", "killed")), st.floats(0.0, 1e4))))
def test_only_time_at_work_is_charged(steps: list[tuple[str, float]]) -> None:
    """Against a plain model: a step's duration counts where the search runs and somebody works."""
    shell = in_round(7)
    expected, running = shell.state.seconds, True
    for what, seconds in steps:
        if what == "work":
            shell.emit(Note("x"), seconds)
        elif what == "pause":
            shell.emit(StatusChanged("paused", "x"), seconds)
        else:  # whoever comes back says that the search is running
            shell.emit(StatusChanged("running", "x"), seconds)
            running = True
            continue
        expected += seconds if running else 0.0
        running = what != "pause" and running
    assert shell.state.seconds == pytest.approx(expected, rel=1e-6, abs=1e-3)


def test_a_clock_that_goes_back_charges_nothing() -> None:
    shell = in_round(8)
    before = shell.state
    shell.emit(Note("x"), -500.0)
    assert shell.state.seconds == before.seconds
    shell.emit(Note("x"), 7.0)
    assert shell.state.seconds == before.seconds  # still before the latest time seen
    assert shell.state.time == before.time


def test_confirmations_and_the_baseline_cost_no_trials() -> None:
    shell = Shell(World(2), at_random(World(2)), seed=2)
    shell.run()
    kinds = [t.kind for t in shell.state.trials.values() if t.judgement]
    assert kinds.count("confirm") > 0
    assert shell.state.trials_used == kinds.count("candidate") + kinds.count("merge")


def test_profile_of_is_the_newest_of_that_plan() -> None:
    shell = in_round(9)
    newer = shell.world.profile(shell.world.initial, 2)
    shell.emit(newer)
    assert shell.state.profile_of(shell.world.initial) is newer
    assert shell.state.profile_of(shell.state.trials[1].plan) is None
    assert isinstance(shell.state.profiles[0], Profiled)
