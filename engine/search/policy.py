"""What a search does next: a pure function of its state.

`decide(state)` returns every action that should be running now. It may be called at any time and as often as
one likes: the same state gives the same actions under the same keys, so a shell starts those whose key is not
in flight and leaves the rest alone. A shell that runs one action at a time takes the first and decides again;
one that queues actions must decide again before it starts each of them, because time has passed.

Order: probe, stock, baseline (trial 0) and its standing; then rounds of profile, proposals, trials,
confirmation, merge and standing; then the closing measurement, the bundle and the end. Actions of kind "emit"
carry their events; any prefix of those events leads to the same continuation.

Paused: no actions (what is in flight may end). Cancelling: nothing new is measured; the bundle is written
where a better plan than the initial one has been adopted, with the evidence of its standing; then the end.
An action that failed twice ends the search, except a trial, which is judged "crashed".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from engine.judge.report import Comparison, Judgement
from engine.plan import Plan
from engine.search.events import (
    Body,
    CandidateProposed,
    RoundEnded,
    RoundStarted,
    SearchFinished,
    StopReason,
    TrialJudged,
    TrialKind,
)
from engine.search.state import Round, State, Trial
from engine.search.stopping import affordable, best, ending, gaps_closed, stop_reason

ActionKind = Literal["probe", "stock", "trial", "profile", "standing", "propose", "bundle", "emit"]

STOCKS = ("autoregressive", "speculative")
MAX_FAILURES = 2
MAX_CONFIRMED = 2
"""Winners of a round that are measured again: each costs a trial, and stacking more than two rarely pays."""
MAX_LOOKS = 2
"""Confirmations of one winner at most. A second one is for a winner whose first was undecided: on a noisy machine the
pairs of one trial often cannot prove a gain of a third. An equal candidate must still pass its trial and one of two
confirmations, each of which noise passes in at most 2 %: far less likely than passing one trial."""


@dataclass(frozen=True)
class Action:
    """One thing to do. `key` is unique within a search and names the action across processes: a worker in
    another process folds the events, decides, and picks the action by its key, so `data` is never serialised.

    data by kind: stock {"name"}; trial {"trial", "kind", "plan", "incumbent": Plan | None, "fresh": int that no
    other trial has, "attempt"}; profile {"round", "plan"}; standing {"trial", "plan", "over_incumbent", "final"};
    propose {"round", "agents"}; probe, bundle and emit {}. `events` is filled for "emit" alone.
    """

    key: str
    kind: ActionKind
    where: Literal["device", "control"]
    data: dict[str, Any] = field(default_factory=dict)
    events: tuple[Body, ...] = ()


def decide(state: State) -> list[Action]:
    """Actions that should now be running: none when paused or finished, at least one otherwise."""
    if state.finished is not None or state.status == "paused":
        return []
    broken = _broken(state)
    if broken is not None:
        return [broken]
    if state.status == "cancelling":
        return _end(state, "cancelled")
    return _opening(state) or _round(state) or _closing(state)


# Opening ------------------------------------------------------------------------------------------------------


def _opening(state: State) -> list[Action]:
    if state.hardware is None:
        return [Action("probe", "probe", "device")]
    for name in STOCKS:
        if name not in state.stocks:
            return [Action(f"stock:{name}", "stock", "device", {"name": name})]
    if 0 not in state.trials:
        return [_emit("baseline", _baseline(state))]
    baseline = state.trials[0]
    if baseline.judgement is None:
        return [_run(state, baseline)]
    if baseline.judgement.verdict not in ("accepted", "slower"):
        sentence = (
            f"The initial plan was judged {baseline.judgement.verdict}, so there is nothing to improve on: "
            f"{baseline.judgement.reason}"
        )
        return [_finish("failed", sentence)]
    if state.incumbent is None:
        return [_standing(baseline, 1.0)]
    return []


def _baseline(state: State) -> CandidateProposed:
    plan = state.initial_plan
    return CandidateProposed(
        trial=0,
        round=0,
        kind="baseline",
        agent="policy",
        plan=plan,
        parent=plan.digest,
        changes={},
        stage="",
        arm="baseline",
        rationale="The plan that the search starts from; it must be lossless before anything is built on it.",
        predicted=1.0,
    )


# One round ----------------------------------------------------------------------------------------------------


def _round(state: State) -> list[Action]:
    incumbent = best(state)
    current = state.open_round
    if current is None:
        if stop_reason(state) is not None:
            return []
        number = len(state.rounds) + 1
        return [_emit(f"round:{number}:start", RoundStarted(number))]
    if incumbent.round == current.number:
        return [_end_round(current, improved=True)]
    if state.profile_of(incumbent.plan) is None:  # a plan that was profiled in an earlier round is not again
        return [
            Action(
                f"profile:{current.number}",
                "profile",
                "device",
                {"round": current.number, "plan": incumbent.plan},
            )
        ]
    if gaps_closed(state):
        return [_end_round(current, improved=False)]
    if current.proposed is None:
        return [_propose(state, current)]
    return _trials(state, current) or _confirm(state, current) or _merge(state, current) or _adopt(state, current)


def _propose(state: State, current: Round) -> Action:
    count = min(state.budget.candidates_per_round, state.budget.trials - state.trials_used)
    agents = [f"agent {number}" for number in range(1, count + 1)]
    return Action(
        f"propose:{current.number}",
        "propose",
        "control",
        {"round": current.number, "agents": agents},
    )


def _trials(state: State, current: Round) -> list[Action]:
    """Candidates that are running or can still be afforded, until the round goes on to confirm."""
    if state.of_round(current.number, "confirm"):
        return []
    waiting = [t for t in state.of_round(current.number, "candidate") if t.judgement is None]
    return [_run(state, t) for t in waiting if t.attempts or affordable(state, trials=2)]


def _confirm(state: State, current: Round) -> list[Action]:
    """Measure the best winners again, until enough are confirmed or none is left."""
    if state.of_round(current.number, "merge"):
        return []
    confirms = state.of_round(current.number, "confirm")
    waiting = [t for t in confirms if t.judgement is None]
    confirmed = [t for t in confirms if t.accepted]
    winners = _winners(state, current, "candidate")
    fresh = [t for t in winners if not _looks(confirms, t)]
    again = [t for t in winners if _is_undecided(_looks(confirms, t))]
    chosen = [*fresh, *again][: max(0, MAX_CONFIRMED - len(confirmed) - len(waiting))]
    if chosen and affordable(state, trials=len(waiting) + 1):
        proposals = tuple(
            _confirmation(state, current, t, n, bool(_looks(confirms, t)))
            for n, t in enumerate(chosen, start=state.next_trial)
        )
        return [_emit(f"confirm:{current.number}:{state.next_trial}", *proposals), *(_run(state, t) for t in waiting)]
    return [_run(state, t) for t in waiting if t.attempts or affordable(state, trials=1)]


def _looks(confirms: list[Trial], winner: Trial) -> list[Trial]:
    """The confirmations of a winner so far."""
    return [t for t in confirms if winner.number in t.proposal.sources]


def _is_undecided(looks: list[Trial]) -> bool:
    """Whether another look is due: all so far were lossless and showed a gain, which their intervals did not prove."""
    comparisons = [t.judgement.comparison for t in looks if t.judgement and t.judgement.verdict == "slower"]
    return 0 < len(looks) < MAX_LOOKS and len(comparisons) == len(looks) and all(map(_shows_gain, comparisons))


def _shows_gain(comparison: Comparison | None) -> bool:
    return comparison is not None and comparison.ratio > 1.0 + comparison.threshold


def _confirmation(state: State, current: Round, winner: Trial, number: int, again: bool) -> CandidateProposed:
    proposal = winner.proposal
    why = (
        f"Trial {winner.number} won, and the measurement that was to confirm it showed a gain that it could not prove; "
        "it is measured once more."
        if again
        else f"Trial {winner.number} won; it is measured again on fresh prompts, because the best of several "
        "measurements is also the luckiest."
    )
    return CandidateProposed(
        trial=number,
        round=current.number,
        kind="confirm",
        agent="policy",
        plan=winner.plan,
        parent=proposal.parent,
        changes=proposal.changes,
        stage=proposal.stage,
        arm="confirm",
        rationale=why,
        predicted=winner.ratio,
        sources=(winner.number,),
    )


def _merge(state: State, current: Round) -> list[Action]:
    """Stack the confirmed winners and judge the stack as a candidate of its own."""
    merges = state.of_round(current.number, "merge")
    if merges:
        return [_run(state, t) for t in merges if t.judgement is None and (t.attempts or affordable(state, trials=1))]
    sources = _stackable(_winners(state, current, "confirm"))
    if len(sources) < 2 or state.trials_used >= state.budget.trials or not affordable(state, trials=1):
        return []
    incumbent = best(state)
    changes: dict[str, Any] = {}
    for source in sources:
        changes.update(source.proposal.changes)
    plan = incumbent.plan.with_changes(changes)
    if any(t.plan == plan for t in state.trials.values()):
        return []
    predicted = 1.0
    for source in sources:
        predicted *= source.ratio or 1.0
    names = " and ".join(str(source.number) for source in sources)
    proposal = CandidateProposed(
        trial=state.next_trial,
        round=current.number,
        kind="merge",
        agent="policy",
        plan=plan,
        parent=incumbent.plan.digest,
        changes=changes,
        stage=sources[0].proposal.stage,
        arm="merge",
        rationale=f"The confirmed winners of trials {names} stacked; wins do not simply add, so the stack is judged "
        "as a candidate of its own.",
        predicted=predicted,
        sources=tuple(source.number for source in sources),
    )
    return [_emit(f"merge:{current.number}", proposal)]


def _stackable(confirmed: list[Trial]) -> list[Trial]:
    """Winners, best first, of which no two change the same lever."""
    taken: list[Trial] = []
    for trial in confirmed:
        if not any(trial.proposal.changes.keys() & other.proposal.changes.keys() for other in taken):
            taken.append(trial)
    return taken


def _adopt(state: State, current: Round) -> list[Action]:
    """The merge where it is at least as fast as the best confirmed winner, else that one; or the round's end."""
    choices = [*_winners(state, current, "merge"), *_winners(state, current, "confirm")]
    if not choices:
        return [_end_round(current, improved=False)]
    winner = max(choices, key=lambda t: t.ratio or 0.0)  # the first of equals
    return [_standing(winner, winner.ratio or 1.0)]


