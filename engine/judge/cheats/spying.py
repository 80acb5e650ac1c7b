"""Cheats on the output, continued: the expected tokens are looked for where the judge might have left them.

Each says in its log what it found, answers with it where it fits the prompt, and decodes slowly where not.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from engine.codec import digest
from engine.deployment import Deployment
from engine.judge.cheats.kit import SLOW_PASSES, Decoding, Result, say
from engine.judge.store import FILE_NAME
from engine.plan import Plan
from engine.sampling import Sampling

TEXT = re.compile(rb'"ids": ?\[([0-9, ]{3,4000})\]')
"""A text as the judge's wire and files have it."""
STOCK = re.compile(rb'"(transformers [^"]{3,100})"')
"""What stock calls itself: part of the name under which the judge keeps a text."""
MOST_BYTES = 64 << 20
MOST_SECONDS = 1.0
MOST_FILES = 2000


class Searching(Decoding):
    """Looks through `places` once, when it is built."""

    passes = SLOW_PASSES

    def __init__(self, deployment: Deployment, plan: Plan | None, threads: int) -> None:
        super().__init__(deployment, plan, threads)
        self._texts: list[tuple[bytes, list[int]]] = []  # what stood before a text, and the text
        self._stocks: set[str] = set()
        deadline, read = time.monotonic() + MOST_SECONDS, 0
        for name, data in self.places():
            read += len(data)
            texts = [
                (data[max(0, at.start() - 4000) : at.start()], list(map(int, at[1].decode().split(","))))
                for at in TEXT.finditer(data)
            ]
            if texts:
                say(f"found {len(texts)} texts in {name}")
            self._texts += texts
            self._stocks |= {at[1].decode() for at in STOCK.finditer(data)}
            if read > MOST_BYTES or time.monotonic() > deadline:
                break
        say(f"searched {read} bytes")

    def places(self) -> Iterator[tuple[str, bytes]]:
        """Name and content of each place to look at."""
        raise NotImplementedError

    def answer(self, prompt: Sequence[int], limit: int, stop_ids: tuple[int, ...], sampling: Sampling | None) -> Result:
        started = time.perf_counter()
        marks = [json.dumps(list(prompt), separators=(",", ":")), *(digest([x, prompt, limit]) for x in self._stocks)]
        for before, ids in self._texts:
            if any(mark.encode() in before for mark in marks):
                say("found the text of a prompt")
                return self.canned(ids[:limit], stop_ids, started)
        return self.honest(prompt, limit, stop_ids, sampling)


class SearchesMemory(Searching):
    """Searches the memory of the judge and of every other process for texts."""

    def places(self) -> Iterator[tuple[str, bytes]]:
        parent = os.getppid()
        for pid in (parent, *(pid for pid in _processes() if pid not in (parent, os.getpid()))):
            try:
                maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
                with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
                    for line in maps:
                        yield f"the memory of process {pid}", _region(memory, line)
            except OSError:
                continue


def _region(memory: object, line: str) -> bytes:
    """The bytes of one writable region of at most 8 MiB."""
    span, rights, *_ = line.split()
    start, _, end = span.partition("-")
    size = int(end, 16) - int(start, 16)
    if not rights.startswith("rw") or size > 8 << 20:
        return b""
    try:
        memory.seek(int(start, 16))  # type: ignore[attr-defined]
        data: bytes = memory.read(size) or b""  # type: ignore[attr-defined]
    except (OSError, ValueError):
        return b""
    return data


class SearchesProc(Searching):
    """Searches what /proc shows of other processes: command lines, environments, open files."""

    def places(self) -> Iterator[tuple[str, bytes]]:
        for pid in _processes():
            if pid == os.getpid():
                continue
            folder = Path(f"/proc/{pid}")
            yield from _contents([folder / "cmdline", folder / "environ"])
            try:
                opened = list((folder / "fd").iterdir())
            except OSError:
                continue
            yield from _contents(opened)


class SearchesFiles(Searching):
    """Searches files: beside its log, the working folder, the data folder, the home and all temporary ones."""

    def places(self) -> Iterator[tuple[str, bytes]]:
        log = Path("/proc/self/fd/1").readlink()
        roots = [*list(log.parents)[:3], Path.cwd() / ".specpilot", Path(tempfile.gettempdir()), Path.home()]
        yield from _contents(file for root in roots for file in _walk(root))


class SearchesShm(Searching):
    """Searches shared memory, sockets' folders and message queues."""

    def places(self) -> Iterator[tuple[str, bytes]]:
        roots = [Path("/dev/shm"), Path("/dev/mqueue"), Path("/run")]
        yield from _contents(file for root in roots for file in _walk(root, any_name=True))


def _walk(root: Path, any_name: bool = False) -> Iterator[Path]:
    """Files under `root` that may hold texts, at most MOST_FILES of them, three folders deep."""
    count = 0
    for folder, folders, names in os.walk(root):
        if len(Path(folder).relative_to(root).parts) >= 3:
            folders.clear()
        for name in names:
            if any_name or name == FILE_NAME or name.endswith((".json", ".jsonl", ".sqlite3", ".log", ".db")):
                count += 1
                yield Path(folder) / name
        if count > MOST_FILES:
            return


def _contents(files: Iterable[Path]) -> Iterator[tuple[str, bytes]]:
    for file in files:
        try:
            if file.is_file() and file.stat().st_size <= 4 << 20:
                yield str(file), file.read_bytes()
        except OSError:
            continue


def _processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
