"""Repeat a stored trial and compare.

The candidate is built again from its record (a source candidate from the text that the record holds), and candidate,
incumbent and stock are asked exactly the same questions in the same order. Stock scores the new answers, with the
near-tie margin of the record. The trial reproduces where every token of the candidate, the counts of token forcing
and the verdict are the same; the ratio of times is told beside the recorded one. JSON is the last line.

TRIAL is the path of a record, or SEARCH_FOLDER:NUMBER. Exit status: 0 it reproduces, 1 it does not, 2 bad input.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.codec import STRICT, to_json
from engine.errors import UserError
from engine.judge import bench, forcing, record
from engine.judge.again import CANDIDATE, INCUMBENT, Cast, ask, score
from engine.judge.backends import is_ours
from engine.judge.forcing import Scored
from engine.judge.hidden import Material
from engine.judge.record import Exchange, Record
from engine.judge.report import Forcing, Pair, Verdict

ALONE, REPEAT = "alone", "repeat"
"""Phases in which the incumbent was asked with no candidate there, and a second time in a row."""


@dataclass(frozen=True)
class Timing:
    """Median ratio of the timed pairs with its 95 % interval; above 1 the candidate is faster."""

    __pydantic_config__ = STRICT

    ratio: float
    low: float
    high: float
    pairs: int


@dataclass(frozen=True)
class Counts:
    """Token forcing over the candidate's answers, and what it left at tied prefixes."""

    __pydantic_config__ = STRICT

    exact: int
    near_tie: int
    error: int
    tied_left: int


@dataclass(frozen=True)
class Outcome:
    """What a trial came to. `reason` is why it is lossy, or how the candidate failed."""

    __pydantic_config__ = STRICT

    verdict: Verdict
    counts: Counts | None
    timing: Timing | None
    reason: str = ""


@dataclass(frozen=True)
class Replay:
    """Record and repetition side by side. `first_difference` says where the candidate's tokens first differ."""

    __pydantic_config__ = STRICT

    trial: int
    reproduces: bool
    tokens_equal: bool
    counts_equal: bool
    verdict_equal: bool
    first_difference: str
    questions: int
    tokens: int
    then: Outcome
    now: Outcome


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trial", metavar="TRIAL", help="a trial's record, or SEARCH_FOLDER:NUMBER")


def run(options: argparse.Namespace) -> int:
    kept = record.read(record.locate(options.trial))
    material = material_of(kept)
    with tempfile.TemporaryDirectory(prefix="specpilot-replay-") as folder:
        result = replay(kept, material, Path(folder), _progress, is_ours)
    _progress("")
    for line in sentences(kept, result):
        print(line)
    print(json.dumps(to_json(result)))
    return 0 if result.reproduces else 1


def material_of(kept: Record) -> Material:
    """What the seats need, of the recorded trial; the tokenizer is the deployment's, which must be here.

    Raises UserError where the target is missing, or is another one.
    """
    from engine.tokenizer import load_tokenizer
    from engine.weights import open_checkpoint

    checkpoint = open_checkpoint(kept.deployment.target)
    tokenizer = load_tokenizer(checkpoint)
    if checkpoint.config.vocab_size != kept.vocab_size:
        raise UserError(
            f"The target {kept.deployment.target} has {checkpoint.config.vocab_size} token ids, that of the trial had "
            f"{kept.vocab_size}: it is another one.",
            field="target",
        )
    return Material(
        prompts=(),
        stop_ids=kept.stop_ids,
        vocab_size=kept.vocab_size,
        decode=lambda ids: tokenizer.decode(ids, special=True),
        read_bytes=0,
    )


