"""Sensitive prefixes: where stock's two leading tokens lie close together, so that a small loss shows.

Few positions of a text meet one by chance. Stock scores many positions in cheap single passes (its own texts, the
prompts' own tokens, candidates' texts), and the candidate is asked to continue from the most sensitive ones, as from
any prompt. In two ways: the sensitive token is the first one (prefill computes it), or the question ends a few tokens
earlier, where stock's own text leads through it (decoding or a verify pass computes it).

Two zones. At a *sharp* prefix the gap lies above the near-tie margin, and so far above stock's noise that no honest
candidate flips it (`floor.surely`): only stock's token is right, and an answer is judged as any other token, so one
that is wrong is an error. At a *tied* one the gap lies inside the margin, but is as large as most noise of stock, half
of them larger than all that was seen: the other token is no error, but an honest candidate seldom takes it. How seldom
follows from stock's noise (`floor.flip_chance`); who takes it more often resolves near-ties against stock. Pure.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from engine.codec import STRICT
from engine.judge.floor import Floor, count_limit, flip_chance, surely
from engine.judge.protocol import Scores, Text
from engine.judge.report import Probing
from engine.sampling import Sampling

Zone = Literal["sharp", "tied"]

WIDEST = 0.02
"""The widest gap of a sharp prefix, as a share of the median leading logit: the noise of the coarsest loss that
`power.py` names. Where stock's own noise comes near it, as in bf16, there are no sharp prefixes."""
TIED_FROM = 0.7
"""The smallest gap of a tied prefix, as a share of the largest noise that stock showed."""
LEAD = 3
"""Tokens from the end of a question to a sensitive token that is to be decoded: in reach of the first draft."""
TAIL = 1
"""Tokens that are asked for after a sensitive one."""
FULL_EVERY = 3
"""Every so many probes ask for as many tokens as the regime allows: a short answer gives no probe away."""
PER_TEXT = 4
"""Most probes of one zone from one text: what is peculiar to a text does not decide."""


@dataclass(frozen=True)
class Seen:
    """A text that stock scored after `prompt_ids`, whoever wrote it. The tokens of a prompt itself are one, too, after
    its first tokens. `sampling` has one request; None = greedy."""

    prompt: str
    category: str
    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    scores: Scores
    sampling: Sampling | None = None


@dataclass(frozen=True)
class Probe:
    """A question: continue `prefix` by up to `max_new_tokens` tokens. After `lead`, which is stock's own text, stock's
    two leading tokens `choice` and `second` lie `gap` logits apart. Without a lead, prefill computes that token."""

    __pydantic_config__ = STRICT

    id: str
    category: str
    zone: Zone
    prefix: tuple[int, ...]
    lead: tuple[int, ...]
    choice: int
    second: int
    gap: float
    max_new_tokens: int
    sampling: Sampling | None = None

    def reached(self, ids: Sequence[int]) -> bool:
        """Whether an answer comes to the sensitive token."""
        return len(ids) > len(self.lead) and tuple(ids[: len(self.lead)]) == self.lead


@dataclass(frozen=True)
class Want:
    """How many probes of a zone at most, how long a question may be, and how many tokens a usual answer has."""

    longest: int
    max_new_tokens: int
    sharp: int = 8
    tied: int = 16


