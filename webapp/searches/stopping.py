"""A worker that is asked to stop (SIGTERM) passes that on to its drain, which gives its job back and ends.

Celery by itself would wait for the drain, that is for whole searches.
"""

from __future__ import annotations

import contextlib
import os
import signal

import psutil
from celery import signals


def install() -> None:
    signals.worker_shutting_down.connect(_stop_drains, weak=False)


def _stop_drains(**kwargs: object) -> None:
    for child in psutil.Process(os.getpid()).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            child.send_signal(signal.SIGTERM)
