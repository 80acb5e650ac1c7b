"""Text in plenty: new positions whenever they are asked for, and another choice of it for every trial."""

from __future__ import annotations

import random
from collections.abc import Sequence

from engine.judge.hidden import HiddenPrompt
from engine.judge.pool import HEAD_TOKENS, SHARE, Pool
from engine.judge.protocol import Scores

PROMPTS = [HiddenPrompt(f"p{i}", "red", tuple(range(100 * i, 100 * i + 5 + i))) for i in range(1, 9)]


def score(head: Sequence[int], rest: Sequence[int]) -> Scores:
    assert len(head) == HEAD_TOKENS
    n = len(rest)
    return Scores(tuple(rest), (2.0,) * n, (2.0,) * n, (7,) * n, (1.0,) * n, 1)


def test_it_grows_to_what_is_asked_for_and_no_text_is_too_long() -> None:
    pool = Pool(PROMPTS, 64, random.Random(1), score)
    assert pool.tokens == 0
    pool.grow(500)
    assert 500 <= pool.tokens < 500 + 64
    before = pool.all
    pool.grow(400)  # there are as many
    assert pool.all == before
    for text in pool.all:
        assert len(text.prompt_ids) + len(text.ids) == 64
        assert set(text.prompt_ids + text.ids) <= {token for prompt in PROMPTS for token in prompt.ids}


def test_every_trial_looks_through_another_part() -> None:
    pool = Pool(PROMPTS, 32, random.Random(), score)
    pool.grow(28 * 40)
    draws = [[text.prompt for text in pool.draw(random.Random(trial))] for trial in range(20)]
    assert all(len(set(draw)) == len(draw) == round(SHARE * 40) for draw in draws)
    assert len({frozenset(draw) for draw in draws}) == 20
    assert set().union(*draws) == {text.prompt for text in pool.all}


def test_another_search_strings_its_text_together_in_another_way() -> None:
    one, other, same = (Pool(PROMPTS, 32, random.Random(seed), score) for seed in (1, 2, 1))
    for pool in (one, other, same):
        pool.grow(100)
    assert one.all == same.all
    assert [text.ids for text in one.all] != [text.ids for text in other.all]