def replay(
    kept: Record,
    material: Material,
    folder: Path,
    progress: Callable[[str], None],
    ours: Callable[[str], bool] = is_ours,
) -> Replay:
    """Ask the questions of `kept` again and compare. `folder` gets a source candidate's file and the children's logs.
    `ours` says which backends are run unconfined: a record may come from anybody.

    Raises ChildFailed where stock or the incumbent fails; a candidate that fails is an outcome.
    """
    cast = Cast(kept, material, folder, ours)
    try:
        exchanges = ask(kept, cast, progress)
        scored = score(kept, cast, exchanges, progress)
    finally:
        cast.close()
    then, now = _then(kept), outcome(kept, exchanges, scored, material)
    difference = first_difference(kept.exchanges, exchanges, material.decode)
    failures_equal = [_failure(e) for e in kept.exchanges] == [_failure(e) for e in exchanges]
    checks = (not difference and failures_equal, then.counts == now.counts, then.verdict == now.verdict)
    return Replay(
        trial=kept.trial,
        reproduces=all(checks),
        tokens_equal=checks[0],
        counts_equal=checks[1],
        verdict_equal=checks[2],
        first_difference=difference,
        questions=len(kept.exchanges),
        tokens=sum(len(text.ids) for exchange in exchanges if exchange.role == CANDIDATE for text in exchange.texts),
        then=then,
        now=now,
    )


def outcome(kept: Record, exchanges: Sequence[Exchange], scored: Sequence[Scored], material: Material) -> Outcome:
    """The verdict by the judge's rules: a failure, then a loss, then the timed pairs against the recorded threshold."""
    found = None
    if scored and kept.floor is not None:
        found = forcing.report(scored, kept.floor, material.stop_ids, material.decode)
    counts, timing = _counts(found), _timing(exchanges)
    for exchange in exchanges:
        if exchange.failure is not None:
            verdicts: dict[str, Verdict] = {"crashed": "crashed", "timed out": "timed out"}
            return Outcome(verdicts.get(exchange.failure.kind, "invalid"), counts, timing, exchange.failure.reason)
    if why := _too_fast(kept, exchanges) or _slowed(kept, exchanges):
        return Outcome("invalid", counts, timing, why)
    if found is not None and (objection := forcing.objection(found)):
        return Outcome("lossy", counts, timing, objection)
    then = kept.judgement.comparison
    if timing is not None and then is not None and timing.low <= 1.0 + then.threshold:
        return Outcome("slower", counts, timing)
    return Outcome("accepted", counts, timing)


def _then(kept: Record) -> Outcome:
    judgement, comparison = kept.judgement, kept.judgement.comparison
    timing = None
    if comparison is not None:
        timing = Timing(comparison.ratio, comparison.low, comparison.high, len(comparison.pairs))
    return Outcome(judgement.verdict, _counts(judgement.forcing), timing, judgement.reason)


def _counts(found: Forcing | None) -> Counts | None:
    if found is None:
        return None
    return Counts(found.exact, found.near_tie, found.error, found.probing.tied_left if found.probing else 0)


def _timing(exchanges: Sequence[Exchange]) -> Timing | None:
    """The timed pairs that are complete."""
    sides: dict[int, dict[str, Exchange]] = {}
    for exchange in exchanges:
        if exchange.pair is not None and exchange.texts:
            sides.setdefault(exchange.pair, {})[exchange.role] = exchange
    both = [pair for pair in sides.values() if INCUMBENT in pair and CANDIDATE in pair]
    if not both:
        return None
    found = bench.summarise("", [_pair(pair[INCUMBENT], pair[CANDIDATE]) for pair in both], [])
    return Timing(found.ratio, found.low, found.high, len(both))


def _pair(reference: Exchange, candidate: Exchange) -> Pair:
    tokens = [sum(len(text.ids) for text in exchange.texts) for exchange in (reference, candidate)]
    return Pair(reference.prompts[0].id, reference.seconds, candidate.seconds, *tokens)


def _too_fast(kept: Record, exchanges: Sequence[Exchange]) -> str:
    """Why an answer of the candidate is faster than the device can be; "" where none is."""
    if kept.read_limit is None or kept.draft_tokens is None:
        return ""
    for exchange in exchanges:
        if exchange.role == CANDIDATE and exchange.texts:
            longest = max(len(text.ids) for text in exchange.texts)
            if exchange.seconds < kept.read_limit.seconds(longest, kept.draft_tokens):
                return f"{longest} tokens in {exchange.seconds * 1e3:.1f} ms: sooner than the weights can be read."
    return ""


