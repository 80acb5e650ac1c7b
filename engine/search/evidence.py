"""The evidence for one trial's verdict: everything that its panel shows, taken from the state and nothing else.

It is asked for trial by trial: all of it would be too much for every update of the live page.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Any

from engine.judge.report import Comparison, Costs, Divergence, Forcing, Judgement, Verdict
from engine.search.events import TrialKind
from engine.search.state import State
from engine.search.view import changes, label

SENTENCE_CHARS = 2000
LOG_LINES = 24
LOG_CHARS = 300
"""Longest line of a log that is shown."""
_LOG_HEADING = "Last log lines:"


@dataclass(frozen=True)
class Category:
    """Token forcing by kind of prompt."""

    name: str
    exact: int
    near_tie: int
    error: int


@dataclass(frozen=True)
class Place:
    """The first divergence. `words` says what happened where it is no pair of tokens: the text ended too early, or
    went on after its end."""

    divergence: Divergence
    words: str


@dataclass(frozen=True)
class Timing:
    """A comparison with what a plot of it needs: the ratio of every pair, in order, and what the interval's lower end
    had to exceed. Ratios above 1 mean that the candidate is faster."""

    comparison: Comparison
    ratios: tuple[float | None, ...]
    needed: float


@dataclass(frozen=True)
class Cost:
    """Seconds of a trial's own part."""

    name: str
    seconds: float


@dataclass(frozen=True)
class Evidence:
    """One trial as its panel shows it after event `seq`. What was not measured is None or empty.

    `reason` is the judge's sentence or two, `log` the lines that came with it: the last words of a child that failed,
    bounded, without control characters, oldest first. `interruptions` says why earlier attempts ended without a
    verdict. `overhead` is the trial's seconds over those of the generations that its verdict needs. `replay` is the
    command that asks the same questions again.
    """

    seq: int
    trial: int
    round: int
    kind: TrialKind
    agent: str
    arm: str
    stage: str
    stage_label: str
    changes: tuple[dict[str, Any], ...]
    rationale: str
    predicted: float | None
    sources: tuple[int, ...]
    status: str
    phase: str
    attempts: int
    interruptions: tuple[str, ...]
    verdict: Verdict | None = None
    reason: str = ""
    log: tuple[str, ...] = ()
    seconds: float | None = None
    accept_length: float | None = None
    forcing: Forcing | None = None
    categories: tuple[Category, ...] = ()
    place: Place | None = None
    timing: Timing | None = None
    costs: tuple[Cost, ...] = ()
    overhead: float | None = None
    prompts: tuple[str, ...] = ()
    record: str = ""
    replay: str = ""


def evidence(state: State, number: int, folder: str = "") -> Evidence | None:
    """The evidence for trial `number`; None where there is no such trial.

    `folder` is where this search keeps its files, as a person at a terminal would write it.
    """
    trial = state.trials.get(number)
    if trial is None:
        return None
    proposal = trial.proposal
    return Evidence(
        seq=state.seq,
        trial=number,
        round=trial.round,
        kind=trial.kind,
        agent=proposal.agent,
        arm=proposal.arm,
        stage=proposal.stage,
        stage_label=label(proposal.stage),
        changes=tuple(changes(state, trial)),
        rationale=proposal.rationale,
        predicted=proposal.predicted,
        sources=proposal.sources,
        status=trial.status,
        phase=trial.phase,
        attempts=trial.attempts,
        interruptions=tuple(split_reason(reason)[0] for reason in state.failures.get(f"trial:{number}", ())),
        **(_judged(trial.judgement, folder) if trial.judgement else {}),
    )


def _judged(judgement: Judgement, folder: str) -> dict[str, Any]:
    reason, log = split_reason(judgement.reason)
    forcing, costs = judgement.forcing, judgement.costs
    return {
        "verdict": judgement.verdict,
        "reason": reason,
        "log": log,
        "seconds": judgement.seconds,
        "accept_length": judgement.accept_length,
        "forcing": forcing,
        "categories": _categories(forcing) if forcing else (),
        "place": _place(forcing.first) if forcing and forcing.first else None,
        "timing": _timing(judgement.comparison) if judgement.comparison else None,
        "costs": _costs(costs, judgement.seconds) if costs else (),
        "overhead": judgement.seconds / costs.generating_s if costs and costs.generating_s > 0 else None,
        "prompts": judgement.prompts,
        "record": judgement.record,
        "replay": replay_command(judgement.record, folder) if judgement.record else "",
    }


def split_reason(reason: str) -> tuple[str, tuple[str, ...]]:
    """A reason as its sentence and the log lines that follow it, both bounded. Of a long log the end is kept."""
    sentence, _, rest = reason.partition("\n")
    lines = [line for line in map(_plain, rest.split("\n")) if line.strip()]
    if lines and lines[0] == _LOG_HEADING:
        del lines[0]
    return _cut(_plain(sentence).strip(), SENTENCE_CHARS), tuple(_cut(line, LOG_CHARS) for line in lines[-LOG_LINES:])


def _plain(line: str) -> str:
    return "".join(char for char in line if char.isprintable() or char == "\t")


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def _categories(forcing: Forcing) -> tuple[Category, ...]:
    return tuple(Category(name, *counts) for name, counts in sorted((forcing.by_category or {}).items()))


def _place(first: Divergence) -> Place:
    """Two tokens that stock scores alike are no error: where it has no gap, the judge put words for the token."""
    in_words = first.candidate_token < 0 or (first.logit_gap <= 0 and not first.near_tie)
    return Place(first, first.candidate_text if in_words else "")


def _timing(comparison: Comparison) -> Timing:
    return Timing(comparison, tuple(pair.ratio for pair in comparison.pairs), 1.0 + comparison.threshold)


def _costs(costs: Costs, seconds: float) -> tuple[Cost, ...]:
    parts = (
        Cost("child start", costs.start_s),
        Cost("warm-up", costs.warmup_s),
        Cost("token forcing", costs.forcing_s),
        Cost("timing", costs.timing_s),
    )
    rest = seconds - sum(part.seconds for part in parts)
    return (*parts, Cost("the rest", rest)) if rest > 0.005 * seconds else parts


def replay_command(record: str, folder: str = "") -> str:
    """The command line that repeats a stored trial and compares."""
    path = f"{folder.rstrip('/')}/{record}" if folder else record
    return shlex.join(["python", "-m", "engine", "judge", "replay", path])
