"""A suffix match where there is a long enough one, the neural drafter otherwise."""

from __future__ import annotations

from torch import Tensor

from engine.drafters.contract import Drafter, DraftShape, DraftTree
from engine.drafters.ngram import NgramDrafter


class HybridDrafter:
    """Asks `matcher` first, whose shortest match is the plan's `hybrid_min_match`, then `neural`.

    Both hold the whole text. A neural drafter that works lazily (all of ours do) pays for steps that the
    matcher served in one pass, when it is asked again.
    """

    def __init__(self, matcher: NgramDrafter, neural: Drafter) -> None:
        self.matcher, self.neural = matcher, neural
        self.name = f"{matcher.name}+{neural.name}"
        self.taps = neural.taps
        self.max_depth = max(matcher.max_depth, neural.max_depth)

    def begin(self) -> None:
        self.matcher.begin()
        self.neural.begin()

    def observe(self, ids: list[int], taps: Tensor | None) -> None:
        self.matcher.observe(ids, None)
        self.neural.observe(ids, taps)

    def propose(self, anchor: int, shape: DraftShape) -> DraftTree:
        tree = self.matcher.propose(anchor, shape)
        return tree if len(tree) else self.neural.propose(anchor, shape)
