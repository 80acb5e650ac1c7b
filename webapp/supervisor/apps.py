from django.apps import AppConfig


class SupervisorConfig(AppConfig):
    name = "webapp.supervisor"
    label = "supervisor"
