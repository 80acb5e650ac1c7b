"""TPE inside a family: legal values, learning from history, determinism."""

from __future__ import annotations

import random
from collections import Counter

from search_world import CONTEXT
from test_search_propose import Script

from engine.levers import LEVERS
from engine.search.memory import Memory
from engine.search.tpe import ASKS, ask

RUNTIME = [lever for lever in LEVERS if lever.family == "runtime"]
TREE = [lever for lever in LEVERS if lever.family == "tree"]


def test_suggestions_are_values_of_the_levers_and_depend_on_the_seed_alone() -> None:
    script = Script()
    script.judged({"threads": 2}, "accepted", 1.2)
    seed = random.randrange(2**32)
    arguments = (Memory.of(script.state), script.state.incumbents, TREE, CONTEXT)
    found = list(ask(*arguments, seed))
    assert len(found) == ASKS
    assert found == list(ask(*arguments, seed))
    assert found != list(ask(*arguments, seed ^ 1))
    for suggestion in found:
        assert suggestion.keys() == {lever.name for lever in TREE}
        for lever in TREE:
            assert suggestion[lever.name] in lever.values(CONTEXT)


def test_it_leans_to_what_was_fast() -> None:
    """Paths of 9 to 11 were fast and the others slow: most suggestions lie near, few would by chance."""
    script = Script()
    for depth in (1, 2, 3, 4, 13, 15, 16):
        script.judged({"draft_tokens": depth}, "slower", 0.6)
    for depth in (9, 10, 11):
        script.judged({"draft_tokens": depth}, "accepted", 1.8)
    near = Counter(
        8 <= suggestion["draft_tokens"] <= 12
        for seed in range(6)
        for suggestion in ask(Memory.of(script.state), script.state.incumbents, TREE, CONTEXT, seed)
    )
    assert near[True] / near.total() > 0.5 > 5 / 16


def test_a_family_without_a_choice_has_no_suggestions() -> None:
    from dataclasses import replace

    context = replace(CONTEXT, device_kind="cuda", has_compiler=False)
    script = Script()
    assert list(ask(Memory.of(script.state), script.state.incumbents, RUNTIME, context, 1)) == []
