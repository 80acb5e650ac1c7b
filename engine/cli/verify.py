"""Measure and token-force a bundle again on this machine, and say whether its claim holds here.

Every token of the bundle's plan is compared with unmodified stock's choice on the same text, and the plan is timed
side by side with both stock baselines, exactly as the search did it, on prompts drawn afresh. The claim holds when

  - no token is an error, and near-ties are within the measured noise floor, and
  - for each stock baseline that the bundle claims to beat, the measured interval is clear of 1.0, and
  - the measured speedup is at most --tolerance under the claimed one.

Exit status: 0 it holds, 1 it does not, 2 bad input.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import secrets
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.bundle import Bundle, locate_checkpoint, locate_drafter, read, speedup
from engine.cli.options import absolute, reference, what_it_is
from engine.codec import to_json
from engine.errors import ChildError, UserError

if TYPE_CHECKING:
    from engine.deployment import Deployment
    from engine.judge.report import Comparison, Judgement, Verdict
    from engine.search.events import IncumbentChanged

BASELINES = (
    ("over_autoregressive", "stock autoregressive decoding"),
    ("over_speculative", "stock speculative decoding"),
)

FORCED = 6
"""Prompts that are token-forced before anything is timed; the timed texts are forced as well."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bundle", required=True, metavar="FILE", help="a bundle that a search has written")
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help="your own traffic, as JSONL with `prompt` or `turns` (default: the bundle's)",
    )
    parser.add_argument("--target", metavar="PATH", help="where the target's checkpoint lies on this machine")
    parser.add_argument("--drafter", metavar="PATH", help="where the drafter's checkpoint lies on this machine")
    parser.add_argument("--platform", metavar="DEVICE", help="cpu, cuda:0, ... (default: the bundle's)")
    parser.add_argument(
        "--tolerance",
        type=_share,
        default=0.25,
        metavar="SHARE",
        help="how far under the claimed speedup the measured one may be, for machines and prompts differ "
        "(default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="decides which prompts are drawn (default: a fresh draw)")
    parser.add_argument("--json", action="store_true", help="print the measurements as JSON instead of sentences")


def run(options: argparse.Namespace) -> int:
    bundle = read(options.bundle)
    if bundle.claim is None:
        raise UserError("This bundle claims no speedup over stock, so there is nothing to verify.", field="bundle")
    deployment = _here(bundle, options)

    from engine.check import check_deployment

    check_deployment(deployment, bundle.plan)
    judgement, standing = _measure(deployment, bundle, options)
    holds, sentence = conclude(bundle.evidence.standing, judgement, standing, options.tolerance)
    if options.json:
        answer: dict[str, Any] = {
            "holds": holds,
            "sentence": sentence,
            "deployment": to_json(deployment),
            "judgement": to_json(judgement),
            "standing": None if standing is None else to_json(standing),
        }
        print(json.dumps(answer, indent=2))
    else:
        for line in _report(bundle, judgement, standing):
            print(line)
        if (about := what_it_is(deployment.target)) is not None:
            print(about)
        print(sentence)
    return 0 if holds else 1


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share from 0 to under 1")
    return value


def _here(bundle: Bundle, options: argparse.Namespace) -> Deployment:
    """The bundle's deployment with its checkpoints and prompts as they lie on this machine."""
    base = bundle.deployment
    prompts = absolute(options.prompts) if options.prompts else base.regime.prompts
    if options.prompts is None and prompts != "shipped" and not Path(prompts).is_file():
        raise UserError(
            f"The bundle was made with the prompts of {prompts}, which is not here; name a file with --prompts.",
            field="prompts",
        )
    return dataclasses.replace(
        base,
        target=locate_checkpoint(bundle, options.target and reference(options.target)),
        drafter=locate_drafter(bundle, options.drafter and reference(options.drafter)),
        platform=options.platform or base.platform,
        regime=dataclasses.replace(base.regime, prompts=prompts),
    )


def _measure(
    deployment: Deployment, bundle: Bundle, options: argparse.Namespace
) -> tuple[Judgement, IncumbentChanged | None]:
    """Judge the plan, then time it side by side with stock; the timing is left out where it is not lossless.

    Raises ChildError where stock fails; a failing plan is a verdict.
    """
    from engine.judge.effort import Effort
    from engine.judge.report import Judgement
    from engine.judge.workbench import INCUMBENT, Workbench

    seed = options.seed if options.seed is not None else secrets.randbelow(2**31)
    trial = bundle.evidence.standing.trial
    with (
        tempfile.TemporaryDirectory(prefix="specpilot-verify-") as folder,
        Workbench(deployment, Path(folder), seed, _progress, effort=Effort(forcing_prompts=FORCED)) as bench,
    ):
        judgement = bench.judge(trial, bundle.plan, None, fresh=0)
        if judgement.verdict != "accepted":
            return judgement, None
        try:
            return judgement, bench.standing(bundle.plan, trial, 1.0, True)
        except ChildError as failure:
            if getattr(failure, "role", "") != INCUMBENT:
                raise
            verdict: Verdict = "crashed" if failure.kind == "crashed" else "invalid"
            return Judgement(verdict, failure.reason, forcing=judgement.forcing), None


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def conclude(
    claim: IncumbentChanged, judgement: Judgement, standing: IncumbentChanged | None, tolerance: float
) -> tuple[bool, str]:
    """Whether the claim holds, and the sentence that says so."""
    if standing is None:
        return False, f"The claim does not hold here: the plan was judged {judgement.verdict} ({judgement.reason})."
    missed: list[str] = []
    reached: list[str] = []
    for key, name in BASELINES:
        claimed: Comparison | None = getattr(claim, key)
        measured: Comparison | None = getattr(standing, key)
        if claimed is None or claimed.low <= 1.0:
            continue
        wanted = f"claimed {claimed.ratio:.2f}x"
        if measured is None:
            missed.append(f"it could not be compared with {name}")
        elif measured.low <= 1.0:
            missed.append(f"it is not clearly faster than {name}: {speedup(measured)}, {wanted}")
        elif measured.ratio < claimed.ratio * (1 - tolerance):
            missed.append(f"it is faster than {name}, but short of the claim: {speedup(measured)}, {wanted}")
        else:
            reached.append(f"{speedup(measured)} over {name}, {wanted}")
    if missed:
        return False, f"The claim does not hold here: the plan is lossless, but {'; and '.join(missed)}."
    if not reached:
        return (
            False,
            "The claim does not hold here: the bundle claims no speedup whose interval is clear of 1.0.",
        )
    return True, f"The claim holds here: the plan is lossless and reaches {'; and '.join(reached)}."


def _report(bundle: Bundle, judgement: Judgement, standing: IncumbentChanged | None) -> list[str]:
    """Measured against claimed, line by line."""
    forcing = judgement.forcing
    lines = []
    if forcing is not None:
        lines.append(
            f"token forcing   {forcing.tokens} tokens: {forcing.exact} exact, {forcing.near_tie} near-ties "
            f"(limit {forcing.near_tie_limit}), {forcing.error} errors; {forcing.free_run_equal} of "
            f"{forcing.free_run_prompts} texts equal stock's own"
        )
        if forcing.first is not None:
            first = forcing.first
            kind = "near-tie" if first.near_tie else "error"
            lines.append(
                f"first difference  prompt {first.prompt}, token {first.position}: {first.candidate_text!r} for "
                f"stock's {first.stock_text!r}, logit gap {first.logit_gap:.2g} ({kind})"
            )
    for key, name in (*BASELINES, ("over_own_autoregressive", "our own autoregressive decoding")):
        claimed: Comparison | None = getattr(bundle.evidence.standing, key)
        measured: Comparison | None = getattr(standing, key) if standing is not None else None
        if claimed is not None and measured is not None:
            lines.append(f"over {name}: {speedup(measured)}; claimed {speedup(claimed)}")
    if judgement.accept_length is not None:
        lines.append(f"accept length   {judgement.accept_length:.2f} (emitted tokens per verify step, bonus included)")
    return lines