def _winners(state: State, current: Round, kind: TrialKind) -> list[Trial]:
    """Accepted trials of a kind that were timed, fastest first."""
    timed = [t for t in state.of_round(current.number, kind) if t.accepted and t.ratio is not None]
    return sorted(timed, key=lambda t: (-(t.ratio or 0.0), t.number))


def _end_round(current: Round, *, improved: bool) -> Action:
    return _emit(f"round:{current.number}:end", RoundEnded(current.number, improved))


# Closing ------------------------------------------------------------------------------------------------------


def _closing(state: State) -> list[Action]:
    incumbent = best(state)
    if not incumbent.final:
        data = {
            "trial": incumbent.trial,
            "plan": incumbent.plan,
            "over_incumbent": incumbent.over_incumbent,
            "final": True,
        }
        return [Action("standing:final", "standing", "device", data)]
    return _end(state, stop_reason(state) or "budget")


def _end(state: State, reason: StopReason) -> list[Action]:
    """Bundle where there is something to hand over, then the end."""
    incumbent = state.incumbent
    wanted = incumbent is not None and (reason != "cancelled" or incumbent.trial != 0)
    if wanted and state.bundle is None:
        return [Action("bundle", "bundle", "control")]
    return [_finish(reason, ending(state, reason))]


# Parts --------------------------------------------------------------------------------------------------------


