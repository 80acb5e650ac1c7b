"""The loop: from events to jobs. `advance` may be called by anyone, at any time, as often as one likes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection

from django.db import transaction
from django.utils import timezone

from engine.search.events import ActionFailed
from engine.search.policy import Action, decide
from engine.search.state import State
from webapp.searches.doorbell import ring_on_commit
from webapp.searches.journal import append_events, locked
from webapp.searches.models import Job, Search

log = logging.getLogger(__name__)


@transaction.atomic
def advance(search_id: int, *, served: Collection[str] = ()) -> None:
    """Bring the search's jobs in line with what its policy wants now, under the search's lock.

    Emit actions are carried out here; each other action becomes a job, once. Jobs that the policy no longer wants
    are dropped: queued ones always, running ones where the search is being cancelled (their lease is taken away,
    which stops the trial in flight). Workers are rung for new jobs when the transaction commits, except for one job
    of each place in `served`: the caller will look for that itself.
    """
    search = locked(search_id)
    if search.is_over:
        return
    state = append_events(search, ())
    while True:
        wanted = decide(state)
        emit = next((action for action in wanted if action.kind == "emit"), None)
        if emit is not None:
            state = append_events(search, emit.events)
            continue
        stuck = _ended_without_effect(search, wanted)
        if stuck is None:
            break
        reason = "it ended, but left the search where it was"
        Job.objects.filter(search=search, key=stuck.key).update(status=Job.Status.FAILED)
        state = append_events(search, (ActionFailed(stuck.key, reason),))
    if state.status != "paused":
        _ring(_synchronise(search, state, wanted), served)


def _ended_without_effect(search: Search, wanted: list[Action]) -> Action | None:
    """An action that is wanted though its job is done: without this it would run for ever."""
    done = set(
        search.jobs.filter(status=Job.Status.DONE, key__in=[a.key for a in wanted]).values_list("key", flat=True)
    )
    return next((action for action in wanted if action.key in done), None)


def _synchronise(search: Search, state: State, wanted: list[Action]) -> list[str]:
    """Make the search's jobs what is wanted; the places of those that are new in the queue."""
    jobs = {job.key: job for job in search.jobs.all()}
    keys = {action.key for action in wanted}
    over = state.status in ("cancelling", "finished", "failed")
    gone = [
        job.pk
        for job in jobs.values()
        if job.key not in keys and (job.status == Job.Status.QUEUED or (over and job.status == Job.Status.RUNNING))
    ]
    Job.objects.filter(pk__in=gone).update(
        status=Job.Status.DROPPED, lease_owner="", lease_expires=None, ended=timezone.now()
    )
    new = []
    for action in wanted:
        where = Job.CONTROL if action.where == "control" else search.where
        job = jobs.get(action.key)
        if job is None:
            Job.objects.create(search=search, key=action.key, kind=action.kind, where=where)
        elif job.status in (Job.Status.FAILED, Job.Status.DROPPED):
            Job.objects.filter(pk=job.pk).update(status=Job.Status.QUEUED, lost=0, ended=None)
        else:
            continue
        new.append(where)
    return new


def _ring(places: list[str], served: Collection[str]) -> None:
    counts = Counter(places)
    counts.subtract({where: 1 for where in served if where in counts})
    for where in counts.elements():
        ring_on_commit(where)