def find(seen: Sequence[Seen], floor: Floor, stop_ids: Sequence[int], want: Want) -> list[Probe]:
    """The most sensitive prefixes of `seen`, smallest gaps first, half of them reached by decoding where that can be
    had; sharp ones first. The same position may be asked in both ways where it is sharp: one wrong token counts. Where
    it is tied it is asked once, for its two answers would not be independent."""
    spots = sorted(_spots(seen, stop_ids, want), key=lambda spot: spot.gap)
    if not spots:
        return []
    least = surely(floor)
    widest = widest_gap(seen)
    sharp = [spot for spot in spots if least <= spot.gap <= widest]
    places = _choose(sharp, want.sharp, least, both=True)
    if floor.noise > 0.0:
        under = [spot for spot in spots if TIED_FROM * floor.noise < spot.gap <= floor.noise]
        above = [spot for spot in spots if floor.noise < spot.gap <= floor.margin]
        for tied in (under, above):
            places += _choose(tied, want.tied // 2, least, both=False)
    return [
        spot.probe("sharp" if spot.gap > floor.margin else "tied", lead, index % FULL_EVERY == 0, want.max_new_tokens)
        for index, (spot, lead) in enumerate(places)
    ]


def widest_gap(seen: Sequence[Seen]) -> float:
    """The widest gap of a sharp prefix where these are stock's logits; 0 where there are none."""
    leading = [abs(logit) for one in seen for logit in one.scores.choice_logit]
    return WIDEST * statistics.median(leading) if leading else 0.0


def assess(answers: Sequence[tuple[Probe, Text, Scores]], floor: Floor) -> Probing:
    """What a candidate answered at the probes. `Scores` are stock's of the answer on its own prefix.

    A probe whose lead the candidate did not follow was not reached and counts nowhere (the lead itself is forced like
    any text); a tied one counts only where stock, asked again, makes the choice that it made before."""
    sharp = wrong = left = 0
    widest = 0.0
    chances: list[float] = []
    for probe, text, scores in answers:
        if not probe.reached(text.ids):
            continue
        at = len(probe.lead)
        token, choice = text.ids[at], scores.choice[at]
        beyond = token != choice and scores.choice_logit[at] - scores.token_logit[at] > floor.margin
        if probe.zone == "sharp":
            sharp += 1
            wrong += beyond
            widest = max(widest, probe.gap)
        elif choice == probe.choice:
            chances.append(flip_chance(probe.gap, floor))
            left += token != choice and not beyond
    return Probing(sharp, wrong, len(chances), left, count_limit(chances), widest)


def objection(probing: Probing) -> str | None:
    """Why a candidate without an error that answered the probes like this is lossy; None where it is not."""
    if probing.tied_left > probing.tied_limit:
        return (
            f"It left stock at {probing.tied_left} of {probing.tied} prefixes where stock's two leading tokens are "
            f"nearly tied, and stock's own noise explains at most {probing.tied_limit}: near-ties are resolved against "
            "stock."
        )
    return None


@dataclass(frozen=True)
class _Spot:
    """Position `at` of a text with its gap, and how far before it a question may end (0: right before it)."""

    seen: Seen
    at: int
    gap: float
    clear: tuple[float, ...]  # gaps of the tokens before it that are stock's own choice, nearest first

    def lead(self, least: float) -> int:
        """Tokens from which stock surely comes here: its own choices, each with a gap of at least 2 * `least`."""
        return next((i for i, gap in enumerate(self.clear) if gap < 2 * least), len(self.clear))

    def probe(self, zone: Zone, lead: int, full: bool, max_new_tokens: int) -> Probe:
        seen, start = self.seen, self.at - lead
        return Probe(
            id=f"{seen.prompt}+{len(seen.prompt_ids) + start}",
            category=seen.category,
            zone=zone,
            prefix=(*seen.prompt_ids, *seen.ids[:start]),
            lead=seen.ids[start : self.at],
            choice=seen.scores.choice[self.at],
            second=seen.scores.second[self.at],
            gap=self.gap,
            max_new_tokens=max_new_tokens if full else min(max_new_tokens, lead + 1 + TAIL),
            sampling=seen.sampling,
        )


def _spots(seen: Iterable[Seen], stop_ids: Sequence[int], want: Want) -> Iterable[_Spot]:
    """Every position once whose prefix is short enough."""
    known: set[tuple[tuple[int, ...], Sampling | None]] = set()
    for one in seen:
        scores = one.scores
        gaps = [best - second for best, second in zip(scores.choice_logit, scores.second_logit, strict=True)]
        for at in range(min(len(one.ids), want.longest - len(one.prompt_ids) + 1)):
            key = ((*one.prompt_ids, *one.ids[:at]), one.sampling)
            if key in known:
                continue
            known.add(key)
            clear: list[float] = []
            for before in range(at - 1, max(-1, at - 1 - min(LEAD, want.max_new_tokens - 1)), -1):
                if one.ids[before] != scores.choice[before] or one.ids[before] in stop_ids:
                    break
                clear.append(gaps[before])
            yield _Spot(one, at, gaps[at], tuple(clear))


def _choose(spots: Sequence[_Spot], count: int, least: float, *, both: bool) -> list[tuple[_Spot, int]]:
    """Up to `count` questions from `spots` (smallest gap first), each a spot and its lead; half of them with a lead,
    more where the other half cannot be had. `both`: a spot may give a question of either kind. One that an ordinary
    prompt leads to is asked so, for nothing tells it from any other question."""
    decoded: list[tuple[_Spot, int]] = []
    prefilled: list[tuple[_Spot, int]] = []
    used: dict[int, int] = {}
    for spot in spots:
        text = id(spot.seen)
        lead = spot.lead(least)
        kinds = [(decoded, lead)] if lead else []
        if not lead or (lead < spot.at and (both or len(prefilled) < len(decoded))):
            kinds = [*kinds, (prefilled, 0)] if both else [(prefilled, 0)]
        for places, tokens in kinds:
            if len(places) < count and used.get(text, 0) < PER_TEXT:
                places.append((spot, tokens))
                used[text] = used.get(text, 0) + 1
    half = max(count // 2, count - len(prefilled))
    chosen = decoded[:half]
    chosen += prefilled[: count - len(chosen)]
    return sorted(chosen, key=lambda place: place[0].gap)
