"""What the web stores of a search.

The events are the truth; `Search`, `Round`, `Trial` and `Bundle` rows are projections of them, written in the
same transaction as the event that they tell of (`services.append_events`), so that lists, filters and the admin
need not fold events. `Job` rows say which action of the search may run, runs, or ran.
"""

from __future__ import annotations

from django.conf import settings
from django.db import models
from django.db.models import Q
from django.urls import reverse

from engine.codec import from_json
from engine.deployment import Deployment as EngineDeployment
from engine.plan import Plan
from engine.search.events import Budget
from engine.search.events import Event as EngineEvent


class Deployment(models.Model):
    """What is tuned: target, drafter, regime, platform.

    Invariants: `data` is an `engine.deployment.Deployment` as JSON and never changes; `digest` names it, so equal
    deployments share one row; the other columns repeat parts of `data` for filters.
    """

    digest = models.CharField(max_length=12, unique=True)
    data = models.JSONField()
    target = models.CharField(max_length=1024)
    drafter = models.CharField(max_length=1024)
    platform = models.CharField(max_length=32)
    dtype = models.CharField(max_length=8)

    def __str__(self) -> str:
        return f"{self.target} + {self.drafter} on {self.platform}"

    @property
    def value(self) -> EngineDeployment:
        return from_json(EngineDeployment, self.data, what="deployment")


class Search(models.Model):
    """One search and where it stands.

    Invariants: `last_seq` is the number of its newest event and equals the count of its events; whoever changes
    the search or appends an event holds this row's lock. `status`, `speedup`, `rounds`, `trials`, `finished` follow
    from the events. A finished or failed search never changes again.
    """

    class Status(models.TextChoices):
        RUNNING = "running"
        PAUSED = "paused"
        CANCELLING = "cancelling"
        FINISHED = "finished"
        FAILED = "failed"

    owner = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.PROTECT, related_name="searches")
    deployment = models.ForeignKey(Deployment, on_delete=models.PROTECT, related_name="searches")
    title = models.CharField(max_length=200)
    seed = models.BigIntegerField()
    budget = models.JSONField()  # engine.search.events.Budget
    initial_plan = models.JSONField()  # engine.plan.Plan
    where = models.CharField(max_length=16)  # device kind of its device jobs: "cpu" or "cuda"
    demo = models.BooleanField(default=False)  # made by `manage.py up --demo`
    status = models.CharField(max_length=16, choices=Status, default=Status.RUNNING)
    last_seq = models.PositiveIntegerField(default=0)
    speedup = models.FloatField(null=True)  # over stock autoregressive decoding, newest incumbent; None: not proven
    rounds = models.PositiveIntegerField(default=0)
    trials = models.PositiveIntegerField(default=0)  # judged ones
    created = models.DateTimeField(auto_now_add=True)
    finished = models.DateTimeField(null=True)

    class Meta:
        ordering = ("-id",)
        verbose_name_plural = "searches"

    def __str__(self) -> str:
        return f"search {self.pk}: {self.title}"

    def get_absolute_url(self) -> str:
        return reverse("search-live", args=[self.pk])

    @property
    def is_over(self) -> bool:
        return self.status in {self.Status.FINISHED, self.Status.FAILED}

    @property
    def budget_value(self) -> Budget:
        return from_json(Budget, self.budget, what="budget")

    @property
    def plan_value(self) -> Plan:
        return Plan.from_json(self.initial_plan)


class Event(models.Model):
    """One thing that happened. Append-only.

    Invariants: within a search, `seq` counts from 1 without gaps; a row is never changed or deleted.
    """

    search = models.ForeignKey(Search, on_delete=models.CASCADE, related_name="events")
    seq = models.PositiveIntegerField()
    time = models.FloatField()  # seconds since the epoch, the writer's clock
    type = models.CharField(max_length=32)
    data = models.JSONField()

    class Meta:
        ordering = ("search", "seq")
        constraints = (models.UniqueConstraint(fields=["search", "seq"], name="event_once"),)

    def __str__(self) -> str:
        return f"{self.seq} {self.type}"

    def to_json(self) -> dict[str, object]:
        """The event as it goes on the wire and into files."""
        return {"seq": self.seq, "time": self.time, "type": self.type, "data": self.data}

    @property
    def value(self) -> EngineEvent:
        return EngineEvent.from_json(self.to_json())


