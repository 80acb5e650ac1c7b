"""Text in plenty to look for sensitive prefixes in: prompts strung together in random order, scored by stock.

One forward pass tells the gap at every position of such a text, and there are as many texts as one likes. They are
made and scored as trials need them, and kept as long as the judge's process lives.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from engine.judge.hidden import HiddenPrompt
from engine.judge.probes import Seen
from engine.judge.protocol import Scores

Score = Callable[[Sequence[int], Sequence[int]], Scores]
HEAD_TOKENS = 4
"""Of a text, not looked at: after fewer there is no context to speak of."""
SHARE = 0.75
"""Of the texts, drawn anew for every trial: the most sensitive prefixes are not the same ones each time."""


class Pool:
    """Greedy scores of strung-together prompts of at most `longest` tokens; `score` is stock's, in one pass."""

    def __init__(self, prompts: Sequence[HiddenPrompt], longest: int, rng: random.Random, score: Score) -> None:
        self._prompts = prompts
        self._longest = longest
        self._rng = rng
        self._score = score
        self._texts: list[Seen] = []

    @property
    def tokens(self) -> int:
        """Positions that stock has scored."""
        return sum(len(text.ids) for text in self._texts)

    def grow(self, tokens: int) -> None:
        """Have stock score texts until there are `tokens` positions, at least."""
        while self.tokens < tokens:
            self._texts.append(self._next())

    @property
    def all(self) -> tuple[Seen, ...]:
        return tuple(self._texts)

    def draw(self, rng: random.Random) -> list[Seen]:
        """Some of the texts, for one trial."""
        return rng.sample(self._texts, round(SHARE * len(self._texts)))

    def _next(self) -> Seen:
        ids: list[int] = []
        while len(ids) < self._longest:
            ids += self._rng.choice(self._prompts).ids
        head, rest = tuple(ids[:HEAD_TOKENS]), tuple(ids[HEAD_TOKENS : self._longest])
        return Seen(f"text-{len(self._texts) + 1}", "strung together", head, rest, self._score(head, rest))
