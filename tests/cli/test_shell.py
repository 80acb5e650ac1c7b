"""The shell of one process: the event file is the search, whatever happens to the process."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from engine import bundle as bundles
from engine.deployment import Deployment
from engine.errors import ChildError, UserError
from engine.plan import Plan
from engine.search.console import LineScreen
from engine.search.events import ActionFailed, Body, Budget, Event, Note, StatusChanged
from engine.search.journal import EVENTS, Journal, read_events
from engine.search.perform import open_bench, perform
from engine.search.policy import decide
from engine.search.run import resume, search
from engine.search.state import State, fold_all

BUDGET = Budget(seconds=300.0, trials=6, candidates_per_round=2, min_rounds=2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "search"


def run(deployment: Deployment, folder: Path) -> State:
    return search(deployment, BUDGET, 11, folder, LineScreen())


def reopened(folder: Path) -> State:
    """The state as another process would read it."""
    return fold_all(read_events(folder / EVENTS))


def test_a_search_ends_with_a_bundle_of_its_best_plan(
    deployment: Deployment, folder: Path, judge: type, capsys: pytest.CaptureFixture[str]
) -> None:
    state = run(deployment, folder)
    assert state == reopened(folder)
    assert state.finished is not None
    assert state.finished.reason in ("budget", "plateau")
    assert state.bundle is not None
    read = bundles.read(folder / state.bundle.file)
    assert state.incumbent is not None
    assert read.plan == state.incumbent.plan
    assert state.incumbent.final
    assert judge.speed(read.plan) > judge.speed(state.initial_plan)
    assert read.events == tuple(state_events(folder))[: len(read.events)]
    assert judge.opened == judge.closed == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Searching target with n-gram drafts, fp32 on cpu")
    assert any("trial 1 (candidate, " in line for line in lines)
    assert any(line.startswith("Best so far: the closing measurement, ") for line in lines)
    assert lines[-1] == state.finished.sentence


def state_events(folder: Path) -> list[Event]:
    return read_events(folder / EVENTS)


def test_a_search_that_ended_is_only_read(deployment: Deployment, folder: Path, judge: type) -> None:
    first = run(deployment, folder)
    before = (folder / EVENTS).read_bytes()
    assert resume(folder, LineScreen()) == first
    assert (folder / EVENTS).read_bytes() == before
    assert judge.opened == 1


def test_any_prefix_of_the_events_goes_on_to_the_same_end(
    deployment: Deployment, folder: Path, judge: type, tmp_path: Path
) -> None:
    """A kill leaves a prefix of the file, its last line torn."""
    whole = run(deployment, folder)
    assert whole.incumbent is not None
    lines = (folder / EVENTS).read_bytes().splitlines(keepends=True)
    rng = random.Random(7)
    for kept in rng.sample(range(1, len(lines)), 24):
        cut = tmp_path / f"cut-{kept}"
        cut.mkdir()
        torn = lines[kept][: rng.randrange(len(lines[kept]))]
        (cut / EVENTS).write_bytes(b"".join(lines[:kept]) + torn)
        state = resume(cut, LineScreen())
        assert state.incumbent is not None
        assert state.incumbent.plan == whole.incumbent.plan, f"after {kept} events"
        assert state.bundle is not None
        assert [t.plan for t in state.trials.values()] == [t.plan for t in whole.trials.values()]


def test_bad_input_leaves_no_folder(deployment: Deployment, folder: Path, judge: type) -> None:
    with pytest.raises(UserError, match="no such file"):
        run(Deployment(target=str(folder / "nowhere"), drafter="ngram", regime=deployment.regime), folder)
    assert not folder.exists()


def test_a_folder_with_a_search_is_not_overwritten(deployment: Deployment, folder: Path, judge: type) -> None:
    run(deployment, folder)
    before = (folder / EVENTS).read_bytes()
    with pytest.raises(UserError, match="already holds a search"):
        run(deployment, folder)
    assert (folder / EVENTS).read_bytes() == before


def test_resume_refuses_what_is_no_search(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="There is no search in"):
        resume(tmp_path, LineScreen())
    (tmp_path / EVENTS).touch()
    with pytest.raises(UserError, match="stopped before it began"):
        resume(tmp_path, LineScreen())


def test_idle_time_before_a_resume_is_not_charged(deployment: Deployment, folder: Path, judge: type) -> None:
    run(deployment, folder)
    events = state_events(folder)[:9]
    (folder / EVENTS).unlink()
    with Journal(folder) as journal:
        for event in events:  # as if the process had been killed a day ago
            journal.append(Event(event.seq, event.time - 86_400, event.body))
    state = resume(folder, LineScreen())
    resumed = state_events(folder)[9].body
    assert resumed == StatusChanged("running", "command line, resumed")
    assert state.seconds < 600


# Ctrl-C ---------------------------------------------------------------------------------------------------------


def interrupt_at(judge: type, trial: int, times: int) -> None:
    """Send this process Ctrl-C while `trial` is judged."""

    def on_judge(number: int) -> None:
        if number == trial:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
            pytest.fail("the trial went on after Ctrl-C")

    judge.on_judge = staticmethod(on_judge)  # type: ignore[attr-defined]


def test_ctrl_c_cancels_in_good_order(deployment: Deployment, folder: Path, judge: type) -> None:
    before = signal.getsignal(signal.SIGINT)  # ignored where the tests run in the background
    interrupt_at(judge, 1, times=1)
    state = run(deployment, folder)
    assert state == reopened(folder)
    assert state.finished is not None
    assert state.finished.reason == "cancelled"
    assert state.trials[1].judgement is None
    assert judge.opened == judge.closed == 1
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_after_a_win_still_writes_a_bundle(deployment: Deployment, folder: Path, judge: type) -> None:
    whole = run(deployment, folder)
    first_win = next(i for i in whole.incumbents if i.trial != 0)
    later = next(t.number for t in whole.trials.values() if t.round > first_win.round)
    interrupt_at(judge, later, times=1)
    again = folder.with_name("again")
    state = run(deployment, again)
    assert state.finished is not None
    assert state.finished.reason == "cancelled"
    assert state.bundle is not None
    assert bundles.read(again / state.bundle.file).plan == first_win.plan


def test_second_ctrl_c_leaves_at_once_and_the_search_goes_on_later(
    deployment: Deployment, folder: Path, judge: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_at(judge, 1, times=1)
    close = judge.close
    # The second one comes while the children are being ended.
    monkeypatch.setattr(judge, "close", lambda self: (close(self), signal.raise_signal(signal.SIGINT)))
    with pytest.raises(KeyboardInterrupt):
        run(deployment, folder)
    assert reopened(folder).status == "running"
    monkeypatch.undo()


# Failures -------------------------------------------------------------------------------------------------------


def failing(judge: type, errors: list[BaseException]) -> None:
    def on_judge(number: int) -> None:
        if number == 2 and errors:
            raise errors.pop()

    judge.on_judge = staticmethod(on_judge)  # type: ignore[attr-defined]


def test_a_failure_of_ours_is_tried_again_with_new_children(deployment: Deployment, folder: Path, judge: type) -> None:
    failing(judge, [ChildError("crashed", "stock was killed by signal 9\nLast log lines:\nout of memory")])
    state = run(deployment, folder)
    assert state.bundle is not None
    assert state.failures == {"trial:2": ("stock was killed by signal 9",)}
    assert "out of memory" in (folder / "search.log").read_text()
    assert state.trials[2].attempts == 2
    assert judge.opened == judge.closed == 2


def test_a_trial_that_fails_twice_is_judged_and_the_search_goes_on(
    deployment: Deployment, folder: Path, judge: type
) -> None:
    failing(judge, [ValueError("second"), ValueError("first")])
    state = run(deployment, folder)
    assert state.failures["trial:2"] == ("ValueError: first", "ValueError: second")
    assert state.trials[2].judgement is not None
    assert state.trials[2].judgement.verdict == "crashed"
    assert state.bundle is not None
    assert "ValueError: first" in (folder / "search.log").read_text()


def test_a_failed_store_is_the_shells_and_no_failed_action(deployment: Deployment, folder: Path, judge: type) -> None:
    state = run(deployment, folder)
    events = state_events(folder)
    before = fold_all(e for e in events if e.seq < next(x.seq for x in events if x.body.type == "trial_started"))
    action = decide(before)[0]
    emitted: list[Body] = []

    def emit(body: Body) -> None:
        emitted.append(body)
        raise OSError("disk full")

    bench = open_bench(state, folder, lambda _: None)
    with pytest.raises(OSError, match="disk full"):
        perform(action, before, bench, emit)
    assert not any(isinstance(body, ActionFailed) for body in emitted)
    bench.close()


# The event file -------------------------------------------------------------------------------------------------


def note(seq: int) -> Event:
    return Event(seq, 1e9 + seq, Note(f"number {seq}"))


def test_journal_refuses_a_gap(folder: Path) -> None:
    with Journal(folder) as journal:
        journal.append(note(1))
        with pytest.raises(ValueError, match="does not follow"):
            journal.append(note(3))
    assert len(state_events(folder)) == 1


def test_journal_names_a_damaged_line(folder: Path) -> None:
    with Journal(folder) as journal:
        for seq in (1, 2, 3):
            journal.append(note(seq))
    lines = (folder / EVENTS).read_text().splitlines(keepends=True)
    for damage, complaint in (
        ("{\n", "line 2 is not JSON"),
        ('{"seq": 2}\n', "line 2 is no event"),
        ("[]\n", "line 2 is no event"),
        (lines[2], "line 2 has number 3"),
    ):
        (folder / EVENTS).write_text(lines[0] + damage + lines[2])
        with pytest.raises(UserError, match=complaint):
            Journal(folder)
    (folder / EVENTS).write_text("".join(lines))
    with Journal(folder) as journal:  # a refused file leaves no lock behind
        assert len(journal.events) == 3


def test_two_shells_never_write_one_folder(folder: Path) -> None:
    with Journal(folder):
        with pytest.raises(UserError, match="Another process is running"):
            Journal(folder)
        code = "import sys; from engine.search.journal import *; Journal(Path(sys.argv[1]))"
        other = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=False)
        assert "Another process is running" in other.stderr
    Journal(folder).close()


def test_the_lock_goes_with_a_killed_process(folder: Path) -> None:
    code = (
        "import sys, signal; from pathlib import Path; from engine.search.journal import Journal\n"
        "journal = Journal(Path(sys.argv[1])); print('locked', flush=True); signal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(UserError, match="Another process"):
            Journal(folder)
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
    Journal(folder).close()


def test_an_unwritable_folder_is_told_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        Journal(tmp_path / "file" / "folder")


def test_a_given_plan_is_where_the_search_starts(deployment: Deployment, folder: Path, judge: type) -> None:
    plan = Plan(source="ngram", fuse_qkv=True, head_rows="needed")
    state = search(deployment, BUDGET, 2, folder, LineScreen(), plan)
    assert state.initial_plan == plan
    assert state.trials[0].plan == plan
