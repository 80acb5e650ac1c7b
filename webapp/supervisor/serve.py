"""`python -m webapp.supervisor.serve FD`: the web, on a listening socket that the supervisor holds.

The supervisor keeps the socket open, so the port stays ours, and requests wait, while the web is started again.
"""

from __future__ import annotations

import socket
import sys

import uvicorn


def main() -> None:
    config = uvicorn.Config(
        "webapp.config.asgi:application",
        log_level="warning",
        access_log=False,  # addresses may carry a one-time sign-in token
        lifespan="off",
        ws_max_size=2**16,  # pages have nothing long to say
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=3,
    )
    uvicorn.Server(config).run(sockets=[socket.socket(fileno=int(sys.argv[1]))])


if __name__ == "__main__":
    main()
