"""The view-model of a search: everything that a dashboard or a terminal shows, as JSON-ready data.

Every figure is taken from the state, that is from events; where nothing was measured yet it is None or empty.
Ratios are speedups (above 1 is faster), times are milliseconds per emitted token unless the name says otherwise.
"""

from __future__ import annotations

from typing import Any

from engine.codec import to_json
from engine.deployment import DEMO_DRAFTER, DEMO_TARGET, NO_DRAFTER, Deployment
from engine.judge.report import Comparison, Forcing
from engine.plan import Plan
from engine.search.events import Profiled, StageGap
from engine.search.policy import Action, decide
from engine.search.state import Incumbent, State, Trial
from engine.stages import STAGES

ALGORITHM = "algorithm"
LABELS: dict[str, str] = {**{stage.name: stage.label for stage in STAGES}, ALGORITHM: "Draft quality"}
"""Plain-language name of every row of the gap list, in order of display."""


def view(state: State) -> dict[str, Any]:
    """The whole view-model. Keys are always present, whatever the state."""
    profile = state.profiles[-1] if state.profiles else None
    first = state.profiles[0] if state.profiles else None
    return {
        "seq": state.seq,
        "status": state.status,
        "sentence": sentence(state),
        "deployment": to_json(state.deployment),
        "title": title(state.deployment),
        "budget": {
            "seconds": state.budget.seconds,
            "seconds_used": round(state.seconds, 3),
            "trials": state.budget.trials,
            "trials_used": state.trials_used,
        },
        "round": len(state.rounds),
        "stages": [{"name": name, "label": text} for name, text in LABELS.items()],
        "headline": _headline(state, profile),
        "stocks": [
            {
                "name": stock.name,
                "implementation": stock.implementation,
                "tok_s": stock.tok_s,
                "accept_length": stock.accept_length,
            }
            for stock in state.stocks.values()
        ],
        "largest_gap": _largest_gap(profile),
        "gaps": [{**to_json(gap), "label": label(gap.stage)} for gap in profile.stages] if profile else [],
        "gap_history": [
            {"round": p.round, "ms_per_token": p.ms_per_token, "reachable_ms": reachable_ms(p)} for p in state.profiles
        ],
        "points": _points(state),
        "incumbents": [
            {"trial": i.trial, "round": i.round, **_ratio(i.over_autoregressive)}
            for i in state.incumbents
            if i.over_autoregressive is not None
        ],
        "accept": _accept(profile) or {"histogram": [], "by_position": [], "accept_length": None},
        "first_profile_accept": _accept(first),
        "candidates": [_candidate(state, trial) for trial in state.trials.values()],
        "bundle": (
            {"file": state.bundle.file, "sha256": state.bundle.sha256, "bytes": state.bundle.bytes}
            if state.bundle
            else None
        ),
        "finished": (
            {"reason": state.finished.reason, "sentence": state.finished.sentence} if state.finished else None
        ),
    }


def label(stage: str) -> str:
    """Plain-language name of a stage; a stage that this version does not know keeps its own name."""
    return LABELS.get(stage, stage)


def title(deployment: Deployment) -> str:
    """A search's name for people: target, drafter, dtype and platform."""
    target = "SmolLM2-135M-Instruct" if deployment.target == DEMO_TARGET else _leaf(deployment.target)
    if deployment.drafter == NO_DRAFTER:
        drafter = "n-gram drafts"
    else:
        drafter = "the DFlash demo drafter" if deployment.drafter == DEMO_DRAFTER else _leaf(deployment.drafter)
    return f"{target} with {drafter}, {deployment.dtype} on {deployment.platform}"


def _leaf(path: str) -> str:
    return path.replace("\\", "/").rstrip("/").rsplit("/", 1)[-1].removesuffix(".gguf")


def sentence(state: State) -> str:
    """One line on what the search is doing, or how it ended."""
    if state.finished is not None:
        return state.finished.sentence
    if state.status == "paused":
        return f"Paused in round {len(state.rounds)}; it goes on where it stopped when it is resumed."
    actions = decide(state)
    doing = _doing(state, actions[0])
    if state.status == "cancelling":
        return f"Cancelling: {doing}."
    where = f"Round {len(state.rounds)}: " if state.open_round else ""
    return f"{where}{doing}." if where else f"{doing[0].upper()}{doing[1:]}."


def _doing(state: State, action: Action) -> str:
    match action.kind:
        case "probe":
            return "measuring what this hardware can do"
        case "stock":
            return f"measuring stock {action.data['name']} decoding"
        case "profile":
            return "profiling the incumbent stage by stage"
        case "propose":
            return "looking for the next candidates"
        case "standing":
            final = "taking the closing measurement of" if action.data["final"] else "measuring"
            return f"{final} the plan of trial {action.data['trial']} side by side with stock"
        case "trial":
            trial = state.trials[action.data["trial"]]
            what = {
                "baseline": "judging the initial plan",
                "candidate": f"judging candidate {trial.number}",
                "confirm": f"confirming a winner on fresh prompts (trial {trial.number})",
                "merge": f"judging the stacked winners (trial {trial.number})",
            }[trial.kind]
            return f"{what}: {trial.phase}" if trial.phase else what
        case "bundle":
            return "writing the bundle"
        case _:
            return "ending" if action.key == "finish" else "choosing what to do next"


# Headline -----------------------------------------------------------------------------------------------------


