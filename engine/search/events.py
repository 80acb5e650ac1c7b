"""Everything that happens in a search, as typed, numbered, append-only events.

An event on disk or on the wire is `{"seq": 1, "time": 1700000000.0, "type": "trial_judged", "data": {...}}`;
`seq` counts from 1 without gaps within one search. State is a fold over events (`state.py`).
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

from engine.codec import STRICT, from_json, to_json
from engine.deployment import Deployment
from engine.errors import UserError
from engine.judge.report import Comparison, Judgement
from engine.plan import Plan

StopReason = Literal["budget", "plateau", "gaps closed", "cancelled", "failed"]
TrialKind = Literal["baseline", "candidate", "confirm", "merge"]


@dataclass(frozen=True)
class Budget:
    """When a search must stop: wall seconds spent running, judged trials, rounds without a new incumbent."""

    __pydantic_config__ = STRICT

    seconds: float = 560.0
    trials: int = 14
    candidates_per_round: int = 3
    min_rounds: int = 3
    plateau_rounds: int = 2
    gap_threshold: float = 0.02  # stop when every gap is under this share of the time per token


class _Body:
    __pydantic_config__ = STRICT
    type: ClassVar[str]


@dataclass(frozen=True)
class SearchStarted(_Body):
    type: ClassVar[str] = "search_started"
    deployment: Deployment
    budget: Budget
    seed: int
    initial_plan: Plan
    version: str


@dataclass(frozen=True)
class HardwareProbed(_Body):
    type: ClassVar[str] = "hardware_probed"
    profile: dict[str, Any]  # engine.hardware.HardwareProfile as JSON


@dataclass(frozen=True)
class StockMeasured(_Body):
    """An untouched baseline, solo. `name` is "autoregressive" or "speculative"."""

    type: ClassVar[str] = "stock_measured"
    name: str
    implementation: str  # "transformers 5.24 generate, eager", "dflash 0.1.0"
    tok_s: float
    samples_tok_s: tuple[float, ...]
    accept_length: float | None = None


@dataclass(frozen=True)
class StageGap:
    """One row of the gap list. Milliseconds per emitted token; `measured` >= `own_floor` >= `reachable_floor`."""

    __pydantic_config__ = STRICT

    stage: str
    measured_ms: float
    own_floor_ms: float
    reachable_floor_ms: float
    gap_ms: float  # measured - reachable floor
    bytes_per_step: float
    flops_per_step: float
    bound: Literal["memory", "compute", "none", "algorithm"]


@dataclass(frozen=True)
class Profiled(_Body):
    """The incumbent's stages, sorted by gap, largest first. Stage "algorithm" is draft quality on the same scale."""

    type: ClassVar[str] = "profiled"
    round: int
    plan: Plan
    stages: tuple[StageGap, ...]
    accept_histogram: tuple[int, ...]  # index n: steps that emitted n tokens (index 0 unused)
    accept_length: float
    acceptance_by_position: tuple[float, ...]
    ms_per_token: float
    oracle_ms_per_token: float | None = None  # replay oracle on the same engine
    reachable_accept_length: float | None = None
    prefill_ms: float = 0.0


@dataclass(frozen=True)
class RoundStarted(_Body):
    type: ClassVar[str] = "round_started"
    round: int


@dataclass(frozen=True)
class CandidateProposed(_Body):
    """`changes` against the incumbent's plan; `predicted` is the expected ratio over it."""

    type: ClassVar[str] = "candidate_proposed"
    trial: int
    round: int
    kind: TrialKind
    agent: str
    plan: Plan
    parent: str  # digest of the plan that it changes
    changes: dict[str, Any]
    stage: str
    arm: str  # which proposer arm: "bandit:family", "random", "merge", ...
    rationale: str
    predicted: float | None = None
    sources: tuple[int, ...] = ()  # trials that a confirm or merge builds on


