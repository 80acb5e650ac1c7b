"""The timed pairs of a trial: candidate and incumbent on the same prompts, on a machine that is theirs alone."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace

import numpy as np

from engine.judge import bench
from engine.judge.conditions import Watch
from engine.judge.process import ChildFailed
from engine.judge.questions import Question
from engine.judge.report import Comparison, Pair
from engine.judge.rounds import MOST_VOID, NotIdle, timed_rounds
from engine.judge.seats import CANDIDATE, BatchReply, Seat
from engine.judge.trial import Trial

FIRST_REPEATS = 4
"""A/A repeats that the first comparison of a search waits for."""
WARMUP_TOKENS = 8
ONE_SIDED = 4
"""Void answers by which the candidate's may outnumber the incumbent's: four of four by chance are one in sixteen, of
comparisons in which so much was disturbed at all."""


@dataclass(frozen=True)
class Timed:
    """One side's answer in a round, and its number in the record."""

    reply: BatchReply
    number: int


def pair_of(prompt: str, reference: BatchReply, candidate: BatchReply) -> Pair:
    """One paired observation; the tokens of a batch count together."""
    return Pair(prompt, reference.seconds, candidate.seconds, _tokens(reference), _tokens(candidate))


def seconds_per_token(reply: BatchReply) -> float:
    return reply.seconds / _tokens(reply)


def _tokens(reply: BatchReply) -> int:
    return sum(len(text.ids) for text in reply.texts)


def time_alone(trial: Trial, candidate: Seat, questions: list[Question]) -> str:
    """Each question twice: the first times are the plan's, and their ratios to the second are this device's A/A.

    A machine that does not become idle refuses nobody here: the plan is timed all the same, and the sentence says so.
    """
    watch, count = trial.tools.watch(), len(questions)

    def twice(question: Question) -> tuple[BatchReply, BatchReply]:
        with watch.block(candidate.child.pid):
            first = trial.ask(candidate, question, "timing").reply
        with watch.block(candidate.child.pid):
            return first, trial.ask(candidate, question, "timing").reply

    def stop(rounds: list[list[tuple[BatchReply, BatchReply]]]) -> bool:
        trial.tools.progress(f"timing {len(rounds)}/{count}")
        return len(rounds) >= count

    busy = ""
    with trial.clock.phase("timing"):
        asked = [*questions, *trial.draw("undecided", MOST_VOID)]
        try:
            rounds = timed_rounds(asked, [twice], stop, watch=watch, enough=count).valid
        except NotIdle:
            rounds = timed_rounds(questions, [twice]).valid
            busy = ", on a machine that others used, too"
    both = [(each.prompt.id, *each.results[0]) for each in rounds]
    if not trial.source:  # foreign code must not say how much this machine's times vary
        trial.tools.store.keep_repeats([bench.log_ratio(pair_of(*each)) for each in both])
    return f"{statistics.median(first.tok_s for _, first, _ in both):.1f} tokens/s alone{busy}"


