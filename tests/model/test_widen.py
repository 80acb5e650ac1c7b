"""Widened checkpoints compute what the narrow ones do, read by us and by transformers."""

from __future__ import annotations

import dataclasses
import json
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from tiny import VARIANTS, random_ids, reference_logits, save

from engine.cli import main
from engine.config import DraftConfig, config_from_hf, config_to_hf
from engine.deployment import DEMO_DRAFTER, DEMO_TARGET, Deployment, Regime
from engine.drafters.dflash import DFlashDrafter
from engine.drafters.reference import open_drafter
from engine.errors import UserError
from engine.generate import Decoder, StopRule, build_decoder
from engine.model import Model
from engine.plan import Plan
from engine.tokenizer import load_tokenizer
from engine.weights import open_checkpoint
from engine.widen import MARK, Tile, new_folder, note, repeat, target_tiles, wide_config, write_shards
from tests.drafters.checkpoints import save_dflash, save_target

BOTH = Plan(source="neural", draft_tokens=5)


def widen(*arguments: str) -> int:
    return main(["widen", *arguments])


def open_model(folder: Path) -> Model:
    return Model(open_checkpoint(str(folder)), device="cpu", dtype=torch.float32, plan=Plan())


def logits(model: Model, ids: list[int]) -> torch.Tensor:
    cache = model.new_cache(len(ids))
    found = model.forward(torch.tensor(ids), torch.arange(len(ids)), cache).logits
    assert found is not None
    return found


def add_tokenizer(folder: Path, words: int = 203) -> None:
    import tokenizers
    from tokenizers.models import WordLevel

    vocabulary = {f"w{index}": index for index in range(words)}
    tokenizers.Tokenizer(WordLevel(vocabulary, unk_token="w0")).save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("factor", [2, 4])
def test_the_wide_model_computes_what_the_narrow_one_does(tmp_path: Path, variant: str, factor: int) -> None:
    narrow, reference = save(tmp_path / "narrow", variant)
    add_tokenizer(narrow)
    assert (
        widen("--target", str(narrow), "--factor", str(factor), "--dtype", "fp32", "--out", str(tmp_path / "out")) == 0
    )
    folder = tmp_path / "out" / "target"
    checkpoint = open_checkpoint(str(folder))
    checkpoint.check()
    assert checkpoint.config.hidden_size == factor * reference.config.hidden_size
    assert checkpoint.config.num_kv_heads == factor * reference.config.num_key_value_heads
    ids = random_ids(23)
    expected = reference_logits(reference, ids)
    assert expected.abs().max() > 0.5
    assert (logits(open_model(folder), ids) - expected).abs().max() < 1e-3
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert (reference_logits(theirs, ids) - expected).abs().max() < 1e-3
    assert load_tokenizer(checkpoint).fingerprint == load_tokenizer(open_checkpoint(str(narrow))).fingerprint


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("taps", [[1, 0, 3], [4, 0, 4]])
def test_a_drafter_is_widened_with_its_target(tmp_path: Path, tied: bool, taps: list[int]) -> None:
    """The same drafts, and so the same accepted tokens step by step; one of the cases taps the last layer."""
    target, drafter = tmp_path / "target", tmp_path / "drafter"
    save_target(target, tie_word_embeddings=tied, words=61)
    save_dflash(drafter, dflash_config={"mask_token_id": 9, "target_layer_ids": taps})
    out = tmp_path / "wide"
    given = ["--target", str(target), "--drafter", str(drafter), "--factor", "4", "--dtype", "fp32", "--out", str(out)]
    assert widen(*given) == 0
    texts = [written(target, drafter), written(out / "target", out / "drafter")]
    assert texts[0] == texts[1]
    assert len(texts[0][0]) == 40


def written(target: Path, drafter: Path) -> tuple[list[int], list[int]]:
    model, reference = open_model(target), open_drafter(str(drafter))
    assert reference.checkpoint is not None
    assert isinstance(reference.config, DraftConfig)
    drafts = DFlashDrafter(reference.checkpoint, reference.config, model, BOTH)
    text = Decoder(model, drafts, BOTH).generate([1, 17, 42, 5, 5, 60, 33], 40, StopRule(()))
    return text.ids, text.emitted_per_step


def test_division_is_exact_in_bf16_or_refused() -> None:
    weights = torch.randn(6, 8).to(torch.bfloat16)
    wide = repeat(weights, Tile(2, 2, (0.125,)))
    assert wide.shape == (12, 16)
    for rows in wide.split(6):
        for block in rows.split(8, dim=1):
            assert torch.equal(block.double() * 8, weights.double())
    weights[3, 5] = 2.0**-133  # the smallest bf16 there is
    with pytest.raises(UserError, match="k_proj holds values that cannot be divided by 8 exactly"):
        repeat(weights, Tile(2, 2, (0.125,)), "k_proj")


def test_groups_of_columns_have_scales_of_their_own() -> None:
    weights = torch.arange(1.0, 13.0).view(2, 6)
    wide = repeat(weights, Tile(2, 2, (0.5, 1.0)))
    left, right = weights[:, :3] * 0.5, weights[:, 3:]
    assert torch.equal(wide, torch.cat([left, left, right, right], dim=1).repeat(2, 1))


