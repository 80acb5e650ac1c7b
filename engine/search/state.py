"""The state of a search: a fold over its events, and nothing else.

`fold` is total and deterministic. Values are immutable by convention: a fold returns a new `State` and never
changes an old one, so any prefix of an event log can be replayed, kept and compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from engine.deployment import Deployment
from engine.judge.report import Comparison, Judgement
from engine.plan import Plan
from engine.search.events import (
    ActionFailed,
    Body,
    Budget,
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
    TrialKind,
    TrialProgress,
    TrialStarted,
)

Status = Literal["running", "paused", "cancelling", "finished", "failed"]


class FoldError(Exception):
    """An event contradicts the state that it would be added to (a gap in the numbers, a second verdict, ...)."""

    def __init__(self, seq: int, contradiction: str) -> None:
        super().__init__(f"event {seq}: {contradiction}")
        self.seq = seq
        self.contradiction = contradiction


@dataclass(frozen=True)
class Trial:
    """One candidate on its way to a verdict. `attempts` counts starts; `phase` is the judge's last word on it."""

    proposal: CandidateProposed
    attempts: int = 0
    worker: str = ""
    phase: str = ""
    judgement: Judgement | None = None

    @property
    def number(self) -> int:
        return self.proposal.trial

    @property
    def round(self) -> int:
        return self.proposal.round

    @property
    def kind(self) -> TrialKind:
        return self.proposal.kind

    @property
    def plan(self) -> Plan:
        return self.proposal.plan

    @property
    def status(self) -> Literal["proposed", "running", "judged"]:
        if self.judgement is not None:
            return "judged"
        return "running" if self.attempts else "proposed"

    @property
    def accepted(self) -> bool:
        return self.judgement is not None and self.judgement.verdict == "accepted"

    @property
    def ratio(self) -> float | None:
        """Measured speed over the incumbent that it was judged against; None where it was not timed."""
        comparison = self.judgement.comparison if self.judgement else None
        return comparison.ratio if comparison else None


@dataclass(frozen=True)
class Round:
    """`proposed` is the number of candidates once the proposals are complete; `improved` is None while it runs."""

    number: int
    proposed: int | None = None
    improved: bool | None = None


@dataclass(frozen=True)
class Incumbent:
    """A plan that is, or was, the best. `seconds` is what its standing took; `final` says that the closing
    measurement is in."""

    trial: int
    round: int
    plan: Plan
    over_incumbent: float
    over_autoregressive: Comparison | None
    over_speculative: Comparison | None
    over_own_autoregressive: Comparison | None
    final: bool
    seconds: float


@dataclass(frozen=True)
class State:
    """Everything known about a search after event number `seq`.

    `seconds` is the active time: time between events while running, without pauses and without the gap before
    a `status_changed` to "running" (a worker that comes back after a kill or a power cut says so with that
    event, and the time in which nobody worked is not charged to the budget).
    `failures` lists the reasons of failed actions by action key. `incumbents` is the history, newest last.
    """

    deployment: Deployment
    budget: Budget
    seed: int
    initial_plan: Plan
    version: str
    seq: int
    started: float
    time: float
    status: Status = "running"
    seconds: float = 0.0
    verdict_seconds: float = 0.0  # active seconds at the newest verdict
    hardware: Mapping[str, Any] | None = None
    stocks: Mapping[str, StockMeasured] = field(default_factory=dict)
    rounds: tuple[Round, ...] = ()
    trials: Mapping[int, Trial] = field(default_factory=dict)
    profiles: tuple[Profiled, ...] = ()
    incumbents: tuple[Incumbent, ...] = ()
    failures: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    bundle: BundleWritten | None = None
    finished: SearchFinished | None = None

    @property
    def incumbent(self) -> Incumbent | None:
        return self.incumbents[-1] if self.incumbents else None

    @property
    def open_round(self) -> Round | None:
        return self.rounds[-1] if self.rounds and self.rounds[-1].improved is None else None

    @property
    def next_trial(self) -> int:
        return max(self.trials, default=-1) + 1

    @property
    def trials_used(self) -> int:
        """What counts against the budget's trials: judged new plans. The baseline and confirmations, which
        measure a plan that was already judged, do not."""
        return sum(1 for t in self.trials.values() if t.kind in ("candidate", "merge") and t.judgement is not None)

    def of_round(self, number: int, kind: TrialKind | None = None) -> list[Trial]:
        """Trials of a round in order of their numbers, of one kind where it is given."""
        return [t for t in self.trials.values() if t.round == number and kind in (None, t.kind)]

    def profile_of(self, plan: Plan) -> Profiled | None:
        """The newest profile of this plan."""
        return next((profile for profile in reversed(self.profiles) if profile.plan == plan), None)


