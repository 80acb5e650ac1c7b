"""Optuna's TPE over the levers of one family, by ask and tell. In memory; rebuilt from history each time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from engine.levers import Lever, LeverContext
from engine.plan import Plan
from engine.search.memory import Memory
from engine.search.state import Incumbent

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

ASKS = 12
"""How often TPE is asked for one proposal before its answers count as used up."""
STARTUP = 3
"""Measured points below which TPE draws at random."""
UNUSABLE = math.log(0.25)
"""What a lossy, crashed or refused plan counts as: worse than any plan worth timing."""


def ask(
    memory: Memory, incumbents: Sequence[Incumbent], levers: Sequence[Lever], context: LeverContext, seed: int
) -> Iterator[dict[str, Any]]:
    """Suggested values of all these levers (one family), one dict after another, at most `ASKS` of them.

    Points are the incumbents and the judged plans that changed this family alone; a point's value is the log
    of the speed that the family has brought since the initial plan, so that points measured against different
    incumbents are on one scale. The caller says which suggestions it cannot use by asking for the next.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    values = {lever.name: lever.values(context) for lever in levers if len(lever.values(context)) > 1}
    if not values:
        return
    space = {name: _distribution(choices) for name, choices in values.items()}
    sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=STARTUP, multivariate=True)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    for plan, value in _points(memory, incumbents, levers[0].family):
        params = _indices(plan, values)
        if params is not None:
            study.add_trial(optuna.trial.create_trial(params=params, distributions=space, value=value))
    for _ in range(ASKS):
        trial = study.ask(space)
        yield {name: values[name][index] for name, index in trial.params.items()}
        study.tell(trial, state=optuna.trial.TrialState.FAIL)


def _distribution(choices: Sequence[Any]) -> BaseDistribution:
    """Over positions in `choices`: ordered where they are numbers, unordered where they are names."""
    from optuna.distributions import CategoricalDistribution, IntDistribution

    if all(isinstance(choice, int) and not isinstance(choice, bool) for choice in choices):
        return IntDistribution(0, len(choices) - 1)
    return CategoricalDistribution(tuple(range(len(choices))))


def _indices(plan: Plan, values: dict[str, tuple[Any, ...]]) -> dict[str, int] | None:
    """Positions of the plan's values; None where one of them is not among the choices."""
    try:
        return {name: choices.index(getattr(plan, name)) for name, choices in values.items()}
    except ValueError:
        return None


def _points(memory: Memory, incumbents: Sequence[Incumbent], family: str) -> Iterator[tuple[Plan, float]]:
    adopted = {incumbent.plan for incumbent in incumbents}
    for incumbent in incumbents:
        yield incumbent.plan, memory.effect(family, incumbent.plan.digest)
    for item in memory.family(family):
        if len(item.families) > 1 or item.plan in adopted:
            continue
        if item.failed:
            yield item.plan, UNUSABLE
        elif item.ratio is not None:
            yield item.plan, memory.effect(family, item.parent) + math.log(item.ratio)
