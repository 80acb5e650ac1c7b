"""Suffix matching against a search that is written down plainly."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.drafters.contract import DraftShape
from engine.drafters.ngram import MATCHES_TRIED, NgramDrafter

ALPHABET = st.integers(0, 2)


def naive_matches(text: list[int], shortest: int, longest: int) -> list[int]:
    """Where the text's suffix occurred before (end of the match): longest first, then most recent."""
    ends: list[int] = []
    for length in range(longest, shortest - 1, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if length < len(text) and text[end - length : end] == text[len(text) - length :] and end not in ends:
                ends.append(end)
    return ends[:MATCHES_TRIED]


def naive_continuation(text: list[int], end: int, depth: int) -> list[int]:
    """What followed, read on into itself where it reaches the end of the text."""
    grown = list(text)
    for offset in range(depth):
        grown.append(grown[end + offset])
    return grown[len(text) :]


def paths(tree) -> set[tuple[int, ...]]:
    def path(node: int) -> tuple[int, ...]:
        return () if node < 0 else (*path(tree.parents[node]), tree.tokens[node])

    return {path(node) for node in range(len(tree))}


@settings(max_examples=300, deadline=None)
@given(
    text=st.lists(ALPHABET, min_size=1, max_size=40),
    splits=st.lists(st.integers(1, 5), max_size=10),
    shortest=st.integers(1, 3),
    more=st.integers(0, 3),
    depth=st.integers(1, 8),
)
def test_a_chain_is_the_first_match(text, splits, shortest: int, more: int, depth: int) -> None:
    drafter = NgramDrafter(shortest, shortest + more, candidates=3)
    drafter.begin()
    committed, pieces = text[:-1], iter([*splits, 1000])
    at = 0
    while at < len(committed):  # observed in pieces, as steps commit them
        size = next(pieces)
        drafter.observe(committed[at : at + size], None)
        at += size
    tree = drafter.propose(text[-1], DraftShape(depth, depth + 1))
    ends = naive_matches(text, shortest, shortest + more)
    assert list(tree.tokens) == (naive_continuation(text, ends[0], depth) if ends else [])
    assert tree.is_chain


@settings(max_examples=200, deadline=None)
@given(
    text=st.lists(ALPHABET, min_size=1, max_size=40),
    shortest=st.integers(1, 2),
    more=st.integers(0, 3),
    candidates=st.integers(1, 4),
    depth=st.integers(1, 6),
)
def test_a_tree_holds_the_first_different_continuations(text, shortest, more, candidates, depth) -> None:
    drafter = NgramDrafter(shortest, shortest + more, candidates)
    drafter.begin()
    drafter.observe(text[:-1], None)
    tree = drafter.propose(text[-1], DraftShape(depth, 100, tree=True))
    found = [naive_continuation(text, end, depth) for end in naive_matches(text, shortest, shortest + more)]
    different = [c for index, c in enumerate(found) if c not in found[:index]][:candidates]
    assert paths(tree) == {tuple(c[:length]) for c in different for length in range(1, depth + 1)}
    assert set(tree.logprobs) <= {0.0}


def test_rows_bound_the_tree() -> None:
    drafter = NgramDrafter(1, 2, candidates=4)
    drafter.begin()
    drafter.observe([1, 2, 3, 1, 4, 5, 1, 6, 7], None)
    assert [len(drafter.propose(1, DraftShape(3, rows, tree=True))) for rows in (1, 2, 5, 50)] == [0, 1, 4, 9]


def test_begin_forgets() -> None:
    drafter = NgramDrafter(1, 2)
    drafter.begin()
    drafter.observe([1, 2, 3], None)
    assert drafter.propose(1, DraftShape(2, 3)).tokens == (2, 3)
    drafter.begin()
    assert len(drafter.propose(1, DraftShape(2, 3))) == 0


def test_a_frequent_suffix_costs_no_more_than_a_rare_one(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = NgramDrafter(1, 4, candidates=4)
    drafter.begin()
    drafter.observe([5] * 3000, None)
    ends: list[int] = []
    continuation = drafter._continuation
    monkeypatch.setattr(drafter, "_continuation", lambda end, *rest: ends.append(end) or continuation(end, *rest))
    assert drafter.propose(5, DraftShape(6, 32, tree=True)).tokens == (5,) * 6
    assert len(ends) == MATCHES_TRIED