def _slowed(kept: Record, exchanges: Sequence[Exchange]) -> str:
    """Why the incumbent is slower beside the candidate than alone; "" where it is not, or was not asked alone."""
    alone = {each.prompts: _seconds_per_token(each) for each in exchanges if _answered(each, ALONE)}
    beside = {each.prompts: _seconds_per_token(each) for each in exchanges if each.role == INCUMBENT and _paired(each)}
    both = [prompts for prompts in alone if prompts in beside]
    if not both:
        return ""
    then = kept.judgement.comparison
    logs = [math.log(ratio) for ratio in then.aa_ratios] if then else []
    for first, second in itertools.pairwise(exchanges):
        if _answered(second, REPEAT) and first.role == INCUMBENT and first.prompts == second.prompts and first.texts:
            logs.append(math.log(_seconds_per_token(second) / _seconds_per_token(first)))
    sigma = bench.MAD_TO_SIGMA * statistics.median(map(abs, logs)) if logs else 0.0
    found = bench.reference_slowdown([alone[each] for each in both], [beside[each] for each in both], sigma)
    return found.sentence if found.slowed else ""


def _answered(exchange: Exchange, phase: str) -> bool:
    return exchange.role == INCUMBENT and exchange.phase == phase and bool(exchange.texts)


def _paired(exchange: Exchange) -> bool:
    return exchange.pair is not None and bool(exchange.texts)


def _seconds_per_token(exchange: Exchange) -> float:
    return exchange.seconds / sum(len(text.ids) for text in exchange.texts)


def first_difference(then: Sequence[Exchange], now: Sequence[Exchange], decode: Callable[[list[int]], str]) -> str:
    """Where the candidate's answers first differ, in words; "" where they do not."""
    for number, (old, new) in enumerate(zip(then, now, strict=False), start=1):
        if old.role != CANDIDATE:
            continue
        for prompt, was, text in zip(old.prompts, old.texts, new.texts, strict=False):
            if (was.ids, was.stop_reason) == (text.ids, text.stop_reason):
                continue
            where = f"question {number} ({old.phase}, prompt {prompt.id})"
            pairs = enumerate(zip(was.ids, text.ids, strict=False))
            at = next((i for i, (a, b) in pairs if a != b), None)
            if at is not None:
                return f"{where}, token {at + 1}: {decode([text.ids[at]])!r} now, {decode([was.ids[at]])!r} then"
            return f"{where}: {len(text.ids)} tokens ({text.stop_reason}) now, {len(was.ids)} ({was.stop_reason}) then"
        if len(old.texts) != len(new.texts):
            return f"question {number} ({old.phase}): {'an answer' if new.texts else 'no answer'} now, not so then"
    return ""


def _failure(exchange: Exchange) -> str | None:
    return exchange.failure.kind if exchange.failure else None


def sentences(kept: Record, result: Replay) -> list[str]:
    """What a person reads."""
    then, now = result.then, result.now
    what = f"source {kept.source.function}" if kept.source else f"plan {kept.plan.digest}"
    lines = [
        f"trial {result.trial} of {kept.written}: {what}, {result.questions} questions, {result.tokens} tokens",
        f"tokens    {'identical' if result.tokens_equal else result.first_difference or 'not all came again'}",
        f"counts    {_counted(now.counts)} now, {_counted(then.counts)} then",
        f"verdict   {now.verdict} now, {then.verdict} then",
    ]
    if now.timing or then.timing:
        lines.append(f"timing    {_timed(now.timing)} now, {_timed(then.timing)} then")
    if now.verdict != then.verdict and now.reason:
        lines.append(f"reason    {now.reason.splitlines()[0]}")
    lines.append("It reproduces." if result.reproduces else "It does not reproduce.")
    return lines


def _counted(counts: Counts | None) -> str:
    if counts is None:
        return "not forced"
    return f"{counts.exact} exact, {counts.near_tie} near-ties, {counts.error} errors"


def _timed(timing: Timing | None) -> str:
    if timing is None:
        return "not timed"
    return f"{timing.ratio:.2f}x ({timing.low:.2f} to {timing.high:.2f}, {timing.pairs} pairs)"


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
