"""Token forcing: every token of a candidate against stock's choice on that very prefix.

Pure functions over what stock scored. A disagreement is a near-tie where stock's logits for its own choice and
for the candidate's token differ by less than what stock's own arithmetic noise explains; anything else is an
error. How a text ends is a token too: an early, a missing or an ignored end is an error unless the end-of-text
token itself was such a near-tie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from engine.judge import power, probes
from engine.judge.floor import Floor, near_tie_limit
from engine.judge.probes import Probe
from engine.judge.protocol import Scores, Text
from engine.judge.report import Divergence, Forcing
from engine.sampling import Sampling

CONFIRMING_WIDTH = 1
"""Rows a pass in which stock scores an answer with an error once more: as decoding computes it."""
ENDED = -1
"""In place of a token id: the text ended here."""
CONTEXT_TOKENS = 40
AFTER_TOKENS = 20


@dataclass(frozen=True)
class Scored:
    """One answer of a candidate with all that it is judged by. `stock` is stock's free run, where it was made; `probe`
    is the sensitive prefix that was asked, where it was one."""

    prompt: str
    category: str
    prompt_ids: tuple[int, ...]
    text: Text
    scores: Scores
    max_new_tokens: int
    stock: Text | None = None
    probe: Probe | None = None
    sampling: Sampling | None = None

    @property
    def tied_at(self) -> int | None:
        """Index of the token where stock was known to have a near-tie beforehand; None where there is none."""
        probe = self.probe
        if probe is None or probe.zone != "tied" or not probe.reached(self.text.ids):
            return None
        return len(probe.lead)


@dataclass(frozen=True)
class Disagreement:
    """One place where a candidate leaves stock: `token` (or ENDED) where stock has `choice`, `gap` logits apart."""

    kind: Literal["near_tie", "error"]
    position: int
    token: int
    choice: int
    gap: float
    what: str = ""


def disagreements(scored: Scored, margin: float, stop_ids: Sequence[int]) -> list[Disagreement]:
    """All places where a text leaves stock's choice, in order; at most one a token, and one for how it ends."""
    ids, scores = scored.text.ids, scored.scores
    end = next((i for i, token in enumerate(ids) if token in stop_ids), None)
    found = []
    for i, token in enumerate(ids):
        if end is not None and i > end:
            found.append(Disagreement("error", i, token, ids[end], 0.0, "it goes on after the end of its text"))
        elif token != scores.choice[i]:
            gap = scores.choice_logit[i] - scores.token_logit[i]
            found.append(
                Disagreement("near_tie" if gap <= margin else "error", i, token, scores.choice[i], max(0.0, gap))
            )
    if end is None and len(ids) < scored.max_new_tokens:
        what = f"it ends after {len(ids)} of {scored.max_new_tokens} tokens without an end of text"
        found.append(Disagreement("error", len(ids), ENDED, scores.following, 0.0, what))
    reason = "eos" if end is not None else "length"
    if scored.text.stop_reason != reason and not any(place.kind == "error" for place in found):
        what = f"it gives the stop reason {scored.text.stop_reason!r} for a text that ends by {reason!r}"
        found.append(Disagreement("error", len(ids), ENDED, scores.following, 0.0, what))
    return found


def confirmed(
    answers: Iterable[Scored], margin: float, stop_ids: Sequence[int], again: Callable[[Scored], Scores]
) -> list[Scored]:
    """The same answers; those with an error carry scores that stock has made in another way, too (`again`).

    Here and there a tiny difference early in a model grows large: two ways of computing stock itself then choose
    different tokens whose logits lie far apart. An error is one only where it is wrong in both ways, so every position
    of such an answer gets the scores that speak for its token. Ends with the first answer that has an error all the
    same: it suffices, and what follows is left as it is.
    """
    result, done = [], False
    for answer in answers:
        if not done and _has_error(answer, margin, stop_ids):
            answer = replace(answer, scores=kinder(answer.scores, again(answer)))
            done = _has_error(answer, margin, stop_ids)
        result.append(answer)
    return result


def _has_error(answer: Scored, margin: float, stop_ids: Sequence[int]) -> bool:
    return any(place.kind == "error" for place in disagreements(answer, margin, stop_ids))


def kinder(one: Scores, other: Scores) -> Scores:
    """Position by position the scores in which the text's token lies nearer to stock's choice."""
    picks = [
        one if a - b <= c - d else other
        for a, b, c, d in zip(one.choice_logit, one.token_logit, other.choice_logit, other.token_logit, strict=True)
    ]
    return Scores(
        choice=tuple(pick.choice[i] for i, pick in enumerate(picks)),
        choice_logit=tuple(pick.choice_logit[i] for i, pick in enumerate(picks)),
        token_logit=tuple(pick.token_logit[i] for i, pick in enumerate(picks)),
        second=tuple(pick.second[i] for i, pick in enumerate(picks)),
        second_logit=tuple(pick.second_logit[i] for i, pick in enumerate(picks)),
        following=one.following,
    )


