"""Everything at once: broker, web, workers and reconciler under one supervisor, from start to stop."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from django.conf import settings
from django.core.management import call_command
from django.db import DEFAULT_DB_ALIAS, DatabaseError, connection, connections
from django.db.migrations.executor import MigrationExecutor

from engine.errors import UserError
from engine.search.console import Screen
from webapp.accounts.services import issue_sign_in_token, local_user
from webapp.searches import reconcile
from webapp.searches.leases import expire_dead
from webapp.searches.selectors import database_away
from webapp.supervisor.broker import answers, broker_spec, end_predecessor, wait_until_ready
from webapp.supervisor.demo import demo_search
from webapp.supervisor.devices import check_host, choose_devices, control_worker, device_worker
from webapp.supervisor.lock import InstanceLock
from webapp.supervisor.processes import Processes
from webapp.supervisor.watch import Watch
from webapp.supervisor.web import base_url, host_names, open_port, web_answers, web_spec

log = logging.getLogger(__name__)
LOOK_SECONDS = 0.25
WATCH_SECONDS = 1.0
WEB_READY_SECONDS = 60.0


@dataclass(frozen=True)
class Options:
    """What `manage.py up` was asked for."""

    host: str = "127.0.0.1"
    port: int | None = None
    gpus: str = "auto"
    name: str = "local"
    demo: bool = False
    again: bool = False
    exit: bool = False


class Up:
    """One run of the supervisor. `run` returns its exit status; it raises UserError where it cannot start."""

    def __init__(self, options: Options, screen: Screen) -> None:
        self.options = options
        self.screen = screen
        self.data: Path = settings.DATA_DIR
        self.logs = self.data / "logs"
        self.signals = 0
        self._wake = threading.Event()

    def run(self) -> int:
        lock = InstanceLock(self.data)
        try:
            with self._signals(), self.screen:
                return self._run(lock)
        finally:
            lock.release()

    def _run(self, lock: InstanceLock) -> int:
        options = self.options
        host, devices = check_host(options.name), choose_devices(options.gpus)
        listening = open_port(options.host, options.port)
        self.logs.mkdir(mode=0o700, exist_ok=True)
        processes = Processes(self.screen.say)
        stop_reconciler = threading.Event()
        reconciler = threading.Thread(target=reconcile.run, args=(stop_reconciler,), name="reconciler", daemon=True)
        env = {"SPECPILOT_DATA": os.fspath(self.data)}
        try:
            self._start_broker(processes)
            self._migrate()
            expire_dead()
            hosts = ",".join([*host_names(options.host), os.environ.get("SPECPILOT_ALLOWED_HOSTS", "")]).strip(",")
            processes.start(web_spec(listening, self.logs, {**env, "SPECPILOT_ALLOWED_HOSTS": hosts}))
            for device in devices:
                processes.start(device_worker(device, host, self.logs, env))
            processes.start(control_worker(host, self.logs, env))
            reconciler.start()
            url = base_url(listening)
            watch = self._demo(devices[0].name.partition(":")[0]) if options.demo else None
            self._until(lambda: web_answers(listening), processes, WEB_READY_SECONDS)
            lock.tell({"pid": os.getpid(), "url": url})
            self._greet(url, watch)
            return self._serve(processes, watch)
        finally:
            if processes:
                self.screen.say("Stopping.")
            self._wake.clear()
            stop_reconciler.set()
            before = self.signals
            processes.stop(hurry=lambda: self.signals > before)
            if reconciler.is_alive():
                reconciler.join(10)
            listening.close()

    def _start_broker(self, processes: Processes) -> None:
        if os.environ.get("REDIS_URL"):
            if not answers(settings.REDIS_URL):
                raise UserError("No broker answers at REDIS_URL; start it, or unset REDIS_URL for the embedded one.")
            return
        end_predecessor(self.data)
        wait_until_ready(self.data, processes.start(broker_spec(self.data, self.logs)))

    def _migrate(self) -> None:
        try:
            executor = MigrationExecutor(connections[DEFAULT_DB_ALIAS])
            if executor.migration_plan(executor.loader.graph.leaf_nodes()):
                self.screen.say("Preparing the database.")
                call_command("migrate", interactive=False, verbosity=0)
        except DatabaseError as error:
            raise UserError(database_away(error), code="no-database") from None

    def _demo(self, kind: str) -> Watch:
        search, new = demo_search(local_user(), kind, again=self.options.again)
        if search.is_over:
            self.screen.say(f"The demo search has ended before (search {search.pk}); --again starts another.")
            return Watch(search.pk, self.screen, after=max(0, search.last_seq - 3))
        if not new:
            self.screen.say(f"The demo search goes on (search {search.pk}).")
        return Watch(search.pk, self.screen, after=0 if new else search.last_seq)

    def _greet(self, url: str, watch: Watch | None) -> None:
        token = issue_sign_in_token(local_user())
        page = f"&next=/searches/{watch.search_id}" if watch else ""
        self.screen.say(f"SpecPilot is at {url}/login?token={token}{page}")
        self.screen.say("The address signs you in once; the next start prints a new one. Ctrl-C stops everything.")

    def _serve(self, processes: Processes, watch: Watch | None) -> int:
        """Until a signal, or until the watched search ends where that was asked for."""
        watched = 0.0
        ended = False
        while not self.signals:
            processes.look()
            if watch is not None and not ended and time.monotonic() - watched >= WATCH_SECONDS:
                watched = time.monotonic()
                ended = self._look(watch)
                if ended and self.options.exit:
                    return 0 if watch.has_bundle() else 1
            self._wake.wait(LOOK_SECONDS)
        return 1 if self.options.exit else 0

    def _look(self, watch: Watch) -> bool:
        try:
            return watch.look()
        except DatabaseError as error:  # it may come back; the search is not ours to end
            log.warning("The database does not answer: %s", error)
            connection.close()
            return False

    def _until(self, ready: Callable[[], bool], processes: Processes, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not ready():
            if self.signals:
                return
            if time.monotonic() > deadline:
                raise UserError(f"The web did not start within {seconds:.0f} s; its log is {self.logs / 'web.log'}.")
            processes.look()
            self._wake.wait(LOOK_SECONDS)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        def note(*_: object) -> None:
            self.signals += 1
            self._wake.set()

        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, note) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
