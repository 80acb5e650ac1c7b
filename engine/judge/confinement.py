"""What the child of a source candidate may see and use: a value, made from the deployment.

Source candidates run code that nobody has read, so they run in a sandbox (`sandbox.py`) that shows them the
interpreter, libraries, the driver, our two packages, the checkpoint's files and their own source file, and the device
nodes of one GPU or none. An operator who trusts every source candidate may turn that off by name: with
SPECPILOT_UNCONFINED_SOURCE=1 in the environment they run as any other child does.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from engine.deployment import NO_DRAFTER, Deployment
from engine.drafters.reference import open_drafter
from engine.errors import UserError
from engine.judge.backends import BUILT_IN
from engine.weights import Checkpoint, open_checkpoint

UNCONFINED = "SPECPILOT_UNCONFINED_SOURCE"
TOKENIZER_FILES = ("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model")
"""Files beside a checkpoint's own that only a tokenizer reads."""

_GPU_FOLDER = Path("/proc/driver/nvidia/gpus")
_SHARED_NODES = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools")


@dataclass(frozen=True)
class Limits:
    """What a child and all that it starts may use together; `file_bytes` and `open_files` are for one process.

    `memory_bytes` is main memory, scratch files included; `processes` counts threads too; `scratch_bytes` is the size
    of its private /tmp (and of /dev/shm); `seconds` its whole life, from start on.
    """

    memory_bytes: int
    processes: int = 512
    file_bytes: int = 1 << 30
    open_files: int = 1024
    scratch_bytes: int = 1 << 30
    log_bytes: int = 1 << 20
    seconds: float = 3600.0


@dataclass(frozen=True)
class Confinement:
    """What one child may see besides interpreter, libraries and our packages. All paths are absolute.

    `files` are shown read-only under their own names, symbolic links on the way included; `devices` are device nodes.
    `backend`, `target`, `drafter` and `platform` are the names that hold inside.
    """

    backend: str
    target: str
    drafter: str
    platform: str
    files: tuple[Path, ...]
    devices: tuple[Path, ...]
    limits: Limits

    def translate(self, question: dict[str, Any]) -> dict[str, Any]:
        """A build question with the names that hold inside; any other question as it is."""
        if question.get("do") != "build":
            return question
        names = {"target": self.target, "drafter": self.drafter, "platform": self.platform}
        return {**question, "backend": self.backend, "deployment": {**question["deployment"], **names}}


def needs_sandbox(backend: str) -> bool:
    """Whether `backend` is source code by file ("file.py:function"), which is not ours."""
    return backend not in BUILT_IN and backend.rpartition(":")[0].endswith(".py")


def default_limits() -> Limits:
    """Three quarters of this machine's memory, and threads in proportion to its cores."""
    return Limits(memory_bytes=psutil.virtual_memory().total * 3 // 4, processes=max(512, 16 * (os.cpu_count() or 1)))


def confinement_for(deployment: Deployment, backend: str, limits: Limits | None = None) -> Confinement | None:
    """How the source candidate `backend` is confined; None where the operator has turned that off.

    Raises UserError where it has to be and cannot be, where its file is missing, or where its GPU's node is unknown.
    """
    from engine.judge.sandbox import require

    if os.environ.get(UNCONFINED) == "1":
        return None
    require()
    place, _, function = backend.rpartition(":")
    source = Path(place).expanduser().absolute()
    if not source.is_file():
        raise UserError(f"There is no source file {place}.", code="backend")
    target, target_files = _target(deployment.target)
    drafter, drafter_files = _drafter(deployment.drafter)
    cuda = deployment.platform.startswith("cuda")
    return Confinement(
        backend=f"{source}:{function}",
        target=target,
        drafter=drafter,
        platform="cuda:0" if cuda else deployment.platform,
        files=tuple(dict.fromkeys((source, *target_files, *drafter_files))),
        devices=gpu_nodes(deployment.platform, os.environ) if cuda else (),
        limits=limits or default_limits(),
    )


def _target(ref: str) -> tuple[str, tuple[Path, ...]]:
    try:
        return _visible(open_checkpoint(ref))
    except UserError:  # what is no checkpoint of ours, another server may know by name
        return ref, ()


def _drafter(ref: str) -> tuple[str, tuple[Path, ...]]:
    if ref == NO_DRAFTER:
        return ref, ()
    try:
        checkpoint = open_drafter(ref).checkpoint
    except UserError:
        return ref, ()
    return (ref, ()) if checkpoint is None else _visible(checkpoint)


def _visible(checkpoint: Checkpoint) -> tuple[str, tuple[Path, ...]]:
    path = checkpoint.path.expanduser().absolute()
    beside = [path / name for name in TOKENIZER_FILES] if path.is_dir() else []
    files = [file.expanduser().absolute() for file in checkpoint.files()]
    return str(path), (*files, *(file for file in beside if file.is_file()))


@dataclass(frozen=True)
class Gpu:
    """A GPU as the driver lists it; `minor` is the number of its device node."""

    model: str
    uuid: str
    minor: int


def gpu_nodes(platform: str, environment: Mapping[str, str], device_folder: Path = Path("/dev")) -> tuple[Path, ...]:
    """Device nodes that a program needs for the GPU that is `platform` ("cuda:0") here, and no other GPU's.

    Raises UserError where it cannot be told which node that is.
    """
    there = [gpu for gpu in _gpus() if (device_folder / f"nvidia{gpu.minor}").exists()]
    nodes = sorted(file for file in device_folder.glob("nvidia*") if re.fullmatch(r"nvidia\d+", file.name))
    minor = _minor(platform, environment, there)
    if minor is None and len(nodes) == 1:
        minor = int(nodes[0].name.removeprefix("nvidia"))
    if minor is None:
        raise UserError(
            f"Which device node is {platform} cannot be told here, so a source candidate cannot be confined to it; "
            "name the GPU by its UUID in CUDA_VISIBLE_DEVICES.",
            code="sandbox",
            field="platform",
        )
    shared = [device_folder / name for name in _SHARED_NODES]
    return (*(node for node in shared if node.exists()), device_folder / f"nvidia{minor}")


def _minor(platform: str, environment: Mapping[str, str], gpus: list[Gpu]) -> int | None:
    index = int(platform.partition(":")[2] or "0")
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    names = [str(number) for number in range(len(gpus))] if visible is None else visible.replace(" ", "").split(",")
    if index >= len(names):
        return None
    name = names[index]
    if name.isdigit():
        # CUDA numbers by speed unless told otherwise; among equal ones that is the order on the bus.
        ordered = len({gpu.model for gpu in gpus}) == 1 or environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
        return gpus[int(name)].minor if ordered and int(name) < len(gpus) else None
    found = [gpu.minor for gpu in gpus if name.startswith("GPU-") and gpu.uuid.startswith(name)]
    return found[0] if len(found) == 1 else None


def _gpus() -> list[Gpu]:
    """In the order of the bus."""
    found = []
    for file in sorted(_GPU_FOLDER.glob("*/information")):
        rows = (line.partition(":") for line in file.read_text().splitlines())
        facts = {name.strip(): value.strip() for name, _, value in rows}
        if facts.get("Device Minor", "").isdigit():
            found.append(Gpu(facts.get("Model", ""), facts.get("GPU UUID", ""), int(facts["Device Minor"])))
    return found
