"""Two kinds of secret that sign a person or a program in. Neither is stored: only its SHA-256 digest is."""

from __future__ import annotations

from django.conf import settings
from django.db import models


class SignInToken(models.Model):
    """A one-time token, printed by the supervisor as part of a URL.

    Invariant: it signs its user in at most once, and never after `expires`; `used` is set in the same
    conditional UPDATE that grants the sign-in.
    """

    digest = models.CharField(max_length=64, unique=True)
    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="+")
    created = models.DateTimeField(auto_now_add=True)
    expires = models.DateTimeField()
    used = models.DateTimeField(null=True)

    def __str__(self) -> str:
        return f"sign-in token of {self.user}"


class ApiToken(models.Model):
    """A token for `Authorization: Bearer ...`. It is shown once, when it is made, and works until it is deleted."""

    digest = models.CharField(max_length=64, unique=True)
    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="api_tokens")
    name = models.CharField(max_length=80)
    created = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"{self.name} ({self.user})"
