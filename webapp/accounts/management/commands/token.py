"""`manage.py token create|list|delete`: API tokens."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.contrib.auth.models import User
from django.core.management.base import BaseCommand, CommandError

from engine.errors import UserError
from webapp.accounts import services


class Command(BaseCommand):
    help = "Create, list or delete API tokens (Authorization: Bearer TOKEN)."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("action", choices=["create", "list", "delete"])
        parser.add_argument("name", nargs="?", default="", help="the token's name, such as ci")
        parser.add_argument("--user", default=services.LOCAL_USER, help="whose token (default: the local user)")

    def handle(self, *args: Any, action: str, name: str, user: str, **options: Any) -> None:
        if user == services.LOCAL_USER:
            services.local_user()
        owner = User.objects.filter(username=user).first()
        if owner is None:
            raise CommandError(f"There is no user named {user!r}.", returncode=2)
        try:
            if action == "create":
                self.stdout.write(services.create_api_token(owner, name))
                self.stderr.write("Keep it now: it is not stored and cannot be shown again.")
            elif action == "delete":
                services.delete_api_token(owner, name)
            else:
                for token in owner.api_tokens.order_by("name"):
                    self.stdout.write(f"{token.name}\t{token.created:%Y-%m-%d %H:%M}")
        except UserError as error:
            raise CommandError(error.sentence, returncode=2) from None
