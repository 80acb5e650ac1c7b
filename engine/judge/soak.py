"""Run the self-test many times, several at once on cores of their own, and say how often it passed.

Each run is a process of its own with a fresh seed, bound to `--cores` cores that no other run uses, so that runs do not
disturb each other's timing. With `--split N` a run's candidates are dealt out to N such processes, which share its
seed: on a machine of many cores a run then takes a fraction of the time.

JSON with the outcome of every candidate in every run is the last line, and goes to --out, too, where it grows run by
run, so that what was measured outlives an interruption. Exit status: 0 all runs passed, 1 one did not.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import secrets
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from engine.archive import write_atomically
from engine.errors import UserError
from engine.judge.selftest import SEED_BITS, choose


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=int, default=20, metavar="N", help="how many (default: %(default)s)")
    parser.add_argument("--cores", type=int, default=2, metavar="N", help="cores of a process (default: %(default)s)")
    parser.add_argument(
        "--split", type=int, default=1, metavar="N", help="processes that share a run (default: %(default)s)"
    )
    parser.add_argument("--out", metavar="FILE", help="write the JSON here, too")
    parser.add_argument("selftest", nargs="*", metavar="OPTION", help="options of the self-test, after --")


def run(options: argparse.Namespace) -> int:
    from engine.hardware import identify_device

    names = [candidate.name for candidate in choose(None)]
    cores = sorted(os.sched_getaffinity(0))
    if not 1 <= options.cores <= len(cores) or options.runs < 1:
        raise UserError(f"This machine has {len(cores)} usable cores; ask for at least one run on at most so many.")
    groups = [cores[i : i + options.cores] for i in range(0, len(cores) - options.cores + 1, options.cores)]
    if not 1 <= options.split <= len(names):
        raise UserError(f"A run has {len(names)} candidates, for 1 to {len(names)} processes.", field="split")
    if options.out is not None and not Path(options.out).absolute().parent.is_dir():
        raise UserError(f"There is no folder for the file {options.out}.", field="out")
    if options.split > 1 and any(option.startswith(("--only", "--seed")) for option in options.selftest):
        raise UserError("--split deals out all candidates under one seed: leave out --only and --seed.", field="split")
    parts = deal(options.selftest, options.runs, names, options.split)
    facts = identify_device("cpu")
    frame = {
        "schema": 1,
        "command": shlex.join(["python", "-m", "engine", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": {
            "name": facts.name,
            "cores": facts.cores,
            "processes_at_once": len(groups),
            "cores_a_process": options.cores,
        },
        "versions": facts.versions,
        "runs": options.runs,
    }
    rows: list[dict[str, Any] | None] = [None] * len(parts)
    lock = threading.Lock()

    def said(number: int, row: dict[str, Any]) -> None:
        with lock:
            rows[number] = row
            _say(number, options.split, row)
            if options.out:
                found = json.dumps(frame | count(rows, names, options.split), indent=1)
                write_atomically(Path(options.out), found.encode() + b"\n")

    repeat(parts, groups, selftest, said)
    counted = count(rows, names, options.split)
    wrong = counted["wrong"]
    print(f"{counted['passed']}/{options.runs} runs passed" + (f"; judged wrongly: {wrong}" if wrong else ""))
    print(json.dumps(frame | counted))
    return 0 if counted["passed"] == options.runs else 1


def count(rows: Sequence[dict[str, Any] | None], names: Sequence[str], split: int) -> dict[str, Any]:
    """What the runs that are complete have found. `rows` are those of the processes, None where one still runs."""
    runs = []
    for first in range(0, len(rows), split):
        parts = [row for row in rows[first : first + split] if row is not None]
        if len(parts) == split:
            runs.append(join(parts, names) if split > 1 else parts[0])
    wrong = Counter(outcome["name"] for row in runs for outcome in row["wrong"])
    return {"passed": sum(row["passed"] for row in runs), "wrong": dict(wrong), "rows": runs}


def deal(arguments: list[str], runs: int, names: Sequence[str], split: int) -> list[list[str]]:
    """The self-test's arguments of each process, `split` of them in a row for each run. Every `split`-th candidate goes
    to the same one: slow ones stand together in a family."""
    if split == 1:
        return [arguments] * runs
    seeds = [str(secrets.randbits(SEED_BITS)) for _ in range(runs)]
    return [[*arguments, "--seed", seed, "--only", *names[first::split]] for seed in seeds for first in range(split)]


def join(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """One run of the processes that shared it. `seconds` are all of theirs together, `wall_s` those of the slowest."""
    order = {name: place for place, name in enumerate(names)}
    return {
        **rows[0],
        "passed": all(row["passed"] for row in rows),
        "status": max(row["status"] for row in rows),
        "conclusion": "; ".join(row["conclusion"] for row in rows),
        "seconds": round(sum(row.get("seconds", 0.0) for row in rows), 1),
        "wall_s": max(row["wall_s"] for row in rows),
        "outcomes": sorted((o for row in rows for o in row["outcomes"]), key=lambda o: order[o["name"]]),
        "wrong": [outcome for row in rows for outcome in row["wrong"]],
    }


def repeat(
    parts: Sequence[list[str]],
    groups: list[list[int]],
    once: Callable[[list[str], list[int]], dict[str, Any]],
    said: Callable[[int, dict[str, Any]], None],
) -> None:
    """`said(number, once(part, cores))` for every part, as many at once as there are groups of cores."""
    free: queue.Queue[list[int]] = queue.Queue()
    for group in groups:
        free.put(group)

    def take(number: int, part: list[str]) -> None:
        group = free.get()
        try:
            row = once(part, group)
        finally:
            free.put(group)
        said(number, row)

    with ThreadPoolExecutor(len(groups)) as pool:
        list(pool.map(take, range(len(parts)), parts))  # the list raises what a thread raised


def selftest(arguments: list[str], cores: list[int]) -> dict[str, Any]:
    """One self-test on these cores: its summary, and all that is known of what it judged wrongly."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(len(cores)), "MKL_NUM_THREADS": str(len(cores))}
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="specpilot-soak-") as folder:
        evidence = Path(folder) / "selftest.json"
        command = [sys.executable, "-m", "engine", "judge", "selftest", *arguments, "--json", str(evidence)]
        done = subprocess.run(
            ["taskset", "-c", ",".join(map(str, cores)), *command], capture_output=True, text=True, env=environment
        )
        try:
            row: dict[str, Any] = json.loads(evidence.read_bytes())
        except (OSError, ValueError):
            row = {"passed": False, "conclusion": "it gave no result", "outcomes": [], "written": done.stderr[-2000:]}
    outcomes = row.pop("outcomes")
    return {
        **row,
        "status": done.returncode,
        "wall_s": round(time.perf_counter() - start, 1),
        "outcomes": [{name: o[name] for name in ("name", "status", "verdict", "seconds")} for o in outcomes],
        "wrong": [o for o in outcomes if o["status"] not in ("right", "not run")],
    }


def _say(number: int, split: int, row: dict[str, Any]) -> None:
    wrong = "".join(f"; {outcome['name']} {outcome['status']}: {outcome['reason']}" for outcome in row["wrong"])
    which = f"run {number // split + 1}" + (f", part {number % split + 1}" if split > 1 else "")
    print(
        f"{which}: {'passed' if row['passed'] else 'FAILED'}, {row['conclusion']}, {row['wall_s']} s{wrong}", flush=True
    )