class Duel:
    """Candidate against rival in ABBA rounds.

    On its first questions the rival answers twice in a row: these are its A/A. They lie as close in time as a pair
    does, so a drift of the machine widens neither. `alone` asks the rival before any code of a source candidate runs;
    if it is slower beside it, the comparison is refused.
    """

    def __init__(self, trial: Trial, rival: Seat, questions: list[Question]) -> None:
        self._trial = trial
        self._rival = rival
        self._questions = questions
        self._alone: dict[Question, float] = {}

    def alone(self, count: int) -> None:
        """Time the rival by itself on the first `count` questions."""
        self._warm()
        for question in self._questions[:count]:
            self._alone[question] = self._ask_alone(question)

    def compare(self, candidate: Seat) -> Comparison:
        """Raises NotIdle where the machine was not idle for long enough, and ChildFailed of the candidate's role where
        it worked out of turn or the rival was slower beside it."""
        trial, tools = self._trial, self._trial.tools
        rule = tools.effort.rule
        spare = trial.draw("undecided", rule.most - rule.pairs + MOST_VOID)
        watch = tools.watch()
        wanted = max(tools.effort.repeats, FIRST_REPEATS - len(tools.store.repeats))
        repeats: list[float] = []
        pending: list[float] = []  # of the round that is not known to count yet
        valid = 0
        if not self._alone:
            self._warm()

        def ask_rival(question: Question) -> Timed:
            pending.clear()
            with watch.block(self._rival.child.pid):
                first = self._ask_rival(question, "timing")
            if len(repeats) >= wanted:
                return first
            with watch.block(self._rival.child.pid):
                second = self._ask_rival(question, "repeat")
            pending.append(bench.log_ratio(pair_of(question.id, first.reply, second.reply)))
            # The answer beside the candidate's turn counts: the rival goes first in the first round, the third, ...
            return second if valid % 2 == 0 else first

        def ask_candidate(question: Question) -> Timed:
            with watch.block(candidate.child.pid):
                answer = trial.ask(candidate, question, "timing")
            return Timed(answer.reply, answer.number)

        def stop(rounds: list[list[Timed]]) -> bool:
            nonlocal valid
            valid = len(rounds)
            repeats.extend(pending)
            pending.clear()
            tools.progress(f"timing {valid}/{rule.pairs if valid <= rule.pairs else rule.most}")
            trial.between(candidate)
            ratios = [bench.ratio(pair_of("", one.reply, other.reply)) for one, other in rounds]
            return bench.finished(ratios, [*tools.store.repeats, *repeats], rule)

        with trial.clock.phase("timing"):
            rounds = timed_rounds(
                [*self._questions[: rule.pairs], *spare],
                [ask_rival, ask_candidate],
                stop,
                watch=watch,
                enough=rule.pairs,
            )
        tools.store.keep_repeats(repeats)
        for reason, round_ in zip(rounds.reasons, rounds.void, strict=False):
            trial.recorder.voided(reason, *(side.number for side in round_.results))
        for number, round_ in enumerate(rounds.valid):
            trial.recorder.paired(number, *(side.number for side in round_.results))
        if watch.ran_out_of_turn(candidate.child.pid):
            raise ChildFailed("invalid", "The candidate worked while it was not its turn.", CANDIDATE)
        self._refuse_chosen_rounds(watch, candidate)
        found = bench.summarise(
            "the incumbent",
            [pair_of(each.prompt.id, *(side.reply for side in each.results)) for each in rounds.valid],
            tools.store.repeats,
            warmup_s=trial.warmup_s,
        )
        slowdown = None
        if self._alone:
            if gain := bench.is_gain(found):
                trial.between(candidate, rest=True)
            beside = {each.prompt: seconds_per_token(each.results[0].reply) for each in rounds.valid}
            slowdown = self._slowdown(candidate, beside, late=gain)
        return replace(found, conditions=watch.conditions(rounds.reasons, slowdown))

    def _refuse_chosen_rounds(self, watch: Watch, candidate: Seat) -> None:
        """A disturbance hits both sides alike, unless one of them makes it to get rid of rounds that it dislikes."""
        mine, theirs = watch.disturbed[candidate.child.pid], watch.disturbed[self._rival.child.pid]
        if self._trial.source and mine - theirs >= ONE_SIDED:
            raise ChildFailed(
                "invalid",
                f"Other processes ran in {mine} of the candidate's turns and in {theirs} of the incumbent's: who "
                "starts them chooses which rounds count.",
                CANDIDATE,
            )

    def _slowdown(self, candidate: Seat, beside: dict[Question, float], *, late: bool) -> float | None:
        """How much slower the rival was beside the candidate than alone; None where that was not asked for.

        Where it was slower than before, it is timed alone once more after the candidate is gone. If it stays as slow,
        the machine has become slower, which both sides felt alike; only what ends with the candidate is its doing. The
        last questions of a candidate that would win (`late`) are looked at as well.
        """
        first = [question for question in self._alone if question in beside]
        last = [question for question in beside if question not in self._alone][-len(self._alone) :] if late else []
        repeats = self._trial.tools.store.repeats
        sigma = float(bench.pair_sigma(np.asarray(repeats))) if repeats else 0.0

        def against(questions: list[Question], alone: list[float]) -> bench.Slowdown:
            return bench.reference_slowdown(alone, [beside[each] for each in questions], sigma)

        def again(question: Question) -> float:
            """The slower one of two times."""
            return max(self._ask_alone(question), self._ask_alone(question))

        seen = 1.0
        if first:
            before = against(first, [self._alone[each] for each in first])
            seen = before.ratio
            if before.slowed:
                candidate.child.kill()
                after = against(first, [again(each) for each in first])
                seen = min(before.ratio, after.ratio)
                if after.slowed:
                    raise _slowed(min(before, after, key=lambda found: found.ratio))
        if last:
            candidate.child.kill()
            found = against(last, [again(each) for each in last])
            if found.slowed:
                raise _slowed(found)
        return seen

    def _warm(self) -> None:
        """It stood still for long, in which a candidate that was being forced was warm."""
        self._rival.generate(self._questions[0].prompts[0].ids, WARMUP_TOKENS, self._questions[0].part(0).sampling)

    def _ask_alone(self, question: Question) -> float:
        """Seconds per token of the rival after a pass of stock: as in a pair, another model's weights were read between
        two of its answers, so that caches are no warmer here."""
        prompt = question.prompts[0].ids
        self._trial.tools.reference.seat().score(prompt, prompt[-1:])
        return seconds_per_token(self._ask_rival(question, "alone").reply)

    def _ask_rival(self, question: Question, phase: str) -> Timed:
        trial = self._trial
        most, sampling = trial.tools.max_new_tokens, question.sampling
        reply = self._rival.generate_batch(question.ids, most, sampling)
        trial.clock.generated(reply.seconds)
        number = trial.recorder.asked(phase, "incumbent", question.prompts, most, reply, sampling=sampling)
        return Timed(reply, number)


def _slowed(found: bench.Slowdown) -> ChildFailed:
    sentence = found.sentence
    return ChildFailed("invalid", f"{sentence[0].upper()}{sentence[1:]}.", CANDIDATE)
