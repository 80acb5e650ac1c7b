"""Ask a recorded trial's questions again: of whom they were asked, in the same order; stock scores the answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from engine.errors import UserError
from engine.judge.confinement import confinement_for
from engine.judge.forcing import CONFIRMING_WIDTH, Scored, confirmed
from engine.judge.hidden import Material
from engine.judge.process import ChildFailed
from engine.judge.protocol import Scores, Text
from engine.judge.record import Answered, Exchange, Failure, Record
from engine.judge.seats import Seat, Seats, Timeouts

STOCK, CANDIDATE, INCUMBENT = "stock", "candidate", "incumbent"
WARMUP_TOKENS = 8


class Cast:
    """The children of a replay, each started when it is first needed: the incumbent may have to answer before there is
    a candidate."""

    def __init__(self, kept: Record, material: Material, folder: Path, ours: Callable[[str], bool]) -> None:
        self._kept = kept
        self._ours = ours
        self._folder = folder
        self._seats = Seats(kept.deployment, material, kept.threads, folder, 3, Timeouts())

    def close(self) -> None:
        self._seats.close()

    def seat(self, role: str) -> Seat:
        """Raises UserError for a role that the record says no backend of, or that cannot be confined."""
        return self._seats.get(role) or self._start(role)

    def _start(self, role: str) -> Seat:
        kept, needed = self._kept, {STOCK, CANDIDATE, INCUMBENT}
        if role not in kept.backends or (role == INCUMBENT and kept.incumbent is None):
            raise UserError(f"The trial's record asks the {role}, but does not say what that is.", field="trial")
        if (role != CANDIDATE or kept.source is None) and not self._ours(kept.backends[role]):
            raise UserError(
                f"The trial's record names {kept.backends[role]!r} as the {role}, which is not part of SpecPilot; only "
                "a source candidate's own text is run, in the sandbox.",
                field="trial",
            )
        if role == CANDIDATE:
            backend = _candidate_backend(kept, self._folder)
            confinement = confinement_for(kept.deployment, backend) if kept.source else None
            return self._seats.start(role, role, backend, kept.plan, needed, confinement)
        plan = kept.incumbent if role == INCUMBENT else None
        seat = self._seats.start(role, role, kept.backends[role], plan, needed)
        seat.ready()
        return seat

    def warm(self, exchange: Exchange) -> None:
        """Let the incumbent, before its first question, allocate and compile."""
        if exchange.role == INCUMBENT and self._seats.get(INCUMBENT) is None:
            prompts = [prompt.ids for prompt in exchange.prompts]
            tokens = min(WARMUP_TOKENS, exchange.max_new_tokens)
            self.seat(INCUMBENT).generate_batch(prompts, tokens, exchange.sampling)


def _candidate_backend(kept: Record, folder: Path) -> str:
    """The backend's name; a source candidate's text is written to a file of `folder` first."""
    if kept.source is None:
        return kept.backends[CANDIDATE]
    file = folder / "candidate.py"
    file.write_text(kept.source.text, encoding="utf-8")
    return f"{file}:{kept.source.function}"


def ask(kept: Record, cast: Cast, progress: Callable[[str], None]) -> list[Exchange]:
    """All questions in order, to whom they were asked; ends where the candidate fails."""
    result = []
    for number, exchange in enumerate(kept.exchanges, start=1):
        progress(f"asking {number}/{len(kept.exchanges)}")
        try:
            cast.warm(exchange)
            result.append(_again(exchange, cast.seat(exchange.role)))
        except ChildFailed as failure:
            if failure.role != CANDIDATE:
                raise
            why = Failure(failure.kind, failure.reason)
            result.append(replace(exchange, texts=(), seconds=0.0, failure=why))
            break
    return result


def _again(exchange: Exchange, seat: Seat) -> Exchange:
    seat.ready()
    if not exchange.prompts:
        return replace(exchange, failure=None)
    prompts = [prompt.ids for prompt in exchange.prompts]
    reply = seat.generate_batch(prompts, exchange.max_new_tokens, exchange.sampling)
    texts = tuple(Answered(text.ids, text.stop_reason, text.steps, text.emitted) for text in reply.texts)
    return replace(exchange, texts=texts, seconds=reply.seconds, failure=None)


def score(kept: Record, cast: Cast, exchanges: Sequence[Exchange], progress: Callable[[str], None]) -> list[Scored]:
    """Stock's scores of all answers of the candidate that the trial had scored, and stock's own texts again where the
    trial had them. The same question answered alike is scored once."""
    scores: dict[object, Scored] = {}
    texts: dict[object, Text] = {}
    result = []
    for old, new in zip(kept.exchanges, exchanges, strict=False):
        if new.role != CANDIDATE:
            continue
        progress("scoring the answers")
        for index, (prompt, was, text) in enumerate(zip(old.prompts, old.texts, new.texts, strict=False)):
            if was.scores is None:
                continue
            stock = cast.seat(STOCK)
            sampling = old.sampling.one(index) if old.sampling else None
            question = (prompt.ids, old.max_new_tokens, sampling)
            if was.stock_ids is not None and question not in texts:
                texts[question] = stock.generate(prompt.ids, old.max_new_tokens, sampling).text
            key = (prompt.id, old.probe, question, text.text)
            if key not in scores:
                scores[key] = Scored(
                    prompt=prompt.id,
                    category=prompt.category,
                    prompt_ids=prompt.ids,
                    text=text.text,
                    scores=stock.score(prompt.ids, text.ids, sampling=sampling),
                    max_new_tokens=old.max_new_tokens,
                    stock=texts.get(question),
                    probe=old.probe,
                    sampling=sampling,
                )
            result.append(scores[key])
    if kept.floor is None:
        return result

    def again(answer: Scored) -> Scores:
        return cast.seat(STOCK).score(answer.prompt_ids, answer.text.ids, CONFIRMING_WIDTH, answer.sampling)

    return confirmed(result, kept.floor.margin, kept.stop_ids, again)
