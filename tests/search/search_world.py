"""A simulated world for the search core: a pure function from plans to speed and losses, and a tiny shell.

Which lever values are good, bad or lossy is drawn from the world's seed, so that no proposer can know them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.codec import digest
from engine.deployment import Deployment
from engine.errors import UserError
from engine.judge.report import Comparison, Forcing, Judgement, Pair
from engine.levers import LEVERS, LeverContext, change, initial_plan
from engine.plan import Plan
from engine.search.events import (
    ActionFailed,
    Body,
    Budget,
    BundleWritten,
    CandidateProposed,
    Event,
    HardwareProbed,
    IncumbentChanged,
    Profiled,
    ProposalsMade,
    SearchStarted,
    StageGap,
    StatusChanged,
    StockMeasured,
    TrialJudged,
    TrialProgress,
    TrialStarted,
)
from engine.search.policy import Action, decide
from engine.search.propose import propose_round
from engine.search.state import State, fold, fold_all
from engine.stages import STAGE_NAMES

CONTEXT = LeverContext(
    device_kind="cpu",
    dtype="fp32",
    drafter="dflash",
    block_size=8,
    max_context=2048,
    cores=4,
    has_compiler=True,
    packed_gemm=True,
)
AMPLE = Budget(seconds=1e6, trials=14, candidates_per_round=3, min_rounds=3, plateau_rounds=2)
Proposer = Callable[[State, Sequence[str]], Sequence[Body]]


def comparison(ratio: float, sigma: float = 0.01, reference: str = "incumbent") -> Comparison:
    pairs = tuple(Pair(f"p{n}", ratio, 1.0, 48, 48) for n in range(3))
    return Comparison(
        reference=reference,
        pairs=pairs,
        ratio=ratio,
        low=ratio * (1 - sigma),
        high=ratio * (1 + sigma),
        aa_sigma=sigma,
        threshold=max(0.01, 2 * sigma),
        candidate_tok_s=20.0 * ratio,
        reference_tok_s=20.0,
    )


def forcing(errors: int = 0) -> Forcing:
    return Forcing(200, 200 - errors, 0, errors, 1e-3, 2, "simulated", 4, 4)


class World:
    """Stage times fall by planted factors where a lever has its good value, and rise at bad ones."""

    def __init__(self, seed: int, context: LeverContext = CONTEXT, noise: float = 0.01, lossy: int = 3) -> None:
        rng = random.Random(seed)
        self.seed, self.context, self.noise = seed, context, noise
        self.over_stock = 1.3  # the initial plan's speed over stock autoregressive decoding
        self.initial = initial_plan(context)
        self.base = {stage: 0.2 * 75.0 ** rng.random() for stage in (*STAGE_NAMES, "algorithm")}
        # (lever, value) -> log speed of the stages that the lever touches
        self.gain: dict[tuple[str, Any], float] = {}
        tunable = [lever for lever in LEVERS if len(lever.values(context)) > 1]
        good = {lever.name for lever in rng.sample(tunable, 6)}
        self.good: list[tuple[str, Any]] = []
        for lever in tunable:
            start = getattr(self.initial, lever.name)
            others = [value for value in lever.values(context) if value != start]
            peak = rng.choice(others)
            width = 3.0 if isinstance(peak, int) and not isinstance(peak, bool) else 1.0
            for place, value in enumerate(others):
                away = abs(place - others.index(peak)) / width  # numbers beside the peak help a little less
                if lever.name in good and away < 1.0:
                    self.gain[lever.name, value] = rng.uniform(0.4, 1.0) * (1.0 - away)
                else:
                    self.gain[lever.name, value] = rng.choice((-0.25, -0.1, 0.0, 0.0))
            if lever.name in good:
                self.good.append((lever.name, peak))
        self.bad = set(rng.sample(sorted(self.gain.keys() - set(self.good), key=str), lossy))

    def stage_ms(self, plan: Plan) -> dict[str, float]:
        result = dict(self.base)
        for lever in LEVERS:
            if not lever.effective(plan):
                continue
            gain = self.gain.get((lever.name, getattr(plan, lever.name)), 0.0)
            for stage in lever.stages:
                if stage in result:
                    result[stage] *= math.exp(-gain)
        return result

    def ms(self, plan: Plan) -> float:
        return sum(self.stage_ms(plan).values())

    def is_lossy(self, plan: Plan) -> bool:
        return any((lever.name, getattr(plan, lever.name)) in self.bad for lever in LEVERS)

    def speed(self, plan: Plan) -> float:
        """True speed over the initial plan."""
        return self.ms(self.initial) / self.ms(plan)

    def judge(self, trial: int, plan: Plan, incumbent: Plan | None, seconds: float) -> Judgement:
        if self.is_lossy(plan):
            return Judgement("lossy", "3 errors", forcing=forcing(3), seconds=seconds / 2)
        if incumbent is None:
            return Judgement("accepted", "lossless", forcing=forcing(), accept_length=2.0, seconds=seconds)
        luck = random.Random(f"{self.seed}:{trial}:{plan.digest}").gauss(0.0, self.noise)
        compared = comparison(self.ms(incumbent) / self.ms(plan) * math.exp(luck), max(self.noise, 1e-3))
        verdict = "accepted" if compared.low > 1 + compared.threshold else "slower"
        return Judgement(verdict, "timed", forcing=forcing(), comparison=compared, accept_length=2.2, seconds=seconds)

    def profile(self, plan: Plan, round_number: int) -> Profiled:
        gaps = []
        for stage, ms in self.stage_ms(plan).items():
            floor = min(ms, 0.25 * self.base[stage])
            bound = "algorithm" if stage == "algorithm" else "memory"
            gaps.append(StageGap(stage, ms, floor, floor, ms - floor, 1e6, 1e6, bound))
        gaps.sort(key=lambda gap: -gap.gap_ms)
        return Profiled(
            round=round_number,
            plan=plan,
            stages=tuple(gaps),
            accept_histogram=(0, 5, 3, 2),
            accept_length=1.7,
            acceptance_by_position=(0.5, 0.3),
            ms_per_token=self.ms(plan),
            reachable_accept_length=2.5,
        )


def offline(world: World) -> Proposer:
    """The product's own proposer."""
    return lambda state, agents: propose_round(state, world.context, agents)


