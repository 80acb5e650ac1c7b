"""A child's log: its last lines for people, and a pump that keeps the log of a distrusted child bounded."""

from __future__ import annotations

import os
import threading
from pathlib import Path

TAIL_BYTES = 4000
TAIL_LINES = 8


def tail(log: Path) -> str:
    """The last lines of `log`, without control characters, or ""."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = [
        "".join(c for c in line.rsplit("\r", 1)[-1] if c.isprintable() or c == "\t")[:300] for line in text.split("\n")
    ]
    return "\n".join([line for line in lines if line.strip()][-TAIL_LINES:])


class Pump:
    """Copies what comes out of a pipe to a log, at most `limit` bytes and then, at the end, the last TAIL_BYTES.

    With a pipe the child holds no descriptor of the log: it can neither read it, nor cut it, nor write over it.
    """

    def __init__(self, log: Path, limit: int) -> None:
        self._limit = limit
        self._log = log
        self._read, self.write_end = os.pipe()
        self._thread = threading.Thread(target=self._run, name="judge-log", daemon=True)

    def start(self) -> None:
        """Close our copy of the writing end and begin. It ends when nobody holds that end any more."""
        os.close(self.write_end)
        self._thread.start()

    def abandon(self) -> None:
        """Close both ends instead of starting."""
        os.close(self.write_end)
        os.close(self._read)

    def join(self, seconds: float = 5.0) -> None:
        self._thread.join(seconds)

    def _run(self) -> None:
        written, left_out, last = 0, 0, b""
        with self._log.open("ab", buffering=0) as log, os.fdopen(self._read, "rb", buffering=0) as source:
            while chunk := source.read(1 << 16):
                log.write(chunk[: self._limit - written])
                rest = chunk[self._limit - written :]
                written += len(chunk) - len(rest)
                left_out += len(rest)
                last = (last + rest)[-TAIL_BYTES:]
            if left_out:
                log.write(f"\n[{left_out - len(last):,} bytes left out]\n".encode() + last)
