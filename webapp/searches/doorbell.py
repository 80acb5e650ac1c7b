"""Doorbells and wake-up calls: messages that carry no truth, only the hint to look into the database.

Losing one delays, never breaks: the reconciler rings again, and an open page looks by itself every few seconds.
"""

from __future__ import annotations

import logging

import redis
from asgiref.sync import async_to_sync
from channels.layers import get_channel_layer
from django.conf import settings
from django.db import transaction
from kombu.exceptions import OperationalError

from webapp.config.celery import app

log = logging.getLogger(__name__)
DRAIN = "specpilot.drain"


def queue_of(where: str) -> str:
    """The queue on which work of this place is announced: "control", or a device kind, "cpu" or "cuda"."""
    return f"specpilot.{where}"


def device_queue(host: str, device: str) -> str:
    """The queue of one device of one machine."""
    return f"specpilot.device.{host}.{device.replace(':', '')}"


def group_of(search_id: int) -> str:
    """The channel group of a search's open pages."""
    return f"search.{search_id}"


def ring(where: str) -> None:
    """Tell one worker of this place that there may be work. A broker that is away is logged, not raised."""
    try:
        app.send_task(DRAIN, queue=queue_of(where), retry=False)
    except (OperationalError, OSError, redis.RedisError) as error:
        log.warning("The broker is away (%s); the reconciler will ring for %s again.", error, where)


def ring_on_commit(where: str) -> None:
    transaction.on_commit(lambda: ring(where), robust=True)


def wake_pages(search_id: int) -> None:
    """Tell the open pages of a search that it has new events."""
    layer = get_channel_layer()
    try:
        async_to_sync(layer.group_send)(group_of(search_id), {"type": "search.changed"})
    except (OSError, redis.RedisError) as error:
        log.warning("The broker is away (%s); open pages will look by themselves.", error)


def wake_pages_on_commit(search_id: int) -> None:
    transaction.on_commit(lambda: wake_pages(search_id), robust=True)


def waiting_rings(where: str) -> int:
    """Doorbells that no worker has heard yet. Raises redis.RedisError where the broker is away."""
    with redis.Redis.from_url(settings.REDIS_URL, socket_connect_timeout=2, socket_timeout=2) as client:
        return int(client.llen(queue_of(where)))
