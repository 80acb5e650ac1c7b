"""List the levers of a plan: what each may be for a deployment on this machine, and which stages it touches.

Values in brackets are those of the plan itself: the initial one, or that of --plan. What is legal depends on the
rest of the plan, so a value that is missing here may be legal with another one.
"""

from __future__ import annotations

import argparse
import json

from engine.cli.options import add_checkpoints, add_device, add_regime, deployment, read_plan


def arguments(parser: argparse.ArgumentParser) -> None:
    add_checkpoints(parser)
    add_device(parser)
    add_regime(parser)
    parser.add_argument("--plan", metavar="FILE", help="list what is legal around this plan (JSON)")
    parser.add_argument("--json", action="store_true", help="print the list as JSON")


def run(options: argparse.Namespace) -> int:
    from engine.levers import LEVERS, legal_values
    from engine.search.start import lever_context, starting_plan

    tuned = deployment(options)
    plan = starting_plan(tuned, read_plan(options.plan) if options.plan else None)
    context = lever_context(tuned)
    rows = [
        {
            "lever": lever.name,
            "family": lever.family,
            "value": getattr(plan, lever.name),
            "legal": list(legal_values(lever, plan, context)),
            "stages": list(lever.stages),
        }
        for lever in LEVERS
    ]
    if options.json:
        print(json.dumps(rows, indent=2))
        return 0
    for row in rows:
        values = "  ".join(f"[{_show(v)}]" if v == row["value"] else _show(v) for v in row["legal"])
        print(f"{row['lever']:18}{values}")
        print(f"{'':18}family {row['family']}; touches {', '.join(row['stages'])}")
    return 0


def _show(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
