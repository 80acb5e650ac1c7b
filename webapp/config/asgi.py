"""The ASGI application: Django for HTTP, Channels for WebSockets of signed-in users of this very site."""

from __future__ import annotations

import os

from channels.auth import AuthMiddlewareStack
from channels.routing import ProtocolTypeRouter, URLRouter
from django.core.asgi import get_asgi_application

from webapp.config.origin import SameOrigin

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "webapp.config.settings")
http = get_asgi_application()  # loads the apps; the consumers need them

from webapp.searches.routing import websocket_urlpatterns  # noqa: E402

application = ProtocolTypeRouter(
    {
        "http": http,
        "websocket": SameOrigin(AuthMiddlewareStack(URLRouter(websocket_urlpatterns))),
    }
)
