"""Where Chromium is, and what the browser test's fixtures give."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
CHROMIUM_FLAGS = [
    "--no-sandbox",  # the tests may run as root
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@dataclass(frozen=True)
class Models:
    """A target of random weights, and prompts for it."""

    target: Path
    prompts: Path


@dataclass(frozen=True)
class Stack:
    """The product as a user starts it. `sign_in` is the one-time address that it printed."""

    sign_in: str
    log: Path

    @property
    def base(self) -> str:
        return self.sign_in.split("/login")[0]
