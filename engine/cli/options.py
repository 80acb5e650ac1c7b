"""Options that several commands share, and what they mean."""

from __future__ import annotations

import argparse
import json
from typing import Any

from engine.deployment import DEMO_DRAFTER, DEMO_TARGET, NO_DRAFTER, SHIPPED_PROMPTS, Deployment, Dtype, Regime
from engine.errors import UserError
from engine.paths import user_path
from engine.plan import Plan
from engine.sampling import MAX_TEMPERATURE

_DEFAULTS = Regime()


def positive(text: str) -> int:
    """An argparse type: a whole number above 0."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return value


def seconds(text: str) -> float:
    """An argparse type: a number of seconds above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def temperature(text: str) -> float:
    """An argparse type: a temperature, 0 for greedy decoding."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= MAX_TEMPERATURE:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a temperature from 0, greedy decoding, to {MAX_TEMPERATURE:g}"
        )
    return value


def seed_number(text: str) -> int:
    """An argparse type: a seed of sampling, a whole number of at most 64 bits."""
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not 0 <= value < 1 << 64:
        raise argparse.ArgumentTypeError(f"{text!r} is not a seed: a whole number from 0 to 2**64 - 1")
    return value


def add_checkpoints(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--target",
        metavar="PATH",
        help="the model being served: a Hugging Face folder (safetensors) or a .gguf file of a Llama, Qwen2 or Qwen3 "
        f"architecture (default: {DEMO_TARGET}, which is shipped)",
    )
    parser.add_argument(
        "--drafter",
        metavar="PATH",
        help=f"what proposes tokens: a DFlash folder, a small checkpoint with the same tokenizer, or {NO_DRAFTER!r}, "
        f"which needs no checkpoint (default: {DEMO_DRAFTER} for the demo target, else {NO_DRAFTER})",
    )


def add_device(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--platform", metavar="DEVICE", help="cpu, cuda:0, ... (default: this machine's best device)")
    parser.add_argument(
        "--dtype",
        choices=("fp32", "bf16"),
        help="precision of weights and activations (default: fp32 on cpu, else bf16)",
    )


def add_regime(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--max-new-tokens",
        type=positive,
        default=_DEFAULTS.max_new_tokens,
        metavar="N",
        help="longest output, in tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--max-prompt-tokens",
        type=positive,
        default=_DEFAULTS.max_prompt_tokens,
        metavar="N",
        help="longest prompt, in tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--temperature",
        type=temperature,
        default=_DEFAULTS.temperature,
        metavar="T",
        help="0 is greedy decoding; above it, up to 2, tokens are sampled from softmax(logits / T) (default: "
        "%(default)g)",
    )
    parser.add_argument(
        "--prompts",
        default=SHIPPED_PROMPTS,
        metavar="FILE",
        help="the traffic: a JSONL file with a `prompt` or `turns` a line (default: the shipped set)",
    )


def deployment(options: argparse.Namespace) -> Deployment:
    """The deployment that the options name, in the default regime where they name none. Nothing is checked yet."""
    target = reference(options.target) if options.target is not None else DEMO_TARGET
    if options.drafter is not None:
        drafter = reference(options.drafter)
    else:
        drafter = DEMO_DRAFTER if target == DEMO_TARGET else NO_DRAFTER
    platform = options.platform if options.platform is not None else _best_platform()
    dtype: Dtype = options.dtype if options.dtype is not None else ("fp32" if platform == "cpu" else "bf16")
    served = regime(options) if "max_prompt_tokens" in options else _DEFAULTS
    return Deployment(target=target, drafter=drafter, regime=served, platform=platform, dtype=dtype)


def what_it_is(target: str) -> str | None:
    """One line to print beside figures of a widened target, or None for any other."""
    from engine.widen import is_widened

    line = None if target.startswith("demo:") else is_widened(user_path(target, field="target"))
    return None if line is None else f"Target: {line}."


def regime(options: argparse.Namespace) -> Regime:
    """The regime that the options of `add_regime` name."""
    prompts = options.prompts if options.prompts == SHIPPED_PROMPTS else absolute(options.prompts)
    return Regime(
        max_prompt_tokens=options.max_prompt_tokens,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        prompts=prompts,
    )


def reference(text: str) -> str:
    """A checkpoint's name as a deployment holds it: paths absolute, so that a search can be resumed from anywhere."""
    if text == NO_DRAFTER or text.startswith("demo:"):
        return text
    return absolute(text)


def absolute(text: str) -> str:
    return str(user_path(text, field="").resolve())


def read_plan(path: str) -> Plan:
    """The plan in a JSON file; levers that it leaves out have their default."""
    return Plan.from_json(read_json(path, "plan"))


def read_json(path: str, what: str) -> Any:
    try:
        file = user_path(path, field=what)
        if file.exists() and not file.is_file():
            raise UserError(f"The {what} file {path} is not a file.", field=what)
        return json.loads(file.read_text())
    except OSError as error:
        raise UserError(f"The {what} file {path} cannot be read: {error.strerror}.", field=what) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"The {what} file {path} is not JSON: {error}.", field=what) from None


def _best_platform() -> str:
    from engine.hardware import best_platform

    return best_platform()
