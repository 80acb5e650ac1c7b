from django.contrib import admin
from django.urls import include, path
from drf_spectacular.views import SpectacularJSONAPIView

urlpatterns = [
    path("", include("webapp.accounts.urls")),
    path("api/schema", SpectacularJSONAPIView.as_view(), name="api-schema"),
    path("api/", include("webapp.searches.api_urls")),
    path("admin/", admin.site.urls),
    path("", include("webapp.searches.urls")),
]
