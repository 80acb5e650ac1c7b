"""The stated power of a trial against a Monte Carlo of noisy candidates that the judge itself decides on."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from engine.judge import forcing, power
from engine.judge.floor import Floor, count_limit, flip_chance
from engine.judge.forcing import Scored
from engine.judge.probes import Probe
from engine.judge.protocol import Scores, Text

FLOOR = Floor(0.02, 2, 400, "made up", 0.01, tuple(0.01 * i / 400 for i in range(1, 401)))
STOP: tuple[int, ...] = ()
LEADING = 20.0


def decode(ids: list[int]) -> str:
    return " ".join(map(str, ids))


def text_of(name: str, gaps: np.ndarray, noise: np.ndarray, probe: Probe | None = None) -> Scored:
    """What a candidate writes whose two leading logits (ids 1 and 2, `gaps` apart) carry `noise` [n, 2]; a third token
    lies far behind. At a flip stock's gap is that to the second token."""
    n = len(gaps)
    flipped = gaps + noise[:, 0] - noise[:, 1] < 0
    own = np.where(flipped, -gaps, 0.0)
    ids = tuple(int(token) for token in np.where(flipped, 2, 1))
    own, top = own + LEADING, (LEADING,) * n
    scores = Scores((1,) * n, top, tuple(own.tolist()), (2,) * n, tuple((LEADING - gaps).tolist()), 1)
    return Scored(name, "", (3,), Text(ids, "length"), scores, n, probe=probe)


@pytest.mark.parametrize("sigma", [0.005, 0.02, 0.1])
def test_stated_power_is_what_a_simulation_finds(sigma: float) -> None:
    rng = np.random.default_rng()
    gaps = rng.exponential(2.0, 240)
    gaps[:4] = rng.uniform(0.0, 0.02, 4)  # some near-ties
    sharp, tied = rng.uniform(0.02, 0.05, 4), rng.uniform(0.011, 0.02, 8)
    probes = [
        Probe(f"{zone}{i}", "", zone, (3,), (), 1, 2, float(gap), 1)  # type: ignore[arg-type]
        for zone, group in (("sharp", sharp), ("tied", tied))
        for i, gap in enumerate(group)
    ]
    seen = 0
    trials = 800
    for _ in range(trials):
        answers = [text_of("text", gaps, rng.normal(0.0, sigma, (len(gaps), 2)))]
        for probe in probes:
            answers.append(text_of(probe.id, np.array([probe.gap]), rng.normal(0.0, sigma, (1, 2)), probe))
        seen += forcing.objection(forcing.report(answers, FLOOR, STOP, decode)) is not None
    limit = forcing.near_tie_limit(len(gaps) + len(sharp), FLOOR)
    tied_limit = count_limit([flip_chance(float(gap), FLOOR) for gap in tied])
    counted = [*gaps.tolist(), *sharp.tolist()]
    stated = power.detection(sigma * 2**0.5, counted, tied.tolist(), FLOOR.margin, limit, tied_limit)
    spread = 4 * (max(stated * (1 - stated), 0.01) / trials) ** 0.5
    assert seen / trials == pytest.approx(stated, abs=spread)
    assert 0.1 < stated < 0.99 or sigma != 0.02  # the middle one tells something


def test_a_trial_states_its_power_for_named_losses_and_multiples_of_its_noise() -> None:
    rng = np.random.default_rng()
    gaps = rng.exponential(2.0, 300)
    report = forcing.report([text_of("text", gaps, np.zeros((300, 2)))], FLOOR, STOP, decode)
    sizes = [one.noise for one in report.power]
    assert sizes == sorted(sizes)
    assert all(0.0 <= one.detected <= 1.0 for one in report.power)
    named = {one.like: one for one in report.power}
    assert {"a verify pass in bf16", "a KV cache of 8-bit integers", "10 times stock's own noise"} <= named.keys()
    assert named["a verify pass in bf16"].noise == pytest.approx(0.0041 * LEADING / 2**0.5)
    assert all(one.noise > 2 * 0.0057 / 2**0.5 for one in report.power)  # stock's own noise is no loss


def test_more_probes_closer_ties_and_more_noise_are_seen_more_often() -> None:
    rng = np.random.default_rng()
    gaps = rng.exponential(2.0, 300).tolist()

    def at(noise: float, extra: list[float], tied: list[float]) -> float:
        return power.detection(noise, [*gaps, *extra], tied, 1e-4, 2, 1)

    chances = [at(noise, [], []) for noise in (1e-3, 1e-2, 1e-1, 1.0)]
    assert chances == sorted(chances)
    assert at(0.01, [0.005] * 4, []) > at(0.01, [0.02] * 4, []) > at(0.01, [], [])
    assert at(0.01, [], [5e-5] * 8) > at(0.01, [], [5e-5] * 2) >= at(0.01, [], [])
    assert power.estimate([], [], [], FLOOR, 0, 0) == ()


def test_normal_tail_against_the_distribution() -> None:
    rng = np.random.default_rng()
    values = rng.normal(size=400_000)
    for z in (0.0, 0.5, 1.0, 2.0, 3.0):
        assert power.tail(z) == pytest.approx((values > z).mean(), abs=0.004)
    for a, b in itertools.pairwise([power.tail(z / 2) for z in range(20)]):
        assert b < a
