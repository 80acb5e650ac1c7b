"""Readings are kept by device and version, and implausible ones are refused and forgotten."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from engine import hardware, rates
from engine.deployment import Dtype
from engine.errors import UserError
from engine.hardware import Facts, HardwareProfile, Reading, datasheet, identify_device, probe, refuse_implausible
from engine.rates import BATCHES, SAMPLES_PER_BATCH, measure_rates, sample_interleaved, sustained

H200 = Facts("cuda", "NVIDIA H200", 132, 140 << 30, 139 << 30, 50 << 20, {"torch": "2.13.0", "driver": "580.1"})
GOOD = Reading(4376.3, 790_079.0, {"read.sum": (4301.2, 4376.3), "matmul.linear": (790_079.0,)})


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECPILOT_DATA", str(tmp_path))


class Device:
    """A device that counts how often it was measured."""

    def __init__(self, facts: Facts = H200, reading: Reading = GOOD) -> None:
        self.facts, self.reading, self.measured = facts, reading, 0

    def measure(self, platform: str, dtype: Dtype) -> Reading:
        self.measured += 1
        return self.reading

    def probe(self, dtype: Dtype = "bf16", *, refresh: bool = False) -> HardwareProfile:
        return probe("cuda:0", dtype, refresh, measure=self.measure, identify=lambda platform: self.facts)


def test_a_reading_is_kept_and_read_back() -> None:
    device = Device()
    first = device.probe()
    assert (first.read_gb_s, first.matmul_gflop_s, first.samples) == (4376.3, 790_079.0, GOOD.samples)
    assert (first.name, first.kind, first.llc_bytes, first.device) == ("NVIDIA H200", "cuda", 50 << 20, "cuda:0")
    assert device.probe() == first
    assert device.measured == 1
    device.reading = dataclasses.replace(GOOD, read_gb_s=4400.5)
    assert device.probe(refresh=True).read_gb_s == 4400.5
    assert device.probe().read_gb_s == 4400.5
    assert device.measured == 2


def test_free_memory_is_read_anew() -> None:
    device = Device()
    device.probe()
    device.facts = dataclasses.replace(H200, free_bytes=3 << 30)
    assert device.probe().free_bytes == 3 << 30
    assert device.measured == 1


@pytest.mark.parametrize(
    "other",
    [{"name": "NVIDIA H200 NVL"}, {"cores": 66}, {"versions": {"torch": "2.13.0", "driver": "581.0"}}],
)
def test_another_device_or_driver_is_measured_itself(other: dict[str, object]) -> None:
    device = Device()
    device.probe()
    device.facts = dataclasses.replace(H200, **other)  # type: ignore[arg-type]
    device.probe()
    assert device.measured == 2
    device.probe("fp32")
    assert device.measured == 3


def test_a_damaged_file_is_measured_again(tmp_path: Path) -> None:
    device = Device()
    whole = device.probe()
    (file,) = (tmp_path / "hardware").iterdir()
    for damage in ("{", json.dumps({"device": "cuda:0"}), file.read_text().replace("4376.3", '"fast"')):
        file.write_text(damage)
        assert device.probe() == whole
    assert device.measured == 4


@pytest.mark.parametrize(
    ("reading", "words"),
    [
        (dataclasses.replace(GOOD, read_gb_s=5100.0), ("read bandwidth", "5100 GB/s", "above", "4800")),
        (dataclasses.replace(GOOD, read_gb_s=2300.0), ("read bandwidth", "2300 GB/s", "under half", "4800")),
        (dataclasses.replace(GOOD, matmul_gflop_s=1.2e6), ("matrix rate", "above", "989000")),
        (dataclasses.replace(GOOD, matmul_gflop_s=4e5), ("matrix rate", "400000", "under half")),
        (dataclasses.replace(GOOD, read_gb_s=float("inf")), ("read bandwidth", "inf")),
        (dataclasses.replace(GOOD, matmul_gflop_s=0.0), ("matrix rate", "0.0")),
    ],
)
def test_an_implausible_reading_is_refused_and_not_kept(
    reading: Reading, words: tuple[str, ...], tmp_path: Path
) -> None:
    device = Device(reading=reading)
    with pytest.raises(UserError) as caught:
        device.probe()
    assert caught.value.code == "implausible-hardware"
    for word in ("NVIDIA H200", "--refresh", *words):
        assert word in caught.value.sentence
    assert not (tmp_path / "hardware").exists()
    device.reading = GOOD
    assert device.probe().read_gb_s == 4376.3


def test_fp32_has_no_lower_bound_for_matrices() -> None:
    refuse_implausible("NVIDIA H200", "fp32", dataclasses.replace(GOOD, matmul_gflop_s=51_000.0))
    with pytest.raises(UserError, match="under half"):
        refuse_implausible("NVIDIA H200", "bf16", dataclasses.replace(GOOD, matmul_gflop_s=51_000.0))


@pytest.mark.parametrize(
    ("name", "read_gb_s"),
    [
        ("NVIDIA H200", 4800),
        ("NVIDIA H100 80GB HBM3", 3352),
        ("NVIDIA H100 PCIe", 2039),
        ("NVIDIA H100 NVL", 3938),
        ("NVIDIA A100-SXM4-80GB", 2039),
        ("NVIDIA A100 80GB PCIe", 1935),
        ("NVIDIA A100-SXM4-40GB", 1555),
        ("NVIDIA A100-PCIE-40GB", 1555),
        ("NVIDIA L40S", 864),
        ("NVIDIA GeForce RTX 4090", 1008),
        ("NVIDIA B200", 8000),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA L40", None),
        ("AMD EPYC", None),
    ],
)
def test_datasheets_are_found_by_product_name(name: str, read_gb_s: float | None) -> None:
    sheet = datasheet(name)
    assert (sheet.read_gb_s if sheet else None) == read_gb_s


def test_a_device_without_datasheet_may_be_slow() -> None:
    refuse_implausible("a small board", "bf16", Reading(0.7, 1.3, {}))


def test_sustained_is_the_best_batch_median() -> None:
    """A busy spell drags its own batches down; one lucky sample lifts none."""
    quiet, busy = [30.0, 31.0, 32.0, 31.5, 29.0], [9.0, 8.0, 10.0, 500.0, 8.5]
    assert sustained(busy + quiet + busy, batch=5) == 31.0
    assert sustained([7.0], batch=5) == 7.0


def test_kernels_take_turns() -> None:
    order: list[str] = []
    durations = {"a": 0.5, "b": 0.25}
    kernels = {name: (lambda name=name: order.append(name), 2e9) for name in durations}

    def timer(kernel: hardware.Callable[[], object]) -> float:
        kernel()
        return durations[order[-1]]

    samples = sample_interleaved(kernels, timer)
    assert samples == {"a": (4.0,) * (BATCHES * SAMPLES_PER_BATCH), "b": (8.0,) * (BATCHES * SAMPLES_PER_BATCH)}
    turns = "".join(order)[2:]  # after warming up
    assert turns == ("a" * SAMPLES_PER_BATCH + "b" * SAMPLES_PER_BATCH) * BATCHES


@pytest.mark.parametrize("platform", ["tpu", "cuda", "cuda:x", ""])
def test_unknown_platforms_are_named(platform: str) -> None:
    with pytest.raises(UserError, match=f"Unknown platform '{platform}'"):
        identify_device(platform)


def test_a_gpu_that_is_not_there_is_named() -> None:
    with pytest.raises(UserError, match="There is no cuda:99 here"):
        identify_device("cuda:99")


def test_a_slow_device_does_not_take_all_day(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "LIMIT_S", -1.0)
    assert sample_interleaved({"a": (int, 2e9)}, lambda kernel: 0.5) == {"a": (4.0,) * SAMPLES_PER_BATCH}


def test_this_cpu_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real device, once and briefly: rates that any machine has, from samples that are kept."""
    monkeypatch.setattr(rates, "BATCHES", 2)
    monkeypatch.setattr(rates, "CPU_READ_BYTES", 96 << 20)
    facts = identify_device("cpu")
    assert facts.name
    assert facts.cores >= 1
    assert 0 < facts.free_bytes <= facts.memory_bytes
    reading = measure_rates("cpu", "fp32")
    assert 0.5 < reading.read_gb_s < 5000
    assert 1 < reading.matmul_gflop_s < 1e6
    assert reading.read_gb_s in {value for name, kept in reading.samples.items() if "read" in name for value in kept}
    assert all(len(kept) == 2 * SAMPLES_PER_BATCH for kept in reading.samples.values())


def test_a_containers_page_cache_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/proc/meminfo": "MemTotal: 99999999 kB\nMemAvailable: 9000000 kB\n",
        "/sys/fs/cgroup/memory.max": "8000000000\n",
        "/sys/fs/cgroup/memory.current": "7000000000\n",
        "/sys/fs/cgroup/memory.stat": "anon 1500000000\nfile 5500000000\ninactive_file 5000000000\n",
    }
    monkeypatch.setattr(hardware, "_text", lambda path: files.get(str(path), ""))
    monkeypatch.setattr(hardware.os, "sysconf", lambda name: 4096 if name == "SC_PAGE_SIZE" else 25_000_000)
    assert hardware.host_memory() == (8_000_000_000, 6_000_000_000)
    del files["/sys/fs/cgroup/memory.stat"]
    assert hardware.host_memory() == (8_000_000_000, 1_000_000_000)
