"""Sign-in: one-time URLs, passwords, API tokens, the secret key."""

from __future__ import annotations

import io
import stat
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.management import call_command
from django.core.management.base import CommandError
from django.test import Client
from django.utils import timezone

from engine.errors import UserError
from tests.web.support import in_threads, make_user
from webapp.accounts import services
from webapp.accounts.models import ApiToken, SignInToken
from webapp.config.secret import secret_key


@pytest.fixture
def user(sqlite: str) -> User:
    return make_user()


def signed_in(client: Client) -> bool:
    return "_auth_user_id" in client.session


def test_a_token_signs_in_once(user: User) -> None:
    token = services.issue_sign_in_token(user)
    first, second = Client(), Client()
    response = first.get(f"/login?token={token}&next=/workers")
    assert response["Location"] == "/workers"
    assert signed_in(first)
    refused = second.get(f"/login?token={token}")
    assert (refused.status_code, refused.context["token_refused"]) == (403, True)
    assert not signed_in(second)


def test_of_many_at_once_one_is_signed_in(database: str) -> None:
    token = services.issue_sign_in_token(make_user())
    users = in_threads(6, lambda number: services.redeem_sign_in_token(token))
    assert sum(user is not None for user in users) == 1


def test_expired_unknown_and_empty_tokens_are_refused(user: User) -> None:
    token = services.issue_sign_in_token(user)
    SignInToken.objects.update(expires=timezone.now() - timedelta(seconds=1))
    for wrong in (token, "unknown", token + "x", "é"):
        client = Client()
        assert client.get("/login", {"token": wrong}).status_code == 403
        assert not signed_in(client)
    assert Client().get("/login?token=").status_code == 200


def test_a_new_token_ends_the_earlier_one(user: User) -> None:
    earlier, later = services.issue_sign_in_token(user), services.issue_sign_in_token(user)
    assert services.redeem_sign_in_token(earlier) is None
    assert services.redeem_sign_in_token(later) == user


def test_an_inactive_user_stays_out(user: User) -> None:
    token = services.issue_sign_in_token(user)
    User.objects.update(is_active=False)
    assert services.redeem_sign_in_token(token) is None


def test_looking_is_not_redeeming(user: User) -> None:
    token = services.issue_sign_in_token(user)
    Client().head(f"/login?token={token}")
    assert services.redeem_sign_in_token(token) == user


def test_a_signed_in_page_does_not_use_the_token_up(user: User) -> None:
    token = services.issue_sign_in_token(user)
    client = Client()
    client.force_login(user)
    assert client.get(f"/login?token={token}").status_code == 302
    assert services.redeem_sign_in_token(token) == user


def test_next_leads_nowhere_else(user: User) -> None:
    token = services.issue_sign_in_token(user)
    assert Client().get(f"/login?token={token}&next=https://evil.example/")["Location"] == "/"


def test_a_sign_in_begins_a_new_session(user: User) -> None:
    client = Client()
    session = client.session
    session["left"] = "by somebody"
    session.save()
    before = session.session_key
    client.get(f"/login?token={services.issue_sign_in_token(user)}")
    assert client.session.session_key != before


def test_no_secret_is_stored(user: User) -> None:
    sign_in, api = services.issue_sign_in_token(user), services.create_api_token(user, "ci")
    stored = [*SignInToken.objects.values_list("digest", flat=True), *ApiToken.objects.values_list("digest", flat=True)]
    assert len(stored) == 2
    for secret in (sign_in, api):
        assert len(secret) >= 43
        assert all(secret not in digest and len(digest) == 64 for digest in stored)


def test_password_and_sign_out(user: User) -> None:
    client = Client()
    assert client.post("/login", {"username": "ada", "password": "wrong"}).status_code == 200
    assert not signed_in(client)
    assert client.post("/login", {"username": "ada", "password": "ada-secret-1"})["Location"] == "/"
    assert signed_in(client)
    assert client.get("/logout").status_code == 405
    assert client.post("/logout")["Location"] == "/login"
    assert not signed_in(client)


def test_the_local_user_is_made_once_and_has_no_password(sqlite: str) -> None:
    assert services.local_user() == services.local_user()
    assert not services.local_user().has_usable_password()
    assert not Client().login(username="local", password="")


def test_the_token_command(user: User) -> None:
    out, err = io.StringIO(), io.StringIO()
    call_command("token", "create", "ci", user="ada", stdout=out, stderr=err)
    assert services.user_of_api_token(out.getvalue().strip()) == user
    listed = io.StringIO()
    call_command("token", "list", user="ada", stdout=listed)
    assert listed.getvalue().startswith("ci\t")
    with pytest.raises(CommandError, match="already has an API token named 'ci'"):
        call_command("token", "create", "ci", user="ada")
    call_command("token", "delete", "ci", user="ada")
    assert services.user_of_api_token(out.getvalue().strip()) is None
    for arguments in (("delete", "ci"), ("create", "")):
        with pytest.raises(CommandError):
            call_command("token", *arguments, user="ada")
    with pytest.raises(CommandError, match="no user named 'bob'"):
        call_command("token", "list", user="bob")


@pytest.mark.parametrize("name", ["", "  ", "x" * 81])
def test_token_names(name: str, user: User) -> None:
    with pytest.raises(UserError):
        services.create_api_token(user, name)


def test_the_secret_key_is_made_once_and_kept_private(tmp_path: Path) -> None:
    start = threading.Barrier(4)
    keys: list[Any] = []

    def ask() -> None:
        start.wait()
        keys.append(secret_key(tmp_path))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(keys)) == 1
    assert len(keys[0]) >= 50
    assert stat.S_IMODE((tmp_path / "secret_key").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["secret_key"]
