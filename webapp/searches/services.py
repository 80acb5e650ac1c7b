"""Writes: create, pause, resume and cancel a search. Pages, API and supervisor all come through here."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from django.contrib.auth.models import User
from django.db import transaction

from engine import __version__
from engine.codec import digest, from_json, to_json
from engine.deployment import NO_DRAFTER, SHIPPED_PROMPTS, Deployment
from engine.errors import UserError
from engine.paths import REPOSITORY, user_path
from engine.plan import Plan
from engine.search.events import Budget, SearchStarted, StatusChanged
from engine.search.view import title
from webapp.searches import models
from webapp.searches.advance import advance
from webapp.searches.doorbell import ring_on_commit
from webapp.searches.journal import append_events, locked
from webapp.searches.models import Job, Search

T = TypeVar("T")
MAX_SECONDS = 30 * 24 * 3600.0
MAX_TRIALS = 10_000
CHECK_SECONDS = 120
MAX_SEED = 2**31 - 1


def create_search(
    *,
    owner: User,
    deployment: Deployment,
    budget: Budget | None = None,
    seed: int | None = None,
    plan: Plan | None = None,
    demo: bool = False,
) -> Search:
    """Check everything, then store the search with its first event and first job, in one transaction.

    Raises UserError, one sentence with `field`, before anything is stored. `plan` None starts from the deployment's
    initial plan, `seed` None draws one.
    """
    budget = budget or Budget()
    seed = secrets.randbelow(MAX_SEED) if seed is None else seed
    _check_budget(budget)
    if not 0 <= seed <= MAX_SEED:
        raise UserError(f"The seed must lie between 0 and {MAX_SEED}.", field="seed")
    deployment = _absolute(deployment)
    start = check(deployment, plan)
    with transaction.atomic():
        row, _ = models.Deployment.objects.get_or_create(
            digest=digest(deployment),
            defaults={
                "data": to_json(deployment),
                "target": deployment.target,
                "drafter": deployment.drafter,
                "platform": deployment.platform,
                "dtype": deployment.dtype,
            },
        )
        search = Search.objects.create(
            owner=owner,
            deployment=row,
            title=title(deployment)[:200],
            seed=seed,
            budget=to_json(budget),
            initial_plan=start.to_json(),
            where=deployment.platform.partition(":")[0],
            demo=demo,
        )
        append_events(search, (SearchStarted(deployment, budget, seed, start, __version__),))
        advance(search.pk)
    return search


def pause(search_id: int, *, by: str) -> None:
    """Let the job in flight end and start no further one. Raises UserError where the search does not run."""
    with transaction.atomic():
        search = locked(search_id)
        if search.status == Search.Status.PAUSED:
            return
        _refuse_unless(search, "paused", Search.Status.RUNNING)
        append_events(search, (StatusChanged("paused", by),))


def resume(search_id: int, *, by: str) -> None:
    """Go on after a pause. Raises UserError where the search is not paused."""
    with transaction.atomic():
        search = locked(search_id)
        if search.status == Search.Status.RUNNING:
            return
        _refuse_unless(search, "resumed", Search.Status.PAUSED)
        append_events(search, (StatusChanged("running", by),))
        for where in set(search.jobs.filter(status=Job.Status.QUEUED).order_by().values_list("where", flat=True)):
            ring_on_commit(where)
        advance(search_id)


def cancel(search_id: int, *, by: str) -> None:
    """End the search now: the job in flight is stopped, and a bundle is written where there is a better plan."""
    with transaction.atomic():
        search = locked(search_id)
        if search.status == Search.Status.CANCELLING:
            return
        _refuse_unless(search, "cancelled", Search.Status.RUNNING, Search.Status.PAUSED)
        append_events(search, (StatusChanged("cancelling", by),))
        advance(search_id)


COMMANDS: dict[str, Callable[..., None]] = {"pause": pause, "resume": resume, "cancel": cancel}


def check(deployment: Deployment, plan: Plan | None) -> Plan:
    """Everything that can be wrong with a deployment, told before anything is queued; the plan it starts from.

    In a process of its own: reading a checkpoint may load torch, and asking a GPU leaves a CUDA context behind,
    which would stay in the web's memory for good. Raises UserError.
    """
    question = json.dumps({"deployment": to_json(deployment), "plan": plan.to_json() if plan else None})
    try:
        done = subprocess.run(
            [sys.executable, "-m", "webapp.searches.check"],
            input=question,
            capture_output=True,
            text=True,
            cwd=REPOSITORY,
            check=False,
            timeout=CHECK_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise UserError(
            f"Reading this deployment's files took over {CHECK_SECONDS} s; are target, drafter and prompts on a disk "
            "that answers?",
            code="check-timed-out",
            field="target",
        ) from None
    if done.returncode:
        raise RuntimeError(f"checking a deployment failed: {done.stderr.strip()[-2000:]}")
    answer = json.loads(done.stdout)
    if "error" in answer:
        raise UserError(answer["error"], code=answer["code"], field=answer["field"])
    return Plan.from_json(answer["plan"])


def deployment_of(data: Any) -> Deployment:
    """The deployment of parsed JSON. Raises UserError that names the first bad field."""
    return _parsed(Deployment, data, "deployment")


def budget_of(data: Any) -> Budget:
    """The budget of parsed JSON; fields that are left out have their defaults. Raises UserError."""
    return _parsed(Budget, data, "budget")


def plan_of(data: Any) -> Plan:
    """The plan of parsed JSON. Raises UserError."""
    return _parsed(Plan, data, "plan")


def _absolute(deployment: Deployment) -> Deployment:
    """Paths as they are seen from anywhere: the workers may have another working directory."""
    regime = deployment.regime
    if regime.prompts != SHIPPED_PROMPTS:
        regime = replace(regime, prompts=_absolute_path(regime.prompts))
    drafter = deployment.drafter
    if drafter != NO_DRAFTER:
        drafter = _absolute_path(drafter)
    return replace(deployment, target=_absolute_path(deployment.target), drafter=drafter, regime=regime)


def _absolute_path(reference: str) -> str:
    if reference.startswith("demo:"):
        return reference
    path = user_path(reference, field="")
    return str(path.absolute()) if path.exists() else reference


def _parsed(cls: type[T], data: Any, what: str) -> T:
    if not isinstance(data, dict):
        raise UserError(f"{what} must be a JSON object.", code="invalid-json", field=what)
    try:
        return from_json(cls, data, what=what)
    except UserError as error:
        error.field = error.field or what
        raise


def _check_budget(budget: Budget) -> None:
    if not 1 <= budget.seconds <= MAX_SECONDS:
        raise UserError("The time budget must lie between 1 second and 30 days.", field="seconds")
    if not 1 <= budget.trials <= MAX_TRIALS:
        raise UserError(f"The budget must allow 1 to {MAX_TRIALS} trials.", field="trials")
    if budget.candidates_per_round < 1:
        raise UserError("A round needs at least one candidate.", field="candidates_per_round")
    if budget.min_rounds < 1 or budget.plateau_rounds < 1:
        raise UserError("min_rounds and plateau_rounds must be at least 1.", field="budget")
    if not 0 <= budget.gap_threshold < 1:
        raise UserError("gap_threshold is a share of the time per token: 0 or more, and less than 1.", field="budget")


def _refuse_unless(search: Search, done: str, *statuses: Search.Status) -> None:
    if search.status not in statuses:
        raise UserError(
            f"Search {search.pk} is {search.status}, so it cannot be {done}.", code="conflict", field="status"
        )
