"""The KV cache alone: what is kept, in which order, and what is refused."""

from __future__ import annotations

import random

import pytest
import torch

from engine.cache import KVCache
from engine.config import ModelConfig, RopeConfig

CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=11,
    hidden_size=12,
    num_layers=2,
    num_heads=3,
    num_kv_heads=3,
    head_dim=4,
    intermediate_size=5,
    rms_norm_eps=1e-6,
    rope=RopeConfig(theta=10_000.0),
    max_positions=64,
    tie_embeddings=True,
)


def write(cache: KVCache, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Write random rows as a forward pass does; returns [layers, kv_heads, rows, head_dim] of keys and values."""
    keys, values = torch.randn(2, 3, rows, 4), torch.randn(2, 3, rows, 4)
    for layer, (k, v) in enumerate(zip(*cache.slots(rows), strict=True)):
        k.copy_(keys[layer])
        v.copy_(values[layer])
    return keys, values


def test_any_sequence_of_commits_equals_a_list(request: pytest.FixtureRequest) -> None:
    cache = KVCache(CONFIG, 40, "cpu", torch.float32)
    cache.k.fill_(float("nan"))
    cache.v.fill_(float("nan"))
    kept_k, kept_v = torch.empty(2, 3, 0, 4), torch.empty(2, 3, 0, 4)
    for _ in range(40):
        rows = random.randint(1, 6)
        if cache.length + rows > 40 or random.random() < 0.2:
            length = random.randint(0, cache.length)
            cache.truncate(length)
            kept_k, kept_v = kept_k[:, :, :length], kept_v[:, :, :length]
            continue
        keys, values = write(cache, rows)
        some: list[int] | int = random.randint(0, rows)
        if random.random() < 0.6:
            some = random.sample(range(rows), random.randint(0, rows))
        cache.commit(some)
        index = list(range(some)) if isinstance(some, int) else some
        kept_k = torch.cat([kept_k, keys[:, :, index]], dim=2)
        kept_v = torch.cat([kept_v, values[:, :, index]], dim=2)
        assert cache.length == kept_k.shape[2]
        assert torch.equal(cache.k[:, :, : cache.length], kept_k)
        assert torch.equal(cache.v[:, :, : cache.length], kept_v)
        seen, _ = cache.visible(0)
        assert torch.equal(torch.stack(seen), kept_k)


@pytest.mark.parametrize("rows", [3, -1, [0, 2], [1, 1], [-1]])
def test_rows_that_were_not_written_cannot_be_committed(rows: list[int] | int) -> None:
    cache = KVCache(CONFIG, 8, "cpu", torch.float32)
    write(cache, 2)
    with pytest.raises(ValueError, match="cannot commit"):
        cache.commit(rows)
    assert cache.length == 0


def test_rows_are_committed_once() -> None:
    cache = KVCache(CONFIG, 8, "cpu", torch.float32)
    write(cache, 2)
    cache.commit(2)
    with pytest.raises(ValueError, match="cannot commit"):
        cache.commit(1)
    write(cache, 2)
    cache.truncate(1)
    with pytest.raises(ValueError, match="cannot commit"):
        cache.commit(1)


def test_truncating_to_what_is_not_there_is_refused() -> None:
    cache = KVCache(CONFIG, 8, "cpu", torch.float32)
    write(cache, 5)
    cache.commit(3)
    for length in (4, -1):
        with pytest.raises(ValueError, match="cannot truncate"):
            cache.truncate(length)
