"""The levers: what a search may change about a plan, and what is legal where.

Every field of `Plan` is one lever, and every lever is lossless: it changes how the target's own greedy text
is computed, never which text that is. Imports no torch, so that web, CLI and search policy start fast.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from engine.codec import STRICT
from engine.deployment import Dtype
from engine.errors import UserError
from engine.plan import Plan

Value = str | int | bool
DrafterKind = Literal["none", "dflash", "draft_model"]

ALGORITHM = "algorithm"
"""The gap row that is draft quality, beside the stages of `engine.stages`."""

MAX_DRAFT_TOKENS = 16
"""Longest path for drafters that no block size limits (suffix matches, draft models)."""

TREE_ROWS: tuple[int, ...] = (0, 4, 6, 8, 12, 16, 24, 32, 48, 64)


@dataclass(frozen=True)
class LeverContext:
    """The facts of a deployment and its platform that decide which lever values are legal.

    `block_size` is a block drafter's block, anchor included (0 where there is none); `max_context` counts
    tokens (prompt, output and drafts); `cores` are those that this process may use; `packed_gemm` says that
    oneDNN's reordered weights can be used for this device and dtype.
    """

    __pydantic_config__ = STRICT

    device_kind: Literal["cpu", "cuda"]
    dtype: Dtype
    drafter: DrafterKind
    block_size: int
    max_context: int
    cores: int
    has_compiler: bool
    packed_gemm: bool


Rule = Callable[[Plan, LeverContext], str | None]


def _no_rule(plan: Plan, context: LeverContext) -> str | None:
    return None


def _always(plan: Plan) -> bool:
    return True


@dataclass(frozen=True)
class Lever:
    """One knob of a plan.

    `values(context)` lists what this device and drafter can do at all. `rule(plan, context)` gives a sentence
    where the plan's value clashes with another lever (one of `partners`), None where it is fine.
    `effective(plan)` is False where the value changes nothing; such a lever is neither checked nor told apart.
    `stages` are the rows of the gap list that it can shrink; what a draft shape saves in every stage by emitting
    more tokens a step is the algorithm row.
    """

    name: str
    family: str
    stages: tuple[str, ...]
    values: Callable[[LeverContext], tuple[Value, ...]]
    rule: Rule = _no_rule
    partners: tuple[str, ...] = ()
    effective: Callable[[Plan], bool] = _always

    @property
    def default(self) -> Value:
        value: Value = getattr(_DEFAULTS, self.name)
        return value


_DEFAULTS = Plan()


def _drafts(plan: Plan) -> bool:
    return plan.source != "none"


def _neural(plan: Plan) -> bool:
    return plan.source in ("neural", "hybrid")


def _matches(plan: Plan) -> bool:
    return plan.source in ("ngram", "hybrid")


def _ngram(plan: Plan) -> bool:
    return plan.source == "ngram"


def _hybrid(plan: Plan) -> bool:
    return plan.source == "hybrid"


def _fixed(*values: Value) -> Callable[[LeverContext], tuple[Value, ...]]:
    return lambda context: values


def _source_values(context: LeverContext) -> tuple[Value, ...]:
    return ("none", "ngram") if context.drafter == "none" else ("none", "neural", "ngram", "hybrid")


def _draft_tokens_values(context: LeverContext) -> tuple[Value, ...]:
    return tuple(range(1, min(MAX_DRAFT_TOKENS, context.max_context - 1) + 1))


def _draft_tokens_rule(plan: Plan, context: LeverContext) -> str | None:
    """A block drafter by itself drafts its block less the anchor. In a hybrid a match may go deeper."""
    limit = context.block_size - 1
    if context.drafter != "dflash" or plan.source != "neural" or plan.draft_tokens <= limit:
        return None
    return f"the drafter's block of {context.block_size} holds at most {limit} draft tokens"


def _tree_rows_values(context: LeverContext) -> tuple[Value, ...]:
    return tuple(rows for rows in TREE_ROWS if rows <= context.max_context)


def _candidates_rule(plan: Plan, context: LeverContext) -> str | None:
    if plan.ngram_candidates > 1 and plan.tree_rows == 0:
        return "more than one continuation needs a tree (tree_rows above 0)"
    return None


def _ngram_min_rule(plan: Plan, context: LeverContext) -> str | None:
    return "the shortest match is longer than ngram_max" if plan.ngram_min > plan.ngram_max else None


def _hybrid_rule(plan: Plan, context: LeverContext) -> str | None:
    return "no match is longer than ngram_max" if plan.hybrid_min_match > plan.ngram_max else None


def _gemm_values(context: LeverContext) -> tuple[Value, ...]:
    packed = context.device_kind == "cpu" and context.packed_gemm
    return ("library", "transposed", "packed") if packed else ("library", "transposed")


def _compile_values(context: LeverContext) -> tuple[Value, ...]:
    return (False, True) if context.has_compiler else (False,)


def _threads_values(context: LeverContext) -> tuple[Value, ...]:
    if context.device_kind != "cpu":
        return (0,)
    return (0, *(1 << bit for bit in range(context.cores.bit_length()) if 1 << bit < context.cores))  # 0 is all


_VERIFY = ("verify.qkv", "verify.attention", "verify.o", "verify.mlp", "verify.lm_head")
_PROJECTIONS = ("verify.qkv", "verify.o", "verify.mlp", "verify.lm_head")

LEVERS: tuple[Lever, ...] = (
    Lever("source", "source", (ALGORITHM, "draft"), _source_values),
    Lever(
        "draft_tokens",
        "tree",
        (ALGORITHM, "draft"),
        _draft_tokens_values,
        _draft_tokens_rule,
        effective=_drafts,
    ),
    Lever("tree_rows", "tree", (ALGORITHM,), _tree_rows_values, effective=_drafts),
    Lever(
        "ngram_min",
        "source",
        (ALGORITHM,),
        _fixed(1, 2, 3, 4),
        _ngram_min_rule,
        partners=("ngram_max",),
        effective=_ngram,  # in a hybrid, hybrid_min_match is the shortest match
    ),
    Lever("ngram_max", "source", (ALGORITHM, "draft"), _fixed(2, 3, 4, 6, 8), effective=_matches),
    Lever(
        "ngram_candidates",
        "source",
        (ALGORITHM,),
        _fixed(1, 2, 3, 4),
        _candidates_rule,
        partners=("tree_rows",),
        effective=_matches,
    ),
    Lever(
        "hybrid_min_match",
        "source",
        (ALGORITHM, "draft"),
        _fixed(2, 3, 4, 6, 8),
        _hybrid_rule,
        partners=("ngram_max",),
        effective=_hybrid,
    ),
    Lever("verify_widths", "tree", _PROJECTIONS, _fixed("exact", "4", "8")),
    Lever("gemm", "gemm", _PROJECTIONS, _gemm_values),
    Lever("draft_gemm", "gemm", ("draft",), _gemm_values, effective=_neural),
    Lever("fuse_qkv", "fusion", ("verify.qkv",), _fixed(False, True)),
    Lever("fuse_gate_up", "fusion", ("verify.mlp",), _fixed(False, True)),
    Lever("head_rows", "head", ("prefill", "verify.lm_head"), _fixed("all", "needed")),
    Lever("attention", "attention", ("verify.attention",), _fixed("sdpa", "grouped")),
    Lever("compile", "runtime", ("verify.qkv", "verify.mlp", "host"), _compile_values),
    Lever("threads", "runtime", ("draft", *_VERIFY, "accept", "host"), _threads_values),
)
_BY_NAME: dict[str, Lever] = {lever.name: lever for lever in LEVERS}
FAMILIES: tuple[str, ...] = tuple(dict.fromkeys(lever.family for lever in LEVERS))


def lever(name: str) -> Lever:
    """The lever of this name. Raises UserError where there is none."""
    try:
        return _BY_NAME[name]
    except KeyError:
        known = ", ".join(_BY_NAME)
        raise UserError(
            f"There is no lever {name!r}; the levers are {known}.", code="unknown-lever", field="plan"
        ) from None


def levers_for_stage(stage: str) -> tuple[Lever, ...]:
    """Levers that can shrink this row of the gap list."""
    return tuple(item for item in LEVERS if stage in item.stages)


def _show(value: Value) -> str:
    return f"{value}".lower() if isinstance(value, bool) else f"{value}"


def _same(left: Value, right: Value) -> bool:
    """Equality that tells False from 0."""
    return type(left) is type(right) and left == right


def _violation(item: Lever, plan: Plan, context: LeverContext) -> str | None:
    """Why the plan's value of this lever is illegal, or None."""
    if not item.effective(plan):
        return None
    value: Value = getattr(plan, item.name)
    if not any(_same(value, known) for known in item.values(context)):
        return "this deployment cannot use it"
    return item.rule(plan, context)


