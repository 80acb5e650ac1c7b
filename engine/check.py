"""Every reason why a deployment cannot be served, found before any time is spent on it.

Reads metadata only: headers, configurations, tokenizers. Imports torch only to ask about a GPU or a packed GEMM.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from engine.config import DraftConfig, ModelConfig
from engine.costs import memory_estimate
from engine.deployment import Deployment, Regime
from engine.drafters import dflash_config
from engine.drafters.reference import DrafterKind, DrafterReference, blame, open_drafter
from engine.errors import UserError
from engine.hardware import host_memory
from engine.levers import LeverContext, check_plan, context_for, initial_plan
from engine.plan import Plan
from engine.sampling import MAX_TEMPERATURE
from engine.weights import Checkpoint, open_checkpoint


@dataclass(frozen=True)
class Facts:
    """What a checked deployment is. `memory_bytes` is what one process that serves the plan needs, `free_bytes`
    what the platform has left."""

    target: ModelConfig
    drafter_kind: DrafterKind
    drafter: DraftConfig | ModelConfig | None
    context: LeverContext
    memory_bytes: int
    free_bytes: int

    @property
    def block_size(self) -> int:
        """A block drafter's block, anchor included; 0 where there is none."""
        return self.drafter.block_size if isinstance(self.drafter, DraftConfig) else 0


def check_deployment(deployment: Deployment, plan: Plan | None) -> Facts:
    """Check regime, platform, target, drafter, plan and memory, in this order.

    Without a plan, memory is checked for the one that a search starts from. Raises UserError with one sentence, and
    with `field` naming the input at fault ("regime", "platform", "target", "drafter", "plan").
    """
    _check_regime(deployment.regime)
    check_platform(deployment.platform)
    with blame("target"):
        target = open_checkpoint(deployment.target)
        target.check()
    _check_context(deployment.regime, target.config, "target", deployment.target)
    drafter = open_drafter(deployment.drafter)
    _check_drafter(deployment, target, drafter)
    context = _lever_context(deployment, target.config, drafter, plan)
    if plan is not None:
        check_plan(plan, context)
    needed = memory_estimate(
        target.config,
        drafter.config,
        plan if plan is not None else initial_plan(context),
        deployment.dtype,
        deployment.regime,
        device_kind=context.device_kind,
    )
    free = free_bytes(deployment.platform)
    if needed > free:
        raise UserError(
            f"{deployment.target} needs about {_gigabytes(needed)} on {deployment.platform} in {deployment.dtype}, and "
            f"{_gigabytes(free)} are free: choose a smaller model, bf16 or shorter lengths, or free memory.",
            code="memory",
            field="target",
        )
    return Facts(target.config, drafter.kind, drafter.config, context, needed, free)


def _lever_context(
    deployment: Deployment, target: ModelConfig, drafter: DrafterReference, plan: Plan | None
) -> LeverContext:
    """What decides which lever values are legal. Whether the packed GEMM can be had is asked for only where it
    matters, since that loads torch."""
    packed = plan is None or "packed" in (plan.gemm, plan.draft_gemm)
    return context_for(
        platform=deployment.platform,
        dtype=deployment.dtype,
        drafter=drafter.kind,
        block_size=drafter.config.block_size if isinstance(drafter.config, DraftConfig) else 0,
        max_context=target.max_positions,
        packed_gemm=None if packed else False,
    )


def free_bytes(platform: str) -> int:
    """Memory that a new process can get on `platform`."""
    if platform == "cpu":
        return host_memory()[1]
    import torch

    return torch.cuda.mem_get_info(torch.device(platform))[0]


def _check_regime(regime: Regime) -> None:
    if regime.batch != 1:
        raise _regime(f"batch {regime.batch} is not supported yet; use batch 1, a single request")
    if not 0 <= regime.temperature <= MAX_TEMPERATURE:
        raise _regime(
            f"temperature {regime.temperature:g} is not a number from 0, greedy decoding, to {MAX_TEMPERATURE:g}"
        )
    if regime.max_prompt_tokens < 1 or regime.max_new_tokens < 1:
        raise _regime("prompt and output lengths must be at least one token")


