"""The one tie rule: how logits become a token when decoding greedily."""

from __future__ import annotations

import torch
from torch import Tensor


def choose(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """The greedy token of each row.

    `logits` [..., V], any float dtype, are rounded to `dtype` (the deployment's, hence stock's) first, so that
    two implementations of one model agree on what a tie is; among equal logits the lowest id wins, which is
    what `argmax` documents, in PyTorch and in NumPy. Returns int64 [...].
    """
    rounded = logits.to(dtype)
    if rounded.device.type != "cpu":
        return rounded.argmax(dim=-1)
    # NumPy's argmax uses vector instructions: 0.06 ms against 0.7 ms for 16 rows of 49,152. float32 holds a bfloat16.
    return torch.as_tensor(rounded.detach().float().numpy().argmax(axis=-1))
