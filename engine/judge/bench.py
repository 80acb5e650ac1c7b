"""Timing statistics: what a comparison is decided by, when it ends, and what cannot be true.

Reference A and candidate B answer each prompt once, in ABBA order over the prompts (`rounds.py`), so a drift of the
machine falls on both alike and nothing that a process remembers of an answer can help it. One observation is the ratio
of seconds per token of a pair. The result is the median ratio with its 95 % interval; it counts as a gain where the
interval's lower end clears max(1 %, 2 sigma), sigma being the spread of that very median when the reference is compared
with itself.

The interval is the exact one of a median (order statistics, sign test): between the k-th smallest and the k-th largest
ratio, k being the largest for which it covers the true median in 95 % of all cases, whatever the distribution. It takes
no random numbers. A percentile bootstrap, which it replaces, is too short for so few pairs: of 7 it ends at the second
smallest ratio, which lies above the true median 6 % of the time. As long as sigma is right this goes unnoticed; but
sigma comes from a few repeats, and the machine may have become noisier since. Under 6 pairs no interval covers 95 %; it
is then all the ratios seen, and only clear cases end so early.

When to stop (`ended`): from `early` pairs on, a comparison ends when the interval's upper end lies under 1; it
then ends in "slower", so that look cannot make a false gain more likely. It also ends when the interval's lower end
clears a gain of OBVIOUS_GAIN: no noise that a machine was seen to have makes an equal candidate half as fast again in
every pair. And it ends once so many ratios miss LEAST_GAIN that the median of `pairs` must miss it, whatever the rest
bring: the verdict is then known. After `pairs` pairs it ends, unless the median clears the threshold and the interval's
lower end does not: then it goes on to `most` pairs and is decided there. The share of equal candidates that pass is
simulated in the tests for exactly this rule.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from engine.judge.report import Comparison, Conditions, Pair

LEVEL = 0.95
LEAST_GAIN = 0.01
OBVIOUS_GAIN = 0.5
SLOWDOWN_LEAST = 0.05
SLOWDOWN_SIGMAS = 4.0
MEDIAN_SPREAD = math.sqrt(math.pi / 2)
"""Standard deviation of a median of n normal values, times sqrt(n) / sigma, for large n."""
MAD_TO_SIGMA = 1.4826
PEAK_FACTOR = 1.5
"""The fastest reading that a timing may imply, against the measured read bandwidth."""
PLAUSIBLE_PEAK = 50e9
"""Bytes per second that any machine may reach, whatever a probe on a busy one measured."""


@dataclass(frozen=True)
class ReadLimit:
    """The least that a target pass must read: its weights, less what the last-level cache keeps, at peak rate."""

    weight_bytes: float
    cache_bytes: float
    bytes_per_second: float

    @classmethod
    def from_probe(cls, weight_bytes: float, cache_bytes: float, read_gb_s: float) -> ReadLimit:
        return cls(weight_bytes, cache_bytes, max(PEAK_FACTOR * read_gb_s * 1e9, PLAUSIBLE_PEAK))

    def seconds(self, tokens: int, draft_tokens: int) -> float:
        """Least seconds of a generation: prefill gives one token, each verify pass at most `draft_tokens` + 1.

        Of a batch, `tokens` is its longest text: one pass serves all of them. `draft_tokens` is what the judge grants,
        never what the candidate reports. Of our own engine it is the plan's. A source candidate may draft deeper than
        its plan says and be lossless, so for it the regime's largest legal depth counts (`largest_draft`).
        """
        passes = 1 + math.ceil(max(0, tokens - 1) / (draft_tokens + 1))
        return passes * max(0.0, self.weight_bytes - self.cache_bytes) / self.bytes_per_second


def largest_draft(deepest: int, max_new_tokens: int) -> int:
    """Draft tokens that a verify pass may hold at most, whoever drafts: `deepest` is the largest value of the lever,
    and the anchor of a pass is one of the `max_new_tokens` already."""
    return max(0, min(deepest, max_new_tokens - 1))


def ratio(pair: Pair) -> float:
    """Seconds per token of the reference over those of the candidate: above 1 where the candidate is faster."""
    value = pair.ratio
    if value is None:
        raise ValueError("a pair without time or text has no ratio")
    return value


def log_ratio(pair: Pair) -> float:
    return math.log(ratio(pair))


@lru_cache(maxsize=256)
def interval_rank(n: int) -> int:
    """The k for which the k-th smallest and the k-th largest of n values enclose the true median with a probability of
    at least LEVEL, k as large as possible; 1 where no k does (n < 6). Missing on one side is Binomial(n, 1/2) < k."""
    k, missed = 1, 2.0 ** (1 - n)
    while (missed := missed + math.comb(n, k) * 2.0 ** (1 - n)) <= 1.0 - LEVEL:
        k += 1
    return k


def interval(values: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Exact 95 % interval of the median over the last axis: [..., n] -> two of [...]."""
    n = values.shape[-1]
    rank = interval_rank(n)
    ordered = np.sort(values, axis=-1)
    return np.asarray(ordered[..., rank - 1]), np.asarray(ordered[..., n - rank])


