from django.urls import path

from webapp.searches import api

urlpatterns = [
    path("searches", api.SearchList.as_view(), name="api-searches"),
    path("searches/<int:pk>", api.SearchDetail.as_view(), name="api-search"),
    path("searches/<int:pk>/events", api.SearchEvents.as_view(), name="api-search-events"),
    path("searches/<int:pk>/bundle", api.SearchBundle.as_view(), name="api-search-bundle"),
    path("searches/<int:pk>/trials/<int:number>", api.TrialDetail.as_view(), name="api-search-trial"),
    path("searches/<int:pk>/pause", api.SearchCommand.as_view(command="pause"), name="api-search-pause"),
    path("searches/<int:pk>/resume", api.SearchCommand.as_view(command="resume"), name="api-search-resume"),
    path("searches/<int:pk>/cancel", api.SearchCommand.as_view(command="cancel"), name="api-search-cancel"),
    path("workers", api.WorkerList.as_view(), name="api-workers"),
    path("<path:rest>", api.NotThere.as_view()),
]
