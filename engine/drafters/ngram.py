"""Suffix matches: what followed the last tokens when they occurred before, in prompt or output."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from engine.drafters.contract import EMPTY, DraftShape, DraftTree
from engine.tree import merge

MATCHES_TRIED = 32
"""Matches looked at in one proposal, so that a frequent n-gram cannot make a step slow."""


class NgramDrafter:
    """Proposes the continuation of the longest earlier occurrence of the text's own suffix.

    Suffixes of `longest` down to `shortest` tokens (the anchor included) are looked up; among occurrences of one
    length the most recent comes first. A continuation that reaches the end of the text goes on with what it has
    itself copied, as LZ77 does, so a text that repeats with period p is drafted to full depth. Up to `candidates`
    different continuations become one tree.

    The index maps every n-gram of the committed text to where it ended, and is extended token by token:
    (longest - shortest + 1) dictionary operations for each.
    """

    name = "ngram"
    taps: tuple[int, ...] = ()
    max_depth = 64

    def __init__(self, shortest: int, longest: int, candidates: int = 1) -> None:
        if not 1 <= shortest <= longest:
            raise ValueError(f"match lengths {shortest} to {longest} are no range")
        self.shortest, self.longest, self.candidates = shortest, longest, candidates
        self._text: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = {}

    def begin(self) -> None:
        self._text, self._ends = [], {}

    def observe(self, ids: list[int], taps: Tensor | None) -> None:
        text = self._text
        for token in ids:
            text.append(token)
            end = len(text)
            for length in range(self.shortest, min(self.longest, end) + 1):
                self._ends.setdefault(tuple(text[end - length :]), []).append(end)

    def propose(self, anchor: int, shape: DraftShape) -> DraftTree:
        if shape.depth < 1 or shape.rows < 2:
            return EMPTY
        wanted = self.candidates if shape.tree else 1
        text = [*self._text[-self.longest + 1 :], anchor] if self.longest > 1 else [anchor]
        kept: list[list[int]] = []
        for end in self._matches(text):
            continuation = self._continuation(end, anchor, min(shape.depth, self.max_depth))
            if continuation not in kept:
                kept.append(continuation)
                if len(kept) == wanted:
                    break
        return merge(kept, shape)

    def _matches(self, suffix: list[int]) -> Iterator[int]:
        """Where earlier occurrences of the suffix ended: longest match first, then most recent; no end twice."""
        seen: set[int] = set()
        for length in range(min(self.longest, len(suffix)), self.shortest - 1, -1):
            for end in reversed(self._ends.get(tuple(suffix[-length:]), ())):
                if end not in seen:
                    seen.add(end)
                    yield end
                    if len(seen) == MATCHES_TRIED:
                        return

    def _continuation(self, end: int, anchor: int, depth: int) -> list[int]:
        result = self._text[end : end + depth]
        if len(result) < depth:
            result.append(anchor)
            period = len(self._text) + 1 - end
            while len(result) < depth:
                result.append(result[len(result) - period])
        return result
