"""The REST API: every operation, every kind of mistake, and whose search it is."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from django.test import Client
from django.utils import timezone

from engine.codec import to_json
from engine.deployment import NO_DRAFTER, Deployment, Regime
from engine.plan import Plan
from engine.search.events import Budget
from engine.search.evidence import evidence
from tests.web import fake_engine
from tests.web.support import make_search, make_user
from webapp.accounts.services import create_api_token, delete_api_token
from webapp.searches import presence
from webapp.searches.drain import Drain
from webapp.searches.journal import folder_path
from webapp.searches.models import Job, Search
from webapp.searches.projection import PROJECTIONS
from webapp.searches.worker import Worker

pytestmark = pytest.mark.usefixtures("sqlite", "rings")
NGRAM = {"drafter": NO_DRAFTER}


class Api:
    """A program with an API token."""

    def __init__(self, name: str = "ada") -> None:
        self.user = make_user(name)
        self.client = Client(headers={"authorization": f"Bearer {create_api_token(self.user, 'test')}"})

    def get(self, path: str, status: int = 200) -> Any:
        return self._answer(self.client.get(path), status)

    def post(self, path: str, data: Any = None, status: int = 200) -> Any:
        return self._answer(self.client.post(path, data, content_type="application/json"), status)

    @staticmethod
    def _answer(response: Any, status: int) -> Any:
        assert response.status_code == status, response.content
        if status < 400:
            assert response["Content-Type"] == "application/json"
        else:
            assert response["Content-Type"] == "application/problem+json"
            problem = response.json()
            assert problem.keys() == {"type", "title", "status", "detail", "field"}
            assert problem["status"] == status
        return response.json()


@pytest.fixture
def api() -> Api:
    return Api()


@pytest.mark.usefixtures("no_check")
def test_create_read_list(api: Api) -> None:
    made = api.post("/api/searches", {"deployment": NGRAM, "budget": {"trials": 3}, "seed": 5}, 201)
    search = Search.objects.get(pk=made["id"])
    assert (search.owner, search.seed, search.budget_value) == (api.user, 5, Budget(trials=3))
    assert search.deployment.value == Deployment(drafter=NO_DRAFTER)
    assert made["status"] == made["view"]["status"] == "running"
    assert api.get(made["links"]["self"]) == made
    listed = api.get("/api/searches")
    assert listed["count"] == 1
    assert listed["results"] == [{key: value for key, value in made.items() if key != "view"}]


@pytest.mark.usefixtures("no_check")
def test_the_answer_to_create_says_where_it_is(api: Api) -> None:
    response = api.client.post("/api/searches", {"deployment": NGRAM}, content_type="application/json")
    assert api.get(response["Location"])["id"] == response.json()["id"]


@pytest.mark.usefixtures("no_check")
def test_a_plan_and_a_seed_may_be_left_out_or_given(api: Api) -> None:
    plan = Plan(source="ngram", ngram_max=6)
    given = api.post("/api/searches", {"deployment": NGRAM, "plan": plan.to_json(), "seed": 0}, 201)
    assert Search.objects.get(pk=given["id"]).plan_value == plan
    seeds = {Search.objects.get(pk=api.post("/api/searches", {"deployment": NGRAM}, 201)["id"]).seed for _ in range(3)}
    assert len(seeds) == 3


@pytest.mark.usefixtures("no_check")
def test_equal_deployments_share_a_row(api: Api) -> None:
    first, second = (api.post("/api/searches", {"deployment": NGRAM}, 201)["id"] for _ in range(2))
    assert Search.objects.get(pk=first).deployment == Search.objects.get(pk=second).deployment


@pytest.mark.usefixtures("no_check")
def test_lists_are_filtered_and_paged(api: Api) -> None:
    running, ended = make_search(api.user), make_search(api.user)
    api.post(f"/api/searches/{ended.pk}/cancel")
    assert [s["id"] for s in api.get("/api/searches")["results"]] == [ended.pk, running.pk]
    assert [s["id"] for s in api.get("/api/searches?status=running")["results"]] == [running.pk]
    assert api.get("/api/searches?status=asleep", 400)["field"] == "status"
    assert api.get("/api/searches?platform=cuda:0")["count"] == 0
    api.get("/api/searches?page=7", 404)


@pytest.mark.usefixtures("no_check")
def test_commands(api: Api) -> None:
    pk = make_search(api.user).pk
    assert api.post(f"/api/searches/{pk}/pause")["status"] == "paused"
    assert api.post(f"/api/searches/{pk}/pause")["status"] == "paused"  # twice is once
    assert api.post(f"/api/searches/{pk}/resume")["status"] == "running"
    assert api.post(f"/api/searches/{pk}/cancel")["view"]["finished"]["reason"] == "cancelled"
    problem = api.post(f"/api/searches/{pk}/resume", status=409)
    assert problem["detail"] == f"Search {pk} is finished, so it cannot be resumed."
    types = [event["type"] for event in api.get(f"/api/searches/{pk}/events")["events"]]
    assert types == ["search_started", *["status_changed"] * 3, "search_finished"]
    api._answer(api.client.get(f"/api/searches/{pk}/pause"), 405)


@pytest.mark.usefixtures("no_check")
def test_events_after_a_number(api: Api) -> None:
    search = make_search(api.user)
    Drain(Worker("one", "cpu"), fake_engine).run()
    everything = api.get(f"/api/searches/{search.pk}/events")
    numbers = [event["seq"] for event in everything["events"]]
    assert numbers == list(range(1, everything["last"] + 1))
    rest = api.get(f"/api/searches/{search.pk}/events?after=10")
    assert rest["events"] == everything["events"][10:]
    assert api.get(f"/api/searches/{search.pk}/events?after={everything['last']}") == {
        "events": [],
        "last": everything["last"],
    }
    for wrong in ("-1", "x", "1.5", "99999999999", "٣"):
        api.get(f"/api/searches/{search.pk}/events?after={wrong}", 400)


@pytest.mark.usefixtures("no_check")
def test_the_bundle(api: Api) -> None:
    search = make_search(api.user)
    assert "no bundle yet" in api.get(f"/api/searches/{search.pk}/bundle", 404)["detail"]
    Drain(Worker("one", "cpu"), fake_engine).run()
    response = api.client.get(f"/api/searches/{search.pk}/bundle")
    assert (response.status_code, response["Content-Type"]) == (200, "application/zip")
    view = api.get(f"/api/searches/{search.pk}")["view"]
    assert hashlib.sha256(response.content).hexdigest() == view["bundle"]["sha256"] == response["X-Content-SHA256"]
    assert zipfile.ZipFile(io.BytesIO(response.content)).testzip() is None


@pytest.mark.usefixtures("no_check")
def test_the_evidence_of_a_trial(api: Api) -> None:
    search = make_search(api.user)
    Drain(Worker("one", "cpu"), fake_engine).run()
    page = f"/api/searches/{search.pk}/trials"
    rows = api.get(f"/api/searches/{search.pk}")["view"]["candidates"]
    for row in rows:
        found = api.get(f"{page}/{row['trial']}")
        assert found == to_json(evidence(PROJECTIONS.state(search.pk), row["trial"], str(folder_path(search.pk))))
        assert (found["verdict"], found["reason"]) == (row["verdict"], row["reason"])
        assert found["forcing"]["tokens"] == 480
    timed = api.get(f"{page}/1")["timing"]
    assert len(timed["ratios"]) == len(timed["comparison"]["pairs"]) == fake_engine.PAIRS
    assert "no such trial" in api.get(f"{page}/{len(rows)}", 404)["detail"]
    for path in (f"{page}/-1", f"{page}/x", f"{page}/{10**30}", f"{page}/", page):
        api.get(path, 404)
    schema = api.client.get("/api/schema").json()["paths"]["/api/searches/{id}/trials/{number}"]["get"]
    described = schema["responses"]["200"]["content"]["application/json"]["schema"]["properties"]
    assert described.keys() == found.keys()
    assert "404" in schema["responses"]


@pytest.mark.usefixtures("no_check")
def test_the_evidence_is_its_owners(api: Api) -> None:
    search = make_search(api.user)
    Drain(Worker("one", "cpu"), fake_engine).run()
    path = f"/api/searches/{search.pk}/trials/1"
    api.get(path)
    Api("eve").get(path, 404)
    api._answer(Client().get(path), 401)
    boss = Client()
    boss.force_login(make_user("root", is_staff=True, is_superuser=True))
    api._answer(boss.get(path), 404)


@pytest.mark.usefixtures("no_check")
def test_which_machines_work_is_told_to_staff_only(
    api: Api, embedded_broker: str, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.REDIS_URL = embedded_broker
    mine, other = make_search(api.user), make_search(make_user("eve"))
    workers = [Worker("north.example", "cuda:1", "a GPU"), Worker("north.example", "cpu", "a CPU")]
    with redis.Redis.from_url(embedded_broker, decode_responses=True) as broker:
        for worker in workers:
            presence.announce(broker, worker, 1_700_000_000.0)
        for search, worker in zip((mine, other), workers, strict=True):
            Job.objects.filter(search=search).update(
                status="running", lease_owner=f"{worker.name}#1", lease_expires=timezone.now(), key="stock:secret"
            )
        told = api.get("/api/workers")
        api.user.is_staff = True
        api.user.save()
        whole = api.get("/api/workers")
        for worker in workers:
            presence.retire(broker, worker)
    assert "north" not in json.dumps(told)
    assert [(w["device"], w["status"], w["description"]) for w in told["workers"]] == [
        ("cpu", "working", "a CPU"),
        ("cuda:1", "working", "a GPU"),
    ]
    assert all(
        worker.keys() <= {"device", "kind", "description", "since", "status", "job"} for worker in told["workers"]
    )
    assert [w["job"]["search"] for w in told["workers"]] == [None, mine.pk]
    assert [(w["name"], w["host"]) for w in whole["workers"]] == [
        ("north.example/cpu", "north.example"),
        ("north.example/cuda:1", "north.example"),
    ]
    assert whole["workers"][0]["job"] == {"search": None, "title": "another user's search", "url": "", "key": ""}


# Mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_check")
@pytest.mark.parametrize(
    ("body", "status", "field", "words"),
    [
        ({}, 422, "deployment", "needs a deployment"),
        ([], 400, "", "JSON object"),
        ("{broken", 400, "", "JSON parse error"),
        ({"deployment": 7}, 422, "deployment", "must be a JSON object"),
        ({"deployment": {"targett": "x"}}, 422, "deployment", "targett"),
        ({"deployment": {"dtype": "fp8"}}, 422, "deployment", "dtype"),
        ({"deployment": {"regime": {"batch": "two"}}}, 422, "deployment", "regime.batch"),
        ({"deployment": NGRAM, "budget": {"seconds": 0}}, 422, "seconds", "time budget"),
        ({"deployment": NGRAM, "budget": {"seconds": 1e300}}, 422, "seconds", "time budget"),
        ({"deployment": NGRAM, "budget": {"trials": 0}}, 422, "trials", "1 to 10000 trials"),
        ({"deployment": NGRAM, "budget": []}, 422, "budget", "must be a JSON object"),
        ({"deployment": NGRAM, "seed": -1}, 422, "seed", "seed"),
        ({"deployment": NGRAM, "seed": "1"}, 422, "seed", "whole number"),
        ({"deployment": NGRAM, "seed": True}, 422, "seed", "whole number"),
        ({"deployment": NGRAM, "plan": {"draft_tokens": "many"}}, 422, "plan", "draft_tokens"),
        ({"deployment": NGRAM, "plan": {"warp_speed": 9}}, 422, "plan", "warp_speed"),
        ({"deployment": NGRAM, "sead": 1}, 422, "sead", "Unknown field 'sead'"),
    ],
)
def test_bad_requests(body: Any, status: int, field: str, words: str, api: Api) -> None:
    content = body if isinstance(body, str) else json.dumps(body)
    problem = api._answer(api.client.post("/api/searches", content, content_type="application/json"), status)
    assert problem["field"] == field
    assert words in problem["detail"]
    assert not Search.objects.exists()
    assert not Job.objects.exists()


@pytest.fixture
def broken_prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "fine"}\n{"prompt": \n')
    return str(path)


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        (lambda d, tmp: {**d, "target": str(tmp / "nothing")}, "target", "nothing"),
        (lambda d, tmp: {**d, "target": str(tmp)}, "target", ""),
        (lambda d, tmp: {**d, "drafter": str(tmp / "no-drafter")}, "drafter", "no-drafter"),
        (lambda d, tmp: {**d, "platform": "abacus"}, "platform", "abacus"),
        (lambda d, tmp: {**d, "regime": to_json(Regime(max_new_tokens=10**6))}, "regime", "context"),
        (lambda d, tmp: {**d, "regime": to_json(Regime(temperature=9.5))}, "regime", "temperature"),
        (lambda d, tmp: {**d, "regime": to_json(Regime(batch=4))}, "regime", "batch 4"),
    ],
)
def test_what_is_wrong_with_a_deployment_is_told_before_anything_is_stored(
    change: Callable[..., dict[str, Any]], field: str, words: str, api: Api, tmp_path: Path
) -> None:
    """The engine's own check, in the process that the product asks."""
    deployment = change(to_json(Deployment(drafter=NO_DRAFTER)), tmp_path)
    problem = api.post("/api/searches", {"deployment": deployment}, 422)
    assert problem["field"] == field
    assert words in problem["detail"]
    assert "\n" not in problem["detail"]
    assert not Search.objects.exists()


