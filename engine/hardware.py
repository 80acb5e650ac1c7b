"""What this device can do, measured: the two rates behind every ceiling, and its caches and memory.

A reading is kept in the data folder, by device and software versions, and measured again with `refresh`. No
torch is imported unless something is measured.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform as host
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engine.codec import STRICT, from_json, to_json
from engine.deployment import Dtype
from engine.errors import UserError
from engine.levers import usable_cores
from engine.paths import data_dir

SCHEMA = 1
HEADROOM = 1.05
"""How far above its datasheet a device may measure: clocks and units are rounded there."""


@dataclass(frozen=True)
class HardwareProfile:
    """A device's measured rates.

    `device` is the platform name ("cpu", "cuda:0"), `name` the product's. `read_gb_s` is the sustained rate of
    reading memory far beyond the last cache (1e9 bytes a second, all threads), `matmul_gflop_s` that of one large
    matrix product in `dtype` (a multiply-add is two operations). `llc_bytes` is the last-level cache (L2 on CUDA).
    `samples` holds the raw readings by kernel, in the same units, in the order taken.
    """

    __pydantic_config__ = STRICT

    device: str
    kind: Literal["cpu", "cuda"]
    name: str
    cores: int
    memory_bytes: int
    free_bytes: int
    read_gb_s: float
    matmul_gflop_s: float
    llc_bytes: int
    dtype: Dtype
    versions: dict[str, str]
    samples: dict[str, tuple[float, ...]]


@dataclass(frozen=True)
class Facts:
    """What can be told of a device without measuring."""

    kind: Literal["cpu", "cuda"]
    name: str
    cores: int
    memory_bytes: int
    free_bytes: int
    llc_bytes: int
    versions: dict[str, str]


@dataclass(frozen=True)
class Reading:
    """Both rates with their samples; see HardwareProfile."""

    read_gb_s: float
    matmul_gflop_s: float
    samples: dict[str, tuple[float, ...]]


@dataclass(frozen=True)
class Datasheet:
    """A product's own figures: peak memory GB/s and dense bf16 TFLOP/s (no sparsity)."""

    pattern: str
    read_gb_s: float
    bf16_tflop_s: float


DATASHEETS: tuple[Datasheet, ...] = (  # the first pattern that matches counts
    Datasheet(r"H100.*PCIe", 2039, 756),
    Datasheet(r"H100 NVL", 3938, 835),
    Datasheet(r"H100", 3352, 989),
    Datasheet(r"H200 NVL", 4800, 835),
    Datasheet(r"H200", 4800, 989),
    Datasheet(r"A100.*PCI.*40GB", 1555, 312),
    Datasheet(r"A100 80GB PCIe|A100-PCIE-80GB", 1935, 312),
    Datasheet(r"A100.*40GB", 1555, 312),
    Datasheet(r"A100", 2039, 312),
    Datasheet(r"L40S", 864, 362),
    Datasheet(r"RTX 4090(?! Laptop| D)", 1008, 165.2),
    Datasheet(r"B200(?!.*GB200)", 8000, 2250),
)

Measure = Callable[[str, Dtype], Reading]
Identify = Callable[[str], Facts]


def probe(
    platform: str,
    dtype: Dtype,
    refresh: bool = False,
    *,
    measure: Measure | None = None,
    identify: Identify | None = None,
) -> HardwareProfile:
    """The profile of `platform` ("cpu", "cuda:0", ...), measured on first use (a few seconds), then read back.

    Free memory is always read anew. `measure` and `identify` stand in for the real device in tests. Raises
    UserError for a platform that is not there, and for a reading that its datasheet rules out; such a reading
    is not kept.
    """
    facts = (identify or identify_device)(platform)
    file = data_dir() / "hardware" / f"{_key(platform, dtype, facts)}.json"
    if not refresh:
        kept = _read(file)
        if kept is not None:
            return dataclasses.replace(kept, free_bytes=facts.free_bytes)
    reading = (measure or _measure)(platform, dtype)
    refuse_implausible(facts.name, dtype, reading)
    profile = HardwareProfile(
        device=platform,
        kind=facts.kind,
        name=facts.name,
        cores=facts.cores,
        memory_bytes=facts.memory_bytes,
        free_bytes=facts.free_bytes,
        read_gb_s=reading.read_gb_s,
        matmul_gflop_s=reading.matmul_gflop_s,
        llc_bytes=facts.llc_bytes,
        dtype=dtype,
        versions=facts.versions,
        samples=reading.samples,
    )
    _write(file, profile)
    return profile


def _measure(platform: str, dtype: Dtype) -> Reading:
    from engine.rates import measure_rates

    return measure_rates(platform, dtype)


def best_platform() -> str:
    """ "cuda:0" where a CUDA device is there and computes, else "cpu"."""
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    try:
        two = torch.ones(2, device="cuda:0").sum().item()
    except RuntimeError:  # a driver too old for this build, or a device held exclusively by another process
        return "cpu"
    return "cuda:0" if two == 2 else "cpu"


