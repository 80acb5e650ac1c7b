"""Philox and Gumbel noise: published answers, plain Python written out, and what the noise must look like."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from engine import noise

# Random123, tests/kat_vectors, "philox4x32 10": counter, key, answer.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
SIZES = [1, 4, 13, 83, 1000]


def numbers(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def plain_philox(counter: list[int], key: list[int]) -> list[int]:
    """One block in Python's own integers."""
    x, k = list(counter), list(key)
    for _ in range(10):
        low, high = x[0] * 0xD2511F53, x[2] * 0xCD9E8D57
        x = [(high >> 32) ^ x[1] ^ k[0], high % 2**32, (low >> 32) ^ x[3] ^ k[1], low % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return x


def plain_word(seed: int, request: int, position: int, token: int) -> int:
    return plain_philox([request, position, token // 4, 0], [seed % 2**32, seed >> 32])[token % 4]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_published_answers(counter: str, key: str, answer: str) -> None:
    wanted = numbers(answer)
    assert plain_philox(numbers(counter), numbers(key)) == wanted
    arrays = [np.array([word], dtype=np.uint64) for word in numbers(counter) + numbers(key)]
    assert [int(word[0]) for word in noise.philox(tuple(arrays[:4]), tuple(arrays[4:]))] == wanted
    tensors = [torch.tensor([word], dtype=torch.int64) for word in numbers(counter) + numbers(key)]
    assert [int(word) for word in noise.philox(tuple(tensors[:4]), tuple(tensors[4:]))] == wanted


@pytest.mark.parametrize("size", SIZES)
def test_numpy_torch_and_single_ids_have_the_same_words(size: int) -> None:
    seed, rows = random.getrandbits(64), 3
    requests = [random.getrandbits(32) for _ in range(rows)]
    positions = [random.getrandbits(32), 0, random.randrange(4096)]
    whole = np.stack([noise.words(seed, *where, size) for where in zip(requests, positions, strict=True)])
    assert whole.shape == (rows, size)
    on_device = noise.words_on(torch.device("cpu"), seed, requests, positions, size)
    assert np.array_equal(whole.astype(np.int64), on_device.numpy())
    ids = np.array([random.randrange(size) for _ in range(7)])
    some = noise.words_at(seed, np.array(requests)[:, None], np.array(positions)[:, None], ids)
    assert np.array_equal(some, whole[:, ids])
    for row in range(rows):
        for token in ids.tolist():
            assert whole[row, token] == plain_word(seed, requests[row], positions[row], token)


def test_many_seeds_are_searched_in_one_call() -> None:
    seeds = np.array([random.getrandbits(64) for _ in range(50)], dtype=np.uint64)[:, None]
    found = noise.words_at(seeds, 3, 17, [5, 82])
    assert found.shape == (50, 2)
    assert found.tolist() == [[plain_word(int(seed), 3, 17, token) for token in (5, 82)] for seed in seeds[:, 0]]
    assert int(noise.words_at(9, 1, 2, 3)) == plain_word(9, 1, 2, 3)


def test_gumbel_is_minus_log_minus_log_of_the_word() -> None:
    seed, size = random.getrandbits(64), 200
    rows = noise.gumbel(seed, [7, 8], [30, 31], size)
    wanted = [
        [-math.log(-math.log((plain_word(seed, request, position, token) + 0.5) / 2**32)) for token in range(size)]
        for request, position in ((7, 30), (8, 31))
    ]
    assert rows.dtype == np.float64
    assert rows == pytest.approx(np.array(wanted), rel=1e-14, abs=1e-14)
    tensor = noise.gumbel_on(torch.device("cpu"), seed, [7, 8], [30, 31], size)
    assert tensor.dtype == torch.float64
    assert tensor.numpy() == pytest.approx(rows, rel=1e-14, abs=1e-14)
    assert noise.gumbel_at(seed, [[7], [8]], [[30], [31]], range(size)) == pytest.approx(rows, rel=0, abs=0)


def test_the_extreme_words_have_finite_noise() -> None:
    least, most = noise._gumbel(np.array([0, 2**32 - 1], dtype=np.uint64))
    assert (least, most) == pytest.approx((noise.LEAST, noise.MOST), rel=1e-12)
    assert (round(least, 2), round(most, 2)) == (-3.13, 22.87)


@pytest.mark.parametrize("what", ["seed", "request", "position", "id"])
def test_noise_of_another_key_is_independent(what: str) -> None:
    """Neighbouring keys: no correlation beyond chance (5 standard deviations), and the moments of a Gumbel variable."""
    size = 40_000
    seed, request, position = random.getrandbits(64), random.getrandbits(31), random.randrange(4096)
    a = noise.gumbel(seed, [request], [position], size + 1)[0]
    other = {
        "seed": lambda: noise.gumbel(seed ^ 1, [request], [position], size + 1)[0],
        "request": lambda: noise.gumbel(seed, [request + 1], [position], size + 1)[0],
        "position": lambda: noise.gumbel(seed, [request], [position + 1], size + 1)[0],
        "id": lambda: np.roll(a, 1),
    }[what]()
    spread = math.pi / math.sqrt(6)
    assert a.mean() == pytest.approx(0.5772156649, abs=5 * spread / math.sqrt(size))
    assert a.std() == pytest.approx(spread, rel=0.05)
    assert abs(np.corrcoef(a[1:], other[1:])[0, 1]) < 5 / math.sqrt(size)
    assert not (a == other).any()
