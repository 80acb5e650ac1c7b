"""The order of timed questions, and rounds that do not count because the machine was not ours alone.

Every side answers a prompt once, in ABBA order over the rounds that count. A void round is thrown away whole, kept with
its reason, and made up for with the next prompt: nobody is asked the same prompt twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

P = TypeVar("P")
T = TypeVar("T")
S = TypeVar("S")

MOST_VOID = 7
"""Void rounds in a comparison, as many as it usually has pairs. More of them would let whoever can disturb the machine
choose which rounds count."""


class Watching(Protocol):
    """What `conditions.Watch` offers."""

    def before_round(self) -> str | None:
        """Wait for an idle machine; why it is not, or None."""

    def after_round(self) -> str | None:
        """Why the round does not count, or None."""


class NotIdle(Exception):
    """The machine was not idle for long enough to compare anything. `void` are the reasons, `valid` how many rounds
    counted."""

    def __init__(self, void: Sequence[str], valid: int) -> None:
        self.void = tuple(void)
        self.valid = valid
        reasons = "; ".join(dict.fromkeys(self.void))
        super().__init__(f"this device was not idle: {reasons} ({len(self.void)} rounds void, {valid} counted)")


@dataclass(frozen=True)
class Round(Generic[P, T]):
    """What was asked and the results, in the order of sides."""

    prompt: P
    results: list[T]


@dataclass(frozen=True)
class Rounds(Generic[P, T]):
    """The rounds that count, and those that do not with the reasons beside them."""

    valid: list[Round[P, T]]
    void: list[Round[P, T]]
    reasons: tuple[str, ...]


def balanced(round_index: int, sides: Sequence[S]) -> Sequence[S]:
    """The order of sides in one round: forwards, backwards, forwards, ... (ABBA for two)."""
    return sides if round_index % 2 == 0 else list(reversed(sides))


def timed_rounds(
    prompts: Iterable[P],
    sides: Sequence[Callable[[P], T]],
    stop: Callable[[list[list[T]]], bool] = lambda rounds: False,
    *,
    watch: Watching | None = None,
    enough: int = 1,
    most_void: int = MOST_VOID,
) -> Rounds[P, T]:
    """Ask every side every prompt once until `stop` says so of the valid rounds so far, or prompts run out.

    With a `watch`, rounds that it calls void are replaced, at most `most_void` of them; the order of sides goes by the
    number of valid rounds, so it stays balanced. Raises NotIdle where the machine does not become idle, voids are used
    up, or void rounds used up the prompts, before `enough` rounds count; with enough of them the comparison ends there.
    """
    valid: list[Round[P, T]] = []
    void: list[Round[P, T]] = []
    reasons: list[str] = []
    for prompt in prompts:
        busy = watch.before_round() if watch else None
        if busy is not None:
            reasons.append(busy)
            break
        results: dict[int, T] = {}
        for side in balanced(len(valid), range(len(sides))):
            results[side] = sides[side](prompt)
        done = Round(prompt, [results[side] for side in range(len(sides))])
        busy = watch.after_round() if watch else None
        if busy is not None:
            reasons.append(busy)
            void.append(done)
            if len(void) > most_void:
                break
            continue
        valid.append(done)
        if stop([each.results for each in valid]):
            return Rounds(valid, void, tuple(reasons))
    if reasons and len(valid) < enough:
        raise NotIdle(reasons, len(valid))
    return Rounds(valid, void, tuple(reasons))
