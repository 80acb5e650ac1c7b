"""API errors as problem details (RFC 9457): {"type", "title", "status", "detail", "field"}."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from django.core.exceptions import PermissionDenied, RequestDataTooBig
from django.http import Http404
from rest_framework import exceptions
from rest_framework.response import Response
from rest_framework.views import set_rollback

from engine.errors import UserError

CONTENT_TYPE = "application/problem+json"


def problem(
    status: int, detail: str, *, code: str = "", field: str = "", headers: dict[str, str] | None = None
) -> Response:
    """One problem, as REST framework's response."""
    body = problem_body(status, detail, code=code, field=field)
    return Response(body, status=status, headers=headers, content_type=CONTENT_TYPE)


def problem_body(status: int, detail: str, *, code: str = "", field: str = "") -> dict[str, Any]:
    """`type` is "about:blank", or "urn:specpilot:CODE" where the mistake has a name of its own."""
    return {
        "type": f"urn:specpilot:{code}" if code else "about:blank",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": detail,
        "field": field,
    }


def exception_handler(error: Exception, context: dict[str, Any]) -> Response | None:
    """REST framework's hook: None lets the error become a 500 (`webapp.config.errors`), logged with its traceback."""
    if isinstance(error, UserError):
        set_rollback()
        status = 409 if error.code == "conflict" else 422
        return problem(status, error.sentence, code=error.code, field=error.field)
    if isinstance(error, RecursionError):
        return problem(400, "The JSON is nested too deeply.")
    if isinstance(error, RequestDataTooBig):
        return problem(413, "The request is too large.")
    if isinstance(error, Http404):
        error = exceptions.NotFound(*error.args)
    elif isinstance(error, PermissionDenied):
        error = exceptions.PermissionDenied(*error.args)
    if not isinstance(error, exceptions.APIException):
        return None
    set_rollback()
    headers = {}
    if getattr(error, "auth_header", None):
        headers["WWW-Authenticate"] = error.auth_header
    if getattr(error, "wait", None):
        headers["Retry-After"] = str(int(error.wait))
    field, detail = _first(error.detail)
    return problem(error.status_code, detail, field=field, headers=headers)


def _first(detail: Any) -> tuple[str, str]:
    """The field and the sentence of the first complaint in REST framework's nested details."""
    field = ""
    while isinstance(detail, dict | list):
        if isinstance(detail, list):
            detail = detail[0] if detail else "The request is not valid."
        else:
            key, detail = next(iter(detail.items()))
            field = "" if key == "non_field_errors" else str(key)
    return field, str(detail)
