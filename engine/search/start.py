"""How a search begins: every reason to refuse it, then the plan that it starts from. No time is spent before that."""

from __future__ import annotations

from engine.deployment import Deployment
from engine.levers import LeverContext
from engine.plan import Plan


def starting_plan(deployment: Deployment, plan: Plan | None = None) -> Plan:
    """Check checkpoints, regime, platform, memory and prompts of `deployment`, and `plan` where one is given;
    returns the plan that its search starts from.

    Raises UserError, one sentence with `field` naming the input at fault. Reads metadata only.
    """
    from engine.check import check_deployment
    from engine.levers import initial_plan
    from engine.prompts import load_prompts

    load_prompts(deployment.regime.prompts)
    # Plain decoding is legal everywhere, so that what is wrong with the deployment itself is told first.
    facts = check_deployment(deployment, plan if plan is not None else Plan(source="none"))
    if plan is not None:
        return plan
    start = initial_plan(facts.context)
    check_deployment(deployment, start)
    return start


def lever_context(deployment: Deployment) -> LeverContext:
    """What decides which lever values are legal, for a deployment that was checked. Loads torch on a CPU, to ask
    for its packed GEMM."""
    from engine.check import lever_context as context_of
    from engine.drafters.reference import open_drafter
    from engine.weights import open_checkpoint

    return context_of(deployment, open_checkpoint(deployment.target).config, open_drafter(deployment.drafter))
