"""What the judge asks: a prompt, or the regime's batch of them, with the noise that its tokens are sampled with.

What our own plans are asked follows from the search's seed, a purpose and a number. What foreign code is asked follows
from a secret of the search as well, for it may know the seed. A trial's record holds the questions themselves.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, replace

from engine.deployment import Regime
from engine.judge.hidden import HiddenPrompt, Material, draw
from engine.judge.pool import Pool, Score
from engine.sampling import Sampling


@dataclass(frozen=True)
class Question:
    """Prompts that are asked at once. `requests[i]` numbers prompt i; with `seed` it keys the noise of its tokens."""

    prompts: tuple[HiddenPrompt, ...]
    requests: tuple[int, ...]
    temperature: float = 0.0
    seed: int = 0

    @classmethod
    def of(cls, prompt: HiddenPrompt, sampling: Sampling | None) -> Question:
        """The question for one prompt under a given sampling of one request."""
        if sampling is None:
            return cls((prompt,), (0,))
        return cls((prompt,), sampling.requests, sampling.temperature, sampling.seed)

    @property
    def id(self) -> str:
        return "+".join(prompt.id for prompt in self.prompts)

    @property
    def ids(self) -> list[tuple[int, ...]]:
        return [prompt.ids for prompt in self.prompts]

    @property
    def sampling(self) -> Sampling | None:
        """How the tokens of all prompts are chosen; None where decoding is greedy."""
        return Sampling(self.temperature, self.seed, self.requests) if self.temperature else None

    def part(self, index: int) -> Question:
        """The question for prompt `index` alone: its text is the same, in a batch or by itself."""
        return replace(self, prompts=self.prompts[index : index + 1], requests=self.requests[index : index + 1])

    @property
    def parts(self) -> list[Question]:
        return [self.part(index) for index in range(len(self.prompts))]


class Questions:
    """Draws the questions of one search. `secret` stands beside the seed wherever foreign code is asked."""

    def __init__(self, material: Material, regime: Regime, seed: int, secret: str = "") -> None:
        self._material = material
        self._regime = regime
        self._seed = seed
        self._hidden = f"{seed}:{secret}"

    def draw(self, purpose: str, number: int, count: int, *, salted: bool = False) -> list[Question]:
        """`count` questions of draw `number` for `purpose` ("" for the trials themselves).

        `salted` puts a number that nobody can foresee before each prompt: the shipped prompts are public, and a
        source candidate may bring along the answers to all of them.
        """
        batch = self._regime.batch
        key = self._hidden if salted else str(self._seed)
        prompts = draw(self._material.prompts, key, number, count * batch, purpose)
        if salted:
            rng = random.Random(f"salt:{key}:{purpose}:{number}")
            prompts = [self.salted(prompt, rng) for prompt in prompts]
        seed = _noise_seed(key, purpose, number)
        return [
            Question(
                tuple(prompts[first : first + batch]),
                tuple(range(first, first + batch)),
                self._regime.temperature,
                seed,
            )
            for first in range(0, count * batch, batch)
        ]

    def variants(self, base: Question, count: int, number: int) -> list[HiddenPrompt]:
        """`count` prompts like those of foreign code's questions: the one of `base` after other numbers, or further
        prompts where texts cannot be numbered here."""
        rng = self.rng(f"variants:{base.id}", number)
        if self._material.encode is None:
            return rng.choices(self._material.prompts, k=count)
        return [self.salted(base.prompts[0], rng) for _ in range(count)]

    def pool(self, score: Score) -> Pool:
        """Text to look for sensitive prefixes in."""
        return Pool(self._material.prompts, self._regime.max_prompt_tokens, self.rng("pool", 0), score)

    def rng(self, purpose: str, number: int) -> random.Random:
        """Choices that nobody outside can foresee."""
        return random.Random(f"{purpose}:{self._hidden}:{number}")

    def salted(self, prompt: HiddenPrompt, rng: random.Random) -> HiddenPrompt:
        """The prompt after another number; unchanged where it would become too long."""
        number = rng.randrange(10_000, 100_000)
        if self._material.encode is None:
            return prompt
        ids = self._material.encode(f"(Request {number}.) {prompt.text}")
        return replace(prompt, ids=ids) if len(ids) <= self._regime.max_prompt_tokens else prompt


def _noise_seed(key: str, purpose: str, number: int) -> int:
    text = f"noise:{key}:{purpose}:{number}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
