"""Which devices of this machine work for SpecPilot, and the worker process of each."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.errors import UserError
from engine.paths import REPOSITORY
from webapp.searches.doorbell import device_queue, queue_of
from webapp.searches.worker import DESCRIPTION, DEVICE, HOST, Worker
from webapp.supervisor.processes import Spec

LOWERED = 10
"""Niceness of everything but the device workers: the judged processes come first on a shared CPU."""


@dataclass(frozen=True)
class Device:
    """`name` is "cpu" or "cuda:N"; `visible` is what the worker's CUDA_VISIBLE_DEVICES must be."""

    name: str
    visible: str
    description: str


def choose_devices(gpus: str) -> list[Device]:
    """ "auto": all GPUs, or the CPU where there is none that computes; "all"; "cpu"; or numbers such as "0,2".

    Raises UserError for a GPU that is not there.
    """
    if gpus == "cpu" or (gpus == "auto" and not _gpu_computes()):
        return [Device("cpu", "", _cpu_description())]
    found = _gpus()
    if gpus in ("auto", "all"):
        if not found:
            raise UserError("This machine has no GPU that nvidia-smi lists; use --gpus cpu.", field="gpus")
        return [Device(f"cuda:{index}", str(index), name) for index, name in found.items()]
    if not re.fullmatch(r"\d+(,\d+)*", gpus):
        raise UserError(f"--gpus {gpus} is not understood; use all, cpu, or numbers such as 0,1.", field="gpus")
    wanted = sorted({int(number) for number in gpus.split(",")})
    missing = [number for number in wanted if number not in found]
    if missing:
        there = ", ".join(map(str, found)) or "none"
        raise UserError(f"There is no GPU {missing[0]} here (there: {there}).", field="gpus")
    return [Device(f"cuda:{number}", str(number), found[number]) for number in wanted]


def device_worker(device: Device, host: str, logs: Path, env: Mapping[str, str]) -> Spec:
    """The worker of one device: it sees that device only, and hears of work for its kind from any machine."""
    worker = Worker(check_host(host), device.name, device.description)
    # Its grace covers the judge's children, which end with their pipes.
    return Spec(
        f"worker {device.name}",
        _celery(worker, (device_queue(worker.host, worker.device), queue_of(worker.kind))),
        logs / f"worker-{device.name.replace(':', '')}.log",
        env={**env, **_identity(worker), "CUDA_VISIBLE_DEVICES": device.visible},
        grace=15.0,
    )


def control_worker(host: str, logs: Path, env: Mapping[str, str]) -> Spec:
    """The orchestration worker: proposals and bundles of searches whose device worker does not do them itself."""
    worker = Worker(check_host(host), "control", "proposals and bundles")
    return Spec(
        "worker control",
        _celery(worker, (queue_of(worker.kind),)),
        logs / "worker-control.log",
        env={**env, **_identity(worker), "CUDA_VISIBLE_DEVICES": ""},
        nice=LOWERED,
    )


def check_host(host: str) -> str:
    """The name of a machine as it stands in queue and worker names. Raises UserError."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", host):
        raise UserError(f"{host!r} cannot name a machine: use letters, digits, dots and dashes.", field="name")
    return host


def _celery(worker: Worker, queues: tuple[str, ...]) -> tuple[str, ...]:
    name = f"{worker.device.replace(':', '')}@{worker.host}"
    return (
        *(sys.executable, "-m", "celery", "-A", "webapp.config.celery", "worker"),
        *("--hostname", name, "--queues", ",".join(queues), "--pool", "prefork", "--concurrency", "1"),
        *("--max-tasks-per-child", "1", "--disable-prefetch"),
        *("--without-gossip", "--without-mingle", "--without-heartbeat", "--loglevel", "INFO"),
    )


def _identity(worker: Worker) -> dict[str, str]:
    return {HOST: worker.host, DEVICE: worker.device, DESCRIPTION: worker.description}


def _gpus() -> dict[int, str]:
    """GPUs by number, as the driver counts them."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    command = [program, "--query-gpu=index,name", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    lines = [line.partition(",") for line in done.stdout.splitlines() if "," in line] if done.returncode == 0 else []
    return {int(index): name.strip() for index, _, name in lines}


def _gpu_computes() -> bool:
    """Whether the engine can use a GPU here. Asked in a process of its own: torch, and a CUDA context, stay there."""
    if not _gpus():
        return False
    code = "from engine.hardware import best_platform; print(best_platform())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, check=False, timeout=120
    )
    return done.stdout.strip().startswith("cuda")


def _cpu_description() -> str:
    from engine.hardware import identify_device

    return identify_device("cpu").name