def fold_all(events: Iterable[Event], state: State | None = None) -> State:
    """Fold events in order onto `state` (None: the first one must be `search_started`).

    Raises FoldError where an event contradicts what came before it, or where there is none at all.
    """
    for event in events:
        state = fold(state, event)
    if state is None:
        raise FoldError(0, "a search without events has no state")
    return state


def fold(state: State | None, event: Event) -> State:
    """The state after one more event. Raises FoldError where the event contradicts `state`."""
    body = event.body
    if state is None:
        if not isinstance(body, SearchStarted) or event.seq != 1:
            raise FoldError(event.seq, "the first event must be search_started with number 1")
        return State(
            deployment=body.deployment,
            budget=body.budget,
            seed=body.seed,
            initial_plan=body.initial_plan,
            version=body.version,
            seq=1,
            started=event.time,
            time=event.time,
        )
    if event.seq != state.seq + 1:
        raise FoldError(event.seq, f"it does not follow event {state.seq}")
    state = _tick(state, event)
    if state.finished is not None:
        if isinstance(body, _LATE):
            return state
        raise FoldError(event.seq, f"{body.type} after the search has finished")
    try:
        return _RULES[type(body)](state, body)
    except _Contradiction as contradiction:
        raise FoldError(event.seq, str(contradiction)) from None


# What an action that was still in flight when a search ended, or a click that came too late, may add after the
# end. It stays in the log and changes nothing.
_LATE = (
    HardwareProbed,
    StockMeasured,
    Profiled,
    TrialStarted,
    TrialProgress,
    TrialJudged,
    IncumbentChanged,
    ActionFailed,
    StatusChanged,
    Note,
)


class _Contradiction(Exception):
    pass


def _refuse(wrong: bool, contradiction: str) -> None:
    if wrong:
        raise _Contradiction(contradiction)


def _tick(state: State, event: Event) -> State:
    returns = isinstance(event.body, StatusChanged) and event.body.status == "running"
    counts = state.status in ("running", "cancelling") and not returns
    elapsed = max(0.0, event.time - state.time) if counts else 0.0
    return replace(state, seq=event.seq, time=max(state.time, event.time), seconds=state.seconds + elapsed)


def _started_again(state: State, body: SearchStarted) -> State:
    raise _Contradiction("search_started for a search that has started")


def _hardware(state: State, body: HardwareProbed) -> State:
    _refuse(state.hardware is not None, "the hardware was already probed")
    return replace(state, hardware=body.profile)


def _stock(state: State, body: StockMeasured) -> State:
    _refuse(body.name in state.stocks, f"stock {body.name} was already measured")
    return replace(state, stocks={**state.stocks, body.name: body})


def _profiled(state: State, body: Profiled) -> State:
    _refuse(any(p.round == body.round for p in state.profiles), f"round {body.round} was already profiled")
    return replace(state, profiles=(*state.profiles, body))


def _round_started(state: State, body: RoundStarted) -> State:
    _refuse(state.open_round is not None, "a round started before the last one ended")
    _refuse(body.round != len(state.rounds) + 1, f"round {body.round} does not follow round {len(state.rounds)}")
    return replace(state, rounds=(*state.rounds, Round(body.round)))


def _in_round(state: State, number: int) -> Round:
    current = state.open_round
    if current is None or current.number != number:
        raise _Contradiction(f"round {number} is not the one that runs")
    return current


def _proposed(state: State, body: CandidateProposed) -> State:
    _refuse(body.trial != state.next_trial, f"trial {body.trial} does not follow trial {state.next_trial - 1}")
    if body.kind == "baseline":
        _refuse(body.trial != 0 or body.round != 0, "only trial 0 of round 0 is the baseline")
    else:
        current = _in_round(state, body.round)
        _refuse(
            body.kind == "candidate" and current.proposed is not None,
            f"the proposals of round {body.round} were already complete",
        )
    return replace(state, trials={**state.trials, body.trial: Trial(body)})


def _proposals_made(state: State, body: ProposalsMade) -> State:
    current = _in_round(state, body.round)
    _refuse(current.proposed is not None, f"the proposals of round {body.round} were already complete")
    found = len(state.of_round(body.round, "candidate"))
    _refuse(found != body.count, f"round {body.round} has {found} candidates, not {body.count}")
    return replace(state, rounds=(*state.rounds[:-1], replace(current, proposed=body.count)))


