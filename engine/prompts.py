"""Prompts: the shipped set, or any JSONL file with `prompt` or `turns` on every line."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.deployment import SHIPPED_PROMPTS
from engine.errors import UserError
from engine.paths import user_path

SHIPPED_FILE = Path(__file__).resolve().parent / "prompts_data" / "shipped.jsonl"
NO_CATEGORY = "uncategorised"
MOST_BYTES = 64 * 2**20
"""Of a prompts file, which is read whole."""


@dataclass(frozen=True)
class Prompt:
    """One conversation. `turns` are the user's messages in order; the judge asks the first one only, because a
    later turn follows an answer that differs from model to model."""

    id: str
    category: str
    turns: tuple[str, ...]


def load_prompts(ref: str) -> list[Prompt]:
    """Read the prompts of `ref`: "shipped", or the path of a JSONL file.

    Each line is an object with `prompt` or `turns` (a string or a list of strings) and, where it has them,
    `id` (or `question_id`) and `category`; other fields are ignored, blank lines too. Raises UserError that names
    file and line for a line that is broken, and for a file without prompts.
    """
    path = SHIPPED_FILE if ref == SHIPPED_PROMPTS else user_path(ref, field="prompts")
    if path.exists() and not path.is_file() and not path.is_dir():
        raise _refusal(f"The prompts file {path} is a pipe or a device; give a JSONL file.")
    if path.is_file() and path.stat().st_size > MOST_BYTES:
        raise _refusal(f"The prompts file {path} has over {MOST_BYTES // 2**20} MiB; give a sample of the traffic.")
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise _refusal(f"Cannot read the prompts file {path}: {error.strerror or error}.") from None
    prompts: list[Prompt] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        prompt = _parse(line, path, number)
        if prompt.id in seen:
            raise _refusal(f"{path}, line {number}: the id {prompt.id!r} is that of line {seen[prompt.id]} already.")
        seen[prompt.id] = number
        prompts.append(prompt)
    if not prompts:
        raise _refusal(f"The prompts file {path} is empty; give it one JSON object with `prompt` or `turns` a line.")
    return prompts


def _parse(line: bytes, path: Path, number: int) -> Prompt:
    where = f"{path}, line {number}"
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        raise _refusal(f"{where}: not valid JSON.") from None
    if not isinstance(data, dict):
        raise _refusal(f"{where}: must be a JSON object with `prompt` or `turns`.")
    if ("prompt" in data) == ("turns" in data):
        raise _refusal(f"{where}: must have either `prompt` or `turns`.")
    name = "prompt" if "prompt" in data else "turns"
    value = data[name]
    turns = [value] if isinstance(value, str) else value
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise _refusal(f"{where}: `{name}` must be a text or a list of texts, none of them empty.")
    try:
        json.dumps([turns, data.get("id"), data.get("category")], ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise _refusal(f"{where}: holds half a surrogate pair, which is no valid Unicode.") from None
    identity = data.get("id", data.get("question_id", f"line-{number}"))
    return Prompt(
        _label(identity, "id", where), _label(data.get("category", NO_CATEGORY), "category", where), tuple(turns)
    )


def _label(value: Any, name: str, where: str) -> str:
    if type(value) is int:
        return str(value)
    if not isinstance(value, str) or not value.strip():
        raise _refusal(f"{where}: `{name}` must be a text or a whole number.")
    return value


def _refusal(sentence: str) -> UserError:
    return UserError(sentence, code="invalid-prompts", field="prompts")
