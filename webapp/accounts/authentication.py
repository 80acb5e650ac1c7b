"""API tokens for Django REST framework: `Authorization: Bearer TOKEN`."""

from __future__ import annotations

from django.contrib.auth.models import User
from drf_spectacular.extensions import OpenApiAuthenticationExtension
from rest_framework.authentication import BaseAuthentication, get_authorization_header
from rest_framework.exceptions import AuthenticationFailed
from rest_framework.request import Request

from webapp.accounts.services import user_of_api_token


class TokenAuthentication(BaseAuthentication):
    """Signs a program in by an API token; a request without one is left to the next method."""

    keyword = b"bearer"

    def authenticate(self, request: Request) -> tuple[User, None] | None:
        words = get_authorization_header(request).split()
        if not words or words[0].lower() != self.keyword:
            return None
        user = user_of_api_token(words[1].decode("latin1")) if len(words) == 2 else None
        if user is None:
            raise AuthenticationFailed("This API token is not valid.")
        return user, None

    def authenticate_header(self, request: Request) -> str:
        return 'Bearer realm="SpecPilot"'


class TokenScheme(OpenApiAuthenticationExtension):
    """How the OpenAPI schema names it."""

    target_class = TokenAuthentication
    name = "apiToken"

    def get_security_definition(self, auto_schema: object) -> dict[str, str]:
        return {"type": "http", "scheme": "bearer"}
