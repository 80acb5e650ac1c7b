"""Appending events: the only place that writes `Event` rows and their projections."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from django.db import connection
from django.db.models import QuerySet

from engine.paths import searches_dir
from engine.search import events as ev
from engine.search.events import Body
from engine.search.events import Event as EngineEvent
from engine.search.state import State, fold
from webapp.searches.doorbell import wake_pages_on_commit
from webapp.searches.models import Bundle, Event, Round, Search, Trial
from webapp.searches.projection import PROJECTIONS


def locked(search_id: int) -> Search:
    """The search's row, locked until the transaction ends (SQLite: the whole database is, from its beginning)."""
    if not connection.in_atomic_block:
        raise RuntimeError("a row can be locked only inside a transaction")
    return Search.objects.select_for_update().get(pk=search_id)


def folder_of(search_id: int) -> Path:
    """Where the engine keeps files of this search on this machine."""
    folder = folder_path(search_id)
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def folder_path(search_id: int) -> Path:
    """The same folder, which need not be there."""
    return searches_dir() / f"web-{search_id}"


def append_events(search: Search, bodies: Iterable[Body], *, quiet: bool = False) -> State:
    """Number, check, store and project events of a search whose row the caller has locked; the state after them.

    Each event is folded before it is stored, so one that contradicts the log (`FoldError`) is never written.
    Open pages are woken when the transaction commits, unless `quiet`.
    """
    state = PROJECTIONS.state(search.pk) if search.last_seq else None
    rows = []
    for body in bodies:
        search.last_seq += 1
        body = ev.storable(body)
        event = EngineEvent(search.last_seq, time.time(), body)
        state = fold(state, event)
        data = event.to_json()
        rows.append(Event(search=search, seq=event.seq, time=event.time, type=data["type"], data=data["data"]))
        _project(search, body, event.time)
    if state is None:
        raise ValueError("no events to append to a search that has none")
    if rows:
        Event.objects.bulk_create(rows)
        search.status = state.status
        search.save()
        PROJECTIONS.keep_on_commit(search.pk, state)
        if not quiet:
            wake_pages_on_commit(search.pk)
    return state


def _project(search: Search, body: Body, when: float) -> None:
    """Bring the rows that repeat this event up to date; `search` itself is saved by the caller."""
    match body:
        case ev.RoundStarted(round=number):
            search.rounds = number
            Round.objects.create(search=search, number=number)
        case ev.RoundEnded(round=number, improved=improved):
            Round.objects.filter(search=search, number=number).update(improved=improved)
        case ev.CandidateProposed():
            Trial.objects.create(
                search=search,
                number=body.trial,
                round=body.round,
                kind=body.kind,
                agent=body.agent,
                arm=body.arm,
                stage=body.stage,
                changes=body.changes,
            )
        case ev.TrialStarted():
            _trial(search, body.trial).update(status=Trial.Status.RUNNING, worker=body.worker, phase="")
        case ev.TrialProgress():
            _trial(search, body.trial).exclude(status=Trial.Status.JUDGED).update(phase=body.phase)
        case ev.TrialJudged(judgement=judgement):
            comparison = judgement.comparison
            search.trials += 1
            _trial(search, body.trial).update(
                status=Trial.Status.JUDGED,
                phase="",
                verdict=judgement.verdict,
                reason=judgement.reason,
                ratio=comparison.ratio if comparison else None,
                low=comparison.low if comparison else None,
                high=comparison.high if comparison else None,
                accept_length=judgement.accept_length,
                seconds=judgement.seconds,
            )
        case ev.IncumbentChanged(over_autoregressive=comparison) if comparison is not None:
            search.speedup = (
                comparison.ratio if comparison.low > 1.0 else None
            )  # an interval that holds 1 claims nothing
        case ev.BundleWritten():
            _store_bundle(search, body)
        case ev.SearchFinished():
            search.finished = datetime.fromtimestamp(when, UTC)
        case _:
            pass


def _trial(search: Search, number: int) -> QuerySet[Trial]:
    return Trial.objects.filter(search=search, number=number)


def _store_bundle(search: Search, body: ev.BundleWritten) -> None:
    """Take the bundle from the writer's disk into the database. Raises ValueError where it is not what was told."""
    content = (folder_of(search.pk) / body.file).read_bytes()
    if len(content) != body.bytes or hashlib.sha256(content).hexdigest() != body.sha256:
        raise ValueError(f"the bundle {body.file} is not the file that was announced")
    Bundle.objects.create(search=search, file=body.file, sha256=body.sha256, size=body.bytes, content=content)