def check_platform(platform: str) -> None:
    """Raises UserError where this machine has no such platform."""
    if platform == "cpu":
        return
    found = re.fullmatch(r"cuda:(\d+)", platform)
    if found is None:
        raise _platform(f"There is no platform {platform!r}; use cpu, or cuda:0 for the first GPU")
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(found[1]) >= count:
        there = "no GPU that PyTorch can use" if count == 0 else f"only {count} GPU{'s' * (count > 1)}"
        raise _platform(f"{platform} does not exist: this machine has {there}; use another platform")


def _check_context(regime: Regime, config: ModelConfig, role: str, ref: str) -> None:
    tokens = regime.max_prompt_tokens + regime.max_new_tokens
    if tokens > config.max_positions:
        raise _regime(
            f"{regime.max_prompt_tokens} prompt tokens and {regime.max_new_tokens} new ones are {tokens}, and the "
            f"context of the {role} {ref} is {config.max_positions}; shorten one of them"
        )


def _check_drafter(deployment: Deployment, target: Checkpoint, drafter: DrafterReference) -> None:
    if drafter.checkpoint is None:
        return
    if isinstance(drafter.config, DraftConfig):
        check_dflash(deployment.drafter, drafter.checkpoint, drafter.config, target.config)
        return
    with blame("drafter"):
        drafter.checkpoint.check()
    _check_context(deployment.regime, drafter.checkpoint.config, "draft model", deployment.drafter)
    _check_tokenizers(deployment, target, drafter.checkpoint)


def _check_tokenizers(deployment: Deployment, target: Checkpoint, drafter: Checkpoint) -> None:
    from engine.tokenizer import load_tokenizer

    with blame("target"):
        wanted = load_tokenizer(target).fingerprint
    with blame("drafter"):
        found = load_tokenizer(drafter).fingerprint
    if found != wanted:
        raise _mismatch(
            deployment.drafter, f"its tokenizer is not that of {deployment.target}, so its token ids mean other text"
        )


def check_dflash(ref: str, checkpoint: Checkpoint, config: DraftConfig, target: ModelConfig) -> None:
    """The drafter reads the target's hidden states and uses its embedding and head: all of their sizes must agree.
    Raises UserError where one does not, or where a tensor is missing, misshaped or left over."""
    model = config.model
    for what, mine, theirs in (
        ("a vocabulary", model.vocab_size, target.vocab_size),
        ("a hidden size", model.hidden_size, target.hidden_size),
        ("a number of target layers", config.num_target_layers, target.num_layers),
    ):
        if mine != theirs:
            raise _mismatch(ref, f"it was made for {what} of {mine}, and the target's is {theirs}")
    for layer in config.target_layer_ids:
        if not 0 <= layer < target.num_layers:
            raise _mismatch(ref, f"it reads target layer {layer}, and the layers are 0 to {target.num_layers - 1}")
    if not 0 <= config.mask_token_id < target.vocab_size:
        raise _mismatch(ref, f"its mask token {config.mask_token_id} is outside the vocabulary of {target.vocab_size}")
    _check_tensors(ref, checkpoint, dflash_config.tensor_shapes(config))


def _check_tensors(ref: str, checkpoint: Checkpoint, wanted: dict[str, tuple[int, ...]]) -> None:
    """Strict: every tensor there, none misshaped, none left over."""
    stored = set(checkpoint.names())

    def broken(problem: str, code: str) -> UserError:
        return UserError(f"{ref}: {problem}; fetch the drafter again.", code=code, field="drafter")

    for name, shape in wanted.items():
        if name not in stored:
            raise broken(f"tensor {name} is missing", "missing-tensor")
        if checkpoint.shape(name) != shape:
            found = list(checkpoint.shape(name))
            raise broken(
                f"tensor {name} has shape {found}, and its configuration asks for {list(shape)}", "misshaped-tensor"
            )
    if unexpected := sorted(stored - wanted.keys()):
        raise broken(f"tensor {unexpected[0]} is unexpected in a DFlash drafter", "unexpected-tensor")


def _regime(problem: str) -> UserError:
    return UserError(f"Regime: {problem}.", code="invalid-regime", field="regime")


def _platform(problem: str) -> UserError:
    return UserError(f"{problem}.", code="no-device", field="platform")


def _mismatch(ref: str, problem: str) -> UserError:
    return UserError(
        f"The drafter {ref} does not fit the target: {problem}; choose a drafter made for this target, or ngram.",
        code="drafter-mismatch",
        field="drafter",
    )


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB"
