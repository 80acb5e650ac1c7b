"""Replays of trials that were recorded with real children: what reproduces, and what is said where it does not."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from judge_world import NEW_TOKENS, TOYS, MakeBench, toy

from engine.cli import main
from engine.deployment import Deployment, Regime
from engine.errors import UserError
from engine.hardware import identify_device
from engine.judge import bench, forcing, record
from engine.judge import replay as replays
from engine.judge.again import CANDIDATE, INCUMBENT, STOCK, Cast
from engine.judge.backends import BUILT_IN, is_ours
from engine.judge.bench import ReadLimit
from engine.judge.floor import Sample, measure_floor
from engine.judge.forcing import Scored
from engine.judge.hidden import HiddenPrompt, Material
from engine.judge.probes import Seen, Want, find
from engine.judge.process import ChildFailed
from engine.judge.record import Record, Recorder
from engine.judge.replay import ALONE, Replay, replay, sentences
from engine.judge.report import Judgement, Pair, Verdict
from engine.judge.seats import Seat, Seats, Timeouts
from engine.plan import Plan

PLAN, RIVAL = Plan(source="ngram", draft_tokens=7), Plan(source="ngram", draft_tokens=1)
ROOT = Path(__file__).resolve().parents[2]
QUICK = Timeouts(build=60.0, first_answer=3.0, answer=3.0)


def silent(text: str) -> None:
    return


def anything(backend: str) -> bool:
    """The toys are files, and trusted here."""
    return True


class Mini:
    """A small trial over the toys, recorded as the workbench records one: forcing, probes, timed pairs."""

    def __init__(self, material: Material, folder: Path, candidate: str, *, source: str | None = None) -> None:
        self.material, self.folder = material, folder
        self.deployment = Deployment("toy", "ngram", Regime(max_new_tokens=NEW_TOKENS))
        backend = source or candidate
        self.recorder = Recorder(
            trial=4, fresh=1, seed=9, deployment=self.deployment, plan=PLAN, incumbent=RIVAL,
            backends={STOCK: toy("stock"), CANDIDATE: backend, INCUMBENT: toy("honest")},
            stop_ids=material.stop_ids, vocab_size=material.vocab_size, threads=1,
            source=record.source_of(source) if source else None, read_limit=ReadLimit(0.0, 0.0, 1.0), draft_tokens=7,
        )  # fmt: skip
        self.scored: list[Scored] = []
        self.seats = Seats(self.deployment, material, 1, folder, 3, QUICK)
        needed = {STOCK, INCUMBENT, CANDIDATE}
        self.stock = self.seats.start(STOCK, STOCK, toy("stock"), None, needed)
        self.rival = self.seats.start(INCUMBENT, INCUMBENT, toy("honest"), RIVAL, needed)
        self.candidate = self.seats.start(CANDIDATE, CANDIDATE, backend, PLAN, needed)

    def run(self) -> Path:
        judgement = self._judge()
        self.seats.close()
        self.recorder.scored(self.scored)
        return self.folder / self.recorder.write(self.folder, judgement, identify_device("cpu"))

    def ask(
        self, phase: str, seat: Seat, prompts: Sequence[HiddenPrompt], tokens: int = NEW_TOKENS, **more: object
    ) -> int:
        role = seat.child.role
        try:
            reply = seat.generate_batch([prompt.ids for prompt in prompts], tokens)
        except ChildFailed as failure:
            self.recorder.failed(phase, role, prompts, tokens, failure)  # type: ignore[arg-type]
            raise
        number = self.recorder.asked(phase, role, prompts, tokens, reply, **more)  # type: ignore[arg-type]
        if role == CANDIDATE:
            for prompt, text in zip(prompts, reply.texts, strict=True):
                scores = self.stock.score(prompt.ids, text.ids)
                stock = self.stock.generate(prompt.ids, tokens).text if phase == "forcing" else None
                self.scored.append(
                    Scored(prompt.id, prompt.category, prompt.ids, text, scores, tokens, stock, more.get("probe"))  # type: ignore[arg-type]
                )
        return number

    def _judge(self) -> Judgement:
        prompts = self.material.prompts
        try:
            seen, samples = [], []
            for prompt in prompts[:12]:
                ids = self.stock.generate(prompt.ids, NEW_TOKENS).text.ids
                scores = self.stock.score(prompt.ids, ids)
                samples.append(Sample(ids, scores, ((8, self.stock.score(prompt.ids, ids, 8)),)))
                seen.append(Seen(prompt.id, prompt.category, prompt.ids, ids, scores))
            floor = self.recorder.floor = measure_floor(samples, "fp32")
            self.ask("forcing", self.candidate, prompts[:2])  # a batch
            for probe in find(seen, floor, self.material.stop_ids, Want(100, NEW_TOKENS, sharp=4)):
                asked = [HiddenPrompt(probe.id, probe.category, probe.prefix)]
                self.ask("probing", self.candidate, asked, probe.max_new_tokens, probe=probe)
            found = forcing.report(self.scored, floor, self.material.stop_ids, self.material.decode)
            if objection := forcing.objection(found):
                return Judgement("lossy", objection, forcing=found)
            pairs = []
            for pair, prompt in enumerate(prompts[12:24], start=1):
                numbers = [self.ask("timing", seat, [prompt]) for seat in (self.rival, self.candidate)]
                self.recorder.paired(pair, *numbers)
                one, other = (self.recorder.exchanges[number] for number in numbers)
                pairs.append(
                    Pair(prompt.id, one.seconds, other.seconds, len(one.texts[0].ids), len(other.texts[0].ids))
                )
            comparison = bench.summarise("the incumbent", pairs, [])
        except ChildFailed as failure:
            kinds: dict[str, Verdict] = {"crashed": "crashed", "timed out": "timed out"}
            return Judgement(kinds.get(failure.kind, "invalid"), failure.reason)
        found = forcing.report(self.scored, floor, self.material.stop_ids, self.material.decode)
        if objection := forcing.objection(found):
            return Judgement("lossy", objection, forcing=found, comparison=comparison)
        verdict: Verdict = "accepted" if bench.is_gain(comparison) else "slower"
        return Judgement(verdict, "", forcing=found, comparison=comparison)


Again = Callable[..., tuple[Record, Replay]]


@pytest.fixture
def again(material: Material, tmp_path: Path) -> Again:
    """Record a trial of a toy, change the record where a test wants that, and replay it."""

    def run(
        name: str, *, source: str | None = None, change: Callable[[Record], Record] = lambda kept: kept
    ) -> tuple[Record, Replay]:
        folder = tmp_path / "search"
        kept = change(record.read(Mini(material, folder, toy(name), source=source).run()))
        again = tmp_path / "again"
        again.mkdir()
        return kept, replay(kept, material, again, silent, ours=anything)

    return run


def test_an_honest_trial_reproduces(again: Again) -> None:
    kept, result = again("honest")
    assert result.reproduces
    assert (result.then.verdict, result.now.verdict) == ("accepted", "accepted")
    assert result.tokens_equal
    assert result.counts_equal
    assert result.first_difference == ""
    assert result.then.counts == result.now.counts
    assert result.now.counts is not None
    assert result.now.counts.error == 0
    assert result.now.counts.exact > 5 * NEW_TOKENS
    assert result.then.timing is not None
    assert result.now.timing is not None
    assert result.now.timing.pairs == result.then.timing.pairs == 12
    assert 2.0 < result.now.timing.ratio < 8.0  # the toy is four times as fast
    assert result.questions == len(kept.exchanges) == 1 + 4 + 24
    assert sentences(kept, result)[-1] == "It reproduces."


def test_a_source_candidate_is_built_from_the_text_of_its_record(again: Again, tmp_path: Path) -> None:
    file = tmp_path / "candidate_source.py"
    file.write_text(TOYS.read_text())
    before = record.source_of(f"{file}:honest")
    kept, result = again("", source=f"{file}:honest", change=lambda kept: (file.unlink(), kept)[1])
    assert result.reproduces
    assert kept.source == before
    assert f"source {before.function}" in sentences(kept, result)[0]


def test_a_lossy_trial_reproduces_with_its_reason(again: Again) -> None:
    _, result = again("constant")
    assert result.reproduces
    assert result.now.verdict == result.then.verdict == "lossy"
    assert "differ from stock beyond its noise" in result.now.reason
    assert result.now.counts is not None
    assert result.now.counts.error > 0


@pytest.mark.parametrize(("name", "verdict"), [("dies_when_asked", "crashed"), ("too_many", "invalid")])
def test_a_trial_whose_candidate_failed_reproduces(again: Again, name: str, verdict: str) -> None:
    _, result = again(name)
    assert result.reproduces
    assert result.now.verdict == result.then.verdict == verdict
    assert result.now.counts is None


def test_a_candidate_that_answers_otherwise_now_is_told_with_its_first_token(again: Again) -> None:
    code = TOYS.read_text().replace("def honest(", "def was_honest(") + (
        "\n\ndef honest(deployment, plan, threads):\n"
        "    def text(prompt, limit, stop_ids):\n"
        "        ids = greedy(prompt, limit, stop_ids)\n"
        "        return [*ids[:1], 1 + ids[1] % (VOCAB - 1), *ids[2:]] if len(ids) > 2 else ids\n"
        "    return Toy(STOCK_S / 4, text)\n"
    )

    def exchange_source(kept: Record) -> Record:
        assert kept.source is None
        source = record.Source("honest", code, __import__("hashlib").sha256(code.encode()).hexdigest())
        return dataclasses.replace(kept, source=source)

    kept, result = again("honest", change=exchange_source)
    assert not result.reproduces
    assert not result.tokens_equal
    assert (result.then.verdict, result.now.verdict) == ("accepted", "lossy")
    assert result.first_difference.startswith("question 1 (forcing, prompt p0), token 2: ")
    lines = sentences(kept, result)
    assert any(line.startswith("reason ") for line in lines)
    assert lines[-1] == "It does not reproduce."


def test_a_candidate_that_fails_now_does_not_reproduce(again: Again) -> None:
    def exchange_backend(kept: Record) -> Record:
        return dataclasses.replace(kept, backends={**kept.backends, CANDIDATE: toy("dies_when_asked")})

    _, result = again("honest", change=exchange_backend)
    assert not result.reproduces
    assert result.now.verdict == "crashed"
    assert "no answer now" in result.first_difference


def test_answers_faster_than_the_device_are_refused_again(again: Again) -> None:
    def slow_device(kept: Record) -> Record:
        return dataclasses.replace(kept, read_limit=ReadLimit(1e9, 0.0, 1e9))

    _, result = again("honest", change=slow_device)
    assert not result.reproduces
    assert (result.tokens_equal, result.now.verdict) == (True, "invalid")
    assert "sooner than the weights can be read" in result.now.reason


def test_an_incumbent_that_was_slowed_is_seen_again(material: Material, tmp_path: Path) -> None:
    kept = record.read(Mini(material, tmp_path, toy("honest")).run())
    beside = [each for each in kept.exchanges if each.role == INCUMBENT]

    def alone(share: float) -> list[record.Exchange]:
        return [
            *(dataclasses.replace(each, phase=ALONE, pair=None, seconds=share * each.seconds) for each in beside[:5]),
            *kept.exchanges,
        ]

    slowed = replays.outcome(kept, alone(0.5), [], material)
    assert slowed.verdict == "invalid"
    assert "2.00x slower beside this candidate than alone" in slowed.reason
    assert replays.outcome(kept, alone(1.0), [], material).verdict == kept.judgement.verdict
    unknown = dataclasses.replace(kept, draft_tokens=None, read_limit=ReadLimit(1e9, 0.0, 1.0))
    assert replays.outcome(unknown, kept.exchanges, [], material).verdict == kept.judgement.verdict


def test_a_failing_incumbent_is_no_outcome(material: Material, tmp_path: Path) -> None:
    kept = record.read(Mini(material, tmp_path / "search", toy("honest")).run())
    broken = dataclasses.replace(kept, backends={**kept.backends, INCUMBENT: toy("dies_when_asked")})
    (tmp_path / "again").mkdir()
    with pytest.raises(ChildFailed) as caught:
        replay(broken, material, tmp_path / "again", silent, ours=anything)
    assert caught.value.role == INCUMBENT


@pytest.mark.parametrize(("name", "source"), [("honest", True), ("honest", False), ("ends_early", True)])
def test_a_trial_of_the_workbench_reproduces(
    make_bench: MakeBench, material: Material, tmp_path: Path, name: str, source: bool
) -> None:
    table = {PLAN: name}
    bench = make_bench(table, folder=tmp_path)
    judgement = bench.judge(2, PLAN, RIVAL, fresh=2, source=toy(name) if source else None)
    bench.close()
    assert judgement.record == "trials/002.json"
    kept = record.read(tmp_path / judgement.record)
    assert kept.judgement == judgement
    (tmp_path / "again").mkdir()
    result = replay(kept, material, tmp_path / "again", silent, ours=anything)
    assert result.tokens_equal, result.first_difference
    assert result.counts_equal
    if name == "ends_early":
        assert result.reproduces
        assert result.now.verdict == "lossy"
    else:  # what the clock decides may differ on a busy machine
        assert {result.then.verdict, result.now.verdict} <= {"accepted", "slower", "invalid"}


# The command line


def test_bad_input_is_one_sentence_and_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text("{}")
    for name in (str(tmp_path / "nowhere.json"), f"{tmp_path}:3", str(broken), str(tmp_path), "x" * 5000, "a\0b"):
        assert main(["judge", "replay", name]) == 2
        told = capsys.readouterr()
        assert told.out == ""
        assert told.err.startswith("python -m engine judge: ")
        assert told.err.count("\n") == 1


def test_a_target_that_is_not_here_is_bad_input(
    material: Material, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Mini(material, tmp_path, toy("honest")).run()
    assert main(["judge", "replay", f"{tmp_path}:4"]) == 2
    assert "toy" in capsys.readouterr().err


def test_from_the_command_line(
    material: Material, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Mini(material, tmp_path, toy("honest")).run()
    monkeypatch.setattr(replays, "material_of", lambda kept: material)  # the toy has no checkpoint
    monkeypatch.setattr(replays, "is_ours", anything)
    assert main(["judge", "replay", f"{tmp_path}:4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])
    assert result["reproduces"] is True
    assert result["now"]["verdict"] == "accepted"
    assert lines[-2] == "It reproduces."
    assert any(line.startswith("timing ") and " now, " in line for line in lines)


def test_a_record_cannot_name_code_to_run_unconfined(material: Material, tmp_path: Path) -> None:
    kept = record.read(Mini(material, tmp_path / "search", toy("honest")).run())
    good = dict.fromkeys(kept.backends, "engine.judge.stock:build_autoregressive")
    for role in (STOCK, CANDIDATE, INCUMBENT):
        evil = dataclasses.replace(kept, source=None, backends={**good, role: "/x/evil.py:evil"})
        folder = tmp_path / role
        folder.mkdir()
        cast = Cast(evil, material, folder, is_ours)
        with pytest.raises(UserError, match=f"as the {role}, which is not part of SpecPilot"):
            cast.seat(role)
        cast.close()


def test_which_backends_are_ours() -> None:
    assert all(is_ours(name) for name in BUILT_IN)
    assert is_ours("engine.judge.cheats.honest:Incumbent")
    assert not any(is_ours(name) for name in ("/x/evil.py:f", "engine.py:f", "os:system", "engineer.x:f", "nonesuch"))
