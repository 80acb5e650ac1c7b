"""Tokens can be seen and revoked here, not made: a token is shown only by the command that makes it."""

from __future__ import annotations

from django.contrib import admin
from django.http import HttpRequest

from webapp.accounts.models import ApiToken


@admin.register(ApiToken)
class ApiTokenAdmin(admin.ModelAdmin):
    list_display = ("name", "user", "created")
    readonly_fields = ("name", "user", "created")
    exclude = ("digest",)

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False
