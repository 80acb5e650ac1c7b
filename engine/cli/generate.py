"""Decode one prompt with a tuned plan and print the text as it comes, then tokens/s and accept length.

With --bundle, target, drafter and plan are the bundle's (its checkpoints are checked by SHA-256, and found with
--target and --drafter where they lie elsewhere). Without, they are what the options name, with the default plan or
the one of --plan. The target's chat template is applied; --raw leaves it out. Decoding is greedy, or sampled with
--temperature above 0.
"""

from __future__ import annotations

import argparse
import dataclasses
import secrets
import sys
from typing import TYPE_CHECKING

from engine.cli.options import (
    add_checkpoints,
    add_device,
    deployment,
    positive,
    read_plan,
    reference,
    seed_number,
    temperature,
    what_it_is,
)
from engine.deployment import SHIPPED_PROMPTS
from engine.errors import UserError
from engine.sampling import Sampling

if TYPE_CHECKING:
    from engine.deployment import Deployment
    from engine.plan import Plan
    from engine.tokenizer import Tokenizer


DEFAULT_TOKENS = 128
"""Longest output without a bundle."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prompt", required=True, metavar="TEXT", help="what to say to the model; - reads it from stdin"
    )
    parser.add_argument("--bundle", metavar="FILE", help="a bundle that a search has written")
    parser.add_argument("--plan", metavar="FILE", help="a plan as JSON (see the command `plan`), without --bundle")
    add_checkpoints(parser)
    add_device(parser)
    parser.add_argument(
        "--max-new-tokens",
        type=positive,
        metavar="N",
        help=f"longest output (default: the bundle's, else {DEFAULT_TOKENS})",
    )
    parser.add_argument(
        "--temperature",
        type=temperature,
        metavar="T",
        help="0 is greedy decoding; above it, tokens are sampled (default: the bundle's, else 0)",
    )
    parser.add_argument(
        "--seed",
        type=seed_number,
        metavar="N",
        help="of sampling: the same seed gives the same text with any plan (default: a fresh one)",
    )
    parser.add_argument("--raw", action="store_true", help="encode the prompt as it is, without the chat template")
    parser.add_argument("--quiet", action="store_true", help="print the text only")


def run(options: argparse.Namespace) -> int:
    tuned, plan = _what_to_run(options)
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    if not prompt.strip():
        raise UserError("The prompt is empty; say something with --prompt.", field="prompt")
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise UserError("The prompt is not valid Unicode; give it as UTF-8.", field="prompt") from None

    from engine.generate import StopRule, build_decoder
    from engine.search.start import starting_plan
    from engine.tokenizer import load_tokenizer
    from engine.weights import open_checkpoint

    tokenizer = load_tokenizer(open_checkpoint(tuned.target))
    ids = tokenizer.encode(prompt) if options.raw else tokenizer.chat([{"role": "user", "content": prompt}])
    # The room that is needed is that of this one prompt, whatever the regime allows.
    tuned = dataclasses.replace(tuned, regime=dataclasses.replace(tuned.regime, max_prompt_tokens=max(1, len(ids))))
    plan = starting_plan(tuned, plan)

    decoder = build_decoder(tuned, plan)
    stream = _Stream(tokenizer)
    sampling = _sampling(tuned.regime.temperature, options.seed)
    result = decoder.generate(
        ids, tuned.regime.max_new_tokens, StopRule(tokenizer.eos_ids), on_tokens=stream.add, sampling=sampling
    )
    stream.end()
    if not options.quiet:
        steps = len(result.emitted_per_step)
        # The first token comes from the prompt's own pass; a rate of decoding leaves it and that pass out.
        decoded = sum(result.emitted_per_step)
        rate = decoded / result.decode_s if result.decode_s > 0 and decoded else 0.0
        print()
        print(f"tokens          {len(result.ids)} ({result.stop_reason})")
        print(f"tokens/s        {rate:.1f} decoding; prompt of {len(ids)} tokens in {result.prefill_s * 1e3:.0f} ms")
        accept = f"{decoded / steps:.2f}" if steps else "-"
        print(f"accept length   {accept} (emitted tokens per verify step, bonus token included; {steps} steps)")
        if sampling is not None:
            print(f"sampled         temperature {sampling.temperature:g}, seed {sampling.seed}")
        if (line := what_it_is(tuned.target)) is not None:
            print(line)
    return 0


def _sampling(temperature: float, seed: int | None) -> Sampling | None:
    if temperature == 0 and seed is not None:
        raise UserError("A seed changes nothing in greedy decoding; give --temperature above 0 with it.", field="seed")
    if temperature == 0:
        return None
    return Sampling(temperature, secrets.randbits(32) if seed is None else seed, (0,))


def _what_to_run(options: argparse.Namespace) -> tuple[Deployment, Plan | None]:
    """The deployment, and the plan where one is named."""
    if options.bundle is None:
        base = deployment(options)
        regime = dataclasses.replace(
            base.regime,
            max_new_tokens=options.max_new_tokens or DEFAULT_TOKENS,
            temperature=options.temperature or base.regime.temperature,
        )
        return dataclasses.replace(base, regime=regime), read_plan(options.plan) if options.plan else None
    if options.plan is not None:
        raise UserError("Give --bundle or --plan, not both: a bundle holds its own plan.", field="plan")
    from engine.bundle import locate_checkpoint, locate_drafter, read

    bundle = read(options.bundle)
    base = bundle.deployment
    # The bundle's own prompts are not read here, and need not be on this machine.
    regime = dataclasses.replace(
        base.regime,
        prompts=SHIPPED_PROMPTS,
        max_new_tokens=options.max_new_tokens or base.regime.max_new_tokens,
        temperature=base.regime.temperature if options.temperature is None else options.temperature,
    )
    tuned = dataclasses.replace(
        base,
        target=locate_checkpoint(bundle, options.target and reference(options.target)),
        drafter=locate_drafter(bundle, options.drafter and reference(options.drafter)),
        platform=options.platform or base.platform,
        dtype=options.dtype or base.dtype,
        regime=regime,
    )
    return tuned, bundle.plan


class _Stream:
    """Prints text while tokens arrive. A character may need several tokens, so what is printed is the decoded text
    of all of them, less what was printed before and less an unfinished character at the end."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._printed = ""

    def add(self, ids: list[int]) -> None:
        self._ids += [token for token in ids if token not in self._tokenizer.eos_ids]
        text = self._tokenizer.decode(self._ids)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            self._print(text)

    def end(self) -> None:
        self._print(self._tokenizer.decode(self._ids))
        print(flush=True)

    def _print(self, text: str) -> None:
        # A tokenizer may revise its last characters (clean-up of spaces); what was printed stays.
        if text.startswith(self._printed):
            print(text[len(self._printed) :], end="", flush=True)
            self._printed = text
