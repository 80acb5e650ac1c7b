"""Measure how fast a device reads memory and multiplies matrices.

A ceiling must be what the device can sustain, not what it happened to do while something else ran beside it.
So several kernels that only read are timed in interleaved batches, each batch gives its median, and the best
batch counts: other work can only slow a batch down, and a median cannot be lifted by one lucky sample.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from engine.deployment import Dtype
from engine.hardware import Reading

BATCHES = 12
SAMPLES_PER_BATCH = 5
LIMIT_S = 6.0
"""No new round of batches begins after this, however slow the device is; one is always taken."""
CPU_READ_BYTES = 512 << 20
CUDA_READ_BYTES = 8 << 30
CPU_MATRIX = 1024
CUDA_MATRIX = 8192
TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

Kernel = Callable[[], Any]
Timer = Callable[[Kernel], float]


def measure_rates(platform: str, dtype: Dtype) -> Reading:
    """Read bandwidth and matrix rate of `platform`, a few seconds on two cores. Uses PyTorch's threads on a CPU."""
    device = torch.device(platform)
    with torch.inference_mode():
        kernels = {**_read_kernels(device), **_matrix_kernels(device, TORCH_DTYPES[dtype])}
        samples = sample_interleaved(kernels, _wall_seconds if device.type == "cpu" else _CudaTimer(device))
    read = max(sustained(values) for name, values in samples.items() if name.startswith("read."))
    matrix = max(sustained(values) for name, values in samples.items() if name.startswith("matmul."))
    return Reading(read, matrix, samples)


def sustained(values: Sequence[float], batch: int = SAMPLES_PER_BATCH) -> float:
    """The best median of consecutive batches of `batch` samples; a shorter last batch counts too."""
    return max(statistics.median(values[start : start + batch]) for start in range(0, len(values), batch))


def sample_interleaved(kernels: dict[str, tuple[Kernel, float]], timer: Timer) -> dict[str, tuple[float, ...]]:
    """Rates by kernel name, in units of `work / 1e9` a second; kernels take turns batch by batch.

    `kernels` maps a name to a callable and the work that it does (bytes or operations). Each is warmed up once.
    """
    found: dict[str, list[float]] = {name: [] for name in kernels}
    for kernel, _ in kernels.values():
        kernel()
    begin = time.perf_counter()
    for number in range(BATCHES):
        if number and time.perf_counter() - begin > LIMIT_S:
            break
        for name, (kernel, work) in kernels.items():
            found[name] += [work / timer(kernel) / 1e9 for _ in range(SAMPLES_PER_BATCH)]
    return {name: tuple(values) for name, values in found.items()}


def _read_kernels(device: torch.device) -> dict[str, tuple[Kernel, float]]:
    size = _buffer_bytes(device)
    ints = torch.empty(size // 4, dtype=torch.int32, device=device)
    chunk = 1 << 26
    for start in range(0, ints.numel(), chunk):  # written, since untouched pages may all be one page of zeros
        ints[start : start + chunk].random_(1 << 20)
    floats = ints.view(torch.float32)
    return {
        "read.sum_int32": (lambda: ints.sum(dtype=torch.int32), size),
        "read.sum_fp32": (lambda: floats.sum(), size),
    }


def _matrix_kernels(device: torch.device, dtype: torch.dtype) -> dict[str, tuple[Kernel, float]]:
    size = CPU_MATRIX if device.type == "cpu" else CUDA_MATRIX
    x, weight = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    return {"matmul.linear": (lambda: F.linear(x, weight), 2.0 * size**3)}


def _buffer_bytes(device: torch.device) -> int:
    """Far more than the last cache, but never more than a quarter of a GPU's free memory."""
    if device.type == "cpu":
        return CPU_READ_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    row = 8192 * 4
    return min(CUDA_READ_BYTES, free // 4) // row * row


def _wall_seconds(kernel: Kernel) -> float:
    start = time.perf_counter()
    kernel()
    return time.perf_counter() - start


class _CudaTimer:
    """Seconds between two events on the current stream, around one kernel."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, kernel: Kernel) -> float:
        with torch.cuda.device(self._device):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            kernel()
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end)) / 1e3
