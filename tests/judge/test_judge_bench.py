"""Timing statistics and the order of rounds: exact small cases. Simulated machines are in test_judge_noise.py."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from engine.judge import bench
from engine.judge.bench import PairRule, ReadLimit
from engine.judge.report import Pair
from engine.judge.rounds import NotIdle, timed_rounds


def pair(reference_s: float, candidate_s: float, reference_tokens: int = 10, candidate_tokens: int = 10) -> Pair:
    return Pair("p", reference_s, candidate_s, reference_tokens, candidate_tokens)


def test_ratio_is_of_seconds_per_token() -> None:
    assert bench.ratio(pair(2.0, 1.0)) == 2.0
    assert bench.ratio(pair(2.0, 1.0, reference_tokens=20, candidate_tokens=5)) == pytest.approx(0.5)
    assert bench.log_ratio(pair(1.0, 2.0)) == pytest.approx(-math.log(2))


def test_interval_covers_the_median_of_any_distribution() -> None:
    """Against the definition: how often a fair coin falls below the k-th smallest of n, counted over all outcomes."""
    for n in range(1, 15):
        rank = bench.interval_rank(n)
        heads = np.asarray([sum(flips) for flips in itertools.product((0, 1), repeat=n)])
        missed = np.mean(heads < rank) + np.mean(n - heads < rank)
        missed_by_next = np.mean(heads < rank + 1) + np.mean(n - heads < rank + 1)
        assert missed <= 0.05 or rank == 1
        assert missed_by_next > 0.05
    skewed = np.random.default_rng().lognormal(0.0, 1.5, size=(20_000, 9))
    low, high = bench.interval(skewed)
    assert np.mean((low <= 1.0) & (high >= 1.0)) == pytest.approx(1 - 20 / 512, abs=0.01)


def test_interval_is_of_the_last_axis_whatever_the_order() -> None:
    values = np.random.default_rng().permutation(np.arange(1.0, 10.0))
    low, high = bench.interval(np.stack([values, values + 100.0]))
    assert (low.tolist(), high.tolist()) == ([2.0, 102.0], [8.0, 108.0])


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
    found = bench.summarise("stock", pairs, [0.02, -0.02, 0.02], warmup_s=1.5)
    assert found.ratio == pytest.approx(2.2)
    assert (found.low, found.high) == (pytest.approx(2.0), pytest.approx(2.4))
    assert found.aa_ratios == pytest.approx([math.exp(0.02), math.exp(-0.02), math.exp(0.02)])
    assert found.candidate_tok_s == pytest.approx(10.0)
    assert found.reference_tok_s == pytest.approx(10 / 2.2)
    assert found.aa_sigma == pytest.approx(1.4826 * 0.02 * math.sqrt(math.pi / 2) / math.sqrt(5))
    assert found.threshold == pytest.approx(2 * found.aa_sigma)
    assert bench.is_gain(found)
    assert (found.reference, found.warmup_s, found.pairs) == ("stock", 1.5, tuple(pairs))
    assert not bench.is_gain(bench.summarise("stock", [pair(1.02, 1.0)] * 3, [0.02, -0.02]))


RULE = PairRule(early=3, pairs=7, most=14)
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
        ([1.2, 1.21, 1.22, 1.23, 1.24, 1.25], False),  # any other gain is never accepted before `pairs`
        ([1.2, 1.21, 1.22, 1.23, 1.24, 1.25, 1.26], True),  # a clear gain
        ([0.9, 0.95, 0.97, 1.0, 1.0, 1.05, 1.1], True),  # no gain in the median
        ([0.6, 0.7, 1.3, 1.4, 1.5, 1.6, 1.7], False),  # undecided: goes on
        ([0.6, 0.7, 1.3, 1.4, 1.5, 1.6, *[2.0] * 7], False),  # to the end, without another look
        ([0.6, 0.7, 1.3, 1.4, 1.5, 1.6, *[2.0] * 8], True),
        ([0.99, 1.0, 1.01, 1.2, 1.3], False),  # a median of seven may still be a gain
        ([0.99, 1.0, 1.01, 1.2, 1.005], True),  # it cannot any more
        ([], False),
    ],
)
def test_when_a_comparison_ends(ratios: list[float], end: bool) -> None:
    assert bench.finished(ratios, QUIET, RULE) is end


@pytest.mark.parametrize("pairs", [3, 6, 7])
def test_an_end_for_want_of_a_gain_is_never_too_early(pairs: int) -> None:
    rng = np.random.default_rng()
    rule = PairRule(2, pairs, 2 * pairs)
    seen = np.exp(rng.normal(0.01, 0.03, size=(5000, pairs)))
    sigma = np.abs(rng.normal(0.0, 0.01, size=5000))
    gain, median = bench.clears(seen, sigma)
    soon = 0
    for n in range(rule.early, pairs):
        lost = bench.lost(seen[:, :n], pairs)
        assert not np.any(lost & (gain | median))  # it would have been decided so at `pairs`, too
        assert np.all(bench.ended(seen[:, :n], sigma, rule)[lost])
        assert not np.any(lost & bench.clears(seen[:, :n], sigma)[0])
        soon += int(lost.sum())
    assert soon > 100


def test_rounds_are_balanced_and_stop() -> None:
    asked: list[tuple[str, int]] = []

    def side(name: str):  # type: ignore[no-untyped-def]
        def ask(prompt: int) -> str:
            asked.append((name, prompt))
            return f"{name}{prompt}"

        return ask

    rounds = timed_rounds([1, 2, 3, 4], [side("A"), side("B")], lambda rounds: len(rounds) == 3).valid
    assert "".join(name for name, _ in asked) == "ABBAAB"
    assert [each.results for each in rounds] == [["A1", "B1"], ["A2", "B2"], ["A3", "B3"]]
    asked.clear()
    timed_rounds([1, 2], [side("A"), side("B"), side("C")])
    assert "".join(name for name, _ in asked) == "ABCCBA"


class Scripted:
    """A watch that says what it was told to, round by round."""

    def __init__(self, before: dict[int, str] | None = None, after: dict[int, str] | None = None) -> None:
        self.asked = -1
        self.before, self.after = before or {}, after or {}

    def before_round(self) -> str | None:
        self.asked += 1
        return self.before.get(self.asked)

    def after_round(self) -> str | None:
        return self.after.get(self.asked)


def test_a_void_round_is_made_up_for_with_another_prompt_in_the_same_order() -> None:
    asked: list[tuple[str, int]] = []

    def side(name: str):  # type: ignore[no-untyped-def]
        def ask(prompt: int) -> str:
            asked.append((name, prompt))
            return f"{name}{prompt}"

        return ask

    watch = Scripted(after={1: "busy", 2: "busy too"})
    found = timed_rounds(range(10), [side("A"), side("B")], lambda rounds: len(rounds) == 4, watch=watch, enough=4)
    assert "".join(name for name, _ in asked) == "AB" + "BA" + "BA" + "BA" + "AB" + "BA"
    assert len(set(asked)) == len(asked)  # nobody is asked a prompt twice
    assert [(each.prompt, each.results) for each in found.valid] == [(n, [f"A{n}", f"B{n}"]) for n in (0, 3, 4, 5)]
    assert [each.prompt for each in found.void] == [1, 2]
    assert found.reasons == ("busy", "busy too")


@pytest.mark.parametrize(
    ("watch", "prompts", "void"),
    [
        (Scripted(before={2: "loaded"}), 9, ("loaded",)),  # never became idle
        (Scripted(after=dict.fromkeys(range(1, 9), "loaded")), 9, ("loaded",) * 3),  # voids used up
        (Scripted(after={1: "loaded", 2: "hot"}), 4, ("loaded", "hot")),  # prompts used up
    ],
)
def test_a_machine_that_is_not_idle_is_no_verdict_on_the_candidate(
    watch: Scripted, prompts: int, void: tuple[str, ...]
) -> None:
    with pytest.raises(NotIdle, match=r"^this device was not idle: loaded") as caught:
        timed_rounds(range(prompts), [str, str], watch=watch, enough=3, most_void=2)
    assert caught.value.void == void
    assert caught.value.valid < 3


def test_rounds_that_suffice_are_kept_when_the_machine_becomes_busy() -> None:
    found = timed_rounds(range(9), [str, str], watch=Scripted(before={3: "loaded"}), enough=3)
    assert len(found.valid) == 3
    assert found.reasons == ("loaded",)


def test_a_few_prompts_on_an_idle_machine_are_no_failure() -> None:
    assert len(timed_rounds(range(2), [str], watch=Scripted(), enough=5).valid) == 2


def test_a_slowed_reference_is_seen() -> None:
    alone = [0.010, 0.020, 0.015]
    for factor, slowed in ((1.4, True), (1.1, True), (1.0, False), (1.04, False), (0.7, False)):
        found = bench.reference_slowdown(alone, [seconds * factor for seconds in alone], sigma=0.005)
        assert found.slowed is slowed
        assert found.ratio == pytest.approx(factor)
    assert "1.40x slower beside this candidate" in bench.reference_slowdown([1.0], [1.4], 0.01).sentence
    # A tenth slower says nothing on a machine that repeats itself to a tenth, nor where it hits one prompt in three.
    assert not bench.reference_slowdown(alone, [seconds * 1.1 for seconds in alone], sigma=0.1).slowed
    assert not bench.reference_slowdown([1.0, 1.0, 1.0], [1.0, 1.3, 0.9], sigma=0.0).slowed
    for bad in ([], [1.0]):
        with pytest.raises(ValueError, match="same prompts"):
            bench.reference_slowdown(bad, [1.0, 2.0], 0.01)


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


def test_whoever_drafts_no_pass_holds_more_than_the_regime_allows() -> None:
    assert bench.largest_draft(16, 128) == 16
    assert bench.largest_draft(16, 8) == 7
    assert bench.largest_draft(16, 1) == 0
    limit = ReadLimit(weight_bytes=600e6, cache_bytes=100e6, bytes_per_second=50e9)
    # A source candidate of a plan without drafts may draft; 128 tokens in one pass it cannot.
    assert limit.seconds(128, bench.largest_draft(16, 128)) == pytest.approx(0.01 * (1 + 8))
