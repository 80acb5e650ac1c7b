"""Who this worker is: told by its environment, which the supervisor sets (`webapp/supervisor/devices.py`)."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

HOST = "SPECPILOT_WORKER_HOST"
DEVICE = "SPECPILOT_WORKER_DEVICE"
DESCRIPTION = "SPECPILOT_WORKER_DESCRIPTION"
CONTROL = "control"


@dataclass(frozen=True)
class Worker:
    """`device` is "cpu", "cuda:N" (N as the machine counts its GPUs) or "control" for the orchestration worker."""

    host: str
    device: str
    description: str = ""

    @property
    def kind(self) -> str:
        """What jobs ask for: "cpu", "cuda" or "control"."""
        return self.device.partition(":")[0]

    @property
    def name(self) -> str:
        return f"{self.host}/{self.device}"

    @property
    def is_control(self) -> bool:
        return self.kind == CONTROL


def this_worker() -> Worker:
    return Worker(
        os.environ.get(HOST) or socket.gethostname(),
        os.environ.get(DEVICE) or CONTROL,
        os.environ.get(DESCRIPTION, ""),
    )