def test_a_broken_line_of_prompts_is_named_by_its_number(api: Api, broken_prompts: str) -> None:
    deployment = to_json(Deployment(drafter=NO_DRAFTER, regime=Regime(prompts=broken_prompts)))
    problem = api.post("/api/searches", {"deployment": deployment}, 422)
    assert problem["field"] == "prompts"
    assert "line 2" in problem["detail"].lower()


# Who --------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_check")
def test_another_users_search_does_not_exist(api: Api) -> None:
    search = make_search(make_user("eve"))
    for path in ("", "/events", "/bundle"):
        api.get(f"/api/searches/{search.pk}{path}", 404)
    for command in ("pause", "resume", "cancel"):
        api.post(f"/api/searches/{search.pk}/{command}", status=404)
    assert api.get("/api/searches")["count"] == 0
    search.refresh_from_db()
    assert (search.status, search.last_seq) == ("running", 1)


@pytest.mark.parametrize("header", ["Bearer", "Bearer wrong", "Bearer a b", "Bearer é"])
def test_a_wrong_token_is_refused(header: str, api: Api) -> None:
    client = Client(headers={"authorization": header})
    problem = api._answer(client.get("/api/searches"), 401)
    assert problem["detail"] == "This API token is not valid."
    assert client.get("/api/searches")["WWW-Authenticate"].startswith("Bearer")


