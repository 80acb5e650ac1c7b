"""Timing statistics: exact small cases, and thousands of simulated comparisons under realistic noise."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.judge import bench
from engine.judge.bench import PairRule, ReadLimit
from engine.judge.report import Pair

Array = NDArray[np.float64]


def pair(reference_s: float, candidate_s: float, reference_tokens: int = 10, candidate_tokens: int = 10) -> Pair:
    return Pair("p", reference_s, candidate_s, reference_tokens, candidate_tokens)


def test_ratio_is_of_seconds_per_token() -> None:
    assert bench.ratio(pair(2.0, 1.0)) == 2.0
    assert bench.ratio(pair(2.0, 1.0, reference_tokens=20, candidate_tokens=5)) == pytest.approx(0.5)
    assert bench.log_ratio(pair(1.0, 2.0)) == pytest.approx(-math.log(2))


def test_interval_agrees_with_the_exact_bootstrap() -> None:
    values = np.random.default_rng().lognormal(0.2, 0.1, size=5)
    exact = np.sort([float(np.median(picks)) for picks in itertools.product(values, repeat=5)])
    tail = np.searchsorted(exact, bench.interval(values, seed=1), side="left") / len(exact)
    above = np.searchsorted(exact, bench.interval(values, seed=1), side="right") / len(exact)
    assert tail[0] - 0.01 <= 0.025 <= above[0] + 0.01
    assert tail[1] - 0.01 <= 0.975 <= above[1] + 0.01


def test_interval_is_seeded_and_works_on_many_rows() -> None:
    values = np.random.default_rng(5).lognormal(size=(4, 7))
    low, high = bench.interval(values, seed=3)
    for row in range(4):
        one = bench.interval(values[row], seed=3)
        assert (float(low[row]), float(high[row])) == (float(one[0]), float(one[1]))


def test_sigma_of_pairs_and_of_their_median() -> None:
    rng = np.random.default_rng()
    assert float(bench.pair_sigma(rng.normal(0, 0.04, size=20_000))) == pytest.approx(0.04, rel=0.05)
    medians = np.median(rng.normal(0, 0.04, size=(20_000, 25)), axis=-1)
    assert float(bench.median_sigma(np.float64(0.04), 25)) == pytest.approx(float(np.std(medians)), rel=0.06)


def test_threshold_is_the_larger_of_one_per_cent_and_two_sigma() -> None:
    assert float(bench.gain_threshold(np.float64(0.0), 6)) == bench.LEAST_GAIN
    assert float(bench.gain_threshold(np.float64(0.05), 6)) == pytest.approx(0.1 * bench.MEDIAN_SPREAD / math.sqrt(6))


def test_summary() -> None:
    pairs = [pair(2.0 + 0.1 * i, 1.0) for i in range(5)]
    found = bench.summarise("stock", pairs, [0.02, -0.02, 0.02], seed=4, warmup_s=1.5)
    assert found.ratio == pytest.approx(2.2)
    assert 2.0 <= found.low <= 2.2 <= found.high <= 2.4
    assert found.candidate_tok_s == pytest.approx(10.0)
    assert found.reference_tok_s == pytest.approx(10 / 2.2)
    assert found.aa_sigma == pytest.approx(1.4826 * 0.02 * math.sqrt(math.pi / 2) / math.sqrt(5))
    assert found.threshold == pytest.approx(2 * found.aa_sigma)
    assert bench.is_gain(found)
    assert (found.reference, found.warmup_s, found.pairs) == ("stock", 1.5, tuple(pairs))
    assert not bench.is_gain(bench.summarise("stock", [pair(1.02, 1.0)] * 3, [0.02, -0.02], seed=4))


RULE = PairRule(early=3, pairs=6, most=12)
QUIET = [0.001, -0.001]


@pytest.mark.parametrize(
    ("ratios", "end"),
    [
        ([0.5, 0.6], False),  # too few to say
        ([0.5, 0.6, 0.7], True),  # clearly slower
        ([0.5, 0.6, 1.1], False),
        ([2.0, 2.1], False),
        ([2.0, 2.1, 2.2], True),  # an obvious gain
        ([1.4, 2.1, 2.2], False),
        ([1.2, 1.21, 1.22, 1.23, 1.24], False),  # any other gain is never accepted before `pairs`
        ([1.2, 1.21, 1.22, 1.23, 1.24, 1.25], True),  # a clear gain
        ([0.9, 0.95, 1.0, 1.0, 1.05, 1.1], True),  # no gain in the median
        ([0.6, 0.7, 1.3, 1.4, 1.5, 1.6], False),  # undecided: goes on
        ([0.6, 0.7, 1.3, 1.4, 1.5, 1.6, 2.0, 2.0, 2.0, 2.0, 2.0], False),  # to the end, without another look
        ([0.6, 0.7, 1.3, 1.4, 1.5, 1.6, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0], True),
    ],
)
def test_when_a_comparison_ends(ratios: list[float], end: bool) -> None:
    assert bench.finished(ratios, QUIET, RULE, seed=1) is end


def test_rounds_are_balanced_and_stop() -> None:
    asked: list[tuple[str, int]] = []

    def side(name: str):  # type: ignore[no-untyped-def]
        def ask(prompt: int) -> str:
            asked.append((name, prompt))
            return f"{name}{prompt}"

        return ask

    rounds = bench.run_rounds([1, 2, 3, 4], [side("A"), side("B")], lambda rounds: len(rounds) == 3)
    assert "".join(name for name, _ in asked) == "ABBAAB"
    assert rounds == [["A1", "B1"], ["A2", "B2"], ["A3", "B3"]]
    asked.clear()
    bench.run_rounds([1, 2], [side("A"), side("B"), side("C")])
    assert "".join(name for name, _ in asked) == "ABCCBA"


def test_physical_floor() -> None:
    limit = ReadLimit(weight_bytes=600e6, cache_bytes=100e6, bytes_per_second=50e9)
    one_pass = 0.01
    assert limit.seconds(tokens=1, draft_tokens=7) == pytest.approx(one_pass)  # prefill alone
    assert limit.seconds(tokens=10, draft_tokens=0) == pytest.approx(10 * one_pass)
    assert limit.seconds(tokens=17, draft_tokens=7) == pytest.approx(3 * one_pass)  # 1 + 8 + 8
    assert limit.seconds(tokens=18, draft_tokens=7) == pytest.approx(4 * one_pass)
    assert ReadLimit(50e6, 100e6, 50e9).seconds(100, 0) == 0.0  # fits the cache: no floor
    assert ReadLimit.from_probe(600e6, 0.0, 100.0).bytes_per_second == pytest.approx(150e9)
    assert ReadLimit.from_probe(600e6, 0.0, 5.0).bytes_per_second == bench.PLAUSIBLE_PEAK  # probed while busy


# Simulated machines. `times` are relative seconds of consecutive runs, [comparisons, runs].


def quiet(rng: np.random.Generator, shape: tuple[int, int]) -> Array:
    return np.asarray(rng.lognormal(0.0, 0.02, size=shape))


def drifting(rng: np.random.Generator, shape: tuple[int, int]) -> Array:
    """A random walk (a machine that warms up, a neighbour that comes and goes) under the noise of single runs."""
    walk = np.cumsum(rng.normal(0.0, 0.02, size=shape), axis=-1)
    return np.asarray(np.exp(walk) * rng.lognormal(0.0, 0.02, size=shape))


def bursting(rng: np.random.Generator, shape: tuple[int, int]) -> Array:
    """One run in eight is hit by something that makes it up to twice as slow."""
    hit = rng.random(shape) < 0.125
    return np.asarray(rng.lognormal(0.0, 0.02, size=shape) * np.where(hit, rng.uniform(1.1, 2.0, size=shape), 1.0))


def heavy_tailed(rng: np.random.Generator, shape: tuple[int, int]) -> Array:
    return np.asarray(np.exp(0.025 * rng.standard_t(2.0, size=shape)))


MACHINES = [quiet, drifting, bursting, heavy_tailed]
COMPARISONS, REPEATS = 3000, 4
RESAMPLES = 300  # enough for a share of comparisons; the judge takes more


def simulate(machine, gain: float, seed: int) -> Array:  # type: ignore[no-untyped-def]
    """Which comparisons end in a gain, run as the workbench runs them: A/A repeats, then ABBA pairs by the rule."""
    rng = np.random.default_rng(seed)
    times = machine(rng, (COMPARISONS, 2 * REPEATS + 2 * RULE.most))
    spread_over_prompts = rng.normal(0.0, 0.01, size=(COMPARISONS, RULE.most))  # a gain differs by prompt
    repeats = np.log(times[:, 0 : 2 * REPEATS : 2] / times[:, 1 : 2 * REPEATS : 2])
    runs = times[:, 2 * REPEATS :].reshape(COMPARISONS, RULE.most, 2)
    forwards = np.arange(RULE.most) % 2 == 0
    reference = np.where(forwards, runs[..., 0], runs[..., 1])
    candidate = np.where(forwards, runs[..., 1], runs[..., 0])
    ratios = gain * np.exp(spread_over_prompts) * reference / candidate
    going, obvious = np.ones(COMPARISONS, dtype=bool), np.zeros(COMPARISONS, dtype=bool)
    sigma = bench.pair_sigma(repeats)
    for pairs in range(RULE.early, RULE.pairs):
        obvious |= going & bench.clearly_faster(ratios[:, :pairs], sigma, seed, RESAMPLES)
        going &= ~obvious & ~bench.clearly_slower(ratios[:, :pairs], seed, RESAMPLES)
    low_clears, median_clears = bench.clears(ratios[:, : RULE.pairs], sigma, seed, RESAMPLES)
    accepted = obvious | (going & low_clears)
    undecided = going & ~low_clears & median_clears
    accepted[undecided] = bench.clears(ratios[undecided], sigma[undecided], seed, RESAMPLES)[0]
    return np.asarray(accepted, dtype=np.float64)


@pytest.mark.parametrize("machine", MACHINES)
def test_equal_candidates_are_hardly_ever_accepted(machine) -> None:  # type: ignore[no-untyped-def]
    accepted = simulate(machine, gain=1.0, seed=11)
    upper = accepted.mean() + 1.645 * math.sqrt(max(accepted.mean(), 1e-3) / COMPARISONS)
    assert upper < 0.02, f"false accepts {accepted.mean():.4f}"


@pytest.mark.parametrize(
    ("machine", "gain", "least"),
    [(quiet, 1.10, 0.95), (drifting, 1.10, 0.9), (bursting, 1.10, 0.5), (heavy_tailed, 1.10, 0.6)],
)
def test_gains_of_ten_per_cent_are_seen(machine, gain: float, least: float) -> None:  # type: ignore[no-untyped-def]
    assert simulate(machine, gain, seed=12).mean() > least


def test_slower_candidates_end_early_and_are_never_accepted() -> None:
    assert simulate(drifting, gain=0.9, seed=13).sum() == 0
