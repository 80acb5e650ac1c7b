"""What a worker does when its doorbell rings: it drains the jobs that it may run, one after another.

The judge's stock process stays loaded between the jobs of one search, so a drain does not end while its search
still has work in flight elsewhere that may give it more, and it does the search's control jobs by itself.

Timing blocks on a shared CPU. Web and control worker run at nice 10, below the judged processes; what else ticks
(heartbeat, reconciler, presence) is one small query every few seconds. Beside that, no event of a timing block is
announced before the block is over: the first "timing" phase is stored and announced, the drain waits a moment until
open pages have drawn it, and what follows is stored quietly and announced together with the first event after the
block.
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
from types import ModuleType

from django.conf import settings
from django.db import transaction

from engine.search.events import ActionFailed, Body, StatusChanged, TrialProgress
from engine.search.perform import Bench
from engine.search.policy import Action, decide
from engine.search.state import FoldError, State
from webapp.searches.advance import advance
from webapp.searches.interrupts import Interrupted, Interrupts
from webapp.searches.journal import append_events, folder_of, locked
from webapp.searches.leases import MAX_LOST, WORKABLE, Heartbeat, Lease, LeaseLost, claim, new_owner
from webapp.searches.models import Event, Job
from webapp.searches.projection import PROJECTIONS
from webapp.searches.worker import Worker

log = logging.getLogger(__name__)
LINGER_SECONDS = 60.0
POLL_SECONDS = 0.2
SETTLE_SECONDS = 0.3
IDLE_SECONDS = 5.0
"""A search that nobody worked on for longer was waiting: the time is not charged to its budget."""


class Drain:
    """One drain of one worker. `run` returns the number of jobs that it carried out."""

    def __init__(self, worker: Worker, engine: ModuleType | None = None) -> None:
        self.worker = worker
        self.owner = new_owner(worker.name)
        self.engine = engine or importlib.import_module(settings.PERFORM)
        self.interrupts = Interrupts()
        self._bench: Bench | None = None
        self._search: int | None = None
        self._wait = threading.Event()

    def run(self) -> int:
        count = 0
        with self.interrupts.installed():
            try:
                while self.interrupts.reason != "stop" and (lease := self._next()) is not None:
                    count += self._carry_out(lease)
            finally:
                self._close_bench()
        return count

    # Which job ---------------------------------------------------------------------------------------------------

    def _next(self) -> Lease | None:
        deadline = time.monotonic() + LINGER_SECONDS
        while True:
            lease = self._claim()
            if lease is not None or not self._may_get_more() or time.monotonic() > deadline:
                return lease
            if self.interrupts.reason == "stop":
                return None
            self._wait.wait(POLL_SECONDS)

    def _claim(self) -> Lease | None:
        if self._search is not None and not self.worker.is_control:
            lease = claim(self.owner, self._places, only=self._search)
            if lease is not None:
                return lease
        return claim(self.owner, [self.worker.kind], prefer=self._search)

    @property
    def _places(self) -> list[str]:
        """Where jobs of the search whose models are loaded are done by this worker."""
        return [self.worker.kind] if self.worker.is_control else [self.worker.kind, Job.CONTROL]

    def _may_get_more(self) -> bool:
        """Whether the search whose models are loaded has work in flight elsewhere."""
        if self._bench is None or self._search is None or self.worker.is_control:
            return False
        active = Job.objects.filter(search_id=self._search, search__status__in=WORKABLE)
        return active.filter(status__in=[Job.Status.QUEUED, Job.Status.RUNNING]).exists()

    # One job -----------------------------------------------------------------------------------------------------

    def _carry_out(self, lease: Lease) -> bool:
        """Do the job; whether it was carried out to its end."""
        if self._search != lease.search_id:
            self._close_bench()
            self._search = lease.search_id
        try:
            return self._perform(lease)
        except LeaseLost as lost:
            log.warning("%s", lost)
        except FoldError as error:
            log.exception("%s of search %s told a contradiction", lease.key, lease.search_id)
            self._finish(lease, Job.Status.FAILED, ActionFailed(lease.key, str(error)))
        except Interrupted:
            if self.interrupts.reason == "stop":
                self._give_back(lease)
            else:
                log.info("%s of search %s was stopped.", lease.key, lease.search_id)
        self._close_bench()
        return False

    def _perform(self, lease: Lease) -> bool:
        if lease.lost >= MAX_LOST:
            reason = f"the worker was lost {lease.lost} times while it ran; the log of the workers may say why"
            self._finish(lease, Job.Status.FAILED, ActionFailed(lease.key, reason))
            return False
        state, action = self._begin(lease)
        if action is None:
            self._finish(lease, Job.Status.DROPPED)
            return False
        log.info("%s of search %s begins (attempt %s).", lease.key, lease.search_id, lease.attempt)
        emit = _Emitter(lease, self.interrupts, settle=self.worker.kind == "cpu")
        with Heartbeat(lease, self.interrupts.lost), self.interrupts.armed():
            self.engine.perform(action, state, self._open_bench(state), emit)
        self._finish(lease, Job.Status.FAILED if emit.failed else Job.Status.DONE)
        return not emit.failed

    def _begin(self, lease: Lease) -> tuple[State, Action | None]:
        """The state, and the action of the lease's key if the policy still wants it."""
        with transaction.atomic():
            search = locked(lease.search_id)
            lease.extend()
            state = PROJECTIONS.state(search.pk)
            working = search.jobs.filter(status=Job.Status.RUNNING).exclude(pk=lease.job_id).exists()
            idle = not working and time.time() - state.time > IDLE_SECONDS
            if state.status == "running" and (idle or lease.lost):
                state = append_events(search, (StatusChanged("running", f"{self.worker.name}, which went on with it"),))
        return state, next((action for action in decide(state) if action.key == lease.key), None)

    def _finish(self, lease: Lease, status: Job.Status, *bodies: Body) -> None:
        """End the job and let the search go on, in one transaction."""
        with self.interrupts.shielded(), transaction.atomic():
            search = locked(lease.search_id)
            lease.end(status)
            append_events(search, bodies)
            advance(lease.search_id, served=self._places)

    def _give_back(self, lease: Lease) -> None:
        """The worker ends: another may take the job at once."""
        try:
            lease.end(Job.Status.QUEUED)
        except LeaseLost:
            return
        log.info("%s of search %s goes back to the queue.", lease.key, lease.search_id)

    # The bench ---------------------------------------------------------------------------------------------------

    def _open_bench(self, state: State) -> Bench:
        if self._bench is None:
            assert self._search is not None
            search_id = self._search
            self._bench = self.engine.open_bench(
                state,
                folder_of(search_id),
                lambda phase: log.info("search %s: %s", search_id, phase),
                history=lambda: [row.value for row in Event.objects.filter(search_id=search_id).order_by("seq")],
                worker=self.worker.name,
            )
        return self._bench

    def _close_bench(self) -> None:
        bench, self._bench = self._bench, None
        if bench is not None:
            bench.close()


class _Emitter:
    """Stores the events of one job, fenced by its lease. Raises LeaseLost where the lease is gone."""

    def __init__(self, lease: Lease, interrupts: Interrupts, *, settle: bool) -> None:
        self._lease = lease
        self._interrupts = interrupts
        self._settle = settle
        self._timing = False
        self.failed = False

    def __call__(self, body: Body) -> None:
        timing = self._settle and isinstance(body, TrialProgress) and body.phase.startswith("timing")
        with self._interrupts.shielded():
            with transaction.atomic():
                search = locked(self._lease.search_id)
                self._lease.extend()
                append_events(search, (body,), quiet=timing and self._timing)
            if timing and not self._timing:
                time.sleep(SETTLE_SECONDS)
        self._timing = timing
        self.failed = self.failed or isinstance(body, ActionFailed)
