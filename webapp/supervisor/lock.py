"""One supervisor for each data folder. The lock goes with the process, so a killed one leaves nothing to clean up."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

from engine.errors import UserError

NAME = "supervisor.lock"


class InstanceLock:
    """Held from construction until `release`. Raises UserError, with the address of the one that runs."""

    def __init__(self, data: Path) -> None:
        self._file = (data / NAME).open("a+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.seek(0)
            sentence = _running(self._file.read(), data)
            self._file.close()
            raise UserError(sentence, code="running") from None
        self.tell({"pid": os.getpid(), "url": ""})

    def tell(self, facts: dict[str, object]) -> None:
        """What a second supervisor says about this one."""
        self._file.seek(0)
        self._file.truncate()
        self._file.write(json.dumps(facts))
        self._file.flush()

    def release(self) -> None:
        self._file.close()


def _running(text: str, data: Path) -> str:
    try:
        facts = json.loads(text)
    except ValueError:
        facts = {}
    where = f" at {facts['url']}" if facts.get("url") else ""
    who = f" (process {facts['pid']})" if facts.get("pid") else ""
    return (
        f"SpecPilot already runs on the data folder {data}{where}{who}. Use that one, stop it with Ctrl-C in its "
        "terminal, or set SPECPILOT_DATA to another folder."
    )
