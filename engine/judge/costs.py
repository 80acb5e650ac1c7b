"""Where a trial's seconds go: start, warm-up, forcing, timing, and how many of them texts were being written in."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from engine.judge.report import Costs

Phase = Literal["start", "warmup", "forcing", "timing"]


class CostClock:
    """Attributes the seconds of one trial to phases. Each second counts once: a phase inside another one takes its
    seconds from the outer. `generated` is counted beside the phases: it lies inside them. `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[Phase, float] = {"start": 0.0, "warmup": 0.0, "forcing": 0.0, "timing": 0.0}
        self._generating = 0.0
        self._open: list[Phase] = []
        self._since = 0.0

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """Count what happens inside as `name`, also where it raises."""
        self._settle()
        self._open.append(name)
        try:
            yield
        finally:
            self._settle()
            self._open.pop()

    def generated(self, seconds: float) -> None:
        """Add the seconds of an answer in which stock, incumbent or candidate wrote a text that the verdict needs."""
        self._generating += seconds

    def costs(self) -> Costs:
        """The split so far; phases that are still open count up to now."""
        self._settle()
        return Costs(
            start_s=self._seconds["start"],
            warmup_s=self._seconds["warmup"],
            forcing_s=self._seconds["forcing"],
            timing_s=self._seconds["timing"],
            generating_s=self._generating,
        )

    def _settle(self) -> None:
        """Give the seconds since the last change to the innermost open phase."""
        now = self._clock()
        if self._open:
            self._seconds[self._open[-1]] += now - self._since
        self._since = now
