"""Many self-tests at once: each on cores of its own, none lost, and a run that gives nothing counts as failed."""

from __future__ import annotations

import argparse
import os
import threading
from typing import Any

import pytest

from engine.errors import UserError
from engine.judge import soak


def test_runs_share_no_core_and_keep_their_order() -> None:
    groups = [[0, 1], [2, 3], [4, 5]]
    busy: set[int] = set()
    lock = threading.Lock()
    together = threading.Barrier(3, timeout=30)  # three really run at once

    def once(part: list[str], cores: list[int]) -> dict[str, Any]:
        with lock:
            assert not busy & set(cores)
            busy.update(cores)
        together.wait()
        with lock:
            busy.difference_update(cores)
        return {"part": part, "cores": cores}

    rows: dict[int, dict[str, Any]] = {}
    soak.repeat([[str(number)] for number in range(9)], groups, once, rows.__setitem__)
    assert {number: row["part"] for number, row in rows.items()} == {number: [str(number)] for number in range(9)}
    assert {tuple(row["cores"]) for row in rows.values()} == {(0, 1), (2, 3), (4, 5)}


def test_a_thread_that_fails_ends_the_soak() -> None:
    def once(part: list[str], cores: list[int]) -> dict[str, Any]:
        raise OSError("no such program")

    with pytest.raises(OSError, match="no such program"):
        soak.repeat([[]], [[0]], once, lambda number, row: None)


@pytest.mark.parametrize("split", [1, 2, 3, 7])
def test_every_candidate_of_a_run_goes_to_one_process(split: int) -> None:
    names = [f"c{number}" for number in range(11)]
    parts = soak.deal(["--tiny"], 2, names, split)
    assert len(parts) == 2 * split
    if split == 1:
        assert parts == [["--tiny"]] * 2
        return
    seeds = []
    for first in (0, split):
        run = parts[first : first + split]
        (seed,) = {part[part.index("--seed") + 1] for part in run}
        seeds.append(seed)
        dealt = [part[part.index("--only") + 1 :] for part in run]
        assert sorted(name for names_ in dealt for name in names_) == sorted(names)
        assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
    assert seeds[0] != seeds[1]


def test_a_run_counts_once_all_its_parts_are_there() -> None:
    names = ["plain", "constant", "hangs", "drafts"]

    def part(*outcomes: str, passed: bool = True, **more: Any) -> dict[str, Any]:
        rows = [{"name": name, "status": "right" if passed else "refused"} for name in outcomes]
        wrong = [] if passed else rows
        return {
            "passed": passed, "status": 0 if passed else 1, "conclusion": "", "wall_s": 3.0, "seconds": 2.0,
            "outcomes": rows, "wrong": wrong, **more,
        }  # fmt: skip

    rows = [part("plain", "hangs"), part("constant", "drafts", wall_s=5.0), part("plain", "hangs"), None]
    counted = soak.count(rows, names, 2)
    assert (counted["passed"], counted["wrong"], len(counted["rows"])) == (1, {}, 1)
    (run,) = counted["rows"]
    assert [outcome["name"] for outcome in run["outcomes"]] == names
    assert (run["wall_s"], run["seconds"], run["status"]) == (5.0, 4.0, 0)
    rows[3] = part("constant", "drafts", passed=False)
    counted = soak.count(rows, names, 2)
    assert (counted["passed"], counted["wrong"], len(counted["rows"])) == (1, {"constant": 1, "drafts": 1}, 2)
    assert counted["rows"][1]["status"] == 1
    silent = {
        "passed": False,
        "status": 2,
        "conclusion": "it gave no result",
        "wall_s": 1.0,
        "outcomes": [],
        "wrong": [],
    }
    assert soak.count([part("plain", "hangs"), silent], names, 2)["passed"] == 0
    assert soak.count([silent], names, 1)["passed"] == 0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--runs", "0"], "at least one run"),
        (["--cores", "4096"], "usable cores"),
        (["--split", "0"], "1 to"),
        (["--split", "999"], "1 to"),
        (["--split", "2", "--", "--only", "plain"], "leave out --only"),
        (["--out", "/nonesuch/soak.json"], "no folder"),
    ],
)
def test_a_soak_that_cannot_be_is_refused(options: list[str], sentence: str) -> None:
    parser = argparse.ArgumentParser()
    soak.arguments(parser)
    with pytest.raises(UserError, match=sentence):
        soak.run(parser.parse_args(options))


def test_a_run_that_gives_no_result_has_failed() -> None:
    row = soak.selftest(["--only", "nonesuch"], sorted(os.sched_getaffinity(0))[:1])
    assert (row["passed"], row["status"], row["conclusion"]) == (False, 2, "it gave no result")
    assert "nonesuch" in row["written"]


def test_what_was_judged_wrongly_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = [{"name": "constant", "status": "slipped through", "reason": "2.00x the incumbent"}]
    soak._say(2, 1, {"passed": False, "conclusion": "50/51 cheats rejected", "wall_s": 100.0, "wrong": wrong})
    assert "run 3: FAILED" in (said := capsys.readouterr().out)
    assert "constant slipped through: 2.00x the incumbent" in said
    soak._say(7, 4, {"passed": True, "conclusion": "13/13 cheats rejected", "wall_s": 100.0, "wrong": []})
    assert "run 2, part 4: passed" in capsys.readouterr().out
