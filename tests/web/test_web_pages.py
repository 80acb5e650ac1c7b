"""Pages as a browser gets them: context, headers, the form, control without scripts, ownership."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client

from engine.errors import UserError
from tests.web import fake_engine
from tests.web.support import make_search, make_user
from webapp.searches import services
from webapp.searches.drain import Drain
from webapp.searches.models import Search
from webapp.searches.presence import KINDS
from webapp.searches.projection import PROJECTIONS
from webapp.searches.worker import Worker

pytestmark = pytest.mark.usefixtures("sqlite", "no_check", "rings", "no_broker")
FORM = {
    "target": "demo:smollm2-135m",
    "drafter": "ngram",
    "platform": "cpu",
    "dtype": "fp32",
    "max_prompt_tokens": "128",
    "max_new_tokens": "32",
    "temperature": "0.7",
    "prompts": "shipped",
    "budget_seconds": "60",
    "budget_trials": "3",
    "seed": "4",
}


@pytest.fixture
def no_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KINDS, "now", lambda: frozenset({"cpu", "control"}))


@pytest.fixture
def user() -> User:
    return make_user()


@pytest.fixture
def client(user: User) -> Client:
    client = Client()
    client.force_login(user)
    return client


def embedded(page: str, name: str) -> Any:
    found = re.search(rf'<script id="{name}" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


@pytest.mark.parametrize(
    "path", ["/", "/searches/new", "/searches/1", "/searches/1/trials/1", "/searches/1/bundle", "/workers"]
)
def test_pages_ask_strangers_to_sign_in(path: str) -> None:
    response = Client().get(path)
    assert response.status_code == 302
    assert response["Location"] == f"/login?next={path}"


def test_the_list(client: Client, user: User) -> None:
    assert client.get("/").status_code == 200
    running, cancelled = make_search(user), make_search(user)
    make_search(make_user("eve"))
    services.cancel(cancelled.pk, by="ada")
    assert [s.pk for s in client.get("/").context["searches"]] == [cancelled.pk, running.pk]
    assert [s.pk for s in client.get("/?status=running").context["searches"]] == [running.pk]
    assert len(client.get("/?status=nonsense").context["searches"]) == 2
    assert client.get("/?page=99").status_code == 200


def test_the_live_page_embeds_view_and_events(client: Client, user: User) -> None:
    search = make_search(user)
    Drain(Worker("one", "cpu"), fake_engine).run()
    page = client.get(f"/searches/{search.pk}")
    text = page.content.decode()
    assert embedded(text, "view") == PROJECTIONS.view(search.pk)
    assert [event["seq"] for event in embedded(text, "events")] == list(
        range(1, Search.objects.get(pk=search.pk).last_seq + 1)
    )
    context = page.context
    assert context["ws_url"] == f"/ws/searches/{search.pk}"
    assert context["api_url"] == f"/api/searches/{search.pk}"
    assert context["worker_online"] is True
    assert client.get(context["bundle_url"])["Content-Type"] == "application/zip"
    assert "no-store" in page["Cache-Control"]


def test_a_trials_own_address_is_the_page_with_its_panel(client: Client, user: User) -> None:
    search = make_search(user)
    Drain(Worker("one", "cpu"), fake_engine).run()
    page = client.get(f"/searches/{search.pk}/trials/1")
    assert (page.status_code, page.context["trial"]) == (200, 1)
    assert 'data-trial="1"' in page.content.decode()
    assert client.get(f"/searches/{search.pk}").context["trial"] is None
    for number in ("99", "-1", "x", str(10**30)):
        assert client.get(f"/searches/{search.pk}/trials/{number}").status_code == 404
    stranger = Client()
    stranger.force_login(make_user("eve", is_staff=True))
    assert stranger.get(f"/searches/{search.pk}/trials/1").status_code == 404


def test_hostile_text_stays_text(client: Client, user: User) -> None:
    search = make_search(user, target="/models/</script><script>alert(1)</script>")
    page = client.get(f"/searches/{search.pk}").content.decode()
    assert "<script>alert" not in page
    assert embedded(page, "view")["deployment"]["target"].endswith("</script>")
    assert "<script>alert" not in client.get("/").content.decode()


@pytest.mark.parametrize("path", ["/", "/searches/new", "/workers", "/login", "/nothing"])
def test_headers_and_no_inline_code(path: str, client: Client) -> None:
    response = (Client() if path == "/login" else client).get(path)
    policy = response["Content-Security-Policy"]
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert response["X-Content-Type-Options"] == "nosniff"
    assert response["Referrer-Policy"] == "same-origin"
    assert response["X-Frame-Options"] == "DENY"
    text = response.content.decode()
    assert not re.search(r"\sstyle=|\son[a-z]+=|<style", text)
    for attributes in re.findall(r"<script([^>]*)>", text):
        assert "src=" in attributes or "application/json" in attributes


def test_the_live_page_has_no_inline_code_either(client: Client, user: User) -> None:
    text = client.get(f"/searches/{make_search(user).pk}").content.decode()
    markup = re.sub(r'<script id="\w+" type="application/json">.*?</script>', "", text, flags=re.DOTALL)
    assert not re.search(r"\sstyle=|\son[a-z]+=|<style", markup)
    assert all("src=" in attributes for attributes in re.findall(r"<script([^>]*)>", markup))


def test_cookies_are_guarded(user: User) -> None:
    client = Client()
    response = client.post("/login", {"username": "ada", "password": "ada-secret-1"})
    session = next(value for name, value in response.cookies.items() if "session" in name)
    assert session["httponly"]
    assert session["samesite"] == "Lax"


# The form ---------------------------------------------------------------------------------------------------------


def test_the_form_launches_a_search(client: Client, user: User) -> None:
    assert client.get("/searches/new").context["platforms_online"] == ["cpu"]
    response = client.post("/searches/new", FORM)
    search = Search.objects.get()
    assert response["Location"] == f"/searches/{search.pk}"
    deployment = search.deployment.value
    assert (deployment.regime.max_new_tokens, deployment.regime.max_prompt_tokens) == (32, 128)
    assert deployment.regime.temperature == 0.7
    assert (search.owner, search.seed, search.budget_value.seconds, search.budget_value.trials) == (user, 4, 60.0, 3)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("target", ""),
        ("platform", "abacus"),
        ("dtype", "fp8"),
        ("max_new_tokens", "0"),
        ("temperature", "-0.1"),
        ("temperature", "2.1"),
        ("temperature", "nan"),
        ("budget_seconds", "nan"),
        ("budget_seconds", "-5"),
        ("seed", "-1"),
        ("seed", "x"),
    ],
)
def test_the_form_refuses_what_makes_no_sense(field: str, value: str, client: Client) -> None:
    response = client.post("/searches/new", {**FORM, field: value})
    assert response.status_code == 422
    assert list(response.context["form"].errors) == [field]
    assert not Search.objects.exists()


@pytest.mark.parametrize(
    ("field", "shown"),
    [("target", "target"), ("prompts", "prompts"), ("regime", "max_new_tokens"), ("plan", "__all__"), ("", "__all__")],
)
def test_the_engines_sentence_is_shown_beside_its_field(
    field: str, shown: str, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(deployment: object, plan: object) -> None:
        raise UserError("The moon is in the way; wait for the sun.", field=field)

    monkeypatch.setattr(services, "check", refuse)
    response = client.post("/searches/new", FORM)
    assert response.status_code == 422
    assert response.context["form"].errors == {shown: ["The moon is in the way; wait for the sun."]}
    assert "The moon is in the way; wait for the sun." in response.content.decode()
    assert 'value="128"' in response.content.decode()  # nothing that was typed is lost
    assert not Search.objects.exists()


def test_a_path_is_kept_as_it_is_seen_from_anywhere(
    client: Client, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    client.post("/searches/new", {**FORM, "target": "model"})
    assert Search.objects.get().deployment.target == str(tmp_path / "model")


# Control without scripts ------------------------------------------------------------------------------------------


def test_plain_forms_pause_resume_and_cancel(client: Client, user: User) -> None:
    search = make_search(user)
    for command, status in (("pause", "paused"), ("resume", "running"), ("cancel", "finished")):
        response = client.post(f"/searches/{search.pk}/{command}")
        assert response["Location"] == f"/searches/{search.pk}"
        assert Search.objects.get(pk=search.pk).status == status
    page = client.post(f"/searches/{search.pk}/pause", follow=True)
    assert "is finished, so it cannot be paused" in page.content.decode()
    assert client.get(f"/searches/{search.pk}/pause").status_code == 405
    assert client.post(f"/searches/{search.pk}/explode").status_code == 404


def test_forms_need_the_csrf_token(user: User) -> None:
    client = Client(enforce_csrf_checks=True)
    client.force_login(user)
    search = make_search(user)
    assert client.post(f"/searches/{search.pk}/cancel").status_code == 403
    assert client.post("/searches/new", FORM).status_code == 403
    assert Search.objects.get().status == "running"


def test_another_users_search_does_not_exist(client: Client) -> None:
    search = make_search(make_user("eve"))
    for path in ("", "/bundle"):
        assert client.get(f"/searches/{search.pk}{path}").status_code == 404
    assert client.post(f"/searches/{search.pk}/cancel").status_code == 404
    assert Search.objects.get(pk=search.pk).status == "running"


# The rest ---------------------------------------------------------------------------------------------------------


def test_workers(
    client: Client, user: User, embedded_broker: str, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import redis

    from webapp.searches import presence

    settings.REDIS_URL = embedded_broker
    with redis.Redis.from_url(embedded_broker, decode_responses=True) as broker:
        presence.announce(broker, Worker("north", "cuda:1", "a GPU"), 1_700_000_000.0)
        presence.announce(broker, Worker("gone", "cpu"), 1_700_000_000.0)
        facts = json.loads(broker.hget(presence.KEY, "gone/cpu"))
        broker.hset(presence.KEY, "gone/cpu", json.dumps({**facts, "seen": facts["seen"] - 60}))
        page = client.get("/workers")
        workers = page.context["workers"]
        assert "north" not in page.content.decode()  # which machine it is, is told to staff
        assert "a GPU" in page.content.decode()
        user.is_staff = True
        user.save()
        assert "north/cuda:1" in client.get("/workers").content.decode()
        presence.retire(broker, Worker("north", "cuda:1"))
        assert client.get("/workers").context["workers"] == []
    assert [(w["device"], w["kind"], w["description"], w["job"]) for w in workers] == [
        ("cuda:1", "cuda", "a GPU", None)
    ]


def test_workers_without_a_broker(client: Client, settings: Any, tmp_path: Path) -> None:
    settings.REDIS_URL = f"unix://{tmp_path}/nobody.sock"
    assert client.get("/workers").context["workers"] == []


def test_health_and_missing_pages(client: Client) -> None:
    assert Client().get("/healthz").json() == {"status": "ok"}
    assert client.get("/nothing").status_code == 404
    assert client.get("/searches/999").status_code == 404
    assert client.get("/searches/x").status_code == 404


def test_static_files_are_served_under_asgi_without_collecting(client: Client) -> None:
    response = client.get("/static/css/app.css")
    assert response.status_code == 200
    assert response["Content-Type"].startswith("text/css")


def test_the_admin_shows_and_changes_nothing(user: User) -> None:
    user.is_staff = user.is_superuser = True
    user.save()
    client = Client()
    client.force_login(user)
    search = make_search(user)
    Drain(Worker("one", "cpu"), fake_engine).run()
    for model in ("search", "deployment", "job", "trial", "event", "round", "bundle"):
        assert client.get(f"/admin/searches/{model}/").status_code == 200
        assert client.get(f"/admin/searches/{model}/add/").status_code == 403
    assert client.post(f"/admin/searches/search/{search.pk}/delete/", {"post": "yes"}).status_code == 403
