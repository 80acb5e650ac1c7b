"""Many self-tests at once: each on cores of its own, none lost, and a run that gives nothing counts as failed."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest

from engine.judge import soak


def test_runs_share_no_core_and_keep_their_order() -> None:
    groups = [[0, 1], [2, 3], [4, 5]]
    busy: set[int] = set()
    lock = threading.Lock()
    together = threading.Barrier(3, timeout=30)  # three really run at once

    def once(cores: list[int]) -> dict[str, Any]:
        with lock:
            assert not busy & set(cores)
            busy.update(cores)
        together.wait()
        with lock:
            busy.difference_update(cores)
        return {"cores": cores}

    said: list[int] = []
    rows = soak.repeat(9, groups, once, lambda number, row: said.append(number))
    assert len(rows) == 9
    assert sorted(said) == list(range(1, 10))
    assert {tuple(row["cores"]) for row in rows} == {(0, 1), (2, 3), (4, 5)}


def test_a_run_that_gives_no_result_has_failed() -> None:
    row = soak.selftest(["--only", "nonesuch"], sorted(os.sched_getaffinity(0))[:1])
    assert (row["passed"], row["status"], row["conclusion"]) == (False, 2, "it gave no result")
    assert "nonesuch" in row["written"]


def test_what_was_judged_wrongly_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = [{"name": "constant", "status": "slipped through", "reason": "2.00x the incumbent"}]
    soak._say(3, {"passed": False, "conclusion": "50/51 cheats rejected", "wall_s": 100.0, "wrong": wrong})
    assert "run 3: FAILED" in (said := capsys.readouterr().out)
    assert "constant slipped through: 2.00x the incumbent" in said
