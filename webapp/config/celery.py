"""The Celery application. A message is only a doorbell: it says that there may be work, the database says what."""

from __future__ import annotations

import os

from celery import Celery, signals

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "webapp.config.settings")

app = Celery("specpilot")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks(["webapp.searches"])


@signals.celeryd_init.connect
def _prepare_worker(**kwargs: object) -> None:
    """In worker processes only: announce the worker, and end drains when it is asked to stop."""
    from webapp.searches import stopping
    from webapp.searches.presence import PresenceStep

    app.steps["consumer"].add(PresenceStep)
    stopping.install()
