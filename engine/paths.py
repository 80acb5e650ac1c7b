"""Where SpecPilot keeps its data: one folder, `.specpilot` in the repository, or $SPECPILOT_DATA."""

from __future__ import annotations

import os
from pathlib import Path

from engine.errors import UserError

LONGEST_PATH = 1024
"""Bytes of a path that a person may give."""
REPOSITORY = Path(__file__).resolve().parent.parent


def user_path(text: str, *, field: str) -> Path:
    """The path that a person gave, with ~ expanded. Raises UserError for a text that can be no path on this system."""
    shown = repr(text if len(text) <= 60 else f"{text[:60]}...")
    try:
        if "\0" in text or len(text.encode()) > LONGEST_PATH:
            raise ValueError
        path = Path(text).expanduser()
        path.exists()
    except (OSError, ValueError, RuntimeError):  # a name too long, a lone surrogate, an unknown ~user
        raise UserError(f"{shown} is not a path that this system can open.", code="bad-path", field=field) from None
    return path


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