def at_random(world: World) -> Proposer:
    """Single changes drawn at random: fast, and the reference that the offline proposer must beat."""

    def proposer(state: State, agents: Sequence[str]) -> list[Body]:
        current, plan = state.open_round, state.incumbent.plan
        made = state.of_round(current.number, "candidate")
        known = {t.plan for t in state.trials.values()}
        bodies: list[Body] = []
        for slot, agent in enumerate(agents[len(made) :], start=len(made)):
            rng = random.Random(f"random:{state.seed}:{current.number}:{slot}")
            for _ in range(50):
                lever = rng.choice(LEVERS)
                try:
                    new = change(plan, {lever.name: rng.choice(lever.values(world.context))}, world.context)
                except UserError:  # an illegal draw is drawn again
                    continue
                if new not in known:
                    break
            else:
                continue
            known.add(new)
            changes = new.changes_from(plan)
            bodies.append(
                CandidateProposed(
                    trial=state.next_trial + len(bodies),
                    round=current.number,
                    kind="candidate",
                    agent=agent,
                    plan=new,
                    parent=plan.digest,
                    changes=changes,
                    stage="host",
                    arm="random",
                    rationale="by chance",
                )
            )
        return [*bodies, ProposalsMade(current.number, len(made) + len(bodies))]

    return proposer


