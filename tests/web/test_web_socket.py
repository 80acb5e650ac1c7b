"""The live page's socket: replay, live events, gaps, repeats, ownership, origin."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from asgiref.testing import ApplicationCommunicator
from channels.db import database_sync_to_async
from channels.layers import get_channel_layer
from django.conf import settings as django_settings
from django.contrib.auth.models import User
from django.db import transaction
from django.test import Client

from engine.search.events import Note
from tests.web.support import make_search, make_user
from webapp.config.asgi import application
from webapp.searches import consumers, services
from webapp.searches.doorbell import group_of
from webapp.searches.journal import append_events, locked
from webapp.searches.models import Search
from webapp.searches.presence import KINDS

pytestmark = pytest.mark.usefixtures("sqlite", "no_check", "layer", "no_rings")
HOST = "testserver:8000"


@pytest.fixture
def layer(embedded_broker: str, settings: Any) -> None:
    """The product's channel layer, at the embedded broker."""
    config = settings.CHANNEL_LAYERS["default"]
    hosts = [{**config["CONFIG"]["hosts"][0], "address": embedded_broker}]
    settings.CHANNEL_LAYERS = {"default": {**config, "CONFIG": {**config["CONFIG"], "hosts": hosts}}}
    settings.REDIS_URL = embedded_broker
    settings.ALLOWED_HOSTS = ["testserver"]


@pytest.fixture
def no_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """No worker is meant to hear."""
    monkeypatch.setattr("webapp.searches.doorbell.ring", lambda where: None)
    monkeypatch.setattr(KINDS, "now", lambda: frozenset({"cpu"}))


def cookie_of(user: User) -> str:
    client = Client()
    client.force_login(user)
    return f"{django_settings.SESSION_COOKIE_NAME}={client.cookies[django_settings.SESSION_COOKIE_NAME].value}"


class Page(ApplicationCommunicator):
    """A page's end of the socket."""

    def __init__(
        self, pk: int, query: str = "", *, cookie: str = "", origin: str | None = f"http://{HOST}", path: str = ""
    ) -> None:
        headers = [(b"host", HOST.encode()), (b"cookie", cookie.encode())]
        if origin is not None:
            headers.append((b"origin", origin.encode()))
        scope = {"type": "websocket", "path": path or f"/ws/searches/{pk}", "query_string": query.lstrip("?").encode(),
                 "headers": headers, "subprotocols": []}  # fmt: skip
        super().__init__(application, scope)

    async def connect(self) -> bool:
        """Whether the handshake was accepted."""
        await self.send_input({"type": "websocket.connect"})
        return (await self.receive_output(10))["type"] == "websocket.accept"

    async def disconnect(self) -> None:
        await self.send_input({"type": "websocket.disconnect", "code": 1000})
        await self.wait(10)

    async def say(self, **frame: Any) -> None:
        await self.send_input({"type": "websocket.receive", **frame})

    async def message(self) -> dict[str, Any]:
        frame = await self.receive_output(10)
        assert frame["type"] == "websocket.send"
        return json.loads(frame["text"])

    async def update(self) -> dict[str, Any]:
        """The next update; the worker's status is passed over."""
        while True:
            message = await self.message()
            if message["kind"] == "update":
                return message


@pytest.fixture
async def connect() -> AsyncIterator[Callable[..., Any]]:
    pages: list[Page] = []

    async def make(*args: Any, **more: Any) -> Page:
        page = Page(*args, **more)
        assert await page.connect()
        pages.append(page)
        return page

    yield make
    for page in pages:
        await page.disconnect()


@database_sync_to_async
def prepare() -> tuple[Search, str]:
    user = make_user()
    return make_search(user), cookie_of(user)


@database_sync_to_async
def note(search: Search, *texts: str, quiet: bool = False) -> None:
    with transaction.atomic():
        append_events(locked(search.pk), [Note(text) for text in texts], quiet=quiet)


def texts(message: dict[str, Any]) -> list[str]:
    return [event["data"].get("text", event["type"]) for event in message["events"]]


async def test_replay_then_live(connect: Callable[..., Any]) -> None:
    search, cookie = await prepare()
    await note(search, "one", "two")
    page = await connect(search.pk, cookie=cookie)
    first = await page.update()
    assert texts(first) == ["search_started", "one", "two"]
    assert (first["seq"], first["view"]["seq"]) == (3, 3)
    await note(search, "three")
    live = await page.update()
    assert (texts(live), live["seq"], live["view"]["seq"]) == (["three"], 4, 4)


async def test_replay_begins_after_the_asked_number(connect: Callable[..., Any]) -> None:
    search, cookie = await prepare()
    await note(search, "one", "two")
    page = await connect(search.pk, "?after=2", cookie=cookie)
    assert texts(await page.update()) == ["two"]


async def test_nothing_to_replay_still_sends_the_view(connect: Callable[..., Any]) -> None:
    search, cookie = await prepare()
    page = await connect(search.pk, "?after=1", cookie=cookie)
    message = await page.update()
    assert (message["events"], message["seq"], message["view"]["status"]) == ([], 1, "running")


