"""Which workers are there now. Kept in the broker, by its clock: a fact of the moment, not of the record."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime

import redis
from celery import bootsteps
from celery.worker.consumer import Consumer
from django.conf import settings

from webapp.searches.worker import Worker, this_worker

log = logging.getLogger(__name__)
FRESH_SECONDS = 3 * settings.PRESENCE_SECONDS
KEY = f"{settings.CHANNEL_PREFIX}:workers"


@dataclass(frozen=True)
class Present:
    """A worker that was heard of within the last 15 seconds."""

    name: str
    host: str
    device: str
    kind: str
    description: str
    pid: int
    since: datetime


def _client() -> redis.Redis:
    return redis.Redis.from_url(settings.REDIS_URL, socket_connect_timeout=2, socket_timeout=2, decode_responses=True)


def announce(client: redis.Redis, worker: Worker, since: float) -> None:
    """Say that this worker is there."""
    seconds, microseconds = client.time()
    facts = {
        "host": worker.host,
        "device": worker.device,
        "description": worker.description,
        "pid": os.getpid(),
        "since": since,
        "seen": seconds + microseconds / 1e6,
    }
    client.hset(KEY, worker.name, json.dumps(facts))


def retire(client: redis.Redis, worker: Worker) -> None:
    client.hdel(KEY, worker.name)


def present_workers() -> list[Present]:
    """The workers that are there, by name. Raises redis.RedisError where the broker is away."""
    with _client() as client:
        seconds, _ = client.time()
        found = client.hgetall(KEY)
    workers = []
    for name, text in sorted(found.items()):
        facts = json.loads(text)
        if seconds - facts["seen"] <= FRESH_SECONDS:
            since = datetime.fromtimestamp(facts["since"], UTC)
            worker = Worker(facts["host"], facts["device"], facts["description"])
            workers.append(
                Present(name, worker.host, worker.device, worker.kind, worker.description, facts["pid"], since)
            )
    return workers


class _Kinds:
    """Which kinds of worker are there, asked at most every few seconds however many pages are open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until = 0.0
        self._kinds: frozenset[str] = frozenset()

    def now(self) -> frozenset[str]:
        with self._lock:
            if time.monotonic() >= self._until:
                try:
                    self._kinds = frozenset(worker.kind for worker in present_workers())
                except (redis.RedisError, OSError):
                    self._kinds = frozenset()  # no broker: nobody hears a doorbell
                self._until = time.monotonic() + settings.PRESENCE_SECONDS / 2
            return self._kinds


KINDS = _Kinds()


class PresenceStep(bootsteps.StartStopStep):
    """Announces a Celery worker from its own event loop, every few seconds while it is connected."""

    def __init__(self, parent: Consumer, **options: object) -> None:
        self._worker = this_worker()
        self._since = time.time()
        self._client = _client()
        self._timer = None
        super().__init__(parent, **options)

    def start(self, parent: Consumer) -> None:
        self._beat()
        self._timer = parent.timer.call_repeatedly(settings.PRESENCE_SECONDS, self._beat)

    def stop(self, parent: Consumer) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def shutdown(self, parent: Consumer) -> None:
        self.stop(parent)
        try:
            retire(self._client, self._worker)
        except (redis.RedisError, OSError) as error:
            log.info("The broker is away (%s); this worker's name fades by itself.", error)

    def _beat(self) -> None:
        try:
            announce(self._client, self._worker, self._since)
        except (redis.RedisError, OSError) as error:
            log.warning("The broker is away (%s).", error)