def report(
    answers: Sequence[Scored], floor: Floor, stop_ids: Sequence[int], decode: Callable[[list[int]], str]
) -> Forcing:
    """Counts and first divergence over all `answers`, probes among them. An answer that was given again, word for
    word, to the same question counts once.

    The sensitive token of a tied prefix is left out of the counts, unless it is an error: it was chosen for its tie,
    and says nothing of how often a candidate meets one. `Forcing.probing` has its own count of these.
    """
    distinct = list({(answer.prompt, answer.text, answer.scores): answer for answer in answers}.values())
    exact = near = error = 0
    by_category: dict[str, tuple[int, int, int]] = {}
    places: list[tuple[Scored, Disagreement]] = []
    gaps: list[float] = []
    leading: list[float] = []
    for answer in distinct:
        found = disagreements(answer, floor.margin, stop_ids)
        left_out = answer.tied_at
        if any(place.position == left_out and place.kind == "error" for place in found):
            left_out = None
        found = [place for place in found if place.position != left_out]
        places += [(answer, place) for place in found]
        ties = sum(place.kind == "near_tie" for place in found)
        wrong_tokens = len({place.position for place in found if place.token != ENDED}) - ties
        counted = [gap for i, gap in enumerate(_gaps(answer.scores)) if i != left_out]
        counts = (len(counted) - ties - wrong_tokens, ties, len(found) - ties)
        before = by_category.get(answer.category, (0, 0, 0))
        by_category[answer.category] = (before[0] + counts[0], before[1] + counts[1], before[2] + counts[2])
        exact, near, error = exact + counts[0], near + counts[1], error + counts[2]
        gaps += counted
        leading += answer.scores.choice_logit
    free = [answer for answer in distinct if answer.stock is not None]
    first = min(places, key=lambda place: place[1].kind != "error", default=None)
    limit = near_tie_limit(len(gaps), floor)
    # One answer may come through two sensitive tokens, each of which was asked for by a question that begins alike.
    probed = {(answer.probe, answer.text): answer for answer in answers}.values()
    asked = [(answer.probe, answer.text, answer.scores) for answer in probed if answer.probe is not None]
    probing = probes.assess(asked, floor) if asked else None
    tied = [probe.gap for probe, text, _ in asked if probe.zone == "tied" and probe.reached(text.ids)]
    return Forcing(
        tokens=len(gaps),
        exact=exact,
        near_tie=near,
        error=error,
        tie_margin=floor.margin,
        near_tie_limit=limit,
        floor_method=floor.method,
        free_run_equal=sum(_same(answer.text, answer.stock) for answer in free if answer.stock is not None),
        free_run_prompts=len(free),
        first=_divergence(*first, decode) if first else None,
        by_category=by_category,
        probing=probing,
        power=power.estimate(gaps, tied, leading, floor, limit, probing.tied_limit if probing else 0),
    )


def _gaps(scores: Scores) -> list[float]:
    return [best - second for best, second in zip(scores.choice_logit, scores.second_logit, strict=True)]


def _same(text: Text, stock: Text) -> bool:
    return (text.ids, text.stop_reason) == (stock.ids, stock.stop_reason)


def _divergence(answer: Scored, place: Disagreement, decode: Callable[[list[int]], str]) -> Divergence:
    before = [*answer.prompt_ids, *answer.text.ids[: place.position]]
    return Divergence(
        prompt=answer.prompt,
        position=place.position,
        candidate_token=place.token,
        stock_token=place.choice,
        logit_gap=place.gap,
        context=decode(before[-CONTEXT_TOKENS:]),
        candidate_text=place.what or decode([place.token]),
        stock_text=decode([place.choice]),
        near_tie=place.kind == "near_tie",
        category=answer.category,
        after=decode(list(answer.text.ids[place.position + 1 : place.position + 1 + AFTER_TOKENS])),
    )


def objection(forcing: Forcing) -> str | None:
    """Why a candidate with these counts is lossy, in one sentence; None where it is not."""
    first = forcing.first
    if forcing.error and first is not None:
        count = f"{forcing.error} of {forcing.tokens} tokens differ from stock beyond its noise"
        if forcing.probing is not None and forcing.probing.sharp_wrong:
            probing = forcing.probing
            count += (
                f" ({probing.sharp_wrong} at {probing.sharp} prefixes where stock's leading tokens lie close together)"
            )
        where = f"prompt {first.prompt}, token {first.position + 1}"
        if first.candidate_token == ENDED:
            return f"{count}; first at {where}: {first.candidate_text}."
        return (
            f"{count}; first at {where}: {first.candidate_text!r} where stock has {first.stock_text!r}, "
            f"{first.logit_gap:.3g} logits apart (near-ties end at {forcing.tie_margin:.2g})."
        )
    if forcing.near_tie > forcing.near_tie_limit:
        return (
            f"{forcing.near_tie} near-ties in {forcing.tokens} tokens, where stock's own noise explains at most "
            f"{forcing.near_tie_limit}."
        )
    return probes.objection(forcing.probing) if forcing.probing else None
