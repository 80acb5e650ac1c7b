"""Run the self-test many times, several at once on cores of their own, and say how often it passed.

Each run is a process of its own with a fresh seed, bound to `--cores` cores that no other run uses, so that runs do not
disturb each other's timing. JSON with the outcome of every candidate in every run is the last line, and goes to --out,
too. Exit status: 0 all runs passed, 1 one did not.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from engine.errors import UserError


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=int, default=20, metavar="N", help="how many (default: %(default)s)")
    parser.add_argument("--cores", type=int, default=2, metavar="N", help="cores of a run (default: %(default)s)")
    parser.add_argument("--out", metavar="FILE", help="write the JSON here, too")
    parser.add_argument("selftest", nargs="*", metavar="OPTION", help="options of the self-test, after --")


def run(options: argparse.Namespace) -> int:
    from engine.hardware import identify_device

    cores = sorted(os.sched_getaffinity(0))
    if not 1 <= options.cores <= len(cores) or options.runs < 1:
        raise UserError(f"This machine has {len(cores)} usable cores; ask for at least one run on at most so many.")
    groups = [cores[i : i + options.cores] for i in range(0, len(cores) - options.cores + 1, options.cores)]
    rows = repeat(options.runs, groups, lambda group: selftest(options.selftest, group), _say)
    facts = identify_device("cpu")
    passed = sum(row["passed"] for row in rows)
    wrong = Counter(outcome["name"] for row in rows for outcome in row["wrong"])
    result = {
        "schema": 1,
        "command": shlex.join(["python", "-m", "engine", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": {"name": facts.name, "cores": facts.cores, "runs_at_once": len(groups), "cores_a_run": options.cores},
        "versions": facts.versions,
        "passed": passed,
        "wrong": dict(wrong),
        "rows": rows,
    }
    print(f"{passed}/{len(rows)} runs passed" + (f"; judged wrongly: {dict(wrong)}" if wrong else ""))
    if options.out:
        Path(options.out).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0 if passed == len(rows) else 1


def repeat(
    runs: int,
    groups: list[list[int]],
    once: Callable[[list[int]], dict[str, Any]],
    said: Callable[[int, dict[str, Any]], None] = lambda number, row: None,
) -> list[dict[str, Any]]:
    """`once(cores)` `runs` times, as many at once as there are groups of cores; rows in the order of their numbers."""
    free: queue.Queue[list[int]] = queue.Queue()
    for group in groups:
        free.put(group)

    def take(number: int) -> dict[str, Any]:
        group = free.get()
        try:
            row = once(group)
        finally:
            free.put(group)
        said(number, row)
        return row

    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(take, range(1, runs + 1)))


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


def _say(number: int, row: dict[str, Any]) -> None:
    wrong = "".join(f"; {outcome['name']} {outcome['status']}: {outcome['reason']}" for outcome in row["wrong"])
    print(
        f"run {number}: {'passed' if row['passed'] else 'FAILED'}, {row['conclusion']}, {row['wall_s']} s{wrong}",
        flush=True,
    )
