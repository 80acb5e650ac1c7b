"""The offline proposer and the memory that it asks."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from search_world import AMPLE, CONTEXT, Proposer, Shell, World, at_random, comparison, forcing, offline

from engine.judge.report import Judgement
from engine.levers import LeverContext, canonicalise, check_plan
from engine.search.events import (
    Budget,
    CandidateProposed,
    IncumbentChanged,
    ProposalsMade,
    RoundEnded,
    RoundStarted,
    TrialJudged,
)
from engine.search.memory import Memory, families_of
from engine.search.propose import propose, propose_round
from engine.search.state import State

seeds = st.integers(0, 10**6)
some = settings(max_examples=6, deadline=None)
AGENTS = ["agent 1", "agent 2", "agent 3"]


def driven(seed: int, budget: Budget = AMPLE, context: LeverContext = CONTEXT) -> Shell:
    world = World(seed, context)
    shell = Shell(world, offline(world), budget, seed)
    shell.run()
    return shell


def at_first_proposals(seed: int, world: World | None = None) -> Shell:
    world = world or World(seed)
    shell = Shell(world, offline(world), seed=seed)
    shell.run(lambda state: bool(state.profiles))
    return shell


NGRAM_ONLY = replace(CONTEXT, drafter="none", block_size=0, has_compiler=False, packed_gemm=False, cores=2)
DRAFT_MODEL = replace(CONTEXT, drafter="draft_model", block_size=0, device_kind="cuda", packed_gemm=False)


@some
@given(seed=seeds, context=st.sampled_from([CONTEXT, NGRAM_ONLY, DRAFT_MODEL]))
def test_every_proposal_is_legal_canonical_new_and_explained(seed: int, context: LeverContext) -> None:
    state = driven(seed, replace(AMPLE, trials=24, plateau_rounds=5), context).state
    seen = set()
    for trial in state.trials.values():
        proposal = trial.proposal
        if proposal.kind != "candidate":
            continue
        check_plan(proposal.plan, context)
        assert canonicalise(proposal.plan, context) == proposal.plan
        assert proposal.plan not in seen
        seen.add(proposal.plan)
        (parent,) = {i.plan for i in state.incumbents if i.plan.digest == proposal.parent}
        assert proposal.changes == proposal.plan.changes_from(parent) != {}
        assert proposal.arm == "random" or proposal.arm.startswith("bandit:")
        assert proposal.predicted is None or 0.0 < proposal.predicted <= 1 / (1 - 0.9)
        assert proposal.rationale.endswith(".")
        for name in proposal.changes:
            assert name in proposal.rationale
    assert seen


@some
@given(seed=seeds)
def test_the_agents_of_a_round_differ_and_one_of_them_is_the_control(seed: int) -> None:
    state = driven(seed).state
    for r in state.rounds:
        proposals = [t.proposal for t in state.of_round(r.number, "candidate")]
        assert len({p.agent for p in proposals}) == len(proposals)
        assert len({p.plan for p in proposals}) == len(proposals)
        if len(proposals) > 1:
            assert [p.arm == "random" for p in proposals] == [False] * (len(proposals) - 1) + [True]


@some
@given(seed=seeds)
def test_it_is_deterministic_and_goes_on_where_it_was_killed(seed: int) -> None:
    shell = driven(seed)
    expected = [t.proposal for t in shell.state.trials.values()]
    for count, event in enumerate(shell.events, start=1):
        if isinstance(event.body, RoundStarted | CandidateProposed) and getattr(event.body, "kind", "candidate") == (
            "candidate"
        ):
            resumed = shell.killed(count)
            resumed.run(lambda state: bool(state.rounds[-1].proposed))
            found = [t.proposal for t in resumed.state.trials.values()]
            assert found == expected[: len(found)]


def test_a_round_that_is_complete_says_so() -> None:
    shell = at_first_proposals(5)
    *candidates, last = propose_round(shell.state, CONTEXT, AGENTS)
    assert [c.agent for c in candidates] == AGENTS  # type: ignore[union-attr]
    assert last == ProposalsMade(1, 3)
    shell.emit(candidates[0])
    *rest, last = propose_round(shell.state, CONTEXT, AGENTS)
    assert rest == candidates[1:]
    assert last == ProposalsMade(1, 3)


def test_misuse_is_refused() -> None:
    shell = at_first_proposals(5)
    with pytest.raises(ValueError, match="must differ"):
        propose(shell.state, CONTEXT, ["same", "same"])
    with pytest.raises(ValueError, match="no round is open"):
        propose(replace(shell.state, rounds=()), CONTEXT, AGENTS)


def test_another_seed_proposes_otherwise() -> None:
    shell = at_first_proposals(5)
    found = {tuple(c.plan for c in propose(replace(shell.state, seed=seed), CONTEXT, AGENTS)) for seed in range(12)}
    assert len(found) > 6


def test_it_does_not_dry_up_before_a_long_search_has_ended() -> None:
    shell = driven(6, replace(AMPLE, trials=45, min_rounds=15), NGRAM_ONLY)
    proposals = [t for t in shell.state.trials.values() if t.kind == "candidate"]
    assert len(proposals) > 35
    assert all(r.proposed == 3 for r in shell.state.rounds[:10])


@pytest.mark.parametrize("stage", ["verify.attention", "verify.lm_head", "draft", "algorithm"])
def test_the_first_proposals_go_where_the_gap_is(stage: str) -> None:
    """Nearly all of the time is lost in one stage: the bandit's levers touch it much more often than chance."""
    from engine.levers import LEVERS, lever

    world = World(1)
    world.base = {name: 20.0 if name == stage else 0.05 for name in world.base}
    hits = total = 0
    for seed in range(40):
        for proposal in propose(at_first_proposals(seed, world).state, CONTEXT, AGENTS)[:2]:
            total += 1
            hits += any(stage in lever(name).stages for name in proposal.changes)
            assert proposal.stage == stage or not any(stage in lever(name).stages for name in proposal.changes)
    by_chance = sum(stage in item.stages for item in LEVERS) / len(LEVERS)
    assert hits / total > max(0.75, by_chance)