@dataclass(frozen=True)
class ProposalsMade(_Body):
    """The round's proposals are complete: `count` of them, fewer than asked for where no untried plan is left."""

    type: ClassVar[str] = "proposals_made"
    round: int
    count: int


@dataclass(frozen=True)
class TrialStarted(_Body):
    type: ClassVar[str] = "trial_started"
    trial: int
    worker: str
    attempt: int


@dataclass(frozen=True)
class TrialProgress(_Body):
    type: ClassVar[str] = "trial_progress"
    trial: int
    phase: str  # "start-up", "token forcing", "timing 3/6", ...


@dataclass(frozen=True)
class TrialJudged(_Body):
    type: ClassVar[str] = "trial_judged"
    trial: int
    judgement: Judgement


@dataclass(frozen=True)
class IncumbentChanged(_Body):
    """A new best plan, with its speedup over stock measured side by side."""

    type: ClassVar[str] = "incumbent_changed"
    trial: int
    plan: Plan
    over_incumbent: float
    over_autoregressive: Comparison | None = None
    over_speculative: Comparison | None = None
    over_own_autoregressive: Comparison | None = None
    final: bool = False  # the closing measurement, on fresh prompts with more pairs


@dataclass(frozen=True)
class RoundEnded(_Body):
    type: ClassVar[str] = "round_ended"
    round: int
    improved: bool


@dataclass(frozen=True)
class StatusChanged(_Body):
    type: ClassVar[str] = "status_changed"
    status: Literal["running", "paused", "cancelling"]
    by: str


@dataclass(frozen=True)
class ActionFailed(_Body):
    """Our own infrastructure failed (not the candidate); the action is tried again a bounded number of times."""

    type: ClassVar[str] = "action_failed"
    key: str
    reason: str


@dataclass(frozen=True)
class Note(_Body):
    type: ClassVar[str] = "note"
    text: str


@dataclass(frozen=True)
class BundleWritten(_Body):
    type: ClassVar[str] = "bundle_written"
    file: str  # file name inside the search's folder
    sha256: str
    bytes: int


@dataclass(frozen=True)
class SearchFinished(_Body):
    type: ClassVar[str] = "search_finished"
    reason: StopReason
    sentence: str


Body = (
    SearchStarted
    | HardwareProbed
    | StockMeasured
    | Profiled
    | RoundStarted
    | CandidateProposed
    | ProposalsMade
    | TrialStarted
    | TrialProgress
    | TrialJudged
    | IncumbentChanged
    | RoundEnded
    | StatusChanged
    | ActionFailed
    | Note
    | BundleWritten
    | SearchFinished
)
BODIES: dict[str, type[Body]] = {cls.type: cls for cls in Body.__args__}
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")


def storable(body: Body) -> Body:
    """The same event in text that every file and database holds: NUL and half surrogates, which a child's words and a
    model's tokens may contain, become U+FFFD."""
    data = asdict(body)
    clean = _clean(data)
    return body if clean == data else from_json(type(body), clean)


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return _UNSTORABLE.sub("\ufffd", value)
    if isinstance(value, list | tuple):
        return type(value)(_clean(item) for item in value)
    if isinstance(value, dict):
        return {_clean(key): _clean(item) for key, item in value.items()}
    return value


@dataclass(frozen=True)
class Event:
    seq: int
    time: float  # seconds since the epoch
    body: Body

    def to_json(self) -> dict[str, Any]:
        return {"seq": self.seq, "time": self.time, "type": self.body.type, "data": to_json(self.body)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Event:
        try:
            kind, seq, when, body = data["type"], int(data["seq"]), float(data["time"]), data["data"]
        except (KeyError, TypeError, ValueError):
            raise UserError("An event must have seq, time, type and data.", code="invalid-event") from None
        if kind not in BODIES:
            raise UserError(f"Unknown event type {kind!r}.", code="invalid-event")
        return cls(seq, when, from_json(BODIES[kind], body, what=f"event {seq} ({kind})"))