def refuse_implausible(name: str, dtype: Dtype, reading: Reading) -> None:
    """Raise UserError where a reading cannot be true, or is so low that the device was not free.

    A GPU of the table must lie between half of its datasheet and the whole of it; for fp32 only the upper bound
    of the matrix rate is known. Other devices need only be positive. Slices (MIG) are not in any datasheet.
    """
    for what, value in (("read bandwidth", reading.read_gb_s), ("matrix rate", reading.matmul_gflop_s)):
        if not 0 < value < float("inf"):
            raise _implausible(f"The measured {what} of {name} is {value}, which no device has")
    sheet = datasheet(name)
    if sheet is None:
        return
    peak_gflop_s = sheet.bf16_tflop_s * 1e3
    checks = [("read bandwidth", reading.read_gb_s, sheet.read_gb_s, 0.5, "GB/s")]
    checks.append(("matrix rate", reading.matmul_gflop_s, peak_gflop_s, 0.5 if dtype == "bf16" else 0.0, "GFLOP/s"))
    for what, value, peak, least, unit in checks:
        if value > peak * HEADROOM:
            raise _implausible(f"The measured {what} of {name} is {value:.0f} {unit}, above its datasheet's {peak:.0f}")
        if value < peak * least:
            raise _implausible(
                f"The measured {what} of {name} is {value:.0f} {unit}, under half of its datasheet's {peak:.0f}: "
                "another process uses it, or it is throttled"
            )


def datasheet(name: str) -> Datasheet | None:
    """The datasheet of a GPU by its product name, None where it is not known or the GPU is a slice."""
    if "MIG" in name:
        return None
    return next((sheet for sheet in DATASHEETS if re.search(sheet.pattern, name)), None)


def _implausible(sentence: str) -> UserError:
    return UserError(
        f"{sentence}. Free the device and measure again with python -m engine probe --refresh.",
        code="implausible-hardware",
        field="platform",
    )


def identify_device(platform: str) -> Facts:
    """Name, memory, caches and software versions of a platform. Raises UserError where it is not there."""
    if platform == "cpu":
        total, free = host_memory()
        versions = {"python": host.python_version(), "torch": _torch_version()}
        return Facts("cpu", _cpu_name(), usable_cores(), total, free, _cpu_cache(), versions)
    if re.fullmatch(r"cuda:\d+", platform):
        return _identify_cuda(platform)
    raise UserError(f"Unknown platform {platform!r}; use cpu or cuda:0.", code="unknown-platform", field="platform")


def _identify_cuda(platform: str) -> Facts:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = int(platform.removeprefix("cuda:"))
    if index >= count:
        there = (
            f"this machine has {count} CUDA device{'s' if count != 1 else ''}" if count else "no CUDA device is usable"
        )
        raise UserError(
            f"There is no {platform} here: {there}; use another platform.", code="no-device", field="platform"
        )
    found = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    versions = {
        "python": host.python_version(),
        "torch": _torch_version(),
        "cuda": str(torch.version.cuda),
        "driver": _cuda_driver(),
    }
    return Facts("cuda", found.name, found.multi_processor_count, total, free, found.L2_cache_size, versions)


def host_memory() -> tuple[int, int]:
    """Total and available bytes of main memory, a container's own limit included."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = total
    meminfo = _text("/proc/meminfo")
    found = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE)
    if found:
        free = int(found.group(1)) * 1024
    limit, used = _text("/sys/fs/cgroup/memory.max").strip(), _text("/sys/fs/cgroup/memory.current").strip()
    if limit.isdigit() and used.isdigit() and int(limit) < total:
        # Page cache counts as used there, but the kernel gives it back on demand.
        cached = re.search(r"^inactive_file (\d+)$", _text("/sys/fs/cgroup/memory.stat"), re.MULTILINE)
        total = int(limit)
        free = min(free, max(0, total - int(used) + (int(cached.group(1)) if cached else 0)))
    return total, free


def _cpu_name() -> str:
    cpuinfo = _text("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    return found.group(1).strip() if found else host.processor() or host.machine()


def _cpu_cache() -> int:
    """Bytes of the highest cache level, summed over the caches of that level; 0 where the system does not say."""
    found: dict[tuple[int, str], int] = {}
    for folder in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cache/index*"):
        level, size = _text(folder / "level").strip(), _text(folder / "size").strip()
        shared, kind = _text(folder / "shared_cpu_list").strip(), _text(folder / "type").strip()
        if kind != "Instruction" and level.isdigit() and re.fullmatch(r"\d+[KM]", size):
            found[int(level), shared] = int(size[:-1]) * {"K": 1 << 10, "M": 1 << 20}[size[-1]]
    last = max((level for level, _ in found), default=0)
    return sum(size for (level, _), size in found.items() if level == last)


def _cuda_driver() -> str:
    found = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", _text("/proc/driver/nvidia/version"))
    return found.group(1) if found else "unknown"


def _torch_version() -> str:
    from importlib.metadata import version

    return version("torch")


def _text(path: str | Path) -> str:
    """A small system file's text, empty where it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _key(platform: str, dtype: Dtype, facts: Facts) -> str:
    """Names a reading: another device, core count, build or driver is another reading."""
    parts = [SCHEMA, platform, dtype, facts.name, facts.cores, facts.memory_bytes, facts.versions]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _read(file: Path) -> HardwareProfile | None:
    """A kept reading, None where there is none or it is damaged (it is then measured again)."""
    try:
        return from_json(HardwareProfile, json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, UserError):
        return None


def _write(file: Path, profile: HardwareProfile) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(to_json(profile), indent=1), encoding="utf-8")
    part.replace(file)  # a reader sees the old file or the new one