class Job(models.Model):
    """One action of the search's policy, as work that exactly one worker may do at a time.

    What to do is not stored: the worker folds the events, decides, and finds the action by its key.

    Invariants: one row for each (search, key). RUNNING rows, and only they, have a lease; the lease belongs to
    (`lease_owner`, `attempts`), and every write on behalf of a job names both, so a worker that lost its lease
    can write nothing. `attempts` counts claims, `lost` those of them that ended without a word (a killed worker).
    """

    class Status(models.TextChoices):
        QUEUED = "queued"
        RUNNING = "running"
        DONE = "done"
        FAILED = "failed"  # our infrastructure failed; an ActionFailed event says why
        DROPPED = "dropped"  # the policy no longer wants it

    CONTROL = "control"

    search = models.ForeignKey(Search, on_delete=models.CASCADE, related_name="jobs")
    key = models.CharField(max_length=200)
    kind = models.CharField(max_length=64)
    where = models.CharField(max_length=16)  # "control", or the kind of device that it needs: "cpu", "cuda"
    status = models.CharField(max_length=16, choices=Status, default=Status.QUEUED)
    lease_owner = models.CharField(max_length=200, blank=True, default="")
    lease_expires = models.DateTimeField(null=True)
    attempts = models.PositiveIntegerField(default=0)
    lost = models.PositiveIntegerField(default=0)
    created = models.DateTimeField(auto_now_add=True)
    ended = models.DateTimeField(null=True)

    class Meta:
        ordering = ("id",)
        constraints = (
            models.UniqueConstraint(fields=["search", "key"], name="job_once"),
            models.CheckConstraint(
                condition=Q(status="running", lease_expires__isnull=False) & ~Q(lease_owner="")
                | ~Q(status="running") & Q(lease_expires__isnull=True),
                name="lease_while_running",
            ),
        )
        indexes = (models.Index(fields=["status", "where"], name="job_claim"),)

    def __str__(self) -> str:
        return f"{self.key} ({self.status})"


class Round(models.Model):
    """Projection of round_started and round_ended."""

    search = models.ForeignKey(Search, on_delete=models.CASCADE, related_name="round_set")
    number = models.PositiveIntegerField()
    improved = models.BooleanField(null=True)  # None while it runs

    class Meta:
        ordering = ("search", "number")
        constraints = (models.UniqueConstraint(fields=["search", "number"], name="round_once"),)

    def __str__(self) -> str:
        return f"round {self.number}"


class Trial(models.Model):
    """Projection of candidate_proposed, trial_started, trial_progress and trial_judged."""

    class Status(models.TextChoices):
        PROPOSED = "proposed"
        RUNNING = "running"
        JUDGED = "judged"

    search = models.ForeignKey(Search, on_delete=models.CASCADE, related_name="trial_set")
    number = models.PositiveIntegerField()
    round = models.PositiveIntegerField()
    kind = models.CharField(max_length=16)
    agent = models.CharField(max_length=64)
    arm = models.CharField(max_length=64)
    stage = models.CharField(max_length=32)
    changes = models.JSONField()
    status = models.CharField(max_length=16, choices=Status, default=Status.PROPOSED)
    phase = models.CharField(max_length=64, blank=True, default="")
    worker = models.CharField(max_length=200, blank=True, default="")
    verdict = models.CharField(max_length=16, blank=True, default="")
    reason = models.TextField(blank=True, default="")
    ratio = models.FloatField(null=True)  # over the incumbent of its time
    low = models.FloatField(null=True)
    high = models.FloatField(null=True)
    accept_length = models.FloatField(null=True)
    seconds = models.FloatField(null=True)

    class Meta:
        ordering = ("search", "number")
        constraints = (
            models.UniqueConstraint(fields=["search", "number"], name="trial_once"),
            models.CheckConstraint(
                condition=Q(status="judged") & ~Q(verdict="") | ~Q(status="judged") & Q(verdict=""),
                name="verdict_when_judged",
            ),
        )

    def __str__(self) -> str:
        return f"trial {self.number}"


class Bundle(models.Model):
    """The search's downloadable result.

    It is kept in the database, not on the disk of the machine that wrote it: with several machines that need not
    be the one that serves the download. It holds no weights and is small. Invariant: `sha256` and `size` are those
    of `content` and of the bundle_written event.
    """

    search = models.OneToOneField(Search, on_delete=models.CASCADE, related_name="bundle")
    file = models.CharField(max_length=200)
    sha256 = models.CharField(max_length=64)
    size = models.PositiveBigIntegerField()
    content = models.BinaryField()
    created = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return self.file
