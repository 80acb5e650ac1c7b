"""Whole trials with real children: honest candidates are accepted, the others get the right verdict and reason."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import psutil
import pytest
from judge_world import MakeBench

from engine.judge.bench import PairRule, ReadLimit
from engine.judge.effort import Effort
from engine.judge.process import ChildFailed
from engine.judge.reference import STOCK
from engine.judge.report import Judgement
from engine.judge.seats import Patience, Timeouts
from engine.judge.workbench import Workbench, autoregressive
from engine.plan import Plan

INCUMBENT = Plan(source="ngram", draft_tokens=1)  # as fast as stock
CANDIDATE = Plan(source="ngram", draft_tokens=7)  # four times as fast, where the toy is honest
QUICK = Timeouts(build=60.0, first_answer=3.0, answer=3.0)


@pytest.fixture(scope="module")
def table() -> dict[Plan, str]:
    return {}


@pytest.fixture(scope="module")
def bench(make_bench: MakeBench, table: dict[Plan, str]) -> Workbench:
    return make_bench(table)


def judged(bench: Workbench, table: dict[Plan, str], name: str, trial: int) -> Judgement:
    """The judgement of toy `name`, in a child of its own, against a resident honest incumbent."""
    table.clear()
    table[CANDIDATE] = name
    bench._seats.dismiss(f"plan:{CANDIDATE.digest}")  # one that has won would be asked again
    return bench.judge(trial, CANDIDATE, INCUMBENT, fresh=trial)


@pytest.mark.parametrize("name", ["honest", "other_width", "slow_start", "floods_log"])
def test_honest_candidates_are_accepted(bench: Workbench, table: dict[Plan, str], name: str) -> None:
    verdict = judged(bench, table, name, trial=3)
    assert verdict.verdict == "accepted", verdict.reason
    forcing, comparison = verdict.forcing, verdict.comparison
    assert forcing is not None
    assert comparison is not None
    assert forcing.error == 0
    assert forcing.exact + forcing.near_tie == forcing.tokens > 5 * 8
    assert forcing.free_run_prompts >= bench.effort.forcing_prompts
    assert bench.effort.rule.early <= len(comparison.pairs) <= bench.effort.rule.pairs  # an obvious gain ends early
    assert 1.0 + comparison.threshold < comparison.low <= comparison.ratio <= comparison.high
    assert comparison.ratio > 1.5
    assert len(verdict.prompts) == len(set(verdict.prompts)) == bench.effort.forcing_prompts + len(comparison.pairs)
    if name == "slow_start":
        assert comparison.warmup_s > 0.6


@pytest.mark.parametrize(
    ("name", "verdict", "reason"),
    [
        ("import_error", "crashed", "a_module_that_is_nowhere"),
        ("out_of_memory", "crashed", r"killed by SIGKILL[^\n]*\n.*\n?allocating a lot"),
        ("dies_when_asked", "crashed", r"exited with status 3\.\nLast log lines:\nabout to fail\[31m"),
        ("raises_when_asked", "crashed", "ZeroDivisionError"),
        ("exits_zero", "crashed", "exited with status 0"),
        ("hangs", "timed out", "gave no answer in time"),
        ("not_json", "invalid", "not JSON"),
        ("not_an_object", "invalid", "not a JSON object"),
        ("not_a_number", "invalid", "not JSON"),
        ("announces_gigabytes", "invalid", "4,294,967,295 bytes"),
        ("wrong_request", "invalid", "answered request 1 when asked"),
        ("own_verdict", "invalid", "answered request None"),
        ("answers_ahead", "invalid", "answer"),
        ("floods", "invalid", "answered request None"),
        ("constant", "lossy", "differ from stock"),
        ("skips_tail", "lossy", "without an end of text"),
        ("ignores_eos", "lossy", "where stock has 't0'"),
        ("ends_early", "lossy", "'t0' where stock has"),
        ("goes_on_after_eos", "lossy", "goes on after the end of its text"),
        ("false_reason", "lossy", "gives the stop reason"),
        ("too_many", "invalid", "at most 24 were asked for"),
        ("no_tokens", "invalid", "without a token"),
        ("outside_vocabulary", "invalid", "token id 40, outside the vocabulary of 40"),
        ("boolean_ids", "invalid", "token id True"),
        ("too_few_texts", "invalid", "gave 0 texts for 1 prompts"),
        ("right_for_some_calls", "lossy", "differ from stock"),
    ],
)
def test_dishonest_candidates_are_rejected_for_the_right_reason(
    bench: Workbench, table: dict[Plan, str], name: str, verdict: str, reason: str
) -> None:
    found = judged(bench, table, name, trial=5)
    assert (found.verdict, re.search(reason, found.reason) is not None) == (verdict, True), found.reason
    if name == "right_for_some_calls":
        assert found.comparison is not None  # it was fast, and lossless at first: only the timed texts give it away
    # The others go on as if nothing had been: stock still scores, the incumbent is still there.
    assert bench._seats.get(f"plan:{INCUMBENT.digest}") is not None
    assert bench._seats.get(STOCK) is not None


def test_slower_candidate_is_rejected_early(make_bench: MakeBench, phases: list[str]) -> None:
    bench = make_bench(progress=phases.append)
    verdict = bench.judge(1, INCUMBENT, CANDIDATE, fresh=1)
    assert verdict.verdict == "slower", verdict.reason
    assert verdict.comparison is not None
    assert len(verdict.comparison.pairs) == bench.effort.rule.early
    assert verdict.comparison.high < 1
    assert phases[0] == "start-up"
    assert "token forcing 2/2" in phases
    assert "timing 3/6" in phases


def test_equal_candidate_is_not_a_gain(make_bench: MakeBench) -> None:
    bench = make_bench()
    twin = Plan(source="ngram", draft_tokens=1, ngram_max=5)
    verdict = bench.judge(1, twin, INCUMBENT, fresh=1)
    assert verdict.verdict == "slower", verdict.reason


def test_too_fast_to_be_true(make_bench: MakeBench) -> None:
    # 24 tokens at 8 a pass are four passes; 1 GB at 20 GB/s is 50 ms each
    bench = make_bench({CANDIDATE: "too_fast"}, read_limit=ReadLimit(1e9, 0.0, 20e9))
    verdict = bench.judge(1, CANDIDATE, None, fresh=1)
    assert verdict.verdict == "invalid"
    assert re.search(r"gave \d+ tokens in .* ms; reading the weights", verdict.reason)


def test_baseline_is_forced_and_timed_alone_then_stays_as_incumbent(make_bench: MakeBench, tmp_path: Path) -> None:
    bench = make_bench(folder=tmp_path)
    verdict = bench.judge(1, INCUMBENT, None, fresh=1)
    assert verdict.verdict == "accepted", verdict.reason
    assert verdict.comparison is None
    assert "tokens/s alone" in verdict.reason
    assert verdict.accept_length == 1.0
    before = len(list((tmp_path / "children").iterdir()))
    verdict = bench.judge(2, CANDIDATE, INCUMBENT, fresh=2)
    assert len(list((tmp_path / "children").iterdir())) == before + 1  # the candidate; no second incumbent
    assert verdict.verdict == "accepted", verdict.reason


def test_hidden_prompts_rotate_and_can_be_replayed(make_bench: MakeBench) -> None:
    bench = make_bench()
    draws = [bench.judge(n, INCUMBENT, None, fresh=n).prompts for n in (1, 2, 3)]
    assert len({prompt for prompts in draws for prompt in prompts}) == sum(map(len, draws))
    again = make_bench().judge(9, INCUMBENT, None, fresh=2)
    assert again.prompts == draws[1]


def test_stock_is_measured_and_never_asked_twice(make_bench: MakeBench, tmp_path: Path) -> None:
    first = make_bench(folder=tmp_path)
    measured = first.measure_stock("autoregressive")
    assert measured.implementation == "toy stock"
    assert len(measured.samples_tok_s) == first.effort.stock_prompts
    assert 0 < measured.tok_s < 1 / 0.002
    assert first.measure_stock("speculative").implementation == "toy stock speculative"
    first.judge(1, INCUMBENT, None, fresh=1)
    first.close()
    kept = tmp_path / "judge.jsonl"
    assert kept.read_text().count('"text"') == first.effort.stock_prompts + first.effort.forcing_prompts
    known = {line for line in kept.read_text().splitlines() if '"repeats"' not in line}
    second = make_bench(folder=tmp_path)  # as after a kill
    second.judge(1, INCUMBENT, None, fresh=1)
    lines = kept.read_text().splitlines()
    assert {line for line in lines if '"repeats"' not in line} == known
    assert len(lines) == len(known) + 2  # each baseline told how this device differs from itself


def test_standing_compares_with_both_baselines_and_our_own(make_bench: MakeBench) -> None:
    bench = make_bench()
    found = bench.standing(CANDIDATE, 4, 1.5, final=True)
    assert (found.trial, found.plan, found.over_incumbent, found.final) == (4, CANDIDATE, 1.5, True)
    over = (found.over_autoregressive, found.over_speculative, found.over_own_autoregressive)
    assert all(each is not None and len(each.pairs) == bench.effort.final_pairs for each in over)
    plain, speculative, own = (each for each in over if each is not None)
    assert plain.reference == "toy stock"
    assert plain.low > 1.5
    assert speculative.ratio > plain.ratio  # its baseline is slower
    assert {pair.prompt for pair in plain.pairs} == {pair.prompt for pair in own.pairs}
    passing = bench.standing(CANDIDATE, 5, 1.0, final=False)
    assert passing.over_autoregressive is not None
    assert passing.over_speculative is passing.over_own_autoregressive is None
    assert bench.standing(autoregressive(CANDIDATE), 6, 1.0, final=True).over_own_autoregressive is None


def test_an_incumbent_that_is_lossy_in_the_closing_measurement_is_never_published(make_bench: MakeBench) -> None:
    bench = make_bench({CANDIDATE: "right_for_some_calls"})
    with pytest.raises(ChildFailed, match="The incumbent is not lossless"):
        bench.standing(CANDIDATE, 4, 1.5, final=True)


def test_failures_of_stock_and_incumbent_are_not_the_candidates(make_bench: MakeBench) -> None:
    bench = make_bench({INCUMBENT: "dies_when_asked"})
    with pytest.raises(ChildFailed, match="The incumbent exited with status 3"):
        bench.judge(1, CANDIDATE, INCUMBENT, fresh=1)
    bench.measure_stock("autoregressive")
    seat = bench._seats.get(STOCK)
    assert seat is not None
    psutil.Process(seat.ready()["pid"]).send_signal(signal.SIGKILL)
    psutil.Process(seat.child.pid).wait(10)
    assert bench.judge(2, CANDIDATE, None, fresh=3).verdict == "accepted"  # stock was started again


def test_cancelling_from_the_progress_call_leaves_no_candidate(make_bench: MakeBench) -> None:
    class Cancelled(Exception):
        pass

    def progress(text: str) -> None:
        if text == "timing 2/6":
            raise Cancelled

    bench = make_bench(progress=progress)
    with pytest.raises(Cancelled):
        bench.judge(1, CANDIDATE, INCUMBENT, fresh=1)
    running = {seat.child.role for key in list(bench._seats._seats) if (seat := bench._seats.get(key))}
    assert running == {STOCK, "incumbent"}


def test_never_more_children_than_allowed(make_bench: MakeBench) -> None:
    bench = make_bench(effort=Effort(children=3, timeouts=QUICK, rule=PairRule(2, 3, 3)))
    before = len(psutil.Process().children())
    for trial in (1, 2, 3):
        plan = Plan(source="ngram", draft_tokens=5, ngram_max=trial + 2)
        assert bench.judge(trial, plan, INCUMBENT, fresh=trial).verdict in ("accepted", "slower")
        assert len(psutil.Process().children()) - before <= 3
    bench.close()
    assert len(psutil.Process().children()) == before


def test_a_candidate_is_waited_for_in_proportion_to_stock() -> None:
    patience = Patience(Timeouts(first_answer=30.0, answer=5.0, patience=10.0, trusted=900.0))
    assert patience.seconds(trusted=False, first=False) == 5.0
    patience.saw(0.1)
    assert patience.seconds(trusted=False, first=False) == 5.0
    patience.saw(2.0)
    patience.saw(1.0)
    assert patience.seconds(trusted=False, first=False) == 20.0
    assert patience.seconds(trusted=False, first=True) == 30.0
    assert patience.seconds(trusted=True, first=False) == 900.0
