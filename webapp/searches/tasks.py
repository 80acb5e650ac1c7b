"""The one Celery task. Acknowledged before it runs: a doorbell that is lost is rung again by the reconciler."""

from __future__ import annotations

from celery import shared_task

from webapp.searches.doorbell import DRAIN
from webapp.searches.drain import Drain
from webapp.searches.worker import this_worker


@shared_task(name=DRAIN, acks_late=False, ignore_result=True)
def drain() -> None:
    """Carry out the jobs that this worker may run, until there is none."""
    Drain(this_worker()).run()
