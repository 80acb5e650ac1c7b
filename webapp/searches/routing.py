from django.urls import path, re_path

from webapp.searches.consumers import NothingHere, SearchConsumer

websocket_urlpatterns = [
    path("ws/searches/<int:pk>", SearchConsumer.as_asgi()),
    re_path("", NothingHere.as_asgi()),
]
