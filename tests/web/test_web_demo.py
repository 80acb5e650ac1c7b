"""Which demo search `up --demo` shows, and what the terminal tells of it."""

from __future__ import annotations

from typing import Any

import pytest

from engine.deployment import DEMO_DRAFTER, DEMO_TARGET
from engine.search.console import LineScreen
from tests.web import fake_engine
from tests.web.support import make_search
from webapp.accounts.services import local_user
from webapp.searches import services
from webapp.searches.drain import Drain
from webapp.searches.models import Search
from webapp.searches.worker import Worker
from webapp.supervisor.demo import demo_search
from webapp.supervisor.watch import Watch

pytestmark = pytest.mark.usefixtures("sqlite", "no_check", "rings")


def test_the_first_start_makes_one() -> None:
    make_search(local_user())  # not a demo
    search, new = demo_search(local_user(), "cpu")
    deployment = search.deployment.value
    assert (new, search.demo, search.where) == (True, True, "cpu")
    assert (deployment.target, deployment.drafter) == (DEMO_TARGET, DEMO_DRAFTER)
    assert (deployment.platform, deployment.dtype) == ("cpu", "fp32")


def test_a_gpu_runs_it_in_bf16() -> None:
    search, _ = demo_search(local_user(), "cuda")
    assert (search.deployment.platform, search.deployment.dtype, search.where) == ("cuda:0", "bf16", "cuda")


def test_one_that_has_not_ended_goes_on() -> None:
    first, _ = demo_search(local_user(), "cpu")
    assert demo_search(local_user(), "cpu", again=True) == (first, False)
    services.pause(first.pk, by="local")
    assert demo_search(local_user(), "cpu") == (first, False)
    assert Search.objects.get(pk=first.pk).status == "running"


def test_one_that_has_ended_is_shown_and_another_made_when_asked() -> None:
    first, _ = demo_search(local_user(), "cpu")
    Drain(Worker("one", "cpu"), fake_engine).run()
    assert demo_search(local_user(), "cpu") == (first, False)
    second, new = demo_search(local_user(), "cpu", again=True)
    assert new
    assert second != first


def test_one_that_ended_with_nothing_is_made_again() -> None:
    first, _ = demo_search(local_user(), "cpu")
    services.cancel(first.pk, by="local")
    second, new = demo_search(local_user(), "cpu")
    assert new
    assert second != first


def test_the_terminal_tells_each_event_once(capsys: Any) -> None:
    search, _ = demo_search(local_user(), "cpu")
    watch = Watch(search.pk, LineScreen())
    assert watch.look() is False
    Drain(Worker("one", "cpu"), fake_engine).run()
    assert watch.look() is True
    told = capsys.readouterr().out.splitlines()
    assert watch.look() is True
    assert capsys.readouterr().out == ""
    assert len(told) == len(set(told))
    assert told[0].startswith("Searching SmolLM2-135M-Instruct")
    assert any("largest gap" in line for line in told)
    assert any(line.startswith("Best so far") for line in told)
    assert any("trial 1" in line for line in told)
    assert watch.has_bundle()
