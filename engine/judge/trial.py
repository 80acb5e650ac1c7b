"""One trial: what is asked of a candidate, in which order, and what follows from its answers.

Token forcing first (free run and scored), then the prefixes where stock's leading tokens lie close together, then the
timed pairs, whose texts are forced too. Whatever the candidate does wrong ends the trial with a verdict; what stock
or the incumbent does wrong is raised.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from engine.judge import bench, forcing, sensitive
from engine.judge.bench import ReadLimit
from engine.judge.conditions import Watch
from engine.judge.costs import CostClock
from engine.judge.effort import Effort
from engine.judge.forcing import Scored
from engine.judge.hidden import HiddenPrompt, Material
from engine.judge.probes import Probe, Want
from engine.judge.process import ChildFailed
from engine.judge.questions import Question, Questions
from engine.judge.record import Recorder
from engine.judge.reference import Reference
from engine.judge.report import Comparison, Forcing, Judgement, Verdict
from engine.judge.seats import CANDIDATE, BatchReply, Seat
from engine.judge.store import Store


@dataclass(frozen=True)
class Tools:
    """What every trial of a search shares. `limit` gives the physical floor of answers on this device."""

    material: Material
    questions: Questions
    reference: Reference
    store: Store
    effort: Effort
    watch: Callable[[], Watch]
    longest_prompt: int
    max_new_tokens: int
    limit: Callable[[], ReadLimit]
    progress: Callable[[str], None]


@dataclass(frozen=True)
class Answer:
    """A question, what the candidate answered, and the number of both in the record."""

    question: Question
    reply: BatchReply
    number: int
    probe: Probe | None = None


class Trial:
    """One candidate while it is judged.

    `draft_tokens` are what a verify pass of it may hold at most; `source` says that it is foreign code, which may know
    the prompts.
    """

    def __init__(
        self, tools: Tools, recorder: Recorder, number: int, fresh: int, *, draft_tokens: int, source: bool
    ) -> None:
        self.tools = tools
        self.recorder = recorder
        self.number = number
        self.clock = CostClock()
        self.answers: list[Answer] = []
        self.warmup_s = 0.0
        self._fresh = fresh
        self._draft_tokens = draft_tokens
        self.source = source
        self._ordinary: list[Probe] = []  # still to be asked, between the timed questions
        self._forced = 0  # answers that stock has scored
        self._scored: list[Scored] = []
        self._found: Forcing | None = None

    def draw(self, purpose: str, count: int) -> list[Question]:
        """Questions that this trial alone asks."""
        return self.tools.questions.draw(purpose, self._fresh, count, salted=self.source)

    def ready(self, candidate: Seat) -> None:
        """Wait until the candidate is built."""
        try:
            candidate.ready()
        except ChildFailed as failure:
            self.recorder.failed("start-up", "candidate", (), 0, failure)
            raise

    def force(self, candidate: Seat, questions: list[Question], started: float | None) -> Judgement | None:
        """Ask what is forced before anything is timed, sensitive prefixes included. A verdict, or None to go on.

        `started` is when the candidate was started, in `perf_counter` seconds (None: it was there already).
        """
        tools = self.tools
        for count, question in enumerate(questions, start=1):
            tools.progress(f"token forcing {count}/{len(questions)}")
            with self.clock.phase("warmup" if count == 1 else "forcing"):
                self.ask(candidate, question, "forcing")
            if count == 1 and started is not None:
                self.warmup_s = time.perf_counter() - started
        with self.clock.phase("forcing"):
            if objection := self.objection():
                return self.verdict("lossy", objection)
            tools.progress("probing where stock's leading tokens lie close together")
            for probe in self._probes():
                self._ask_probe(candidate, probe)
            if objection := self.objection():
                return self.verdict("lossy", objection)
            if self.source and self.tools.effort.variants and questions[0].sampling is None:
                self._ordinary = self._sensitive_questions(questions)
        return None

    def _sensitive_questions(self, forced: list[Question]) -> list[Probe]:
        tools, effort = self.tools, self.tools.effort
        bases = []
        for question in forced:
            text = tools.reference.text_of(question.part(0))
            for prompt in tools.questions.variants(question, effort.variants // len(forced), self._fresh):
                bases.append((prompt, text.ids if prompt.id == question.prompts[0].id else ()))
        want = Want(tools.longest_prompt, tools.max_new_tokens, effort.probes, 0)
        found = sensitive.ordinary(tools.reference, bases, want, tools.material.stop_ids)
        tools.questions.rng("order", self._fresh).shuffle(found)
        return found

    def between(self, candidate: Seat, *, rest: bool = False) -> None:
        """Ask one of the sensitive questions that look like timed ones, or all that are left of them."""
        while self._ordinary:
            self._ask_probe(candidate, self._ordinary.pop())
            if not rest:
                return

    def _ask_probe(self, candidate: Seat, probe: Probe) -> None:
        prompt = HiddenPrompt(probe.id, probe.category, probe.prefix)
        self.ask(candidate, Question.of(prompt, probe.sampling), "probing", probe)

    def _probes(self) -> list[Probe]:
        tools, effort = self.tools, self.tools.effort
        pool = tools.reference.pool
        pool.grow(max(effort.looked_through(self.source), pool.tokens + effort.pool_growth))
        return sensitive.choose(
            tools.reference,
            pool,
            self._scored,
            self.draw("probes", effort.probe_prompts),
            Want(tools.longest_prompt, tools.max_new_tokens, effort.probes, 2 * effort.probes),
            tools.material.stop_ids,
            tools.questions.rng("probes", self._fresh),
        )

    def ask(self, candidate: Seat, question: Question, phase: str, probe: Probe | None = None) -> Answer:
        """Ask the candidate. Raises ChildFailed for an answer that came sooner than the device can read the weights."""
        most = probe.max_new_tokens if probe else self.tools.max_new_tokens
        sampling = question.sampling
        try:
            reply = candidate.generate_batch(question.ids, most, sampling)
        except ChildFailed as failure:
            self.recorder.failed(phase, "candidate", question.prompts, most, failure, sampling=sampling, probe=probe)
            raise
        self.clock.generated(reply.seconds)
        number = self.recorder.asked(phase, "candidate", question.prompts, most, reply, sampling=sampling, probe=probe)
        answer = Answer(question, reply, number, probe)
        self.answers.append(answer)
        longest = max(len(text.ids) for text in reply.texts)
        least = self.tools.limit().seconds(longest, self._draft_tokens)
        if reply.seconds < least:
            raise ChildFailed(
                "invalid",
                f"The candidate gave {longest} tokens in {reply.seconds * 1e3:.1f} ms; reading the weights as often as "
                f"that takes {least * 1e3:.1f} ms on this device. The time or the text is not real.",
                CANDIDATE,
            )
        return answer

    def objection(self) -> str | None:
        """Have stock score what it has not scored yet; why the candidate is lossy, or None."""
        for answer in self.answers[self._forced :]:
            parts = answer.question.parts
            for part, text in zip(parts, answer.reply.texts, strict=True):
                most = answer.probe.max_new_tokens if answer.probe else self.tools.max_new_tokens
                self._scored.append(self.tools.reference.scored(part, text, most, answer.probe))
        self._forced = len(self.answers)
        material = self.tools.material
        self._scored = self.tools.reference.confirmed(self._scored, material.stop_ids)
        self.recorder.scored(self._scored)
        self._found = forcing.report(self._scored, self.tools.reference.floor(), material.stop_ids, material.decode)
        return forcing.objection(self._found)

    def verdict(self, verdict: Verdict, reason: str, comparison: Comparison | None = None) -> Judgement:
        return Judgement(verdict, reason, forcing=self._found, comparison=comparison)

    def compared(self, comparison: Comparison) -> Judgement:
        """The verdict after the timed pairs."""
        sentence = (
            f"{comparison.ratio:.2f}x the incumbent (95 % interval {comparison.low:.2f} to {comparison.high:.2f}; a "
            f"gain must clear {1 + comparison.threshold:.2f})"
        )
        if not bench.is_gain(comparison):
            return self.verdict("slower", sentence, comparison)
        return self.accepted(sentence, comparison)

    def accepted(self, sentence: str, comparison: Comparison | None = None) -> Judgement:
        """Accept it, unless one of the timed texts is lossy."""
        self.tools.progress("scoring the timed texts")
        with self.clock.phase("forcing"):
            objection = self.objection()
        if objection:
            return self.verdict("lossy", objection, comparison)
        assert self._found is not None
        return self.verdict("accepted", f"{sentence}; lossless on {self._found.tokens} tokens.", comparison)
