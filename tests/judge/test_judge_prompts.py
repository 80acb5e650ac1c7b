"""Reading prompts: the shipped set and files of one's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.errors import UserError
from engine.prompts import NO_CATEGORY, Prompt, load_prompts


def test_shipped_set() -> None:
    prompts = load_prompts("shipped")
    assert len(prompts) >= 60
    assert len({prompt.category for prompt in prompts}) >= 6
    assert all(prompt.turns[0].strip() for prompt in prompts)


def test_fields_are_read(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    lines = [
        {"prompt": "Hello", "id": "a", "category": "chat"},
        {"turns": ["One", "Two"], "question_id": 82, "reference": ["ignored"]},
        {"turns": "Alone"},
        {"prompt": ["In a list", "and a second"]},
    ]
    file.write_text("\n".join(json.dumps(line) for line in lines[:2]) + "\n\n" + "\n".join(map(json.dumps, lines[2:])))
    assert load_prompts(str(file)) == [
        Prompt("a", "chat", ("Hello",)),
        Prompt("82", NO_CATEGORY, ("One", "Two")),
        Prompt("line-4", NO_CATEGORY, ("Alone",)),
        Prompt("line-5", NO_CATEGORY, ("In a list", "and a second")),
    ]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"prompt": "x"', "not valid JSON"),
        ("[1]", "JSON object"),
        ('{"text": "x"}', "either `prompt` or `turns`"),
        ('{"prompt": "x", "turns": ["y"]}', "either `prompt` or `turns`"),
        ('{"prompt": ""}', "`prompt` must be"),
        ('{"turns": []}', "`turns` must be"),
        ('{"turns": ["x", 3]}', "`turns` must be"),
        ('{"prompt": "x", "id": ""}', "`id` must be"),
        ('{"prompt": "x", "category": null}', "`category` must be"),
        ('{"prompt": "x", "id": "same"}', "that of line 1"),
        ("\udcff", "not valid JSON"),
    ],
)
def test_broken_line_is_named(tmp_path: Path, line: str, problem: str) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_bytes(b'{"prompt": "fine", "id": "same"}\n\n' + line.encode(errors="surrogateescape") + b"\n")
    with pytest.raises(UserError, match="line 3") as error:
        load_prompts(str(file))
    assert problem in error.value.sentence
    assert str(file) in error.value.sentence
    assert error.value.field == "prompts"


@pytest.mark.parametrize("content", ["", "\n  \n"])
def test_empty_file_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "none.jsonl"
    file.write_text(content)
    with pytest.raises(UserError, match="is empty"):
        load_prompts(str(file))


def test_missing_file_and_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere.jsonl", tmp_path):
        with pytest.raises(UserError, match=r"Cannot read the prompts file .*"):
            load_prompts(str(path))
