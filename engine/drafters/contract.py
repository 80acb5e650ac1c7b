"""The contract that every drafter meets.

A decode step starts with an **anchor**: the newest emitted token, whose target KV is not yet computed.
The drafter proposes a tree of draft tokens below the anchor; the target verifies anchor and drafts in one
forward pass; a path of drafts is accepted and one bonus token, the next anchor, is added.
A chain is a tree in which every node has at most one child.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

ANCHOR = -1
"""The parent of a first-level node."""


@dataclass(frozen=True)
class DraftTree:
    """Draft tokens below an anchor, parents before children.

    `parents[i]` is a node index below i, or ANCHOR. `logprobs[i]` is the drafter's log-probability of
    node i along its path, in nats, non-positive (0.0 where the drafter has none, as for suffix matches).
    An empty tree is legal: the step then is a plain autoregressive one.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not len(self.tokens) == len(self.parents) == len(self.logprobs):
            raise ValueError("tokens, parents and logprobs differ in length")
        if any(not ANCHOR <= parent < node for node, parent in enumerate(self.parents)):
            raise ValueError("a node's parent must come before it")

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        return all(parent == node - 1 for node, parent in enumerate(self.parents))


EMPTY = DraftTree()


@dataclass(frozen=True)
class DraftShape:
    """How much may be drafted: `depth` draft tokens on a path, `rows` verify rows with the anchor included."""

    depth: int
    rows: int
    tree: bool = False


class Drafter(Protocol):
    """Proposes draft trees for one request at a time.

    Order of calls: `begin()`, `observe(prompt, taps)`, then by turns `propose` and `observe`.
    A drafter holds the committed text only; whatever it computes for a proposal is rolled back by itself
    before the next call, so the decode loop never tells it what was rejected.
    """

    name: str
    taps: tuple[int, ...]
    """Target layers whose output (the residual stream after that layer) it needs, 0-based; may be empty."""
    max_depth: int

    def begin(self) -> None:
        """Forget the previous request."""

    def observe(self, ids: list[int], taps: Tensor | None) -> None:
        """Told of committed tokens, whose target KV now exists: the prompt first, then each step's anchor
        and accepted drafts (not the new bonus token).

        `taps`: [len(ids), len(self.taps) * hidden] in the target's dtype, or None where `self.taps` is empty.
        """

    def propose(self, anchor: int, shape: DraftShape) -> DraftTree:
        """Draft below `anchor`, which follows the committed text. At most `shape.rows - 1` nodes, no deeper
        than `shape.depth`; a chain where `shape.tree` is false."""
