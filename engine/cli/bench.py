"""Time autoregressive decoding: ours, plan by plan, against transformers' eager `generate`, side by side.

Every decoder lives in a process of its own and answers the same prompts in turn, in balanced order, on this process's
clock; prefill is included. The floor beside each time is the weights' bytes over this device's measured read
bandwidth. A plan whose text differs from stock's gets no ratio. JSON is the last line, and goes to --out, too.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from engine.cli.options import add_checkpoints, add_device, add_regime, deployment, positive, what_it_is
from engine.plan import Plan
from engine.sampling import Sampling

STOCK = "transformers"
PLANS = ("plain", "tuned", "compiled")
COLD_PROMPTS = 1
"""Prompts that are answered before the measured ones: first calls allocate, reorder and compile."""


def arguments(parser: argparse.ArgumentParser) -> None:
    add_checkpoints(parser)
    add_device(parser)
    add_regime(parser)
    parser.add_argument("--count", type=positive, default=6, metavar="N", help="prompts (default: %(default)s)")
    parser.add_argument(
        "--plans", nargs="+", choices=PLANS, default=PLANS, help="which of our plans (default: all that run here)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the prompts drawn (default: %(default)s)")
    parser.add_argument("--out", metavar="FILE", help="write the JSON here, too")


def run(options: argparse.Namespace) -> int:
    from engine.check import check_deployment
    from engine.hardware import probe
    from engine.judge.hidden import draw, prepare
    from engine.judge.seats import Seats, Timeouts
    from engine.levers import usable_cores

    served = deployment(options)
    facts = check_deployment(served, None)
    plans = autoregressive_plans(packed=facts.context.packed_gemm, compiled=facts.context.has_compiler)
    plans = {name: plan for name, plan in plans.items() if name in options.plans}
    hardware = probe(served.platform, served.dtype)
    material = prepare(served)
    cold, *prompts = draw(material.prompts, options.seed, 0, options.count + COLD_PROMPTS)
    samples: dict[str, list[float]] = {name: [] for name in (STOCK, *plans)}
    texts: dict[str, list[tuple[int, ...]]] = {name: [] for name in samples}
    threads = usable_cores()
    sampled = served.regime.temperature > 0
    with tempfile.TemporaryDirectory() as folder:
        seats = Seats(served, material, threads, Path(folder), len(samples), Timeouts())
        try:
            sides = {STOCK: seats.start(STOCK, STOCK, STOCK, None)}
            for name, plan in plans.items():
                sides[name] = seats.start(name, name, "engine", plan)
            described = {name: seat.ready() for name, seat in sides.items()}
            for seat in sides.values():
                seat.generate(cold.ids, served.regime.max_new_tokens)
            for number, prompt in enumerate(prompts):
                how = Sampling(served.regime.temperature, options.seed % (1 << 64), (number,)) if sampled else None
                for name in list(sides) if number % 2 == 0 else reversed(list(sides)):
                    reply = sides[name].generate(prompt.ids, served.regime.max_new_tokens, how)
                    samples[name].append(1e3 * reply.seconds / len(reply.text.ids))
                    texts[name].append(reply.text.ids)
        finally:
            seats.close()
    floor_ms = material.read_bytes / hardware.read_gb_s / 1e6
    rows = [
        _row(name, plan, samples, texts, floor_ms, str(described[STOCK]["implementation"]))
        for name, plan in plans.items()
    ]
    line = what_it_is(served.target)
    if line is not None:
        print(line)
    for row in rows:
        print(_line(row))
    result = {
        "schema": 1,
        "command": shlex.join(["python", "-m", "engine", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": {
            "name": hardware.name,
            "cores": hardware.cores,
            "threads": threads,
            "read_gb_s": hardware.read_gb_s,
            "matmul_gflop_s": hardware.matmul_gflop_s,
        },
        "versions": hardware.versions,
        "deployment": {
            "target": served.target,
            "dtype": served.dtype,
            "platform": served.platform,
            "temperature": served.regime.temperature,
            "note": line,
        },
        "rows": rows,
    }
    text = json.dumps(result)
    if options.out:
        Path(options.out).write_text(json.dumps(result, indent=1) + "\n")
    print(text)
    return 0


def autoregressive_plans(*, packed: bool, compiled: bool) -> dict[str, Plan]:
    """By name: the plain plan, one with the compute levers that this device offers, and that one compiled."""
    plain = Plan(source="none")
    tuned = plain.with_changes(
        {
            "gemm": "packed" if packed else "transposed",
            "fuse_qkv": True,
            "fuse_gate_up": True,
            "head_rows": "needed",
            "attention": "grouped",
        }
    )
    plans = {"plain": plain, "tuned": tuned}
    if compiled:
        plans["compiled"] = tuned.with_changes({"compile": True})
    return plans


def _row(
    name: str,
    plan: Plan,
    samples: dict[str, list[float]],
    texts: dict[str, list[tuple[int, ...]]],
    floor_ms: float,
    reference: str,
) -> dict[str, Any]:
    same = texts[name] == texts[STOCK]
    tokens = sum(map(len, texts[name]))
    return {
        "name": "autoregressive",
        "params": {"plan": name, "levers": plan.changes_from(Plan(source="none")), "digest": plan.digest},
        "unit": "ms per token, prefill included",
        "samples": {"candidate": samples[name], "reference": samples[STOCK]},
        "reference": reference,
        "floor": floor_ms,
        "checked": f"all {tokens} tokens of {len(texts[name])} texts equal the reference's" if same else None,
    }


def _line(row: dict[str, Any]) -> str:
    ours, theirs = (statistics.median(row["samples"][side]) for side in ("candidate", "reference"))
    ratio = statistics.median(b / a for a, b in zip(*row["samples"].values(), strict=True))
    gain = f"{ratio:.2f}x" if row["checked"] else "no ratio: its text differs"
    return (
        f"{row['params']['plan']:18}{ours:7.1f} ms/token ({1e3 / ours:.1f} tokens/s)   stock {theirs:.1f}   {gain}   "
        f"{100 * row['floor'] / ours:.0f} % of the byte floor ({row['floor']:.1f} ms)"
    )
