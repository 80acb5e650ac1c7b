"""Where the broker is, in the three spellings that its users want.

`REDIS_URL` names it (redis://, rediss:// or unix://). Without it, the broker is the embedded one of this data
folder, which `manage.py up` starts on a unix socket.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

SOCKET_NAME = "broker.sock"
LONGEST_SOCKET_PATH = 100  # Linux allows 107 bytes; the broker appends to the name while it binds


def socket_path(data: Path) -> Path:
    """The embedded broker's unix socket: in the data folder, or in a short private folder where that is too long."""
    path = data / SOCKET_NAME
    if len(os.fsencode(path)) <= LONGEST_SOCKET_PATH:
        return path
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    if len(os.fsencode(base)) > 50:
        base = Path("/tmp")
    name = hashlib.sha256(os.fsencode(data)).hexdigest()[:12]
    return base / f"specpilot-{os.getuid()}-{name}" / SOCKET_NAME


def redis_url(data: Path) -> str:
    """The broker's URL as redis-py reads it."""
    return os.environ.get("REDIS_URL") or f"unix://{socket_path(data)}"


def celery_url(url: str) -> str:
    """The same broker as Celery spells it: unix sockets are redis+socket://PATH?virtual_host=DB."""
    parts = urlsplit(url)
    if parts.scheme != "unix":
        return url
    return f"redis+socket://{parts.path}?virtual_host={database_number(url)}"


def database_number(url: str) -> int:
    """The Redis database that a URL selects; 0 where it names none."""
    parts = urlsplit(url)
    chosen = parse_qs(parts.query).get("db", [""])[0] or (parts.path.strip("/") if parts.scheme != "unix" else "")
    return int(chosen) if chosen.isdigit() else 0
