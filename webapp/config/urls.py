from django.contrib import admin
from django.urls import include, path
from drf_spectacular.views import SpectacularJSONAPIView

handler400 = "webapp.config.errors.bad_request"
handler403 = "webapp.config.errors.permission_denied"
handler404 = "webapp.config.errors.page_not_found"
handler500 = "webapp.config.errors.server_error"
urlpatterns = [
    path("", include("webapp.accounts.urls")),
    path("api/schema", SpectacularJSONAPIView.as_view(), name="api-schema"),
    path("api/", include("webapp.searches.api_urls")),
    path("admin/", admin.site.urls),
    path("", include("webapp.searches.urls")),
]
