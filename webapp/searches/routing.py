from django.urls import path

from webapp.searches.consumers import SearchConsumer

websocket_urlpatterns = [path("ws/searches/<int:pk>", SearchConsumer.as_asgi())]
