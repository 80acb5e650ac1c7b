"""What this installation writes is for the user who runs it: nobody else on the machine may read it."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from django.conf import settings

FOR_OWNER = 0o077  # the umask: no access for group and others


@contextlib.contextmanager
def owner_only() -> Iterator[None]:
    """New files and folders of this process, and of those that it starts, are for their owner only. A database that
    an earlier version left readable by others is closed to them too."""
    before = os.umask(FOR_OWNER)
    try:
        for path in _database_files():
            with contextlib.suppress(OSError):  # not there, or another user's
                path.chmod(stat.S_IMODE(path.stat().st_mode) & ~FOR_OWNER)
        yield
    finally:
        os.umask(before)


def _database_files() -> list[Path]:
    database = settings.DATABASES["default"]
    if not database["ENGINE"].endswith("sqlite3"):
        return []
    return [Path(f"{database['NAME']}{suffix}") for suffix in ("", "-wal", "-shm")]
