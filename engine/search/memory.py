"""The structured memory of a search: what was tried, by lever, family and value, and what came of it.

It is derived from the state whenever it is needed, so it survives whatever the state survives. Proposers ask
it questions; `to_json` is the form that a language model or a person reads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from engine.levers import lever
from engine.plan import Plan
from engine.search.events import TrialKind
from engine.search.state import State, Trial


@dataclass(frozen=True)
class Tried:
    """One judged plan. `changes` and `was` are lever values in it and in its parent, by lever name.

    `ratio` is the speed over the parent, taken from the confirmation where there is one (None: not timed);
    `confirmed` is None where nobody measured it again. `era` is the number of incumbents before it.
    """

    trial: int
    round: int
    era: int
    kind: TrialKind
    arm: str
    stage: str
    families: tuple[str, ...]
    changes: Mapping[str, Any]
    was: Mapping[str, Any]
    plan: Plan
    parent: str
    verdict: str
    reason: str
    ratio: float | None
    low: float | None
    high: float | None
    predicted: float | None
    confirmed: bool | None

    @property
    def failed(self) -> bool:
        """Whether the plan is unusable, rather than merely no faster."""
        return self.verdict not in ("accepted", "slower")


@dataclass(frozen=True)
class Memory:
    """`tried` in order of trial numbers; `plans` also holds what was proposed and is not judged yet."""

    tried: tuple[Tried, ...]
    plans: frozenset[Plan]
    effects: Mapping[str, Mapping[str, float]]

    @classmethod
    def of(cls, state: State) -> Memory:
        return cls(
            tried=tuple(_tried(state, trial) for trial in _judged(state)),
            plans=frozenset(trial.plan for trial in state.trials.values()),
            effects=_effects(state),
        )

    def knows(self, plan: Plan) -> bool:
        """Whether the plan was ever proposed, whatever became of it."""
        return plan in self.plans

    def family(self, family: str) -> list[Tried]:
        """Judged plans that changed at least one lever of the family."""
        return [item for item in self.tried if family in item.families]

    def value(self, name: str, value: Any) -> list[Tried]:
        """Judged plans that moved the lever to this value."""
        return [item for item in self.tried if name in item.changes and _same(item.changes[name], value)]

    def touched(self, names: Iterable[str]) -> list[Tried]:
        """Judged plans that changed one of these levers."""
        wanted = set(names)
        return [item for item in self.tried if wanted & item.changes.keys()]

    def same_change(self, changes: Mapping[str, Any]) -> list[Tried]:
        """Judged plans that made exactly this change, on whatever parent."""
        return [
            item
            for item in self.tried
            if item.changes.keys() == changes.keys()
            and all(_same(item.changes[name], value) for name, value in changes.items())
        ]

    def advises_against(self, changes: Mapping[str, Any]) -> bool:
        """Whether just this change did not pay before, takes back one that did, or has a part that made a plan
        unusable."""
        return any(
            (item.failed and _within(item.changes, changes))
            or (item.verdict != "accepted" and _within(item.changes, changes) and len(item.changes) == len(changes))
            or (item.verdict == "accepted" and _within(changes, item.was))
            for item in self.tried
        )

    def takes_back(self, changes: Mapping[str, Any]) -> bool:
        """Whether a lever goes back to the value that an accepted change moved it away from."""
        return any(
            item.verdict == "accepted" and any(_same(item.was.get(name), value) for name, value in changes.items())
            for item in self.tried
        )

    def effect(self, family: str, plan_digest: str) -> float:
        """Log of the speed that the family's levers have brought to an incumbent since the initial plan,
        0.0 where nothing is known. Log-speeds are taken to add up over families; merges share theirs out in
        proportion to what their parts measured alone."""
        return self.effects.get(plan_digest, {}).get(family, 0.0)

    def to_json(self) -> list[dict[str, Any]]:
        """What was tried and why it failed or won, without evidence."""
        return [
            {
                "trial": item.trial,
                "round": item.round,
                "kind": item.kind,
                "families": list(item.families),
                "stage": item.stage,
                "changes": [
                    {"lever": name, "from": item.was.get(name), "to": value} for name, value in item.changes.items()
                ],
                "parent": item.parent,
                "verdict": item.verdict,
                "reason": item.reason,
                "ratio": item.ratio,
                "predicted": item.predicted,
                "confirmed": item.confirmed,
            }
            for item in self.tried
        ]


def families_of(names: Iterable[str]) -> tuple[str, ...]:
    """Families of these levers, each once, in order of first mention. Raises UserError for an unknown lever."""
    return tuple(dict.fromkeys(lever(name).family for name in names))


def _same(left: Any, right: Any) -> bool:
    return type(left) is type(right) and bool(left == right)


def _within(part: Mapping[str, Any], whole: Mapping[str, Any]) -> bool:
    return all(name in whole and _same(whole[name], value) for name, value in part.items())


def _judged(state: State) -> list[Trial]:
    return [t for t in state.trials.values() if t.kind in ("candidate", "merge") and t.judgement is not None]


def _confirmation(state: State, trial: Trial) -> Trial | None:
    """The latest confirmation of a trial: an undecided one is measured once more."""
    confirmations = (
        other
        for other in state.trials.values()
        if other.kind == "confirm" and other.judgement is not None and trial.number in other.proposal.sources
    )
    return max(confirmations, key=lambda other: other.number, default=None)


def _tried(state: State, trial: Trial) -> Tried:
    proposal, judgement = trial.proposal, trial.judgement
    assert judgement is not None  # `_judged` lets no other pass
    again = _confirmation(state, trial)
    measured = again if again is not None and again.ratio is not None else trial
    comparison = measured.judgement.comparison if measured.judgement else None
    parent = next((i for i in state.incumbents if i.plan.digest == proposal.parent), None)
    before = (parent.plan if parent else state.initial_plan).to_json()
    return Tried(
        trial=trial.number,
        round=trial.round,
        era=state.incumbents.index(parent) + 1 if parent else 0,
        kind=trial.kind,
        arm=proposal.arm,
        stage=proposal.stage,
        families=families_of(proposal.changes),
        changes=proposal.changes,
        was={name: before.get(name) for name in proposal.changes},
        plan=trial.plan,
        parent=proposal.parent,
        verdict=again.judgement.verdict if again and again.judgement else judgement.verdict,
        reason=again.judgement.reason if again and again.judgement else judgement.reason,
        ratio=comparison.ratio if comparison else None,
        low=comparison.low if comparison else None,
        high=comparison.high if comparison else None,
        predicted=proposal.predicted,
        confirmed=again.accepted if again is not None else None,
    )


def _effects(state: State) -> dict[str, dict[str, float]]:
    """Plan digest of every incumbent -> family -> log speed since the initial plan."""
    result: dict[str, dict[str, float]] = {}
    total: dict[str, float] = {}
    for incumbent in state.incumbents:
        trial = state.trials[incumbent.trial]
        total = dict(total)
        for family, gain in _shares(state, trial).items():
            total[family] = total.get(family, 0.0) + gain
        result[incumbent.plan.digest] = total
    return result


def _shares(state: State, trial: Trial) -> dict[str, float]:
    """What each family brought to one adopted trial, as log speed over its parent."""
    gain = _log(trial)
    parts = [trial]
    if trial.kind == "merge":
        parts = [state.trials[source] for source in trial.proposal.sources]
    whole = sum(_log(part) for part in parts)
    shares: dict[str, float] = {}
    for part in parts:
        families = families_of(part.proposal.changes)
        weight = _log(part) / whole if whole > 0 else 1.0 / len(parts)
        for family in families:
            shares[family] = shares.get(family, 0.0) + gain * weight / len(families)
    return shares


def _log(trial: Trial) -> float:
    return math.log(trial.ratio) if trial.ratio else 0.0
