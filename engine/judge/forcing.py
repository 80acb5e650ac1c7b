"""Token forcing: every token of a candidate against stock's choice on that very prefix.

Pure functions over what stock scored. A disagreement is a near-tie where stock's logits for its own choice and
for the candidate's token differ by less than what stock's own arithmetic noise explains; anything else is an
error. How a text ends is a token too: an early, a missing or an ignored end is an error unless the end-of-text
token itself was such a near-tie.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from engine.deployment import Dtype
from engine.judge.protocol import Scores, Text
from engine.judge.report import Divergence, Forcing

ALPHA = 1e-4
"""Chance that an honest candidate shows more near-ties than the limit."""
SAFETY: dict[Dtype, float] = {"fp32": 4.0, "bf16": 2.0}
"""A near-tie may be this many times wider than the largest noise seen: stock was looked at on few tokens only, and
another honest implementation orders its sums in yet another way. In fp32 the noise is so small that a generous
factor costs nothing; in bf16 it would hide real losses."""
UNIT_ROUNDOFF: dict[Dtype, float] = {"fp32": 2.0**-24, "bf16": 2.0**-9}
ENDED = -1
"""In place of a token id: the text ended here."""
CONTEXT_TOKENS = 40


@dataclass(frozen=True)
class Floor:
    """Stock's own noise: `flips` of `positions` choices changed between two ways in which stock computes the same
    thing; `margin` is the logit gap under which a disagreement is a near-tie; `method` says how it was measured."""

    margin: float
    flips: int
    positions: int
    method: str


@dataclass(frozen=True)
class Sample:
    """One text that stock decoded, its scores in one pass, and its scores at other widths (rows a pass)."""

    ids: tuple[int, ...]
    scores: Scores
    at_width: tuple[tuple[int, Scores], ...] = ()


def measure_floor(samples: Sequence[Sample], dtype: Dtype) -> Floor:
    """The noise floor of stock, from texts that stock decoded itself.

    Two sources: stock's decoded tokens against its choices when the same text is scored in one pass (decoding runs
    one row over the cache, scoring many rows), and the gap between best and runner-up in one pass against the same
    gap at another width. The margin is SAFETY[dtype] times the largest difference seen, at least the rounding of one
    logit of that size; in fp32 that is near zero.
    """
    noise, flips, positions = 0.0, 0, 0
    largest = 0.0
    for sample in samples:
        scores = sample.scores
        largest = max(largest, *(abs(logit) for logit in scores.choice_logit), 0.0)
        positions += len(sample.ids)
        for token, choice, best, own in zip(
            sample.ids, scores.choice, scores.choice_logit, scores.token_logit, strict=True
        ):
            if token != choice:
                flips += 1
                noise = max(noise, best - own)
        for _, other in sample.at_width:
            positions += len(sample.ids)
            flips += sum(a != b for a, b in zip(scores.choice, other.choice, strict=True))
            noise = max(noise, *gap_differences(scores, other), 0.0)
    widths = sorted({width for sample in samples for width, _ in sample.at_width})
    margin = max(SAFETY[dtype] * noise, 2 * UNIT_ROUNDOFF[dtype] * largest)
    at = f" and at widths {', '.join(map(str, widths))}" if widths else ""
    method = (
        f"stock's own text scored in one pass{at}: largest difference {noise:.2g} and {flips} changed choices in "
        f"{positions} positions; margin {SAFETY[dtype]:g} times that"
    )
    return Floor(margin, flips, positions, method)


def gap_differences(one: Scores, other: Scores) -> Iterable[float]:
    """Position by position, how far the gap between the same two leading tokens differs. Positions where the two
    passes do not lead with the same two tokens are left out."""
    for i in range(len(one.choice)):
        mine = one.choice_logit[i] - one.second_logit[i]
        theirs = other.choice_logit[i] - other.second_logit[i]
        if (one.choice[i], one.second[i]) == (other.choice[i], other.second[i]):
            yield abs(mine - theirs)
        elif (one.choice[i], one.second[i]) == (other.second[i], other.choice[i]):
            yield mine + theirs


def near_tie_limit(tokens: int, floor: Floor, alpha: float = ALPHA) -> int:
    """How many near-ties the floor allows in `tokens` tokens: the smallest count that an honest candidate exceeds
    with chance at most `alpha`.

    The rate of flips is known from `floor.positions` observations only, so the bound is that of the beta-binomial
    predictive distribution (Jeffreys prior), which is wider than the binomial at the observed rate.
    """
    a, b = floor.flips + 0.5, floor.positions - floor.flips + 0.5
    tail = 1.0
    for count in range(tokens + 1):
        tail -= math.exp(
            math.lgamma(tokens + 1) - math.lgamma(count + 1) - math.lgamma(tokens - count + 1)
            + _log_beta(count + a, tokens - count + b) - _log_beta(a, b)
        )  # fmt: skip
        if tail <= alpha:
            return count
    return tokens


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


@dataclass(frozen=True)
class Scored:
    """One answer of a candidate with all that it is judged by. `stock` is stock's free run, where it was made."""

    prompt: str
    category: str
    prompt_ids: tuple[int, ...]
    text: Text
    scores: Scores
    max_new_tokens: int
    stock: Text | None = None


