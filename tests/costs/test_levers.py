"""Every plan field is one lever, and what the levers allow is exactly what they say."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import levers
from engine.errors import UserError
from engine.levers import ALGORITHM, LEVERS, LeverContext, canonicalise, change, check_plan, initial_plan, legal_values
from engine.plan import Plan
from engine.stages import PREFILL, STAGE_NAMES

DFLASH = LeverContext("cpu", "fp32", "dflash", 8, 2048, 6, True, True)
CONTEXTS = [
    DFLASH,
    dataclasses.replace(DFLASH, drafter="none", block_size=0, has_compiler=False),
    dataclasses.replace(DFLASH, drafter="draft_model", block_size=0, packed_gemm=False),
    dataclasses.replace(DFLASH, device_kind="cuda", dtype="bf16", packed_gemm=False, block_size=16),
    dataclasses.replace(DFLASH, block_size=4, max_context=40, cores=1),
]


def random_plan(rng: random.Random, context: LeverContext) -> Plan:
    """Any value of every lever, legal together or not."""
    return Plan(**{lever.name: rng.choice(lever.values(context)) for lever in LEVERS})


def is_legal(plan: Plan, context: LeverContext) -> bool:
    try:
        check_plan(plan, context)
    except UserError:
        return False
    return True


def test_levers_and_plan_fields_match_one_to_one() -> None:
    assert sorted(lever.name for lever in LEVERS) == sorted(field.name for field in dataclasses.fields(Plan))
    assert len({lever.name for lever in LEVERS}) == len(LEVERS)


def test_stages_exist_and_every_stage_of_the_gap_list_has_a_lever() -> None:
    known = {*STAGE_NAMES, PREFILL, ALGORITHM}
    for lever in LEVERS:
        assert lever.stages, lever.name
        assert set(lever.stages) <= known, lever.name
    assert all(levers.levers_for_stage(stage) for stage in known)


@pytest.mark.parametrize("context", CONTEXTS)
def test_the_initial_plan_is_legal_and_canonical(context: LeverContext) -> None:
    plan = initial_plan(context)
    check_plan(plan, context)
    assert canonicalise(plan, context) == plan
    assert plan.source == ("ngram" if context.drafter == "none" else "neural")


@pytest.mark.parametrize("context", CONTEXTS)
def test_every_legal_value_gives_a_legal_plan_that_has_it(context: LeverContext) -> None:
    plans = [initial_plan(context)]
    rng = random.Random(7)
    while len(plans) < 12:
        plan = random_plan(rng, context)
        if is_legal(plan, context):
            plans.append(canonicalise(plan, context))
    for plan in plans:
        for lever in LEVERS:
            values = legal_values(lever, plan, context)
            if lever.effective(plan):
                assert getattr(plan, lever.name) in values
            for value in values:
                changed = change(plan, {lever.name: value}, context)
                assert getattr(changed, lever.name) == value
                assert is_legal(changed, context)


@given(seed=st.integers(0, 2**32 - 1), which=st.integers(0, len(CONTEXTS) - 1))
def test_canonical_form_is_stable_and_keeps_legality(seed: int, which: int) -> None:
    context = CONTEXTS[which]
    plan = random_plan(random.Random(seed), context)
    once = canonicalise(plan, context)
    assert canonicalise(once, context) == once
    assert is_legal(once, context) == is_legal(plan, context)


@pytest.mark.parametrize(
    ("source", "idle"),
    [
        (
            "none",
            {
                "draft_tokens",
                "tree_rows",
                "ngram_min",
                "ngram_max",
                "ngram_candidates",
                "hybrid_min_match",
                "draft_gemm",
            },
        ),
        ("neural", {"ngram_min", "ngram_max", "ngram_candidates", "hybrid_min_match"}),
        ("ngram", {"hybrid_min_match", "draft_gemm"}),
        ("hybrid", {"ngram_min"}),
    ],
)
def test_levers_without_effect_do_not_make_another_plan(source: str, idle: set[str]) -> None:
    base = canonicalise(Plan(source=source, tree_rows=0 if source == "none" else 16), DFLASH)  # type: ignore[arg-type]
    for lever in LEVERS:
        if lever.name == "source":
            continue
        other = next(value for value in lever.values(DFLASH) if value != getattr(base, lever.name))
        moved = canonicalise(dataclasses.replace(base, **{lever.name: other}), DFLASH)
        assert (moved.digest == base.digest) == (lever.name in idle), lever.name


@pytest.mark.parametrize(
    ("changes", "context", "words"),
    [
        ({"draft_tokens": 8}, DFLASH, ("draft_tokens", "8", "block of 8", "1, 2, 3, 4, 5, 6, 7")),
        ({"source": "neural"}, CONTEXTS[1], ("source", "neural", "none, ngram")),
        ({"source": "ngram", "ngram_candidates": 3}, DFLASH, ("ngram_candidates", "3", "tree_rows")),
        ({"source": "ngram", "ngram_min": 4, "ngram_max": 3}, DFLASH, ("ngram_min", "4", "ngram_max", "1, 2, 3")),
        ({"source": "hybrid", "ngram_max": 3}, DFLASH, ("hybrid_min_match", "4", "ngram_max", "2, 3")),
        ({"gemm": "packed"}, CONTEXTS[3], ("gemm", "packed", "library, transposed")),
        ({"draft_gemm": "packed"}, CONTEXTS[2], ("draft_gemm", "packed", "library, transposed")),
        ({"threads": 5}, DFLASH, ("threads", "5", "0, 1, 2, 4.")),
        ({"threads": 2}, CONTEXTS[3], ("threads", "2", "0")),
        ({"tree_rows": 48, "draft_tokens": 3}, CONTEXTS[4], ("tree_rows", "48", "0, 4, 6, 8, 12, 16, 24, 32")),
    ],
)
def test_an_illegal_value_is_named_with_what_is_legal(
    changes: dict[str, object], context: LeverContext, words: tuple[str, ...]
) -> None:
    with pytest.raises(UserError) as caught:
        check_plan(Plan().with_changes(changes), context)
    assert caught.value.field == "plan"
    for word in words:
        assert word in caught.value.sentence


def test_compile_needs_a_compiler() -> None:
    without = dataclasses.replace(DFLASH, has_compiler=False)
    check_plan(Plan(compile=True), DFLASH)
    with pytest.raises(UserError, match=r"compile cannot be true.*Legal values here: false\."):
        check_plan(Plan(compile=True), without)


def test_no_value_counts_as_another_of_equal_number() -> None:
    """True == 1 in Python; a lever value is not taken for another type's."""
    plan = dataclasses.replace(Plan(), threads=True)
    assert not is_legal(plan, DFLASH)


