"""Stock as the reference of token forcing: its free runs, its scores of other texts, and its noise floor."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.deployment import Deployment
from engine.judge.effort import Effort
from engine.judge.floor import Floor, Sample, measure_floor
from engine.judge.forcing import CONFIRMING_WIDTH, Scored, confirmed
from engine.judge.probes import Probe
from engine.judge.protocol import Scores, Text
from engine.judge.questions import Question, Questions
from engine.judge.seats import Seat, Seats
from engine.judge.store import Store

STOCK = "stock"


class Reference:
    """Unmodified stock in a child of its own. Free runs and the floor are kept in the search's folder."""

    def __init__(
        self,
        deployment: Deployment,
        questions: Questions,
        effort: Effort,
        seats: Seats,
        store: Store,
        backend: str,
        progress: Callable[[str], None],
    ) -> None:
        self._deployment = deployment
        self._questions = questions
        self._effort = effort
        self._seats = seats
        self._store = store
        self._backend = backend
        self._progress = progress
        self._max_new_tokens = deployment.regime.max_new_tokens
        self.pool = questions.pool(lambda head, rest: self.seat().score(head, rest))

    def seat(self) -> Seat:
        """Stock's child, started where it is not running."""
        return self._seats.get(STOCK) or self._seats.start(STOCK, STOCK, self._backend, None)

    def solo_questions(self) -> list[Question]:
        """The questions on which stock is timed alone and its noise is measured."""
        return self._questions.draw("stock", 0, self._effort.stock_prompts)

    def free_run(self, question: Question) -> float:
        """Have stock write after each prompt of `question`, alone, where it has not done so yet. Seconds of writing."""
        return sum(self._text(part)[1] for part in question.parts)

    def text_of(self, part: Question) -> Text:
        """What stock writes after the one prompt of `part`."""
        return self._text(part)[0]

    def _text(self, part: Question) -> tuple[Text, float]:
        kept = self._kept(part)
        if kept is not None:
            return kept, 0.0
        reply = self.seat().generate(part.prompts[0].ids, self._max_new_tokens, part.sampling)
        self.keep(part, (reply.text,))
        return reply.text, reply.seconds

    def keep(self, question: Question, texts: Sequence[Text]) -> None:
        """Remember free runs that were made for another purpose. Of a batch nothing is kept: in it stock orders its
        sums in another way than alone."""
        if len(texts) == 1 and self._kept(question) is None:
            self._store.keep_text(
                self.seat().implementation,
                question.prompts[0].ids,
                self._max_new_tokens,
                texts[0],
                question.sampling,
            )

    def scored(self, part: Question, text: Text, max_new_tokens: int, probe: Probe | None = None) -> Scored:
        """`text`, of which at most `max_new_tokens` were asked for, with stock's scores, and with stock's free run of
        the prompt where that was made already."""
        (prompt,) = part.prompts
        return Scored(
            prompt=prompt.id,
            category=prompt.category,
            prompt_ids=prompt.ids,
            text=text,
            scores=self.seat().score(prompt.ids, text.ids, sampling=part.sampling),
            max_new_tokens=max_new_tokens,
            stock=None if probe else self._kept(part),
            probe=probe,
            sampling=part.sampling,
        )

    def confirmed(self, answers: Sequence[Scored], stop_ids: Sequence[int]) -> list[Scored]:
        """Have stock score answers with an error once more, as decoding computes them (`forcing.confirmed`)."""

        def again(answer: Scored) -> Scores:
            return self.seat().score(answer.prompt_ids, answer.text.ids, CONFIRMING_WIDTH, answer.sampling)

        return confirmed(answers, self.floor().margin, stop_ids, again)

    def _kept(self, part: Question) -> Text | None:
        return self._store.text(self.seat().implementation, part.prompts[0].ids, self._max_new_tokens, part.sampling)

    def floor(self) -> Floor:
        """Stock's noise floor on this device, measured once in a search."""
        stock = self.seat()
        floor = self._store.floor(stock.implementation)
        if floor is not None:
            return floor
        samples = []
        parts = [part for question in self.solo_questions() for part in question.parts]
        for part in parts[: self._effort.floor_texts]:
            self._progress("measuring stock's noise floor")
            text, prompt, how = self._text(part)[0], part.prompts[0].ids, part.sampling
            at_width = tuple(
                (width, stock.score(prompt, text.ids, width, sampling=how)) for width in self._effort.floor_widths
            )
            samples.append(Sample(text.ids, stock.score(prompt, text.ids, sampling=how), at_width))
        floor = measure_floor([*samples, *self._more_samples(stock)], self._deployment.dtype)
        self._store.keep_floor(stock.implementation, floor)
        return floor

    def _more_samples(self, stock: Seat) -> list[Sample]:
        """Text that stock did not decode, for more positions: few of them would allow many near-ties. In bf16, where
        the noise varies, at all widths."""
        widths = self._effort.floor_widths
        widths = widths if self._deployment.dtype == "bf16" else widths[-1:]
        self.pool.grow(self._effort.floor_positions)
        samples = []
        for seen in self.pool.all:
            at_width = tuple((width, stock.score(seen.prompt_ids, seen.ids, width)) for width in widths)
            samples.append(Sample(seen.ids, seen.scores, at_width, decoded=False))
        return samples
