"""How a search begins: every reason to refuse it, then the plan that it starts from. No time is spent before that."""

from __future__ import annotations

from engine.config import DraftConfig
from engine.deployment import Deployment
from engine.levers import LeverContext, context_for, initial_plan
from engine.plan import Plan


def starting_plan(deployment: Deployment, plan: Plan | None = None) -> Plan:
    """Check prompts, regime, platform, checkpoints, tokenizer and memory of `deployment`, and `plan` where one is
    given; returns the plan that its search starts from.

    Raises UserError, one sentence with `field` naming the input at fault. Reads metadata only.
    """
    from engine.check import check_deployment
    from engine.prompts import load_prompts
    from engine.tokenizer import load_tokenizer
    from engine.weights import open_checkpoint

    load_prompts(deployment.regime.prompts)
    facts = check_deployment(deployment, plan)
    load_tokenizer(open_checkpoint(deployment.target))
    return plan if plan is not None else initial_plan(facts.context)


def lever_context(deployment: Deployment) -> LeverContext:
    """What decides which lever values are legal, for a deployment that was checked before. Does not look at free
    memory, which a running search itself uses. Loads torch, to ask for the packed GEMM."""
    from engine.drafters.reference import open_drafter
    from engine.weights import open_checkpoint

    drafter = open_drafter(deployment.drafter)
    return context_for(
        platform=deployment.platform,
        dtype=deployment.dtype,
        drafter=drafter.kind,
        block_size=drafter.config.block_size if isinstance(drafter.config, DraftConfig) else 0,
        max_context=open_checkpoint(deployment.target).config.max_positions,
    )
