"""Bad deployments: one sentence that names the thing, and the field at fault, before any weight is read."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import engine.check
from engine.check import check_deployment
from engine.config import DraftConfig, ModelConfig
from engine.deployment import NO_DRAFTER, Deployment, Regime
from engine.errors import UserError
from engine.plan import Plan
from tests.drafters.checkpoints import SHAPE, save_dflash, save_target

WORDS = SHAPE["vocab_size"]
REGIME = Regime(max_prompt_tokens=40, max_new_tokens=20)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    save_target(folder / "target", words=WORDS)
    save_target(folder / "draft", words=WORDS, num_hidden_layers=1)
    save_target(folder / "other words", words=WORDS - 1)
    save_target(folder / "short", words=WORDS, max_position_embeddings=32)
    save_target(folder / "no tokenizer")
    save_dflash(folder / "dflash")
    return folder


def served(folder: Path, drafter: str = NO_DRAFTER, platform: str = "cpu", **regime: Any) -> Deployment:
    lengths = {"max_prompt_tokens": 40, "max_new_tokens": 20}
    ref = drafter if drafter == NO_DRAFTER else str(folder / drafter)
    return Deployment(str(folder / "target"), ref, Regime(**{**lengths, **regime}), platform)


def refused(deployment: Deployment, plan: Plan | None = None) -> UserError:
    with pytest.raises(UserError) as caught:
        check_deployment(deployment, plan or Plan(source="none"))
    sentence = caught.value.sentence
    assert sentence.endswith(".")
    assert "\n" not in sentence
    return caught.value


def test_facts(folder: Path) -> None:
    none = check_deployment(served(folder), Plan(source="ngram"))
    assert (none.drafter_kind, none.drafter, none.block_size) == ("none", None, 0)
    assert none.target.num_layers == SHAPE["num_hidden_layers"]
    assert 0 < none.memory_bytes < none.free_bytes

    block = check_deployment(served(folder, "dflash"), Plan(draft_tokens=5))
    assert (block.drafter_kind, block.block_size) == ("dflash", 6)
    assert isinstance(block.drafter, DraftConfig)
    assert block.context.block_size == 6
    assert block.context.max_context == SHAPE["max_position_embeddings"]

    model = check_deployment(served(folder, "draft"), None)
    assert model.drafter_kind == "draft_model"
    assert isinstance(model.drafter, ModelConfig)
    assert model.drafter.num_layers == 1
    assert model.context.drafter == "draft_model"


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"batch": 2}, "regime", "batch 2 is not supported yet"),
        ({"temperature": -0.1}, "regime", "temperature -0.1 is not a number from 0, greedy decoding, to 2"),
        ({"temperature": 2.5}, "regime", "temperature 2.5 is not a number"),
        ({"temperature": float("nan")}, "regime", "temperature nan is not a number"),
        ({"temperature": float("inf")}, "regime", "temperature inf is not a number"),
        ({"max_prompt_tokens": 0}, "regime", "at least one token"),
        ({"max_new_tokens": 0}, "regime", "at least one token"),
        ({"max_prompt_tokens": 150, "max_new_tokens": 43}, "regime", "are 193, and the context of the target"),
        ({"platform": "tpu:0"}, "platform", "no platform 'tpu:0'"),
        ({"platform": "cuda"}, "platform", "no platform 'cuda'"),
        ({"platform": "cuda:99"}, "platform", "cuda:99 does not exist"),
        ({"drafter": "nowhere"}, "drafter", "no such file or folder"),
        ({"drafter": "other words"}, "drafter", "its tokenizer is not that of"),
        ({"drafter": "no tokenizer"}, "drafter", "no tokenizer.json"),
        ({"drafter": "short"}, "regime", "context of the draft model"),
    ],
)
def test_what_the_deployment_gets_wrong(folder: Path, changes: dict[str, Any], field: str, words: str) -> None:
    error = refused(served(folder, **changes))
    assert words in error.sentence
    assert error.field == field


@pytest.mark.parametrize("temperature", [0, 1e-3, 0.7, 2.0])
def test_temperatures_that_can_be_served(folder: Path, temperature: float) -> None:
    check_deployment(served(folder, temperature=temperature), Plan(source="none"))


def test_the_longest_regime_that_fits(folder: Path) -> None:
    check_deployment(served(folder, max_prompt_tokens=150, max_new_tokens=42), Plan(source="none"))


def test_a_target_that_is_a_drafter(folder: Path) -> None:
    error = refused(Deployment(str(folder / "dflash"), NO_DRAFTER, REGIME))
    assert error.field == "target"


def test_a_neural_source_without_a_neural_drafter(folder: Path) -> None:
    error = refused(served(folder), Plan(source="neural"))
    assert error.field == "plan"
    assert "source" in error.sentence


def test_not_enough_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.check, "free_bytes", lambda platform: 200_000_000)
    error = refused(served(folder))
    assert "0.2 GB are free" in error.sentence
    assert "needs about 0.5 GB" in error.sentence  # nearly all of it is the process itself


def broken(source: Path, to: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> Path:
    """A copy of a drafter whose (config, tensors) were changed."""
    to.mkdir()
    config, tensors = json.loads((source / "config.json").read_text()), load_file(source / "model.safetensors")
    change(config, tensors)
    (to / "config.json").write_text(json.dumps(config))
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


def set_config(**values: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda config, tensors: config.update(values)


def set_dflash(**values: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda config, tensors: config["dflash_config"].update(values)


DRAFTERS: dict[str, tuple[Callable[[dict[str, Any], dict[str, Any]], Any], str]] = {
    "vocabulary": (set_config(vocab_size=62), "a vocabulary of 62, and the target's is 61"),
    "hidden size": (set_config(hidden_size=32), "a hidden size of 32, and the target's is 24"),
    "layer count": (set_config(num_target_layers=6), "a number of target layers of 6, and the target's is 5"),
    "no layer count": (set_config(num_target_layers=None), "num_target_layers is missing"),
    "tap too high": (set_dflash(target_layer_ids=[1, 5, 3]), "reads target layer 5, and the layers are 0 to 4"),
    "negative tap": (set_dflash(target_layer_ids=[1, -1, 3]), "reads target layer -1"),
    "no taps": (set_dflash(target_layer_ids=[]), "target_layer_ids"),
    "mask token": (set_dflash(mask_token_id=61), "mask token 61 is outside the vocabulary"),
    "no mask token": (lambda config, tensors: config["dflash_config"].pop("mask_token_id"), "mask_token_id is missing"),
    "block of one": (set_config(block_size=1), "block_size is 1"),
    "missing tensor": (lambda config, tensors: tensors.pop("fc.weight"), "tensor fc.weight is missing"),
    "unexpected tensor": (
        lambda config, tensors: tensors.update({"extra.weight": tensors["norm.weight"].clone()}),
        "tensor extra.weight is unexpected",
    ),
    "misshaped tensor": (
        lambda config, tensors: tensors.update({"fc.weight": tensors["fc.weight"][:, :-1].contiguous()}),
        "tensor fc.weight has shape [24, 71], and its configuration asks for [24, 72]",
    ),
    "one tap fewer": (set_dflash(target_layer_ids=[1, 3]), "tensor fc.weight has shape [24, 72]"),
    "causal": (set_config(is_causal=True), "is_causal"),
    "sliding": (set_config(layer_types=["full_attention", "sliding_attention", "full_attention"]), "sliding"),
    "DFlash2 by name": (set_config(architectures=["DFlash2DraftModel"]), "DFlash2"),
    "DFlash2 by settings": (set_dflash(conv_kernel_size=4), "DFlash2"),
    "EAGLE-3": (set_config(architectures=["LlamaForCausalLMEagle3"]), "EAGLE"),
    "speculators": (set_config(speculators_model_type="eagle3"), "speculators"),
    "Llama layers": (set_config(model_type="llama"), "only qwen3 layers"),
}


@pytest.mark.parametrize(("change", "words"), DRAFTERS.values(), ids=DRAFTERS.keys())
def test_drafters_that_do_not_fit(folder: Path, tmp_path: Path, change: Any, words: str) -> None:
    path = broken(folder / "dflash", tmp_path / "drafter", change)
    error = refused(Deployment(str(folder / "target"), str(path), REGIME))
    assert error.field == "drafter"
    assert words in error.sentence


def test_a_truncated_drafter(folder: Path, tmp_path: Path) -> None:
    path = broken(folder / "dflash", tmp_path / "drafter", lambda config, tensors: None)
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    error = refused(Deployment(str(folder / "target"), str(path), REGIME))
    assert (error.field, error.code) == ("drafter", "truncated")


def test_the_demo_deployment_is_fine(demo_target: Path, demo_drafter: Path) -> None:
    facts = check_deployment(Deployment(), Plan())
    assert (facts.drafter_kind, facts.block_size, facts.target.num_layers) == ("dflash", 8, 30)


def test_checking_needs_no_torch(folder: Path) -> None:
    """A form or a command that checks a deployment must answer at once."""
    program = f"""
import sys
from engine.check import check_deployment
from engine.deployment import Deployment, Regime
from engine.plan import Plan
for drafter in ("dflash", "draft"):
    regime = Regime(max_new_tokens=20, max_prompt_tokens=40)
    deployment = Deployment({str(folder / "target")!r}, {str(folder)!r} + "/" + drafter, regime)
    check_deployment(deployment, Plan(draft_tokens=5))
print("torch" in sys.modules)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
