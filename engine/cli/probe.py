"""Measure this device: how fast it reads memory, and how fast it multiplies matrices.

Every ceiling that a search compares with is computed from these two figures. They are measured once and kept in
the data folder; --refresh measures again. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import json

from engine.cli.options import add_device
from engine.deployment import Dtype


def arguments(parser: argparse.ArgumentParser) -> None:
    add_device(parser)
    parser.add_argument("--refresh", action="store_true", help="measure again, even where a measurement is kept")
    parser.add_argument("--json", action="store_true", help="print everything that was measured, as JSON")


def run(options: argparse.Namespace) -> int:
    from engine.hardware import best_platform, probe

    platform = options.platform or best_platform()
    dtype: Dtype = options.dtype or ("fp32" if platform == "cpu" else "bf16")
    profile = probe(platform, dtype, refresh=options.refresh)
    if options.json:
        print(json.dumps(dataclasses.asdict(profile), indent=2))
        return 0
    rows = (
        ("device", f"{profile.name} ({profile.device})"),
        ("cores", f"{profile.cores}"),
        ("memory", f"{profile.memory_bytes / 2**30:.1f} GiB, {profile.free_bytes / 2**30:.1f} GiB free"),
        ("last-level cache", f"{profile.llc_bytes / 2**20:.1f} MiB"),
        ("read bandwidth", f"{profile.read_gb_s:.1f} GB/s"),
        ("matrix rate", f"{profile.matmul_gflop_s:.0f} GFLOP/s in {profile.dtype}"),
    )
    for name, value in rows:
        print(f"{name:18}{value}")
    return 0
