"""Who may work on a job: claims, leases, fences.

A claim is one conditional UPDATE, so of any number of workers that want a job one gets it. The lease names its
owner and the attempt; a heartbeat extends it. Every write on behalf of the job first repeats that UPDATE inside
its transaction: it fails where the lease was lost (and then nothing is written), and it holds the job's row until
the commit, so the job cannot change hands half way. Lease times are the database's clock, one for all machines.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Self

from django.conf import settings
from django.db import DatabaseError, connection
from django.db.models import Case, Q, QuerySet, Value, When
from django.db.models.functions import Now
from django.utils import timezone

from webapp.searches.models import Job, Search

log = logging.getLogger(__name__)
WORKABLE = (Search.Status.RUNNING, Search.Status.CANCELLING)
MAX_LOST = 3
"""Claims of one job that may end with a silent worker, before the job counts as failed: it may be what kills them."""


class LeaseLost(Exception):
    """The job is no longer ours: it was cancelled, or given to another worker after a silence."""


@dataclass(frozen=True)
class Lease:
    """The right to work on one job, for as long as the fence holds."""

    job_id: int
    search_id: int
    key: str
    owner: str
    attempt: int
    lost: int  # earlier claims that ended without a word

    @property
    def _mine(self) -> QuerySet[Job]:
        return Job.objects.filter(
            pk=self.job_id, lease_owner=self.owner, attempts=self.attempt, status=Job.Status.RUNNING
        )

    def extend(self) -> None:
        """Renew the lease; inside a transaction this is the fence. Raises LeaseLost where it is no longer ours."""
        if not self._mine.update(lease_expires=_expiry()):
            raise LeaseLost(f"{self.key} of search {self.search_id} is no longer {self.owner}'s")

    def end(self, status: Job.Status) -> None:
        """Give the job back with this status. Raises LeaseLost where it is no longer ours."""
        ended = None if status == Job.Status.QUEUED else timezone.now()
        if not self._mine.update(status=status, lease_owner="", lease_expires=None, ended=ended):
            raise LeaseLost(f"{self.key} of search {self.search_id} is no longer {self.owner}'s")


def _expiry() -> object:
    return Now() + timedelta(seconds=settings.LEASE_SECONDS)


def claim(owner: str, places: Collection[str], *, prefer: int | None = None, only: int | None = None) -> Lease | None:
    """The next job that may run in one of `places`, now ours; None where there is none.

    Jobs of search `prefer` come first (its models are loaded), then the oldest; `only` limits to one search.
    """
    free = Q(status=Job.Status.QUEUED) | Q(status=Job.Status.RUNNING, lease_expires__lt=Now())
    open_jobs = Job.objects.filter(free, where__in=places, search__status__in=WORKABLE)
    if only is not None:
        open_jobs = open_jobs.filter(search_id=only)
    first = Case(When(search_id=prefer, then=Value(0)), default=Value(1))
    for job in open_jobs.order_by(first, "search_id", "id")[:16]:
        lost = job.lost + (1 if job.status == Job.Status.RUNNING else 0)
        # The attempt is part of the condition: it changes with every claim, so what was read is what is claimed.
        same = Job.objects.filter(free, pk=job.pk, attempts=job.attempts, status=job.status)
        if same.update(
            status=Job.Status.RUNNING,
            lease_owner=owner,
            lease_expires=_expiry(),
            attempts=job.attempts + 1,
            lost=lost,
        ):
            return Lease(job.pk, job.search_id, job.key, owner, job.attempts + 1, lost)
    return None


class Heartbeat:
    """Extends a lease from a thread of its own while the `with` block runs.

    `lost` is called once, from that thread, when the lease is gone or could not be renewed before it ran out.
    """

    def __init__(self, lease: Lease, lost: Callable[[], None]) -> None:
        self._lease = lease
        self._lost = lost
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name=f"heartbeat {lease.key}", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _beat(self) -> None:
        length = settings.LEASE_SECONDS
        renewed = time.monotonic()
        try:
            while not self._stop.wait(length / 5):
                try:
                    self._lease.extend()
                    renewed = time.monotonic()
                except LeaseLost:
                    self._lost()
                    return
                except DatabaseError as error:
                    log.warning("The lease of %s could not be renewed: %s", self._lease.key, error)
                    connection.close()
                    if time.monotonic() - renewed > length:
                        self._lost()
                        return
        finally:
            connection.close()


@cache
def machine() -> str:
    """Names this machine's process table: since when it runs, and which PID namespace of it we see."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    if not boot.exists():
        return socket.gethostname()
    return f"{boot.read_text().strip()[:8]}.{Path('/proc/self/ns/pid').stat().st_ino}"


def new_owner(worker: str) -> str:
    """A lease owner that no other process has: WORKER#MACHINE:PID:NONCE."""
    return f"{worker}#{machine()}:{os.getpid()}:{secrets.token_hex(4)}"


def expire_dead() -> int:
    """Let leases of processes of this machine that are gone run out now, and not at their time. Returns how many.

    A lease that is wrongly let go costs that trial and nothing else: the fence keeps its late writes out.
    """
    count = 0
    for job in Job.objects.filter(status=Job.Status.RUNNING, lease_owner__contains=f"#{machine()}:"):
        pid = int(job.lease_owner.rpartition("#")[2].split(":")[1])
        if not Path(f"/proc/{pid}").exists():
            mine = Job.objects.filter(pk=job.pk, attempts=job.attempts, status=Job.Status.RUNNING)
            count += mine.update(lease_expires=Now() - timedelta(seconds=1))
    return count
