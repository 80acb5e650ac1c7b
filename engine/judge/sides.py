"""Trusted decoders side by side: the same questions, in balanced order. Nothing is accepted or refused by it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.judge.conditions import Watch
from engine.judge.questions import Question
from engine.judge.report import Conditions
from engine.judge.rounds import NotIdle, Round, timed_rounds
from engine.judge.seats import BatchReply, Seat


def side_by_side(
    seats: Sequence[Seat],
    questions: Sequence[Question],
    count: int,
    max_new_tokens: int,
    watch: Watch,
    progress: Callable[[str], None],
) -> tuple[list[Round[Question, BatchReply]], Conditions]:
    """`count` rounds of all `seats`; the further questions replace void ones.

    On a machine that does not become idle the rounds are made all the same, and the conditions tell what was seen.
    """

    def side(seat: Seat) -> Callable[[Question], BatchReply]:
        def ask(question: Question) -> BatchReply:
            with watch.block(seat.child.pid):
                return seat.generate_batch(question.ids, max_new_tokens, question.sampling)

        return ask

    def stop(rounds: list[list[BatchReply]]) -> bool:
        progress(f"timing side by side {len(rounds)}/{count}")
        return len(rounds) >= count

    sides = [side(seat) for seat in seats]
    try:
        rounds = timed_rounds(questions, sides, stop, watch=watch, enough=count)
    except NotIdle as noise:
        return timed_rounds(questions[:count], sides).valid, watch.conditions(noise.void)
    return rounds.valid, watch.conditions(rounds.reasons)
