"""Tiny random checkpoints, made and saved by transformers itself: the independent reference of these tests."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import torch
import transformers

YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

_SHAPE = {
    "vocab_size": 203,
    "hidden_size": 66,
    "intermediate_size": 75,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"head_dim": 22}),
    "llama-tied-biased": (
        "llama",
        {
            "head_dim": 14,
            "num_key_value_heads": 3,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "llama-mha-llama3-rope": ("llama", {"head_dim": 12, "num_key_value_heads": 6, "rope_parameters": LLAMA3}),
    "llama-yarn": ("llama", {"head_dim": 32, "rope_parameters": YARN}),
    "qwen2-tied": ("qwen2", {"hidden_size": 72, "tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen2-yarn": ("qwen2", {"hidden_size": 60, "rope_parameters": {**YARN, "factor": 2.5, "truncate": False}}),
    "qwen3": ("qwen3", {"head_dim": 20, "num_attention_heads": 9, "num_key_value_heads": 3}),
    "qwen3-biased-tied": ("qwen3", {"head_dim": 26, "attention_bias": True, "tie_word_embeddings": True}),
}

_CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}


def build(architecture: str, **changes: Any) -> transformers.PreTrainedModel:
    """A model with every parameter random: transformers' own start leaves biases at 0 and norms at 1."""
    config_class, model_class = _CLASSES[architecture]
    model = model_class(config_class(**{**_SHAPE, **changes})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif parameter.dim() == 1:
                parameter.normal_(std=0.5)
            else:
                parameter.normal_(std=1.5 / math.sqrt(parameter.shape[-1]))
    return model


def save(folder: Path, variant: str, *, shard: str = "1GB") -> tuple[Path, transformers.PreTrainedModel]:
    """Save a fresh random model of VARIANTS[variant]; returns its folder and the model."""
    architecture, changes = VARIANTS[variant]
    model = build(architecture, **changes)
    model.save_pretrained(folder, max_shard_size=shard)
    return folder, model


@torch.no_grad()
def reference_logits(model: transformers.PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """[len(ids), vocab] by one plain causal forward pass."""
    logits: torch.Tensor = model(input_ids=torch.tensor([ids])).logits[0]
    return logits


def random_ids(count: int, vocab: int = 203) -> list[int]:
    return [random.randrange(vocab) for _ in range(count)]
