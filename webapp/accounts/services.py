"""Writes of the accounts app: users and tokens."""

from __future__ import annotations

import hashlib
import secrets
from datetime import timedelta

from django.conf import settings
from django.contrib.auth import get_user_model
from django.contrib.auth.models import User
from django.utils import timezone

from engine.errors import UserError
from webapp.accounts.models import ApiToken, SignInToken

LOCAL_USER = "local"


def digest_of(token: str) -> str:
    """What is stored of a token. Tokens carry 256 random bits, so a plain hash cannot be searched backwards."""
    return hashlib.sha256(token.encode()).hexdigest()


def local_user() -> User:
    """The person at this machine, made on first use: an administrator without a password.

    The supervisor's sign-in URL is for this user; `manage.py changepassword local` adds a password.
    """
    user, made = get_user_model().objects.get_or_create(
        username=LOCAL_USER, defaults={"is_staff": True, "is_superuser": True}
    )
    if made:
        user.set_unusable_password()
        user.save(update_fields=["password"])
    return user


def issue_sign_in_token(user: User) -> str:
    """A fresh one-time token. Expired and used ones, and the user's earlier unused ones, are removed."""
    SignInToken.objects.filter(user=user).delete()
    SignInToken.objects.filter(expires__lt=timezone.now()).delete()
    token = secrets.token_urlsafe(32)
    expires = timezone.now() + timedelta(seconds=settings.SIGN_IN_TOKEN_SECONDS)
    SignInToken.objects.create(digest=digest_of(token), user=user, expires=expires)
    return token


def redeem_sign_in_token(token: str) -> User | None:
    """The user whom the token signs in, once; None where it is unknown, used or expired."""
    now = timezone.now()
    found = SignInToken.objects.select_related("user").filter(digest=digest_of(token), user__is_active=True).first()
    if found is None:
        return None
    # Conditions on the token's own columns alone: a join would become a subquery, which PostgreSQL does not look at
    # again when it has waited for another redemption of the same row.
    once = SignInToken.objects.filter(pk=found.pk, used=None, expires__gt=now).update(used=now)
    return found.user if once else None


def create_api_token(user: User, name: str) -> str:
    """A new API token, returned in clear for the only time. Raises UserError where the name is taken or empty."""
    name = name.strip()
    if not name or len(name) > 80:
        raise UserError("Give the API token a name of 1 to 80 characters.", field="name")
    if user.api_tokens.filter(name=name).exists():
        raise UserError(
            f"{user.username} already has an API token named {name!r}; delete it or choose another name.", field="name"
        )
    token = f"sp_{secrets.token_urlsafe(32)}"
    ApiToken.objects.create(digest=digest_of(token), user=user, name=name)
    return token


def delete_api_token(user: User, name: str) -> None:
    """Revoke a token. Raises UserError where there is none of that name."""
    deleted, _ = user.api_tokens.filter(name=name).delete()
    if not deleted:
        raise UserError(f"{user.username} has no API token named {name!r}.", field="name")


def user_of_api_token(token: str) -> User | None:
    """The active user whose API token this is, or None."""
    found = ApiToken.objects.select_related("user").filter(digest=digest_of(token), user__is_active=True).first()
    return found.user if found else None