def mean_log_speed(world_seeds: range, budget: Budget, proposer: Callable[[World], Proposer]) -> list[float]:
    found = []
    for seed in world_seeds:
        world = World(seed)
        state = Shell(world, proposer(world), budget, seed).run()
        found.append(math.log(world.speed(state.incumbent.plan)))
    return found


def test_it_finds_planted_good_levers_more_often_than_chance() -> None:
    """Paired over worlds whose good values are drawn at random: two standard errors clear of no difference."""
    budget = replace(AMPLE, trials=14, plateau_rounds=9)
    ours = mean_log_speed(range(60), budget, offline)
    chance = mean_log_speed(range(60), budget, at_random)
    differences = [a - b for a, b in zip(ours, chance, strict=True)]
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    assert statistics.mean(differences) > 2 * error, (statistics.mean(ours), statistics.mean(chance), error)


# Memory -------------------------------------------------------------------------------------------------------


class Script:
    """Builds a history candidate by candidate."""

    def __init__(self) -> None:
        self.shell = at_first_proposals(3)
        self.round = 1

    @property
    def state(self) -> State:
        return self.shell.state

    def judged(self, changes: dict[str, object], verdict: str, ratio: float | None, **fields: object) -> int:
        state = self.state
        plan = state.incumbent.plan
        kind = fields.pop("kind", "candidate")
        number = state.next_trial
        self.shell.emit(
            CandidateProposed(
                trial=number,
                round=self.round,
                kind=kind,  # type: ignore[arg-type]
                agent=f"a{number}",
                plan=plan.with_changes(changes),
                parent=plan.digest,
                changes=changes,
                stage="host",
                arm="random",
                rationale="",
                **fields,  # type: ignore[arg-type]
            )
        )
        timed = comparison(ratio) if ratio is not None else None
        self.shell.emit(
            TrialJudged(number, Judgement(verdict, "why", forcing=forcing(), comparison=timed, seconds=5.0))  # type: ignore[arg-type]
        )
        return number

    def adopt(self, number: int) -> None:
        trial = self.state.trials[number]
        self.shell.emit(IncumbentChanged(number, trial.plan, trial.ratio))
        self.shell.emit(RoundEnded(self.round, True))
        self.round += 1
        self.shell.emit(RoundStarted(self.round))


