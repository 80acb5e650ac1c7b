"""The whole thing as a user runs it: real processes, real children, a real (tiny or demo) model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from engine import bundle as bundles
from engine.search.journal import EVENTS, read_events
from engine.search.state import State, fold_all


def one_core() -> None:
    """Two threads on cores that others use spin at each other; one is steadier, and its ratios are clear."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def command(*argv: str | Path) -> list[str]:
    return [sys.executable, "-m", "engine", *map(str, argv)]


def run(*argv: str | Path, timeout: float = 900) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*argv), capture_output=True, text=True, check=False, timeout=timeout, preexec_fn=one_core
    )


def wait_for(path: Path, words: Sequence[str], process: subprocess.Popen[bytes], seconds: float = 300) -> None:
    """Until a line of `path` holds all of `words`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        lines = path.read_text().splitlines() if path.exists() else []
        if any(all(word in line for word in words) for line in lines):
            return
        assert process.poll() is None, "the search ended too early"
        time.sleep(0.02)
    pytest.fail(f"no line with {words} in {seconds} s")


def state_of(folder: Path) -> State:
    return fold_all(read_events(folder / EVENTS))


def test_killed_in_mid_trial_resumed_verified_and_run(tiny_target: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ("--target", tiny_target, "--prompts", prompts, "--platform", "cpu", "--max-new-tokens", "24")
    search = command("search", *options, "--seconds", "900", "--trials", "2", "--out", out)
    with subprocess.Popen(search, stdout=subprocess.DEVNULL, preexec_fn=one_core) as killed:
        wait_for(out / EVENTS, ('"trial_progress"', '"trial": 1,', "token forcing"), killed)
        children = psutil.Process(killed.pid).children(recursive=True)
        killed.send_signal(signal.SIGKILL)
    assert children
    assert psutil.wait_procs(children, timeout=30)[1] == []
    before = read_events(out / EVENTS)
    assert fold_all(before).trials[1].judgement is None

    resumed = run("search", "--resume", out)
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stderr == ""
    state = state_of(out)
    assert read_events(out / EVENTS)[: len(before)] == before
    assert state.trials[1].attempts == 2
    assert state.trials_used == 2
    assert state.bundle is not None
    assert state.incumbent is not None
    assert state.incumbent.final
    bundle = out / state.bundle.file
    assert f"verify --bundle {bundle}" in resumed.stdout
    assert bundles.read(bundle).plan == state.incumbent.plan
    assert all(t.judgement is None or t.judgement.verdict in ("accepted", "slower") for t in state.trials.values())

    again = run("search", "--resume", out)
    assert again.returncode == 0
    assert state_of(out) == state

    # On a machine that does other things besides, only the direction of a ratio is certain.
    verified = run("verify", "--bundle", bundle, "--tolerance", "0.95")
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert verified.stdout.splitlines()[-1].startswith("The claim holds here: the plan is lossless")
    assert " 0 errors" in verified.stdout

    mine = tmp_path / "mine.jsonl"
    mine.write_text("".join(json.dumps({"turns": [f"boats and harbours {n}"]}) + "\n" for n in range(12)))
    on_mine = run("verify", "--bundle", bundle, "--prompts", mine, "--json", "--tolerance", "0.95")
    answer = json.loads(on_mine.stdout)
    assert answer["judgement"]["verdict"] == "accepted"
    assert answer["deployment"]["regime"]["prompts"] == str(mine)
    assert on_mine.returncode == (0 if answer["holds"] else 1)

    generated = run("generate", "--bundle", bundle, "--prompt", "seven small boats")
    assert generated.returncode == 0, generated.stderr
    assert "tokens/s" in generated.stdout
    assert "accept length" in generated.stdout


def test_ctrl_c_ends_every_process(tiny_target: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ("--target", tiny_target, "--prompts", prompts, "--platform", "cpu", "--max-new-tokens", "24")
    search = command("search", *options, "--out", out)
    with subprocess.Popen(search, stdout=subprocess.PIPE, start_new_session=True, preexec_fn=one_core) as cancelled:
        wait_for(out / EVENTS, ('"trial_progress"', '"trial": 0,'), cancelled)
        children = psutil.Process(cancelled.pid).children(recursive=True)
        os.killpg(cancelled.pid, signal.SIGINT)  # as a terminal sends it: to the whole foreground group
        output = cancelled.communicate(timeout=60)[0].decode()
    assert cancelled.returncode == 130
    assert "Traceback" not in output
    assert psutil.wait_procs(children, timeout=30)[1] == []
    state = state_of(out)
    assert state.finished is not None
    assert state.finished.reason == "cancelled"


@pytest.mark.slow
def test_the_demo(tmp_path: Path) -> None:
    """SmolLM2 with the shipped DFlash drafter, within the demo's budget."""
    out = tmp_path / "out"
    done = subprocess.run(command("search", "--out", out), capture_output=True, text=True, check=False, timeout=1200)
    assert done.returncode == 0, done.stderr
    state = state_of(out)
    assert state.seconds < 600
    assert len(state.rounds) >= 3
    assert state.trials_used >= 8
    assert state.incumbent is not None
    for comparison in (state.incumbent.over_autoregressive, state.incumbent.over_speculative):
        assert comparison is not None
        assert comparison.low > 1.0
    verified = subprocess.run(
        command("verify", "--bundle", out / "bundle.zip"), capture_output=True, text=True, check=False, timeout=600
    )
    assert verified.returncode == 0, verified.stdout + verified.stderr
