"""Search for the fastest lossless plan of a deployment (target + drafter + regime + platform).

Without options this is the demo: SmolLM2-135M-Instruct with the shipped DFlash drafter on this machine's best
device. Rounds of profile, proposals, judged trials, confirmation and merge follow each other until the budget is
spent or nothing more is to gain. What is found is written as a bundle, beside the search's events (events.jsonl).

Ctrl-C once cancels in good order (with a bundle, where there is a better plan); twice leaves at once. A search that
was left or killed goes on with --resume FOLDER and loses at most the trial in flight.

Exit status: 0 a bundle was written, 1 none was, 2 bad input, 130 cancelled or left by Ctrl-C.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from engine.cli.options import (
    add_checkpoints,
    add_device,
    add_regime,
    deployment,
    positive,
    read_plan,
    seconds,
    what_it_is,
)
from engine.errors import UserError
from engine.search.events import Budget

_BUDGET = Budget()
_INTERRUPTED = 130


def arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("deployment")
    add_checkpoints(what)
    add_device(what)
    add_regime(what)
    how = parser.add_argument_group("search")
    how.add_argument("--plan", metavar="FILE", help="start from this plan (JSON) instead of the initial one")
    how.add_argument(
        "--seconds",
        type=seconds,
        default=_BUDGET.seconds,
        metavar="S",
        help="time budget (default: %(default)g); what is being measured when it runs out is finished first, and the "
        "starting plan is always judged and compared with stock",
    )
    how.add_argument(
        "--trials",
        type=positive,
        default=_BUDGET.trials,
        metavar="N",
        help="judged candidates at most, confirmations and merges among them, the starting plan not "
        "(default: %(default)s)",
    )
    how.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts and proposals (default: %(default)s)")
    how.add_argument(
        "--out", metavar="FOLDER", help="where events and bundle go (default: a new one in the data folder)"
    )
    how.add_argument(
        "--resume", metavar="FOLDER", help="go on with the search in this folder; other options are its own"
    )


def run(options: argparse.Namespace) -> int:
    from engine.search.console import open_screen
    from engine.search.journal import EVENTS
    from engine.search.run import resume, search

    if options.resume is not None:
        if options.out is not None:
            raise UserError("Give --out for a new search or --resume for an old one, not both.", field="out")
        folder = Path(options.resume)
    else:
        folder = Path(options.out) if options.out is not None else _new_folder()
    try:
        if options.resume is not None:
            state = resume(folder, open_screen())
        else:
            budget = Budget(seconds=options.seconds, trials=options.trials)
            plan = read_plan(options.plan) if options.plan else None
            state = search(deployment(options), budget, options.seed, folder, open_screen(), plan)
    except KeyboardInterrupt:
        if not (folder / EVENTS).exists():  # before the search began
            raise
        print(f"\nLeft. Go on with: python -m engine search --resume {folder}", file=sys.stderr)
        return _INTERRUPTED
    if state.finished is None:
        raise AssertionError("a shell returned before its search had ended")
    if (line := what_it_is(state.deployment.target)) is not None:
        print(line)
    print(f"Events: {folder / EVENTS}")
    if state.bundle is not None:
        bundle = folder / state.bundle.file
        print(f"Bundle: {bundle}")
        print(f'Run it:    python -m engine generate --bundle {bundle} --prompt "Why is the sky blue?"')
        print(f"Verify it: python -m engine verify --bundle {bundle}")
    if state.finished.reason == "cancelled":
        return _INTERRUPTED
    return 0 if state.bundle is not None else 1


def _new_folder() -> Path:
    """A folder of the data folder that is named by the time and does not exist yet."""
    from engine.paths import searches_dir

    stem = searches_dir() / time.strftime("%Y%m%d-%H%M%S")
    folder, number = stem, 1
    while folder.exists():
        number += 1
        folder = stem.with_name(f"{stem.name}-{number}")
    return folder
