"""The evidence of one trial: complete in every state, JSON-ready, bounded, and true to the judgement."""

from __future__ import annotations

import json
import math
import random
import shlex
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from search_world import Shell, World, at_random, comparison, forcing

from engine.codec import to_json
from engine.judge.report import Conditions, Costs, Divergence, Judgement, Pair, Power, Probing
from engine.search.events import ActionFailed, TrialJudged, TrialProgress, TrialStarted
from engine.search.evidence import (
    LOG_CHARS,
    LOG_LINES,
    SENTENCE_CHARS,
    Evidence,
    evidence,
    replay_command,
    split_reason,
)
from engine.search.policy import decide
from engine.search.state import State
from engine.search.view import LABELS, view


def open_trial(seed: int | None = None) -> Shell:
    """A search whose first candidate is the next to be judged."""
    world = World(random.randrange(1000) if seed is None else seed)
    shell = Shell(world, at_random(world))
    shell.run(lambda state: bool(state.rounds) and state.rounds[0].proposed is not None)
    return shell


def judged(judgement: Judgement, folder: str = "") -> Evidence:
    shell = open_trial()
    shell.emit(TrialStarted(1, "host/cpu", 1))
    shell.emit(TrialJudged(1, judgement))
    found = evidence(shell.state, 1, folder)
    assert found is not None
    return found


def shown(state: State, number: int) -> dict[str, Any]:
    found = evidence(state, number)
    assert found is not None
    data: dict[str, Any] = to_json(found)
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    return data


def test_there_is_evidence_for_every_trial_and_for_no_other() -> None:
    world = World(random.randrange(1000))
    shell = Shell(world, at_random(world))
    state = shell.run()
    keys = {frozenset(shown(state, number)) for number in state.trials}
    assert len(keys) == 1
    for number in (-1, state.next_trial, 10**9):
        assert evidence(state, number) is None


def test_it_says_what_the_row_says() -> None:
    world = World(random.randrange(1000))
    shell = Shell(world, at_random(world))
    state = shell.run()
    for row in view(state)["candidates"]:
        found = shown(state, row["trial"])
        same = row.keys() & found.keys() - {"forcing"}
        assert same >= {"trial", "round", "kind", "changes", "status", "verdict", "reason", "seconds", "predicted"}
        assert {key: found[key] for key in same} == {key: row[key] for key in same}
        assert found["stage_label"] == LABELS.get(row["stage"], row["stage"])
        if row["ratio"] is not None:
            assert found["timing"]["comparison"]["ratio"] == row["ratio"]


def test_a_trial_goes_from_proposed_to_running_to_judged() -> None:
    shell = open_trial()
    assert shown(shell.state, 1)["status"] == "proposed"
    shell.emit(ActionFailed("trial:1", "the worker vanished\nand said nothing"))
    shell.emit(TrialStarted(1, "host/cpu", 2))
    shell.emit(TrialProgress(1, "token forcing 2/6"))
    running = shown(shell.state, 1)
    assert (running["status"], running["phase"], running["attempts"]) == ("running", "token forcing 2/6", 2)
    assert running["interruptions"] == ["the worker vanished"]
    assert running["verdict"] is running["forcing"] is running["timing"] is running["place"] is None
    assert running["reason"] == running["replay"] == ""
    seq = running["seq"]
    shell.emit(TrialJudged(1, Judgement("slower", "Slow.", forcing=forcing(), comparison=comparison(0.9), seconds=3.0)))
    done = shown(shell.state, 1)
    assert (done["status"], done["verdict"], done["phase"]) == ("judged", "slower", "")
    assert done["seq"] == seq + 1


def test_the_failure_key_is_the_policys_own() -> None:
    shell = open_trial()
    assert "trial:1" in {action.key for action in decide(shell.state)}


def test_ratios_and_what_they_had_to_clear_follow_from_the_pairs() -> None:
    draw = random.Random()
    pairs = tuple(
        Pair(f"p{n}", draw.uniform(1, 2), draw.uniform(1, 2), draw.randint(20, 48), draw.randint(20, 48))
        for n in range(9)
    )
    timed = replace(comparison(1.1), pairs=(*pairs, Pair("broken", 1.0, 0.0, 0, 5)), threshold=0.034)
    timing = judged(Judgement("slower", "Slow.", comparison=timed)).timing
    assert timing is not None
    assert timing.needed == pytest.approx(1.034)
    for pair, ratio in zip(pairs, timing.ratios, strict=False):
        reference = math.log(pair.reference_s) - math.log(pair.reference_tokens)
        candidate = math.log(pair.candidate_s) - math.log(pair.candidate_tokens)
        assert ratio == pytest.approx(math.exp(reference - candidate))
    assert timing.ratios[-1] is None


