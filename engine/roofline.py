"""Ceilings and gaps: what a profile measured against the least that this device allows.

A stage's floor is its bytes over the measured read bandwidth or its operations over the measured matrix rate,
whichever is longer. There are two (DESIGN 4):

own        of this plan: the rows that it really verifies, padding included, at its accept length
reachable  of the best step that any legal plan could take here: no padding, and the draft shape (this plan's,
           a shorter chain, a tree of another size, or none at all) whose floor per emitted token is least

Gaps are in ms per emitted token. The row "algorithm" puts draft quality on the same scale: the time per token
now, against the time with the best draft shape that the tree oracle found, at the step times measured for that
many rows. It looks at the same time as the stages do, from another side, so it is never added to them: the
stages' gaps alone sum to (time per token - reachable floor).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from engine.codec import STRICT
from engine.config import DraftConfig, ModelConfig
from engine.costs import StageCost, StepShape, padded_rows, stage_costs
from engine.deployment import Dtype
from engine.errors import UserError
from engine.hardware import HardwareProfile
from engine.levers import ALGORITHM
from engine.plan import Plan
from engine.search.events import Profiled, StageGap
from engine.stages import STAGE_NAMES

IMPLAUSIBLE = 4.0
"""A stage that runs this many times faster than the probe allows is a wrong measurement, not a busy probe: on shared
machines bandwidth was seen to change by a factor of two within seconds."""


@dataclass(frozen=True)
class StageProfile:
    """What a child measured of one plan (`engine.profile.measure`). Plain data, JSON by `engine.codec`.

    `stage_seconds` sum over all decode steps, prefill apart; `decode_s` and `ms_per_token` come from a run without
    the stage clock. `acceptance_by_position[i]` is the share of steps whose draft at depth i + 1 was accepted.
    `context_tokens` is the mean length of the KV cache before a step. `tree_oracle` gives, by verify rows (anchor
    included), the tokens per step that a best-first tree of that size would have emitted on the same text;
    `verify_ms` the measured time of one verify pass by rows; `replay_ms_per_token` the time per token of a
    drafter that knows the text, at this plan's draft length.
    """

    __pydantic_config__ = STRICT

    stage_seconds: dict[str, float]
    decode_s: float
    prefill_s: float  # mean of one prompt
    emitted_per_step: tuple[int, ...]
    drafted_per_step: tuple[int, ...]
    acceptance_by_position: tuple[float, ...]
    context_tokens: float
    neural_share: float = 1.0
    tree_oracle: tuple[tuple[int, float], ...] = ()
    verify_ms: tuple[tuple[int, float], ...] = ()
    replay_ms_per_token: float | None = None

    @property
    def steps(self) -> int:
        return len(self.emitted_per_step)

    @property
    def tokens(self) -> int:
        """Tokens emitted by decode steps; the first of each text comes from prefill and is not counted."""
        return sum(self.emitted_per_step)

    @property
    def accept_length(self) -> float:
        """Emitted tokens per verify step, bonus token included."""
        return self.tokens / self.steps

    @property
    def ms_per_token(self) -> float:
        return 1e3 * self.decode_s / self.tokens


@dataclass(frozen=True)
class Rates:
    """What the device does at best: bytes and operations per second, and bytes that its last cache holds."""

    bytes_s: float
    flops_s: float
    cache_bytes: float


@dataclass(frozen=True)
class DraftOption:
    """A draft shape that a plan could have: verify rows with the anchor, tokens per step, and whether it drafts."""

    rows: float
    accept_length: float
    drafts: bool
    label: str


def floor_seconds(cost: StageCost, rates: Rates, step_bytes: float) -> float:
    """Least seconds of one stage in one step.

    What the last-level cache can keep from one step to the next need not move, so the bytes are reduced by the
    share of the whole step's bytes that fits it.
    """
    moving = max(0.0, 1.0 - rates.cache_bytes / step_bytes) if step_bytes > 0 else 0.0
    return max(cost.bytes * moving / rates.bytes_s, cost.flops / rates.flops_s)


def floors(costs: dict[str, StageCost], rates: Rates) -> dict[str, float]:
    """Least seconds of one step, by stage."""
    step_bytes = sum(cost.bytes for cost in costs.values())
    return {name: floor_seconds(cost, rates, step_bytes) for name, cost in costs.items()}


@dataclass(frozen=True)
class Roofline:
    """The gap list of one profile. `gaps` is sorted, largest first, and holds the algorithm row."""

    gaps: tuple[StageGap, ...]
    ms_per_token: float
    own_floor_ms: float  # sums over the stages, the algorithm row left out
    reachable_floor_ms: float
    reachable_accept_length: float
    best_option: str  # the draft shape of the reachable floor, in words


def analyse(
    profile: StageProfile,
    config: ModelConfig,
    drafter: DraftConfig | ModelConfig | None,
    plan: Plan,
    dtype: Dtype,
    hardware: HardwareProfile,
) -> Roofline:
    """Ceilings and gaps of a measured plan.

    Raises UserError where the profile has no decode step, or where a stage beat its floor by so much that the
    probe or the profile must be wrong. A smaller excess raises the rates instead: a rate that a
    stage reached is one that the device can do.
    """
    if profile.steps == 0:
        raise UserError(
            "The profile holds no decode step: every text ended in its first token; use other "
            "prompts or more new tokens.",
            code="empty-profile",
            field="prompts",
        )
    own_costs = _mean_costs(profile, config, drafter, plan, dtype)
    seconds = _stage_seconds_per_step(profile)
    rates = _observed_rates(own_costs, seconds, hardware)
    own = floors(own_costs, rates)
    accept = profile.accept_length
    best, reachable = _reachable(profile, config, drafter, plan, dtype, rates)

    rows = []
    for name in STAGE_NAMES:
        measured_ms = 1e3 * seconds[name] / accept
        own_ms = min(1e3 * own[name] / accept, measured_ms)
        reachable_ms = min(1e3 * reachable[name] / best.accept_length, own_ms)
        cost = own_costs[name]
        rows.append(
            StageGap(
                stage=name,
                measured_ms=measured_ms,
                own_floor_ms=own_ms,
                reachable_floor_ms=reachable_ms,
                gap_ms=measured_ms - reachable_ms,
                bytes_per_step=cost.bytes,
                flops_per_step=cost.flops,
                bound=_bound(cost, rates),
            )
        )
    algorithm, reachable_accept = _algorithm(profile)
    return Roofline(
        gaps=tuple(sorted((*rows, algorithm), key=lambda row: -row.gap_ms)),
        ms_per_token=profile.ms_per_token,
        own_floor_ms=sum(row.own_floor_ms for row in rows),
        reachable_floor_ms=sum(row.reachable_floor_ms for row in rows),
        reachable_accept_length=reachable_accept,
        best_option=best.label,
    )


def gaps(
    profile: StageProfile,
    config: ModelConfig,
    drafter: DraftConfig | ModelConfig | None,
    plan: Plan,
    dtype: Dtype,
    hardware: HardwareProfile,
) -> tuple[StageGap, ...]:
    """The sorted gap list alone; see `analyse`."""
    return analyse(profile, config, drafter, plan, dtype, hardware).gaps


def profiled_event(
    profile: StageProfile,
    config: ModelConfig,
    drafter: DraftConfig | ModelConfig | None,
    plan: Plan,
    dtype: Dtype,
    hardware: HardwareProfile,
    round: int,
) -> Profiled:
    """The event that tells a search of this profile."""
    roofline = analyse(profile, config, drafter, plan, dtype, hardware)
    counts = Counter(profile.emitted_per_step)
    return Profiled(
        round=round,
        plan=plan,
        stages=roofline.gaps,
        accept_histogram=tuple(counts.get(n, 0) for n in range(max(counts) + 1)),
        accept_length=profile.accept_length,
        acceptance_by_position=profile.acceptance_by_position,
        ms_per_token=profile.ms_per_token,
        oracle_ms_per_token=profile.replay_ms_per_token,
        reachable_accept_length=roofline.reachable_accept_length,
        prefill_ms=1e3 * profile.prefill_s,
    )


def draft_options(profile: StageProfile) -> tuple[DraftOption, ...]:
    """The draft shapes whose accept length on this text is known: this plan's, no draft, every shorter chain
    (where this plan drafts a chain), and the oracle's trees."""
    drafted = max(profile.drafted_per_step, default=0)
    rows_now = 1 + sum(profile.drafted_per_step) / profile.steps
    options = [
        DraftOption(rows_now, profile.accept_length, drafted > 0, "this plan's drafts"),
        DraftOption(1.0, 1.0, False, "no drafts"),
    ]
    accepted = profile.acceptance_by_position
    if drafted and drafted == len(accepted):  # a tree drafts more nodes than it is deep
        for depth in range(1, drafted):
            options.append(DraftOption(depth + 1, 1 + sum(accepted[:depth]), True, f"a chain of {depth}"))
    options += [DraftOption(rows, accept, True, f"a tree of {rows} rows") for rows, accept in profile.tree_oracle]
    return tuple(options)


