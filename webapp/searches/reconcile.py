"""Rings again for work that nobody heard of, and lets leases of dead processes run out. Safe to run twice."""

from __future__ import annotations

import logging
import threading

import redis
from django.conf import settings
from django.db import DatabaseError, connection
from django.db.models import Q
from django.db.models.functions import Now

from webapp.searches.advance import advance
from webapp.searches.doorbell import ring, waiting_rings
from webapp.searches.leases import WORKABLE, expire_dead
from webapp.searches.models import Job, Search

log = logging.getLogger(__name__)


def reconcile() -> list[str]:
    """One pass. Returns the places that were rung for.

    A place is rung for when it has a claimable job and no doorbell is waiting in its queue: a busy worker is not
    buried in doorbells, and a lost one is replaced. A running search without any open job (the process that should
    have advanced it died in between) is advanced.
    """
    expire_dead()
    open_jobs = Job.objects.filter(status__in=[Job.Status.QUEUED, Job.Status.RUNNING])
    for search in Search.objects.filter(status__in=WORKABLE).exclude(pk__in=open_jobs.values("search_id")):
        advance(search.pk)
    claimable = Q(status=Job.Status.QUEUED) | Q(status=Job.Status.RUNNING, lease_expires__lt=Now())
    places = Job.objects.filter(claimable, search__status__in=WORKABLE).order_by().values_list("where", flat=True)
    rung = []
    for where in sorted(set(places)):
        if not waiting_rings(where):
            ring(where)
            rung.append(where)
    return rung


def run(stop: threading.Event) -> None:
    """Pass after pass until `stop` is set. A database or broker that is away is tried again."""
    while not stop.is_set():
        try:
            reconcile()
        except (DatabaseError, OSError, redis.RedisError) as error:
            log.warning("The reconciler could not look: %s", error)
        finally:
            connection.close()
        stop.wait(settings.RECONCILE_SECONDS)
