"""What NVML says of one NVIDIA device: clock, temperature, power, throttling, and who else computes on it.

The binding (`pynvml`, package nvidia-ml-py) is only imported where a CUDA device is asked for. A reading that the
device or the container refuses is None ("unknown"): it never makes a comparison fail.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

REASONS: dict[int, str] = {
    0x002: "clocks set by an application",
    0x004: "power limit",
    0x008: "hardware slowdown",
    0x010: "clocks synchronised with another device",
    0x020: "too hot (software limit)",
    0x040: "too hot (hardware limit)",
    0x080: "power brake from outside",
    0x100: "clocks set by a display",
}
"""nvmlClocksEventReason bits of nvml.h, without 0x001: an idle device runs slowly, and is not throttled by it."""
FRESH_S = 1.0
"""How old a sample of a process's use may be at the first look."""
LEAST_SM_PERCENT = 2
"""A process that uses less of the device is taken for idle: one that merely holds memory slows nobody."""


@dataclass(frozen=True)
class Reading:
    """The device at one moment: MHz of the streaming multiprocessors, degrees Celsius, watts, reasons in words."""

    clock_mhz: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    throttled: tuple[str, ...] = ()


@dataclass(frozen=True)
class Process:
    """A process with a compute context. `sm_percent` is its use of the device lately; None where that is not told."""

    pid: int
    memory_bytes: int | None = None
    sm_percent: int | None = None
    name: str = ""


@dataclass(frozen=True)
class Others:
    """Who else is on the device. Not `known` where NVML names processes of another pid namespace."""

    processes: tuple[Process, ...] = ()
    known: bool = True

    @property
    def busy(self) -> tuple[Process, ...]:
        """Those that compute, or may: where use is not told, a context is enough."""
        return tuple(each for each in self.processes if each.sm_percent is None or each.sm_percent >= LEAST_SM_PERCENT)


def reasons(bits: int) -> tuple[str, ...]:
    """Throttle reasons in words; bits that are not known by their number."""
    known = tuple(words for bit, words in REASONS.items() if bits & bit)
    unknown = bits & ~(sum(REASONS) | 0x001)
    return known + ((f"reason 0x{unknown:x}",) if unknown else ())


def others(listed: Sequence[Process], ours: Collection[int]) -> Others:
    """The listed processes that are not ours.

    In a container NVML may list pids of the host. Then none of ours is among them, though ours have been computing:
    who is who cannot be told. `ours` must hold the judge's tree, of which at least one has used the device.
    """
    foreign = tuple(each for each in listed if each.pid not in ours)
    if foreign and len(foreign) == len(listed):
        return Others(known=False)
    return Others(foreign)


def sentence(processes: Sequence[Process]) -> str:
    """Other processes in words: "another process computes on the device: pid 12 (python, 3.1 GB, 40 % busy)"."""
    told = []
    for each in processes:
        facts = [each.name] if each.name else []
        facts += [] if each.memory_bytes is None else [f"{each.memory_bytes / 1e9:.1f} GB"]
        facts += [] if each.sm_percent is None else [f"{each.sm_percent} % busy"]
        told.append(f"pid {each.pid}" + (f" ({', '.join(facts)})" if facts else ""))
    return f"another process computes on the device: {', '.join(told)}"


def device_key(platform: str, visible: str | None) -> int | str:
    """NVML's index or UUID of "cuda:N", given CUDA_VISIBLE_DEVICES. Indices follow the PCI order in both, unless
    devices of different kinds share a host without CUDA_DEVICE_ORDER=PCI_BUS_ID. Raises ValueError for others."""
    match = re.fullmatch(r"cuda(?::(\d+))?", platform)
    if match is None:
        raise ValueError(f"{platform!r} is no CUDA device")
    number = int(match[1] or 0)
    if visible is None or not visible.strip():
        return number
    names = [name.strip() for name in visible.split(",")]
    if number >= len(names):
        raise ValueError(f"{platform} is not among CUDA_VISIBLE_DEVICES={visible}")
    return int(names[number]) if names[number].isdigit() else names[number]


class Gpu:
    """One device. `nvml` is the binding's module, initialised; `handle` the device's."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self._seen = int((time.time() - FRESH_S) * 1e6)  # of the newest utilisation sample, microseconds since 1970

    @classmethod
    def open(cls, platform: str, visible: str | None) -> Gpu | None:
        """The device of `platform`; None on a machine without it, without a driver or without the binding."""
        try:
            key = device_key(platform, visible)
            nvml = importlib.import_module("pynvml")
        except (ValueError, ImportError):
            return None
        try:
            nvml.nvmlInit()
            by_name = isinstance(key, str)
            handle = nvml.nvmlDeviceGetHandleByUUID(key) if by_name else nvml.nvmlDeviceGetHandleByIndex(key)
        except nvml.NVMLError:
            return None
        return cls(nvml, handle)

    def reading(self) -> Reading:
        nvml = self._nvml
        bits = self._ask(nvml.nvmlDeviceGetCurrentClocksEventReasons)
        if bits is None:  # drivers before 535 know it by its older name
            bits = self._ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons)
        power = self._ask(nvml.nvmlDeviceGetPowerUsage)
        return Reading(
            clock_mhz=self._ask(lambda handle: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            temperature_c=self._ask(
                lambda handle: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            ),
            power_w=None if power is None else power / 1e3,
            throttled=reasons(bits or 0),
        )

    def others(self, ours: Collection[int]) -> Others:
        """Other processes with a compute context on this device, and their use of it since the last call."""
        listed = self._ask(self._nvml.nvmlDeviceGetComputeRunningProcesses)
        if listed is None:
            return Others(known=False)
        use = self._use()
        found = others(
            [
                Process(int(each.pid), each.usedGpuMemory, None if use is None else use.get(int(each.pid), 0))
                for each in listed
            ],
            ours,
        )
        named = tuple(dataclasses.replace(each, name=_name(each.pid)) for each in found.processes)
        return Others(named, found.known)

    def _use(self) -> dict[int, int] | None:
        """Highest use by pid in the samples that are newer than those seen before; None where it is not told."""
        nvml = self._nvml
        try:
            samples = nvml.nvmlDeviceGetProcessUtilization(self._handle, self._seen)
        except nvml.NVMLError as error:
            # "Not found" is how NVML says that no process used the device.
            return {} if error.value == nvml.NVML_ERROR_NOT_FOUND else None
        use: dict[int, int] = {}
        for sample in samples:
            if sample.timeStamp > self._seen:
                use[int(sample.pid)] = max(use.get(int(sample.pid), 0), int(sample.smUtil))
        self._seen = max([self._seen, *(int(sample.timeStamp) for sample in samples)])
        return use

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        try:
            return question(self._handle)
        except (self._nvml.NVMLError, AttributeError):
            return None


def _name(pid: int) -> str:
    try:
        return str(psutil.Process(pid).name())
    except psutil.Error:
        return ""
