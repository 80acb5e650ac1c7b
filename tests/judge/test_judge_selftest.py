"""The self-test of the judge: its suite is complete, it runs, and it fails where the gate is broken."""

from __future__ import annotations

import importlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from engine.cli import main
from engine.deployment import Regime
from engine.errors import UserError
from engine.generate import StopRule, build_decoder
from engine.judge import forcing, selftest
from engine.judge.cheats.registry import CANDIDATES, CHEATS, HONEST, INCUMBENT_SOURCE, Candidate, Family
from engine.judge.report import Forcing, Judgement, Power
from engine.judge.tiny import EOS, LENGTHS, VOCAB, Tiny, make_prompts, make_weights, write
from engine.plan import Plan

ASKED_FOR = {
    "clock": (
        "background-thread side-stream lazy-answer patched-perf-counter patched-elapsed-time patched-synchronize "
        "patched-median slow-warm-up burns-cpu burns-gpu waits-for-its-turn"
    ),
    "channel": (
        "own-verdict exits-early prints-pass rewrites-files exit-handler answers-unasked answers-out-of-order "
        "floods-the-pipe hangs"
    ),
    "output": (
        "stale-memory constant memorised-by-prompt memorised-by-pointer memorised-by-length searches-memory "
        "searches-proc searches-files searches-shared-memory right-for-ten-calls right-on-short-prompts early-stop "
        "skipped-tail counts-drafts ignores-eos false-stop-reason"
    ),
    "quality": (
        "relaxed-acceptance verifies-in-fp16 verifies-in-bf16 verifies-in-fp8 quantised-cache dropped-layers "
        "truncated-context frequent-head temperature-ignored seed-without-position near-ties-against-stock "
        "garbage-at-near-ties"
    ),
    "fallback": "swallowed-failure failed-launch",
    "honest": ("other-reduction-order padded-widths slow-start drafts chunked-prompts batch sampled"),
}
FAST = (
    "exits-early", "own-verdict", "false-stop-reason", "verifies-in-fp16", "patched-median", "failed-launch",
    "side-stream", "drafts",
)  # fmt: skip


def test_the_suite_has_every_known_cheat_of_every_family() -> None:
    names = [candidate.name for candidate in CANDIDATES]
    assert len(names) == len(set(names))
    assert len(CHEATS) >= 34
    assert len(HONEST) >= 9
    assert {candidate.family for candidate in CANDIDATES} == set(get_args(Family)) == set(ASKED_FOR)
    for family, asked in ASKED_FOR.items():
        assert set(asked.split()) <= {candidate.name for candidate in CANDIDATES if candidate.family == family}


@pytest.mark.parametrize("candidate", CANDIDATES, ids=lambda candidate: candidate.name)
def test_every_candidate_is_a_backend_of_its_own(candidate: Candidate) -> None:
    file, _, name = candidate.reference.rpartition(":")
    module = importlib.import_module(f"engine.judge.cheats.{Path(file).stem}")
    assert Path(str(module.__file__)) == Path(file)
    made = getattr(module, name)
    assert made.__doc__
    assert {"generate", "describe"} <= set(dir(made))
    re.compile(candidate.reason)
    assert candidate.honest == (candidate.verdicts == ("accepted",))
    if not candidate.honest:
        assert sum(other.reference == candidate.reference for other in CANDIDATES) == 1
        assert "accepted" not in candidate.verdicts
    assert candidate.reference != INCUMBENT_SOURCE


CHEAT = replace(CHEATS[0], verdicts=("lossy",), reason="differ")
GOOD = replace(HONEST[0], reason="lossless")


@pytest.mark.parametrize(
    ("candidate", "verdict", "reason", "found", "status"),
    [
        (CHEAT, "lossy", "3 of 9 tokens differ", [], "right"),
        (CHEAT, "lossy", "3 of 9 tokens differ", ["found 2 texts in /tmp/x"], "leak"),
        (CHEAT, "lossy", "it ended early", [], "wrong reason"),
        (CHEAT, "slower", "0.90x the incumbent", [], "wrong reason"),
        (CHEAT, "accepted", "2.00x the incumbent; lossless", [], "slipped through"),
        (GOOD, "accepted", "2.00x the incumbent; lossless", [], "right"),
        (GOOD, "slower", "1.00x the incumbent; lossless", [], "refused"),
        (GOOD, "accepted", "3 near-ties", [], "wrong reason"),
    ],
)
def test_right_means_the_right_verdict_for_the_right_reason(
    candidate: Candidate, verdict: Any, reason: str, found: list[str], status: str
) -> None:
    outcome = selftest.assess(candidate, Judgement(verdict, reason), found)
    assert outcome.status == status
    assert outcome.verdict == verdict
    assert outcome.reason.startswith(reason)
    assert all(line in outcome.reason for line in found)


def test_the_conclusion_counts_what_was_run() -> None:
    ran = [selftest.assess(CHEAT, Judgement("lossy", text), []) for text in ("they differ", "no", "they differ")]
    ran += [selftest.assess(GOOD, Judgement("accepted", "lossless"), [])]
    idle = replace(ran[0], status="not run")
    assert selftest.conclusion([*ran, idle]) == "2/3 cheats rejected, 1/1 honest candidates accepted"
    assert selftest.conclusion([idle]) == "0/0 cheats rejected, 0/0 honest candidates accepted"


