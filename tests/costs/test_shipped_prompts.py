"""The shipped prompts are what the README says they are."""

from __future__ import annotations

import json
import re
from collections import Counter

from engine.prompts import SHIPPED_FILE, load_prompts


def test_shipped_prompts() -> None:
    lines = [json.loads(line) for line in SHIPPED_FILE.read_text(encoding="utf-8").splitlines()]
    assert len(lines) >= 72
    counts = Counter(line["category"] for line in lines)
    assert len(counts) >= 8
    assert min(counts.values()) >= 8
    for line in lines:
        assert set(line) == {"id", "category", "prompt"}
        assert re.fullmatch(rf"{line['category']}-\d\d", line["id"])
        assert 5 <= len(line["prompt"].split()) <= 70
        assert line["prompt"] == line["prompt"].strip()
    for key in ("id", "prompt"):
        assert len({line[key] for line in lines}) == len(lines)


def test_the_loader_reads_them_all() -> None:
    lines = [json.loads(line) for line in SHIPPED_FILE.read_text(encoding="utf-8").splitlines()]
    assert [(p.id, p.category, p.turns) for p in load_prompts("shipped")] == [
        (line["id"], line["category"], (line["prompt"],)) for line in lines
    ]
