"""GGUF files: metadata to a ModelConfig, blocks to float32 tensors under Hugging Face names.

The header is read here (a 48,000-token vocabulary in milliseconds; the `gguf` package's own reader takes seconds
for it); block sizes and dequantisation are the `gguf` package's. Layout: ggml's docs/gguf.md, versions 2 and 3.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.config import ARCHITECTURES, ModelConfig, RopeConfig, check_heads, refuse

if TYPE_CHECKING:
    from torch import Tensor

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

_TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies. `shape` is in Hugging Face order (rows first); `offset` counts from the file's start."""

    name: str
    shape: tuple[int, ...]
    kind: int  # ggml type
    offset: int
    bytes: int


@dataclass(frozen=True)
class GgufFile:
    """A read header: metadata by key, tensors by Hugging Face name."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    def number(self, key: str, default: float) -> float:
        """A number from the metadata. Raises UserError where the entry is something else."""
        value = self.metadata.get(key, default)
        if not isinstance(value, int | float):
            refuse(str(self.path), f"the GGUF metadata {key} is {value!r}, not a number", "bad-config")
        return value

    def count(self, key: str, default: int = 0) -> int:
        """A positive integer from the metadata, or `default` where it is absent and the default is positive."""
        value = self.metadata.get(key, default or None)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            refuse(str(self.path), f"the GGUF metadata {key} is {value!r}, not a positive integer", "bad-config")
        return value

    def check_types(self) -> None:
        """Raises UserError for the first tensor whose ggml type cannot be dequantised. Reads no data."""
        import gguf
        import numpy as np

        first_of = {entry.kind: entry for entry in reversed(self.tensors.values())}
        for number, entry in first_of.items():
            kind = gguf.GGMLQuantizationType(number)
            try:
                gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8), kind)
            except NotImplementedError:
                refuse(
                    str(self.path),
                    f"tensor {entry.name} has ggml type {kind.name}, which cannot be dequantised",
                    "unknown-ggml-type",
                )

    def tensor(self, name: str, config: ModelConfig) -> Tensor:
        """Dequantised, float32, in the row order of the Hugging Face checkpoint."""
        import gguf
        import numpy as np
        import torch

        entry = self.tensors[name]
        with self.path.open("rb") as file:
            file.seek(entry.offset)
            raw = np.frombuffer(file.read(entry.bytes), dtype=np.uint8)
        rows = raw.reshape(*entry.shape[:-1], -1)
        kind = gguf.GGMLQuantizationType(entry.kind)
        if kind in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16):
            # not blocks: `dequantize` wants these already typed
            rows = rows.view(np.float32 if kind == gguf.GGMLQuantizationType.F32 else np.float16)
        values = gguf.dequantize(rows, kind)
        tensor = torch.from_numpy(np.array(values, dtype=np.float32).reshape(entry.shape))
        if self.architecture == "llama":
            heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(name.split(".")[-2])
            if heads is not None:
                tensor = _unpermute(tensor, heads)
        return tensor


def _unpermute(tensor: Tensor, heads: int) -> Tensor:
    """Undo llama.cpp's reordering of q and k rows, which pairs the two halves of each head for its own rotary
    kernel. Works on weights [heads * head_dim, K] and biases [heads * head_dim]."""
    pairs = tensor.shape[0] // heads // 2
    return tensor.view(heads, pairs, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def read_gguf(path: Path) -> GgufFile:
    """Read the header of `path`. Raises UserError where it is truncated, no GGUF file, or one part of a split."""
    where = str(path)
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            refuse(where, "this is not a GGUF file (it does not begin with GGUF)", "not-a-checkpoint")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                metadata, tensors = _Header(data, where).read()
            except (struct.error, IndexError):
                refuse(
                    where, f"the GGUF file is truncated: its header does not fit in {len(data):,} bytes", "truncated"
                )
            end = max((tensor.offset + tensor.bytes for tensor in tensors), default=0)
            if end > len(data):
                refuse(
                    where,
                    f"the GGUF file is truncated: it should hold {end:,} bytes and holds {len(data):,}; fetch it again",
                    "truncated",
                )
    result = GgufFile(path, metadata, {tensor.name: tensor for tensor in tensors})
    if result.number("split.count", 1) > 1:
        refuse(where, "a GGUF file split into several parts is not supported; merge it first", "split-gguf")
    return result


class _Header:
    """A cursor over the header."""

    def __init__(self, data: mmap.mmap, where: str) -> None:
        self.data, self.where, self.position = data, where, 4

    def read(self) -> tuple[dict[str, Any], list[GgufTensor]]:
        version = self._scalar("I")
        if version not in (2, 3):
            refuse(self.where, f"GGUF version {version} is not supported, only 2 and 3", "gguf-version")
        tensor_count, pair_count = self._scalar("Q"), self._scalar("Q")
        metadata = {}
        for _ in range(pair_count):
            key = self._string()
            metadata[key] = self._value(self._scalar("I"))
        infos = [self._tensor_info() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0:
            refuse(self.where, f"its alignment is {alignment!r}: the GGUF file is damaged", "damaged-gguf")
        start = -(-self.position // alignment) * alignment
        return metadata, [self._placed(*info, start) for info in infos]

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.position)
        self.position += struct.calcsize("<" + code)
        return value

    def _string(self) -> str:
        length = self._scalar("Q")
        end = self.position + length
        if end > len(self.data):
            raise IndexError(end)
        raw = self.data[self.position : end]
        self.position = end
        return raw.decode("utf-8", errors="replace")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item, count = self._scalar("I"), self._scalar("Q")
            if count > len(self.data):
                raise IndexError(count)
            if item in _SCALARS:
                layout = f"<{count}{_SCALARS[item]}"
                values = struct.unpack_from(layout, self.data, self.position)
                self.position += struct.calcsize(layout)
                return list(values)
            return [self._value(item) for _ in range(count)]
        if kind not in _SCALARS:
            refuse(self.where, f"metadata of unknown type {kind}: the GGUF file is damaged", "damaged-gguf")
        return self._scalar(_SCALARS[kind])

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        dimensions = [self._scalar("Q") for _ in range(self._scalar("I"))]
        return name, tuple(reversed(dimensions)), self._scalar("I"), self._scalar("Q")

    def _placed(self, name: str, shape: tuple[int, ...], kind: int, offset: int, start: int) -> GgufTensor:
        import gguf

        try:
            block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
        except (ValueError, KeyError):
            refuse(self.where, f"tensor {name} has the unknown ggml type {kind}", "unknown-ggml-type")
        if not shape or shape[-1] % block:
            refuse(self.where, f"tensor {name} of shape {list(shape)} does not divide into blocks", "damaged-gguf")
        return GgufTensor(hf_name(name), shape, kind, start + offset, math.prod(shape) // block * block_bytes)


def hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; an unknown name stays as it is."""
    if layer := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
        number, part, leaf = layer.groups()
        return f"model.layers.{number}.{_TENSOR_NAMES[part]}.{leaf}" if part in _TENSOR_NAMES else name
    part, _, leaf = name.rpartition(".")
    return f"{_TENSOR_NAMES[part]}.{leaf}" if part in _TENSOR_NAMES else name


