"""decide(): a simulated search always ends well, whatever is killed, paused, cancelled or failing."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from search_world import AMPLE, Shell, World, at_random, comparison, forcing, outcome

from engine.judge.report import Judgement
from engine.search.events import (
    Budget,
    CandidateProposed,
    IncumbentChanged,
    Note,
    ProposalsMade,
    StageGap,
    StatusChanged,
    TrialJudged,
    TrialStarted,
)
from engine.search.policy import MAX_CONFIRMED, MAX_LOOKS, decide
from engine.search.state import State, fold_all
from engine.search.stopping import FINAL_COST, gaps_closed, stop_reason

seeds = st.integers(0, 10**6)
many = settings(max_examples=40, deadline=None)
few = settings(max_examples=2, deadline=None, phases=[Phase.explicit, Phase.generate])  # one is a whole log of kills
budgets = st.builds(
    Budget,
    seconds=st.floats(1.0, 2000.0),
    trials=st.integers(0, 20),
    candidates_per_round=st.integers(1, 5),
    min_rounds=st.integers(0, 4),
    plateau_rounds=st.integers(0, 3),
    gap_threshold=st.floats(0.0, 0.3),
)


def shell_of(seed: int, budget: Budget = AMPLE, **fields: object) -> Shell:
    world = World(seed)
    return Shell(world, at_random(world), budget, seed, **fields)  # type: ignore[arg-type]


def check_invariants(shell: Shell) -> None:
    state, world = shell.state, shell.world
    assert state.finished is not None
    assert state.trials_used <= state.budget.trials
    # No plan is judged twice, but to confirm it.
    plans = [t.plan for t in state.trials.values() if t.kind != "confirm"]
    assert len(plans) == len(set(plans))
    for trial in state.trials.values():
        if trial.kind == "confirm":
            assert state.trials[trial.proposal.sources[0]].plan == trial.plan
    # Only lossless plans that won a second measurement are adopted, and each beats the one before.
    for before, after in zip(state.incumbents, state.incumbents[1:], strict=False):
        adopted = state.trials[after.trial]
        assert not world.is_lossy(after.plan)
        assert adopted.kind in ("confirm", "merge")
        assert adopted.accepted
        assert after.over_incumbent == adopted.ratio > 1.0
        assert adopted.proposal.parent == before.plan.digest
        assert world.ms(after.plan) < world.ms(before.plan)
    assert all(r.improved is not None for r in state.rounds[:-1])
    for r in state.rounds:
        assert r.improved in (None, any(i.round == r.number for i in state.incumbents))
    if state.finished.reason not in ("failed", "cancelled"):
        assert state.incumbent.final
        assert state.bundle is not None
        assert state.open_round is None


@many
@given(seed=seeds, budget=budgets)
def test_every_search_ends_within_its_budget(seed: int, budget: Budget) -> None:
    shell = shell_of(seed, budget)
    shell.run()
    check_invariants(shell)
    state = shell.state
    opening = 3 + 2 * 10 + 1.75 * shell.trial_seconds + 1.5 * shell.trial_seconds + 1
    rounds = 6 * len(state.rounds)  # profiles and proposals, which are short, are not planned for
    assert state.seconds <= max(budget.seconds, opening) + rounds


@many
@given(seed=seeds, spare=st.integers(0, 2**32))
def test_the_order_in_which_a_shell_takes_actions_does_not_matter(seed: int, spare: int) -> None:
    straight, shuffled = shell_of(seed), shell_of(seed, pick=random.Random(spare).choice)
    assert outcome(straight.run()) == outcome(shuffled.run())


@many
@given(seed=seeds)
def test_decide_is_pure_and_keys_are_unique(seed: int) -> None:
    shell = shell_of(seed)
    done: set[str] = set()
    while shell.state.finished is None:
        actions, again = decide(shell.state), decide(fold_all(shell.events))
        assert actions == again
        keys = [action.key for action in actions]
        assert len(set(keys)) == len(keys)
        assert not done & set(keys), "an action that is done is asked for again"
        for action in actions:
            assert bool(action.events) == (action.kind == "emit")
            assert action.where == ("device" if action.kind in DEVICE else "control")
        shell.act(actions[0])
        done.add(actions[0].key)
    assert decide(shell.state) == []


DEVICE = ("probe", "stock", "trial", "profile", "standing")


@few
@given(seed=seeds)
def test_killed_after_any_event_it_ends_as_it_would_have(seed: int) -> None:
    whole = shell_of(seed)
    expected = outcome(whole.run())
    for count in range(1, len(whole.events)):
        resumed = whole.killed(count)
        assert outcome(resumed.run()) == expected, f"killed after event {count}: {whole.events[count - 1].body.type}"
        assert resumed.state.seconds < 3600.0 + whole.state.seconds, "nobody worked while it was down"


@many
@given(seed=seeds, budget=budgets, cut=st.floats(0, 1))
def test_killed_under_a_tight_budget_it_ends_well(seed: int, budget: Budget, cut: float) -> None:
    whole = shell_of(seed, budget)
    whole.run()
    resumed = whole.killed(1 + int(cut * (len(whole.events) - 1)))
    resumed.run()
    check_invariants(resumed)
    assert resumed.state.finished.reason in ("budget", "plateau", "gaps closed", "failed")


@few
@given(seed=seeds)
def test_actions_in_flight_are_asked_for_again_after_a_kill(seed: int) -> None:
    whole = shell_of(seed)
    whole.run()
    for count, event in enumerate(whole.events, start=1):
        if isinstance(event.body, TrialStarted):
            keys = [(a.key, a.data.get("attempt")) for a in decide(fold_all(whole.events[:count]))]
            assert (f"trial:{event.body.trial}", 2) in keys


@few
@given(seed=seeds)
def test_paused_after_any_event_it_waits_and_goes_on(seed: int) -> None:
    whole = shell_of(seed)
    expected = outcome(whole.run())
    for count in range(1, len(whole.events)):
        shell = Shell(whole.world, whole.proposer, events=whole.events[:count])
        shell.emit(StatusChanged("paused", "test"))
        assert decide(shell.state) == []
        shell.emit(StatusChanged("running", "test"), 1e5)
        assert outcome(shell.run()) == expected


@few
@given(seed=seeds)
def test_cancelled_after_any_event_it_measures_nothing_more(seed: int) -> None:
    whole = shell_of(seed)
    whole.run()
    for count in range(1, len(whole.events)):
        shell = Shell(whole.world, whole.proposer, events=whole.events[:count])
        shell.emit(StatusChanged("cancelling", "test"))
        while shell.state.finished is None:
            (action,) = decide(shell.state)
            assert action.where == "control"
            shell.act(action)
        state = shell.state
        assert state.finished.reason == "cancelled"
        beyond = state.incumbent is not None and state.incumbent.trial != 0
        assert (state.bundle is not None) == (beyond or any(e.body.type == "bundle_written" for e in shell.events))


def test_work_in_parallel_starts_nothing_twice_and_ends_well() -> None:
    for seed in range(30):
        rng = random.Random(seed)
        shell = shell_of(seed)
        flying: dict[str, object] = {}
        started: list[str] = []
        for _ in range(2000):
            if shell.state.finished is not None:
                break
            ready = [a for a in decide(shell.state) if a.key not in flying]
            assert ready or flying
            if ready and (not flying or rng.random() < 0.5):
                action = rng.choice(ready)
                started.append(action.key)
                if action.where == "control":
                    shell.act(action)
                else:
                    flying[action.key] = shell.work(action)
            else:
                key = rng.choice(sorted(flying))
                body = next(flying[key], None)  # type: ignore[call-overload]
                if body is None:
                    del flying[key]
                else:
                    shell.emit(*body)
        check_invariants(shell)
        assert len(started) == len(set(started))


# Failures -----------------------------------------------------------------------------------------------------


@many
@given(seed=seeds, spare=st.integers(0, 2**32))
def test_one_failure_of_each_action_changes_nothing(seed: int, spare: int) -> None:
    expected = outcome(shell_of(seed).run())
    shell = shell_of(seed, fails=lambda key, attempt: attempt == 1 and not key.startswith(EMITTED))
    assert outcome(shell.run()) == expected


EMITTED = ("baseline", "round", "confirm", "merge", "verdict", "finish")


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("probe", "probing the hardware"),
        ("stock:speculative", "measuring stock"),
        ("standing:0", "measuring the incumbent against stock"),
        ("profile:1", "profiling the incumbent"),
        ("propose:2", "proposing candidates"),
        ("standing:final", "measuring the incumbent against stock"),
        ("bundle", "writing the bundle"),
    ],
)
def test_two_failures_of_an_action_end_the_search_with_a_sentence(key: str, words: str) -> None:
    shell = shell_of(2, fails=lambda name, attempt: name == key)
    state = shell.run()
    assert state.finished.reason == "failed"
    assert state.status == "failed"
    assert words in state.finished.sentence
    assert "planted failure 2" in state.finished.sentence
    check_invariants(shell)


def test_two_failures_of_a_trial_are_its_verdict_and_the_search_goes_on() -> None:
    shell = shell_of(2, fails=lambda name, attempt: name in ("trial:1", "trial:3"))
    state = shell.run()
    for number in (1, 3):
        assert state.trials[number].judgement.verdict == "crashed"
        assert "planted failure 2" in state.trials[number].judgement.reason
    assert state.finished.reason != "failed"
    check_invariants(shell)


def test_a_bundle_that_fails_while_cancelling_ends_the_search() -> None:
    shell = shell_of(2, fails=lambda name, attempt: name == "bundle")
    shell.run(lambda state: len(state.incumbents) > 1)
    shell.emit(StatusChanged("cancelling", "test"))
    assert shell.run().finished.reason == "failed"


@pytest.mark.parametrize("verdict", ["lossy", "crashed", "timed out", "invalid"])
def test_a_baseline_that_is_not_lossless_ends_the_search(verdict: str) -> None:
    shell = shell_of(1)
    shell.run(lambda state: 0 in state.trials)
    shell.emit(TrialJudged(0, Judgement(verdict, "The reason.")))  # type: ignore[arg-type]
    state = shell.run()
    assert state.finished.reason == "failed"
    assert verdict in state.finished.sentence
    assert "The reason." in state.finished.sentence
    assert state.bundle is None


# Confirm, merge, adopt ----------------------------------------------------------------------------------------


def round_with(ratios: dict[int, float], changes: dict[int, dict[str, object]], budget: Budget = AMPLE) -> Shell:
    """A search whose first round has these candidates, all judged: a ratio under 1.03 is slower."""
    shell = shell_of(11, budget)
    shell.run(lambda state: bool(state.profiles))
    plan = shell.world.initial
    for number, change in changes.items():
        shell.emit(
            CandidateProposed(
                number, 1, "candidate", f"a{number}", plan.with_changes(change), plan.digest, change, "host", "x", ""
            )
        )
    shell.emit(ProposalsMade(1, len(changes)))
    for number, ratio in ratios.items():
        judge(shell, number, ratio)
    return shell


def judge(shell: Shell, number: int, ratio: float | None) -> None:
    if ratio is None:
        shell.emit(TrialJudged(number, Judgement("lossy", "", forcing=forcing(1), seconds=10.0)))
        return
    verdict = "accepted" if ratio >= 1.03 else "slower"
    shell.emit(TrialJudged(number, Judgement(verdict, "", forcing=forcing(), comparison=comparison(ratio), seconds=10)))


def emit_next(shell: Shell) -> list[CandidateProposed]:
    (action,) = decide(shell.state)
    assert action.kind == "emit"
    for body in action.events:
        shell.emit(body)
    return [body for body in action.events if isinstance(body, CandidateProposed)]


A, B, C = {"fuse_qkv": True}, {"threads": 2}, {"draft_tokens": 3}


def test_the_best_winners_are_confirmed_and_stacked() -> None:
    shell = round_with({1: 1.1, 2: 1.3, 3: 1.2}, {1: A, 2: B, 3: C})
    confirms = emit_next(shell)
    assert [c.sources for c in confirms] == [(2,), (3,)]
    assert len(confirms) == MAX_CONFIRMED
    assert {c.kind for c in confirms} == {"confirm"}
    assert sorted(a.key for a in decide(shell.state)) == ["trial:4", "trial:5"]
    judge(shell, 4, 1.25)
    judge(shell, 5, 1.15)
    (merge,) = emit_next(shell)
    assert merge.kind == "merge"
    assert merge.changes == {**B, **C}
    assert merge.plan == shell.world.initial.with_changes({**B, **C})
    assert merge.sources == (4, 5)
    assert merge.predicted == pytest.approx(1.25 * 1.15)


@pytest.mark.parametrize(("stack", "adopted"), [(1.4, 6), (1.25, 6), (1.2, 4), (1.0, 4), (None, 4)])
def test_the_stack_is_adopted_only_where_it_is_no_worse_than_the_best_alone(stack: float | None, adopted: int) -> None:
    shell = round_with({1: 1.3, 2: 1.2}, {1: A, 2: B})
    emit_next(shell)
    judge(shell, 3, 1.2)
    judge(shell, 4, 1.25)
    emit_next(shell)
    judge(shell, 5, stack)
    (action,) = decide(shell.state)
    assert action.key == f"standing:{adopted - 1 if adopted == 6 else 4}"
    assert action.data["over_incumbent"] == (stack if adopted == 6 else 1.25)
    shell.act(action)
    (action,) = decide(shell.state)
    assert action.events[0].improved is True  # type: ignore[union-attr]


def test_winners_that_change_the_same_lever_are_not_stacked() -> None:
    shell = round_with({1: 1.3, 2: 1.2}, {1: {"threads": 1}, 2: B})
    emit_next(shell)
    judge(shell, 3, 1.3)
    judge(shell, 4, 1.2)
    assert [a.key for a in decide(shell.state)] == ["standing:3"]


def test_a_winner_by_luck_is_not_adopted_and_the_next_one_gets_its_chance() -> None:
    shell = round_with({1: 1.3, 2: 1.2, 3: 1.1}, {1: A, 2: B, 3: C})
    emit_next(shell)
    judge(shell, 4, 1.0)
    judge(shell, 5, None)
    (confirm,) = emit_next(shell)
    assert confirm.sources == (3,)
    judge(shell, 6, 1.01)
    (action,) = decide(shell.state)
    assert action.events[0].improved is False  # type: ignore[union-attr]


def undecided(shell: Shell, number: int, ratio: float = 1.3) -> None:
    """A confirmation with a gain in its median that its interval does not prove."""
    found = replace(comparison(ratio, sigma=0.3), threshold=0.04)
    shell.emit(TrialJudged(number, Judgement("slower", "", forcing=forcing(), comparison=found, seconds=10)))


def test_a_gain_that_a_confirmation_could_not_prove_is_measured_once_more() -> None:
    shell = round_with({1: 1.4}, {1: A})
    (first,) = emit_next(shell)
    undecided(shell, 2)
    (second,) = emit_next(shell)
    assert (first.sources, second.sources) == ((1,), (1,))
    assert "fresh prompts" in first.rationale
    assert "once more" in second.rationale
    judge(shell, 3, 1.2)
    assert [a.key for a in decide(shell.state)] == ["standing:3"]


def test_nobody_is_measured_until_luck_comes() -> None:
    shell = round_with({1: 1.4}, {1: A})
    for number in range(2, 2 + MAX_LOOKS):
        emit_next(shell)
        undecided(shell, number)
    (action,) = decide(shell.state)
    assert action.events[0].improved is False  # type: ignore[union-attr]


@pytest.mark.parametrize("found", [1.0, 0.8, None])
def test_a_confirmation_without_a_gain_is_final(found: float | None) -> None:
    shell = round_with({1: 1.4}, {1: A})
    emit_next(shell)
    judge(shell, 2, found)
    (action,) = decide(shell.state)
    assert action.events[0].improved is False  # type: ignore[union-attr]


def test_winners_not_yet_confirmed_come_before_a_second_look() -> None:
    shell = round_with({1: 1.3, 2: 1.2, 3: 1.1}, {1: A, 2: B, 3: C})
    emit_next(shell)
    undecided(shell, 4)
    judge(shell, 5, 1.0)
    assert [c.sources for c in emit_next(shell)] == [(3,), (1,)]


def test_without_trials_left_the_best_is_adopted_unstacked() -> None:
    shell = round_with({1: 1.3, 2: 1.2}, {1: A, 2: B}, replace(AMPLE, trials=2))
    emit_next(shell)
    judge(shell, 3, 1.3)
    judge(shell, 4, 1.2)
    assert [a.key for a in decide(shell.state)] == ["standing:3"]


def test_when_time_is_short_a_winner_is_confirmed_before_another_candidate_is_tried() -> None:
    shell = round_with({1: 1.3}, {1: A, 2: B}, replace(AMPLE, seconds=200.0))
    assert [a.key for a in decide(shell.state)] == ["trial:2"]
    room_for_one = 10 + 15 * (1 + FINAL_COST)  # a trial, a standing, and the closing measurement
    shell.emit(Note("time passes"), shell.state.budget.seconds - shell.state.seconds - room_for_one - 1)
    (confirm,) = emit_next(shell)
    assert confirm.sources == (1,)


# Stopping -----------------------------------------------------------------------------------------------------


def test_plateau_waits_for_the_least_rounds() -> None:
    for least in (0, 2, 5):
        world = World(3, lossy=0)
        world.gain = dict.fromkeys(world.gain, -0.1)  # nothing helps
        shell = Shell(world, at_random(world), replace(AMPLE, min_rounds=least, trials=99))
        state = shell.run()
        assert state.finished.reason == "plateau"
        assert len(state.rounds) == max(least, AMPLE.plateau_rounds)
        assert state.incumbent.trial == 0
        assert state.bundle is not None


def test_a_plan_that_is_not_proven_faster_than_stock_is_said_to_be_so() -> None:
    world = World(3, lossy=0)
    world.gain = dict.fromkeys(world.gain, -0.1)
    world.over_stock = 1.0  # the interval holds 1
    state = Shell(world, at_random(world), AMPLE).run()
    assert state.incumbent.final
    assert "No speedup over stock is proven." in state.finished.sentence


def test_a_round_without_proposals_is_a_plateau() -> None:
    world = World(3)
    shell = Shell(world, lambda state, agents: [ProposalsMade(state.open_round.number, 0)])
    state = shell.run()
    assert state.finished.reason == "plateau"
    assert len(state.rounds) == 1


def test_closed_gaps_end_the_search_and_open_ones_do_not() -> None:
    shell = shell_of(4)
    shell.run(lambda state: bool(state.profiles))
    profile = shell.state.profiles[0]

    def with_gaps(share: float) -> State:
        gaps = tuple(
            StageGap(g.stage, g.measured_ms, 0.0, 0.0, share * profile.ms_per_token, 1.0, 1.0, "memory")
            for g in profile.stages
        )
        return replace(shell.state, profiles=(replace(profile, stages=gaps),))

    assert not gaps_closed(with_gaps(0.021))
    assert gaps_closed(with_gaps(0.02))
    shell.state = with_gaps(0.01)
    (action,) = decide(shell.state)
    assert action.key == "round:1:end"
    shell.act(action)
    assert stop_reason(shell.state) == "gaps closed"
    assert decide(shell.state)[0].key == "standing:final"


def test_the_closing_measurement_is_reserved_and_replaces_the_standing() -> None:
    shell = next(s for seed in range(100) if len((s := shell_of(seed, Budget(seconds=400.0))).run().incumbents) > 1)
    state = shell.state
    assert state.seconds <= 400.0 + 6 * len(state.rounds)
    assert state.incumbent.final
    assert [i.final for i in state.incumbents] == [False] * (len(state.incumbents) - 1) + [True]
    finals = [e.body for e in shell.events if isinstance(e.body, IncumbentChanged) and e.body.final]
    assert [f.trial for f in finals] == [state.incumbent.trial]
    assert f"the plan of trial {state.incumbent.trial}" in state.finished.sentence


def test_every_trial_gets_prompts_of_its_own() -> None:
    shell = shell_of(5)
    fresh: list[int] = []
    while shell.state.finished is None:
        action = decide(shell.state)[0]
        if action.kind == "trial":
            fresh.append(action.data["fresh"])
            incumbent = shell.state.incumbent
            assert action.data["incumbent"] == (incumbent.plan if incumbent else None)
        shell.act(action)
    assert len(set(fresh)) == len(fresh)
