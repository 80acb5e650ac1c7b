"""GGUF files: the same weights, configuration and logits as transformers loads from the same file."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from tiny import build, random_ids, reference_logits
from tiny_gguf import write

from engine.gguf import read_gguf
from engine.model import Model
from engine.plan import Plan
from engine.weights import open_checkpoint

SHAPES = {
    "llama": {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2},
    "qwen2": {"hidden_size": 96, "intermediate_size": 64, "num_attention_heads": 6, "num_key_value_heads": 2},
    # transformers takes no head size from a Qwen3 file: 128, its default, is the only one that it can load
    "qwen3": {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "head_dim": 128},
}
TYPES = [gguf.GGMLQuantizationType[name] for name in ("F32", "F16", "BF16", "Q8_0", "Q4_0")]


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
@pytest.mark.parametrize("architecture", list(SHAPES))
def test_logits_equal_transformers_on_the_same_file(
    architecture: str, kind: gguf.GGMLQuantizationType, tmp_path: Path
) -> None:
    tied = kind == gguf.GGMLQuantizationType.Q8_0
    source = build(architecture, **SHAPES[architecture], tie_word_embeddings=tied)
    path = write(tmp_path / "tiny.gguf", source, quantise=kind)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="tiny.gguf", dtype=torch.float32
    ).eval()
    checkpoint = open_checkpoint(str(path))
    checkpoint.check()
    assert checkpoint.kind == "gguf"
    assert checkpoint.config.tie_embeddings == tied
    assert checkpoint.config.eos_token_ids == (2,)
    state = reference.state_dict()
    for name in checkpoint.names():
        assert torch.equal(checkpoint.tensor(name), state[name]), name
    model = Model(checkpoint, device="cpu", dtype=torch.float32, plan=Plan())
    ids = random_ids(13)
    logits = model.forward(torch.tensor(ids), torch.arange(13), model.new_cache(13)).logits
    expected = reference_logits(reference, ids)
    assert expected.abs().max() > 0.5
    assert (logits - expected).abs().max() < 1e-3


def test_llama_biases_are_put_back_in_order_too(tmp_path: Path) -> None:
    source = build("llama", **SHAPES["llama"], attention_bias=True)
    checkpoint = open_checkpoint(str(write(tmp_path / "tiny.gguf", source)))
    checkpoint.check()
    for name, expected in source.state_dict().items():
        assert torch.equal(checkpoint.tensor(name), expected), name


def test_header_equals_the_gguf_packages_reader(demo_target: Path) -> None:
    ours, theirs = read_gguf(demo_target), gguf.GGUFReader(demo_target)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert ours.metadata[key] == field.contents(), key
    assert len(ours.tensors) == len(theirs.tensors)
    by_offset = {tensor.offset: tensor for tensor in ours.tensors.values()}
    for tensor in theirs.tensors:
        mine = by_offset[tensor.data_offset]
        assert mine.shape == tuple(int(side) for side in reversed(tensor.shape))
        assert (mine.bytes, mine.kind) == (tensor.n_bytes, tensor.tensor_type)


def test_opening_reads_no_weights(tmp_path: Path) -> None:
    """Damaged data does not stop a file from being opened and checked."""
    path = write(tmp_path / "tiny.gguf", build("llama", **SHAPES["llama"]))
    start = min(tensor.offset for tensor in read_gguf(path).tensors.values())
    data = bytearray(path.read_bytes())
    data[start:] = np.random.default_rng().bytes(len(data) - start)
    path.write_bytes(data)
    open_checkpoint(str(path)).check()
