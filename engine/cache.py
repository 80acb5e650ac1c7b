"""The static KV cache of one request: written ahead, committed after verification, rolled back by a number.

Slots [0, length) are committed. A forward pass of R rows writes slots [length, length + R) and commits nothing;
`commit` then keeps some of these rows. Everything beyond is stale and never read: attention sees slices that end
at length + R. Layer views are made once per pass, so that a layer costs two copies and no indexing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.config import ModelConfig


class KVCache:
    """Keys and values of all layers.

    `k`, `v`: [layers, kv_heads, capacity, head_dim] in `dtype`; keys are stored rotated. `length` is the number of
    committed slots.
    """

    def __init__(self, config: ModelConfig, capacity: int, device: torch.device | str, dtype: torch.dtype) -> None:
        shape = (config.num_layers, config.num_kv_heads, capacity, config.head_dim)
        self.k = torch.empty(shape, device=device, dtype=dtype)
        self.v = torch.empty(shape, device=device, dtype=dtype)
        self.capacity = capacity
        self.length = 0
        self._written = 0

    def slots(self, rows: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Views, one a layer, of the next `rows` slots of keys and values: [kv_heads, rows, head_dim] each.

        Marks them as written; raises ValueError where they do not fit.
        """
        end = self.length + rows
        if end > self.capacity:
            raise ValueError(f"the KV cache holds {self.capacity} tokens; {end} were asked for")
        self._written = rows
        return self.k[:, :, self.length : end].unbind(0), self.v[:, :, self.length : end].unbind(0)

    def visible(self, rows: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Views, one a layer, of all slots that a pass of `rows` rows may see: [kv_heads, length + rows, head_dim]."""
        end = self.length + rows
        return self.k[:, :, :end].unbind(0), self.v[:, :, :end].unbind(0)

    def commit(self, rows: list[int] | int) -> None:
        """Keep these of the last written rows, in this order; an int keeps the first so many. Advances `length`.

        The other rows are gone, and a second commit without a forward pass raises ValueError.
        """
        if isinstance(rows, int):
            kept, moved = rows, False
            inside = 0 <= rows <= self._written
        else:
            kept, moved = len(rows), rows != list(range(len(rows)))
            inside = all(0 <= row < self._written for row in rows) and len(set(rows)) == len(rows)
        if not inside:
            raise ValueError(f"cannot commit rows {rows} of the {self._written} rows written last")
        if moved:
            assert not isinstance(rows, int)
            index = torch.tensor(rows, device=self.k.device) + self.length
            end = self.length + kept
            # index_select copies first, so a row may move to a slot that another row still has to leave
            self.k[:, :, self.length : end] = self.k.index_select(2, index)
            self.v[:, :, self.length : end] = self.v.index_select(2, index)
        self.length += kept
        self._written = 0

    def truncate(self, length: int) -> None:
        """Roll back to the first `length` committed slots (and drop uncommitted rows)."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate a cache of {self.length} tokens to {length}")
        self.length = length
        self._written = 0
