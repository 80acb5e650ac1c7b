"""Tiny random checkpoints, written by transformers and by the `dflash` package themselves."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import tokenizers
import torch
from dflash.model import DFlashDraftModel
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

SHAPE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 24,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 40,
    "max_position_embeddings": 192,
    "rms_norm_eps": 1e-5,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
DRAFTER: dict[str, Any] = {
    **SHAPE,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 56,
    "num_target_layers": SHAPE["num_hidden_layers"],
    "block_size": 6,
    "dflash_config": {"mask_token_id": 9, "target_layer_ids": [1, 0, 3]},
    "tie_word_embeddings": True,
}


def randomise(model: PreTrainedModel, seed: int, scale: float = 0.35) -> PreTrainedModel:
    """Weights large enough that logits differ and texts do not settle at once; norms near one, never one."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 1 + 0.2 * noise if parameter.ndim == 1 else scale * noise
    return model.float().eval()


def save_target(
    folder: Path, *, kind: str = "llama", seed: int = 1, words: int | None = None, scale: float = 0.35, **changes: Any
) -> PreTrainedModel:
    """A target (or draft model) in `folder`; with `words`, a tokenizer of that many words beside it."""
    config = {**SHAPE, **changes}
    model: PreTrainedModel = (
        LlamaForCausalLM(LlamaConfig(**config)) if kind == "llama" else Qwen3ForCausalLM(Qwen3Config(**config))
    )
    randomise(model, seed, scale).save_pretrained(folder)
    if words is not None:
        vocabulary = {f"w{index}": index for index in range(words)}
        tokenizers.Tokenizer(WordLevel(vocabulary, unk_token="w0")).save(str(folder / "tokenizer.json"))
    return model


def save_dflash(folder: Path, *, seed: int = 2, **changes: Any) -> DFlashDraftModel:
    """A DFlash drafter for `save_target`'s shape."""
    config = copy.deepcopy({**DRAFTER, **changes})
    drafter = randomise(DFlashDraftModel(Qwen3Config(**config)), seed)
    drafter.save_pretrained(folder)
    return drafter