def test_memory_keeps_the_confirmed_ratio_and_every_reason() -> None:
    script = Script()
    won = script.judged({"fuse_qkv": True}, "accepted", 1.3)
    lost = script.judged({"threads": 2}, "lossy", None)
    script.judged({"fuse_qkv": True}, "accepted", 1.2, kind="confirm", sources=(won,))
    memory = Memory.of(script.state)
    assert [item.trial for item in memory.tried] == [won, lost]
    (winner,) = memory.value("fuse_qkv", True)
    assert (winner.ratio, winner.confirmed, winner.families, winner.was) == (
        1.2,
        True,
        ("fusion",),
        {"fuse_qkv": False},
    )
    (loser,) = memory.touched(["threads", "compile"])
    assert (loser.verdict, loser.reason, loser.ratio, loser.failed) == ("lossy", "why", None, True)
    assert memory.family("runtime") == [loser]
    assert memory.value("threads", 4) == []
    assert memory.knows(script.state.trials[lost].plan)
    assert not memory.knows(script.state.initial_plan.with_changes({"threads": 4}))
    as_json = json.loads(json.dumps(memory.to_json()))
    assert as_json[1]["changes"] == [{"lever": "threads", "from": 0, "to": 2}]
    assert as_json[0]["confirmed"] is True


def test_memory_believes_the_latest_confirmation() -> None:
    script = Script()
    won = script.judged({"fuse_qkv": True}, "accepted", 1.3)
    script.judged({"fuse_qkv": True}, "slower", 1.1, kind="confirm", sources=(won,))
    script.judged({"fuse_qkv": True}, "accepted", 1.2, kind="confirm", sources=(won,))
    (winner,) = Memory.of(script.state).value("fuse_qkv", True)
    assert (winner.ratio, winner.confirmed, winner.verdict) == (1.2, True, "accepted")


def test_memory_advises_against_what_did_not_pay() -> None:
    script = Script()
    script.judged({"threads": 2}, "lossy", None)
    script.judged({"compile": True}, "slower", 1.0)
    won = script.judged({"fuse_qkv": True}, "accepted", 1.3)
    script.judged({"attention": "grouped"}, "accepted", 1.1)
    script.judged({"attention": "grouped"}, "slower", 1.0, kind="confirm", sources=(4,))
    script.adopt(script.judged({"fuse_qkv": True}, "accepted", 1.2, kind="confirm", sources=(won,)))
    advises = Memory.of(script.state).advises_against
    assert advises({"threads": 2})
    assert advises({"threads": 2, "compile": True}), "a part of it made a plan lossy"
    assert advises({"compile": True})
    assert not advises({"compile": True, "threads": 1}), "slower alone may be faster together"
    assert advises({"attention": "grouped"}), "its win was luck"
    assert advises({"fuse_qkv": False}), "it takes back a win"
    assert not advises({"threads": 1})


def test_memory_knows_what_takes_back_a_win() -> None:
    script = Script()
    script.judged({"gemm": "packed", "draft_gemm": "packed"}, "accepted", 2.3)
    script.judged({"compile": True}, "slower", 0.9)
    takes_back = Memory.of(script.state).takes_back
    assert takes_back({"gemm": "library", "draft_gemm": "transposed"})
    assert takes_back({"threads": 1, "draft_gemm": "library"})
    assert not takes_back({"gemm": "transposed"})
    assert not takes_back({"compile": False}), "what it undoes had not won"


def test_effects_of_families_add_up_over_adoptions_and_share_merges() -> None:
    script = Script()
    a = script.judged({"fuse_qkv": True}, "accepted", 1.5)
    b = script.judged({"threads": 2}, "accepted", 1.2)
    a2 = script.judged({"fuse_qkv": True}, "accepted", 1.5, kind="confirm", sources=(a,))
    b2 = script.judged({"threads": 2}, "accepted", 1.2, kind="confirm", sources=(b,))
    merged = script.judged({"fuse_qkv": True, "threads": 2}, "accepted", 1.7, kind="merge", sources=(a2, b2))
    script.adopt(merged)
    first = script.state.incumbent.plan.digest
    c = script.judged({"fuse_gate_up": True}, "accepted", 1.1)
    script.adopt(script.judged({"fuse_gate_up": True}, "accepted", 1.1, kind="confirm", sources=(c,)))
    memory, second = Memory.of(script.state), script.state.incumbent.plan.digest
    assert memory.effect("fusion", script.state.initial_plan.digest) == 0.0
    whole = math.log(1.5) + math.log(1.2)
    assert memory.effect("fusion", first) == pytest.approx(math.log(1.7) * math.log(1.5) / whole)
    assert memory.effect("fusion", first) + memory.effect("runtime", first) == pytest.approx(math.log(1.7))
    assert memory.effect("fusion", second) - memory.effect("fusion", first) == pytest.approx(math.log(1.1))
    assert memory.effect("runtime", second) == pytest.approx(memory.effect("runtime", first))
    assert memory.effect("gemm", second) == 0.0


def test_families_are_named_once_in_order() -> None:
    assert families_of(["threads", "gemm", "compile", "draft_gemm"]) == ("runtime", "gemm")
