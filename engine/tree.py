"""Draft trees: built best first from marginals, merged from continuations, and laid out for a verify pass.

A verify pass has one row for the anchor (row 0) and one for each node (node i is row i + 1).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.drafters.contract import ANCHOR, DraftShape, DraftTree


def chain(tokens: Sequence[int], logprobs: Sequence[float] | None = None) -> DraftTree:
    """The tree with one path. `logprobs` are path log-probabilities; 0.0 where the drafter has none."""
    parents = range(ANCHOR, len(tokens) - 1)
    return DraftTree(tuple(tokens), tuple(parents), tuple(logprobs) if logprobs is not None else (0.0,) * len(tokens))


def best_first(logprobs: Sequence[Sequence[float]], tokens: Sequence[Sequence[int]], shape: DraftShape) -> DraftTree:
    """The `shape.rows - 1` most probable nodes of the product of per-position marginals.

    `logprobs[d][r]` and `tokens[d][r]` [D, k]: the r-th most probable token at depth d and its log-probability
    in nats, each row in descending order. A node's path probability is the product along its path; with
    these, the expected number of accepted drafts is the sum over nodes, so the most probable nodes are the best
    tree of that size. A node is expanded into its best child and its next sibling, neither more probable than
    it is, so the heap yields nodes in descending order, parents first. Ties go to the node found first.
    """
    depth = min(shape.depth, len(logprobs))
    budget = shape.rows - 1
    if depth < 1 or budget < 1:
        return DraftTree()
    out_tokens: list[int] = []
    out_parents: list[int] = []
    out_scores: list[float] = []
    found = 0
    # (-path log-probability, order found, depth, rank, parent, parent's path log-probability)
    heap: list[tuple[float, int, int, int, int, float]] = [(-logprobs[0][0], found, 0, 0, ANCHOR, 0.0)]
    while heap and len(out_tokens) < budget:
        negative, _, level, rank, parent, above = heapq.heappop(heap)
        node = len(out_tokens)
        out_tokens.append(tokens[level][rank])
        out_parents.append(parent)
        out_scores.append(-negative)
        if level + 1 < depth:
            found += 1
            heapq.heappush(heap, (negative - logprobs[level + 1][0], found, level + 1, 0, node, -negative))
        if rank + 1 < len(logprobs[level]):
            found += 1
            heapq.heappush(heap, (-(above + logprobs[level][rank + 1]), found, level, rank + 1, parent, above))
    return DraftTree(tuple(out_tokens), tuple(out_parents), tuple(out_scores))


def merge(continuations: Iterable[Sequence[int]], shape: DraftShape) -> DraftTree:
    """One tree of several continuations, common prefixes shared, in the order given until the rows are used up.

    Log-probabilities are 0.0: continuations carry none.
    """
    budget = shape.rows - 1
    tokens: list[int] = []
    parents: list[int] = []
    children: dict[tuple[int, int], int] = {}
    for continuation in continuations:
        parent = ANCHOR
        for token in continuation[: shape.depth]:
            node = children.get((parent, token))
            if node is None:
                if len(tokens) >= budget:
                    break
                node = children[(parent, token)] = len(tokens)
                tokens.append(token)
                parents.append(parent)
            parent = node
    return DraftTree(tuple(tokens), tuple(parents), (0.0,) * len(tokens))


def depths(tree: DraftTree) -> list[int]:
    """Depth of each node; a child of the anchor has depth 1."""
    result: list[int] = []
    for parent in tree.parents:
        result.append(1 if parent == ANCHOR else result[parent] + 1)
    return result


def tree_mask(tree: DraftTree, width: int = 0) -> Tensor:
    """Which of the new rows each row sees: itself and its ancestors, the anchor included. bool [W, W].

    W is `width`, or len(tree) + 1 where that is larger; the rows that only pad see themselves alone and no other
    row sees them.
    """
    mask = np.eye(max(width, len(tree) + 1), dtype=np.bool_)
    mask[: len(tree) + 1, 0] = True
    for node, parent in enumerate(tree.parents):
        if parent != ANCHOR:
            mask[node + 1] |= mask[parent + 1]
    return torch.from_numpy(mask)


def positions(tree: DraftTree, start: int) -> list[int]:
    """Absolute position of each row, the anchor's being `start`. Siblings share one."""
    return [start, *(start + depth for depth in depths(tree))]


def check_shape(tree: DraftTree, shape: DraftShape) -> None:
    """Raise ValueError where a drafter went beyond what it was asked for."""
    if len(tree) > shape.rows - 1:
        raise ValueError(f"{len(tree)} draft nodes, {shape.rows - 1} were asked for")
    if not shape.tree and not tree.is_chain:
        raise ValueError("a chain was asked for")
    if max(depths(tree), default=0) > shape.depth:
        raise ValueError(f"drafts deeper than the {shape.depth} tokens that were asked for")
