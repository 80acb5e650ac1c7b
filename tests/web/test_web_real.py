"""The worker with the real engine: SmolLM2, the real judge, a kill in the middle of a trial."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine import bundle as bundles
from engine.deployment import Regime
from engine.search.events import Budget
from tests.web.support import make_search, wait_for
from webapp.searches.models import Bundle, Event, Job, Search

REGIME = Regime(max_prompt_tokens=64, max_new_tokens=8)
BUDGET = Budget(seconds=3600, trials=1, candidates_per_round=1, min_rounds=1, plateau_rounds=1)


@pytest.mark.slow
@pytest.mark.usefixtures("no_check", "rings")
def test_kill_9_in_mid_trial_with_the_real_engine(
    sqlite: str, embedded_broker: str, spawn: Any, tmp_path: Path
) -> None:
    spawner = spawn({"DATABASE_URL": sqlite, "REDIS_URL": embedded_broker, "SPECPILOT_LEASE_SECONDS": "5"})
    search = make_search(budget=BUDGET, regime=REGIME)
    spawner("manage.py", "reconcile", name="reconciler")
    spawner("manage.py", "worker", "--gpus", "cpu", "--name", "one", name="one")

    def in_trial() -> bool:
        return Event.objects.filter(search=search, type="trial_progress", data__trial=1).exists()

    wait_for(in_trial, 900)
    drain = int(Job.objects.get(search=search, key="trial:1").lease_owner.rpartition("#")[2].split(":")[1])
    children = psutil.Process(drain).children(recursive=True)
    assert children
    os.kill(drain, signal.SIGKILL)
    wait_for(lambda: not any(child.is_running() and child.status() != "zombie" for child in children), 30)
    wait_for(lambda: Search.objects.get(pk=search.pk).is_over, 900)
    search.refresh_from_db()
    assert search.status == "finished"
    attempts = Event.objects.filter(search=search, type="trial_started", data__trial=1)
    assert [event.data["attempt"] for event in attempts] == [1, 2]
    path = tmp_path / "bundle.zip"
    path.write_bytes(bytes(Bundle.objects.get(search=search).content))
    assert bundles.read(path) is not None