@pytest.mark.parametrize("after", ["99", "-1", "x", "1e3", "99999999999999999999", "٣"])
async def test_a_number_that_makes_no_sense_is_harmless(after: str, connect: Callable[..., Any]) -> None:
    search, cookie = await prepare()
    page = await connect(search.pk, f"?after={after}", cookie=cookie)
    assert (await page.update())["seq"] == 1
    await note(search, "next")
    assert texts(await page.update()) == ["next"]


async def test_a_gap_is_filled_from_the_database(connect: Callable[..., Any]) -> None:
    search, cookie = await prepare()
    page = await connect(search.pk, "?after=1", cookie=cookie)
    await page.update()
    await note(search, "unheard", "unheard too", quiet=True)
    await note(search, "heard")
    assert texts(await page.update()) == ["unheard", "unheard too", "heard"]


async def test_repeated_news_is_not_sent_again(connect: Callable[..., Any]) -> None:
    search, cookie = await prepare()
    page = await connect(search.pk, "?after=1", cookie=cookie)
    await page.update()
    for _ in range(3):
        await get_channel_layer().group_send(group_of(search.pk), {"type": "search.changed"})
    await note(search, "once")
    assert texts(await page.update()) == ["once"]
    await note(search, "twice")
    assert texts(await page.update()) == ["twice"]


async def test_lost_news_is_found_by_itself(connect: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumers, "LOOK_SECONDS", 0.05)
    search, cookie = await prepare()
    page = await connect(search.pk, "?after=1", cookie=cookie)
    await page.update()
    await note(search, "nobody was told", quiet=True)
    assert texts(await page.update()) == ["nobody was told"]


async def test_events_between_joining_and_reading_come_once(
    connect: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    search, cookie = await prepare()
    joined = consumers.SearchConsumer.update

    async def late(self: Any, *, always: bool = False) -> None:
        if always:
            await note(search, "in between")
        await joined(self, always=always)

    monkeypatch.setattr(consumers.SearchConsumer, "update", late)
    page = await connect(search.pk, "?after=1", cookie=cookie)
    assert texts(await page.update()) == ["in between"]
    await note(search, "after")
    assert texts(await page.update()) == ["after"]


async def test_commands_of_others_reach_the_page(connect: Callable[..., Any]) -> None:
    search, cookie = await prepare()
    page = await connect(search.pk, "?after=1", cookie=cookie)
    await page.update()
    await database_sync_to_async(services.pause)(search.pk, by="ada")
    message = await page.update()
    assert message["events"][0]["data"] == {"status": "paused", "by": "ada"}
    assert message["view"]["status"] == "paused"


async def test_it_says_whether_a_worker_is_there(connect: Callable[..., Any]) -> None:
    search, cookie = await prepare()
    page = await connect(search.pk, cookie=cookie)
    kinds = [await page.message() for _ in range(2)]
    assert {"kind": "status", "worker_online": True} in kinds


async def test_what_the_page_says_is_ignored(connect: Callable[..., Any]) -> None:
    search, cookie = await prepare()
    page = await connect(search.pk, "?after=1", cookie=cookie)
    await page.update()
    await page.say(text="{not json")
    await page.say(bytes=b"\x00")
    await note(search, "still here")
    assert texts(await page.update()) == ["still here"]


async def refused(page: Page) -> int:
    """The code with which an accepted socket is closed."""
    assert await page.connect()
    message = await page.receive_output(10)
    assert message["type"] == "websocket.close"
    return message["code"]


async def test_another_users_search_does_not_exist() -> None:
    search, _ = await prepare()
    stranger = await database_sync_to_async(lambda: cookie_of(make_user("eve", is_superuser=True)))()
    assert await refused(Page(search.pk, cookie=stranger)) == 4404
    assert await refused(Page(search.pk + 1, cookie=stranger)) == 4404


async def test_strangers_are_told_to_sign_in() -> None:
    search, _ = await prepare()
    assert await refused(Page(search.pk)) == 4401


@pytest.mark.parametrize("path", ["/", "/ws", "/ws/searches", "/ws/searches/x", "/ws/searches/1/more", "/ws/%0a"])
async def test_other_paths_are_closed_without_a_word(path: str) -> None:
    _, cookie = await prepare()
    page = Page(1, cookie=cookie, path=path)
    assert await refused(page) == 4404
    await page.disconnect()  # as a server tells after the close


@pytest.mark.parametrize(
    "origin",
    [None, "http://evil.example", "http://testserver:9000", "http://testserver", "null", "http://[", "file://testserver:8000"],
)  # fmt: skip
async def test_other_origins_are_denied_before_anything_is_read(origin: str | None) -> None:
    search, cookie = await prepare()
    assert not await Page(search.pk, cookie=cookie, origin=origin).connect()


async def test_a_host_that_is_not_ours_is_denied(settings: Any) -> None:
    settings.ALLOWED_HOSTS = ["specpilot.example"]
    search, cookie = await prepare()
    assert not await Page(search.pk, cookie=cookie).connect()
