"""Acceptance: which drafts are what the target itself would have written, greedily or with a position's noise."""

from __future__ import annotations

from collections.abc import Sequence

from engine.drafters.contract import ANCHOR, DraftTree


def accept(tree: DraftTree, target_choice: Sequence[int]) -> tuple[list[int], int]:
    """Walk down from the anchor as long as some child is the target's own choice.

    `target_choice[row]` is the target's own token after that row (row 0 the anchor, row i + 1 node i), chosen
    by the tie rule of `engine.sample`; entries beyond the tree are ignored. Returns the accepted nodes in order,
    and the bonus token: the target's choice after the last of them, which is the next anchor. Where siblings
    hold the same token, the first is walked.
    """
    children: dict[tuple[int, int], int] = {}
    for node, (parent, token) in enumerate(zip(tree.parents, tree.tokens, strict=True)):
        children.setdefault((parent, token), node)
    path: list[int] = []
    at = ANCHOR
    while True:
        choice = target_choice[at + 1]
        child = children.get((at, choice))
        if child is None:
            return path, choice
        path.append(child)
        at = child
