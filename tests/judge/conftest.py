"""A workbench over the toy model: real children, no torch."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import judge_toys as toys
import pytest
from judge_world import NEW_TOKENS, MakeBench, toy

from engine.deployment import Deployment, Regime
from engine.judge.bench import ReadLimit
from engine.judge.conditions import Watch, unwatched
from engine.judge.effort import Effort
from engine.judge.hidden import HiddenPrompt, Material
from engine.judge.reference import STOCK
from engine.judge.seats import Timeouts
from engine.judge.workbench import SPECULATIVE, Workbench
from engine.plan import Plan


@pytest.fixture(scope="session")
def material() -> Material:
    rng = random.Random(20)
    prompts = tuple(
        HiddenPrompt(
            f"p{i}", ("red", "green", "blue")[i % 3], tuple(rng.randrange(1, toys.VOCAB) for _ in range(5 + i))
        )
        for i in range(40)
    )
    return Material(
        prompts=prompts,
        stop_ids=(toys.EOS,),
        vocab_size=toys.VOCAB,
        decode=lambda ids: " ".join(f"t{token}" for token in ids),
        read_bytes=0,
    )


@pytest.fixture
def phases() -> list[str]:
    return []


@pytest.fixture(scope="module")
def make_bench(material: Material, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeBench]:
    """Opens workbenches in which a plan's backend is looked up in `toys_by_plan` ("honest" where it is not there)."""
    opened: list[Workbench] = []

    def make(
        toys_by_plan: dict[Plan, str] | None = None,
        *,
        folder: Path | None = None,
        progress: Callable[[str], None] = lambda text: None,
        effort: Effort | None = None,
        read_limit: ReadLimit = ReadLimit(0.0, 0.0, 1.0),  # noqa: B008 - frozen
        watch: Callable[[str], Watch] = unwatched,
    ) -> Workbench:
        table = toys_by_plan if toys_by_plan is not None else {}
        bench = Workbench(
            Deployment(target="toy", drafter="ngram", regime=Regime(max_new_tokens=NEW_TOKENS)),
            folder or tmp_path_factory.mktemp("search"),
            7,
            progress,
            effort=effort or Effort(timeouts=Timeouts(build=60.0, first_answer=6.0, answer=6.0)),
            material=material,
            backend_for=lambda plan: toy(table.get(plan, "honest")),
            stock={STOCK: toy("stock"), SPECULATIVE: toy("speculative")},
            read_limit=read_limit,
            watch=watch,
        )
        opened.append(bench)
        return bench

    yield make
    for bench in opened:
        bench.close()
