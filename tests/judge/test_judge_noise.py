"""How often the judge's rule accepts an equal candidate, and how often it sees a gain: thousands of comparisons on
simulated machines, recorded noise among them (record_noise.py says how), through the very code that decides."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.judge import bench
from engine.judge.bench import PairRule
from engine.judge.conditions import disturbance
from engine.judge.load import Load
from engine.judge.report import Pair
from engine.judge.rounds import MOST_VOID, NotIdle, timed_rounds

Array = NDArray[np.float64]
Bits = NDArray[np.bool_]
Rng = np.random.Generator
Machine = Callable[[Rng, tuple[int, int]], tuple[Array, Bits]]

NOISE = json.loads((Path(__file__).parent / "data" / "noise.json").read_text())
COMPARISONS = 5000
RULE = PairRule()
REPEATS = 4
"""What the first comparison of a search has; later ones have up to 24."""
ROUNDS = RULE.most + MOST_VOID + 1
AA_RUNS = 2 * REPEATS
QUIET_SIGMA = 0.02


def clean(times: Array) -> tuple[Array, Bits]:
    return times, np.zeros(times.shape, dtype=bool)


def replayed(name: str, rng: Rng, shape: tuple[int, int], mean_length: float = 25.0) -> tuple[Array, Bits]:
    """Stretches of a recorded trace, of random length and place, one after the other: noise as it was, with its bursts
    and its memory. The second result says which runs the judge's own limit of foreign load calls void."""
    trace = NOISE[name]
    median_s = trace["median_s"][0]
    times = np.asarray(trace["relative"])
    loads = [Load(max(t * median_s, 1e-3), f) for t, f in zip(times, trace["foreign"], strict=True)]
    cores = NOISE["device"]["cores"]
    void = np.asarray([disturbance(load, cores, cores) is not None for load in loads])
    place = rng.integers(len(times), size=shape)
    jump = rng.random(shape) < 1 / mean_length
    for run in range(1, shape[1]):
        place[:, run] = np.where(jump[:, run], place[:, run], (place[:, run - 1] + 1) % len(times))
    return times[place], void[place]


def recorded_quiet(rng: Rng, shape: tuple[int, int]) -> tuple[Array, Bits]:
    return replayed("quiet", rng, shape)


def recorded_busy(rng: Rng, shape: tuple[int, int]) -> tuple[Array, Bits]:
    """Beside a process that comes and goes, its blocks void as the judge would call them."""
    return replayed("busy", rng, shape)


def recorded_busy_unnoticed(rng: Rng, shape: tuple[int, int]) -> tuple[Array, Bits]:
    """The same machine where foreign load cannot be told."""
    return clean(replayed("busy", rng, shape)[0])


def recorded_busy_since(rng: Rng, shape: tuple[int, int]) -> tuple[Array, Bits]:
    """The same, but the A/A repeats are from a time when the machine was quiet."""
    times = replayed("busy", rng, shape)[0]
    times[:, :AA_RUNS] = replayed("quiet", rng, (shape[0], AA_RUNS))[0]
    return clean(times)


def drifting(rng: Rng, shape: tuple[int, int]) -> tuple[Array, Bits]:
    """A random walk (a machine that warms up) under the noise of single runs."""
    walk = np.cumsum(rng.normal(0.0, 0.02, size=shape), axis=-1)
    return clean(np.exp(walk) * rng.lognormal(0.0, QUIET_SIGMA, size=shape))


def trending(rng: Rng, shape: tuple[int, int]) -> tuple[Array, Bits]:
    """Each run 1 % slower than the one before."""
    return clean(1.01 ** np.arange(shape[1]) * rng.lognormal(0.0, QUIET_SIGMA, size=shape))


def bursting(rng: Rng, shape: tuple[int, int]) -> tuple[Array, Bits]:
    """Bursts of five runs on average make them up to twice as slow; a third of the runs in them is not noticed."""
    hit = np.zeros(shape, dtype=bool)
    luck = rng.random(shape)
    for run in range(shape[1]):
        hit[:, run] = luck[:, run] < np.where(hit[:, run - 1], 0.8, 0.05) if run else luck[:, run] < 0.2
    slow = np.where(hit, rng.uniform(1.05, 2.0, size=shape), 1.0)
    return rng.lognormal(0.0, QUIET_SIGMA, size=shape) * slow, hit & (rng.random(shape) < 2 / 3)


def heavy_tailed(rng: Rng, shape: tuple[int, int]) -> tuple[Array, Bits]:
    return clean(np.exp(0.025 * rng.standard_t(2.0, size=shape)))


def correlated(rng: Rng, shape: tuple[int, int], memory: float = 0.5, sigma: float = QUIET_SIGMA) -> tuple[Array, Bits]:
    """AR(1)."""
    state = rng.normal(0.0, sigma, size=shape)
    for run in range(1, shape[1]):
        state[:, run] = memory * state[:, run - 1] + math.sqrt(1 - memory**2) * state[:, run]
    return clean(np.exp(state))


