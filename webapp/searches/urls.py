from django.urls import path

from webapp.searches import views

urlpatterns = [
    path("", views.search_list, name="search-list"),
    path("searches/new", views.search_new, name="search-new"),
    path("searches/<int:pk>", views.search_live, name="search-live"),
    path("searches/<int:pk>/trials/<int:number>", views.search_live, name="search-trial"),
    path("searches/<int:pk>/bundle", views.search_bundle, name="search-bundle"),
    path("searches/<int:pk>/<str:command>", views.search_control, name="search-control"),  # POST pause|resume|cancel
    path("workers", views.worker_list, name="worker-list"),
    path("healthz", views.healthz, name="healthz"),
]