def test_every_tensor_of_the_wide_model_has_its_shape(tmp_path: Path) -> None:
    from engine.weights import expected_tensors

    for variant in VARIANTS:
        config = open_checkpoint(str(save(tmp_path / variant, variant)[0])).config
        wide, tiles = expected_tensors(wide_config(config, 8)), target_tiles(config, 8)
        assert tiles.keys() == wide.keys()
        for name, shape in expected_tensors(config).items():
            assert repeat(torch.ones(shape), tiles[name]).shape == wide[name], name


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_configuration_can_be_written_and_read_again(tmp_path: Path, variant: str) -> None:
    config = open_checkpoint(str(save(tmp_path, variant)[0])).config
    again = config_from_hf(config_to_hf(config), "again")
    assert dataclasses.replace(again, name="") == dataclasses.replace(config, name="")


def test_large_checkpoints_come_in_shards(tmp_path: Path) -> None:
    folder, reference = save(tmp_path / "one", "llama")
    checkpoint = open_checkpoint(str(folder))
    shards = tmp_path / "shards"
    shards.mkdir()
    write_shards(((name, checkpoint.tensor(name)) for name in checkpoint.names()), shards, shard_bytes=100_000)
    shutil.copyfile(folder / "config.json", shards / "config.json")
    assert len(list(shards.glob("model-*.safetensors"))) > 2
    ids = random_ids(9)
    assert (logits(open_model(shards), ids) - reference_logits(reference, ids)).abs().max() < 1e-3


def test_it_says_what_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    narrow, _ = save(tmp_path / "small-model", "llama")
    add_tokenizer(narrow)
    assert widen("--target", str(narrow), "--factor", "2", "--out", str(tmp_path / "once")) == 0
    assert "widened 2x from small-model: real text" in capsys.readouterr().out
    once = tmp_path / "once" / "target"
    assert open_checkpoint(str(once)).tensor("model.norm.weight").dtype == torch.bfloat16
    assert widen("--target", str(once), "--factor", "4", "--out", str(tmp_path / "twice")) == 0
    assert "widened 8x from small-model" in capsys.readouterr().out
    assert note({}) is None
    assert note({MARK: "yes"}) is None


Break = Callable[[pytest.MonkeyPatch, Path], list[str]]


def no_room(monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[str]:
    usage = shutil.disk_usage(folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    return []


def taken(monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[str]:
    (folder / "out").mkdir()
    return []


def no_tokenizer(monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[str]:
    (folder / "narrow" / "tokenizer.json").unlink()
    return []


def a_draft_model(monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[str]:
    return ["--drafter", str(folder / "narrow")]


def another_width(monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[str]:
    save_dflash(folder / "drafter")
    return ["--drafter", str(folder / "drafter")]


@pytest.mark.parametrize(
    ("breaks", "sentence"),
    [
        (no_room, "0.0 GB are free"),
        (taken, "exists already; name another folder"),
        (no_tokenizer, "it has no tokenizer.json"),
        (a_draft_model, "is a draft model, which does not depend on its target's width"),
        (another_width, "does not fit the target"),
    ],
)
def test_what_cannot_be_done_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], breaks: Break, sentence: str
) -> None:
    narrow, _ = save(tmp_path / "narrow", "llama")
    add_tokenizer(narrow)
    more = breaks(monkeypatch, tmp_path)
    before = {path.name for path in tmp_path.iterdir()}
    capsys.readouterr()
    assert widen("--target", str(narrow), "--out", str(tmp_path / "out"), *more) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == before
    assert not any((tmp_path / "out").glob("*"))


def test_a_disk_that_takes_no_more_is_one_sentence(tmp_path: Path) -> None:
    """The kernel refuses to let the file grow, as it does on a full disk."""
    narrow, _ = save(tmp_path / "narrow", "llama")
    add_tokenizer(narrow)
    asked = ["widen", "--target", str(narrow), "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-m", "engine", *asked],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000)),
    )
    assert done.returncode == 2, done.stderr
    assert "The checkpoint cannot be written" in done.stderr
    assert done.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["narrow"]


def test_a_write_that_is_cut_short_leaves_nothing(tmp_path: Path) -> None:
    def cut_short(part: Path) -> None:
        (part / "half").write_text("written")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), new_folder(tmp_path / "out") as part:
        cut_short(part)
    assert not list(tmp_path.iterdir())


def test_the_tokenizer_of_a_gguf_file_is_written_for_others(tmp_path: Path, demo_target: Path) -> None:
    from engine.tokenizer import save_tokenizer

    checkpoint = open_checkpoint(str(demo_target))
    save_tokenizer(checkpoint, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config_to_hf(checkpoint.config)))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    mine = load_tokenizer(checkpoint)
    text = "Ein Maß für die Wärme:\n\t 36.6 °C — naïve café 北京 🙂"
    assert theirs(text)["input_ids"] == mine.encode(text)
    messages = [{"role": "user", "content": "Why is the sky blue?"}]
    assert theirs.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    ) == mine.chat(messages)
    assert (
        dataclasses.replace(config_from_hf(config_to_hf(checkpoint.config), "again"), name=checkpoint.config.name)
        == checkpoint.config
    )


@pytest.mark.slow
def test_the_demo_pair_widened_twice_writes_the_same_text(tmp_path: Path) -> None:
    assert widen("--factor", "2", "--dtype", "fp32", "--out", str(tmp_path / "wide")) == 0
    regime = Regime(max_prompt_tokens=64, max_new_tokens=32)
    found = []
    for target, drafter in ((DEMO_TARGET, DEMO_DRAFTER), (tmp_path / "wide/target", tmp_path / "wide/drafter")):
        decoder = build_decoder(Deployment(str(target), str(drafter), regime, "cpu", "fp32"), BOTH)
        text = decoder.generate(list(range(400, 440)), 32, StopRule(()))
        found.append((text.ids, text.emitted_per_step))
    assert found[0] == found[1]