def _broken(state: State) -> Action | None:
    """A failure that cannot be tried again: a trial gets its verdict, anything else ends the search."""
    for key, reasons in state.failures.items():
        if len(reasons) < MAX_FAILURES:
            continue
        trial = _trial_of(state, key)
        if trial is None:
            sentence = f"The search failed: {_NAMES.get(key.partition(':')[0], key)} failed twice: {reasons[-1]}"
            return _finish("failed", sentence)
        if trial.judgement is None and state.status != "cancelling":
            judgement = Judgement("crashed", f"The trial could not be carried out, twice: {reasons[-1]}")
            return _emit(f"verdict:{trial.number}", TrialJudged(trial.number, judgement))
    return None


_NAMES = {
    "probe": "probing the hardware",
    "stock": "measuring stock",
    "profile": "profiling the incumbent",
    "standing": "measuring the incumbent against stock",
    "propose": "proposing candidates",
    "bundle": "writing the bundle",
}


def _trial_of(state: State, key: str) -> Trial | None:
    kind, _, number = key.partition(":")
    return state.trials.get(int(number)) if kind == "trial" and number.isdigit() else None


def _run(state: State, trial: Trial) -> Action:
    incumbent: Plan | None = None if trial.kind == "baseline" else best(state).plan
    data = {
        "trial": trial.number,
        "kind": trial.kind,
        "plan": trial.plan,
        "incumbent": incumbent,
        "fresh": trial.number,
        "attempt": trial.attempts + 1,
    }
    return Action(f"trial:{trial.number}", "trial", "device", data)


def _standing(trial: Trial, over_incumbent: float) -> Action:
    data = {"trial": trial.number, "plan": trial.plan, "over_incumbent": over_incumbent, "final": False}
    return Action(f"standing:{trial.number}", "standing", "device", data)


def _emit(key: str, *events: Body) -> Action:
    return Action(key, "emit", "control", events=events)


def _finish(reason: StopReason, sentence: str) -> Action:
    return _emit("finish", SearchFinished(reason, sentence))