def _replace(plan: Plan, changes: Mapping[str, Any]) -> Plan:
    return dataclasses.replace(plan, **changes)


def _values_in_plan(item: Lever, plan: Plan, context: LeverContext) -> tuple[Value, ...]:
    """Values of one lever that break no rule of its own, with the rest of the plan as it is."""
    return tuple(
        value for value in item.values(context) if _violation(item, _replace(plan, {item.name: value}), context) is None
    )


def check_plan(plan: Plan, context: LeverContext) -> None:
    """Raise UserError for the first lever whose value is illegal, naming it, the reason and the legal values."""
    for item in LEVERS:
        reason = _violation(item, plan, context)
        if reason is None:
            continue
        legal = ", ".join(_show(value) for value in _values_in_plan(item, plan, context)) or "none with this plan"
        value = _show(getattr(plan, item.name))
        raise UserError(
            f"The plan's {item.name} cannot be {value}: {reason}. Legal values here: {legal}.",
            code="illegal-lever",
            field="plan",
        )


def canonicalise(plan: Plan, context: LeverContext) -> Plan:
    """The same tuning with every lever that changes nothing set to its default, so that equal tunings have
    equal digests."""
    idle = {item.name: item.default for item in LEVERS if not item.effective(plan)}
    if context.drafter == "none":
        idle["draft_gemm"] = _BY_NAME["draft_gemm"].default
    return _replace(plan, idle)


