"""Three ways to compute x @ W^T + b: the same sums in another order. Which is fastest depends on the device.

library      F.linear
transposed   W @ x^T: keeps the weight as the left operand, which BLAS libraries block better for a few rows
packed       oneDNN's own weight layout, reordered once at load (CPU only); the plain matrix is not kept
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.errors import UserError
from engine.plan import Gemm

Linear = Callable[[Tensor], Tensor]

ROWS_HINT = 8
"""Row count that oneDNN picks its blocked layout for: the middle of what a verify pass has."""

PACKED_ROWS = 4
"""Fewer rows are padded to this many for "packed": oneDNN is slower on one to three rows than on four (25, 29 and
22 ms against 21 ms over all matrices of SmolLM2 in fp32 on two cores)."""


@functools.cache
def packed_available(device: str | torch.device, dtype: torch.dtype) -> bool:
    """True where this PyTorch build can reorder weights of `dtype` for oneDNN on `device` (CPU only)."""
    if torch.device(device).type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        return False
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    try:
        weight = torch.ones(16, 16, dtype=dtype)
        out = _packed(weight, None)(torch.ones(2, 16, dtype=dtype))
    except (RuntimeError, AttributeError):  # the build has no such operator, or the CPU no such instruction
        return False
    return bool((out == 16).all())


def make_linear(weight: Tensor, bias: Tensor | None, gemm: Gemm) -> Linear:
    """A function x [R, K] -> [R, N] (contiguous) for weight [N, K] and bias [N] or None, all of one dtype and device.

    Raises UserError where `gemm` is "packed" and the device or build has no such layout.
    """
    if gemm == "library":
        return functools.partial(F.linear, weight=weight, bias=bias)
    if gemm == "transposed":
        return _transposed(weight, bias)
    if not packed_available(weight.device, weight.dtype):
        raise UserError(
            f"gemm=packed needs oneDNN on a CPU, which is not there for {weight.dtype} on {weight.device}; "
            "use gemm=library.",
            code="gemm-unavailable",
            field="plan",
        )
    return _packed(weight, bias)


def _transposed(weight: Tensor, bias: Tensor | None) -> Linear:
    column = None if bias is None else bias[:, None]

    def linear(x: Tensor) -> Tensor:
        rows = x.shape[0]
        if rows == 1:  # one column would take the slower matrix-vector path
            x = x.repeat(2, 1)  # a true copy: BLAS takes an expanded row for a transposed operand, six times slower
        out = torch.mm(weight, x.t()) if column is None else torch.addmm(column, weight, x.t())
        return out[:, :rows].t().contiguous()

    return linear


def _packed(weight: Tensor, bias: Tensor | None) -> Linear:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS_HINT)
    pointwise = torch.ops.mkldnn._linear_pointwise

    def linear(x: Tensor) -> Tensor:
        rows = x.shape[0]
        if rows >= PACKED_ROWS:
            out: Tensor = pointwise(x, packed, bias, "none", [], "")
            return out
        filled = x.expand(PACKED_ROWS, -1).contiguous() if rows == 1 else F.pad(x, (0, 0, 0, PACKED_ROWS - rows))
        out = pointwise(filled, packed, bias, "none", [], "")
        return out[:rows]

    return linear
