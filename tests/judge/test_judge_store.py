"""What the judge keeps on disk, and that a kill in mid-line costs that line only."""

from __future__ import annotations

from pathlib import Path

from engine.judge.floor import Floor
from engine.judge.protocol import Text
from engine.judge.store import FILE_NAME, KEPT_REPEATS, Store

IDENTITY = {"deployment": {"target": "x"}}
FLOOR = Floor(0.25, 3, 400, "made up")


def test_kept_and_read_back(tmp_path: Path) -> None:
    store = Store(tmp_path, IDENTITY)
    assert store.text("stock 1", [1, 2], 8) is None
    store.keep_text("stock 1", [1, 2], 8, Text((5, 0), "eos", 3, 4))
    store.keep_floor("stock 1", FLOOR)
    store.keep_repeats([0.01, -0.02])
    for again in (store, Store(tmp_path, IDENTITY)):
        assert again.text("stock 1", [1, 2], 8) == Text((5, 0), "eos")
        assert again.floor("stock 1") == FLOOR
        assert again.repeats == [0.01, -0.02]


def test_another_question_is_another_answer(tmp_path: Path) -> None:
    store = Store(tmp_path, IDENTITY)
    store.keep_text("stock 1", [1, 2], 8, Text((5,), "length"))
    store.keep_floor("stock 1", FLOOR)
    assert store.text("stock 2", [1, 2], 8) is None
    assert store.text("stock 1", [1, 2, 3], 8) is None
    assert store.text("stock 1", [1, 2], 9) is None
    assert store.floor("stock 2") is None
    other = Store(tmp_path, {"deployment": {"target": "y"}})
    assert other.text("stock 1", [1, 2], 8) is None


def test_line_cut_short_by_a_kill_costs_itself_only(tmp_path: Path) -> None:
    store = Store(tmp_path, IDENTITY)
    store.keep_repeats([0.5])
    store.keep_repeats([0.25])
    file = tmp_path / FILE_NAME
    file.write_bytes(file.read_bytes()[:-9])
    again = Store(tmp_path, IDENTITY)
    assert again.repeats == [0.5]
    again.keep_repeats([0.125])
    assert Store(tmp_path, IDENTITY).repeats == [0.5, 0.125]


def test_only_the_newest_repeats_count(tmp_path: Path) -> None:
    store = Store(tmp_path, IDENTITY)
    for number in range(KEPT_REPEATS + 5):
        store.keep_repeats([float(number)])
    assert store.repeats == [float(number) for number in range(5, KEPT_REPEATS + 5)]
