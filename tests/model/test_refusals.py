"""Each bad checkpoint: one sentence, before any weight is read, that names the thing."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import LLAMA3, build, save
from tiny_gguf import write

from engine.errors import UserError
from engine.weights import open_checkpoint

LLAMA = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}


def refusal(path: Path) -> UserError:
    """The error of opening and checking `path`; it is one sentence that names the path."""
    with pytest.raises(UserError) as caught:
        open_checkpoint(str(path)).check()
    error = caught.value
    assert str(path) in error.sentence
    assert error.sentence.endswith(".")
    assert "\n" not in error.sentence
    return error


def change_config(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    raw = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in raw.items() if value != "absent"}))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tmp_path / "model", "llama")[0]


CONFIGS: list[tuple[str, dict[str, Any], str]] = [
    ("fp8", {"quantization_config": {"quant_method": "fp8"}}, "quantised (FP8)"),
    ("awq", {"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantised (AWQ)"),
    ("gptq", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised (GPTQ)"),
    (
        "moe-type",
        {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]},
        "mixture of experts (qwen3_moe",
    ),
    ("moe-keys", {"model_type": "mixtral", "num_local_experts": 8}, "mixture of experts (mixtral"),
    ("architecture", {"model_type": "gemma3", "architectures": ["Gemma3ForCausalLM"]}, "architecture gemma3"),
    ("no-architecture", {"model_type": "absent", "architectures": "absent"}, "architecture no model_type is unknown"),
    ("class", {"architectures": ["LlamaForSequenceClassification"]}, "a LlamaForSequenceClassification, not a Llama"),
    ("window", {"layer_types": ["full_attention"] * 2 + ["sliding_attention"]}, "sliding-window attention is in use"),
    ("hybrid", {"layer_types": ["linear_attention", "full_attention"]}, "hybrid attention (layers of type linear_"),
    ("activation", {"hidden_act": "gelu"}, "activation 'gelu'"),
    ("rope", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rope type 'longrope' is unknown"),
    ("old-rope", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' is unknown"),
    ("rope-factor", {"rope_parameters": {**LLAMA3, "factor": None}}, "rope type llama3: factor is None"),
    ("partial-rope", {"partial_rotary_factor": 0.5}, "partial rotary embedding (0.5"),
    ("size", {"hidden_size": "absent"}, "config.json has no hidden_size"),
    ("size-type", {"num_hidden_layers": 2.5}, "num_hidden_layers is 2.5"),
    ("heads", {"num_key_value_heads": 4}, "6 attention heads cannot share 4"),
    ("odd-head", {"head_dim": 15}, "a head of 15 elements is odd"),
    ("untied", {"tie_word_embeddings": True}, "stores another lm_head.weight"),
    ("layers", {"num_hidden_layers": 4}, "tensor model.layers.3.input_layernorm.weight is missing"),
    ("fewer-layers", {"num_hidden_layers": 2}, "tensor model.layers.2."),
    (
        "shape",
        {"intermediate_size": 76},
        "gate_proj.weight has shape [75, 66], but the configuration asks for [76, 66]",
    ),
]


@pytest.mark.parametrize(("changes", "says"), [case[1:] for case in CONFIGS], ids=[case[0] for case in CONFIGS])
def test_config_that_is_not_supported(folder: Path, changes: dict[str, Any], says: str) -> None:
    assert says in refusal(change_config(folder, **changes)).sentence


def test_qwen_sliding_window_only_where_a_layer_uses_it(tmp_path: Path) -> None:
    folder = save(tmp_path, "qwen2-tied")[0]
    change_config(folder, layer_types="absent", use_sliding_window=True, sliding_window=32, max_window_layers=3)
    open_checkpoint(str(folder)).check()
    change_config(folder, max_window_layers=2)
    assert "sliding-window attention is in use" in refusal(folder).sentence


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_missing_tensor(folder: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    edit_tensors(folder, lambda tensors: tensors.__delitem__(name))
    assert f"tensor {name} is missing" in refusal(folder).sentence


def test_unexpected_tensor(folder: Path) -> None:
    name = "model.layers.0.self_attn.q_norm.weight"
    edit_tensors(folder, lambda tensors: tensors.update({name: torch.ones(22)}))
    assert f"tensor {name} is unexpected" in refusal(folder).sentence


def test_rotary_buffers_and_a_tied_head_stored_twice_are_tolerated(tmp_path: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.rand(7)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    folder = save(tmp_path, "llama-tied-biased")[0]
    open_checkpoint(str(edit_tensors(folder, edit))).check()


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_truncated_safetensors(folder: Path, share: float) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    error = refusal(path.parent)
    assert error.code == "truncated"
    assert "model.safetensors" in error.sentence


def test_missing_shard(tmp_path: Path) -> None:
    folder = save(tmp_path, "qwen2-tied", shard="50KB")[0]
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    assert f"shard {shard.name}" in refusal(folder).sentence


def test_index_that_leaves_the_folder(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", "qwen2-tied", shard="50KB")[0]
    index = folder / "model.safetensors.index.json"
    raw = json.loads(index.read_text())
    raw["weight_map"] = dict.fromkeys(raw["weight_map"], "../model/other.safetensors")
    index.write_text(json.dumps(raw))
    assert "shard ../model/other.safetensors, which the index names, lies outside" in refusal(folder).sentence


@pytest.mark.parametrize("weight_map", [None, [], {}, "x", {"a": 1}])
def test_index_without_a_map_of_shards(weight_map: Any, folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert "names no shards" in refusal(folder).sentence


def test_paths_that_are_no_checkpoint(tmp_path: Path, folder: Path) -> None:
    assert "no such file or folder" in refusal(tmp_path / "nothing").sentence
    (tmp_path / "empty").mkdir()
    assert "it has no config.json" in refusal(tmp_path / "empty").sentence
    (tmp_path / "note.txt").write_text("hello")
    assert "this is no checkpoint" in refusal(tmp_path / "note.txt").sentence
    (tmp_path / "fake.gguf").write_text("hello")
    assert "not a GGUF file" in refusal(tmp_path / "fake.gguf").sentence
    assert "give the path of one of them" in refusal(tmp_path).sentence
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert ".bin weights" in refusal(folder).sentence
    (folder / "pytorch_model.bin").unlink()
    assert "no model.safetensors" in refusal(folder).sentence
    (folder / "config.json").write_text("{")
    assert "cannot be read as JSON" in refusal(folder).sentence
    with pytest.raises(UserError, match="there is no such demo"):
        open_checkpoint("demo:gpt5")


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Path:
    return write(tmp_path / "tiny.gguf", build("llama", **LLAMA))


def test_gguf_cut_anywhere_is_refused_as_truncated(tiny_gguf: Path) -> None:
    data = tiny_gguf.read_bytes()
    header = data.find(b"output_norm.weight")
    cuts = [
        5,
        8,
        23,
        len(data) - 33,
        *random.sample(range(24, header), 30),
        *random.sample(range(header, len(data)), 5),
    ]
    for cut in cuts:
        tiny_gguf.write_bytes(data[:cut])
        error = refusal(tiny_gguf)
        assert error.code == "truncated", cut
        assert "truncated" in error.sentence


def test_gguf_with_any_byte_of_its_header_changed_is_read_or_refused(tiny_gguf: Path) -> None:
    """Damage never ends in anything but a UserError (or goes unseen, as in a name that nothing reads)."""
    data = tiny_gguf.read_bytes()
    for position in random.sample(range(data.find(b"output_norm.weight")), 150):
        broken = bytearray(data)
        broken[position] ^= 1 << random.randrange(8)
        tiny_gguf.write_bytes(broken)
        with contextlib.suppress(UserError):
            open_checkpoint(str(tiny_gguf)).check()


GGUFS: list[tuple[str, dict[str, Any], str]] = [
    ("architecture", {"architecture": "gemma3"}, "GGUF architecture 'gemma3' is unknown"),
    ("moe", {"architecture": "qwen3moe"}, "GGUF architecture 'qwen3moe' is unknown"),
    ("experts", {"metadata": {"llama.expert_count": 8}}, "mixture of experts"),
    ("window", {"metadata": {"llama.attention.sliding_window": 64}}, "sliding-window attention"),
    ("rope", {"metadata": {"llama.rope.scaling.type": "yarn"}}, "rope scaling (yarn)"),
    ("llama3-rope", {"extra": {"rope_freqs.weight": np.ones(8, dtype=np.float32)}}, "rope scaling (llama3)"),
    ("partial-rope", {"metadata": {"llama.attention.key_length": 32}}, "partial rotary embedding (16 of 32"),
    ("kv-heads", {"metadata": {"llama.attention.head_count_kv": 3}}, "4 attention heads cannot share 3"),
    ("layers", {"metadata": {"llama.block_count": 2**31}}, "tensor model.layers.3.input_layernorm.weight is missing"),
    ("wrong-type", {"metadata": {"llama.context_length": "long"}}, "llama.context_length is 'long'"),
    ("split", {"metadata": {"split.count": 3}}, "split into several parts"),
    ("missing", {"drop": "blk.1.ffn_up.weight"}, "tensor model.layers.1.mlp.up_proj.weight is missing"),
    (
        "unexpected",
        {"extra": {"blk.0.attn_sinks.weight": np.ones(8, dtype=np.float32)}},
        "blk.0.attn_sinks.weight is un",
    ),
    ("type", {"extra": {"blk.0.attn_q.bias": np.ones(64, dtype=np.int32)}}, "ggml type I32"),
]


@pytest.mark.parametrize(("options", "says"), [case[1:] for case in GGUFS], ids=[case[0] for case in GGUFS])
def test_gguf_that_is_not_supported(options: dict[str, Any], says: str, tmp_path: Path) -> None:
    source = build("llama", **LLAMA, attention_bias="attn_q.bias" in str(options))
    if "blk.0.attn_q.bias" in options.get("extra", {}):
        options = {**options, "drop": "blk.0.attn_q.bias"}
    assert says in refusal(write(tmp_path / "tiny.gguf", source, **options)).sentence


def test_gguf_of_an_unknown_block_type(tiny_gguf: Path) -> None:
    data = bytearray(tiny_gguf.read_bytes())
    name = b"blk.0.ffn_up.weight"
    at = data.find(name) + len(name)  # then: number of dimensions, two sizes, type, offset
    assert int.from_bytes(data[at : at + 4], "little") == 2
    assert int.from_bytes(data[at + 20 : at + 24], "little") == gguf.GGMLQuantizationType.F32
    data[at + 20 : at + 24] = (250).to_bytes(4, "little")
    tiny_gguf.write_bytes(data)
    assert "blk.0.ffn_up.weight has the unknown ggml type 250" in refusal(tiny_gguf).sentence


def test_hashes_name_every_file_that_decides_the_model(folder: Path) -> None:
    first = open_checkpoint(str(folder)).hashes()
    assert {"config.json", "generation_config.json", "model.safetensors"} <= set(first)
    edit_tensors(folder, lambda tensors: tensors.update({"model.norm.weight": torch.rand(66)}))
    second = open_checkpoint(str(folder)).hashes()
    assert {name for name in first if first[name] != second[name]} == {"model.safetensors"}


def test_weight_bytes_count_every_parameter(tmp_path: Path) -> None:
    for variant in ("llama-tied-biased", "qwen3"):
        folder, model = save(tmp_path / variant, variant)
        count = sum(parameter.numel() for parameter in model.parameters())
        checkpoint = open_checkpoint(str(folder))
        assert checkpoint.weight_bytes("fp32") == 4 * count
        assert checkpoint.weight_bytes(torch.bfloat16) == 2 * count


def test_end_of_text_tokens_come_from_the_generation_config(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert open_checkpoint(str(folder)).config.eos_token_ids == (7, 9)
    (folder / "generation_config.json").unlink()
    assert open_checkpoint(str(folder)).config.eos_token_ids == (2,)


def test_any_config_entry_of_a_wrong_type_is_read_or_refused(tmp_path: Path) -> None:
    """Whatever an entry holds, what comes out is a checkpoint or a UserError, never another exception."""
    folder = save(tmp_path, "llama-yarn")[0]
    original = json.loads((folder / "config.json").read_text())
    junk = ["x", -1, 0, 1.5, True, None, [], {}, ["x"], {"x": 1}, 10**30]
    keys = [*original, "rope_scaling", "quantization_config", "layer_types", "use_sliding_window", "num_experts"]
    cases = [{key: value} for key in keys for value in junk]
    rope = original["rope_parameters"]
    cases += [{"rope_parameters": {**rope, key: value}} for key in [*rope, "mscale", "beta_fast"] for value in junk]
    for changes in cases:
        (folder / "config.json").write_text(json.dumps({**original, **changes}))
        try:
            open_checkpoint(str(folder)).check()
        except UserError:
            pass
        except Exception as error:
            raise AssertionError(f"{changes}: {error!r}") from error