def _reachable(
    profile: StageProfile,
    config: ModelConfig,
    drafter: DraftConfig | ModelConfig | None,
    plan: Plan,
    dtype: Dtype,
    rates: Rates,
) -> tuple[DraftOption, dict[str, float]]:
    """The draft option with the least floor per emitted token, and its floors in seconds per step."""
    found: list[tuple[float, int, DraftOption, dict[str, float]]] = []
    depth_now = len(profile.acceptance_by_position)
    for index, option in enumerate(draft_options(profile)):
        depth = min(option.rows - 1, depth_now) if option.drafts else 0.0
        shape = StepShape(option.rows, profile.context_tokens, depth, option.accept_length, profile.neural_share)
        step = floors(stage_costs(config, drafter, plan, dtype, shape), rates)
        found.append((sum(step.values()) / option.accept_length, index, option, step))
    _, _, best, step = min(found, key=lambda item: item[:2])
    return best, step


def _algorithm(profile: StageProfile) -> tuple[StageGap, float]:
    """The algorithm row, and the accept length of the draft shape behind it.

    Step time of another shape = step time now + what the verify pass of its rows was measured to cost more (or
    less); a shape without drafts also saves the drafting. Shapes are compared by time per token.
    """
    now_ms = profile.ms_per_token
    step_ms = now_ms * profile.accept_length
    rows_now = 1 + sum(profile.drafted_per_step) / profile.steps
    draft_ms = 1e3 * profile.stage_seconds.get("draft", 0.0) / profile.steps
    best_ms, best_accept = now_ms, profile.accept_length
    for option in draft_options(profile)[1:]:
        extra = _verify_ms(profile, option.rows) - _verify_ms(profile, rows_now)
        ms = max(0.0, step_ms + extra - (0.0 if option.drafts else draft_ms)) / option.accept_length
        if profile.verify_ms and ms < best_ms:
            best_ms, best_accept = ms, option.accept_length
    row = StageGap(
        stage=ALGORITHM,
        measured_ms=now_ms,
        own_floor_ms=now_ms,
        reachable_floor_ms=best_ms,
        gap_ms=now_ms - best_ms,
        bytes_per_step=0.0,
        flops_per_step=0.0,
        bound="algorithm",
    )
    return row, best_accept


