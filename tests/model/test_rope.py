"""Rope against transformers' own functions, from the config.json that transformers writes and from older ones."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny import LLAMA3, YARN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from engine.config import config_from_hf
from engine.rope import RopeTable, apply_rope

SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 123_456.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn-untruncated": {**YARN, "truncate": False, "beta_fast": 20.0, "beta_slow": 2.0},
    "yarn-attention-factor": {**YARN, "attention_factor": 1.3},
    "yarn-mscale": {**YARN, "mscale": 0.8, "mscale_all_dim": 1.1},
    "yarn-half": {**YARN, "factor": 0.5},
}


def check(config: transformers.LlamaConfig, raw: dict[str, Any]) -> None:
    ours = config_from_hf(raw, "here")
    head_dim = ours.head_dim
    positions = torch.tensor(sorted(random.sample(range(500), 9)))
    q, k = torch.randn(1, 4, 9, head_dim), torch.randn(1, 2, 9, head_dim)
    cos, sin = LlamaRotaryEmbedding(config)(q, positions[None])
    expected_q, expected_k = apply_rotary_pos_emb(q, k, cos, sin)
    table = RopeTable(ours.rope, head_dim, 500, torch.device("cpu"), torch.float32)
    at = table.at(positions)
    assert (apply_rope(q[0].transpose(0, 1), *at).transpose(0, 1) - expected_q[0]).abs().max() < 1e-4
    assert (apply_rope(k[0].transpose(0, 1), *at).transpose(0, 1) - expected_k[0]).abs().max() < 1e-4


def shape() -> dict[str, Any]:
    return {
        "hidden_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": random.choice([16, 18, 64]),
        "max_position_embeddings": 512,
        "architectures": ["LlamaForCausalLM"],
    }


@pytest.mark.parametrize("name", list(SCALINGS))
def test_rope_parameters_as_transformers_5_writes_them(name: str, tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**shape(), rope_parameters=dict(SCALINGS[name]))
    config.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert "rope_parameters" in raw
    check(config, raw)


@pytest.mark.parametrize("name", list(SCALINGS))
@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_rope_scaling_of_older_checkpoints(name: str, key: str) -> None:
    scaling = dict(SCALINGS[name])
    raw = {"model_type": "llama", "vocab_size": 11, "intermediate_size": 7, "num_hidden_layers": 1, **shape()}
    raw["rope_theta"] = scaling.pop("rope_theta")
    kind = scaling.pop("rope_type")
    raw["rope_scaling"] = None if kind == "default" else {key: kind, **scaling}
    # transformers changes what it is given
    check(transformers.LlamaConfig(**json.loads(json.dumps(raw))), raw)


def test_no_rope_entry_means_the_default_base() -> None:
    raw = {"model_type": "llama", "vocab_size": 11, "intermediate_size": 7, "num_hidden_layers": 1, **shape()}
    check(transformers.LlamaConfig(**raw), raw)
    assert config_from_hf(raw, "here").rope.theta == 10_000.0
