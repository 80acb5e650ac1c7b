"""The event file of a search: `events.jsonl`, append-only, one writer, safe against a kill at any moment."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from engine.errors import UserError
from engine.search.events import Event

EVENTS = "events.jsonl"
LOCK = "lock"


def read_events(path: Path) -> list[Event]:
    """All events of the file at `path`. Raises UserError, naming the line, where one is no event or out of order.

    A last line that a kill has torn (no line end, or not JSON) is left out.
    """
    events, _ = _read(path)
    return events


class Journal:
    """The open event file of the search in `folder`, which it creates where missing.

    Holds the folder's lock for as long as it is open, also across processes; the lock goes with the process,
    so a killed search never has to be unlocked by hand. Raises UserError where another process holds it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = (folder / LOCK).open("ab")
        except OSError as error:
            raise UserError(f"The search's folder {folder} cannot be written: {error.strerror}.", field="out") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise UserError(
                f"Another process is running the search in {folder}; wait for it, or choose another folder with --out.",
                code="locked",
                field="out",
            ) from None
        path = folder / EVENTS
        try:
            path.touch(mode=0o600)
            self.events, intact = _read(path)
            self._file: BinaryIO = path.open("r+b")
            self._file.truncate(intact)
            self._file.seek(intact)
        except BaseException:
            self._lock.close()
            raise

    def append(self, event: Event) -> None:
        """Add one event; when this returns it is on the disk. Event numbers must follow each other."""
        if event.seq != len(self.events) + 1:
            raise ValueError(f"event {event.seq} does not follow event {len(self.events)}")
        self._file.write(json.dumps(event.to_json(), allow_nan=False).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.events.append(event)

    def close(self) -> None:
        self._file.close()
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _read(path: Path) -> tuple[list[Event], int]:
    """The events, and how many bytes of the file hold them."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"There is no search in {path.parent}: {path.name} is missing.", field="resume") from None
    events: list[Event] = []
    intact = 0
    lines = data.splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        last = number == len(lines)
        if last and not line.endswith(b"\n"):
            break
        try:
            parsed = json.loads(line)
        except (ValueError, RecursionError):
            if last:
                break
            raise _damaged(path, number, "is not JSON") from None
        try:
            event = Event.from_json(parsed)
        except (TypeError, UserError) as error:
            raise _damaged(path, number, f"is no event ({error})") from None
        if event.seq != number:
            raise _damaged(path, number, f"has number {event.seq}")
        events.append(event)
        intact += len(line)
    return events, intact


def _damaged(path: Path, number: int, complaint: str) -> UserError:
    return UserError(f"The event file {path} is damaged: line {number} {complaint}.", code="damaged", field="resume")