def test_costs_sum_to_the_trial_and_say_what_judging_adds() -> None:
    parts = [random.uniform(1, 9) for _ in range(4)]
    rest = random.uniform(2, 5)
    total = sum(parts) + rest
    found = judged(Judgement("accepted", "Fine.", seconds=total, costs=Costs(*parts, generating_s=total / 1.3)))
    assert [cost.name for cost in found.costs] == ["child start", "warm-up", "token forcing", "timing", "the rest"]
    assert sum(cost.seconds for cost in found.costs) == pytest.approx(total)
    assert found.overhead == pytest.approx(1.3)
    exact = judged(Judgement("accepted", "Fine.", seconds=sum(parts), costs=Costs(*parts)))
    assert len(exact.costs) == 4
    assert exact.overhead is None
    assert judged(Judgement("accepted", "Fine.")).costs == ()


def test_everything_that_the_judge_found_is_in_it() -> None:
    first = Divergence("p1", 3, 7, 9, 0.4, "before", " cat", " dog", False, "code", "after")
    found = replace(
        forcing(2),
        first=first,
        by_category={"math": (90, 1, 0), "code": (108, 0, 2)},
        probing=Probing(40, 1, 20, 9, 15, 0.5),
        power=(Power(0.01, 0.4, "bf16"), Power(0.05, 0.99)),
    )
    timed = replace(comparison(1.2), aa_ratios=(0.99, 1.02), conditions=Conditions(("load",), ("power cap",)))
    judgement = Judgement("lossy", "2 errors.", ("p1", "p2"), found, timed, 2.5, 9.0, record="trial-1.json")
    data = to_json(judged(judgement, "data/my searches/web-7"))
    assert data["forcing"] == to_json(found)
    assert data["timing"]["comparison"] == to_json(timed)
    assert data["place"] == {"divergence": to_json(first), "words": ""}
    assert [tuple(row.values()) for row in data["categories"]] == [("code", 108, 0, 2), ("math", 90, 1, 0)]
    assert data["prompts"] == ["p1", "p2"]
    assert data["record"] == "trial-1.json"
    command = ["python", "-m", "engine", "judge", "replay"]
    assert shlex.split(data["replay"]) == [*command, "data/my searches/web-7/trial-1.json"]
    assert shlex.split(replay_command("trial-1.json")) == [*command, "trial-1.json"]


@pytest.mark.parametrize(
    ("token", "gap", "near_tie", "in_words"),
    [
        (5, 0.3, False, False),
        (5, 0.0, True, False),
        (-1, 0.0, False, True),
        (-1, 0.001, True, True),
        (5, 0.0, False, True),
    ],
)
def test_words_in_place_of_a_token_are_told_apart(token: int, gap: float, near_tie: bool, in_words: bool) -> None:
    first = Divergence("p1", 3, token, 9, gap, "before", "it ends after 3 of 48 tokens", " dog", near_tie)
    place = judged(Judgement("lossy", "No.", forcing=replace(forcing(1), first=first))).place
    assert place is not None
    assert place.words == (first.candidate_text if in_words else "")


def test_a_reason_is_split_into_sentence_and_log_and_both_are_bounded() -> None:
    assert split_reason("Just this.") == ("Just this.", ())
    assert split_reason("") == ("", ())
    reason = "The candidate exited with status 1.\nLast log lines:\nTraceback:\n\n  File <x>\nKeyError: 'a'"
    assert split_reason(reason) == (
        "The candidate exited with status 1.",
        ("Traceback:", "  File <x>", "KeyError: 'a'"),
    )
    hostile = "Bad\x1b[31m\x00.\nLast log lines:\n" + "\n".join(f"{n} \x07\u202e" + "y" * 5000 for n in range(500))
    sentence, lines = split_reason(hostile)
    assert sentence == "Bad[31m."
    assert len(lines) == LOG_LINES
    assert lines[-1].startswith("499 yyy")
    assert all(len(line) == LOG_CHARS for line in lines)
    assert len(split_reason("z" * 10**6)[0]) == SENTENCE_CHARS


def test_importing_it_loads_nothing_heavy() -> None:
    code = (
        "import sys, engine.search.evidence\n"
        "heavy = {'torch', 'transformers', 'django', 'webapp', 'optuna', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'loads {sorted(heavy)}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
