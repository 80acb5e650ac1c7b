"""One child: what it sees, when it may run, and that nothing of it outlives a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from judge_world import toy

from engine.codec import to_json
from engine.deployment import Deployment
from engine.judge.process import Child, ChildFailed
from engine.judge.protocol import generate_question
from engine.judge.spawn import PASSED_ON, child_environment
from engine.paths import REPOSITORY
from engine.plan import Plan

QUESTION = generate_question([[3, 4, 5]], 8, [0])


def build(name: str) -> dict[str, Any]:
    return {
        "do": "build",
        "backend": toy(name),
        "deployment": to_json(Deployment()),
        "plan": Plan().to_json(),
        "threads": 1,
    }


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Child]:
    child = Child("candidate", tmp_path / "child.log")
    yield child
    child.kill()


def test_environment_is_an_allow_list(child: Child, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPECPILOT_API_KEY", "secret")
    monkeypatch.setenv("LD_PRELOAD", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    described = Child("candidate", tmp_path / "other.log")
    try:
        names = described.ask(build("stock"), 60).payload["environment"]
    finally:
        described.kill()
    fixed = {"PYTHONPATH", "PYTHONUNBUFFERED", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "TOKENIZERS_PARALLELISM"}
    assert "OMP_NUM_THREADS" in names
    assert set(names) <= {*PASSED_ON, *fixed, "LC_CTYPE"}  # Python itself adds LC_CTYPE in a C locale
    assert child_environment({"AWS_SECRET_ACCESS_KEY": "x", "PATH": "/bin"}).keys() - fixed == {"PATH"}


def test_runs_only_while_it_owes_an_answer(child: Child) -> None:
    child.ask(build("works_in_background"), 60)
    before = child.ask({"do": "describe"}, 60).payload["count"]
    process = psutil.Process(child.pid)
    assert process.status() == psutil.STATUS_STOPPED
    threading_time = process.cpu_times()
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline:  # what a running child would use to count on
        os.sched_yield()
    assert process.cpu_times() == threading_time
    assert child.ask({"do": "describe"}, 60).payload["count"] - before < 200  # half a second would be about 1000


def test_seconds_are_the_judges(child: Child) -> None:
    child.ask(build("stock"), 60)
    answer = child.ask(QUESTION, 60)
    tokens = len(answer.payload["texts"][0]["ids"])
    assert answer.seconds >= 0.002 * tokens


def test_time_out_kills_it_and_says_so(child: Child) -> None:
    child.ask(build("hangs"), 60)
    with pytest.raises(ChildFailed, match=r"The candidate gave no answer in time \(1 s\)") as failure:
        child.ask(QUESTION, 1)
    assert failure.value.kind == "timed out"
    assert not child.alive
    with pytest.raises(ChildFailed, match="not running"):
        child.ask(QUESTION, 1)


def test_an_answer_that_a_dead_child_still_owes_is_a_failure_in_words(child: Child) -> None:
    child.send(build("hangs") | {"backend": "nowhere.py:build"})
    with pytest.raises(ChildFailed, match="failed"):
        child.receive(60)
    with pytest.raises(ChildFailed, match="not running"):
        child.receive(60)


def test_a_reader_that_never_reads_is_timed_out(child: Child) -> None:
    child.ask(build("stock"), 60)
    os.kill(child.pid, signal.SIGSTOP)
    child._body.resume = lambda: None  # type: ignore[method-assign]
    with pytest.raises(ChildFailed, match="did not read its request in time") as failure:
        child.ask(generate_question([[1] * 400_000], 8, [0]), 1)  # larger than a pipe holds
    assert failure.value.kind == "timed out"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGRTMIN + 5])
def test_any_signal_is_told(child: Child, number: int, tmp_path: Path) -> None:
    source = tmp_path / "dies.py"
    source.write_text(f"import os\n\ndef build(*_):\n    os.kill(os.getpid(), {int(number)})\n")
    with pytest.raises(ChildFailed, match=r"was killed by (SIGKILL|signal 39)"):
        child.ask(build("stock") | {"backend": f"{source}:build"}, 60)


def test_kill_takes_everything_it_started(child: Child) -> None:
    child.ask(build("leaves_a_process"), 60)
    left = psutil.Process(int(child.log.read_text().split("left ")[1].split()[0]))
    assert left.is_running()
    child.kill()
    left.wait(10)
    assert not psutil.pid_exists(child.pid)
    child.kill()  # twice does no harm


def test_log_tail_is_bounded_and_printable(child: Child) -> None:
    child.ask(build("floods_log"), 60)
    with child.log.open("ab") as log:
        log.write(b"\x00\xff progress 1%\rprogress 100%\n\x1b[31mred\n" + b"last\n")
    tail = child.log_tail()
    assert tail.endswith("progress 100%\n[31mred\nlast")
    assert len(tail) < 8 * 301


def test_other_servers_by_module_name(child: Child) -> None:
    question = build("stock") | {"backend": "no.such.module:build"}
    with pytest.raises(ChildFailed, match="No module named 'no'"):
        child.ask(question, 60)


def test_unknown_backend_is_named(child: Child) -> None:
    with pytest.raises(ChildFailed, match="Unknown backend 'vllm'"):
        child.ask(build("stock") | {"backend": "vllm"}, 60)


PARENT = """
import sys, threading
from pathlib import Path
from engine.judge.process import Child

children = []
def start():
    child = Child("candidate", Path(sys.argv[1]))
    child.ask({question!r}, 60)
    children.append(child)

thread = threading.Thread(target=start)
thread.start()
thread.join()  # the thread that asked for the child ends; the child must not
child = children[0]
print(child.pid, child.ask({{"do": "describe"}}, 60).payload["pid"], flush=True)
sys.stdin.read()
"""


def test_dies_with_its_judge_but_not_with_a_thread_of_it(tmp_path: Path) -> None:
    code = PARENT.format(question=build("stock"))
    judge = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "child.log")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=REPOSITORY,
        text=True,
    )
    assert judge.stdout is not None
    pid, told = map(int, judge.stdout.readline().split())
    assert pid == told
    child = psutil.Process(pid)
    judge.kill()  # no clean-up of any kind runs
    judge.communicate()
    child.wait(10)
