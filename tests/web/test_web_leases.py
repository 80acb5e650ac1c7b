"""Claims, leases and fences, raced by threads and by processes, on both databases."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from datetime import timedelta

import pytest
from django.db import connection, transaction
from django.db.models.functions import Now

from engine.paths import REPOSITORY
from engine.search import events as ev
from tests.web import fake_engine
from tests.web.support import in_threads, make_search, wait_for
from webapp.searches import services
from webapp.searches.drain import Drain, _Emitter
from webapp.searches.interrupts import Interrupted, Interrupts
from webapp.searches.leases import MAX_LOST, Heartbeat, Lease, LeaseLost, claim, expire_dead, machine, new_owner
from webapp.searches.models import Event, Job, Search
from webapp.searches.reconcile import reconcile
from webapp.searches.worker import Worker

pytestmark = pytest.mark.usefixtures("no_check", "rings")


def run_out(job_id: int) -> None:
    Job.objects.filter(pk=job_id).update(lease_expires=Now() - timedelta(seconds=1))


def claimed() -> Lease:
    lease = claim("one", ["cpu"])
    assert lease is not None
    return lease


def test_of_many_threads_one_gets_the_job(database: str) -> None:
    make_search()
    leases = in_threads(6, lambda number: claim(f"w{number}", ["cpu"]))
    won = [lease for lease in leases if lease is not None]
    assert len(won) == 1
    job = Job.objects.get()
    assert (job.status, job.lease_owner, job.attempts) == ("running", won[0].owner, 1)


CLAIMER = """
import sys, django; django.setup()
from webapp.searches.leases import claim, new_owner
print("ready", flush=True); sys.stdin.readline()
while (lease := claim(new_owner("p"), ["cpu"])) is not None: print(lease.search_id, flush=True)
"""


def test_processes_share_the_jobs_without_overlap(database: str) -> None:
    searches = {make_search(seed=n).pk for n in range(12)}
    env = {**os.environ, "DATABASE_URL": database, "DJANGO_SETTINGS_MODULE": "webapp.config.settings"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", CLAIMER],
            cwd=REPOSITORY,
            env=env,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for _ in range(2)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    outputs = []
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes:
        outputs.append(process.communicate(timeout=60)[0])
        assert process.returncode == 0
    got = [int(line) for output in outputs for line in output.split()]
    assert sorted(got) == sorted(searches)


def test_an_expired_lease_is_taken_over_exactly_once(database: str) -> None:
    make_search()
    first = claimed()
    assert claim("two", ["cpu"]) is None
    run_out(first.job_id)
    leases = in_threads(6, lambda number: claim(f"w{number}", ["cpu"]))
    won = [lease for lease in leases if lease is not None]
    assert len(won) == 1
    assert (won[0].attempt, won[0].lost) == (2, 1)


def test_a_zombie_can_write_nothing(database: str) -> None:
    search = make_search()
    zombie = claimed()
    emit = _Emitter(zombie, Interrupts(), settle=False)
    run_out(zombie.job_id)
    heir = claim("two", ["cpu"])
    assert heir is not None
    with pytest.raises(LeaseLost):
        emit(ev.Note("from the grave"))
    with pytest.raises(LeaseLost):
        zombie.extend()
    with pytest.raises(LeaseLost):
        zombie.end(Job.Status.DONE)
    assert not Event.objects.filter(type="note").exists()
    assert Job.objects.get().lease_owner == "two"
    _Emitter(heir, Interrupts(), settle=False)(ev.Note("alive"))
    assert [e.data["text"] for e in Event.objects.filter(search=search, type="note")] == ["alive"]


def test_the_same_owner_with_an_older_attempt_is_fenced_too(database: str) -> None:
    make_search()
    first = claimed()
    run_out(first.job_id)
    assert claimed().attempt == 2  # the same owner name
    with pytest.raises(LeaseLost):
        first.extend()


@pytest.mark.usefixtures("postgres")
def test_the_fence_holds_the_job_until_the_commit() -> None:
    """A takeover that comes while a fenced write is under way waits for it, and then finds a fresh lease."""
    make_search()
    lease = claimed()
    run_out(lease.job_id)
    inside, result = threading.Event(), []

    def take_over() -> None:
        inside.wait()
        try:
            result.append(claim("two", ["cpu"]))
        finally:
            connection.close()

    thread = threading.Thread(target=take_over)
    thread.start()
    with transaction.atomic():
        lease.extend()
        inside.set()
        with connection.cursor() as cursor:  # until the other connection waits for our row
            wait_for(lambda: _waiting(cursor))
    thread.join()
    assert result == [None]


def _waiting(cursor: object) -> bool:
    cursor.execute("SELECT count(*) FROM pg_locks WHERE NOT granted")
    return cursor.fetchone()[0] > 0


def test_an_expired_lease_that_nobody_took_may_still_write(database: str) -> None:
    make_search()
    lease = claimed()
    run_out(lease.job_id)
    lease.extend()
    assert claim("two", ["cpu"]) is None


def test_a_heartbeat_keeps_the_lease_and_notices_its_loss(database: str, settings: object) -> None:
    settings.LEASE_SECONDS = 1.0
    make_search()
    lease = claimed()
    first = Job.objects.get().lease_expires
    lost = threading.Event()
    with Heartbeat(lease, lost.set):
        wait_for(lambda: Job.objects.get().lease_expires > first)
        assert not lost.is_set()
        Job.objects.update(status=Job.Status.DROPPED, lease_owner="", lease_expires=None)
        assert lost.wait(10)


def test_places_and_preference(database: str) -> None:
    older, newer = make_search(), make_search(platform="cuda:0")
    assert claim("w", ["control"]) is None
    lease = claim("w", ["cpu", "cuda"], prefer=newer.pk)
    assert lease is not None
    assert lease.search_id == newer.pk
    assert claim("w", ["cuda"]) is None
    assert claimed().search_id == older.pk


def test_leases_of_dead_processes_run_out_at_once(database: str) -> None:
    make_search()
    done = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    lease = claim(f"w#{machine()}:{int(done.stdout)}:ab12", ["cpu"])
    assert lease is not None
    assert claim("two", ["cpu"]) is None
    assert expire_dead() == 1
    heir = claim("two", ["cpu"])
    assert heir is not None
    assert heir.lost == 1


def test_leases_of_living_or_foreign_processes_are_left_alone(database: str) -> None:
    make_search(), make_search()
    assert claim(new_owner("here"), ["cpu"]) is not None
    assert claim("w#another.machine:1:ab12", ["cpu"]) is not None
    assert expire_dead() == 0


def test_a_job_that_kills_its_workers_fails_and_does_not_go_on_for_ever(database: str) -> None:
    search = make_search()
    for _ in range(MAX_LOST):
        run_out(claimed().job_id)

    class Untouched:
        open_bench = perform = staticmethod(lambda *_, **__: pytest.fail("the action must not run again"))

    drain = Drain(Worker("one", "cpu"), Untouched)
    drain._carry_out(drain._next())
    failed = Event.objects.get(search=search, type="action_failed")
    assert failed.data["key"] == "probe"
    assert "lost 3 times" in failed.data["reason"]
    assert Job.objects.get(key="probe").lost == 0  # queued again: a second time ends the search


def test_a_lost_worker_leaves_its_trial_to_another(database: str, rings: list[str]) -> None:
    """The trial runs again from its start, under the next attempt, and the search ends as any other."""
    search = make_search()

    class Dies(BaseException):
        pass

    class Deadly:
        open_bench = staticmethod(fake_engine.open_bench)

        @staticmethod
        def perform(action, state, bench, emit):
            if action.key == "trial:1":
                emit(ev.TrialStarted(1, bench.worker, action.data["attempt"]))
                raise Dies
            fake_engine.perform(action, state, bench, emit)

    with pytest.raises(Dies):
        Drain(Worker("one", "cpu"), Deadly).run()
    run_out(Job.objects.get(key="trial:1").pk)
    rings.clear()
    assert reconcile() == ["cpu"]
    Drain(Worker("two", "cpu"), fake_engine).run()
    assert Search.objects.get(pk=search.pk).status == "finished"
    starts = Event.objects.filter(search=search, type="trial_started", data__trial=1)
    assert [(e.data["worker"], e.data["attempt"]) for e in starts] == [("one/cpu", 1), ("two/cpu", 2)]
    assert Event.objects.filter(search=search, type="trial_judged", data__trial=1).count() == 1


def test_a_cancelled_trial_is_interrupted_in_the_middle(database: str, settings: object) -> None:
    """The drain runs in the main thread: the heartbeat notices the loss and its signal ends the action."""
    settings.LEASE_SECONDS = 0.5
    search = make_search()
    reached: list[str] = []

    class Endless:
        open_bench = staticmethod(fake_engine.open_bench)

        @staticmethod
        def perform(action, state, bench, emit):
            if action.key != "stock:autoregressive":
                return fake_engine.perform(action, state, bench, emit)
            reached.append("stock")
            thread = threading.Thread(target=_cancel, args=(search.pk,))
            thread.start()
            thread.join()
            threading.Event().wait(60)
            reached.append("the end")
            return None

    Drain(Worker("one", "cpu"), Endless).run()
    assert reached == ["stock"]
    assert Search.objects.get(pk=search.pk).status == "finished"


def _cancel(search_id: int) -> None:
    services.cancel(search_id, by="ada")
    connection.close()


def test_interrupts_wait_for_a_shielded_block() -> None:
    interrupts = Interrupts()
    order: list[str] = []

    def work() -> None:
        with interrupts.installed(), interrupts.armed():
            with interrupts.shielded():
                interrupts.lost()
                order.append("stored")
            order.append("not reached")

    with pytest.raises(Interrupted):
        work()
    assert order == ["stored"]
    with interrupts.armed():  # the loss of an earlier lease is forgotten
        order.append("next")
    assert order == ["stored", "next"]
