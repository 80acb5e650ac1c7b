"""The demo search: which one `manage.py up --demo` shows, or starts."""

from __future__ import annotations

from django.contrib.auth.models import User

from engine.deployment import DEMO_DRAFTER, DEMO_TARGET, Deployment
from webapp.searches import services
from webapp.searches.models import Bundle, Search

SEED = 0


def demo_search(owner: User, kind: str, *, again: bool = False) -> tuple[Search, bool]:
    """The newest demo search, and whether it was made just now.

    One that has not ended goes on (a paused one is resumed); one that has ended is shown; a new one is started where
    there is none, where the newest failed or was cancelled without a bundle, or where `again` asks for it. Raises
    UserError where the demo cannot run here.
    """
    newest = Search.objects.filter(demo=True, owner=owner).order_by("-pk").first()
    if newest is not None and not newest.is_over:
        if newest.status == Search.Status.PAUSED:
            services.resume(newest.pk, by=owner.get_username())
        return newest, False
    if newest is not None and not again and Bundle.objects.filter(search=newest).exists():
        return newest, False
    if kind == "cpu":
        deployment = Deployment(DEMO_TARGET, DEMO_DRAFTER, platform="cpu", dtype="fp32")
    else:
        deployment = Deployment(DEMO_TARGET, DEMO_DRAFTER, platform="cuda:0", dtype="bf16")
    return services.create_search(owner=owner, deployment=deployment, seed=SEED, demo=True), True
