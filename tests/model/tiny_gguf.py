"""Tiny GGUF files from tiny transformers models, written with the `gguf` package's own writer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _gguf_name(name: str) -> str:
    stem, leaf = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, number, part = stem.split(".", 3)
        return f"blk.{number}.{_NAMES[part]}.{leaf}"
    return f"{_NAMES[stem]}.{leaf}"


def _permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Row 2 i + j of a head is its row j * half + i: llama.cpp keeps rotated pairs side by side."""
    out = np.empty_like(weight)
    size = weight.shape[0] // heads
    for head in range(heads):
        for i in range(size // 2):
            for j in range(2):
                out[head * size + 2 * i + j] = weight[head * size + j * (size // 2) + i]
    return out


def write(
    path: Path,
    model: transformers.PreTrainedModel,
    *,
    quantise: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    metadata: dict[str, Any] | None = None,
    drop: str = "",
    extra: dict[str, np.ndarray] | None = None,
    architecture: str = "",
) -> Path:
    """Write `model`; matrices in `quantise`, the rest in float32. `metadata` adds string or integer entries,
    `drop` leaves out one tensor by its GGUF name, `extra` adds some."""
    config = model.config
    name = architecture or config.model_type
    writer = gguf.GGUFWriter(path, name)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_token_list([f"t{index}" for index in range(config.vocab_size)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if name == "llama":
        writer.add_rope_dimension_count(config.head_dim)
    if name == "qwen3":
        writer.add_key_length(config.head_dim)
    for key, value in (metadata or {}).items():
        writer.kv_data[0].pop(key, None)  # the writer refuses to overwrite
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(key, value)
    for hf, parameter in model.state_dict().items():
        if hf == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = parameter.detach().to(torch.float32).numpy()
        if config.model_type == "llama" and ("q_proj" in hf or "k_proj" in hf):
            heads = config.num_attention_heads if "q_proj" in hf else config.num_key_value_heads
            values = _permuted(values, heads)
        if (stored := _gguf_name(hf)) == drop:
            continue
        if values.ndim == 2:
            writer.add_tensor(stored, gguf.quantize(values, quantise), raw_dtype=quantise)
        else:
            writer.add_tensor(stored, values)
    for stored, values in (extra or {}).items():
        writer.add_tensor(stored, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
