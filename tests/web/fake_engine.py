"""Stands in for `engine.search.perform` in tests of the web: the same two functions, figures drawn, no model.

What it emits is legal in every way, so the real policy, fold and view run on it. Trials can be held: while the file
`hold-N` lies in $FAKE_GATE, trial N waits after writing `running-N-ATTEMPT` with its process id.
"""

from __future__ import annotations

import hashlib
import os
import random
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.judge.report import Comparison, Forcing, Judgement, Pair
from engine.plan import Plan
from engine.search import events as ev
from engine.search.events import Body, Event
from engine.search.policy import Action
from engine.search.state import State

PAIRS = 4


@dataclass
class FakeBench:
    folder: Path
    history: Callable[[], Sequence[Event]]
    worker: str
    closed: int = 0

    def close(self) -> None:
        self.closed += 1


def open_bench(
    state: State,
    folder: Path,
    progress: Callable[[str], None],
    *,
    history: Callable[[], Sequence[Event]],
    worker: str,
) -> FakeBench:
    return FakeBench(folder, history, worker)


def perform(action: Action, state: State, bench: FakeBench, emit: Callable[[Body], None]) -> None:
    _WORK[action.kind](action, state, bench, emit)


def _draw(state: State, *names: object) -> random.Random:
    """Figures depend on the seed and on what is measured, never on when or where."""
    return random.Random(f"{state.seed}/{names}")


def _comparison(reference: str, ratio: float) -> Comparison:
    pairs = tuple(Pair(f"p{n}", 1.0 * ratio, 1.0, 48, 48) for n in range(PAIRS))
    return Comparison(reference, pairs, ratio, ratio - 0.02, ratio + 0.02, 0.004, 0.01, 20.0 * ratio, 20.0, 0.5)


def _forcing() -> Forcing:
    return Forcing(480, 480, 0, 0, 1e-4, 2, "scored twice", 10, 10)


def _probe(action: Action, state: State, bench: FakeBench, emit: Callable[[Body], None]) -> None:
    profile = {
        "device": state.deployment.platform,
        "kind": "cpu",
        "name": "drawn device",
        "cores": 2,
        "memory_bytes": 8 * 2**30,
        "free_bytes": 6 * 2**30,
        "read_gb_s": 31.5,
        "matmul_gflop_s": 120.5,
        "llc_bytes": 2**25,
        "dtype": state.deployment.dtype,
        "versions": {"torch": "2.13.0"},
        "samples": {"read": [31.5], "matmul": [120.5]},
    }
    emit(ev.HardwareProbed(profile))


def _stock(action: Action, state: State, bench: FakeBench, emit: Callable[[Body], None]) -> None:
    name = action.data["name"]
    accept = 2.1 if name == "speculative" else None
    emit(ev.StockMeasured(name, f"drawn {name}", 12.5, (12.4, 12.6), accept))


def _trial(action: Action, state: State, bench: FakeBench, emit: Callable[[Body], None]) -> None:
    number, attempt = action.data["trial"], action.data["attempt"]
    emit(ev.TrialStarted(number, bench.worker, attempt))
    emit(ev.TrialProgress(number, "token forcing"))
    _hold(number, attempt)
    for block in range(1, 4):
        emit(ev.TrialProgress(number, f"timing {block}/3"))
    if action.data["kind"] == "baseline":
        emit(ev.TrialJudged(number, Judgement("accepted", "Lossless.", ("p0", "p1"), _forcing(), None, 2.2, 1.5)))
        return
    ratio = 1.05 + _draw(state, "trial", action.data["plan"].digest).random() / 2
    reason = f"{ratio:.2f} times the incumbent's speed."
    comparison = _comparison("incumbent", ratio)
    emit(ev.TrialJudged(number, Judgement("accepted", reason, ("p0", "p1"), _forcing(), comparison, 2.4, 1.5)))


def _hold(trial: int, attempt: int) -> None:
    gate = os.environ.get("FAKE_GATE")
    if not gate:
        return
    mark = Path(gate) / f"running-{trial}-{attempt}"
    mark.with_suffix(".new").write_text(str(os.getpid()))
    mark.with_suffix(".new").replace(mark)
    while (Path(gate) / f"hold-{trial}").exists():
        time.sleep(0.01)


def _profile(action: Action, state: State, bench: FakeBench, emit: Callable[[Body], None]) -> None:
    gaps = (
        ev.StageGap("verify.mlp", 20.0, 9.0, 6.0, 14.0, 3e8, 5e8, "memory"),
        ev.StageGap("draft", 8.0, 4.0, 3.0, 5.0, 1e8, 2e8, "memory"),
    )
    emit(
        ev.Profiled(
            action.data["round"], action.data["plan"], gaps, (0, 40, 30, 20, 9, 1), 2.2, (0.6, 0.4, 0.2), 30.0, 9.0, 2.9
        )
    )


def _standing(action: Action, state: State, bench: FakeBench, emit: Callable[[Body], None]) -> None:
    data = action.data
    best = state.incumbent.over_autoregressive.ratio if state.incumbent and state.incumbent.over_autoregressive else 1.2
    ratio = best if data["final"] else best * data["over_incumbent"]
    emit(
        ev.IncumbentChanged(
            data["trial"],
            data["plan"],
            data["over_incumbent"],
            _comparison("autoregressive", ratio),
            _comparison("speculative", ratio * 1.1),
            _comparison("own autoregressive", ratio * 0.9),
            data["final"],
        )
    )


def _propose(action: Action, state: State, bench: FakeBench, emit: Callable[[Body], None]) -> None:
    assert state.incumbent is not None
    number, agents = action.data["round"], action.data["agents"]
    plan: Plan = state.incumbent.plan
    tried = {trial.plan for trial in state.trials.values()}
    choices: list[dict[str, Any]] = [{"draft_tokens": n} for n in range(1, 7)] + [{"ngram_max": n} for n in (5, 6, 8)]
    fresh = [c for c in choices if plan.with_changes(c) not in tried and plan.with_changes(c) != plan]
    there = len(state.of_round(number, "candidate"))
    chosen = _draw(state, "propose", number).sample(fresh, min(len(fresh), len(agents)))[there:]
    for agent, changes in zip(agents[there:], chosen, strict=False):
        emit(
            ev.CandidateProposed(
                trial=state.next_trial + chosen.index(changes),
                round=number,
                kind="candidate",
                agent=agent,
                plan=plan.with_changes(changes),
                parent=plan.digest,
                changes=changes,
                stage="draft",
                arm="bandit:shape",
                rationale="Drawn.",
                predicted=1.1,
            )
        )
    emit(ev.ProposalsMade(number, there + len(chosen)))


def _bundle(action: Action, state: State, bench: FakeBench, emit: Callable[[Body], None]) -> None:
    path = bench.folder / "bundle.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("events.txt", f"{len(bench.history())} events")
    content = path.read_bytes()
    emit(ev.BundleWritten(path.name, hashlib.sha256(content).hexdigest(), len(content)))


_WORK = {
    "probe": _probe,
    "stock": _stock,
    "trial": _trial,
    "profile": _profile,
    "standing": _standing,
    "propose": _propose,
    "bundle": _bundle,
}