@pytest.mark.parametrize(
    ("start", "changes", "expected"),
    [
        ({"source": "ngram", "draft_tokens": 12}, {"source": "neural"}, {"draft_tokens": 7}),
        ({"source": "ngram"}, {"ngram_candidates": 2}, {"tree_rows": 8}),
        ({"source": "ngram"}, {"ngram_max": 3}, {}),
        ({"source": "hybrid"}, {"ngram_max": 2}, {"hybrid_min_match": 2}),
        ({"source": "ngram", "ngram_min": 2, "ngram_max": 2}, {"ngram_min": 3}, {"ngram_max": 3}),
    ],
)
def test_a_change_moves_the_levers_that_it_clashes_with(
    start: dict[str, object], changes: dict[str, object], expected: dict[str, object]
) -> None:
    before = canonicalise(Plan().with_changes(start), DFLASH)
    after = change(before, changes, DFLASH)
    assert after.changes_from(before) == {**changes, **expected}


def test_a_change_that_cannot_be_had_is_refused() -> None:
    with pytest.raises(UserError, match="draft_tokens cannot be 12"):
        change(Plan(), {"draft_tokens": 12}, DFLASH)
    with pytest.raises(UserError, match="ngram_candidates cannot be 2"):
        change(Plan(source="ngram"), {"ngram_candidates": 2, "tree_rows": 0}, DFLASH)


def test_unknown_lever_is_named() -> None:
    with pytest.raises(UserError, match=r"'turbo'.*draft_tokens"):
        levers.lever("turbo")


def test_change_finds_a_way_wherever_one_exists() -> None:
    """Brute force over the levers that have rules: from every legal plan, a single change is refused only if no
    choice of the others could make it legal."""
    context = dataclasses.replace(DFLASH, block_size=3)
    coupled = ["source", "draft_tokens", "tree_rows", "ngram_min", "ngram_max", "ngram_candidates", "hybrid_min_match"]
    choices = {
        "source": ("neural", "ngram", "hybrid"),
        "draft_tokens": (1, 2, 3),
        "tree_rows": (0, 4),
        "ngram_min": (1, 3),
        "ngram_max": (2, 3),
        "ngram_candidates": (1, 2),
        "hybrid_min_match": (2, 3),
    }
    plans = [
        Plan(**dict(zip(coupled, values, strict=True)))  # type: ignore[arg-type]
        for values in itertools.product(*(choices[name] for name in coupled))
    ]
    legal = [plan for plan in plans if is_legal(plan, context)]
    rng = random.Random(3)
    for plan in rng.sample(legal, 40):
        for name, values in choices.items():
            for value in values:
                possible = any(
                    getattr(other, name) == value and (name == "source" or other.source == plan.source)
                    for other in legal
                )
                try:
                    change(plan, {name: value}, context)
                except UserError:
                    assert not possible, (plan, name, value)


def test_has_compiler_needs_compiler_and_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "my-c++"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "Python.h").write_text("")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(levers.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    monkeypatch.delenv("CXX", raising=False)
    assert not levers.has_compiler()
    monkeypatch.setenv("CXX", "my-c++ -O2")
    assert levers.has_compiler()
    (tmp_path / "Python.h").unlink()
    assert not levers.has_compiler()


def test_context_counts_the_cores_that_may_be_used() -> None:
    found = levers.context_for(
        platform="cpu", dtype="fp32", drafter="dflash", block_size=8, max_context=99, packed_gemm=True
    )
    assert found.cores == len(os.sched_getaffinity(0))
    assert found == dataclasses.replace(found, device_kind="cpu", packed_gemm=True, max_context=99)


def test_levers_and_roofline_load_without_torch() -> None:
    code = "import sys, engine.levers, engine.costs, engine.hardware, engine.roofline; print('torch' in sys.modules)"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