def strongly_correlated(rng: Rng, shape: tuple[int, int]) -> tuple[Array, Bits]:
    return correlated(rng, shape, memory=0.9)


def noisier_since(rng: Rng, shape: tuple[int, int]) -> tuple[Array, Bits]:
    """Twenty times noisier than when sigma was measured, and correlated the worst way for ABBA."""
    times, void = correlated(rng, shape, sigma=0.1)
    times[:, :AA_RUNS] = rng.lognormal(0.0, 0.005, size=(shape[0], AA_RUNS))
    return times, void


MACHINES: list[Machine] = [
    recorded_quiet, recorded_busy, recorded_busy_unnoticed, recorded_busy_since, drifting, trending, bursting,
    heavy_tailed, correlated, strongly_correlated, noisier_since,
]  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """Of simulated comparisons: which ended in a gain, which in "not idle", and how many pairs counted."""

    gain: Bits
    not_idle: Bits
    pairs: NDArray[np.int64]


@dataclass(frozen=True)
class Simulated:
    """Raw comparisons: A/A log-ratios [c, repeats], and per round asked the two times in the order they were taken and
    whether the round is void, [c, rounds, 2] and [c, rounds]. `spread` is what a prompt does to the ratio."""

    repeats: Array
    times: Array
    void: Bits
    spread: Array


def simulate(machine: Machine, rng: Rng, comparisons: int = COMPARISONS, rounds: int = ROUNDS) -> Simulated:
    times, flags = machine(rng, (comparisons, AA_RUNS + 2 * rounds))
    repeats = np.log(times[:, 0:AA_RUNS:2] / times[:, 1:AA_RUNS:2])
    pairs = times[:, AA_RUNS:].reshape(comparisons, rounds, 2)
    void = flags[:, AA_RUNS:].reshape(comparisons, rounds, 2).any(axis=-1)
    return Simulated(repeats, pairs, void, np.exp(rng.normal(0.0, 0.01, size=(comparisons, rounds))))


def decide(raw: Simulated, gain: float, rule: PairRule = RULE, sigma: Array | None = None) -> Outcome:
    """All comparisons at once, as `timed_rounds`, `finished` and `is_gain` decide each (checked against them below)."""
    comparisons, rounds = raw.void.shape
    ratios = np.full((comparisons, rule.most), np.nan)
    valid = np.zeros(comparisons, dtype=np.int64)
    voided = np.zeros(comparisons, dtype=np.int64)
    everyone = np.arange(comparisons)
    for asked in range(rounds):
        first, second = raw.times[:, asked, 0], raw.times[:, asked, 1]
        forwards = valid % 2 == 0
        ratio = gain * raw.spread[:, asked] * np.where(forwards, first / second, second / first)
        counts = ~raw.void[:, asked] & (voided <= MOST_VOID) & (valid < rule.most)
        ratios[everyone[counts], valid[counts]] = ratio[counts]
        voided += raw.void[:, asked]
        valid += counts
    sigma = bench.pair_sigma(raw.repeats) if sigma is None else sigma
    going, gains, pairs = np.ones(comparisons, dtype=bool), np.zeros(comparisons, dtype=bool), valid.copy()
    for count in range(1, rule.most + 1):
        here = np.flatnonzero(going & (valid >= count))
        part = ratios[here, :count]
        over = bench.ended(part, sigma[here], rule) | ((valid[here] == count) & (count >= rule.pairs))
        gains[here] = over & bench.clears(part, sigma[here])[0]
        going[here[over]] = False
        pairs[here[over]] = count
    return Outcome(gains, going, pairs)


def upper_bound(successes: int, trials: int) -> float:
    """One-sided 95 % upper bound of a share after Clopper and Pearson: the p at which so few are seen in 5 %."""
    logs = [math.lgamma(trials + 1) - math.lgamma(i + 1) - math.lgamma(trials - i + 1) for i in range(successes + 1)]
    low, high = successes / trials, 1.0
    for _ in range(60):
        p = (low + high) / 2
        tail = sum(math.exp(c + i * math.log(p) + (trials - i) * math.log1p(-p)) for i, c in enumerate(logs))
        low, high = (p, high) if tail > 0.05 else (low, p)
    return high


def test_upper_bound() -> None:
    assert upper_bound(0, 100) == pytest.approx(1 - 0.05 ** (1 / 100))
    assert upper_bound(10, 100) == pytest.approx(0.1637, abs=1e-4)  # tables of the beta distribution


