"""The one place where an action becomes work: both shells, the command line and the web's worker, call it.

`perform` emits the events that an action leads to, in order. A failure of ours becomes an `action_failed` event, so
that `decide` can try again or end the search; a failure to store an event is the shell's and is raised to it.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engine.codec import to_json
from engine.deployment import Deployment
from engine.errors import ChildError, UserError
from engine.search.events import (
    ActionFailed,
    Body,
    BundleWritten,
    Event,
    HardwareProbed,
    TrialJudged,
    TrialProgress,
    TrialStarted,
)
from engine.search.journal import EVENTS, read_events
from engine.search.policy import Action
from engine.search.state import State

if TYPE_CHECKING:
    from engine.judge.workbench import Workbench

logger = logging.getLogger(__name__)
Emit = Callable[[Body], None]
Progress = Callable[[str], None]


class Bench:
    """Where a search's work is done: its folder, and the judge with its child processes, which are started when an
    action first needs them and stay for the next one. Made by `open_bench`; close it.

    `history` gives all events so far (for the bundle); `worker` names this process in the events.
    """

    def __init__(
        self,
        deployment: Deployment,
        folder: Path,
        seed: int,
        progress: Progress,
        history: Callable[[], Sequence[Event]],
        worker: str,
    ) -> None:
        self.deployment = deployment
        self.folder = folder
        self.seed = seed
        self.history = history
        self.worker = worker
        self.listener: Progress = progress
        self._idle_listener = progress
        self._workbench: Workbench | None = None

    @property
    def workbench(self) -> Workbench:
        """The judge, opened on first use."""
        if self._workbench is None:
            from engine.judge.workbench import Workbench

            self._workbench = Workbench(self.deployment, self.folder, self.seed, self._report)
        return self._workbench

    def close(self) -> None:
        """End every child process. The bench can be used again afterwards: it starts new ones."""
        workbench, self._workbench = self._workbench, None
        self.listener = self._idle_listener
        if workbench is not None:
            workbench.close()

    def _report(self, phase: str) -> None:
        self.listener(phase)


def open_bench(
    state: State,
    folder: Path,
    progress: Progress,
    *,
    history: Callable[[], Sequence[Event]] | None = None,
    worker: str | None = None,
) -> Bench:
    """The bench of the search `state`, whose files lie in `folder`. Cheap: starts nothing.

    `progress` is told, in a few words, what goes on. `history` defaults to the folder's events.jsonl, `worker` to
    this machine's name.
    """
    return Bench(
        state.deployment,
        folder,
        state.seed,
        progress,
        history or (lambda: read_events(folder / EVENTS)),
        worker or socket.gethostname(),
    )


def perform(action: Action, state: State, bench: Bench, emit: Emit) -> None:
    """Do `action`, which `decide(state)` returned, and emit what it leads to.

    Raises only what `emit` raises, and what is no `Exception` (KeyboardInterrupt, a shell's own cancellation); the
    caller closes the bench then. Anything else that goes wrong is emitted as `action_failed`.
    """
    guard = _Guard(emit)
    try:
        _WORK[action.kind](action, state, bench, guard)
    except (UserError, ChildError) as error:
        guard.check()
        logger.warning("action %s failed: %s", action.key, error)
        bench.close()
        # A child's last log lines follow the first one; they are for the log, not for a sentence.
        emit(ActionFailed(action.key, str(error).partition("\n")[0]))
    except Exception as error:
        guard.check()
        logger.exception("action %s failed", action.key)
        bench.close()
        emit(ActionFailed(action.key, f"{type(error).__name__}: {error}"))


class _Guard:
    """Remembers that `emit` itself failed, however the failure reaches us through the code that called it."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._error: Exception | None = None

    def __call__(self, body: Body) -> None:
        try:
            self._emit(body)
        except Exception as error:
            self._error = error
            raise

    def check(self) -> None:
        if self._error is not None:
            raise self._error


def _probe(action: Action, state: State, bench: Bench, emit: Emit) -> None:
    from engine.hardware import probe

    bench.listener("measuring this device")
    emit(HardwareProbed(to_json(probe(state.deployment.platform, state.deployment.dtype))))


def _stock(action: Action, state: State, bench: Bench, emit: Emit) -> None:
    emit(bench.workbench.measure_stock(action.data["name"]))


def _trial(action: Action, state: State, bench: Bench, emit: Emit) -> None:
    trial = action.data["trial"]
    emit(TrialStarted(trial, bench.worker, action.data["attempt"]))
    bench.listener = lambda phase: emit(TrialProgress(trial, phase))
    try:
        judgement = bench.workbench.judge(
            trial, action.data["plan"], action.data["incumbent"], fresh=action.data["fresh"]
        )
    finally:
        bench.listener = bench._idle_listener
    emit(TrialJudged(trial, judgement))


def _profile(action: Action, state: State, bench: Bench, emit: Emit) -> None:
    from engine.codec import from_json
    from engine.hardware import HardwareProfile

    hardware = from_json(HardwareProfile, state.hardware, what="the hardware profile")
    emit(bench.workbench.profile(action.data["plan"], action.data["round"], hardware))


def _standing(action: Action, state: State, bench: Bench, emit: Emit) -> None:
    data = action.data
    emit(bench.workbench.standing(data["plan"], data["trial"], data["over_incumbent"], data["final"]))


def _propose(action: Action, state: State, bench: Bench, emit: Emit) -> None:
    from engine.search.propose import propose_round
    from engine.search.start import lever_context

    for body in propose_round(state, lever_context(state.deployment), action.data["agents"]):
        emit(body)


def _bundle(action: Action, state: State, bench: Bench, emit: Emit) -> None:
    from engine.bundle import FILE_NAME, write

    bench.listener("writing the bundle")
    info = write(bench.history(), bench.folder / FILE_NAME)
    emit(BundleWritten(info.path.name, info.sha256, info.bytes))


def _emit(action: Action, state: State, bench: Bench, emit: Emit) -> None:
    for body in action.events:
        emit(body)


_WORK: dict[str, Callable[[Action, State, Bench, Emit], None]] = {
    "probe": _probe,
    "stock": _stock,
    "trial": _trial,
    "profile": _profile,
    "standing": _standing,
    "propose": _propose,
    "bundle": _bundle,
    "emit": _emit,
}