def test_candidates_are_listed_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["judge", "selftest", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(CANDIDATES)
    assert all(candidate.name in line for candidate, line in zip(CANDIDATES, lines, strict=True))
    assert {candidate.family for candidate in selftest.choose(["clock", "hangs"])} == {"clock", "channel"}
    with pytest.raises(UserError, match="no candidate 'hang'"):
        selftest.choose(["hang"])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    folder = tmp_path_factory.mktemp("tiny")
    write(folder / "model")
    return Tiny(folder / "model" / "target", folder / "model" / "drafter", make_prompts(5))


def test_the_tiny_model_shows_all_that_a_judge_looks_at(tiny: Tiny) -> None:
    deployment = tiny.deployment(Regime(max_prompt_tokens=128, max_new_tokens=48), "cpu", "fp32")
    plain = build_decoder(deployment, Plan(source="none", head_rows="needed"))
    texts = [plain.generate(prompt.ids, 48, StopRule((EOS,))).ids for prompt in tiny.prompts[:24]]
    ended = sum(text[-1] == EOS for text in texts)
    assert 5 <= ended <= 23
    assert sum(len(set(text)) for text in texts) > 0.9 * sum(map(len, texts))  # no loops
    assert len({tuple(text) for text in texts}) == len(texts)
    drafting = build_decoder(deployment, Plan(source="neural", draft_tokens=4, head_rows="needed"))
    runs = [drafting.generate(prompt.ids, 48, StopRule((EOS,))) for prompt in tiny.prompts[:8]]
    lengths = [run.accept_length for run in runs if run.accept_length is not None]
    assert 2.0 < sum(lengths) / len(lengths) < 4.9  # drafts are mostly right, and not always


def test_prompts_of_the_tiny_model_are_fresh_and_of_every_length() -> None:
    prompts, others = make_prompts(1), make_prompts(2)
    assert prompts == make_prompts(1)
    assert not {prompt.ids for prompt in prompts} & {prompt.ids for prompt in others}
    assert {prompt.category for prompt in prompts} == set(LENGTHS)
    for prompt in prompts:
        fewest, most = LENGTHS[prompt.category]
        assert fewest <= len(prompt.ids) <= most
        assert all(0 < token < VOCAB and token != EOS for token in prompt.ids)
    one, two = make_weights(), make_weights()
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def _last_line(text: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(text.splitlines()[-1])
    return result


def test_cheats_are_rejected_and_honest_candidates_accepted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "selftest.json"
    status = main(["judge", "selftest", "--tiny", "--platform", "cpu", "--json", str(file), "--only", *FAST])
    text = capsys.readouterr().out
    assert status == 0, text
    summary = _last_line(text)
    assert summary["conclusion"] == "6/6 cheats rejected, 1/1 honest candidates accepted"
    assert summary["conclusion"] in text.splitlines()[-2]
    assert summary["passed"] is True
    assert "needs a GPU" in text
    outcomes = json.loads(file.read_text())["outcomes"]
    assert {outcome["name"] for outcome in outcomes} == set(FAST)
    (drafts,) = (outcome for outcome in outcomes if outcome["name"] == "drafts")
    assert drafts["judgement"]["forcing"]["error"] == 0
    assert drafts["judgement"]["comparison"]["ratio"] > 1.2


def test_it_fails_where_the_gate_is_broken(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forcing, "objection", lambda found: None)
    assert main(["judge", "selftest", "--tiny", "--platform", "cpu", "--only", "false-stop-reason"]) == 1
    text = capsys.readouterr().out
    assert "SLIPPED THROUGH" in text
    assert _last_line(text)["passed"] is False


def test_it_fails_where_an_honest_candidate_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forcing, "objection", lambda found: "1 of 9 tokens differ from stock beyond its noise.")
    assert main(["judge", "selftest", "--tiny", "--platform", "cpu", "--only", "plain"]) == 1
    text = capsys.readouterr().out
    assert "REFUSED" in text
    assert "0/0 cheats rejected, 0/1 honest candidates accepted" in text


def test_power_is_told_with_the_figures() -> None:
    found = Forcing(9, 9, 0, 0, 1e-5, 1, "measured", 1, 1, power=(Power(0.1, 0.99, "bf16"),))
    world = selftest.World("cpu", "bf16", "t", "d", Regime(), selftest_effort(), frozenset())
    outcome = selftest.assess(GOOD, Judgement("accepted", "lossless", forcing=found), [])
    assert selftest._summary(world, [outcome], 1, 2.0, True)["power"] == [
        {"noise": 0.1, "detected": 0.99, "like": "bf16"}
    ]


def selftest_effort() -> Any:
    from engine.judge.effort import Effort

    return Effort()


@pytest.mark.slow
def test_the_whole_suite_on_the_tiny_model(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["judge", "selftest", "--tiny", "--platform", "cpu"])
    text = capsys.readouterr().out
    assert status == 0, text


def test_only_a_file_that_is_there_counts_as_found_and_changed(tmp_path: Path) -> None:
    """A judge whose folder lies under /tmp starts its children in their own scratch, where any file can be made."""
    from engine.judge.cheats.channel import append

    assert not append(tmp_path / "judge.jsonl", "forged\n")
    assert not list(tmp_path.iterdir())
    (tmp_path / "judge.jsonl").write_text("true\n")
    assert append(tmp_path / "judge.jsonl", "forged\n")
    assert (tmp_path / "judge.jsonl").read_text() == "true\nforged\n"