@dataclass
class Shell:
    """Runs one action at a time; every event takes simulated time. `fails(key, attempt)` plants failures of ours."""

    world: World
    proposer: Proposer
    budget: Budget = AMPLE
    seed: int = 0
    events: list[Event] = field(default_factory=list)
    trial_seconds: float = 20.0
    fails: Callable[[str, int], bool] = lambda key, attempt: False
    pick: Callable[[list[Action]], Action] = lambda actions: actions[0]
    now: float = 1_700_000_000.0
    state: State | None = None

    def __post_init__(self) -> None:
        if self.events:
            self.state = fold_all(self.events)
            self.now = self.events[-1].time
        else:
            self.emit(SearchStarted(Deployment(), self.budget, self.seed, self.world.initial, "test"))

    def emit(self, body: Body, seconds: float = 0.0) -> None:
        self.now += seconds
        event = Event(len(self.events) + 1, self.now, body)
        self.state = fold(self.state, event)
        self.events.append(event)

    def run(self, until: Callable[[State], bool] = lambda state: False, most: int = 400) -> State:
        """Drive to the end (or to `until`); an AssertionError where it does not end."""
        for _ in range(most):
            if self.state.finished is not None or until(self.state):
                return self.state
            actions = decide(self.state)
            assert actions, "neither going on nor ending"
            self.act(self.pick(actions))
        raise AssertionError(f"no end after {most} actions")

    def act(self, action: Action) -> None:
        attempt = len(self.state.failures.get(action.key, ())) + 1
        if self.fails(action.key, attempt):
            self.emit(ActionFailed(action.key, f"planted failure {attempt}"), 1.0)
            return
        for body, seconds in self.work(action):
            self.emit(body, seconds)

    def work(self, action: Action) -> Iterator[tuple[Body, float]]:
        world, data = self.world, action.data
        match action.kind:
            case "emit":
                yield from ((body, 0.0) for body in action.events)
            case "probe":
                yield HardwareProbed({"device": "simulated"}), 3.0
            case "stock":
                yield StockMeasured(data["name"], f"stock {data['name']}", 10.0, (9.0, 10.0, 11.0), None), 10.0
            case "trial":
                seconds = self.trial_seconds
                yield TrialStarted(data["trial"], "worker", data["attempt"]), 0.0
                yield TrialProgress(data["trial"], "token forcing"), seconds / 2
                yield (
                    TrialJudged(data["trial"], world.judge(data["trial"], data["plan"], data["incumbent"], seconds)),
                    seconds / 2,
                )
            case "profile":
                yield world.profile(data["plan"], data["round"]), 5.0
            case "standing":
                speed = world.speed(data["plan"])
                yield (
                    IncumbentChanged(
                        trial=data["trial"],
                        plan=data["plan"],
                        over_incumbent=data["over_incumbent"],
                        over_autoregressive=comparison(world.over_stock * speed, reference="autoregressive"),
                        over_speculative=comparison(1.6 * speed, reference="speculative"),
                        over_own_autoregressive=comparison(1.1 * speed, reference="own autoregressive"),
                        final=data["final"],
                    ),
                    self.trial_seconds * (1.5 if data["final"] else 0.75),
                )
            case "propose":
                yield from ((body, 0.1) for body in self.proposer(self.state, data["agents"]))
            case "bundle":
                yield BundleWritten("bundle.zip", digest(self.state.incumbent.plan) * 5, 1234), 1.0

    def killed(self, after: int, downtime: float = 3600.0) -> Shell:
        """A new shell that knows only the first `after` events, comes back later and says so."""
        shell = Shell(
            self.world,
            self.proposer,
            events=list(self.events[:after]),
            trial_seconds=self.trial_seconds,
            fails=self.fails,
            pick=self.pick,
        )
        if shell.state.finished is None and shell.state.status != "cancelling":
            shell.emit(StatusChanged("running", "resumed"), downtime)
        return shell


def outcome(state: State) -> dict[str, Any]:
    """What came of a search, without times."""
    return {
        "reason": state.finished.reason,
        "incumbents": [(i.trial, i.plan, i.over_incumbent, i.final) for i in state.incumbents],
        "verdicts": {n: t.judgement.verdict for n, t in state.trials.items() if t.judgement},
        "proposals": [t.proposal for t in state.trials.values()],
        "bundle": state.bundle,
    }
