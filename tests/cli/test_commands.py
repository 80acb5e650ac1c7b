"""What the commands print, and the verdict of `verify`."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from engine.cli import COMMANDS, main
from engine.cli.generate import _Stream
from engine.cli.verify import conclude
from engine.deployment import Deployment
from engine.judge.report import Comparison, Judgement
from engine.plan import Plan
from engine.search.console import LineScreen, TerminalScreen
from engine.search.events import Budget, IncumbentChanged
from engine.search.journal import EVENTS, read_events
from engine.search.run import search
from engine.search.state import fold_all
from engine.search.view import view


def comparison(ratio: float, spread: float) -> Comparison:
    return Comparison("stock", (), ratio, ratio - spread, ratio + spread, 0.002, 0.01, 10 * ratio, 10.0)


def standing(autoregressive: Comparison | None, speculative: Comparison | None) -> IncumbentChanged:
    return IncumbentChanged(4, Plan(), 1.0, autoregressive, speculative, None, True)


ACCEPTED = Judgement("accepted", "It is lossless.")
CLAIM = standing(comparison(3.0, 0.1), comparison(2.0, 0.1))


@pytest.mark.parametrize(
    ("autoregressive", "speculative", "holds", "words"),
    [
        (comparison(3.1, 0.2), comparison(2.2, 0.2), True, "reaches 3.10x (2.90 to 3.30) over stock autoregressive"),
        (comparison(2.4, 0.2), comparison(1.6, 0.2), True, "claimed 2.00x"),
        (comparison(2.2, 0.2), comparison(2.2, 0.2), False, "short of the claim: 2.20x"),
        (
            comparison(3.1, 0.2),
            comparison(1.4, 0.1),
            False,
            "faster than stock speculative decoding, but short",
        ),
        (comparison(3.1, 2.1), comparison(2.0, 0.1), False, "not clearly faster than stock autoregressive"),
        (comparison(3.1, 0.2), comparison(1.6, 0.6), False, "not clearly faster than stock speculative"),
        (comparison(3.1, 0.2), None, False, "could not be compared with stock speculative"),
    ],
)
def test_conclusions(autoregressive: Comparison, speculative: Comparison | None, holds: bool, words: str) -> None:
    answer, sentence = conclude(CLAIM, ACCEPTED, standing(autoregressive, speculative), 0.25)
    assert answer is holds
    assert sentence.startswith("The claim holds here:" if holds else "The claim does not hold here:")
    assert (
        words.replace("over stock speculative decoding, but", "faster than stock speculative decoding, but") in sentence
    )
    assert "is lossless" in sentence


def test_a_lossy_plan_never_holds() -> None:
    lossy = Judgement("lossy", "token 7 of prompt p3 is an error")
    answer, sentence = conclude(CLAIM, lossy, None, 0.9)
    assert not answer
    assert "judged lossy (token 7 of prompt p3 is an error)" in sentence


def test_what_was_not_claimed_is_not_held_against_it() -> None:
    claim = standing(comparison(3.0, 0.1), comparison(0.9, 0.2))
    answer, sentence = conclude(claim, ACCEPTED, standing(comparison(3.0, 0.1), comparison(0.7, 0.2)), 0.25)
    assert answer
    assert "speculative" not in sentence
    nothing = standing(comparison(1.0, 0.1), None)
    assert not conclude(nothing, ACCEPTED, nothing, 0.25)[0]


def test_tolerance_is_the_users() -> None:
    measured = standing(comparison(2.8, 0.05), comparison(1.9, 0.05))
    assert conclude(CLAIM, ACCEPTED, measured, 0.07)[0]
    assert not conclude(CLAIM, ACCEPTED, measured, 0.01)[0]


# Printing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: python -m engine {command}")
    assert "==SUPPRESS==" not in text


def test_help_starts_without_torch() -> None:
    code = (
        "import sys\nfrom engine.cli import main\ntry:\n main(['search', '--help'])\nexcept SystemExit:\n pass\n"
        "assert 'torch' not in sys.modules and 'rich' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_levers_and_plan(tiny_target: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    where = ["--target", str(tiny_target), "--platform", "cpu"]
    assert main(["plan", *where, "--set", "ngram_max=3", "--set", "verify_widths=8", "--set", "fuse_qkv=true"]) == 0
    path = tmp_path / "plan.json"
    path.write_text(capsys.readouterr().out)
    plan = Plan.from_json(json.loads(path.read_text()))
    assert (plan.source, plan.ngram_max, plan.verify_widths, plan.fuse_qkv) == ("ngram", 3, "8", True)

    assert main(["levers", *where, "--plan", str(path), "--json"]) == 0
    rows = {row["lever"]: row for row in json.loads(capsys.readouterr().out)}
    assert set(rows) == {field.name for field in dataclasses.fields(Plan)}
    assert rows["ngram_max"]["value"] == 3
    assert "neural" not in rows["source"]["legal"]

    assert main(["levers", *where, "--plan", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "[3]" in printed
    assert "[true]" in printed


@pytest.mark.parametrize("source", ["ngram", "none"])
def test_generate_prints_text_rate_and_accept_length(
    tiny_target: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, source: str
) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"source": source}))
    argv = ["generate", "--target", str(tiny_target), "--platform", "cpu", "--prompt", "seven small boats"]
    argv += ["--max-new-tokens", "40"]
    assert main([*argv, "--plan", str(tmp_path / "plan.json")]) == 0
    text, figures = capsys.readouterr().out.rsplit("\n\n", 1)
    rows = dict(line.split("  ", 1) for line in figures.strip().splitlines())
    assert float(rows["tokens/s"].split()[0]) > 0
    accept = float(rows["accept length"].split()[0])
    assert accept == 1.0 if source == "none" else accept >= 1.0
    assert "bonus token included" in rows["accept length"]

    assert main([*argv, "--quiet"]) == 0
    assert capsys.readouterr().out.rstrip("\n") == text.rstrip("\n")  # whatever drafts: the same text


def test_sampled_text_depends_on_the_seed_and_not_on_the_plan(
    tiny_target: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"source": "none"}))
    argv = ["generate", "--target", str(tiny_target), "--platform", "cpu", "--prompt", "seven small boats"]
    argv += ["--max-new-tokens", "40", "--temperature", "1.5"]

    def printed(*more: str) -> str:
        assert main([*argv, *more]) == 0
        return capsys.readouterr().out

    text = printed("--seed", "5", "--quiet")
    assert printed("--seed", "5", "--quiet", "--plan", str(tmp_path / "plan.json")) == text
    assert printed("--seed", "6", "--quiet") != text
    figures = printed()  # a fresh seed, which is told
    found = re.search(r"sampled +temperature 1.5, seed (\d+)", figures)
    assert found
    assert printed("--seed", found[1], "--quiet").rstrip("\n") == figures.rsplit("\n\n", 1)[0].rstrip("\n")


class Bytes:
    """A tokenizer whose tokens are bytes."""

    eos_ids = (0,)

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")


def test_characters_of_several_tokens_are_printed_whole(capsys: pytest.CaptureFixture[str]) -> None:
    stream = _Stream(Bytes())  # type: ignore[arg-type]
    printed = []
    for byte in "né→x".encode():
        stream.add([byte])
        printed.append(capsys.readouterr().out)
    assert printed == ["n", "", "é", "", "", "→", "x"]
    stream.add([0])
    stream.end()
    assert capsys.readouterr().out == "\n"


def test_the_panel_draws_every_state_of_a_search(deployment: Deployment, judge: type, tmp_path: Path) -> None:
    search(deployment, Budget(trials=4), 5, tmp_path / "s", LineScreen())
    output = io.StringIO()
    screen = TerminalScreen(Console(file=output, force_terminal=True, width=100, color_system=None))
    events = read_events(tmp_path / "s" / EVENTS)
    with screen:
        for count, event in enumerate(events, start=1):
            screen.event(event, view(fold_all(events[:count])))
            screen.progress(f"phase {count}")
    text = output.getvalue()
    last = fold_all(events)
    assert last.finished is not None
    for words in (
        "over stock autoregressive",
        "largest gap",
        "MLP, ",
        f"{last.trials_used} of 4",
        "phase 9",
        "trial 1 (candidate",
        "Bundle: bundle.zip",
    ):
        assert words in text


def test_what_a_widened_target_is_stands_beside_its_figures(
    tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["widen", "--target", str(tiny_target), "--factor", "2", "--out", str(tmp_path / "wide")]) == 0
    capsys.readouterr()
    for target, said in ((tiny_target, False), (tmp_path / "wide" / "target", True)):
        asked = ["generate", "--target", str(target), "--platform", "cpu", "--prompt", "the quick brown fox"]
        assert main([*asked, "--max-new-tokens", "4"]) == 0
        assert ("Target: widened 2x from target: real text" in capsys.readouterr().out) == said