def change(plan: Plan, changes: Mapping[str, Any], context: LeverContext) -> Plan:
    """Apply `changes` and make the result legal and canonical.

    A changed lever keeps its value; where it clashes with another lever that one moves to its nearest legal
    value (a chain becomes a tree when several continuations are asked for, a path is cut to the new
    drafter's block). Raises UserError where no such move exists.
    """
    result = plan.with_changes(dict(changes))
    for _ in LEVERS:  # each pass settles at least one lever
        broken = [item for item in LEVERS if _violation(item, result, context) is not None]
        if not broken:
            break
        result = _settle(broken[0], result, set(changes), context)
    check_plan(result, context)
    return canonicalise(result, context)


def _settle(item: Lever, plan: Plan, kept: set[str], context: LeverContext) -> Plan:
    """Move the broken lever, or one of its partners where it is `kept`, to the nearest value that heals it."""
    movable = [item.name] if item.name not in kept else [name for name in item.partners if name not in kept]
    for name in movable:
        for value in sorted(_BY_NAME[name].values(context), key=lambda known: _distance(name, known, plan)):
            moved = _replace(plan, {name: value})
            if _violation(item, moved, context) is None and _violation(_BY_NAME[name], moved, context) is None:
                return moved
    return plan


def _distance(name: str, value: Value, plan: Plan) -> float:
    origin: Value = getattr(plan, name)
    if name == "tree_rows" and origin == 0:
        origin = plan.draft_tokens + 1  # a chain verifies that many rows
    if isinstance(origin, str) or isinstance(value, str):
        return float(value != origin)
    return abs(float(value) - float(origin))


def legal_values(item: Lever, plan: Plan, context: LeverContext) -> tuple[Value, ...]:
    """Values that `change(plan, {item.name: value}, context)` accepts and that make a difference, or the
    current one."""
    legal: list[Value] = []
    for value in item.values(context):
        try:
            changed = change(plan, {item.name: value}, context)
        except UserError:
            continue
        if _same(getattr(changed, item.name), value):
            legal.append(value)
    return tuple(legal)


def initial_plan(context: LeverContext) -> Plan:
    """Where a search starts: the default plan, cut to what this drafter can do."""
    if context.drafter == "none":
        return change(_DEFAULTS, {"source": "ngram"}, context)
    return change(_DEFAULTS, {"source": "neural"}, context)


def has_compiler() -> bool:
    """Whether torch.compile can build here: a C++ compiler ($CXX, else g++ or clang++) on the PATH, and
    Python's own headers, which its generated bindings include."""
    named = os.environ.get("CXX", "").split()
    compilers = [named[0]] if named else ["g++", "clang++"]
    found = any(shutil.which(compiler) for compiler in compilers)
    return found and (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file()


def usable_cores() -> int:
    """Logical cores that this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def context_for(
    *,
    platform: str,
    dtype: Dtype,
    drafter: DrafterKind,
    block_size: int,
    max_context: int,
    packed_gemm: bool | None = None,
) -> LeverContext:
    """The context of a deployment on this machine. `packed_gemm` None asks engine.linear, which loads torch."""
    kind: Literal["cpu", "cuda"] = "cuda" if platform.startswith("cuda") else "cpu"
    if packed_gemm is None:
        if kind == "cpu":
            import torch

            from engine.linear import packed_available

            packed_gemm = packed_available(torch.device("cpu"), {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
        else:
            packed_gemm = False
    return LeverContext(
        device_kind=kind,
        dtype=dtype,
        drafter=drafter,
        block_size=block_size,
        max_context=max_context,
        cores=usable_cores(),
        has_compiler=has_compiler(),
        packed_gemm=packed_gemm,
    )
