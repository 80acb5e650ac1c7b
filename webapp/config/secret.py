"""The installation's secret key: made once, kept in the data folder, readable by its owner only."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from pathlib import Path

NAME = "secret_key"


def secret_key(folder: Path) -> str:
    """The key in `folder`, made on first use. Processes that start together agree on one key."""
    path = folder / NAME
    if not path.exists():
        handle, draft = tempfile.mkstemp(dir=folder, prefix=f".{NAME}-")  # mkstemp: mode 0600
        try:
            with os.fdopen(handle, "w") as file:
                file.write(secrets.token_urlsafe(48))
                file.flush()
                os.fsync(file.fileno())
            with contextlib.suppress(FileExistsError):  # another process was first: its key counts
                os.link(draft, path)
        finally:
            Path(draft).unlink()
    return path.read_text().strip()
