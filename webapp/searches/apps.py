from django.apps import AppConfig


class SearchesConfig(AppConfig):
    name = "webapp.searches"
    label = "searches"
