"""Real workers, real brokers, real kills: nothing is lost but the trial in flight."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import redis

from engine.search.events import Budget
from tests.web.support import (
    FAKE,
    REDIS,
    Spawner,
    make_search,
    needs_postgres,
    needs_redis,
    open_to_others,
    wait_for,
)
from webapp.searches.doorbell import queue_of
from webapp.searches.models import Event, Search

TINY = Budget(seconds=3600, trials=2, candidates_per_round=2, min_rounds=1, plateau_rounds=1)
CONTEXT = {"SPECPILOT_PERFORM": FAKE, "SPECPILOT_LEASE_SECONDS": "3", "SPECPILOT_RECONCILE_SECONDS": "0.5"}


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    folder = tmp_path / "gate"
    folder.mkdir()
    return folder


def start_worker(spawner: Spawner, host: str) -> Any:
    return spawner("manage.py", "worker", "--gpus", "cpu", "--name", host, name=host)


def start_reconciler(spawner: Spawner) -> Any:
    return spawner("manage.py", "reconcile", name="reconciler")


def status(search: Search) -> str:
    return Search.objects.get(pk=search.pk).status


def judged(search: Search) -> list[int]:
    return [event.data["trial"] for event in Event.objects.filter(search=search, type="trial_judged")]


def story(search: Search) -> list[tuple[str, Any]]:
    """What was tried and found, without times, workers and the words of the trial that was run twice."""
    left_out = ("status_changed", "trial_started", "trial_progress")
    told = Event.objects.filter(search=search).exclude(type__in=left_out)
    return [(event.type, event.data.get("changes") or event.data.get("trial")) for event in told]


@pytest.mark.usefixtures("no_check", "rings")
@pytest.mark.parametrize(
    ("database", "broker"),
    [("sqlite", "embedded"), pytest.param("postgres", "redis", marks=[needs_postgres, needs_redis])],
    indirect=True,
)
def test_kill_9_of_a_worker_in_mid_trial(database: str, broker: str, spawn: Any, gate: Path) -> None:
    spawner = spawn({**CONTEXT, "DATABASE_URL": database, "REDIS_URL": broker, "FAKE_GATE": str(gate)})
    (gate / "hold-2").touch()
    search = make_search(seed=3, budget=TINY)
    start_reconciler(spawner)
    start_worker(spawner, "one")
    drain_pid = int(wait_for(lambda: (gate / "running-2-1").exists() and (gate / "running-2-1").read_text(), 60))
    data = Path(spawner.env["SPECPILOT_DATA"])
    assert (data / "searches").exists()
    assert open_to_others(data) == []
    before = judged(search)
    os.kill(drain_pid, signal.SIGKILL)
    wait_for(lambda: (gate / "running-2-2").exists(), 60)
    assert judged(search) == before == [0, 1]
    (gate / "hold-2").unlink()
    wait_for(lambda: status(search) == "finished", 60)
    assert judged(search) == sorted(set(judged(search)))
    attempts = Event.objects.filter(search=search, type="trial_started", data__trial=2)
    assert [event.data["attempt"] for event in attempts] == [1, 2]
    (gate / "hold-2").unlink(missing_ok=True)
    undisturbed = make_search(seed=3, budget=TINY)
    wait_for(lambda: status(undisturbed) == "finished", 60)
    assert story(search) == story(undisturbed)


@needs_postgres
@needs_redis
@pytest.mark.usefixtures("no_check", "rings")
def test_two_machines_drain_one_search(postgres: str, spawn: Any, gate: Path) -> None:
    """Two worker processes under different host names, one PostgreSQL, one Redis; trials run side by side."""
    with redis.Redis.from_url(REDIS) as client:
        client.flushdb()
    spawner = spawn({**CONTEXT, "DATABASE_URL": postgres, "REDIS_URL": REDIS, "FAKE_GATE": str(gate)})
    (gate / "hold-1").touch()
    (gate / "hold-2").touch()
    search = make_search(budget=TINY)
    start_worker(spawner, "north")
    start_worker(spawner, "south")
    start_reconciler(spawner)
    wait_for(lambda: (gate / "running-1-1").exists() and (gate / "running-2-1").exists(), 60)
    (gate / "hold-1").unlink()
    (gate / "hold-2").unlink()
    wait_for(lambda: status(search) == "finished", 60)
    started = Event.objects.filter(search=search, type="trial_started")
    by_trial = {event.data["trial"]: event.data["worker"] for event in started}
    assert {by_trial[1], by_trial[2]} == {"north/cpu", "south/cpu"}
    assert len(started) == len(by_trial)
    assert judged(search) == sorted(set(judged(search))) or sorted(judged(search)) == sorted(by_trial)


@pytest.mark.usefixtures("no_check")
@pytest.mark.parametrize("broker", [pytest.param("redis", marks=needs_redis)], indirect=True)
def test_duplicate_doorbells_run_each_job_once(sqlite: str, broker: str, spawn: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("webapp.searches.doorbell.wake_pages", lambda pk: None)
    monkeypatch.setattr("webapp.searches.doorbell.ring", lambda where: None)
    spawner = spawn({**CONTEXT, "DATABASE_URL": sqlite, "REDIS_URL": broker})
    search = make_search(budget=TINY)
    send = "from webapp.searches.doorbell import ring\nfor _ in range(5): ring('cpu')"
    ringer = spawner("-c", f"import django; django.setup()\n{send}", name="ringer")
    assert ringer.wait(60) == 0
    with redis.Redis.from_url(broker) as client:
        assert client.llen(queue_of("cpu")) == 5
        start_worker(spawner, "one")
        start_worker(spawner, "two")
        wait_for(lambda: status(search) == "finished", 60)
        wait_for(lambda: client.llen(queue_of("cpu")) == 0, 60)
    assert set(search.jobs.values_list("status", "attempts")) == {("done", 1)}
    assert judged(search) == sorted(set(judged(search)))


@pytest.mark.usefixtures("no_check", "rings")
@pytest.mark.parametrize("broker", ["embedded"], indirect=True)
def test_a_worker_that_is_asked_to_stop_gives_its_trial_back(sqlite: str, broker: str, spawn: Any, gate: Path) -> None:
    spawner = spawn({**CONTEXT, "SPECPILOT_LEASE_SECONDS": "600", "DATABASE_URL": sqlite, "REDIS_URL": broker,
                     "FAKE_GATE": str(gate)})  # fmt: skip
    (gate / "hold-1").touch()
    search = make_search(budget=TINY)
    start_reconciler(spawner)
    worker = start_worker(spawner, "one")
    wait_for(lambda: (gate / "running-1-1").exists(), 60)
    worker.send_signal(signal.SIGINT)
    assert worker.wait(30) == 0
    job = search.jobs.get(key="trial:1")
    assert (job.status, job.lost) == ("queued", 0)
    (gate / "hold-1").unlink()
    start_worker(spawner, "two")
    wait_for(lambda: status(search) == "finished", 60)
