"""A user's mistake: exit status 2, one sentence on standard error that names the thing, and nothing begun."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from engine import bundle as bundles
from engine.archive import pack
from engine.cli import main
from engine.deployment import Deployment
from engine.search.console import LineScreen
from engine.search.events import Budget
from engine.search.run import search

Refused = Callable[..., str]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """Runs a command that must be refused; returns the sentence."""

    def run(*argv: str | Path) -> str:
        capsys.readouterr()
        try:
            status = main([str(a) for a in argv])
        except SystemExit as stop:  # argparse
            status = int(stop.code or 0)
        told = capsys.readouterr()
        assert status == 2
        assert told.out == ""
        assert told.err.startswith("python -m engine")
        assert told.err.count("\n") == 1
        assert "Traceback" not in told.err
        return told.err.strip()

    return run


@pytest.fixture
def search_refused(refused: Refused, prompts: Path, tmp_path: Path) -> Refused:
    """A search that must be refused before anything is written."""

    def run(target: str | Path | None, *options: str | Path) -> str:
        out = tmp_path / "out"
        where = () if target is None else ("--target", target)
        with_prompts = () if "--prompts" in options else ("--prompts", prompts)
        sentence = refused("search", *where, *with_prompts, "--platform", "cpu", "--out", out, *options)
        assert not out.exists()
        return sentence

    return run


@pytest.fixture
def target(tiny_target: Path, tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint, to be damaged."""
    return Path(shutil.copytree(tiny_target, tmp_path / "model"))


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_tensors(folder: Path, change: Callable[[dict[str, np.ndarray]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


# Targets --------------------------------------------------------------------------------------------------------


def test_paths_that_are_no_checkpoint(search_refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "empty").mkdir()
    for name in ("nowhere", "notes.txt", "empty"):
        sentence = search_refused(tmp_path / name)
        assert str(tmp_path / name) in sentence
        assert "checkpoint" in sentence or "no such file" in sentence


def test_truncated_gguf(search_refused: Refused, demo_target: Path, tmp_path: Path) -> None:
    size = demo_target.stat().st_size
    for kept in (16, 100_000, size - 1):
        cut = tmp_path / f"cut-{kept}.gguf"
        with demo_target.open("rb") as source:
            cut.write_bytes(source.read(kept))
        assert "truncated" in search_refused(cut)


def test_truncated_safetensors(search_refused: Refused, target: Path) -> None:
    weights = target / "model.safetensors"
    whole = weights.read_bytes()
    for kept in (4, 200, len(whole) - 1):
        weights.write_bytes(whole[:kept])
        assert "truncated or damaged" in search_refused(target)


def test_missing_and_unexpected_tensors(search_refused: Refused, target: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    edit_tensors(target, lambda tensors: tensors.update(surplus=tensors.pop(name)))
    assert f"tensor {name} is missing" in search_refused(target)
    edit_tensors(target, lambda tensors: tensors.update({name: tensors["surplus"]}))
    assert "tensor surplus is unexpected" in search_refused(target)


def test_unknown_architecture(search_refused: Refused, target: Path) -> None:
    edit_config(target, model_type="mamba", architectures=["MambaForCausalLM"])
    assert "mamba" in search_refused(target).lower()


def test_unknown_rope_type(search_refused: Refused, target: Path) -> None:
    edit_config(target, rope_parameters={"rope_type": "spiral", "rope_theta": 1e4, "factor": 2.0})
    assert "spiral" in search_refused(target)


def test_target_without_tokenizer(search_refused: Refused, target: Path) -> None:
    (target / "tokenizer.json").unlink()
    assert "tokenizer.json" in search_refused(target)


# Drafters -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("vocab_size", 32000, "vocabulary"),
        ("hidden_size", 512, "hidden size"),
        ("num_target_layers", 28, "target layers"),
    ],
)
def test_drafter_of_another_target(
    search_refused: Refused, demo_target: Path, demo_drafter: Path, tmp_path: Path, field: str, value: int, named: str
) -> None:
    drafter = tmp_path / "drafter"
    drafter.mkdir()
    (drafter / "model.safetensors").symlink_to(demo_drafter / "model.safetensors")
    shutil.copy(demo_drafter / "config.json", drafter)
    edit_config(drafter, **{field: value})
    sentence = search_refused(demo_target, "--drafter", drafter)
    assert named in sentence
    assert str(value) in sentence
    assert str(drafter) in sentence


def test_draft_model_with_another_tokenizer(search_refused: Refused, tiny_target: Path, target: Path) -> None:
    data = json.loads((target / "tokenizer.json").read_text())
    vocabulary = data["model"]["vocab"]
    first, second = list(vocabulary)[5:7]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (target / "tokenizer.json").write_text(json.dumps(data))
    sentence = search_refused(tiny_target, "--drafter", target)
    assert "tokenizer" in sentence
    assert str(target) in sentence


# Regime, memory, plan, prompts ----------------------------------------------------------------------------------


def test_regime_longer_than_the_context(search_refused: Refused, tiny_target: Path) -> None:
    sentence = search_refused(tiny_target, "--max-new-tokens", "900", "--max-prompt-tokens", "200")
    assert "context" in sentence
    assert "1024" in sentence


def test_more_memory_than_there_is(search_refused: Refused, tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.check.free_bytes", lambda platform: 1000)
    assert "are free" in search_refused(tiny_target)


def test_unknown_platform(refused: Refused) -> None:
    assert "'abacus'" in refused("search", "--platform", "abacus")


@pytest.mark.parametrize(
    ("plan", "named"),
    [
        ('{"gemm": "magic"}', "gemm"),
        ('{"warp": 9}', "warp"),
        ('{"source": "neural"}', "source"),
        ('{"source": "ngram", "tree_rows": 5}', "tree_rows"),
        ('{"draft_tokens": "many"}', "draft_tokens"),
        ("{", "not JSON"),
        ("[]", "plan"),
    ],
)
def test_unknown_lever_values(
    search_refused: Refused, tiny_target: Path, tmp_path: Path, plan: str, named: str
) -> None:
    (tmp_path / "plan.json").write_text(plan)
    assert named in search_refused(tiny_target, "--plan", tmp_path / "plan.json")


def test_lever_set_on_the_command_line(refused: Refused, tiny_target: Path) -> None:
    base = ("plan", "--target", tiny_target, "--platform", "cpu")
    assert "LEVER=VALUE" in refused(*base, "--set", "gemm")
    assert "gemm" in refused(*base, "--set", "gemm=magic")
    assert "ngram_max" in refused(*base, "--set", "ngram_max=5")


def test_prompts_with_a_broken_line(search_refused: Refused, tiny_target: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    for broken in ("{", '{"text": "x"}', '{"prompt": ""}', '{"turns": [3]}', "7"):
        path.write_text('{"prompt": "one"}\n\n{"prompt": "two"}\n' + broken + "\n")
        sentence = search_refused(tiny_target, "--prompts", path)
        assert f"{path}, line 4" in sentence
    path.write_text("")
    assert "empty" in search_refused(tiny_target, "--prompts", path)
    assert "nothing.jsonl" in search_refused(tiny_target, "--prompts", tmp_path / "nothing.jsonl")


# Options --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv",
    [
        ("serch",),
        (),
        ("search", "--trials", "0"),
        ("search", "--seconds", "nan"),
        ("search", "--max-new-tokens", "-3"),
        ("search", "--dtype", "fp8"),
        ("search", "surplus"),
        ("search", "--temperature", "2.5"),
        ("search", "--temperature", "nan"),
        ("generate",),
        ("generate", "--prompt", "x", "--temperature", "-1"),
        ("generate", "--prompt", "x", "--temperature", "hot"),
        ("generate", "--prompt", "x", "--seed", "-1"),
        ("verify", "--bundle", "x.zip", "--tolerance", "1"),
        ("plan", "--bundle", "a", "--plan", "b"),
    ],
)
def test_bad_usage_is_one_line_too(refused: Refused, argv: tuple[str, ...]) -> None:
    assert "--help" in refused(*argv)


def test_folders_that_cannot_be_used(refused: Refused, tmp_path: Path) -> None:
    assert "There is no search in" in refused("search", "--resume", tmp_path)
    assert "not both" in refused("search", "--resume", tmp_path, "--out", tmp_path)


def test_generate_needs_something_to_say(refused: Refused, tiny_target: Path) -> None:
    base = ("generate", "--target", tiny_target, "--platform", "cpu", "--prompt")
    assert "empty" in refused(*base, "")
    assert "context" in refused(*base, "word " * 1200)
    assert "not both" in refused(*base, "x", "--bundle", "b.zip", "--plan", "p.json")


# Bundles --------------------------------------------------------------------------------------------------------


@pytest.fixture
def bundle(deployment: Deployment, judge: type, tmp_path: Path) -> Path:
    state = search(deployment, Budget(trials=1), 1, tmp_path / "made", LineScreen())
    assert state.bundle is not None
    return tmp_path / "made" / state.bundle.file


@pytest.mark.parametrize("command", [("generate", "--prompt", "x"), ("verify",), ("plan",)])
def test_bundles_that_are_not_as_they_were_written(refused: Refused, bundle: Path, command: tuple[str, ...]) -> None:
    original = bundle.read_bytes()
    changed = bytearray(original)
    changed[len(changed) // 2] ^= 4
    bundle.write_bytes(changed)
    assert str(bundle) in refused(*command, "--bundle", bundle)

    bundle.write_bytes(original)
    with zipfile.ZipFile(bundle, "a") as archive:
        archive.writestr("../plan.json", "{}")
    assert "'../plan.json'" in refused(*command, "--bundle", bundle)

    bundle.write_bytes(pack({"manifest.json": b'{"schema": 2}'}))
    assert "update SpecPilot" in refused(*command, "--bundle", bundle)

    bundle.unlink()
    assert "does not exist" in refused(*command, "--bundle", bundle)


def test_bundle_of_another_checkpoint(refused: Refused, bundle: Path, target: Path) -> None:
    edit_tensors(target, lambda tensors: tensors.update({"model.norm.weight": tensors["model.norm.weight"] * 2}))
    sentence = refused("verify", "--bundle", bundle, "--target", target)
    assert "model.safetensors" in sentence
    assert str(target) in sentence


def test_bundle_whose_prompts_are_elsewhere(refused: Refused, bundle: Path, prompts: Path) -> None:
    assert bundles.read(bundle).deployment.regime.prompts == str(prompts)
    prompts.unlink()
    assert "--prompts" in refused("verify", "--bundle", bundle)


# As a process ---------------------------------------------------------------------------------------------------


def test_as_a_process_too(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "engine", "search", "--target", str(tmp_path / "nowhere"), "--platform", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "nowhere: no such file or folder" in done.stderr


def test_a_reader_that_goes_away_is_no_error() -> None:
    command = f"set -o pipefail; {sys.executable} -m engine levers --platform cpu | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout.startswith("source")


def test_a_pipe_a_device_and_an_impossible_path_are_refused_at_once(
    search_refused: Refused, tiny_target: Path, tmp_path: Path
) -> None:
    pipe = tmp_path / "pipe.gguf"
    os.mkfifo(pipe)
    assert "no checkpoint" in search_refused(pipe)
    assert "pipe or a device" in search_refused(tiny_target, "--prompts", pipe)
    assert "pipe or a device" in search_refused(tiny_target, "--prompts", "/dev/zero")
    assert "not a file" in search_refused(tiny_target, "--plan", pipe)
    assert "not a path" in search_refused("/a" * 3000)
    assert "not a path" in search_refused("/tmp/" + "a" * 500)
    assert "not a path" in search_refused(tiny_target, "--prompts", "/tmp/" + "a" * 500)
    assert "not a path" in search_refused(tiny_target, "--prompts", "/tmp/a\0b")


def test_a_prompts_file_of_endless_size_is_not_read(search_refused: Refused, tiny_target: Path, tmp_path: Path) -> None:
    path = tmp_path / "huge.jsonl"
    with path.open("wb") as file:
        file.truncate(65 * 2**20)  # sparse: takes no disk
    assert "over 64 MiB" in search_refused(tiny_target, "--prompts", path)


def test_deep_json_is_refused(search_refused: Refused, refused: Refused, tiny_target: Path, tmp_path: Path) -> None:
    deep = tmp_path / "deep.json"
    deep.write_text("[" * 200_000)
    assert "not JSON" in search_refused(tiny_target, "--plan", deep)
    target = tmp_path / "deep"
    target.mkdir()
    (target / "config.json").write_text("[" * 200_000)
    assert "cannot be read as JSON" in search_refused(target)


def test_half_a_surrogate_is_refused(
    search_refused: Refused, refused: Refused, tiny_target: Path, tmp_path: Path
) -> None:
    path = tmp_path / "surrogate.jsonl"
    path.write_text('{"prompt": "fine"}\n{"prompt": "\\ud800 x"}\n')
    assert "line 2" in search_refused(tiny_target, "--prompts", path)
    assert "not valid Unicode" in refused(
        "generate", "--target", tiny_target, "--platform", "cpu", "--prompt", "\udcff"
    )


def test_numbers_are_not_read_from_text_or_truth(search_refused: Refused, tiny_target: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    for value in ('"3"', "true", "3.0e99"):
        plan.write_text(f'{{"draft_tokens": {value}}}')
        assert "draft_tokens" in search_refused(tiny_target, "--plan", plan)


def test_selftest_on_a_platform_that_is_not_here(refused: Refused) -> None:
    assert "cuda:99 does not exist" in refused("judge", "selftest", "--tiny", "--platform", "cuda:99")


def test_a_seed_without_a_temperature(refused: Refused, tiny_target: Path) -> None:
    sentence = refused("generate", "--target", tiny_target, "--drafter", "ngram", "--prompt", "a", "--seed", "3")
    assert "A seed changes nothing in greedy decoding" in sentence


def test_a_terminated_command_leaves_no_temporary_files(tmp_path: Path) -> None:
    """SIGTERM, as `timeout` and service managers send it, ends it like an interruption."""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "engine", "judge", "selftest", "--tiny", "--only", "hangs", "--platform", "cpu"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("specpilot-selftest-*/*/children/*.log")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        os.sched_yield()
    process.terminate()
    assert process.wait(30) == 128 + 15
    assert not list(tmp_path.glob("specpilot-selftest-*"))
