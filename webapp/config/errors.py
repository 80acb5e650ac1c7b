"""Errors that no view has answered: a problem below /api/, and everywhere else the page of that status."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.views import defaults

from webapp.searches.problems import CONTENT_TYPE, problem_body

WORDS = {
    400: "The request is not valid.",
    403: "This is not allowed.",
    404: "There is no such resource.",
    500: "The server failed on this request. Its log says why; nothing that was already measured is lost.",
}


def bad_request(request: HttpRequest, exception: Exception) -> HttpResponse:
    return _problem(request, 400) or defaults.bad_request(request, exception)


def permission_denied(request: HttpRequest, exception: Exception) -> HttpResponse:
    return _problem(request, 403) or defaults.permission_denied(request, exception)


def page_not_found(request: HttpRequest, exception: Exception) -> HttpResponse:
    return _problem(request, 404) or defaults.page_not_found(request, exception)


def server_error(request: HttpRequest, *args: Any) -> HttpResponse:
    return _problem(request, 500) or defaults.server_error(request)


def _problem(request: HttpRequest, status: int) -> HttpResponse | None:
    """The problem for a program; None for a browser. It says nothing of the exception, which may hold anything."""
    if request.path != "/api" and not request.path.startswith("/api/"):
        return None
    return JsonResponse(problem_body(status, WORDS[status]), status=status, content_type=CONTENT_TYPE)