def pair_sigma(repeats: NDArray[np.float64]) -> NDArray[np.float64]:
    """Spread of one paired ratio when nothing differs, from log-ratios of repeats on the last axis (mean 0 by
    construction; median absolute value, so that a burst on the machine does not widen it)."""
    spread: NDArray[np.float64] = MAD_TO_SIGMA * np.median(np.abs(repeats), axis=-1)
    return spread


def gain_threshold(sigma: NDArray[np.float64], pairs: int) -> NDArray[np.float64]:
    """What the interval's lower end must exceed 1 by: max(1 %, 2 sigma of the median of `pairs` ratios)."""
    result: NDArray[np.float64] = np.maximum(LEAST_GAIN, 2.0 * median_sigma(sigma, pairs))
    return result


def median_sigma(sigma: NDArray[np.float64], pairs: int) -> NDArray[np.float64]:
    return np.asarray(MEDIAN_SPREAD * sigma / math.sqrt(pairs))


@dataclass(frozen=True)
class PairRule:
    """Numbers of pairs: the first look for a clear loss or an obvious gain, the usual end, and the end of an undecided
    comparison."""

    early: int = 3
    pairs: int = 7
    most: int = 14


def clearly_slower(ratios: NDArray[np.float64]) -> NDArray[np.bool_]:
    """The whole interval lies under 1. [..., n] -> [...]"""
    return np.asarray(interval(ratios)[1] < 1.0)


def clearly_faster(ratios: NDArray[np.float64], sigma: NDArray[np.float64]) -> NDArray[np.bool_]:
    """The whole interval clears OBVIOUS_GAIN and the threshold. [..., n], [...] -> [...]"""
    needed = 1.0 + np.maximum(OBVIOUS_GAIN, gain_threshold(sigma, ratios.shape[-1]))
    return np.asarray(interval(ratios)[0] > needed)


