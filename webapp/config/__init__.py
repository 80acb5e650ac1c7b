"""Settings, URLs, ASGI and Celery entry points."""

from webapp.config.celery import app as celery_app

__all__ = ["celery_app"]
