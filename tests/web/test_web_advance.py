"""The loop: advance, the drain, and what users may ask of a search, on both databases."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
from django.db import IntegrityError, transaction

from engine.errors import UserError
from engine.search import events as ev
from engine.search.state import FoldError
from tests.web import fake_engine
from tests.web.support import in_threads, make_search
from webapp.searches import services
from webapp.searches.advance import advance
from webapp.searches.drain import Drain
from webapp.searches.journal import append_events, locked
from webapp.searches.leases import claim
from webapp.searches.models import Bundle, Event, Job, Search, Trial
from webapp.searches.projection import PROJECTIONS
from webapp.searches.reconcile import reconcile
from webapp.searches.worker import Worker

pytestmark = pytest.mark.usefixtures("database", "no_check", "rings")


def drain(device: str = "cpu", host: str = "one", engine: object = fake_engine) -> int:
    return Drain(Worker(host, device), engine).run()


def types(search: Search) -> list[str]:
    return list(search.events.values_list("type", flat=True))


def keys(search: Search) -> dict[str, str]:
    return dict(search.jobs.values_list("key", "status"))


def test_a_new_search_has_its_first_event_and_one_job(rings: list[str]) -> None:
    search = make_search()
    assert types(search) == ["search_started"]
    assert keys(search) == {"probe": "queued"}
    assert Counter(rings) == {"cpu": 1, f"page:{search.pk}": 1}


def test_advance_is_idempotent(rings: list[str]) -> None:
    search = make_search()
    before = (types(search), keys(search))
    rings.clear()
    for _ in range(3):
        advance(search.pk)
    assert (types(search), keys(search)) == before
    assert rings == []


def test_concurrent_advances_make_each_job_once() -> None:
    search = make_search()
    lease = claim("w", ["cpu"])
    assert lease is not None
    with transaction.atomic():
        locked_search = locked(search.pk)
        lease.end(Job.Status.DONE)
        profile = SimpleNamespace(seen=[])
        fake_engine.perform(
            SimpleNamespace(kind="probe"), PROJECTIONS.state(search.pk), profile, profile.seen.append
        )  # the probe's own event, without the drain's advance
        append_events(locked_search, profile.seen)
    in_threads(4, lambda number: advance(search.pk))
    assert keys(search) == {"probe": "done", "stock:autoregressive": "queued"}


def test_one_drain_carries_a_search_to_its_end() -> None:
    search = make_search()
    assert drain() > 8
    search.refresh_from_db()
    assert (search.status, search.last_seq) == ("finished", search.events.count())
    assert list(search.events.values_list("seq", flat=True)) == list(range(1, search.last_seq + 1))
    assert set(keys(search).values()) == {"done"}
    assert Bundle.objects.get(search=search).size > 0
    state = PROJECTIONS.state(search.pk)
    assert state.finished is not None
    assert state.incumbent is not None
    assert state.incumbent.over_autoregressive is not None
    assert search.speedup == state.incumbent.over_autoregressive.ratio
    assert search.rounds == len(state.rounds)
    assert search.trials == sum(t.judgement is not None for t in state.trials.values())


def test_projections_equal_the_state() -> None:
    search = make_search()
    drain()
    state = PROJECTIONS.state(search.pk)
    rows = {row.number: row for row in Trial.objects.filter(search=search)}
    assert rows.keys() == state.trials.keys()
    for number, trial in state.trials.items():
        row = rows[number]
        assert (row.round, row.kind, row.status, row.worker) == (trial.round, trial.kind, trial.status, trial.worker)
        assert trial.judgement is not None
        assert (row.verdict, row.reason) == (trial.judgement.verdict, trial.judgement.reason)
        assert row.ratio == (trial.judgement.comparison.ratio if trial.judgement.comparison else None)
    assert dict(search.round_set.values_list("number", "improved")) == {r.number: r.improved for r in state.rounds}


def test_same_seed_same_search() -> None:
    first, second = make_search(seed=11), make_search(seed=11)
    drain()

    def story(search: Search) -> list[tuple[str, object]]:
        # Times differ, and with them that the second search had to wait; what was tried and found does not.
        told = Event.objects.filter(search=search).exclude(type="status_changed")
        return [(event.type, event.data.get("changes") or event.data.get("trial")) for event in told]

    assert story(first) == story(second)


def test_events_are_numbered_once() -> None:
    search = make_search()
    with pytest.raises(IntegrityError), transaction.atomic():
        Event.objects.create(search=search, seq=1, time=1.5, type="note", data={"text": "again"})


def test_an_event_that_contradicts_the_log_is_not_stored() -> None:
    search = make_search()
    with pytest.raises(FoldError), transaction.atomic():
        append_events(locked(search.pk), (ev.Note("fine"), ev.RoundStarted(4)))
    assert types(search) == ["search_started"]
    assert PROJECTIONS.state(search.pk).seq == 1


def test_a_pause_lets_the_job_in_flight_end_and_starts_no_other() -> None:
    search = make_search()

    class PausesInTrial:
        open_bench = staticmethod(fake_engine.open_bench)

        @staticmethod
        def perform(action, state, bench, emit):
            if action.key == "trial:0":
                services.pause(search.pk, by="ada")
            fake_engine.perform(action, state, bench, emit)

    drain(engine=PausesInTrial)
    assert Search.objects.get(pk=search.pk).status == "paused"
    assert types(search)[-1] == "trial_judged"
    assert "queued" not in keys(search).values()
    advance(search.pk)
    assert drain() == 0
    services.resume(search.pk, by="ada")
    drain()
    assert Search.objects.get(pk=search.pk).status == "finished"


def test_resume_rings_for_jobs_that_wait(rings: list[str]) -> None:
    search = make_search()
    services.pause(search.pk, by="ada")
    assert claim("w", ["cpu"]) is None
    rings.clear()
    services.resume(search.pk, by="ada")
    assert "cpu" in rings
    assert claim("w", ["cpu"]) is not None


def test_cancel_drops_what_is_queued_and_ends_the_search() -> None:
    search = make_search()
    services.cancel(search.pk, by="ada")
    search.refresh_from_db()
    assert search.status == "finished"
    assert keys(search) == {"probe": "dropped"}
    assert PROJECTIONS.state(search.pk).finished == ev.SearchFinished(
        "cancelled", PROJECTIONS.state(search.pk).finished.sentence
    )
    assert drain() == 0


def test_cancel_takes_the_lease_of_the_job_in_flight() -> None:
    search = make_search()
    stored: list[str] = []

    class CancelledInTrial:
        open_bench = staticmethod(fake_engine.open_bench)

        @staticmethod
        def perform(action, state, bench, emit):
            if action.key == "trial:0":
                services.cancel(search.pk, by="ada")
                stored.extend(types(search))
            fake_engine.perform(action, state, bench, emit)

    drain(engine=CancelledInTrial)
    assert stored[-1] == "search_finished"
    assert types(search) == stored
    assert keys(search)["trial:0"] == "dropped"


@pytest.mark.parametrize("command", ["pause", "resume", "cancel"])
def test_commands_on_an_ended_search_are_refused(command: str) -> None:
    search = make_search()
    services.cancel(search.pk, by="ada")
    with pytest.raises(UserError, match=f"Search {search.pk} is finished, so it cannot be"):
        services.COMMANDS[command](search.pk, by="ada")


def test_an_action_that_fails_is_tried_again_and_then_ends_the_search() -> None:
    search = make_search()
    calls: list[str] = []

    class Broken:
        open_bench = staticmethod(fake_engine.open_bench)

        @staticmethod
        def perform(action, state, bench, emit):
            calls.append(action.key)
            if action.kind == "stock":
                emit(ev.ActionFailed(action.key, "the disk is full"))
            else:
                fake_engine.perform(action, state, bench, emit)

    drain(engine=Broken)
    search.refresh_from_db()
    assert calls == ["probe", "stock:autoregressive", "stock:autoregressive"]
    assert search.status == "failed"
    assert "the disk is full" in PROJECTIONS.view(search.pk)["finished"]["sentence"]


def test_an_action_that_tells_nothing_does_not_run_for_ever() -> None:
    search = make_search()
    calls: list[str] = []

    class Silent:
        open_bench = staticmethod(fake_engine.open_bench)

        @staticmethod
        def perform(action, state, bench, emit):
            calls.append(action.key)

    drain(engine=Silent)
    assert calls == ["probe", "probe"]
    search.refresh_from_db()
    assert search.status == "failed"


def test_waiting_for_a_worker_is_not_charged_to_the_budget() -> None:
    search = make_search()
    Event.objects.filter(search=search).update(time=Event.objects.get(search=search).time - 900)
    PROJECTIONS.clear()
    drain()
    assert PROJECTIONS.view(search.pk)["budget"]["seconds_used"] < 60
    resumed = Event.objects.filter(search=search, type="status_changed")
    assert [event.data["by"] for event in resumed] == ["one/cpu, which went on with it"]


def test_the_reconciler_rings_once_for_what_waits(rings: list[str]) -> None:
    make_search()
    rings.clear()
    assert reconcile() == ["cpu"]
    assert reconcile() == []  # that doorbell still waits
    assert rings == ["cpu"]


def test_the_reconciler_advances_a_search_without_open_jobs(rings: list[str]) -> None:
    search = make_search()
    rings.clear()
    Job.objects.filter(search=search).delete()
    reconcile()
    assert keys(search) == {"probe": "queued"}
    assert "cpu" in rings


def test_a_drain_keeps_one_bench_for_a_search_and_closes_it() -> None:
    make_search()
    benches: list[fake_engine.FakeBench] = []

    class Counted:
        perform = staticmethod(fake_engine.perform)

        @staticmethod
        def open_bench(*args, **more):
            benches.append(fake_engine.open_bench(*args, **more))
            return benches[-1]

    drain(engine=Counted)
    assert [bench.closed for bench in benches] == [1]
    assert benches[0].worker == "one/cpu"


def test_timing_phases_are_announced_when_the_block_is_over(rings: list[str]) -> None:
    search = make_search()
    announced: list[tuple[str, int]] = []

    class Listened:
        open_bench = staticmethod(fake_engine.open_bench)

        @staticmethod
        def perform(action, state, bench, emit):
            def told(body):
                rings.clear()
                emit(body)
                if action.kind == "trial":
                    announced.append((getattr(body, "phase", body.type), rings.count(f"page:{search.pk}")))

            fake_engine.perform(action, state, bench, told)

    drain(engine=Listened)
    assert announced[:6] == [
        ("trial_started", 1),
        ("token forcing", 1),
        ("timing 1/3", 1),
        ("timing 2/3", 0),
        ("timing 3/3", 0),
        ("trial_judged", 1),
    ]
