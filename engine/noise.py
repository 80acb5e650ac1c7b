"""The noise of sampling: Philox4x32-10 words made into Gumbel variables, one for each (seed, request, position, id).

Philox is the counter-based generator of J. Salmon, M. Moraes, R. Dror and D. Shaw, "Parallel Random Numbers: As Easy
as 1, 2, 3", SC 2011 (known answers: `kat_vectors` of their library Random123). It has no state: a word is a function
of key and counter alone, which is what makes a token's noise independent of how its position was reached. Here

    key      the seed, 64 bits, low word first
    counter  (request, absolute position, id // 4, 0), 32 bits each
    word     id % 4 of the block
    u        (word + 0.5) / 2**32, exact in float64, never 0 nor 1
    gumbel   -log(-log(u)), float64, between LEAST and MOST

and argmax(logit + temperature * gumbel) draws from softmax(logit / temperature) (the Gumbel-max trick).

In NumPy for the judge and for CPUs (0.34 ms for one position of 49,152 ids on one core), in torch for other devices.
Both have the same words bit for bit; logarithms of two libraries may differ in the last bits of a float64. torch is
imported where it is used only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
MASK = 0xFFFFFFFF
PER_BLOCK = 4
"""Words, and so ids, of one Philox block."""
LEAST, MOST = -math.log(-math.log(0.5 / 2**32)), -math.log(-math.log1p(-0.5 / 2**32))
"""No noise is smaller or larger: -3.13 and 22.87."""

Words = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float64]
Integers = int | Sequence[int] | npt.NDArray[Any]


def philox(counter: tuple[Any, Any, Any, Any], key: tuple[Any, Any]) -> tuple[Any, Any, Any, Any]:
    """Ten rounds of Philox4x32 over arrays of 32-bit words that broadcast.

    Words are held in 64-bit integers: uint64 arrays of NumPy, or int64 tensors, whose products wrap and whose shift
    copies the sign, which the mask takes off again.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for turn in range(ROUNDS):
        if turn:
            k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
        first, second = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((second >> 32) & MASK) ^ c1 ^ k0,
            second & MASK,
            ((first >> 32) & MASK) ^ c3 ^ k1,
            first & MASK,
        )
    return c0, c1, c2, c3


def words_at(seed: Integers, request: Integers, position: Integers, ids: Integers) -> Words:
    """The words of given token ids only. All four broadcast, so that many seeds, requests or positions are searched
    in one call; costs one Philox block a result (0.1 us)."""
    seeds, requests, positions, tokens = np.broadcast_arrays(*map(_words, (seed, request, position, ids)))
    shape, seeds, tokens = seeds.shape, seeds.reshape(-1), tokens.reshape(-1)
    counter = (requests.reshape(-1), positions.reshape(-1), tokens // PER_BLOCK, np.zeros(1, np.uint64))
    block = np.stack(philox(counter, (seeds & MASK, seeds >> 32)))
    chosen: Words = np.take_along_axis(block, (tokens % PER_BLOCK).astype(np.intp)[None], axis=0)
    return chosen.reshape(shape)


def words(seed: int, request: int, position: int, vocab_size: int) -> Words:
    """The words of every id at one position: uint64 [V]."""
    blocks = np.arange(-(-vocab_size // PER_BLOCK), dtype=np.uint64)
    one = [_words([part]) for part in (request, position, 0, seed & MASK, seed >> 32)]
    block = philox((one[0], one[1], blocks, one[2]), (one[3], one[4]))
    return np.stack(block, axis=-1).reshape(-1)[:vocab_size]


def gumbel_at(seed: Integers, request: Integers, position: Integers, ids: Integers) -> Floats:
    """The noise of given token ids only; all four broadcast as in `words_at`. float64."""
    return _gumbel(words_at(seed, request, position, ids))


def gumbel(seed: int, requests: Sequence[int], positions: Sequence[int], vocab_size: int) -> Floats:
    """The noise of every id: float64 [R, V], row i for `requests[i]` at `positions[i]`."""
    rows = np.empty((len(positions), vocab_size))
    for row, request, position in zip(rows, requests, positions, strict=True):  # a row at a time stays in the cache
        row[:] = _gumbel(words(seed, request, position, vocab_size))
    return rows


def words_on(
    device: torch.device, seed: int, requests: Sequence[int], positions: Sequence[int], vocab_size: int
) -> torch.Tensor:
    """The words of every id, computed on `device`: int64 [R, V], row i for `requests[i]` at `positions[i]`."""
    import torch

    def column(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)[:, None]

    blocks = torch.arange(-(-vocab_size // PER_BLOCK), device=device)[None]
    counter = (column(requests), column(positions), blocks, column([0]))
    block = philox(counter, (column([seed & MASK]), column([seed >> 32])))
    return torch.stack(block, dim=-1).reshape(len(positions), -1)[:, :vocab_size]


def gumbel_on(
    device: torch.device, seed: int, requests: Sequence[int], positions: Sequence[int], vocab_size: int
) -> torch.Tensor:
    """`gumbel`, computed on `device`: a float64 tensor [R, V]."""
    u = (words_on(device, seed, requests, positions, vocab_size).double() + 0.5) * 2.0**-32
    return u.log_().neg_().log_().neg_()


def _words(values: Integers) -> Words:
    return np.asarray(values, dtype=np.uint64)


def _gumbel(words: Words) -> Floats:
    u = (words.astype(np.float64) + 0.5) * 2.0**-32
    for step in (np.log, np.negative, np.log, np.negative):
        step(u, out=u)
    return u
