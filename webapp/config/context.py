"""What every template may use beside its own context."""

from __future__ import annotations

from django.http import HttpRequest

from engine import __version__


def about(request: HttpRequest) -> dict[str, str]:
    return {"app_version": __version__}