@dataclass(frozen=True)
class Disagreement:
    """One place where a candidate leaves stock: `token` (or ENDED) where stock has `choice`, `gap` logits apart."""

    kind: Literal["near_tie", "error"]
    position: int
    token: int
    choice: int
    gap: float
    what: str = ""


def disagreements(scored: Scored, margin: float, stop_ids: Sequence[int]) -> list[Disagreement]:
    """All places where a text leaves stock's choice, in order; at most one a token, and one for how it ends."""
    ids, scores = scored.text.ids, scored.scores
    end = next((i for i, token in enumerate(ids) if token in stop_ids), None)
    found = []
    for i, token in enumerate(ids):
        if end is not None and i > end:
            found.append(Disagreement("error", i, token, ids[end], 0.0, "it goes on after the end of its text"))
        elif token != scores.choice[i]:
            gap = scores.choice_logit[i] - scores.token_logit[i]
            found.append(
                Disagreement("near_tie" if gap <= margin else "error", i, token, scores.choice[i], max(0.0, gap))
            )
    if end is None and len(ids) < scored.max_new_tokens:
        what = f"it ends after {len(ids)} of {scored.max_new_tokens} tokens without an end of text"
        found.append(Disagreement("error", len(ids), ENDED, scores.following, 0.0, what))
    reason = "eos" if end is not None else "length"
    if scored.text.stop_reason != reason and not any(place.kind == "error" for place in found):
        what = f"it gives the stop reason {scored.text.stop_reason!r} for a text that ends by {reason!r}"
        found.append(Disagreement("error", len(ids), ENDED, scores.following, 0.0, what))
    return found


def report(
    answers: Sequence[Scored], floor: Floor, stop_ids: Sequence[int], decode: Callable[[list[int]], str]
) -> Forcing:
    """Counts and first divergence over all `answers`. An answer that was given again, word for word, to the same
    prompt counts once."""
    distinct = list({(answer.prompt, answer.text): answer for answer in answers}.values())
    exact = near = error = 0
    by_category: dict[str, tuple[int, int, int]] = {}
    places: list[tuple[Scored, Disagreement]] = []
    for answer in distinct:
        found = disagreements(answer, floor.margin, stop_ids)
        places += [(answer, place) for place in found]
        ties = sum(place.kind == "near_tie" for place in found)
        wrong_tokens = len({place.position for place in found if place.token != ENDED}) - ties
        counts = (len(answer.text.ids) - ties - wrong_tokens, ties, len(found) - ties)
        before = by_category.get(answer.category, (0, 0, 0))
        by_category[answer.category] = (before[0] + counts[0], before[1] + counts[1], before[2] + counts[2])
        exact, near, error = exact + counts[0], near + counts[1], error + counts[2]
    tokens = sum(len(answer.text.ids) for answer in distinct)
    free = [answer for answer in distinct if answer.stock is not None]
    first = min(places, key=lambda place: place[1].kind != "error", default=None)
    return Forcing(
        tokens=tokens,
        exact=exact,
        near_tie=near,
        error=error,
        tie_margin=floor.margin,
        near_tie_limit=near_tie_limit(tokens, floor),
        floor_method=floor.method,
        free_run_equal=sum(_same(answer.text, answer.stock) for answer in free if answer.stock is not None),
        free_run_prompts=len(free),
        first=_divergence(*first, decode) if first else None,
        by_category=by_category,
    )


def _same(text: Text, stock: Text) -> bool:
    return (text.ids, text.stop_reason) == (stock.ids, stock.stop_reason)


def _divergence(answer: Scored, place: Disagreement, decode: Callable[[list[int]], str]) -> Divergence:
    before = [*answer.prompt_ids, *answer.text.ids[: place.position]]
    return Divergence(
        prompt=answer.prompt,
        position=place.position,
        candidate_token=place.token,
        stock_token=place.choice,
        logit_gap=place.gap,
        context=decode(before[-CONTEXT_TOKENS:]),
        candidate_text=place.what or decode([place.token]),
        stock_text=decode([place.choice]),
        near_tie=place.kind == "near_tie",
    )


def objection(forcing: Forcing) -> str | None:
    """Why a candidate with these counts is lossy, in one sentence; None where it is not."""
    first = forcing.first
    if forcing.error and first is not None:
        count = f"{forcing.error} of {forcing.tokens} tokens differ from stock beyond its noise"
        where = f"prompt {first.prompt}, token {first.position + 1}"
        if first.candidate_token == ENDED:
            return f"{count}; first at {where}: {first.candidate_text}."
        return (
            f"{count}; first at {where}: {first.candidate_text!r} where stock has {first.stock_text!r}, "
            f"{first.logit_gap:.3g} logits apart (near-ties end at {forcing.tie_margin:.2g})."
        )
    if forcing.near_tie > forcing.near_tie_limit:
        return (
            f"{forcing.near_tie} near-ties in {forcing.tokens} tokens, where stock's own noise explains at most "
            f"{forcing.near_tie_limit}."
        )
    return None
