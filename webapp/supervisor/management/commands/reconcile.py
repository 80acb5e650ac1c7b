"""`manage.py reconcile`: the reconciler by itself, for installations that run web and workers without `up`."""

from __future__ import annotations

import signal
import threading
from typing import Any

from django.core.management.base import BaseCommand

from webapp.searches.reconcile import run


class Command(BaseCommand):
    help = "Ring again for work that nobody heard of, until stopped. `up` does this by itself."

    def handle(self, *args: Any, **options: Any) -> None:
        stop = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())
        run(stop)
