"""Databases, brokers, searches and processes for tests of the web."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import dj_database_url
import psutil
import psycopg
import pytest
import redis
from django.contrib.auth.models import User
from django.db import connection, connections

from engine.deployment import NO_DRAFTER, Deployment
from engine.paths import REPOSITORY
from engine.search.events import Budget
from webapp.config import settings as product
from webapp.searches import services
from webapp.searches.models import Search
from webapp.searches.projection import PROJECTIONS

FAKE = "tests.web.fake_engine"
POSTGRES = os.environ.get("TEST_POSTGRES_URL", "postgres://root@127.0.0.1:5432/postgres")
REDIS = os.environ.get("TEST_REDIS_URL", "redis://127.0.0.1:6379/9")
SMALL = Budget(seconds=3600, trials=4, candidates_per_round=2, min_rounds=1, plateau_rounds=1)


_CONFIGS: dict[str, dict[str, Any]] = {}


def configure_database(url: str) -> None:
    """Make every new connection of every thread go to this database.

    The settings of each engine stay one dictionary: a thread that lives longer than a test (asgiref has one) keeps
    its connection object, which reads them each time it connects.
    """
    config: dict[str, Any] = dict(dj_database_url.parse(url, conn_max_age=0))
    if url.startswith("sqlite"):
        config["OPTIONS"] = dict(product.SQLITE_OPTIONS)
    connections["default"].close()
    kept = _CONFIGS.setdefault(config["ENGINE"], {})
    kept.clear()
    kept.update(connections.configure_settings({"default": config})["default"])
    connections.settings["default"] = kept
    del connections["default"]
    PROJECTIONS.clear()


def postgres_execute(statement: str) -> None:
    with psycopg.connect(POSTGRES, autocommit=True) as connection:
        connection.execute(statement)


def postgres_is_there() -> bool:
    try:
        postgres_execute("SELECT 1")
    except psycopg.OperationalError:
        return False
    return True


def redis_is_there() -> bool:
    try:
        with redis.Redis.from_url(REDIS, socket_connect_timeout=1) as client:
            return bool(client.ping())
    except redis.RedisError:
        return False


needs_postgres = pytest.mark.skipif(not postgres_is_there(), reason="no PostgreSQL at TEST_POSTGRES_URL")
needs_redis = pytest.mark.skipif(not redis_is_there(), reason="no Redis at TEST_REDIS_URL")


def pings(url: str) -> bool:
    try:
        with redis.Redis.from_url(url) as client:
            return bool(client.ping())
    except redis.RedisError:
        return False


def make_user(name: str = "ada", **more: Any) -> User:
    return User.objects.create_user(name, password=f"{name}-secret-1", **more)


def make_search(owner: User | None = None, *, seed: int = 7, budget: Budget = SMALL, **deployment: Any) -> Search:
    """A search of the fake engine (use with `no_check`)."""
    owner = owner or User.objects.filter(username="ada").first() or make_user()
    chosen = Deployment(drafter=NO_DRAFTER, **deployment)
    return services.create_search(owner=owner, deployment=chosen, budget=budget, seed=seed)


def wait_for(condition: Callable[[], Any], seconds: float = 30.0) -> Any:
    """The first true value of `condition`, asked again and again; fails the test when the time is over."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"nothing within {seconds} s: {condition}")
        time.sleep(0.02)


def in_threads(count: int, work: Callable[[int], Any]) -> list[Any]:
    """Results of `count` threads that begin together; an error in one fails the test."""
    start = threading.Barrier(count)

    def run(number: int) -> Any:
        start.wait()
        try:
            return work(number)
        finally:
            connection.close()

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def open_to_others(folder: Path) -> list[str]:
    """Everything below `folder` that group or others may read, write or enter."""
    found = [path for path in sorted(folder.rglob("*")) if path.lstat().st_mode & 0o077 and not path.is_symlink()]
    return [f"{path} {path.lstat().st_mode & 0o777:o}" for path in found]


class Spawner:
    """Starts processes of the product and ends them, whatever the test does."""

    def __init__(self, env: dict[str, str], logs: Path) -> None:
        self.env = {**os.environ, "DJANGO_SETTINGS_MODULE": "webapp.config.settings", **env}
        self.logs = logs
        self.started: list[subprocess.Popen[bytes]] = []

    def __call__(self, *argv: str, name: str = "process", **env: str) -> subprocess.Popen[bytes]:
        with (self.logs / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, *argv],
                cwd=REPOSITORY,
                env={**self.env, **env},
                stdout=log,
                stderr=log,
                start_new_session=True,
                umask=0o022,  # the usual one: what must not be readable by others is the product's own care
            )
        self.started.append(process)
        return process

    def log(self, name: str) -> str:
        return (self.logs / f"{name}.log").read_text(errors="replace")

    def end(self) -> None:
        for process in self.started:
            tree = []
            if process.poll() is None:
                tree = psutil.Process(process.pid).children(recursive=True)
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(15)
                except subprocess.TimeoutExpired:
                    process.kill()
            for left in tree:
                if left.is_running():
                    left.kill()
            process.wait()
