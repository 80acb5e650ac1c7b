"""Reads: what pages and API show. Whatever belongs to somebody else does not exist (404)."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import redis
from django.contrib.auth.models import AbstractBaseUser, AnonymousUser
from django.db import DatabaseError, connection
from django.db.models import Count, QuerySet
from django.http import Http404

from engine.codec import to_json
from engine.paths import REPOSITORY
from engine.search.evidence import evidence
from webapp.searches.journal import folder_path
from webapp.searches.models import Bundle, Event, Job, Search
from webapp.searches.presence import KINDS, Present, present_workers
from webapp.searches.projection import PROJECTIONS

Someone = AbstractBaseUser | AnonymousUser


def searches_of(user: Someone, *, status: str = "") -> QuerySet[Search]:
    """The user's searches, newest first, those of one status where it is given."""
    rows = Search.objects.filter(owner_id=user.pk).select_related("deployment")
    return rows.filter(status=status) if status else rows


def search_of(user: Someone, pk: int) -> Search | None:
    """The user's search of this number, or None."""
    return searches_of(user).filter(pk=pk).first()


def search_or_404(user: Someone, pk: int) -> Search:
    search = search_of(user, pk)
    if search is None:
        raise Http404("There is no such search.")
    return search


def events_after(search_id: int, seq: int, limit: int | None = None) -> list[dict[str, Any]]:
    """Events with a higher number, in order, JSON-ready."""
    rows = Event.objects.filter(search_id=search_id, seq__gt=seq).order_by("seq")
    return [row.to_json() for row in rows[:limit]]


def newest_events(search: Search, count: int) -> list[dict[str, Any]]:
    """The last `count` events, in order, JSON-ready."""
    rows = Event.objects.filter(search=search).order_by("-seq")[:count]
    return [row.to_json() for row in reversed(rows)]


def trial_or_404(search: Search, number: int) -> dict[str, Any]:
    """The evidence for one trial (`engine.search.evidence`), JSON-ready."""
    folder = folder_path(search.pk)
    with suppress(ValueError):  # a data folder elsewhere: its whole path
        folder = folder.relative_to(REPOSITORY)
    found = evidence(PROJECTIONS.state(search.pk), number, str(folder))
    if found is None:
        raise Http404("There is no such trial in this search.")
    data: dict[str, Any] = to_json(found)
    return data


def bundle_of(search: Search) -> Bundle:
    """Raises Http404 while there is none."""
    bundle = Bundle.objects.filter(search=search).first()
    if bundle is None:
        raise Http404("This search has no bundle yet.")
    return bundle


def platforms_online() -> list[str]:
    """Kinds of device ("cpu", "cuda") for which a worker is there."""
    return sorted(KINDS.now() - {Job.CONTROL})


def workers_for(user: Someone) -> list[dict[str, Any]]:
    """The workers that are there, with the job that each does; of other people's searches only that it is busy.

    What names a machine (host, process, the worker's own name) is for staff only; everybody sees devices and whether
    they work.
    """
    try:
        workers = present_workers()
    except (redis.RedisError, OSError):
        return []
    running = {}
    for job in Job.objects.filter(status=Job.Status.RUNNING).select_related("search"):
        running[job.lease_owner.partition("#")[0]] = job
    return [_worker(worker, running.get(worker.name), user) for worker in workers]


def _worker(worker: Present, job: Job | None, user: Someone) -> dict[str, Any]:
    shown = {
        "device": worker.device,
        "kind": worker.kind,
        "description": worker.description,
        "since": worker.since,
        "status": "working" if job else "idle",
        "job": _job(job, user),
    }
    if getattr(user, "is_staff", False):
        shown |= {"name": worker.name, "host": worker.host, "pid": worker.pid}
    return shown


def _job(job: Job | None, user: Someone) -> dict[str, Any] | None:
    if job is None:
        return None
    mine = job.search.owner_id == user.pk
    return {
        "search": job.search_id if mine else None,
        "title": job.search.title if mine else "another user's search",
        "url": job.search.get_absolute_url() if mine else "",
        "key": job.key if mine else "",
    }


def waiting_jobs() -> list[dict[str, Any]]:
    """How many jobs wait for a worker, by place."""
    rows = Job.objects.filter(status=Job.Status.QUEUED, search__status=Search.Status.RUNNING)
    counts = rows.order_by("where").values_list("where").annotate(Count("id"))
    return [{"where": where, "count": count} for where, count in counts]


def database_away(error: DatabaseError) -> str:
    """One sentence about a database that does not answer."""
    lines = str(error).strip().splitlines() or ["it gives no reason"]
    return f"The database does not answer: {lines[0].rstrip('.')}."


def check_database() -> None:
    """Raises DatabaseError where the database does not answer."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")
