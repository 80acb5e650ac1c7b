"""A checkpoint: where its weights and settings lie, and whether they are what its configuration says.

Opening reads metadata only (headers, config.json). Tensors are read one at a time, when asked for, under the names
that transformers gives them. torch is imported by the first tensor that is read, not before.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from engine.config import CAUSAL_LM_CLASSES, ModelConfig, class_names, config_from_hf, refuse, token_ids
from engine.deployment import DEMO_DRAFTER, DEMO_TARGET
from engine.errors import UserError
from engine.gguf import GgufFile, config_from_gguf, read_gguf
from engine.paths import user_path

if TYPE_CHECKING:
    from torch import Tensor

INDEX_FILE = "model.safetensors.index.json"
SETTINGS_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    INDEX_FILE,
)
_BYTES = {"fp32": 4, "bf16": 2, "torch.float32": 4, "torch.bfloat16": 2}


class Checkpoint:
    """An opened checkpoint. Made by `open_checkpoint`.

    `config` is the model's shape; `path` the folder or .gguf file; `kind` says which; `draft_config` is the raw
    config.json of a folder (empty for GGUF), which holds a drafter's own settings.
    """

    path: Path
    kind: Literal["hf", "gguf"]
    config: ModelConfig
    draft_config: dict[str, Any]

    def names(self) -> tuple[str, ...]:
        """All stored tensors, by Hugging Face name."""
        raise NotImplementedError

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a stored tensor, from its header."""
        raise NotImplementedError

    def tensor(self, name: str) -> Tensor:
        """Read one tensor onto the CPU: in its stored dtype (hf), or dequantised to float32 (gguf).

        Raises UserError where the checkpoint has no such tensor.
        """
        raise NotImplementedError

    def files(self) -> tuple[Path, ...]:
        """Every file that decides what this model computes."""
        raise NotImplementedError

    def check(self) -> None:
        """Compare stored names and shapes with what `config` needs, reading headers only.

        Raises UserError that names the first missing, misshaped or unexpected tensor. Tolerated: rotary
        frequency buffers of old exporters, and a head stored again although it is tied to the embedding
        (compared with it, since transformers unties the two where they differ).
        """
        stored = set(self.names())
        wanted = set()
        for name, shape in _expected(self.config):
            wanted.add(name)
            if name not in stored:
                refuse(str(self.path), f"tensor {name} is missing", "missing-tensor")
            if self.shape(name) != shape:
                found = list(self.shape(name))
                refuse(
                    str(self.path),
                    f"tensor {name} has shape {found}, but the configuration asks for {list(shape)}",
                    "misshaped-tensor",
                )
        for name in sorted(stored - wanted):
            tied_copy = name == "lm_head.weight" and self.config.tie_embeddings
            if not (name.endswith("rotary_emb.inv_freq") or tied_copy):
                refuse(
                    str(self.path),
                    f"tensor {name} is unexpected in a {self.config.architecture} model of "
                    f"{self.config.num_layers} layers",
                    "unexpected-tensor",
                )
        if self.config.tie_embeddings and "lm_head.weight" in stored:
            self._check_tied_head()

    def _check_tied_head(self) -> None:
        embedding, head = self.tensor("model.embed_tokens.weight"), self.tensor("lm_head.weight")
        if embedding.shape != head.shape or not bool((embedding == head).all()):
            refuse(
                str(self.path),
                "its config.json ties the head to the embedding, but it stores another lm_head.weight; set "
                "tie_word_embeddings to false",
                "untied-head",
            )

    def hashes(self) -> dict[str, str]:
        """SHA-256 of each file, by name. Reads everything."""
        result = {}
        for path in self.files():
            with path.open("rb") as file:
                result[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
        return result

    def weight_bytes(self, dtype: Any) -> int:
        """Bytes of all expected weights in `dtype` ("fp32", "bf16" or the torch dtype)."""
        elements = sum(math.prod(shape) for _, shape in _expected(self.config))
        return elements * _BYTES[str(dtype)]


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a model of this configuration has."""
    return dict(_expected(config))


def _expected(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    # lazy, because a damaged file may claim billions of layers
    hidden, mlp = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        for part, shape in _layer_tensors(config, hidden, mlp, q, kv):
            yield f"model.layers.{layer}.{part}", shape
    yield "model.norm.weight", (hidden,)
    if not config.tie_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden)


def _layer_tensors(
    config: ModelConfig, hidden: int, mlp: int, q: int, kv: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    projections = (
        ("self_attn.q_proj", q, hidden, config.qkv_bias),
        ("self_attn.k_proj", kv, hidden, config.qkv_bias),
        ("self_attn.v_proj", kv, hidden, config.qkv_bias),
        ("self_attn.o_proj", hidden, q, config.o_bias),
        ("mlp.gate_proj", mlp, hidden, config.mlp_bias),
        ("mlp.up_proj", mlp, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, mlp, config.mlp_bias),
    )
    for name, rows, columns, biased in projections:
        yield f"{name}.weight", (rows, columns)
        if biased:
            yield f"{name}.bias", (rows,)
    if config.qk_norm:
        yield "self_attn.q_norm.weight", (config.head_dim,)
        yield "self_attn.k_norm.weight", (config.head_dim,)


class GgufCheckpoint(Checkpoint):
    """One GGUF file."""

    kind = "gguf"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: GgufFile = read_gguf(path)
        self.config = config_from_gguf(self.file)
        self.draft_config = {}

    def names(self) -> tuple[str, ...]:
        return tuple(self.file.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.file.tensors[name].shape

    def tensor(self, name: str) -> Tensor:
        if name not in self.file.tensors:
            refuse(str(self.path), f"tensor {name} is missing", "missing-tensor")
        return self.file.tensor(name, self.config)

    def check(self) -> None:
        super().check()
        self.file.check_types()

    def files(self) -> tuple[Path, ...]:
        return (self.path,)


class HfCheckpoint(Checkpoint):
    """A Hugging Face folder with safetensors, in one file or in shards with an index."""

    kind = "hf"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.draft_config = read_json(path / "config.json")
        config = config_from_hf(self.draft_config, str(path))
        generation = read_json(path / "generation_config.json") if (path / "generation_config.json").exists() else {}
        if eos := token_ids(generation.get("eos_token_id"), str(path)):
            config = _with_eos(config, eos)
        self.config = config
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._shard: dict[str, Path] = {}
        for file in self._weight_files():
            for name, shape in _safetensors_header(file).items():
                self._shapes[name] = shape
                self._shard[name] = file

    def _weight_files(self) -> list[Path]:
        index = self.path / INDEX_FILE
        if index.exists():
            weight_map = read_json(index).get("weight_map")
            names = list(weight_map.values()) if isinstance(weight_map, dict) else []
            if not names or not all(isinstance(name, str) for name in names):
                refuse(str(index), "this index names no shards", "bad-index")
            shards = sorted(set(names))
            for shard in shards:
                if Path(shard).name != shard:
                    refuse(
                        str(self.path), f"shard {shard}, which the index names, lies outside this folder", "bad-index"
                    )
                if not (self.path / shard).is_file():
                    refuse(str(self.path), f"shard {shard}, which the index names, is missing", "missing-shard")
            return [self.path / shard for shard in shards]
        single = self.path / "model.safetensors"
        if single.is_file():
            return [single]
        if any(self.path.glob("*.bin")):
            refuse(
                str(self.path),
                "it holds PyTorch .bin weights, which are not read because they can run code; convert to safetensors",
                "no-safetensors",
            )
        refuse(str(self.path), "it holds no model.safetensors and no index of shards", "no-safetensors")

    def names(self) -> tuple[str, ...]:
        return tuple(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def tensor(self, name: str) -> Tensor:
        from safetensors import safe_open

        if name not in self._shard:
            refuse(str(self.path), f"tensor {name} is missing", "missing-tensor")
        with safe_open(self._shard[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def check(self) -> None:
        classes = class_names(self.draft_config, str(self.path))
        wanted = CAUSAL_LM_CLASSES[self.config.architecture]
        if classes and wanted not in classes:
            refuse(str(self.path), f"it holds a {', '.join(classes)}, not a {wanted}", "unknown-architecture")
        super().check()

    def files(self) -> tuple[Path, ...]:
        settings = [self.path / name for name in SETTINGS_FILES if (self.path / name).is_file()]
        return tuple(settings + sorted(set(self._shard.values())))


def _with_eos(config: ModelConfig, eos: tuple[int, ...]) -> ModelConfig:
    return dataclasses.replace(config, eos_token_ids=eos)


def _safetensors_header(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes by name. Raises UserError where the file is truncated or damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no mapping
    except SafetensorError as error:
        refuse(str(path), f"the safetensors file is truncated or damaged ({error}); fetch it again", "truncated")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a checkpoint's file. Raises UserError where it is not one."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({error}).", code="not-a-checkpoint") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: holds no JSON object.", code="not-a-checkpoint")
    return data


def open_checkpoint(ref: str) -> Checkpoint:
    """Open "demo:...", a .gguf file or a Hugging Face folder by path. Reads metadata only.

    Raises UserError with one sentence where it is no checkpoint, a damaged one, or a kind that is not supported.
    """
    path = _resolve(ref)
    if path.is_dir():
        if (path / "config.json").is_file():
            return HfCheckpoint(path)
        if any(path.glob("*.gguf")):
            refuse(str(path), "this folder holds GGUF files; give the path of one of them", "not-a-checkpoint")
        refuse(str(path), "this folder is no checkpoint: it has no config.json", "not-a-checkpoint")
    if not path.exists():
        refuse(ref, "no such file or folder; give a Hugging Face folder or a .gguf file", "not-a-checkpoint")
    if path.suffix == ".gguf" and path.is_file():  # not a pipe or a device, which would be read without end
        return GgufCheckpoint(path)
    refuse(ref, "this is no checkpoint; give a Hugging Face folder or a .gguf file", "not-a-checkpoint")


def _resolve(ref: str) -> Path:
    if not ref.startswith("demo:"):
        return user_path(ref, field="target")
    from engine import demo

    if ref == DEMO_TARGET:
        return Path(demo.demo_target_path())
    if ref == DEMO_DRAFTER:
        return Path(demo.demo_drafter_path())
    refuse(ref, f"there is no such demo; {DEMO_TARGET} and {DEMO_DRAFTER} are shipped", "not-a-checkpoint")
