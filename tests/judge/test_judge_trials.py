"""Whole trials with real children: honest candidates are accepted, the others get the right verdict and reason."""

from __future__ import annotations

import functools
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from judge_world import TOYS, MakeBench, toy

from engine.judge.bench import PairRule, ReadLimit
from engine.judge.conditions import Watch
from engine.judge.effort import Effort
from engine.judge.process import ChildFailed
from engine.judge.record import read
from engine.judge.reference import STOCK
from engine.judge.report import Judgement
from engine.judge.sandbox import available
from engine.judge.seats import Patience, Timeouts
from engine.judge.workbench import Workbench, autoregressive
from engine.plan import Plan

INCUMBENT = Plan(source="ngram", draft_tokens=1)  # as fast as stock
CANDIDATE = Plan(source="ngram", draft_tokens=7)  # four times as fast, where the toy is honest
confined = pytest.mark.skipif(
    available().bwrap is None, reason=f"source candidates need bubblewrap: {available().reason}"
)
QUICK = Timeouts(build=60.0, first_answer=6.0, answer=6.0)


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
    ],
)
def test_dishonest_candidates_are_rejected_for_the_right_reason(
    bench: Workbench, table: dict[Plan, str], name: str, verdict: str, reason: str
) -> None:
    found = judged(bench, table, name, trial=5)
    assert (found.verdict, re.search(reason, found.reason) is not None) == (verdict, True), found.reason
    # The others go on as if nothing had been: stock still scores, the incumbent is still there.
    assert bench._seats.get(f"plan:{INCUMBENT.digest}") is not None
    assert bench._seats.get(STOCK) is not None


def test_timed_texts_are_forced_too(make_bench: MakeBench) -> None:
    """It is fast, and right for four calls: only the timed texts give it away."""
    bench = make_bench({CANDIDATE: "right_for_some_calls"}, effort=Effort(timeouts=QUICK, probes=0, probe_prompts=0))
    found = bench.judge(1, CANDIDATE, INCUMBENT, fresh=1)
    assert found.comparison is not None
    assert (found.verdict, "differ from stock" in found.reason) == ("lossy", True), found.reason


def test_slower_candidate_is_rejected_early(make_bench: MakeBench, phases: list[str]) -> None:
    bench = make_bench(progress=phases.append)
    verdict = bench.judge(1, INCUMBENT, CANDIDATE, fresh=1)
    assert verdict.verdict == "slower", verdict.reason
    assert verdict.comparison is not None
    assert len(verdict.comparison.pairs) == bench.effort.rule.early
    assert verdict.comparison.high < 1
    assert phases[0] == "start-up"
    assert "token forcing 2/2" in phases
    assert "timing 3/7" in phases


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
        if text == "timing 2/7":
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


@confined
@pytest.mark.parametrize(
    ("incumbent", "verdict", "reason"),
    [
        ("slowed_for_a_while", "invalid", r"incumbent ran [12]\.\d+x slower beside this candidate than alone"),
        ("slowed_for_good", "accepted", "the incumbent"),
    ],
)
def test_who_slows_the_incumbent_is_refused_and_a_slower_machine_is_not_held_against_anyone(
    make_bench: MakeBench, incumbent: str, verdict: str, reason: str
) -> None:
    """One warm-up and three answers alone, then six beside the candidate (three pairs, each with a repeat)."""
    effort = Effort(timeouts=QUICK, rule=PairRule(3, 4, 4))
    bench = make_bench({INCUMBENT: incumbent}, effort=effort)
    found = bench.judge(1, CANDIDATE, INCUMBENT, fresh=1, source=toy("honest"))
    assert (found.verdict, re.search(reason, found.reason) is not None) == (verdict, True), found.reason


@confined
def test_the_child_of_the_next_candidate_waits_without_its_code(make_bench: MakeBench, tmp_path: Path) -> None:
    source = tmp_path / "candidate.py"
    source.write_text(f"{TOYS.read_text()}\n\nprint('foreign code runs')\nbuild = constant\n")
    bench = make_bench(folder=tmp_path / "search", effort=Effort(timeouts=QUICK, rule=PairRule(2, 3, 3)))
    following = f"{source}:build"
    first = bench.judge(1, CANDIDATE, INCUMBENT, fresh=1, source=toy("honest"), following=following)
    assert first.verdict == "accepted", first.reason
    waiting = bench._seats._prepared
    assert waiting is not None
    assert waiting.child._body._still  # type: ignore[union-attr]
    assert "foreign code runs" not in waiting.child.log_tail()
    pid = waiting.child.pid
    second = bench.judge(2, CANDIDATE, INCUMBENT, fresh=2, source=following)
    assert (second.verdict, "differ from stock" in second.reason) == ("lossy", True), second.reason
    assert not psutil.pid_exists(pid)  # it was this child that was judged, and it is gone
    assert "foreign code runs" in waiting.child.log.read_text()


@confined
def test_what_is_wrong_with_the_next_candidate_costs_this_one_nothing(make_bench: MakeBench, tmp_path: Path) -> None:
    bench = make_bench(effort=Effort(timeouts=QUICK, rule=PairRule(2, 3, 3)))
    nowhere = f"{tmp_path / 'nowhere.py'}:build"
    found = bench.judge(1, CANDIDATE, INCUMBENT, fresh=1, source=toy("honest"), following=nowhere)
    assert found.verdict == "accepted", found.reason


