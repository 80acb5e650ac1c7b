"""Print a plan as JSON, for `generate --plan` and `search --plan`.

It is the bundle's with --bundle, that of a file with --plan, else the one that a search of the deployment would start
from; --set changes levers. The result is checked for the deployment before it is printed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from engine.cli.options import add_checkpoints, add_device, add_regime, deployment, read_plan, reference
from engine.errors import UserError


def arguments(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--bundle", metavar="FILE", help="take the plan of this bundle")
    source.add_argument("--plan", metavar="FILE", help="take the plan of this JSON file")
    parser.add_argument(
        "--set", action="append", default=[], metavar="LEVER=VALUE", help="change a lever; may be given several times"
    )
    add_checkpoints(parser)
    add_device(parser)
    add_regime(parser)


def run(options: argparse.Namespace) -> int:
    from engine.search.start import starting_plan

    if options.bundle:
        from engine.bundle import locate_checkpoint, locate_drafter, read

        bundle = read(options.bundle)
        tuned = dataclasses.replace(
            bundle.deployment,
            target=locate_checkpoint(bundle, options.target and reference(options.target)),
            drafter=locate_drafter(bundle, options.drafter and reference(options.drafter)),
            platform=options.platform or bundle.deployment.platform,
        )
        plan = bundle.plan
    else:
        tuned = deployment(options)
        plan = starting_plan(tuned, read_plan(options.plan) if options.plan else None)
    changed = plan.with_changes(dict(_change(text) for text in options.set))
    starting_plan(tuned, changed)
    print(json.dumps(changed.to_json(), indent=2))
    return 0


def _change(text: str) -> tuple[str, Any]:
    """LEVER=VALUE; the value is JSON where it can be (numbers, true, false), else a word."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise UserError(f"--set {text} is not of the form LEVER=VALUE.", field="plan")
    value = value.strip()
    if name.strip() == "verify_widths":  # its values are words, some of them digits
        return name.strip(), value
    try:
        return name.strip(), json.loads(value)
    except (ValueError, RecursionError):
        return name.strip(), value
