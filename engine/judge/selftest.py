"""Judge the known ways to fake a win, and honest candidates, on this machine, and say which the judge got right.

Every candidate is real: source code in a child process, judged as the source candidates of a search are. A cheat
counts as rejected only with the verdict, and for the reason, that it deserves; an honest candidate must be accepted.
They are compared with an incumbent that computes every pass twice, so that honest work has something to gain.

The last line is JSON. Exit status: 0 all were judged right; 1 a cheat slipped through, an honest one was refused, the
judge itself failed, or the machine was too busy to judge; 2 bad input.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from engine.check import check_platform
from engine.codec import to_json
from engine.deployment import DEMO_DRAFTER, DEMO_TARGET, Deployment, Dtype, Regime
from engine.errors import ChildError, UserError
from engine.judge.cheats.registry import CANDIDATES, INCUMBENT, INCUMBENT_SOURCE, Candidate, Need, Served
from engine.judge.report import Judgement, Power

if TYPE_CHECKING:
    from engine.judge.bench import ReadLimit
    from engine.judge.effort import Effort
    from engine.judge.hidden import Material
    from engine.judge.workbench import Workbench

Status = Literal["right", "slipped through", "refused", "wrong reason", "leak", "judge failed", "not idle", "not run"]

BATCH = 3
TEMPERATURE = 0.7
SEED_BITS = 31
NEED_WORDS: dict[Need, str] = {
    "gpu": "needs a GPU",
    "cpu": "is for CPUs",
    "fp32": "needs fp32: in bf16 the gate's detection power is told instead",
    "near-ties": "needs a model with near-ties: run with --tiny",
    "neural": "needs a drafter",
}
NOT_IDLE = re.compile("was not idle")
FOUND = re.compile(r"^found .*", re.MULTILINE)
"""What a candidate that searches says in its log where it found something."""


@dataclass(frozen=True)
class Outcome:
    """What the judge said of one candidate. `status` is "right" where verdict and reason are the expected ones."""

    name: str
    family: str
    does: str
    served: Served
    expected: tuple[str, ...]
    status: Status
    verdict: str = ""
    reason: str = ""
    seconds: float = 0.0
    judgement: Judgement | None = None

    @property
    def honest(self) -> bool:
        return self.family == "honest"


@dataclass(frozen=True)
class World:
    """What the candidates are judged on. `material`, `read_limit` and `threads` None: those of the deployment and this
    device."""

    platform: str
    dtype: Dtype
    target: str
    drafter: str
    regime: Regime
    effort: Effort
    has: frozenset[Need]
    material: Material | None = None
    read_limit: ReadLimit | None = None
    threads: int | None = None

    def deployment(self, served: Served) -> Deployment:
        changes: dict[Served, dict[str, Any]] = {
            "single": {},
            "batch": {"batch": BATCH},
            "sampled": {"temperature": TEMPERATURE},
        }
        regime = dataclasses.replace(self.regime, **changes[served])
        return Deployment(self.target, self.drafter, regime, self.platform, self.dtype)

    def lacks(self, candidate: Candidate) -> str:
        """Why a candidate cannot be run here, in words, or ""."""
        return "; ".join(NEED_WORDS[need] for need in candidate.needs if need not in self.has)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tiny", action="store_true", help="on a tiny random model instead of SmolLM2: a few minutes")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="these candidates, or families, only (see --list for both)"
    )
    parser.add_argument("--list", action="store_true", help="say what the candidates do and what they must get; no run")
    parser.add_argument("--platform", metavar="DEVICE", help="cpu, cuda:0, ... (default: this machine's best device)")
    parser.add_argument(
        "--dtype",
        choices=("fp32", "bf16"),
        help="precision of weights and activations (default: fp32 on cpu or with --tiny, else bf16)",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="decides which prompts are drawn (default: a fresh draw)")
    parser.add_argument("--json", metavar="FILE", help="write the JSON of the last line, with all evidence, to a file")


def run(options: argparse.Namespace) -> int:
    chosen = choose(options.only)
    if options.list:
        for candidate in chosen:
            print(f"{candidate.family:9} {candidate.name:24} {candidate.does} [{' or '.join(candidate.verdicts)}]")
        return 0
    if options.platform is not None:
        check_platform(options.platform)
    if options.json is not None and not Path(options.json).absolute().parent.is_dir():
        raise UserError(f"There is no folder for the file {options.json}.", field="json")
    seed = options.seed if options.seed is not None else secrets.randbits(SEED_BITS)
    world = (tiny_world if options.tiny else demo_world)(options.platform, options.dtype, seed)
    started = time.perf_counter()
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="specpilot-selftest-") as folder:
        for outcome in judge_all(world, chosen, seed, Path(folder), _progress):
            outcomes.append(outcome)
            _show(outcome)
    passed = not any(outcome.status not in ("right", "not run") for outcome in outcomes)
    print(f"\n{_power_line(_power(outcomes))}{conclusion(outcomes)}")
    summary = _summary(world, outcomes, seed, time.perf_counter() - started, passed)
    if options.json is not None:
        evidence = [to_json(outcome) for outcome in outcomes]
        Path(options.json).write_text(json.dumps({**summary, "outcomes": evidence}, indent=1) + "\n")
    print(json.dumps(summary))
    return 0 if passed else 1


def choose(names: Sequence[str] | None) -> list[Candidate]:
    """The candidates of these names or families. Raises UserError for one that is neither."""
    if names is None:
        return list(CANDIDATES)
    known = {candidate.name for candidate in CANDIDATES} | {candidate.family for candidate in CANDIDATES}
    for name in names:
        if name not in known:
            raise UserError(f"There is no candidate {name!r}; --list names them.", field="only")
    return [candidate for candidate in CANDIDATES if {candidate.name, candidate.family} & set(names)]


def tiny_world(platform: str | None, dtype: Dtype | None, seed: int) -> World:
    """The tiny model of `engine.judge.tiny`, in fp32 unless told otherwise."""
    from engine.judge.bench import PairRule
    from engine.judge.effort import Effort
    from engine.judge.seats import Timeouts
    from engine.judge.tiny import read_limit, tiny

    model, where, precision = tiny(seed), platform or _best_platform(), dtype or "fp32"
    effort = Effort(
        source_forcing=4,
        rule=PairRule(3, 6, 12),
        repeats=1,
        probes=3,
        source_pool=2048,
        pool_growth=64,
        probe_prompts=4,
        variants=32,
        alone=3,
        floor_texts=3,
        stock_prompts=3,
        timeouts=Timeouts(build=120.0, first_answer=60.0, answer=5.0, patience=3.0),
    )
    return World(
        platform=where,
        dtype=precision,
        target=str(model.target),
        drafter=str(model.drafter),
        regime=Regime(max_prompt_tokens=128, max_new_tokens=20),
        effort=effort,
        has=_has(where, precision) | {"near-ties"},
        material=model.material(precision),
        read_limit=read_limit(precision),
        threads=1,  # a second one gains nothing at this size, and loses much while the next candidate starts
    )


def demo_world(platform: str | None, dtype: Dtype | None, seed: int) -> World:
    """SmolLM2 with its drafter and the shipped prompts."""
    from engine.judge.bench import PairRule
    from engine.judge.effort import Effort
    from engine.judge.seats import Timeouts

    where = platform or _best_platform()
    precision: Dtype = dtype or ("fp32" if where == "cpu" else "bf16")
    effort = Effort(
        source_forcing=4,
        rule=PairRule(3, 6, 12),
        repeats=1,
        variants=48,
        timeouts=Timeouts(answer=30.0),
    )
    near_ties: frozenset[Need] = frozenset({"near-ties"} if precision == "bf16" else ())
    regime = Regime(max_new_tokens=24)
    return World(where, precision, DEMO_TARGET, DEMO_DRAFTER, regime, effort, _has(where, precision) | near_ties)


def _has(platform: str, dtype: Dtype) -> frozenset[Need]:
    device: Need = "cpu" if platform == "cpu" else "gpu"
    return frozenset({device, "neural"}) | (frozenset({"fp32"}) if dtype == "fp32" else frozenset())


def _best_platform() -> str:
    from engine.hardware import best_platform

    return best_platform()


def judge_all(
    world: World,
    candidates: Sequence[Candidate],
    seed: int,
    folder: Path,
    progress: Callable[[str], None],
) -> Iterable[Outcome]:
    """Judge `candidates`, one after another, in one workbench for each regime; logs and caches go to `folder`."""
    numbers = {candidate.name: number for number, candidate in enumerate(CANDIDATES)}
    runnable = [candidate for candidate in candidates if not world.lacks(candidate)]
    for candidate in candidates:
        if lack := world.lacks(candidate):
            yield _outcome(candidate, "not run", reason=lack)
    for served in ("single", "batch", "sampled"):
        group = [candidate for candidate in runnable if candidate.served == served]
        if not group:
            continue
        with open_bench(world, served, seed, folder / served, progress) as bench:
            for candidate, following in zip(group, [*group[1:], None], strict=True):
                progress(f"{candidate.name} ({candidate.family})")
                yield _judge(bench, candidate, following, numbers[candidate.name], folder / served)


def open_bench(
    world: World, served: Served, seed: int, folder: Path, progress: Callable[[str], None] = lambda text: None
) -> Workbench:
    """The workbench of one regime: stock, the slow incumbent, and room for one candidate."""
    from engine.judge.workbench import BACKENDS, Workbench

    material = world.material
    return Workbench(
        world.deployment(served),
        folder,
        seed,
        lambda text: None,
        effort=world.effort,
        material=material,
        backend_for=lambda plan: INCUMBENT_SOURCE,
        stock=None if material is None else BACKENDS[material.drafter_kind],
        read_limit=world.read_limit,
        threads=world.threads,
    )


def _judge(bench: Workbench, candidate: Candidate, following: Candidate | None, number: int, folder: Path) -> Outcome:
    read = {log: log.stat().st_size for log in _logs(folder)}
    coming = None if following is None else following.reference
    for attempt in (1, 2):  # the machine may have been busy with something else
        last = attempt == 2
        try:
            judgement = bench.judge(
                number, candidate.plan, INCUMBENT, fresh=number, source=candidate.reference, following=coming
            )
            if last or not _disturbed(candidate, judgement):
                break
        except ChildError as failure:  # of stock or the incumbent
            if last:
                return _outcome(candidate, "judge failed", reason=failure.reason)
    written = b"".join(log.read_bytes()[read.get(log, 0) :] for log in _logs(folder)).decode(errors="replace")
    return assess(candidate, judgement, FOUND.findall(written) if _confined() else [])


def assess(candidate: Candidate, judgement: Judgement, found: Sequence[str]) -> Outcome:
    """Whether the judge was right. `found` are the lines in which a confined candidate says what it found: none."""
    expected = judgement.verdict in candidate.verdicts
    if _disturbed(candidate, judgement):
        status: Status = "not idle"
    elif not expected:
        status = "refused" if candidate.honest else "slipped through"
        if not candidate.honest and judgement.verdict != "accepted":
            status = "wrong reason"
    elif re.search(candidate.reason, judgement.reason, re.DOTALL) is None:
        status = "wrong reason"
    else:
        status = "leak" if found else "right"
    reason = judgement.reason if status != "leak" else f"{judgement.reason} It {found[0]}."
    return _outcome(candidate, status, judgement.verdict, reason, judgement)


def _disturbed(candidate: Candidate, judgement: Judgement) -> bool:
    """Whether something else than the candidate kept the machine busy: that says nothing of the judge."""
    found = NOT_IDLE.search(judgement.reason) is not None
    return found and judgement.verdict == "invalid" and re.search(candidate.reason, judgement.reason) is None


def _outcome(
    candidate: Candidate, status: Status, verdict: str = "", reason: str = "", judgement: Judgement | None = None
) -> Outcome:
    return Outcome(
        candidate.name,
        candidate.family,
        candidate.does,
        candidate.served,
        candidate.verdicts,
        status,
        verdict,
        reason,
        0.0 if judgement is None else judgement.seconds,
        judgement,
    )


def _logs(folder: Path) -> list[Path]:
    return sorted((folder / "children").glob("*.log"))


def _confined() -> bool:
    import os

    from engine.judge.confinement import UNCONFINED

    return os.environ.get(UNCONFINED) != "1"


def conclusion(outcomes: Sequence[Outcome]) -> str:
    """The count in one line."""
    parts = []
    for honest, words in ((False, "cheats rejected"), (True, "honest candidates accepted")):
        run = [outcome for outcome in outcomes if outcome.honest == honest and outcome.status != "not run"]
        parts.append(f"{sum(outcome.status == 'right' for outcome in run)}/{len(run)} {words}")
    return ", ".join(parts)


def _summary(world: World, outcomes: Sequence[Outcome], seed: int, seconds: float, passed: bool) -> dict[str, Any]:
    """The last line: figures, and a few words about every candidate."""
    power = _power(outcomes)
    return {
        "schema": 1,
        "command": "judge selftest",
        "passed": passed,
        "platform": world.platform,
        "dtype": world.dtype,
        "target": DEMO_TARGET if world.material is None else "tiny",
        "confined": _confined(),
        "seed": seed,
        "seconds": round(seconds, 1),
        "conclusion": conclusion(outcomes),
        "power": [to_json(line) for line in power],
        "outcomes": [
            {
                "name": o.name,
                "family": o.family,
                "status": o.status,
                "verdict": o.verdict,
                "seconds": round(o.seconds, 2),
            }
            for o in outcomes
        ],
    }


def _power(outcomes: Sequence[Outcome]) -> Sequence[Power]:
    """What the gate would have seen in the trial of the first honest candidate."""
    return next((o.judgement.forcing.power for o in outcomes if o.honest and o.judgement and o.judgement.forcing), ())


def _power_line(power: Sequence[Power]) -> str:
    if not power:
        return ""
    seen = "; ".join(f"{line.like} {100 * line.detected:.3g} %" for line in power)
    return f"Chance that one trial shows: {seen}.\n"


def _show(outcome: Outcome) -> None:
    marks = {"right": "accepted" if outcome.honest else "rejected"}
    mark = marks.get(outcome.status, outcome.status.upper() if outcome.status != "not run" else "not run")
    verdict = f"{outcome.verdict}: " if outcome.verdict else ""
    reason = outcome.reason.split("\n")[0] if outcome.status in ("right", "not run") else outcome.reason
    print(f"{outcome.family:9} {outcome.name:24} {outcome.does}\n{'':10}{mark:15} {verdict}{reason}", flush=True)


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="\r", file=sys.stderr, flush=True)