@confined
def test_a_prepared_child_that_died_is_started_anew(make_bench: MakeBench) -> None:
    bench = make_bench(effort=Effort(timeouts=QUICK, rule=PairRule(2, 3, 3)))
    bench.judge(1, CANDIDATE, INCUMBENT, fresh=1, source=toy("honest"), following=toy("honest"))
    waiting = bench._seats._prepared
    assert waiting is not None
    os.kill(waiting.child.pid, signal.SIGKILL)
    second = bench.judge(2, CANDIDATE, INCUMBENT, fresh=2, source=toy("honest"))
    assert second.verdict == "accepted", second.reason


# What a hostile candidate would try --------------------------------------------------------------------------


@confined
def test_sensitive_questions_stand_between_the_timed_ones(make_bench: MakeBench, tmp_path: Path) -> None:
    bench = make_bench(folder=tmp_path, effort=Effort(timeouts=QUICK, rule=PairRule(4, 5, 5)))
    found = bench.judge(1, CANDIDATE, INCUMBENT, fresh=1, source=toy("honest"))
    assert found.verdict == "accepted", found.reason
    kept = read(tmp_path / found.record)
    mine = [exchange for exchange in kept.exchanges if exchange.role == "candidate"]
    first = next(i for i, exchange in enumerate(mine) if exchange.phase == "timing")
    between = [exchange for exchange in mine[first:] if exchange.probe is not None]
    assert len(between) >= 3
    timed = [exchange for exchange in mine if exchange.phase == "timing"]
    assert {exchange.max_new_tokens for exchange in between} == {exchange.max_new_tokens for exchange in timed}
    prompts = {prompt.ids for prompt in bench.material.prompts}
    assert all(exchange.prompts[0].ids in prompts for exchange in between)  # whole prompts, like any other


@confined
def test_foreign_code_does_not_say_how_much_this_machine_varies(make_bench: MakeBench) -> None:
    bench = make_bench(effort=Effort(timeouts=QUICK))
    assert bench.judge(1, CANDIDATE, None, fresh=1, source=toy("fast_when_asked_again")).verdict == "accepted"
    assert bench._store.repeats == []
    assert bench.judge(2, CANDIDATE, None, fresh=2).verdict == "accepted"
    assert len(bench._store.repeats) == bench.effort.solo


@confined
def test_a_child_prepared_for_code_that_changed_since_is_started_anew(make_bench: MakeBench, tmp_path: Path) -> None:
    source = tmp_path / "candidate.py"
    toys = TOYS.read_text()
    source.write_text(f"{toys}\n\nbuild = honest\n")
    bench = make_bench(folder=tmp_path / "search", effort=Effort(timeouts=QUICK, rule=PairRule(2, 3, 3)))
    following = f"{source}:build"
    bench.judge(1, CANDIDATE, INCUMBENT, fresh=1, source=toy("honest"), following=following)
    source.write_text(f"{toys}\n\nbuild = constant\n")
    second = bench.judge(2, CANDIDATE, INCUMBENT, fresh=2, source=following)
    assert second.verdict == "lossy", second.reason
    kept = read(tmp_path / "search" / second.record)
    assert kept.source is not None
    assert "build = constant" in kept.source.text


@confined
def test_what_foreign_code_is_asked_does_not_follow_from_the_seed(make_bench: MakeBench, tmp_path: Path) -> None:
    asked = []
    for name in ("one", "two", "one"):  # the third goes on with the first one's folder
        bench = make_bench(folder=tmp_path / name, effort=Effort(timeouts=QUICK))
        found = bench.judge(1, CANDIDATE, None, fresh=1, source=toy("honest"))
        asked.append(found.prompts)
        bench.close()
    assert asked[0] == asked[2] != asked[1]


class Disturbed(Watch):
    """Calls the first four answers void of the side that is not the incumbent, or of both sides by turns."""

    def __init__(self, platform: str, *, one_sided: bool) -> None:
        super().__init__(platform, read=lambda: None)
        self.one_sided = one_sided
        self.incumbent: int | None = None
        self.left = 4

    @contextmanager
    def block(self, active: int | None) -> Iterator[None]:
        yield
        self.incumbent = self.incumbent or active  # it answers first
        theirs = active == self.incumbent
        if self.left and active is not None and theirs == (not self.one_sided and self.left % 2 == 0):
            self.left -= 1
            self._void.append("other processes used 0.50 of 2 cores")
            self.disturbed[active] += 1


@confined
@pytest.mark.parametrize(("one_sided", "verdict"), [(True, "invalid"), (False, "accepted")])
def test_who_disturbs_only_its_own_turns_is_refused(make_bench: MakeBench, one_sided: bool, verdict: str) -> None:
    effort = Effort(timeouts=QUICK, rule=PairRule(3, 4, 5))
    bench = make_bench(effort=effort, watch=functools.partial(Disturbed, one_sided=one_sided))
    found = bench.judge(1, CANDIDATE, INCUMBENT, fresh=1, source=toy("honest"))
    assert found.verdict == verdict, found.reason
    if one_sided:
        assert "ran in 4 of the candidate's turns and in 0 of the incumbent's" in found.reason
    else:
        assert found.comparison is not None
        assert found.comparison.conditions is not None
        assert len(found.comparison.conditions.void) >= 2
