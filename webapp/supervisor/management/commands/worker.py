"""`manage.py worker --gpus all|cpu|0,1`: this machine joins the others at the same broker and database."""

from __future__ import annotations

import os
import signal
import socket
import threading
from argparse import ArgumentParser
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError
from django.db import DatabaseError

from engine.errors import UserError
from webapp.searches.selectors import check_database, database_away
from webapp.supervisor.broker import answers
from webapp.supervisor.devices import check_host, choose_devices, device_worker
from webapp.supervisor.private import owner_only
from webapp.supervisor.processes import Processes

LOOK_SECONDS = 0.25


class Command(BaseCommand):
    help = "Run this machine's device workers, at the broker of REDIS_URL and the database of DATABASE_URL."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--gpus", default="auto", help="all, cpu, or numbers such as 0,1 (default: what is there)")
        parser.add_argument("--name", default=socket.gethostname(), help="this machine's name among the workers")

    def handle(self, *args: Any, gpus: str, name: str, **options: Any) -> None:
        with owner_only():
            self._work(gpus, name)

    def _work(self, gpus: str, name: str) -> None:
        try:
            devices = choose_devices(gpus)
            host = check_host(name)
            if not answers(settings.REDIS_URL):
                raise UserError(
                    "No broker answers. Set REDIS_URL and DATABASE_URL to those of the machine that runs `manage.py "
                    "up`, or start that here first.",
                )
            check_database()
        except UserError as error:
            raise CommandError(error.sentence, returncode=2) from None
        except DatabaseError as error:
            raise CommandError(database_away(error), returncode=2) from None
        stop = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: stop.set())
        processes = Processes(self.stdout.write)
        logs = settings.DATA_DIR / "logs" / host
        logs.parent.mkdir(mode=0o700, exist_ok=True)
        try:
            for device in devices:
                processes.start(device_worker(device, host, logs, {"SPECPILOT_DATA": os.fspath(settings.DATA_DIR)}))
                self.stdout.write(f"{host}/{device.name} ({device.description}) works. Ctrl-C stops it.")
            while not stop.wait(LOOK_SECONDS):
                processes.look()
        finally:
            processes.stop()
