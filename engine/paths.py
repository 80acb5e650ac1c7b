"""Where SpecPilot keeps its data: one folder, `.specpilot` in the repository, or $SPECPILOT_DATA."""

from __future__ import annotations

import os
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent


def data_dir() -> Path:
    """The data folder, created on first use with access for its owner only."""
    folder = Path(os.environ.get("SPECPILOT_DATA") or REPOSITORY / ".specpilot").expanduser().resolve()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def searches_dir() -> Path:
    """One subfolder for each search: events, judge's caches, child logs, bundle."""
    folder = data_dir() / "searches"
    folder.mkdir(exist_ok=True)
    return folder
