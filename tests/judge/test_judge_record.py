"""A trial's record: what is written is read again, and what is broken or newer is refused in one sentence."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.deployment import Deployment, Regime
from engine.errors import ChildError, UserError
from engine.hardware import identify_device
from engine.judge import record
from engine.judge.bench import ReadLimit
from engine.judge.floor import Floor
from engine.judge.forcing import Scored
from engine.judge.hidden import HiddenPrompt
from engine.judge.probes import Probe
from engine.judge.protocol import Scores, Text
from engine.judge.record import Record, Recorder, Source
from engine.judge.report import Comparison, Judgement, Pair
from engine.judge.seats import BatchReply
from engine.plan import Plan
from engine.sampling import Sampling

CODE = 'def build(deployment, plan, threads):\n    return "größer"  # \u2028 \\ " \n'


def some_prompt(rng: random.Random, name: str) -> HiddenPrompt:
    return HiddenPrompt(name, rng.choice(["math", "code"]), tuple(rng.randrange(50) for _ in range(rng.randint(1, 9))))


def some_text(rng: random.Random) -> Text:
    n = rng.randint(1, 6)
    return Text(tuple(rng.randrange(50) for _ in range(n)), rng.choice(["eos", "length"]), n, n)


def some_scores(rng: random.Random, n: int) -> Scores:
    def logits() -> tuple[float, ...]:
        return tuple(rng.gauss(0, 9) for _ in range(n))

    ids = tuple(rng.randrange(50) for _ in range(n))
    return Scores(ids, logits(), logits(), ids, logits(), 3)


def a_recorder(rng: random.Random) -> tuple[Recorder, list[Scored]]:
    """A trial with every kind of exchange."""
    recorder = Recorder(
        trial=7,
        fresh=3,
        seed=rng.randrange(2**31),
        deployment=Deployment("/models/a", "ngram", Regime(temperature=0.7, batch=2)),
        plan=Plan(draft_tokens=rng.randint(1, 9)),
        incumbent=Plan(source="ngram"),
        backends={"stock": "transformers", "candidate": "engine", "incumbent": "engine"},
        stop_ids=(2, 5),
        vocab_size=50,
        threads=2,
        source=Source("build", CODE, hashlib.sha256(CODE.encode()).hexdigest()),
        effort={"forcing_prompts": 2},
        floor=Floor(1e-4, 0, 64, "made up", 2e-5, (1e-6, 2e-5)),
        read_limit=ReadLimit(1e9, 0.0, 5e10),
    )
    scored = []
    for number in range(3):
        prompts = [some_prompt(rng, f"p{number}a"), some_prompt(rng, f"p{number}b")]
        sampling = Sampling(0.7, rng.getrandbits(63), (2 * number, 2 * number + 1))
        texts = (some_text(rng), some_text(rng))
        mine = recorder.asked(
            "timing", "candidate", prompts, 6, BatchReply(texts, rng.uniform(0.1, 1)), sampling=sampling
        )
        theirs = recorder.asked(
            "timing", "incumbent", prompts, 6, BatchReply(texts, rng.uniform(0.1, 1)), sampling=sampling
        )
        if number:
            recorder.paired(number, mine, theirs)
        else:
            recorder.voided("another process ran", mine, theirs)
        scored += [
            Scored(p.id, p.category, p.ids, t, some_scores(rng, len(t.ids)), 6, stock=some_text(rng))
            for p, t in zip(prompts[:1], texts[:1], strict=True)
        ]
    probe = Probe("p1+4", "math", "sharp", (4, 5, 6, 7), (8,), 9, 10, 0.003, 3)
    asked = [HiddenPrompt(probe.id, probe.category, probe.prefix)]
    recorder.asked("probing", "candidate", asked, 3, BatchReply((some_text(rng),), 0.2), probe=probe)
    recorder.failed("forcing", "candidate", asked, 3, ChildError("crashed", "The candidate \x1b[31m fell over."))
    recorder.scored(scored)
    return recorder, scored


def a_judgement() -> Judgement:
    pair = Pair("p1", 1.0, 0.5, 6, 6)
    comparison = Comparison("the incumbent", (pair,), 2.0, 1.9, 2.1, 0.01, 0.02, 12.0, 6.0)
    return Judgement("crashed", "It fell over.", ("p1",), comparison=comparison)


def written(folder: Path, rng: random.Random) -> tuple[Path, Recorder, list[Scored]]:
    recorder, scored = a_recorder(rng)
    name = recorder.write(folder, a_judgement(), identify_device("cpu"))
    return folder / name, recorder, scored


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path, recorder, scored = written(tmp_path, random.Random())
    assert path == tmp_path / "trials" / "007.json"
    kept = record.read(path)
    assert kept.exchanges == tuple(recorder.exchanges)
    assert kept.judgement.record == "trials/007.json"
    assert kept.judgement.comparison == a_judgement().comparison
    assert (kept.source, kept.floor, kept.read_limit) == (recorder.source, recorder.floor, recorder.read_limit)
    assert (kept.plan, kept.incumbent, kept.deployment) == (recorder.plan, recorder.incumbent, recorder.deployment)
    assert kept.device["cores"] == identify_device("cpu").cores
    assert kept.versions["torch"] == identify_device("cpu").versions["torch"]
    mine = [exchange for exchange in kept.exchanges if exchange.role == "candidate"]
    texts = {(p.ids, t.text): t for e in mine for p, t in zip(e.prompts, e.texts, strict=False)}
    for one in scored:
        text = texts[one.prompt_ids, one.text]
        assert one.stock is not None
        assert (text.scores, text.stock_ids) == (one.scores, one.stock.ids)
    assert [exchange.pair for exchange in kept.exchanges[:6]] == [None, None, 1, 1, 2, 2]
    assert kept.exchanges[0].void == "another process ran"


def test_only_the_owner_reads_it_and_it_is_replaced_whole(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        path, *_ = written(tmp_path, random.Random())
    finally:
        os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    before = path.read_text()
    recorder, _ = a_recorder(random.Random())
    recorder.effort = {"unwritable": object()}
    with pytest.raises(ValueError, match="serialize"):
        recorder.write(tmp_path, a_judgement(), identify_device("cpu"))
    assert path.read_text() == before
    written(tmp_path, random.Random())
    assert path.read_text() != before
    assert [file.name for file in path.parent.iterdir()] == ["007.json"]


def test_a_search_folder_and_number_name_a_record(tmp_path: Path) -> None:
    path, *_ = written(tmp_path, random.Random())
    assert record.locate(f"{tmp_path}:7") == record.locate(f"{tmp_path}:007") == record.locate(str(path)) == path
    odd = tmp_path / "a:7"
    odd.write_text("{}")
    assert record.locate(str(odd)) == odd  # a path that is there is that path
    assert record.locate("nowhere.json") == Path("nowhere.json")


def refused(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        record.read(path)
    sentence = caught.value.sentence
    assert "\n" not in sentence.strip()
    assert len(sentence) < 600
    return sentence


def test_what_is_no_record_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    assert "cannot be read: No such file" in refused(path)
    assert "is not a file" in refused(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert "is not a file" in refused(tmp_path / "pipe")
    for text in ("", "{", "\xff", "[" * 100_000):
        path.write_bytes(text.encode("latin-1"))
        assert "not JSON" in refused(path)
    for data in ([], {}, {"schema": "1"}, {"schema": True}, {"schema": 0}):
        path.write_text(json.dumps(data))
        assert "no schema number" in refused(path)
    path.write_text(json.dumps({"schema": record.SCHEMA + 1, "anything": 1}))
    assert "written by a newer version" in refused(path)
    path.write_text('{"schema": 1}')
    assert "is broken: written" in refused(path)


def _set(*keys: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        *path, last = keys
        place: Any = data
        for key in path:
            place = place[key]
        place[last] = to

    return change


def _drop(*keys: Any) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        *path, last = keys
        place: Any = data
        for key in path:
            place = place[key]
        del place[last]

    return change


DAMAGES: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "unknown field": (_set("surprise", to=1), "surprise"),
    "missing field": (_drop("plan"), "plan"),
    "a role that is none": (_set("exchanges", 0, "role", to="judge"), "role"),
    "text for a number": (_set("exchanges", 0, "max_new_tokens", to="6"), "max_new_tokens"),
    "a token that is no number": (_set("exchanges", 0, "texts", 0, "ids", 0, to=True), "ids"),
    "a logit that is none": (_set("exchanges", 0, "texts", 0, "scores", "choice_logit", 0, to="x"), "choice_logit"),
    "a text too few": (_drop("exchanges", 0, "texts", 0), "as many texts"),
    "a request number too few": (_drop("exchanges", 0, "sampling", "requests", 0), "request numbers"),
    "a temperature of none": (_set("exchanges", 0, "sampling", "temperature", to=0.0), "temperature"),
    "another source": (_set("source", "text", to="def build(): pass"), "SHA-256 differs"),
    "an unknown lever": (_set("plan", "warp", to=9), "warp"),
    "a verdict that is none": (_set("judgement", "verdict", to="good"), "verdict"),
    "a zone that is none": (_set("exchanges", 6, "probe", "zone", to="dull"), "zone"),
    "a list for an object": (_set("deployment", to=[]), "deployment"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_record_is_refused_and_the_damage_named(damage: str, tmp_path: Path) -> None:
    path, *_ = written(tmp_path, random.Random())
    data = json.loads(path.read_text())
    change, named = DAMAGES[damage]
    change(damaged := copy.deepcopy(data))
    path.write_text(json.dumps(damaged))
    assert named in refused(path)
    path.write_text(json.dumps(data))
    assert isinstance(record.read(path), Record)


def test_a_source_file_is_taken_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "kernel.py"
    file.write_bytes(CODE.encode())
    source = record.source_of(f"{file}:build")
    assert source == Source("build", CODE, hashlib.sha256(file.read_bytes()).hexdigest())
    file.write_bytes(b"a\r\n\tb")
    assert record.source_of(f"{file}:build").text == "a\r\n\tb"
    file.write_bytes(b"\xff")
    with pytest.raises(UserError, match="not UTF-8"):
        record.source_of(f"{file}:build")
    with pytest.raises(UserError, match="cannot be read"):
        record.source_of(f"{tmp_path}/gone.py:build")


def test_a_missing_trial_is_refused_with_those_that_are_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no record of trial 7; it has none"):
        record.locate(f"{tmp_path}:7")
    folder = tmp_path / record.FOLDER
    folder.mkdir()
    for number in (3, 12):
        (folder / f"{number:03d}.json").write_text("{}")
    with pytest.raises(UserError, match=r"no record of trial 7; it has those of trials 3, 12"):
        record.locate(f"{tmp_path}:7")
    assert record.locate(f"{tmp_path}:12") == folder / "012.json"