def config_from_gguf(file: GgufFile) -> ModelConfig:
    """The typed form of the metadata. Raises UserError for what this engine does not compute."""
    where, metadata = str(file.path), file.metadata
    name = file.architecture
    architecture = next((known for known in ARCHITECTURES if known == name), None)
    if architecture is None:
        code = "mixture-of-experts" if "moe" in name else "unknown-architecture"
        refuse(where, f"GGUF architecture {name!r} is unknown; llama, qwen2 and qwen3 are supported", code)
    if file.number(f"{name}.expert_count", 0):
        refuse(where, "a mixture of experts is not supported; Llama, Qwen2 and Qwen3 are", "mixture-of-experts")
    if metadata.get(f"{name}.attention.sliding_window"):
        refuse(where, "sliding-window attention is in use, which is not supported", "sliding-window")
    scaling = metadata.get(f"{name}.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in file.tensors:
        kind = scaling if scaling != "none" else "llama3"
        refuse(
            where,
            f"rope scaling ({kind}) inside a GGUF file is not supported; use the safetensors folder of this model",
            "unknown-rope",
        )

    heads, hidden = file.count(f"{name}.attention.head_count"), file.count(f"{name}.embedding_length")
    kv_heads = file.count(f"{name}.attention.head_count_kv", heads)
    rotated = file.count(f"{name}.rope.dimension_count", max(1, hidden // heads))
    head_dim = file.count(f"{name}.attention.key_length", rotated)
    if f"{name}.rope.dimension_count" in metadata and rotated != head_dim:
        refuse(where, f"a partial rotary embedding ({rotated} of {head_dim} elements) is not supported", "partial-rope")
    check_heads(heads, kv_heads, head_dim, where)
    names = file.tensors
    embedding = names.get("model.embed_tokens.weight")
    bos, eos = (
        int(file.number(key, 0)) if key in metadata else None
        for key in ("tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id")
    )
    return ModelConfig(
        architecture=architecture,
        vocab_size=file.count(f"{name}.vocab_size", embedding.shape[0] if embedding else 0),
        hidden_size=hidden,
        num_layers=file.count(f"{name}.block_count"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=file.count(f"{name}.feed_forward_length"),
        rms_norm_eps=file.number(f"{name}.attention.layer_norm_rms_epsilon", 1e-6),
        rope=RopeConfig(theta=file.number(f"{name}.rope.freq_base", 10_000.0)),
        max_positions=file.count(f"{name}.context_length"),
        tie_embeddings="lm_head.weight" not in names,
        qkv_bias="model.layers.0.self_attn.q_proj.bias" in names,
        o_bias="model.layers.0.self_attn.o_proj.bias" in names,
        mlp_bias="model.layers.0.mlp.gate_proj.bias" in names,
        qk_norm=architecture == "qwen3",
        bos_token_id=bos,
        eos_token_ids=() if eos is None else (eos,),
        name=str(metadata.get("general.name", "")),
    )
