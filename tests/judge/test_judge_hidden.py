"""Which prompts a trial sees."""

from __future__ import annotations

from collections import Counter

import pytest

from engine.judge.hidden import HiddenPrompt, draw


def prompts(count: int, categories: int) -> list[HiddenPrompt]:
    return [HiddenPrompt(f"p{i}", f"c{i % categories}", (i,)) for i in range(count)]


@pytest.mark.parametrize(("count", "drawn"), [(60, 8), (61, 8), (7, 3), (3, 8), (1, 2)])
def test_all_prompts_are_used_before_one_returns(count: int, drawn: int) -> None:
    pool = prompts(count, 5)
    sequence = [prompt.id for number in range(30) for prompt in draw(pool, 4, number, drawn)]
    assert len(sequence) == 30 * drawn
    for start in range(0, len(sequence) - count + 1, count):
        assert len(set(sequence[start : start + count])) == count


def test_categories_are_spread() -> None:
    for number in range(5):
        seen = Counter(prompt.category for prompt in draw(prompts(60, 6), 9, number, 6))
        assert len(seen) == 6


def test_seed_number_and_salt_decide() -> None:
    pool = prompts(60, 6)
    first = draw(pool, 1, 3, 8)
    assert first == draw(list(pool), 1, 3, 8)
    assert first != draw(pool, 2, 3, 8)
    assert first != draw(pool, 1, 4, 8)
    assert first != draw(pool, 1, 3, 8, "closing")
