"""From a plan to the drafter that it asks for."""

from __future__ import annotations

import dataclasses

from engine.config import DraftConfig
from engine.deployment import Deployment
from engine.drafters.contract import Drafter
from engine.drafters.dflash import DFlashDrafter
from engine.drafters.draft_model import DraftModelDrafter
from engine.drafters.hybrid import HybridDrafter
from engine.drafters.ngram import NgramDrafter
from engine.drafters.reference import open_drafter
from engine.errors import UserError
from engine.model import Model
from engine.plan import Plan


def build_drafter(deployment: Deployment, plan: Plan, model: Model) -> Drafter | None:
    """The drafter of `plan.source` for the target `model`, its weights loaded; None for source "none".

    The deployment must have passed `engine.check.check_deployment`. Raises UserError where the plan wants a neural
    drafter and the deployment has none.
    """
    if plan.source == "none":
        return None
    if plan.source == "ngram":
        return NgramDrafter(plan.ngram_min, plan.ngram_max, plan.ngram_candidates)
    neural = _neural(deployment, plan, model)
    if plan.source == "neural":
        return neural
    return HybridDrafter(
        NgramDrafter(plan.hybrid_min_match, max(plan.hybrid_min_match, plan.ngram_max), plan.ngram_candidates), neural
    )


def _neural(deployment: Deployment, plan: Plan, model: Model) -> Drafter:
    reference = open_drafter(deployment.drafter)
    regime = deployment.regime
    tokens = regime.max_prompt_tokens + regime.max_new_tokens
    if reference.checkpoint is None:
        raise UserError(
            f"The plan's source is {plan.source}, but the deployment has no neural drafter: choose a drafter, or "
            "source=ngram.",
            code="illegal-lever",
            field="plan",
        )
    if isinstance(reference.config, DraftConfig):
        capacity = tokens + reference.config.block_size
        return DFlashDrafter(reference.checkpoint, reference.config, model, plan, capacity=capacity)
    draft = Model(
        reference.checkpoint,
        device=model.device,
        dtype=model.dtype,
        plan=dataclasses.replace(plan, gemm=plan.draft_gemm),
    )
    return DraftModelDrafter(draft, model.config.vocab_size, capacity=tokens + plan.draft_tokens)
