"""The named parts of a decode step, and the clock that measures them.

Stage names, their order and their plain-language labels come from here alone; the dashboard, the cost
model and the levers all read this list.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Stage:
    name: str
    label: str


STAGES: tuple[Stage, ...] = (
    Stage("draft", "Drafting"),
    Stage("verify.qkv", "QKV projection"),
    Stage("verify.attention", "Attention"),
    Stage("verify.o", "Output projection"),
    Stage("verify.mlp", "MLP"),
    Stage("verify.lm_head", "LM head"),
    Stage("accept", "Acceptance and cache commit"),
    Stage("host", "Host work between stages"),
)
STAGE_NAMES: tuple[str, ...] = tuple(stage.name for stage in STAGES)
PREFILL = "prefill"  # measured and shown, but not part of a decode step


class StageClock(Protocol):
    """What the model and the decode loop call around each stage."""

    def stage(self, name: str) -> AbstractContextManager[None]: ...


class NullClock:
    """Measures nothing and costs nothing: used for every judged run."""

    _null = nullcontext()

    def stage(self, name: str) -> AbstractContextManager[None]:
        return self._null


class WallClock:
    """Adds up wall seconds by stage on a device that finishes work before it returns (CPU).

    Time spent inside a nested stage is charged to the inner one only.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._stack: list[list[float]] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        inner = [0.0]
        self._stack.append(inner)
        start = time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - start
            self._stack.pop()
            self.seconds[name] = self.seconds.get(name, 0.0) + elapsed - inner[0]
            if self._stack:
                self._stack[-1][0] += elapsed


NULL_CLOCK = NullClock()
