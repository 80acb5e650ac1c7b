"""Seeds that make an ordinary question sensitive, for deployments that sample.

The noise of a token is a function of seed, request, position and id, so the judge may look for a seed with which
stock's two leading tokens come to lie close together, right after a prompt or a few tokens on. Such a question is like
any other: nothing but its seed was chosen. The search knows two tokens of each position only; whether a third one
wins, and how the gap comes out exactly, stock says when it scores the proposed text with the proposed seed. Pure.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.judge.probes import LEAD, Seen
from engine.noise import gumbel_at
from engine.sampling import Sampling

SEEDS = 1 << 17
"""Seeds tried for each text: two noise values each, 0.1 us apiece."""
OTHERS = 0.5
"""How far the two leading tokens are to lie above the largest known logit, in units of temperature, at least: the best
of the other tokens, whose logits the search does not know, seldom comes so far up."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Proposal:
    """Text `ids` after `prompt_ids`, whose last token is likely to be sensitive under `sampling`: for stock to score.
    `gap` is what the search expects there."""

    prompt: str
    category: str
    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    sampling: Sampling
    gap: float


def propose(
    seen: Sequence[Seen], temperature: float, least: float, most: float, count: int, rng: random.Random
) -> list[Proposal]:
    """Up to `count` questions whose gap is expected in `least`..`most` logits, spread over the texts of `seen` and over
    leads of 0 to LEAD tokens: the lead follows the text under the new seed, too. Request numbers are those of `seen`
    (0 for a greedy text)."""
    by_text = [_of_text(one, temperature, least, most, rng) for one in seen]
    proposals = [proposal for turn in _by_turns(by_text) for proposal in turn]
    return proposals[:count]


def _of_text(one: Seen, temperature: float, least: float, most: float, rng: random.Random) -> list[Proposal]:
    """The best proposal of each lead: of those with a gap in the range, the one that stands clearest of others."""
    request = one.sampling.requests[0] if one.sampling else 0
    seeds = np.frombuffer(rng.randbytes(8 * SEEDS), dtype="<u8") >> np.uint64(1)
    found = []
    for at in range(min(LEAD + 1, len(one.ids))):
        tokens, raw = _raw(one, at)
        position = len(one.prompt_ids) + at
        noise = gumbel_at(seeds[:, None], request, position, np.asarray(tokens)[None])  # [S, 2]
        values: Floats = np.asarray(raw)[None] + temperature * noise
        gaps = np.abs(values[:, 0] - values[:, 1])
        clearance = (values.min(axis=1) - max(raw)) / temperature
        inside = (gaps >= least) & (gaps <= most) & (clearance > OTHERS)
        if inside.any():
            best = int(np.argmax(np.where(inside, clearance, -np.inf)))
            sampling = Sampling(temperature, int(seeds[best]), (request,))
            text = one.ids[: at + 1]
            found.append(Proposal(one.prompt, one.category, one.prompt_ids, text, sampling, float(gaps[best])))
        if one.ids[at] not in tokens:
            break
        mine = tokens.index(one.ids[at])
        follows = (values[:, mine] > values[:, 1 - mine]) & ((values[:, mine] - max(raw)) / temperature > OTHERS)
        seeds = seeds[follows]
        if not len(seeds):
            break
    return found


def _raw(one: Seen, at: int) -> tuple[tuple[int, int], tuple[float, float]]:
    """The two tokens that stock told of position `at`, and their logits without noise."""
    scores = one.scores
    tokens = (scores.choice[at], scores.second[at])
    logits = (scores.choice_logit[at], scores.second_logit[at])
    if one.sampling is None:
        return tokens, logits
    noise = gumbel_at(one.sampling.seed, one.sampling.requests[0], len(one.prompt_ids) + at, list(tokens))
    first, second = np.asarray(logits) - one.sampling.temperature * noise
    return tokens, (float(first), float(second))


def _by_turns(lists: Sequence[Sequence[Proposal]]) -> Iterator[list[Proposal]]:
    for index in range(max(map(len, lists), default=0)):
        yield [items[index] for items in lists if index < len(items)]