def _trial(state: State, number: int) -> Trial:
    if number not in state.trials:
        raise _Contradiction(f"there is no trial {number}")
    return state.trials[number]


def _put(state: State, trial: Trial) -> State:
    return replace(state, trials={**state.trials, trial.number: trial})


def _trial_started(state: State, body: TrialStarted) -> State:
    trial = _trial(state, body.trial)
    _refuse(trial.judgement is not None, f"trial {body.trial} started after its verdict")
    _refuse(body.attempt < trial.attempts, f"trial {body.trial} went back from attempt {trial.attempts}")
    return _put(state, replace(trial, attempts=max(1, body.attempt), worker=body.worker, phase=""))


def _trial_progress(state: State, body: TrialProgress) -> State:
    trial = _trial(state, body.trial)
    if trial.judgement is not None:  # the last words of a worker that was taken for dead
        return state
    return _put(state, replace(trial, phase=body.phase))


def _trial_judged(state: State, body: TrialJudged) -> State:
    trial = _trial(state, body.trial)
    _refuse(trial.judgement is not None, f"trial {body.trial} already has a verdict")
    judged = _put(state, replace(trial, judgement=body.judgement, phase=""))
    return replace(judged, verdict_seconds=state.seconds)


def _incumbent(state: State, body: IncumbentChanged) -> State:
    trial = _trial(state, body.trial)
    _refuse(trial.plan != body.plan, f"the incumbent's plan is not the plan of trial {body.trial}")
    _refuse(not trial.accepted and trial.kind != "baseline", f"trial {body.trial} was not accepted")
    now = state.incumbent
    if body.final:
        _refuse(now is None or now.trial != body.trial, "the closing measurement is not of the incumbent")
        _refuse(now is not None and now.final, "the closing measurement was already made")
    else:
        _refuse(any(old.trial == body.trial for old in state.incumbents), f"trial {body.trial} was already incumbent")
    new = Incumbent(
        trial=body.trial,
        round=trial.round,
        plan=body.plan,
        over_incumbent=body.over_incumbent,
        over_autoregressive=body.over_autoregressive,
        over_speculative=body.over_speculative,
        over_own_autoregressive=body.over_own_autoregressive,
        final=body.final,
        seconds=state.seconds - state.verdict_seconds,
    )
    if body.final and now is not None:  # the same incumbent, measured better: it replaces its earlier standing
        return replace(state, incumbents=(*state.incumbents[:-1], replace(new, seconds=now.seconds)))
    return replace(state, incumbents=(*state.incumbents, new))


def _round_ended(state: State, body: RoundEnded) -> State:
    current = _in_round(state, body.round)
    return replace(state, rounds=(*state.rounds[:-1], replace(current, improved=body.improved)))


def _status(state: State, body: StatusChanged) -> State:
    _refuse(
        state.status == "cancelling" and body.status != "cancelling",
        f"a search that is being cancelled cannot become {body.status}",
    )
    return replace(state, status=body.status)


def _failed(state: State, body: ActionFailed) -> State:
    reasons = (*state.failures.get(body.key, ()), body.reason)
    return replace(state, failures={**state.failures, body.key: reasons})


def _note(state: State, body: Note) -> State:
    return state


def _bundle(state: State, body: BundleWritten) -> State:
    _refuse(state.bundle is not None, "the bundle was already written")
    _refuse(state.incumbent is None, "a bundle without an incumbent")
    return replace(state, bundle=body)


def _finished(state: State, body: SearchFinished) -> State:
    return replace(state, finished=body, status="failed" if body.reason == "failed" else "finished")


_RULES: dict[type[Body], Callable[[State, Any], State]] = {
    SearchStarted: _started_again,
    HardwareProbed: _hardware,
    StockMeasured: _stock,
    Profiled: _profiled,
    RoundStarted: _round_started,
    CandidateProposed: _proposed,
    ProposalsMade: _proposals_made,
    TrialStarted: _trial_started,
    TrialProgress: _trial_progress,
    TrialJudged: _trial_judged,
    IncumbentChanged: _incumbent,
    RoundEnded: _round_ended,
    StatusChanged: _status,
    ActionFailed: _failed,
    Note: _note,
    BundleWritten: _bundle,
    SearchFinished: _finished,
}
