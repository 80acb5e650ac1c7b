"""The socket of a search's live page: a replay from the asked number, then every event as it happens."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any
from urllib.parse import parse_qs

import redis
from channels.db import database_sync_to_async
from channels.generic.websocket import AsyncJsonWebsocketConsumer, AsyncWebsocketConsumer

from webapp.searches import selectors
from webapp.searches.doorbell import group_of
from webapp.searches.presence import KINDS
from webapp.searches.projection import PROJECTIONS

LOOK_SECONDS = 5.0
NOT_SIGNED_IN, NOT_YOURS = 4401, 4404


class SearchConsumer(AsyncJsonWebsocketConsumer):
    """/ws/searches/<id>?after=SEQ.

    It joins the search's group first and reads the database afterwards, so nothing falls in between. A group message
    carries no events, only the news that there are some: whatever the database holds after `seq` is sent, so
    repeats, gaps and lost messages make no difference. Every few seconds it looks by itself, in case the broker was
    away, and says whether a worker for this search is there.
    """

    async def connect(self) -> None:
        await self.accept()  # before a refusal too: a browser sees the code of an accepted socket only
        user = self.scope["user"]
        if not user.is_authenticated:
            await self.close(NOT_SIGNED_IN)
            return
        self.search_id: int = self.scope["url_route"]["kwargs"]["pk"]
        search = await database_sync_to_async(selectors.search_of)(user, self.search_id)
        if search is None:
            await self.close(NOT_YOURS)
            return
        self.where = search.where
        self.seq = min(_after(self.scope), search.last_seq)
        self.turn = asyncio.Lock()  # one update at a time, in order
        self.online: bool | None = None
        with contextlib.suppress(redis.RedisError, OSError):  # no broker: the watch below still looks
            await self.channel_layer.group_add(group_of(self.search_id), self.channel_name)
        await self.update(always=True)
        self.watching = asyncio.create_task(self.watch())

    async def disconnect(self, code: int) -> None:
        watching = getattr(self, "watching", None)
        if watching is not None:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        if hasattr(self, "search_id"):
            with contextlib.suppress(redis.RedisError, OSError):
                await self.channel_layer.group_discard(group_of(self.search_id), self.channel_name)

    async def receive(self, text_data: str | None = None, bytes_data: bytes | None = None, **kwargs: Any) -> None:
        """The page has nothing to say here; commands go through the API."""

    async def search_changed(self, message: dict[str, Any]) -> None:
        await self.update()

    async def update(self, *, always: bool = False) -> None:
        """Send what the database has after `seq`; `always`: even where that is nothing."""
        async with self.turn:
            events, view = await database_sync_to_async(_news)(self.search_id, self.seq)
            if events or always:
                self.seq = events[-1]["seq"] if events else self.seq
                await self.send_json({"kind": "update", "events": events, "view": view, "seq": self.seq})

    async def watch(self) -> None:
        while True:
            online = self.where in await database_sync_to_async(KINDS.now)()
            if online != self.online:
                self.online = online
                await self.send_json({"kind": "status", "worker_online": online})
            await asyncio.sleep(LOOK_SECONDS)
            await self.update()


class NothingHere(AsyncWebsocketConsumer):
    """Any other path: closed with the code that a search which is not yours has."""

    async def connect(self) -> None:
        await self.accept()
        await self.close(NOT_YOURS)


def _after(scope: dict[str, Any]) -> int:
    asked = parse_qs(scope.get("query_string", b"").decode("latin1")).get("after", ["0"])[0]
    return int(asked) if asked.isdecimal() and len(asked) < 10 else 0


def _news(search_id: int, seq: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Events after `seq` and a view that holds exactly them: the view may be newer than the last event read."""
    view = PROJECTIONS.view(search_id)
    events = [event for event in selectors.events_after(search_id, seq) if event["seq"] <= view["seq"]]
    return events, view
