"""The web process: its port, its host names, and whether it answers."""

from __future__ import annotations

import http.client
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil

from engine.errors import UserError
from webapp.supervisor.devices import LOWERED
from webapp.supervisor.processes import Spec

DEFAULT_PORT = 8000
TRIES = 100


def open_port(host: str, port: int | None) -> socket.socket:
    """A listening socket on `port`, or on the first free port from 8000 where None. Raises UserError."""
    choices = [port] if port is not None else range(DEFAULT_PORT, DEFAULT_PORT + TRIES)
    try:
        family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    except OSError:
        raise UserError(f"--host {host} is not an address of this machine.", field="host") from None
    for number in choices:
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, number))
            listening.listen(128)
        except OSError as error:
            listening.close()
            if port is not None:
                raise UserError(f"Port {port} of {host} cannot be used: {error.strerror}.", field="port") from None
            continue
        return listening
    raise UserError(f"No port from {DEFAULT_PORT} on is free; name one with --port.", field="port")


def web_spec(listening: socket.socket, logs: Path, env: Mapping[str, str]) -> Spec:
    fd = listening.fileno()
    argv = (sys.executable, "-m", "webapp.supervisor.serve", str(fd))
    return Spec("web", argv, logs / "web.log", env=env, nice=LOWERED, rank=1, fds=(fd,))


def base_url(listening: socket.socket) -> str:
    """Where a browser on this machine finds the web."""
    host, port = listening.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def host_names(host: str) -> list[str]:
    """Names under which the web may be asked for: `host`, and every address of this machine where it is a wildcard."""
    if host not in ("0.0.0.0", "::"):
        return [host]
    addresses = [address for addresses in psutil.net_if_addrs().values() for address in addresses]
    internet = [a.address for a in addresses if a.family in (socket.AF_INET, socket.AF_INET6) and "%" not in a.address]
    return [f"[{address}]" if ":" in address else address for address in internet]


def web_answers(listening: socket.socket) -> bool:
    """Whether the web serves requests and reaches its database."""
    host, port = listening.getsockname()[:2]
    target = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    connection = http.client.HTTPConnection(target, port, timeout=2)
    try:
        connection.request("GET", "/healthz", headers={"Host": "localhost"})
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