def _verify_ms(profile: StageProfile, rows: float) -> float:
    """Measured time of a verify pass, linear between the measured row counts and flat beyond them."""
    points = sorted(profile.verify_ms)
    if not points:
        return 0.0
    below = [point for point in points if point[0] <= rows]
    above = [point for point in points if point[0] >= rows]
    if not below or not above:
        return (above or below)[0][1] if above else below[-1][1]
    (left, left_ms), (right, right_ms) = below[-1], above[0]
    return left_ms if left == right else left_ms + (right_ms - left_ms) * (rows - left) / (right - left)


def _mean_costs(
    profile: StageProfile, config: ModelConfig, drafter: DraftConfig | ModelConfig | None, plan: Plan, dtype: Dtype
) -> dict[str, StageCost]:
    """Mean cost of the steps that were taken, each padded as the plan pads it."""
    mean: dict[str, StageCost] = {}
    depth_now = len(profile.acceptance_by_position)
    for drafted, steps in Counter(profile.drafted_per_step).items():
        rows = padded_rows(drafted + 1, plan)
        depth = min(drafted, depth_now)
        shape = StepShape(rows, profile.context_tokens, depth, profile.accept_length, profile.neural_share)
        for name, cost in stage_costs(config, drafter, plan, dtype, shape).items():
            mean[name] = mean.get(name, StageCost()) + cost.scaled(steps / profile.steps)
    return mean


def _stage_seconds_per_step(profile: StageProfile) -> dict[str, float]:
    """Measured seconds per step by stage, scaled so that they sum to the run without the clock: measuring costs
    a little, and evenly enough."""
    timed = {name: profile.stage_seconds.get(name, 0.0) for name in STAGE_NAMES}
    clocked = sum(timed.values())
    scale = profile.decode_s / clocked if clocked > 0 else 0.0
    return {name: seconds * scale / profile.steps for name, seconds in timed.items()}


def _observed_rates(costs: dict[str, StageCost], seconds: dict[str, float], hardware: HardwareProfile) -> Rates:
    """The probed rates, raised where a stage reached more. Only stages with a weight to read can tell."""
    rates = Rates(hardware.read_gb_s * 1e9, hardware.matmul_gflop_s * 1e9, hardware.llc_bytes)
    excess, worst = 1.0, ""
    for name, floor in floors(costs, rates).items():
        if name in ("accept", "host") or seconds[name] <= 0:
            continue
        if floor / seconds[name] > excess:
            excess, worst = floor / seconds[name], name
    if excess > IMPLAUSIBLE:
        raise UserError(
            f"Stage {worst} ran {excess:.1f} times faster than the probed rates of {hardware.name} allow "
            f"({hardware.read_gb_s:.0f} GB/s, {hardware.matmul_gflop_s:.0f} GFLOP/s): the device was busy while it was "
            "probed; probe it again with python -m engine probe --refresh.",
            code="implausible-hardware",
            field="platform",
        )
    return Rates(rates.bytes_s * excess, rates.flops_s * excess, rates.cache_bytes)


def _bound(cost: StageCost, rates: Rates) -> Literal["memory", "compute", "none"]:
    if cost.bytes <= 0 and cost.flops <= 0:
        return "none"
    return "memory" if cost.bytes / rates.bytes_s >= cost.flops / rates.flops_s else "compute"
