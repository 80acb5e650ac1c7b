"""Best-first trees, merged continuations, masks, positions and the acceptance walk against brute force."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.drafters.contract import ANCHOR, DraftShape, DraftTree
from engine.sample import choose
from engine.tree import best_first, chain, check_shape, depths, merge, positions, tree_mask
from engine.verify import accept


@st.composite
def trees(draw: st.DrawFn, tokens: int = 3) -> DraftTree:
    size = draw(st.integers(0, 14))
    parents = tuple(draw(st.integers(ANCHOR, node - 1)) for node in range(size))
    ids = tuple(draw(st.integers(0, tokens - 1)) for _ in range(size))
    return DraftTree(ids, parents, (0.0,) * size)


def path_to(tree: DraftTree, node: int) -> list[int]:
    """Nodes from the first level down to `node`."""
    return [] if node == ANCHOR else [*path_to(tree, tree.parents[node]), node]


@st.composite
def marginals(draw: st.DrawFn) -> tuple[list[list[float]], list[list[int]]]:
    depth, width = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    weights = [draw(st.lists(st.floats(0.01, 1.0), min_size=width, max_size=width, unique=True)) for _ in range(depth)]
    logprobs = [sorted((math.log(w / (sum(row) + 0.1)) for w in row), reverse=True) for row in weights]
    return logprobs, [[10 * level + rank for rank in range(width)] for level in range(depth)]


@settings(max_examples=200, deadline=None)
@given(given_marginals=marginals(), rows=st.integers(2, 40), depth=st.integers(1, 5))
def test_best_first_is_the_best_tree_of_its_size(given_marginals, rows: int, depth: int) -> None:
    logprobs, tokens = given_marginals
    tree = best_first(logprobs, tokens, DraftShape(depth, rows, tree=True))
    levels = min(depth, len(logprobs))
    everything = {
        tuple(tokens[level][rank] for level, rank in enumerate(ranks)): sum(
            logprobs[level][rank] for level, rank in enumerate(ranks)
        )
        for length in range(1, levels + 1)
        for ranks in itertools.product(range(len(logprobs[0])), repeat=length)
    }
    mine = [tuple(tree.tokens[node] for node in path_to(tree, leaf)) for leaf in range(len(tree))]
    best = sorted(everything.values(), reverse=True)[: rows - 1]
    assert len(mine) == len(set(mine)) == len(best)
    assert [everything[path] for path in mine] == pytest.approx(best)
    assert list(tree.logprobs) == pytest.approx(best)


def test_best_first_on_certain_tokens_keeps_parents_first() -> None:
    tree = best_first([[0.0, -1.0]] * 3, [[1, 2]] * 3, DraftShape(3, 5, tree=True))
    assert tree.tokens[:3] == (1, 1, 1)
    assert tree.parents[:3] == (ANCHOR, 0, 1)


@pytest.mark.parametrize(("depth", "rows"), [(0, 5), (3, 1)])
def test_best_first_of_nothing(depth: int, rows: int) -> None:
    assert len(best_first([[-0.1]], [[1]], DraftShape(depth, rows, tree=True))) == 0


@settings(max_examples=200, deadline=None)
@given(
    continuations=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=4),
    rows=st.integers(2, 12),
    depth=st.integers(1, 5),
)
def test_merge_shares_prefixes(continuations: list[list[int]], rows: int, depth: int) -> None:
    tree = merge(continuations, DraftShape(depth, rows, tree=True))
    prefixes = [tuple(c[:length]) for c in continuations for length in range(1, min(depth, len(c)) + 1)]
    mine = [tuple(tree.tokens[node] for node in path_to(tree, leaf)) for leaf in range(len(tree))]
    # Distinct prefixes, in the order of the continuations, as long as rows are left for what comes above them.
    assert mine == list(dict.fromkeys(prefixes))[: rows - 1]


@settings(max_examples=150, deadline=None)
@given(tree=trees(), padding=st.integers(0, 5), start=st.integers(0, 99))
def test_masks_and_positions_against_the_paths(tree: DraftTree, padding: int, start: int) -> None:
    rows = len(tree) + 1
    mask = tree_mask(tree, rows + padding)
    expected = torch.zeros(rows + padding, rows + padding, dtype=torch.bool)
    expected[0, 0] = True
    for node in range(len(tree)):
        expected[node + 1, [0, *(above + 1 for above in path_to(tree, node))]] = True
    for row in range(rows, rows + padding):
        expected[row, row] = True
    assert torch.equal(mask, expected)
    assert positions(tree, start) == [start, *(start + len(path_to(tree, node)) for node in range(len(tree)))]
    assert torch.equal(tree_mask(chain([1] * len(tree))), torch.ones(rows, rows).tril().bool())


@settings(max_examples=300, deadline=None)
@given(tree=trees(), data=st.data())
def test_the_walk_follows_the_targets_choices(tree: DraftTree, data: st.DataObject) -> None:
    choice = [data.draw(st.integers(0, 2)) for _ in range(len(tree) + 1)]
    path, bonus = accept(tree, [*choice, 7, 7])
    at = ANCHOR
    for node in path:
        assert tree.parents[node] == at
        assert tree.tokens[node] == choice[at + 1]
        at = node
    assert bonus == choice[at + 1]
    assert all(tree.tokens[node] != bonus for node in range(len(tree)) if tree.parents[node] == at)


def test_of_equal_siblings_the_first_is_walked() -> None:
    tree = DraftTree((5, 5, 6), (ANCHOR, ANCHOR, 1), (0.0,) * 3)
    assert accept(tree, [5, 6, 7, 8]) == ([0], 6)


@pytest.mark.parametrize(
    ("tree", "shape"),
    [
        (chain([1, 2, 3]), DraftShape(3, 3)),
        (chain([1, 2, 3]), DraftShape(2, 9)),
        (DraftTree((1, 2), (-1, -1), (0.0, 0.0)), DraftShape(2, 9)),
    ],
    ids=["rows", "depth", "no chain"],
)
def test_shapes_are_enforced(tree: DraftTree, shape: DraftShape) -> None:
    with pytest.raises(ValueError, match=r"draft|chain"):
        check_shape(tree, shape)


def test_depths() -> None:
    assert depths(DraftTree((1, 2, 3, 4), (-1, 0, -1, 1), (0.0,) * 4)) == [1, 2, 1, 3]


def test_ties_go_to_the_lowest_id_after_rounding() -> None:
    logits = torch.tensor([[0.5, 2.0, 2.0 + 2e-3, 1.0], [3.0, -1.0, 3.0, 3.0]])
    assert choose(logits, torch.float32).tolist() == [2, 0]
    assert choose(logits, torch.bfloat16).tolist() == [1, 0]
    assert choose(logits[0], torch.float32).item() == 2
    wide = torch.full((2, 49152), -3.0)
    wide[0, [40_000, 7]] = 1.5
    wide[1, [49_151, 48_000]] = 1.5
    assert choose(wide, torch.bfloat16).tolist() == [7, 48_000]
