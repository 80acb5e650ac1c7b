"""Which sensitive prefixes a trial asks for, and where they are looked for."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from engine.judge import probes, seeds
from engine.judge.floor import Floor, surely
from engine.judge.forcing import Scored
from engine.judge.hidden import HiddenPrompt
from engine.judge.pool import HEAD_TOKENS, Pool
from engine.judge.probes import Probe, Seen, Want
from engine.judge.questions import Question
from engine.judge.reference import Reference

SOUGHT = 24
"""Texts under sought seeds that stock scores for one trial."""


def choose(
    reference: Reference,
    pool: Pool,
    scored: Sequence[Scored],
    fresh: Sequence[Question],
    want: Want,
    stop_ids: Sequence[int],
    rng: random.Random,
) -> list[Probe]:
    """The probes of a trial, in random order.

    They come from the candidate's answers so far (`scored`). Where the deployment decodes greedily also from `pool`;
    where it samples from the own tokens of the prompts of `fresh`, which stock scores for it, one pass each, and from
    texts under seeds that are sought for their small gaps.
    """
    floor = reference.floor()
    seen = [*_answers(scored)]
    temperature = fresh[0].temperature if fresh else 0.0
    if temperature:
        seen += _own_tokens(reference, fresh)
        seen += _sought(reference, seen, temperature, floor, rng)
    else:
        seen += pool.draw(rng)
    found = probes.find(seen, floor, stop_ids, want)
    rng.shuffle(found)
    return found


def ordinary(
    reference: Reference, bases: Sequence[tuple[HiddenPrompt, tuple[int, ...]]], want: Want, stop_ids: Sequence[int]
) -> list[Probe]:
    """Questions like any other that happen to be sensitive, so that nobody can behave well at them alone.

    `bases` are prompts, and the tokens with which stock's text is likely to begin. Stock scores each in one pass; only
    questions that end where the prompt ends are taken, and they ask for as many tokens as every question.
    """
    seen = []
    for prompt, text in bases:
        ids = text[: probes.LEAD + 1] or prompt.ids[-1:]  # whatever token: the first gap does not depend on it
        scores = reference.seat().score(prompt.ids, ids)
        seen.append(Seen(prompt.id, prompt.category, prompt.ids, ids, scores))
    whole = {one.prompt_ids for one in seen}
    found = probes.find(seen, reference.floor(), stop_ids, replace(want, sharp=4 * want.sharp, tied=0))
    chosen = [probe for probe in found if probe.prefix in whole][: want.sharp]
    return [replace(probe, max_new_tokens=want.max_new_tokens) for probe in chosen]


def _answers(scored: Sequence[Scored]) -> Iterator[Seen]:
    for one in scored:
        yield Seen(one.prompt, one.category, one.prompt_ids, one.text.ids, one.scores, one.sampling)


def _own_tokens(reference: Reference, questions: Sequence[Question]) -> Iterator[Seen]:
    for question in questions:
        for part in question.parts:
            (prompt,) = part.prompts
            head, rest = prompt.ids[:HEAD_TOKENS], prompt.ids[HEAD_TOKENS:]
            if rest:
                scores = reference.seat().score(head, rest, sampling=part.sampling)
                yield Seen(prompt.id, prompt.category, head, rest, scores, part.sampling)


def _sought(
    reference: Reference, seen: Sequence[Seen], temperature: float, floor: Floor, rng: random.Random
) -> Iterator[Seen]:
    """Half of the seeds for sharp prefixes, half for tied ones."""
    for least, most in ((surely(floor), probes.widest_gap(seen)), (floor.noise, floor.margin)):
        if least >= most:
            continue
        for proposal in seeds.propose(seen, temperature, least, most, SOUGHT // 2, rng):
            scores = reference.seat().score(proposal.prompt_ids, proposal.ids, sampling=proposal.sampling)
            yield Seen(proposal.prompt, proposal.category, proposal.prompt_ids, proposal.ids, scores, proposal.sampling)
