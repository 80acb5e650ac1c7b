"""Stock's own arithmetic noise: how it is measured, and what an honest candidate may therefore do.

Two ways of computing one function differ by rounding. The floor says by how much stock differs from itself; a
disagreement inside `margin` is a near-tie. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.codec import STRICT
from engine.deployment import Dtype
from engine.judge.protocol import Scores

ALPHA = 1e-4
"""Chance that an honest candidate exceeds a limit."""
SAFETY: dict[Dtype, float] = {"fp32": 4.0, "bf16": 2.0}
"""A near-tie may be this many times wider than the largest noise seen: stock was looked at on few tokens only, and
another honest implementation orders its sums in yet another way. In fp32 the noise is so small that a generous
factor costs nothing; in bf16 it would hide real losses."""
RISK = 1e-6
"""Chance that an honest candidate gives a wrong token at a prefix that was sought for its small gap: a search asks
thousands of them."""
TAIL = 4.0
HONEST = 2.0
"""Another honest implementation's noise, as a multiple of stock's, at most."""
FALLBACK = 8.0
"""Margins that take the place of `surely` where the differences are not known."""
UNIT_ROUNDOFF: dict[Dtype, float] = {"fp32": 2.0**-24, "bf16": 2.0**-9}


@dataclass(frozen=True)
class Floor:
    """Stock's own noise: `flips` of `positions` choices changed between two ways in which stock computes the same
    thing; `margin` is the logit gap under which a disagreement is a near-tie; `method` says how it was measured.

    `noise` is the largest difference seen in a gap between two logits, and `differences` are all of them, without
    sign, in ascending order; none in a floor that an earlier version stored.
    """

    __pydantic_config__ = STRICT

    margin: float
    flips: int
    positions: int
    method: str
    noise: float = 0.0
    differences: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "differences", tuple(self.differences))  # JSON has lists only


@dataclass(frozen=True)
class Sample:
    """One text that stock decoded, its scores in one pass, and its scores at other widths (rows a pass). Any other text
    serves as well, where it is said that stock did not decode it: then its tokens are not compared with the choices."""

    ids: tuple[int, ...]
    scores: Scores
    at_width: tuple[tuple[int, Scores], ...] = ()
    decoded: bool = True


def measure_floor(samples: Sequence[Sample], dtype: Dtype) -> Floor:
    """The noise floor of stock, from texts that stock decoded itself.

    Two sources: stock's decoded tokens against its choices when the same text is scored in one pass (decoding runs
    one row over the cache, scoring many rows), and the gap between best and runner-up in one pass against the same
    gap at another width. The margin is SAFETY[dtype] times the largest difference seen, at least the rounding of one
    logit of that size; in fp32 that is near zero.
    """
    flips, positions = 0, 0
    largest = 0.0
    differences: list[float] = []
    for sample in samples:
        scores = sample.scores
        largest = max(largest, *(abs(logit) for logit in scores.choice_logit), 0.0)
        if sample.decoded:
            changed = [i for i, token in enumerate(sample.ids) if token != scores.choice[i]]
            positions += len(sample.ids)
            flips += len(changed)
            differences += [abs(scores.choice_logit[i] - scores.token_logit[i]) for i in changed]
        for _, other in sample.at_width:
            positions += len(sample.ids)
            flips += sum(a != b for a, b in zip(scores.choice, other.choice, strict=True))
            differences += gap_differences(scores, other)
    noise = max(differences, default=0.0)
    widths = sorted({width for sample in samples for width, _ in sample.at_width})
    margin = max(SAFETY[dtype] * noise, 2 * UNIT_ROUNDOFF[dtype] * largest)
    at = f" and at widths {', '.join(map(str, widths))}" if widths else ""
    method = (
        f"stock's own text scored in one pass{at}: largest difference {noise:.2g} and {flips} changed choices in "
        f"{positions} positions; margin {SAFETY[dtype]:g} times that"
    )
    return Floor(margin, flips, positions, method, noise, tuple(sorted(differences)))


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


def flip_chance(gap: float, floor: Floor) -> float:
    """Bound of the chance that an honest candidate takes the runner-up where stock's gap is `gap` logits.

    An honest candidate's noise is up to HONEST times stock's own. So a flip needs a difference of gap / HONEST of those
    that stock showed, in the right one of two directions; one more than the count is reckoned with, for the next
    difference may be the largest yet.
    """
    if gap > floor.margin:
        return 0.0
    if floor.noise <= 0.0:
        return 0.5
    larger = sum(HONEST * difference >= gap for difference in floor.differences)
    return 0.5 * min(1.0, (larger + 1) / (len(floor.differences) + 1))


def surely(floor: Floor) -> float:
    """The gap at which an honest candidate takes the runner-up with chance at most RISK, at least the margin.

    Far fewer positions were looked at than that chance would take to see, so the tail of the noise is drawn on from
    the largest tenth of the differences, falling with the power TAIL; HONEST times wider, for it is another
    implementation's. Stock's noise is lighter than that. On SmolLM2-135M, one pass against two and eight rows a pass
    and against another attention kernel at 4,682 positions: bf16, 90 % up to 0.25 logits, 99.9 % up to 0.63, all up
    to 0.75; fp32, 90 % up to 1.5e-5, all up to 4.6e-5.
    """
    if not floor.differences:
        return FALLBACK * floor.margin
    ninth = floor.differences[min(len(floor.differences) - 1, int(0.9 * len(floor.differences)))]
    return max(floor.margin, HONEST * ninth * math.pow(0.5 * 0.1 / RISK, 1.0 / TAIL))


def count_limit(chances: Sequence[float], alpha: float = ALPHA) -> int:
    """The smallest count that independent events of these chances exceed with chance at most `alpha`."""
    tail = 1.0
    for count, chance in enumerate(count_distribution(chances)):
        tail -= chance
        if tail <= alpha:
            return count
    return len(chances)


def count_distribution(chances: Sequence[float]) -> list[float]:
    """Chance that 0, 1, ... len(chances) independent events happen (Poisson binomial)."""
    distribution = [1.0]
    for chance in chances:
        grown = [0.0, *(chance * before for before in distribution)]
        for count, before in enumerate(distribution):
            grown[count] += (1.0 - chance) * before
        distribution = grown
    return distribution
