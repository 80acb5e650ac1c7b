"""How tokens are chosen at a temperature above 0, as the judge asks for it. `engine.noise` has the arithmetic.

The token at a position is the argmax of stock's logit + temperature * Gumbel noise, and the noise depends on seed,
request, absolute position (prompt tokens counted) and token id alone. It is therefore the same however the
position was reached: one token at a time, inside a verified draft, alone or in a batch.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from engine.codec import STRICT

MAX_TEMPERATURE = 2.0
"""Above it a text is little more than noise; common serving interfaces end here too."""


@dataclass(frozen=True)
class Sampling:
    """The choice of one question. `requests[i]` is the number of its prompt i.

    `temperature` is above 0 (a greedy question carries no sampling), `seed` has 64 bits, a request number 32. Raises
    ValueError beyond that.
    """

    __pydantic_config__ = STRICT

    temperature: float
    seed: int
    requests: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 0 < self.temperature <= MAX_TEMPERATURE:
            raise ValueError(f"a sampled question has a temperature above 0, at most {MAX_TEMPERATURE:g}")
        if not 0 <= self.seed < 1 << 64:
            raise ValueError("a seed is a whole number of 64 bits")
        if not self.requests or any(not 0 <= number < 1 << 32 for number in self.requests):
            raise ValueError("every prompt has a request number of 32 bits")

    def one(self, index: int) -> Sampling:
        """The choice for prompt `index` alone."""
        return dataclasses.replace(self, requests=(self.requests[index],))
