"""What a trial would have seen: the chance that candidates with noisy logits are found out by its tokens and probes.

A candidate whose arithmetic is less exact adds noise to stock's logits. It takes the runner-up where the noise in the
gap between the two leading logits exceeds that gap. Beyond the near-tie margin that is an error; inside it, it counts
towards the limits of near-ties. The noise is taken as normal and independent from position to position, and tokens
other than the two leading ones are left out, so the chances are slightly low. Pure.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from engine.judge.floor import Floor, count_distribution
from engine.judge.report import Power

MULTIPLES = (4, 10, 100, 1000)
"""Of stock's own noise."""
NAMED: tuple[tuple[float, str], ...] = (
    (0.0005, "a verify pass in fp16"),
    (0.0041, "a verify pass in bf16"),
    (0.0047, "a KV cache of 8-bit integers"),
    (0.0072, "weights of 8-bit integers"),
    (0.021, "weights and activations in fp8"),
)
"""Noise of the gap between two leading logits (standard deviation), as a share of the median size of the leading logit.

Measured on 759 positions of SmolLM2-135M-Instruct after 16 shipped prompts, against the same model in fp32: the whole
model in fp16 and in bf16; keys (after rotation) and values rounded per token and head to symmetric 8-bit integers;
all matrices but the head rounded per row to symmetric 8-bit integers; the same to e4m3, with inputs per token. In one
pass and eight rows a pass alike. Other models differ: the names give an order of size."""
COARSEST = 0.25
"""Multiples of stock's noise above this share of the median gap are left out: such a candidate writes another text."""


def estimate(
    gaps: Sequence[float],
    tied: Sequence[float],
    leading: Sequence[float],
    floor: Floor,
    near_tie_limit: int,
    tied_limit: int,
) -> tuple[Power, ...]:
    """The power of a trial against noise of several sizes, smallest first.

    `gaps` are stock's gaps (leading logit less second) at every token that was counted, sharp probes included;
    `tied` those at the tied probes, `leading` stock's leading logits. Noise that stock has itself is left out.
    """
    if not gaps:
        return ()
    median = statistics.median(gaps)
    own = math.sqrt(statistics.fmean(d * d for d in floor.differences)) if floor.differences else 0.0
    size = statistics.median(abs(logit) for logit in leading)
    sizes = [(share * size, like) for share, like in NAMED]
    sizes += [
        (times * own, f"{times} times stock's own noise") for times in MULTIPLES if own * times < COARSEST * median
    ]
    result = []
    for gap_noise, like in sorted(sizes):
        if gap_noise > 2 * own:
            chance = detection(gap_noise, gaps, tied, floor.margin, near_tie_limit, tied_limit)
            result.append(Power(gap_noise / math.sqrt(2.0), chance, like))
    return tuple(result)


def detection(
    gap_noise: float,
    gaps: Sequence[float],
    tied: Sequence[float],
    margin: float,
    near_tie_limit: int,
    tied_limit: int,
) -> float:
    """The chance of at least one error, or of more near-ties than one of the limits, where every gap changes by
    normal noise of standard deviation `gap_noise` (the logits' own times the square root of 2)."""
    unseen = 1.0
    for gap in gaps:
        if gap > margin:
            unseen *= 1.0 - tail(gap / gap_noise)
    near = [tail(gap / gap_noise) for gap in gaps if gap <= margin]
    for chances, limit in ((near, near_tie_limit), ([tail(gap / gap_noise) for gap in tied], tied_limit)):
        unseen *= math.fsum(count_distribution(chances)[: limit + 1])
    return min(1.0, max(0.0, 1.0 - unseen))


def tail(z: float) -> float:
    """Chance that a standard normal value exceeds `z`."""
    return 0.5 * math.erfc(z / math.sqrt(2.0))