def test_no_credentials_no_answer(api: Api) -> None:
    api._answer(Client().get("/api/searches"), 401)


def test_a_deleted_token_and_an_inactive_user_are_out(api: Api) -> None:
    api.get("/api/searches")
    api.user.is_active = False
    api.user.save()
    api.get("/api/searches", 401)
    api.user.is_active = True
    api.user.save()
    delete_api_token(api.user, "test")
    api.get("/api/searches", 401)


@pytest.mark.usefixtures("no_check")
def test_a_session_needs_the_csrf_token(api: Api) -> None:
    search = make_search(api.user)
    client = Client(enforce_csrf_checks=True)
    client.force_login(api.user)
    problem = api._answer(client.post(f"/api/searches/{search.pk}/pause"), 403)
    assert "CSRF" in problem["detail"]
    page = client.get("/login?next=/", follow=True)
    token = page.context["csrf_token"]
    answer = client.post(f"/api/searches/{search.pk}/pause", headers={"x-csrftoken": str(token)})
    assert answer.json()["status"] == "paused"


@pytest.mark.usefixtures("no_check")
def test_a_failure_of_ours_is_a_problem_below_api_and_a_page_elsewhere(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = make_search(api.user)

    def broken(*args: Any) -> None:
        raise RuntimeError("a secret of the traceback")

    monkeypatch.setattr("webapp.searches.selectors.searches_of", broken)
    api.client.raise_request_exception = False
    for path in ("/api/searches", f"/api/searches/{search.pk}", f"/api/searches/{search.pk}/trials/0"):
        problem = api.get(path, 500)
        assert "secret" not in json.dumps(problem)
    monkeypatch.setattr("webapp.searches.selectors.check_database", broken)
    page = api.client.get("/healthz")
    assert page.status_code == 500
    assert page["Content-Type"].startswith("text/html")
    assert b"secret" not in page.content


def test_what_fails_before_any_view_is_a_problem_below_api_too(api: Api) -> None:
    stranger = Client(headers={"host": "evil.example:80\\"})
    api._answer(stranger.get("/api/searches"), 400)
    assert stranger.get("/")["Content-Type"].startswith("text/html")
    api.get("/api", 404)
    assert api.client.get("/apiary")["Content-Type"].startswith("text/html")


def test_unknown_paths_are_problems_too(api: Api) -> None:
    api.get("/api/nothing", 404)
    api.post("/api/searches/1/explode", status=404)


def test_the_schema_describes_every_operation(api: Api) -> None:
    schema = api.client.get("/api/schema").json()
    operations = {(path, method) for path, item in schema["paths"].items() for method in item}
    assert operations >= {
        ("/api/searches", "get"),
        ("/api/searches", "post"),
        ("/api/searches/{id}", "get"),
        *((f"/api/searches/{{id}}/{name}", "post") for name in ("pause", "resume", "cancel")),
        *((f"/api/searches/{{id}}/{name}", "get") for name in ("events", "bundle")),
        ("/api/searches/{id}/trials/{number}", "get"),
        ("/api/workers", "get"),
    }
    body = schema["paths"]["/api/searches"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert set(body["properties"]["deployment"]["properties"]) == set(to_json(Deployment()))
    assert set(body["properties"]["plan"]["properties"]) == set(Plan().to_json())
    assert "$defs" not in json.dumps(schema)


@pytest.mark.usefixtures("no_check")
@pytest.mark.parametrize(
    ("budget", "field"),
    [
        ({"trials": True}, "budget"),
        ({"seconds": "60"}, "budget"),
        ({"trials": 10**24}, ""),
        ({"trials": 10_001}, "trials"),
    ],
)
def test_budgets_are_numbers_of_a_sane_size(api: Api, budget: dict[str, Any], field: str) -> None:
    problem = api.post("/api/searches", {"deployment": NGRAM, "budget": budget}, 422)
    assert not field or problem["field"] == field
    assert not Search.objects.exists()


@pytest.mark.parametrize("path", ["/a" * 3000, "/tmp/" + "a" * 900, "/tmp/a\0b", "/tmp/\ud800x"])
@pytest.mark.parametrize("where", ["target", "prompts"])
def test_texts_that_can_be_no_path_are_refused(api: Api, path: str, where: str) -> None:
    deployment: dict[str, Any] = dict(NGRAM)
    if where == "target":
        deployment["target"] = path
    else:
        deployment["regime"] = {"prompts": path}
    api.post("/api/searches", json.dumps({"deployment": deployment}), 422)
    assert not Search.objects.exists()


def test_deep_and_large_bodies_are_problems_too(api: Api) -> None:
    api.post("/api/searches", "[" * 200_000, 400)
    api.post("/api/searches", json.dumps({"deployment": {"target": "a" * 11_000_000}}), 413)


def test_a_check_that_hangs_is_told_in_a_sentence(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(command: Any, timeout: float, **options: Any) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr("webapp.searches.services.subprocess.run", hang)
    assert "took over" in api.post("/api/searches", {"deployment": NGRAM}, 422)["detail"]
