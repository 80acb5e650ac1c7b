"""A hybrid asks the neural drafter only where no suffix matches, and keeps both informed."""

from __future__ import annotations

from engine.drafters.contract import DraftShape, DraftTree
from engine.drafters.hybrid import HybridDrafter
from engine.drafters.ngram import NgramDrafter
from engine.tree import chain
from tests.decode.toy import TestDrafter

NEURAL = chain([90, 91, 92])


def hybrid(min_match: int) -> tuple[HybridDrafter, TestDrafter]:
    neural = TestDrafter(lambda text, shape: NEURAL)
    drafter = HybridDrafter(NgramDrafter(min_match, 4), neural)
    drafter.begin()
    return drafter, neural


def propose(text: list[int], min_match: int) -> DraftTree:
    drafter, _ = hybrid(min_match)
    drafter.observe(text[:-1], None)
    return drafter.propose(text[-1], DraftShape(3, 4))


def test_a_long_enough_match_is_preferred() -> None:
    text = [1, 2, 3, 4, 5, 6, 2, 3]  # the suffix 2, 3 occurred before
    assert propose(text, 2).tokens == (4, 5, 6)
    assert propose(text, 3) is NEURAL


def test_both_hold_the_whole_text() -> None:
    drafter, neural = hybrid(2)
    drafter.observe([1, 2, 3, 1], None)
    assert drafter.propose(2, DraftShape(3, 4)).tokens == (3, 1, 2)
    assert neural.shapes == []
    drafter.observe([2, 3, 1], None)
    assert neural.text == drafter.matcher._text == [1, 2, 3, 1, 2, 3, 1]
    drafter.begin()
    assert neural.text == drafter.matcher._text == []


def test_taps_and_name_are_the_neural_drafters() -> None:
    neural = TestDrafter(lambda text, shape: NEURAL, taps=(3, 1))
    drafter = HybridDrafter(NgramDrafter(2, 4), neural)
    assert drafter.taps == (3, 1)
    assert drafter.name == "ngram+test"
