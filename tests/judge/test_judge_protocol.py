"""Frames and messages, in one process over real pipes."""

from __future__ import annotations

import os
import random
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from engine.errors import ChildError
from engine.judge import protocol
from engine.judge.protocol import Closed, Invalid, Text, TimedOut


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    open_ends = {read, write}
    yield read, write
    for end in open_ends:
        try:
            os.close(end)
        except OSError:
            continue


def soon() -> float:
    return time.monotonic() + 5


def test_large_frames_pass_whole(pipe: tuple[int, int]) -> None:
    read, write = pipe
    message = {"ids": [random.randrange(10**6) for _ in range(100_000)], "text": "ü\n"}
    writer = threading.Thread(target=protocol.write_frame, args=(write, protocol.encode_frame(message), soon()))
    writer.start()
    assert protocol.read_frame(read, soon()) == message
    writer.join()


def test_frames_keep_their_order(pipe: tuple[int, int]) -> None:
    read, write = pipe
    for number in range(3):
        protocol.write_frame(write, protocol.encode_frame({"n": number}), soon())
    assert [protocol.read_frame(read, soon())["n"] for _ in range(3)] == [0, 1, 2]


@pytest.mark.parametrize(
    "body", [b"", b"PASS", b"[]", b'{"a": NaN}', b'{"a": Infinity}', b"\xff\xfe", b"[" * 100_000, b'{"a": 1} x']
)
def test_malformed_bodies_are_invalid(pipe: tuple[int, int], body: bytes) -> None:
    read, write = pipe
    frame = struct.pack(">I", len(body)) + body
    writer = threading.Thread(target=protocol.write_frame, args=(write, frame, soon()))
    writer.start()
    with pytest.raises(Invalid, match=r"not .*JSON"):
        protocol.read_frame(read, soon())
    writer.join()


def test_oversized_frames_are_refused_before_they_are_read(pipe: tuple[int, int]) -> None:
    read, write = pipe
    os.write(write, struct.pack(">I", 1001))
    with pytest.raises(Invalid, match="1,001 bytes"):
        protocol.read_frame(read, soon(), limit=1000)


def test_deadline_and_end_of_file(pipe: tuple[int, int]) -> None:
    read, write = pipe
    os.write(write, b"\x00\x00")
    with pytest.raises(TimedOut):
        protocol.read_frame(read, time.monotonic() + 0.05)
    os.close(write)
    with pytest.raises(Closed):
        protocol.read_frame(read, soon())


def test_unread_pipe_times_the_writer_out_and_a_closed_one_is_told(pipe: tuple[int, int]) -> None:
    read, write = pipe
    with pytest.raises(TimedOut):
        protocol.write_frame(write, bytes(1 << 20), time.monotonic() + 0.05)
    os.close(read)
    with pytest.raises(Closed):
        protocol.write_frame(write, b"x", soon())


@pytest.mark.parametrize("request_id", [True, 1.0, "1", None, 2])
def test_an_answer_must_repeat_its_number(request_id: object) -> None:
    with pytest.raises(Invalid, match="when asked 1"):
        protocol.unwrap({"request": request_id, "ok": {}}, 1)


def test_unwrap() -> None:
    assert protocol.unwrap({"request": 7, "ok": {"a": 1}}, 7) == {"a": 1}
    with pytest.raises(Invalid, match="neither"):
        protocol.unwrap({"request": 7}, 7)
    with pytest.raises(Exception, match="MemoryError") as failure:
        protocol.unwrap({"request": 7, "error": "MemoryError: 3 GB"}, 7)
    assert getattr(failure.value, "kind", "") == "crashed"


@pytest.mark.parametrize("steps", [(3, 5), (-1, 2), (2, 9), ("2", 2), (0, 0), (None, None), (4, 3)])
def test_explanatory_counts_are_dropped_where_they_make_no_sense(steps: tuple[object, object]) -> None:
    answer = {"texts": [{"ids": [1, 2, 3, 4, 5], "stop_reason": "length", "steps": steps[0], "emitted": steps[1]}]}
    (text,) = protocol.parse_texts(answer, 1, 5, 10)
    assert (text.steps, text.emitted) == (steps if steps == (3, 5) else (0, 0))
    assert text == Text((1, 2, 3, 4, 5), "length", text.steps, text.emitted)


def columns(**changes: object) -> dict[str, object]:
    good: dict[str, object] = {
        "choice": [1, 2],
        "choice_logit": [0.5, 1],
        "token_logit": [0.5, 0.25],
        "second": [3, 3],
        "second_logit": [0.1, 0.2],
        "following": 0,
    }
    return good | changes


@pytest.mark.parametrize(
    "changes",
    [
        {"choice": [1]},
        {"choice": [1, 10]},
        {"token_logit": [0.5, "x"]},
        {"token_logit": [0.5, float("inf")]},
        {"second_logit": None},
        {"following": -1},
        {"following": None},
    ],
)
def test_scores_are_checked(changes: dict[str, object]) -> None:
    assert protocol.parse_scores(columns(), 2, 10).choice == (1, 2)
    with pytest.raises(Invalid):
        protocol.parse_scores(columns(**changes), 2, 10)


def test_words_of_a_child_hide_nothing_and_can_be_stored() -> None:
    hostile = "a\ud800b\x1b[2Jc\u202ed\rend\n"
    with pytest.raises(ChildError) as failure:
        protocol.unwrap({"request": 1, "error": hostile}, 1)
    assert failure.value.reason == "a\ufffdb\ufffd[2Jc\ufffdd\ufffdend\n"
    (text,) = protocol.parse_texts({"texts": [{"ids": [1], "stop_reason": "\ud800eos"}]}, 1, 4, 10)
    assert text.stop_reason == "\ufffdeos"