def lost(ratios: NDArray[np.float64], pairs: int) -> NDArray[np.bool_]:
    """Over half of what will be `pairs` ratios miss LEAST_GAIN, so their median will. [..., n] -> [...]"""
    return np.asarray(np.sum(ratios <= 1.0 + LEAST_GAIN, axis=-1) > pairs // 2)


def clears(ratios: NDArray[np.float64], sigma: NDArray[np.float64]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Whether the interval's lower end, and whether the median, clear the threshold. [..., n], [...] -> [...]"""
    needed = 1.0 + gain_threshold(sigma, ratios.shape[-1])
    return np.asarray(interval(ratios)[0] > needed), np.asarray(np.median(ratios, axis=-1) > needed)


def ended(ratios: NDArray[np.float64], sigma: NDArray[np.float64], rule: PairRule) -> NDArray[np.bool_]:
    """Whether comparisons with these ratios so far are at their end. [..., n], [...] -> [...]"""
    n = ratios.shape[-1]
    if n < rule.early:
        return np.zeros(ratios.shape[:-1], dtype=np.bool_)
    if n < rule.pairs:
        return clearly_slower(ratios) | clearly_faster(ratios, sigma) | lost(ratios, rule.pairs)
    if n == rule.pairs:
        low_clears, median_clears = clears(ratios, sigma)
        return low_clears | ~median_clears
    return np.full(ratios.shape[:-1], n >= rule.most)


def finished(ratios: Sequence[float], repeats: Sequence[float], rule: PairRule) -> bool:
    """Whether one comparison is at its end."""
    return bool(ended(np.asarray(ratios), _sigma(repeats), rule)) if ratios else False


def _sigma(repeats: Sequence[float]) -> NDArray[np.float64]:
    return pair_sigma(np.asarray(repeats)) if repeats else np.asarray(0.0)


def summarise(
    reference: str,
    pairs: Sequence[Pair],
    repeats: Sequence[float],
    warmup_s: float = 0.0,
    conditions: Conditions | None = None,
) -> Comparison:
    """The comparison of at least one pair. `repeats` are log-ratios of the reference against itself; none = 0."""
    ratios = np.asarray([ratio(pair) for pair in pairs])
    low, high = interval(ratios)
    sigma = _sigma(repeats)
    return Comparison(
        reference=reference,
        pairs=tuple(pairs),
        ratio=float(np.median(ratios)),
        low=float(low),
        high=float(high),
        aa_sigma=float(median_sigma(sigma, len(pairs))),
        threshold=float(gain_threshold(sigma, len(pairs))),
        candidate_tok_s=statistics.median(pair.candidate_tokens / pair.candidate_s for pair in pairs),
        reference_tok_s=statistics.median(pair.reference_tokens / pair.reference_s for pair in pairs),
        warmup_s=warmup_s,
        aa_ratios=tuple(math.exp(repeat) for repeat in repeats),
        conditions=conditions,
    )


def is_gain(comparison: Comparison) -> bool:
    return comparison.low > 1.0 + comparison.threshold


@dataclass(frozen=True)
class Slowdown:
    """The reference beside a candidate against the reference alone, on the same prompts: median ratio of seconds per
    token (above 1: slower beside it), and the ratio from which a comparison is refused."""

    ratio: float
    limit: float

    @property
    def slowed(self) -> bool:
        return self.ratio > self.limit

    @property
    def sentence(self) -> str:
        return (
            f"the incumbent ran {self.ratio:.2f}x slower beside this candidate than alone (up to {self.limit:.2f}x is "
            "this machine's noise)"
        )


def reference_slowdown(alone: Sequence[float], beside: Sequence[float], sigma: float) -> Slowdown:
    """Whether the reference was slowed while it was compared. `alone` and `beside` are its seconds per token on the
    same prompts, in the same order; `sigma` is the spread of one log-ratio of the reference with itself.

    The two were not measured close together, so a drift of the machine lies between them: SLOWDOWN_LEAST is let pass,
    and so are SLOWDOWN_SIGMAS times the spread of such a median. The spread is the larger one of A/A and of these
    ratios themselves: a slowdown that is noise differs from prompt to prompt. Raises ValueError for unequal lengths.
    """
    if not alone or len(alone) != len(beside):
        raise ValueError("the reference must have answered the same prompts alone and beside the candidate")
    logs = np.log(np.asarray(beside) / np.asarray(alone))
    middle = float(np.median(logs))
    spread = max(sigma, float(MAD_TO_SIGMA * np.median(np.abs(logs - middle))))
    noise = SLOWDOWN_SIGMAS * float(median_sigma(np.asarray(spread), len(logs)))
    return Slowdown(math.exp(middle), math.exp(max(math.log(1.0 + SLOWDOWN_LEAST), noise)))
