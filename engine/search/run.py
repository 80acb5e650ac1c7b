"""A search in one process: the shell of the command line around `decide`, `perform` and `fold`.

The event file is the search: what is not in it did not happen, and a search that was killed goes on from it.
Ctrl-C once cancels: the action in flight is given up, its children end, and the search ends in good order, with a
bundle where it has a better plan. Ctrl-C twice leaves at once; `resume` goes on from there.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from engine import __version__
from engine.deployment import Deployment
from engine.errors import UserError
from engine.plan import Plan
from engine.search.console import Screen
from engine.search.events import Body, Budget, Event, SearchStarted, StatusChanged, storable
from engine.search.journal import EVENTS, Journal
from engine.search.perform import Bench, open_bench, perform
from engine.search.policy import decide
from engine.search.start import starting_plan
from engine.search.state import FoldError, State, fold, fold_all
from engine.search.view import view

LOG = "search.log"


def search(
    deployment: Deployment, budget: Budget, seed: int, folder: Path, screen: Screen, plan: Plan | None = None
) -> State:
    """Run a new search to its end, from `plan` or from the initial plan of the deployment.

    Everything that can be wrong with the deployment is refused, with UserError, before anything is written.
    Raises KeyboardInterrupt on the second Ctrl-C.
    """
    start = starting_plan(deployment, plan)
    with Journal(folder) as journal:
        if journal.events:
            raise UserError(
                f"{folder} already holds a search; go on with it by --resume {folder}, or choose another --out.",
                code="exists",
                field="out",
            )
        return _Shell(journal, screen).run(SearchStarted(deployment, budget, seed, start, __version__))


def resume(folder: Path, screen: Screen) -> State:
    """Go on with the search in `folder` to its end; one that has ended is only read."""
    if not (folder / EVENTS).is_file():
        raise UserError(f"There is no search in {folder}: it has no {EVENTS}.", code="missing", field="resume")
    with Journal(folder) as journal:
        if not journal.events:
            raise UserError(
                f"The search in {folder} was stopped before it began; start it again with `search`.",
                code="empty",
                field="resume",
            )
        shell = _Shell(journal, screen)
        if shell.state is not None and shell.state.finished is None:
            starting_plan(shell.state.deployment, shell.state.initial_plan)
        # Time in which nobody worked is not charged to the budget: `running` says that somebody works again.
        running = shell.state is not None and shell.state.status in ("running", "paused")
        return shell.run(StatusChanged("running", "command line, resumed") if running else None)


class _Cancelled(BaseException):
    """Ctrl-C while an action runs. No `Exception`, so that no handler in between takes it for a failure."""


class _Interrupts:
    """Ctrl-C, once and twice. The action in flight is interrupted only while `armed`."""

    def __init__(self) -> None:
        self.count = 0
        self._armed = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle SIGINT; outside the main thread, where Python allows no handlers, change nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGINT, self._on_signal)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    @contextmanager
    def armed(self) -> Iterator[None]:
        self._armed = True
        try:
            self._raise_if_due()
            yield
        finally:
            self._armed = False

    @contextmanager
    def shielded(self) -> Iterator[None]:
        """Nothing is interrupted in here, such as while an event is stored; it is right afterwards."""
        armed, self._armed = self._armed, False
        try:
            yield
        finally:
            self._armed = armed
        self._raise_if_due()

    def _raise_if_due(self) -> None:
        if self._armed and self.count:
            self._armed = False  # once: clean-up on the way out is not interrupted again
            raise _Cancelled

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count > 1:
            raise KeyboardInterrupt
        self._raise_if_due()


class _Shell:
    """Decides, performs, stores, folds and shows, one action at a time."""

    def __init__(self, journal: Journal, screen: Screen) -> None:
        self.journal = journal
        self.screen = screen
        self.interrupts = _Interrupts()
        try:
            self.state: State | None = fold_all(journal.events) if journal.events else None
        except FoldError as error:
            raise UserError(
                f"The event file in {journal.folder} is damaged: {error}.", code="damaged", field="resume"
            ) from None

    def run(self, first: Body | None) -> State:
        with _logging_to(self.journal.folder / LOG), self.interrupts.installed(), self.screen:
            if first is not None:
                self.emit(first)
            assert self.state is not None
            bench = open_bench(
                self.state,
                self.journal.folder,
                self.screen.progress,
                history=lambda: tuple(self.journal.events),
            )
            try:
                self._drive(bench)
            finally:
                bench.close()
            return self.state

    def _drive(self, bench: Bench) -> None:
        while self.state is not None and self.state.finished is None:
            if self.interrupts.count and self.state.status != "cancelling":
                self.emit(StatusChanged("cancelling", "Ctrl-C"))
            actions = decide(self.state)
            if not actions:
                raise RuntimeError("the search neither goes on nor ends")
            try:
                if actions[0].where == "device":
                    with self.interrupts.armed():
                        perform(actions[0], self.state, bench, self.emit)
                else:
                    perform(actions[0], self.state, bench, self.emit)
            except _Cancelled:
                self.screen.say("Cancelling; Ctrl-C again leaves at once.")
                bench.close()

    def emit(self, body: Body) -> None:
        """Store, fold and show one event."""
        with self.interrupts.shielded():
            last = self.journal.events[-1].time if self.journal.events else 0.0
            event = Event(len(self.journal.events) + 1, max(time.time(), last), storable(body))
            state = fold(self.state, event)  # refuses a contradiction before it is stored
            self.journal.append(event)
            self.state = state
            self.screen.event(event, view(state))


@contextmanager
def _logging_to(path: Path) -> Iterator[None]:
    """The engine's log goes to the search's folder, not over the screen."""
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    log = logging.getLogger("engine")
    log.addHandler(handler)
    before, log.propagate = log.propagate, False
    try:
        yield
    finally:
        log.propagate = before
        log.removeHandler(handler)
        handler.close()