def _headline(state: State, profile: Profiled | None) -> dict[str, Any]:
    incumbent = state.incumbent
    over = incumbent.over_autoregressive if incumbent else None
    trial = state.trials[incumbent.trial] if incumbent else None
    judgement = trial.judgement if trial else None
    accept_length = judgement.accept_length if judgement else None
    own_profile = state.profile_of(incumbent.plan) if incumbent else None
    if accept_length is None and own_profile is not None:
        accept_length = own_profile.accept_length
    speculative = state.stocks.get("speculative")
    reachable = reachable_ms(profile) if profile else None
    profiled_over = _over_autoregressive(state, profile.plan) if profile else None
    return {
        "over_autoregressive": _ratio(over) if over else None,
        "over_speculative": _ratio(incumbent.over_speculative) if incumbent and incumbent.over_speculative else None,
        "over_own_autoregressive": (
            _ratio(incumbent.over_own_autoregressive) if incumbent and incumbent.over_own_autoregressive else None
        ),
        "tok_s": over.candidate_tok_s if over else None,
        "accept_length": accept_length,
        "stock_accept_length": speculative.accept_length if speculative else None,
        "roofline_share": reachable / profile.ms_per_token if profile and reachable else None,
        "ceiling_ratio": profiled_over * profile.ms_per_token / reachable
        if profile and reachable and profiled_over
        else None,
        "forcing": _forcing(judgement.forcing) if judgement and judgement.forcing else None,
    }


def reachable_ms(profile: Profiled) -> float | None:
    """The least time per emitted token that a lossless plan could reach here: the reachable floors of all stages,
    which are per token at the best draft shape already (`engine.roofline`). None without stages."""
    floors = [gap.reachable_floor_ms for gap in profile.stages if gap.stage != ALGORITHM]
    return sum(floors) if floors else None


def _ratio(comparison: Comparison) -> dict[str, float]:
    return {"ratio": comparison.ratio, "low": comparison.low, "high": comparison.high}


def _forcing(forcing: Forcing) -> dict[str, int]:
    return {
        "exact": forcing.exact,
        "near_tie": forcing.near_tie,
        "error": forcing.error,
        "near_tie_limit": forcing.near_tie_limit,
    }


# Gaps and acceptance ------------------------------------------------------------------------------------------


def _largest_gap(profile: Profiled | None) -> dict[str, Any] | None:
    if profile is None or not profile.stages:
        return None
    gap = max(profile.stages, key=lambda stage: stage.gap_ms)
    return {"stage": gap.stage, "label": label(gap.stage), "gap_ms": gap.gap_ms, "sentence": gap_sentence(gap)}


_BOUND = {"memory": "the memory's bandwidth", "compute": "the arithmetic rate", "none": "this device"}


def gap_sentence(gap: StageGap) -> str:
    """The gap in words."""
    if gap.stage == ALGORITHM:
        return f"A better draft shape could save {gap.gap_ms:.2f} of {gap.measured_ms:.2f} ms per token."
    limit = _BOUND.get(gap.bound, "this device")
    return (
        f"{label(gap.stage)} takes {gap.measured_ms:.2f} ms per token where {limit} allows "
        f"{gap.reachable_floor_ms:.2f}: {gap.gap_ms:.2f} ms to gain."
    )


def _accept(profile: Profiled | None) -> dict[str, Any] | None:
    if profile is None:
        return None
    return {
        "histogram": list(profile.accept_histogram),
        "by_position": list(profile.acceptance_by_position),
        "accept_length": profile.accept_length,
    }


# Trials -------------------------------------------------------------------------------------------------------


def _over_autoregressive(state: State, plan: Plan) -> float | None:
    """Measured speedup of a plan that is or was the incumbent over stock autoregressive decoding."""
    found = [i for i in state.incumbents if i.plan == plan and i.over_autoregressive is not None]
    return found[-1].over_autoregressive.ratio if found and found[-1].over_autoregressive else None


def _parent(state: State, trial: Trial) -> Incumbent | None:
    """The incumbent that a trial was measured against."""
    return next((i for i in reversed(state.incumbents) if i.plan.digest == trial.proposal.parent), None)


def changes(state: State, trial: Trial) -> list[dict[str, Any]]:
    """What a trial's plan changes: {"lever", "from", "to"}, against the incumbent that it was proposed for."""
    parent = _parent(state, trial)
    before = (parent.plan if parent else state.initial_plan).to_json()
    return [{"lever": name, "from": before.get(name), "to": value} for name, value in trial.proposal.changes.items()]


def _points(state: State) -> list[dict[str, Any]]:
    """Timed trials on one scale: ratio over the incumbent of their round times that one's own speedup."""
    points = []
    for trial in state.trials.values():
        parent = _parent(state, trial)
        base = parent.over_autoregressive.ratio if parent and parent.over_autoregressive else None
        ratio = 1.0 if trial.kind == "baseline" else trial.ratio
        if trial.judgement is None or base is None or ratio is None:
            continue
        points.append(
            {
                "trial": trial.number,
                "round": trial.round,
                "kind": trial.kind,
                "ratio": base * ratio,
                "verdict": trial.judgement.verdict,
            }
        )
    return points


def _candidate(state: State, trial: Trial) -> dict[str, Any]:
    proposal, judgement = trial.proposal, trial.judgement
    comparison = judgement.comparison if judgement else None
    return {
        "trial": trial.number,
        "round": trial.round,
        "kind": trial.kind,
        "agent": proposal.agent,
        "arm": proposal.arm,
        "stage": proposal.stage,
        "changes": changes(state, trial),
        "rationale": proposal.rationale,
        "predicted": proposal.predicted,
        "status": trial.status,
        "phase": trial.phase,
        "verdict": judgement.verdict if judgement else None,
        "reason": judgement.reason if judgement else None,
        "ratio": comparison.ratio if comparison else None,
        "low": comparison.low if comparison else None,
        "high": comparison.high if comparison else None,
        "accept_length": judgement.accept_length if judgement else None,
        "forcing": _forcing(judgement.forcing) if judgement and judgement.forcing else None,
        "seconds": judgement.seconds if judgement else None,
    }
