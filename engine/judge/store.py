"""What the judge has measured of stock, kept in the search's folder so that a killed worker need not do it again.

One JSON object a line, appended in one write; a line that a kill cut short is skipped. Only the judge opens the file.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.codec import digest, to_json
from engine.judge.floor import Floor
from engine.judge.protocol import Text
from engine.sampling import Sampling

FILE_NAME = "judge.jsonl"
KEPT_REPEATS = 24


class Store:
    """Stock texts, noise floors and A/A repeats of one deployment on one device, by content of the question."""

    def __init__(self, folder: Path, identity: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / FILE_NAME
        self._identity = digest(identity)
        self._texts: dict[str, Text] = {}
        self._floors: dict[str, Floor] = {}
        self._repeats: list[float] = []
        self._secret = ""
        for record in self._read():
            self._take(record)

    def text(
        self, implementation: str, prompt: Sequence[int], max_new_tokens: int, sampling: Sampling | None = None
    ) -> Text | None:
        """Stock's free run of a prompt, where it was made before."""
        return self._texts.get(_key(implementation, prompt, max_new_tokens, sampling))

    def keep_text(
        self,
        implementation: str,
        prompt: Sequence[int],
        max_new_tokens: int,
        text: Text,
        sampling: Sampling | None = None,
    ) -> None:
        key = _key(implementation, prompt, max_new_tokens, sampling)
        self._append({"kind": "text", "key": key, "ids": text.ids, "stop_reason": text.stop_reason})

    def floor(self, implementation: str) -> Floor | None:
        return self._floors.get(implementation)

    def keep_floor(self, implementation: str, floor: Floor) -> None:
        self._append({"kind": "floor", "key": implementation, "floor": vars(floor)})

    @property
    def secret(self) -> str:
        """A number of this search that nobody else knows: a source candidate may know the search's seed."""
        if not self._secret:
            self._append({"kind": "secret", "secret": secrets.token_hex(16)})
        return self._secret

    @property
    def repeats(self) -> list[float]:
        """Log-ratios of a reference's times on the same prompt, the newest ones of this search."""
        return self._repeats[-KEPT_REPEATS:]

    def keep_repeats(self, log_ratios: Sequence[float]) -> None:
        self._append({"kind": "repeats", "log_ratios": list(log_ratios)})

    def _append(self, record: dict[str, Any]) -> None:
        record = {"identity": self._identity, **record}
        line = json.dumps(record, allow_nan=False) + "\n"
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)
        self._take(json.loads(line))

    def _read(self) -> list[dict[str, Any]]:
        try:
            lines = self._path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return []
        if lines[-1]:  # cut short by a kill: end it, so that the next line stands alone
            with self._path.open("ab") as file:
                file.write(b"\n")
        records = []
        for line in lines:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict):
                records.append(record)
        return records

    def _take(self, record: dict[str, Any]) -> None:
        if record.get("identity") != self._identity:
            return
        if record["kind"] == "text":
            self._texts[record["key"]] = Text(tuple(record["ids"]), record["stop_reason"])
        elif record["kind"] == "floor":
            self._floors[record["key"]] = Floor(**record["floor"])
        elif record["kind"] == "secret":
            self._secret = record["secret"]
        elif record["kind"] == "repeats":
            self._repeats += record["log_ratios"]


def _key(implementation: str, prompt: Sequence[int], max_new_tokens: int, sampling: Sampling | None) -> str:
    return digest([implementation, list(prompt), max_new_tokens, *([to_json(sampling)] if sampling else [])])
