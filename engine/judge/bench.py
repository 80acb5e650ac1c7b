"""Timing statistics and the order of timed questions.

Reference A and candidate B answer each prompt once, in ABBA order over the prompts (A B, B A, ...), so a drift of
the machine falls on both alike and nothing that a process remembers of an answer can help it. One observation is
the ratio of seconds per token of a pair. The result is the median ratio with a seeded bootstrap interval; it counts
as a gain where the interval's lower end clears max(1 %, 2 sigma), sigma being the spread of that very median when the
reference is compared with itself.

When to stop (`finished`): from `early` pairs on, a comparison ends when the interval's upper end lies under 1; it
then ends in "slower", so that look cannot make a false gain more likely. It also ends when the interval's lower end
clears a gain of OBVIOUS_GAIN: no noise that a machine was seen to have makes an equal candidate half as fast again in
every pair. After `pairs` pairs it ends, unless the median clears the threshold and the interval's lower end does not:
then it goes on to `most` pairs and is decided there. The share of equal candidates that pass is simulated in the
tests for exactly this rule.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from engine.judge.report import Comparison, Pair

RESAMPLES = 2000
LEVEL = 0.95
LEAST_GAIN = 0.01
OBVIOUS_GAIN = 0.5
MEDIAN_SPREAD = math.sqrt(math.pi / 2)
"""Standard deviation of a median of n normal values, times sqrt(n) / sigma, for large n."""
MAD_TO_SIGMA = 1.4826
PEAK_FACTOR = 1.5
"""The fastest reading that a timing may imply, against the measured read bandwidth."""
PLAUSIBLE_PEAK = 50e9
"""Bytes per second that any machine may reach, whatever a probe on a busy one measured."""

P = TypeVar("P")
T = TypeVar("T")


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
        """Least seconds of a generation: prefill gives one token, each verify pass at most `draft_tokens` + 1."""
        passes = 1 + math.ceil(max(0, tokens - 1) / (draft_tokens + 1))
        return passes * max(0.0, self.weight_bytes - self.cache_bytes) / self.bytes_per_second


def ratio(pair: Pair) -> float:
    """Seconds per token of the reference over those of the candidate: above 1 where the candidate is faster."""
    return (pair.reference_s / pair.reference_tokens) / (pair.candidate_s / pair.candidate_tokens)


def log_ratio(pair: Pair) -> float:
    return math.log(ratio(pair))


def bootstrap_medians(values: NDArray[np.float64], seed: int, resamples: int = RESAMPLES) -> NDArray[np.float64]:
    """Medians of `resamples` resamples with replacement over the last axis: [..., n] -> [..., resamples]."""
    n = values.shape[-1]
    picks = np.random.default_rng(seed).integers(0, n, size=(resamples, n))
    medians: NDArray[np.float64] = np.median(values[..., picks], axis=-1)
    return medians


def interval(
    values: NDArray[np.float64], seed: int, resamples: int = RESAMPLES
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Percentile bootstrap interval (95 %) of the median over the last axis of positive `values`."""
    tail = (1.0 - LEVEL) / 2.0
    low, high = np.quantile(bootstrap_medians(values, seed, resamples), (tail, 1.0 - tail), axis=-1)
    return low, high


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
    pairs: int = 6
    most: int = 12


def clearly_slower(ratios: NDArray[np.float64], seed: int, resamples: int = RESAMPLES) -> NDArray[np.bool_]:
    """The whole interval lies under 1. [..., n] -> [...]"""
    return np.asarray(interval(ratios, seed, resamples)[1] < 1.0)


def clearly_faster(
    ratios: NDArray[np.float64], sigma: NDArray[np.float64], seed: int, resamples: int = RESAMPLES
) -> NDArray[np.bool_]:
    """The whole interval clears OBVIOUS_GAIN and the threshold. [..., n], [...] -> [...]"""
    needed = 1.0 + np.maximum(OBVIOUS_GAIN, gain_threshold(sigma, ratios.shape[-1]))
    return np.asarray(interval(ratios, seed, resamples)[0] > needed)


def clears(
    ratios: NDArray[np.float64], sigma: NDArray[np.float64], seed: int, resamples: int = RESAMPLES
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Whether the interval's lower end, and whether the median, clear the threshold. [..., n], [...] -> [...]"""
    needed = 1.0 + gain_threshold(sigma, ratios.shape[-1])
    low = interval(ratios, seed, resamples)[0]
    return np.asarray(low > needed), np.asarray(np.median(ratios, axis=-1) > needed)


def finished(ratios: Sequence[float], repeats: Sequence[float], rule: PairRule, seed: int) -> bool:
    """Whether a comparison with these ratios so far is at its end."""
    values = np.asarray(ratios)
    if len(ratios) < rule.pairs:
        if len(ratios) < rule.early:
            return False
        return bool(clearly_slower(values, seed)) or bool(clearly_faster(values, _sigma(repeats), seed))
    if len(ratios) == rule.pairs:
        low_clears, median_clears = clears(values, _sigma(repeats), seed)
        return bool(low_clears or not median_clears)
    return len(ratios) >= rule.most


def _sigma(repeats: Sequence[float]) -> NDArray[np.float64]:
    return pair_sigma(np.asarray(repeats)) if repeats else np.asarray(0.0)


def summarise(
    reference: str, pairs: Sequence[Pair], repeats: Sequence[float], seed: int, warmup_s: float = 0.0
) -> Comparison:
    """The comparison of at least one pair. `repeats` are log-ratios of the reference against itself; none = 0."""
    ratios = np.asarray([ratio(pair) for pair in pairs])
    low, high = interval(ratios, seed)
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
    )


def is_gain(comparison: Comparison) -> bool:
    return comparison.low > 1.0 + comparison.threshold


def balanced(round_index: int, sides: Sequence[T]) -> Sequence[T]:
    """The order of sides in one round: forwards, backwards, forwards, ... (ABBA for two)."""
    return sides if round_index % 2 == 0 else list(reversed(sides))


def run_rounds(
    prompts: Sequence[P],
    sides: Sequence[Callable[[P], T]],
    stop: Callable[[list[list[T]]], bool] = lambda rounds: False,
) -> list[list[T]]:
    """Ask every side every prompt once, in balanced order; results by round, in the order of `sides`. Ends before
    the last prompt when `stop` says so of the rounds so far."""
    rounds: list[list[T]] = []
    for index, prompt in enumerate(prompts):
        results: dict[int, T] = {}
        for side in balanced(index, range(len(sides))):
            results[side] = sides[side](prompt)
        rounds.append([results[side] for side in range(len(sides))])
        if stop(rounds):
            break
    return rounds