@pytest.mark.parametrize("machine", MACHINES)
def test_equal_candidates_are_hardly_ever_accepted(machine: Machine) -> None:
    """The seed is fixed: the worst machine's true share is 1.2 %, which a fresh one would find above the bound once in
    some hundred runs."""
    seed = 2026
    found = decide(simulate(machine, np.random.default_rng(seed)), gain=1.0)
    bound = upper_bound(int(found.gain.sum()), COMPARISONS)
    print(f"{machine.__name__}: {found.gain.sum()} of {COMPARISONS} equal candidates accepted, at most {bound:.2%};")
    print(f"{found.not_idle.mean():.1%} not idle, {found.pairs.mean():.1f} pairs")
    assert bound <= 0.02, f"{machine.__name__}, seed {seed}: {found.gain.sum()} of {COMPARISONS} accepted"


@pytest.mark.parametrize("machine", MACHINES)
def test_all_at_once_decides_as_one_by_one(machine: Machine) -> None:
    """The simulation against the judge's own loop, with a clock that reads out the simulated times."""
    raw = simulate(machine, np.random.default_rng(), comparisons=40)
    for gain in (1.0, 1.15):
        together = decide(raw, gain)
        for number in range(40):
            asked = -1
            answers = iter(())
            void = raw.void[number]

            class Replay:
                def before_round(self) -> None:
                    nonlocal asked, answers
                    asked += 1
                    answers = iter(raw.times[number, asked])  # noqa: B023 - used within the iteration

                def after_round(self) -> str | None:
                    return "busy" if void[asked] else None  # noqa: B023

            def reference(prompt: int) -> float:
                return float(next(answers)) * gain * raw.spread[number, prompt]  # noqa: B023

            def candidate(prompt: int) -> float:
                return float(next(answers))  # noqa: B023

            repeats = raw.repeats[number].tolist()

            def stop(rounds: list[list[float]]) -> bool:
                return bench.finished([one / other for one, other in rounds], repeats, RULE)  # noqa: B023

            try:
                rounds = timed_rounds(
                    range(ROUNDS), [reference, candidate], stop, watch=Replay(), enough=RULE.pairs
                ).valid
            except NotIdle:
                assert together.not_idle[number]
                continue
            pairs = [Pair("p", *each.results, 1, 1) for each in rounds]
            assert not together.not_idle[number]
            assert together.pairs[number] == len(pairs)
            assert bench.is_gain(bench.summarise("it", pairs, repeats)) == together.gain[number]


def test_power_on_the_recorded_quiet_machine() -> None:
    """A gain of 3 %: how often it is seen with sigma from four repeats and from all that are kept, and how many pairs
    would see it in 80 %."""
    rng = np.random.default_rng()
    raw = simulate(recorded_quiet, rng, 2000, rounds=64)
    first = decide(raw, 1.03).gain.mean()
    times = recorded_quiet(rng, (2000, 48))[0]
    later_sigma = bench.pair_sigma(np.log(times[:, 0::2] / times[:, 1::2]))
    later = decide(raw, 1.03, sigma=later_sigma).gain.mean()
    needed = next(
        (n for n in range(4, 65) if decide(raw, 1.03, PairRule(3, n, n), later_sigma).gain.mean() >= 0.8), None
    )
    print(f"a 3 % gain is seen in {first:.0%} (first comparison) and {later:.0%} (later); 80 % takes {needed} pairs")
    assert later > POWER_LATER
    assert needed is not None
    assert needed <= MOST_PAIRS_FOR_80


POWER_LATER, MOST_PAIRS_FOR_80 = 0.3, 40


@pytest.mark.parametrize(
    ("machine", "least"),
    [(recorded_quiet, 0.9), (drifting, 0.9), (bursting, 0.5), (heavy_tailed, 0.5), (correlated, 0.95)],
)
def test_gains_of_ten_per_cent_are_seen(machine: Machine, least: float) -> None:
    assert decide(simulate(machine, np.random.default_rng(), 2000), 1.1).gain.mean() > least


def test_slower_candidates_end_early_and_are_never_accepted() -> None:
    found = decide(simulate(correlated, np.random.default_rng(), 2000), 0.9)
    assert found.gain.sum() == 0
    assert np.mean(found.pairs == RULE.early) > 0.9


def test_an_equal_reference_is_hardly_ever_called_slowed() -> None:
    """Alone and beside a candidate that does nothing, three prompts, on machines that drift between the two."""
    rng = np.random.default_rng()
    for machine in (recorded_quiet, drifting, heavy_tailed, correlated):
        times = machine(rng, (2000, 2 * REPEATS + 6))[0]
        sigma = bench.pair_sigma(np.log(times[:, 0:AA_RUNS:2] / times[:, 1:AA_RUNS:2]))
        slowed = [
            bench.reference_slowdown(row[-3:].tolist(), row[-6:-3].tolist(), float(spread)).slowed
            for row, spread in zip(times, sigma, strict=True)
        ]
        assert np.mean(slowed) < 0.05, machine.__name__
