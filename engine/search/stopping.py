"""When a search ends, and the sentence that says so: pure functions of its state."""

from __future__ import annotations

import statistics

from engine.judge.report import Comparison
from engine.search.events import StopReason
from engine.search.state import Incumbent, State

FINAL_COST = 4.0
"""The closing measurement against an ordinary standing: more prompts, each on four sides instead of two."""

LATEST = 3
"""Trials that the cost of the next one is estimated from."""


def best(state: State) -> Incumbent:
    """The incumbent of a search that is past its opening. Raises ValueError before that."""
    if state.incumbent is None:
        raise ValueError("the search has no incumbent yet")
    return state.incumbent


def affordable(state: State, *, trials: int) -> bool:
    """Whether the time budget holds so many more trials, one standing, and the closing measurement."""
    need = trials * _trial_seconds(state) + _standing_seconds(state) * (1.0 + FINAL_COST)
    return state.seconds + need <= state.budget.seconds


def _trial_seconds(state: State) -> float:
    """Median of the latest trials that ran to their end, since a trial gets shorter as the incumbent gets faster;
    0 before the first."""
    timed = [t for t in state.trials.values() if t.judgement and t.judgement.comparison]
    took = [t.judgement.seconds for t in sorted(timed, key=lambda t: t.number)[-LATEST:] if t.judgement]
    baseline = state.trials[0].judgement if 0 in state.trials else None
    if not took and baseline is not None:
        took = [baseline.seconds]
    return statistics.median(took) if took else 0.0


def _standing_seconds(state: State) -> float:
    return state.incumbent.seconds if state.incumbent else 0.0


def gaps_closed(state: State) -> bool:
    """Whether every gap of the incumbent is under the budget's threshold. False before it is profiled."""
    profile = state.profile_of(best(state).plan)
    if profile is None or not profile.stages:
        return False
    return all(gap.gap_ms <= state.budget.gap_threshold * profile.ms_per_token for gap in profile.stages)


def stop_reason(state: State) -> StopReason | None:
    """Why no further round may start, or None. A reason once given stays."""
    budget, ended = state.budget, [r for r in state.rounds if r.improved is not None]
    if gaps_closed(state):
        return "gaps closed"
    if ended and ended[-1].proposed == 0:  # no untried plan is left
        return "plateau"
    if len(ended) >= max(budget.min_rounds, budget.plateau_rounds) and not any(
        r.improved for r in ended[len(ended) - budget.plateau_rounds :]
    ):
        return "plateau"
    if state.trials_used >= budget.trials or not affordable(state, trials=2):
        return "budget"
    if state.incumbent is not None and state.incumbent.final:
        return "budget"
    return None


_WHY: dict[StopReason, str] = {
    "budget": "the budget is spent",
    "plateau": "further rounds brought nothing",
    "gaps closed": "no gap to the hardware's ceiling is left that is worth closing",
    "cancelled": "it was cancelled",
    "failed": "it failed",
}


def ending(state: State, reason: StopReason) -> str:
    """In words: why the search ended, and what came of it."""
    rounds = len([r for r in state.rounds if r.improved is not None])
    start = f"The search ended after {rounds} {'round' if rounds == 1 else 'rounds'}: {_WHY[reason]}."
    incumbent = state.incumbent
    if incumbent is None:
        return f"{start} No plan had been measured yet."
    which = "the initial plan" if incumbent.trial == 0 else f"the plan of trial {incumbent.trial}"
    figures = [
        _figure(name, c)
        for name, c in (
            ("stock autoregressive decoding", incumbent.over_autoregressive),
            ("stock speculative decoding", incumbent.over_speculative),
        )
        if c is not None
    ]
    best = f"{start} The best is {which}" + (f": {' and '.join(figures)}." if figures else ".")
    if not is_proven(incumbent):
        best += " No speedup over stock is proven."
    return best


def is_proven(incumbent: Incumbent) -> bool:
    """Whether the plan was seen to beat stock autoregressive decoding: the interval lies above 1."""
    over = incumbent.over_autoregressive
    return over is not None and over.low > 1.0


def _figure(name: str, over: Comparison) -> str:
    """The measured speedup in words; none is claimed where the interval holds 1."""
    interval = f"{over.low:.2f} to {over.high:.2f}"
    if over.low <= 1.0 <= over.high:
        return f"not measurably faster or slower than {name} ({over.ratio:.2f}x, {interval})"
    return f"{over.ratio:.2f}x {name} ({interval})"
