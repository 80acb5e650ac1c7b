"""Stopping the action in flight: told by a signal, raised in the main thread, never while an event is stored."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Literal

Reason = Literal["", "stop", "lost"]


class Interrupted(BaseException):
    """The action in flight is given up. No `Exception`, so that nothing in between takes it for a failure."""


class Interrupts:
    """SIGTERM ("stop": the worker is asked to end) and a lost lease ("lost") interrupt what runs while `armed`.

    The newest reason stays in `reason`; "stop" is not replaced by "lost". Outside the main thread, where Python
    has no signal handlers, the interruption comes at the next `shielded` block instead.
    """

    _LOST = signal.SIGUSR2

    def __init__(self) -> None:
        self.reason: Reason = ""
        self._armed = False
        self._thread = threading.current_thread()
        self._signals = self._thread is threading.main_thread()

    @contextmanager
    def installed(self) -> Iterator[None]:
        if not self._signals:
            yield
            return
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, self._LOST)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def lost(self) -> None:
        """Called from the heartbeat's thread."""
        self._note("lost")
        if self._signals and self._thread.ident is not None:
            signal.pthread_kill(self._thread.ident, self._LOST)

    @contextmanager
    def armed(self) -> Iterator[None]:
        """What runs in here may be interrupted. A loss of an earlier lease does not count."""
        if self.reason == "lost":
            self.reason = ""
        self._armed = True
        try:
            self._raise_if_due()
            yield
        finally:
            self._armed = False

    @contextmanager
    def shielded(self) -> Iterator[None]:
        """Nothing is interrupted in here; it is right afterwards."""
        armed, self._armed = self._armed, False
        try:
            yield
        finally:
            self._armed = armed
        self._raise_if_due()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._note("stop" if number == signal.SIGTERM else "lost")
        self._raise_if_due()

    def _note(self, reason: Reason) -> None:
        if self.reason != "stop":
            self.reason = reason

    def _raise_if_due(self) -> None:
        if self._armed and self.reason:
            self._armed = False  # once: clean-up code is not interrupted again
            raise Interrupted(self.reason)
