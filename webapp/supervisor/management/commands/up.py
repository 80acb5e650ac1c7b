"""`manage.py up`: start everything on this machine, and stop it with Ctrl-C."""

from __future__ import annotations

import logging
import socket
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from engine.errors import UserError
from engine.search.console import open_screen
from webapp.supervisor.private import owner_only
from webapp.supervisor.up import Options, Up


class Command(BaseCommand):
    help = "Start broker, web and workers under one supervisor, and print the address that signs you in."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
        parser.add_argument("--port", type=int, default=None, help="default: 8000, or the next free one")
        parser.add_argument("--gpus", default="auto", help="all, cpu, or numbers such as 0,1 (default: what is there)")
        parser.add_argument("--name", default=socket.gethostname(), help="this machine's name among the workers")
        parser.add_argument("--demo", action="store_true", help="search with the shipped model and drafter")
        parser.add_argument("--again", action="store_true", help="with --demo: another search where one has ended")
        parser.add_argument("--exit", action="store_true", help="with --demo: stop when it has ended, status 0 if it "
                            "wrote a bundle")  # fmt: skip

    def handle(self, *args: Any, **options: Any) -> None:
        logging.getLogger("webapp").setLevel(logging.WARNING)
        chosen = {name: options[name] for name in Options.__dataclass_fields__}
        try:
            if options["exit"] and not options["demo"]:
                raise UserError("--exit needs --demo: without it there is no search to wait for.")
            with owner_only():
                status = Up(Options(**chosen), open_screen()).run()
        except UserError as error:
            raise CommandError(error.sentence, returncode=2) from None
        raise SystemExit(status)
