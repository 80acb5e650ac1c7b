"""WebSocket handshakes only from pages of this very site: scheme aside, the Origin must be the Host."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

from channels.security.websocket import WebsocketDenier
from django.conf import settings
from django.http.request import split_domain_port, validate_host

Application = Callable[[dict[str, Any], Any, Any], Awaitable[Any]]


class SameOrigin:
    """ASGI middleware. A browser always sends Origin; a handshake without one, or from elsewhere, is denied (403).

    Channels' own validator compares host names only, so a page on another port of this host would pass it.
    """

    def __init__(self, application: Application) -> None:
        self.application = application

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> Any:
        if _same_origin(scope):
            return await self.application(scope, receive, send)
        denier = WebsocketDenier()
        return await denier(scope, receive, send)


def _same_origin(scope: dict[str, Any]) -> bool:
    headers = {name: value.decode("latin1").lower() for name, value in scope.get("headers", [])}
    host, origin = headers.get(b"host", ""), headers.get(b"origin", "")
    domain, _ = split_domain_port(host)
    if not domain or not validate_host(domain, settings.ALLOWED_HOSTS):
        return False
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    return parts.scheme in {"http", "https"} and parts.netloc == host
