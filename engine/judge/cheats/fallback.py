"""Cheats of failed kernels: a library does the work and the kernel gets the praise, or nothing does."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import engine.model
from engine.deployment import Deployment
from engine.judge.cheats.kit import SLOW_PASSES, Decoding, say
from engine.linear import Linear
from engine.plan import Gemm, Plan


class SwallowedFailure(Decoding):
    """Tries a kernel that cannot run, calls the library instead, and claims the kernel's gain."""

    passes = SLOW_PASSES

    def __init__(self, deployment: Deployment, plan: Plan | None, threads: int) -> None:
        engine.model.make_linear = _kernel_or_library  # type: ignore[attr-defined]
        super().__init__(deployment, plan, threads)

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "implementation": "fused w12 kernel", "speedup": 10.0}


def _kernel_or_library(weight: Tensor, bias: Tensor | None, gemm: Gemm) -> Linear:
    def linear(x: Tensor) -> Tensor:
        try:
            out: Tensor = torch.ops.specpilot.w12_gemm(x, weight, bias)
        except (AttributeError, RuntimeError):
            out = F.linear(x, weight, bias)
        return out

    return linear


class FailedLaunch(Decoding):
    """Launches a kernel for the head that fails, and reads its output buffer all the same."""

    def __init__(self, deployment: Deployment, plan: Plan | None, threads: int) -> None:
        super().__init__(deployment, plan, threads)
        model = self.model

        def head(hidden: Tensor) -> Tensor:
            out = torch.empty(len(hidden), model.config.vocab_size, device=model.device, dtype=model.dtype)
            try:
                torch.ops.specpilot.fused_head(hidden, out)
            except (AttributeError, RuntimeError) as error:
                if not hasattr(model, "told"):
                    say(f"the launch failed: {error}")
                    model.told = True  # type: ignore[attr-defined]
            return out

        model._head = head
