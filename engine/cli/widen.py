"""Write a wider checkpoint that computes the same: real text at the memory traffic of a larger model.

Hidden size, heads and MLP units are repeated FACTOR times and the weights that read them divided by it, so the wide
model writes the narrow one's text up to the order of its sums. A DFlash drafter is widened with it. OUT/target and
OUT/drafter are Hugging Face folders, for any command's --target and --drafter.
"""

from __future__ import annotations

import argparse
import sys

from engine.cli.options import add_checkpoints, reference
from engine.deployment import DEMO_DRAFTER, DEMO_TARGET, NO_DRAFTER
from engine.paths import user_path
from engine.widen import FACTORS


def arguments(parser: argparse.ArgumentParser) -> None:
    add_checkpoints(parser)
    parser.add_argument("--factor", type=int, choices=FACTORS, default=8, help="how much wider (default: %(default)s)")
    parser.add_argument(
        "--dtype", choices=("bf16", "fp32"), default="bf16", help="of the weights (default: %(default)s)"
    )
    parser.add_argument("--out", metavar="FOLDER", required=True, help="a new folder")


def run(options: argparse.Namespace) -> int:
    from engine import widen
    from engine.check import check_dflash
    from engine.config import DraftConfig
    from engine.drafters.reference import open_drafter
    from engine.errors import UserError
    from engine.weights import open_checkpoint

    name = reference(options.target) if options.target is not None else DEMO_TARGET
    given = options.drafter if options.drafter is not None else DEMO_DRAFTER if name == DEMO_TARGET else NO_DRAFTER
    target, drafter = open_checkpoint(name), open_drafter(reference(given))
    target.check()
    if drafter.kind == "draft_model":
        raise UserError(
            f"{given} is a draft model, which does not depend on its target's width: use it as it is, or widen it as a "
            "target of its own.",
            code="drafter-unsupported",
            field="drafter",
        )
    if drafter.checkpoint is not None and isinstance(drafter.config, DraftConfig):
        check_dflash(given, drafter.checkpoint, drafter.config, target.config)
    out = user_path(options.out, field="out").absolute()
    with widen.new_folder(out) as part:
        wide = widen.write_target(target, options.factor, options.dtype, part / "target", _progress)
        counts = {"target": wide.parameters}
        if drafter.checkpoint is not None and isinstance(drafter.config, DraftConfig):
            own = widen.write_drafter(
                drafter.checkpoint,
                drafter.config,
                target.config,
                options.factor,
                options.dtype,
                part / "drafter",
                _progress,
            )
            counts["drafter"] = (
                own.num_layers * own.layer_parameters + len(drafter.config.target_layer_ids) * own.hidden_size**2
            )
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)
    for part_name, parameters in counts.items():
        print(f"{out / part_name}: {parameters / 1e9:.3g} billion parameters")
    print(f"Figures of these are of a model {widen.is_widened(out / 'target')}.")
    return 0


def _progress(name: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{name}", end="", file=sys.stderr, flush=True)
