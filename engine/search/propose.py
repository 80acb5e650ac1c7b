"""The offline proposer: which changes to the incumbent are tried next. Needs no key and runs no foreign code.

For each agent but the last of a round, a bandit picks a lever family and the family's own search picks values:

- Bandit: Thompson sampling over families. An arm's reward is the share of its gap that a change closed, and
  its score is that share, drawn from a Beta posterior, times the gap that the family's levers touch, measured
  on the incumbent. Evidence from earlier incumbents counts half for each change of incumbent, because an
  adopted win is harvested and a failure may have been due to what has since been mended (discounted Thompson
  sampling; Raj and Kalyani 2017). Agents of one round spread over families; the first one attacks the largest gap,
  so it takes a family with a lever that touches it wherever such a move is left.
- A lever is not taken back to a value that an accepted change moved it away from.
- A categorical value, or an ordinal lever, that the search has never tried is an arm of its own with the prior:
  that `transposed` failed says little about `packed`. Levers that mean the same thing for different parts
  (`gemm` and `draft_gemm`) move together there.
- Inside a family that was tried: Optuna's TPE by ask and tell, in memory, rebuilt from the search's history.
- Control: the last agent of a round draws a lever and a value at random, so that the events themselves show
  whether the rest is better than chance.

The result depends on nothing but the state's events and the arguments, and what a killed proposer had already
proposed in a round stays: the same call goes on from there. No two proposals of a search are the same plan.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.errors import UserError
from engine.levers import FAMILIES, LEVERS, Lever, LeverContext, change, legal_values
from engine.levers import lever as lever_of
from engine.plan import Plan
from engine.search.events import Body, CandidateProposed, Profiled, ProposalsMade
from engine.search.memory import Memory, families_of
from engine.search.state import State, Trial
from engine.search.stopping import best
from engine.search.tpe import ask
from engine.search.view import label

PRIOR_CLOSED, PRIOR_OPEN = 0.5, 1.0
"""Beta prior of the share of its gap that a change closes: a third, held so weakly that one trial outweighs it."""
LEAST_GAP = 0.02
"""A family whose levers touch no measured gap keeps this share, so that nothing is ruled out by a profile."""
MOST_GAP = 0.9
SPREAD = 0.1
"""What an arm is worth for each agent of the same round that already tries its family."""
CROSS_TRIES = 400


def propose_round(state: State, context: LeverContext, agents: Sequence[str]) -> tuple[Body, ...]:
    """What the action "propose" emits: the candidates, then the event that says they are complete."""
    candidates = propose(state, context, agents)
    number = _round_number(state)
    count = len(state.of_round(number, "candidate")) + len(candidates)
    return (*candidates, ProposalsMade(number, count))


def propose(state: State, context: LeverContext, agents: Sequence[str]) -> list[CandidateProposed]:
    """One candidate for each agent that has none yet in the open round; fewer where no untried plan is left.

    Every plan is legal in `context`, canonical, and new to this search. Raises ValueError where no round is
    open, and where an agent is named twice.
    """
    if len(set(agents)) != len(agents):
        raise ValueError("agents of one round must differ")
    number = _round_number(state)
    proposals: list[CandidateProposed] = []
    for slot, agent in enumerate(agents):
        if any(t.proposal.agent == agent for t in state.of_round(number, "candidate")):
            continue
        proposal = _Proposer(state, context, slot).one(agent, control=0 < slot == len(agents) - 1)
        if proposal is None:
            continue
        proposals.append(proposal)
        state = replace(state, trials={**state.trials, proposal.trial: Trial(proposal)})
    return proposals


def _round_number(state: State) -> int:
    if state.open_round is None:
        raise ValueError("no round is open")
    return state.open_round.number


@dataclass(frozen=True)
class _Move:
    """A legal, canonical, new plan, and what was asked for to get there."""

    plan: Plan
    asked: Mapping[str, Any]


class _Proposer:
    """Everything that one proposal is drawn from."""

    def __init__(self, state: State, context: LeverContext, slot: int) -> None:
        self.state = state
        self.context = context
        self.leads = slot == 0
        self.round = _round_number(state)
        self.incumbent = best(state)
        self.plan = self.incumbent.plan
        self.memory = Memory.of(state)
        self.rng = random.Random(f"{state.seed}:{self.round}:{slot}")
        self.profile = state.profile_of(self.plan)
        self.gaps = {gap.stage: max(0.0, gap.gap_ms) for gap in self.profile.stages} if self.profile else {}
        self._legal: dict[str, tuple[Any, ...]] = {}
        self._untried: dict[str, list[tuple[float, _Move]]] = {}

    def one(self, agent: str, *, control: bool) -> CandidateProposed | None:
        if control:
            move = self._random_move()
            if move is not None:
                return self._proposal(agent, "random", move)
        for family, first in self._ranked():
            move = self._first_visit(family) if first else self._by_tpe(family) or self._leftover(family)
            if move is not None:
                return self._proposal(agent, f"bandit:{family}", move)
        move = self._cross_move()
        return self._proposal(agent, "bandit:several", move) if move else None

    # Which family -------------------------------------------------------------------------------------------

    def _share(self, names: Iterable[str], profile: Profiled | None = None) -> float:
        """Share of the time per token above its reachable floor in stages that these levers touch, on the
        incumbent where no other profile is given."""
        profile = profile or self.profile
        if profile is None or profile.ms_per_token <= 0.0:
            return LEAST_GAP
        wanted = set(names)
        stages = {stage for lever in LEVERS if lever.name in wanted for stage in lever.stages}
        total = sum(max(0.0, gap.gap_ms) for gap in profile.stages if gap.stage in stages)
        return min(MOST_GAP, max(LEAST_GAP, total / profile.ms_per_token))

    def _posterior(self, family: str) -> tuple[float, float]:
        """Beta parameters of the share of its gap that a change of this family closes."""
        closed, still_open = PRIOR_CLOSED, PRIOR_OPEN
        parents = {incumbent.plan.digest: incumbent.plan for incumbent in self.state.incumbents}
        for item in self.memory.family(family):
            if item.kind != "candidate" or len(item.families) > 1:
                continue
            parent = parents.get(item.parent, self.plan)
            share = self._share(item.changes, self.state.profile_of(parent))
            gained = 1.0 - 1.0 / item.ratio if item.ratio and not item.failed else 0.0
            reward = min(1.0, max(0.0, gained / share))
            weight = 0.5 ** (len(self.state.incumbents) - item.era)
            closed += weight * reward
            still_open += weight * (1.0 - reward)
        return closed, still_open

    def _taken(self, family: str) -> int:
        """How many agents of this round already try the family."""
        others = self.state.of_round(self.round, "candidate")
        return sum(1 for t in others if family in families_of(t.proposal.changes))

    def _ranked(self) -> list[tuple[str, bool]]:
        """Arms, best first: a family, and whether something in it is to be tried for the first time."""
        scores: dict[tuple[str, bool], float] = {}
        for family in FAMILIES:
            taken = self._taken(family)
            names = _names(family)
            known = self.rng.betavariate(*self._posterior(family)) * self._share(names)
            scores[family, False] = known * SPREAD**taken
            news = self._news(family)
            if news:
                draws = (share * self.rng.betavariate(PRIOR_CLOSED, PRIOR_OPEN) for share, _ in news)
                scores[family, True] = max(draws) * SPREAD**taken
                if not self.memory.family(family):
                    del scores[family, False]
        at_largest = self._families_at(max(self.gaps, key=self.gaps.__getitem__, default=""))
        return sorted(scores, key=lambda arm: (self.leads and arm[0] not in at_largest, -scores[arm]))

    def _families_at(self, stage: str) -> set[str]:
        return {lever.family for lever in LEVERS if stage in lever.stages}

    # Which values -------------------------------------------------------------------------------------------

    def _first_visit(self, family: str) -> _Move | None:
        """One of the family's untried moves; those that touch a larger gap are likelier."""
        news = self._news(family)
        return self.rng.choices([move for _, move in news], weights=[share for share, _ in news])[0] if news else None

    def _news(self, family: str) -> list[tuple[float, _Move]]:
        """Every named value, and one value of every ordinal lever, that the search has never tried, with the
        share of the gap that it touches."""
        if family not in self._untried:
            self._untried[family] = []
            for group in self._groups(family):
                number = _is_number(group[0])
                if number and self._moved(group[0].name):
                    continue
                together = (self._together(group, value) for value in group[0].values(self.context))
                moves = [move for move in together if move is not None and self._is_first(move)]
                if number and moves:
                    moves = [self.rng.choice(moves)]
                share = self._share(lever.name for lever in group)
                self._untried[family].extend((share, move) for move in moves)
        return self._untried[family]

    def _groups(self, family: str) -> list[list[Lever]]:
        """Levers of the family, those with the same named values side by side."""
        groups: dict[tuple[Any, ...], list[Lever]] = {}
        for lever in _levers(family):
            values = lever.values(self.context)
            groups.setdefault((lever.name,) if _is_number(lever) else values, []).append(lever)
        return list(groups.values())

    def _moved(self, name: str) -> list[Any]:
        """Values that proposals of this search have moved the lever to."""
        return [t.proposal.changes[name] for t in self.state.trials.values() if name in t.proposal.changes]

    def _is_first(self, move: _Move) -> bool:
        """Whether the move gives some lever a value that it has never had in this search."""
        return any(
            value != getattr(self.state.initial_plan, name) and value not in self._moved(name)
            for name, value in move.asked.items()
        )

    def _together(self, group: list[Lever], value: Any) -> _Move | None:
        """All levers of the group moved to one value, where that is legal and new."""
        able = [lever for lever in group if value in self._values(lever)]
        return self._wise({lever.name: value for lever in able if getattr(self.plan, lever.name) != value})

    def _values(self, lever: Lever) -> tuple[Any, ...]:
        """Values of the lever that are legal from the incumbent and make a difference."""
        if lever.name not in self._legal:
            self._legal[lever.name] = legal_values(lever, self.plan, self.context)
        return self._legal[lever.name]

    def _by_tpe(self, family: str) -> _Move | None:
        seed = self.rng.randrange(2**32)
        for values in ask(self.memory, self.state.incumbents, _levers(family), self.context, seed):
            move = self._wise({name: value for name, value in values.items() if getattr(self.plan, name) != value})
            if move is not None:
                return move
        return None

    def _leftover(self, family: str) -> _Move | None:
        """Any single change inside the family that is still new and not known to be bad."""
        moves = [
            move
            for lever in _levers(family)
            for value in self._values(lever)
            if (move := self._wise({lever.name: value})) is not None
        ]
        return self.rng.choice(moves) if moves else None

    def _random_move(self) -> _Move | None:
        """The control: a lever, then a value, uniformly among those that give a new plan."""
        levers = list(LEVERS)
        self.rng.shuffle(levers)
        for lever in levers:
            values = list(self._values(lever))
            self.rng.shuffle(values)
            for value in values:
                move = self._move({lever.name: value})
                if move is not None:
                    return move
        return None

    def _cross_move(self) -> _Move | None:
        """Several levers at once, at random: what is left when every single family is spent."""
        for _ in range(CROSS_TRIES):
            levers = self.rng.sample(list(LEVERS), self.rng.randint(2, 5))
            move = self._move({lever.name: self.rng.choice(lever.values(self.context)) for lever in levers})
            if move is not None:
                return move
        return None

    def _wise(self, changes: Mapping[str, Any]) -> _Move | None:
        """The move, unless memory advises against it."""
        move = self._move(changes)
        if move is None:
            return None
        moved = move.plan.changes_from(self.plan)
        felt = {name: value for name, value in moved.items() if lever_of(name).effective(move.plan)}
        return None if self.memory.advises_against(moved) or self.memory.takes_back(felt) else move

    def _move(self, changes: Mapping[str, Any]) -> _Move | None:
        """The plan that results, or None where it is illegal, no change at all, or not new."""
        if not changes:
            return None
        try:
            plan = change(self.plan, changes, self.context)
        except UserError:
            return None
        asked = {name: value for name, value in changes.items() if getattr(plan, name) == value}
        if plan == self.plan or self.memory.knows(plan) or (plan.source != self.plan.source and "source" not in asked):
            return None  # a change that gives up its drafter to become legal is a different experiment
        return _Move(plan, asked)

    # In words -----------------------------------------------------------------------------------------------

    def _proposal(self, agent: str, arm: str, move: _Move) -> CandidateProposed:
        changes = move.plan.changes_from(self.plan)
        stage = self._stage(move.asked or changes)
        predicted, expectation = self._expect(arm, changes)
        return CandidateProposed(
            trial=self.state.next_trial,
            round=self.round,
            kind="candidate",
            agent=agent,
            plan=move.plan,
            parent=self.plan.digest,
            changes=changes,
            stage=stage,
            arm=arm,
            rationale=f"{self._why(arm, stage)} {self._what(changes)} {expectation}",
            predicted=predicted,
        )

    def _stage(self, names: Iterable[str]) -> str:
        """The largest gap that the levers touch; their first stage where nothing is measured."""
        wanted = set(names)
        stages = [stage for lever in LEVERS if lever.name in wanted for stage in lever.stages]
        return max(stages, key=lambda stage: self.gaps.get(stage, 0.0))

    def _why(self, arm: str, stage: str) -> str:
        if arm == "random":
            return "Drawn at random, as a control for the other proposals."
        gap = self.gaps.get(stage, 0.0)
        if self.profile is None or gap <= 0.0:
            return f"No gap was measured at {label(stage)}; tried because larger gaps have had their turn."
        largest = max(self.gaps, key=lambda name: self.gaps[name])
        rank = "the largest gap" if stage == largest else "the largest gap that these levers touch"
        return (
            f"{label(stage)} is {rank}: {gap:.2f} of {self.profile.ms_per_token:.2f} ms per token lie above what "
            "the hardware allows."
        )

    def _what(self, changes: Mapping[str, Any]) -> str:
        parts = [f"{name} from {_show(getattr(self.plan, name))} to {_show(value)}" for name, value in changes.items()]
        return f"Change {', '.join(parts)}."

    def _expect(self, arm: str, changes: Mapping[str, Any]) -> tuple[float | None, str]:
        before = [item for item in self.memory.same_change(changes) if item.ratio is not None]
        if before:
            ratio = before[-1].ratio or 1.0
            return ratio, f"The same change measured {ratio:.2f}x in trial {before[-1].trial}, on another plan."
        if arm == "random":
            return None, "Nothing is predicted."
        families = families_of(changes)
        closed, still_open = self._posterior(families[0])
        share = closed / (closed + still_open)
        predicted = 1.0 / (1.0 - share * self._share(changes))
        seen = len({item.trial for family in families for item in self.memory.family(family)})
        so_far = (
            f"{seen} {'trial' if seen == 1 else 'trials'} of its family so far" if seen else "a guess, as yet untried"
        )
        return predicted, f"Expected to close {share:.0%} of the gap that it touches ({so_far}): {predicted:.2f}x."


def _levers(family: str) -> list[Lever]:
    return [lever for lever in LEVERS if lever.family == family]


def _names(family: str) -> list[str]:
    return [lever.name for lever in _levers(family)]


def _is_number(lever: Lever) -> bool:
    return isinstance(lever.default, int) and not isinstance(lever.default, bool)


def _show(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
