"""The one tie rule: how logits become a token when decoding greedily."""

from __future__ import annotations

import torch
from torch import Tensor


def choose(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """The greedy token of each row.

    `logits` [..., V], any float dtype, are rounded to `dtype` (the deployment's, hence stock's) first, so that
    two implementations of one model agree on what a tie is; among equal logits the lowest id wins, which is
    what `torch.argmax` documents. Returns int64 [...].
    """
    return logits.to(dtype).argmax(dim=-1)
