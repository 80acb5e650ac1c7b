"""What a checkpoint says about its model: the typed form of config.json or of GGUF metadata."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

from engine.errors import UserError

Architecture = Literal["llama", "qwen2", "qwen3"]
ARCHITECTURES: tuple[Architecture, ...] = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding. `kind` is "default", "llama3" or "yarn"; the other fields as transformers names them."""

    theta: float
    kind: Literal["default", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None = 0.1 ln(factor) + 1
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a Llama-style decoder. Sizes are counts of elements; `rms_norm_eps` is the norm's epsilon."""

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_positions: int
    tie_embeddings: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    name: str = ""

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer's projections (biases and norms left out)."""
        q = self.num_heads * self.head_dim
        kv = self.num_kv_heads * self.head_dim
        return self.hidden_size * (2 * q + 2 * kv) + 3 * self.hidden_size * self.intermediate_size

    @property
    def parameters(self) -> int:
        """Weights of all matrices, the embedding counted once where the head is tied to it."""
        heads = 1 if self.tie_embeddings else 2
        return self.num_layers * self.layer_parameters + heads * self.vocab_size * self.hidden_size

    @property
    def kv_bytes_per_token_per_byte(self) -> int:
        """Elements that one token adds to the KV cache; times the element size gives bytes."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class DraftConfig:
    """What a DFlash drafter folder adds to its own ModelConfig."""

    model: ModelConfig
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    extra: dict[str, float] = field(default_factory=dict)


CAUSAL_LM_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_SUPPORTED = "Llama, Qwen2 and Qwen3 are supported"
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size")


def refuse(where: str, problem: str, code: str) -> NoReturn:
    """Raise the UserError of a checkpoint: `where` is its path, `problem` the rest of the sentence."""
    raise UserError(f"{where}: {problem}.", code=code)


def config_from_hf(raw: Mapping[str, Any], where: str) -> ModelConfig:
    """The typed form of a config.json, read as transformers reads it (its defaults where a key is absent).

    Raises UserError, naming `where` and the thing, for whatever this engine does not compute: quantised
    weights, another architecture, mixture of experts, sliding windows, hybrid attention, another activation,
    an unknown rope type, a size that is missing or no positive integer.
    """
    if quantization := raw.get("quantization_config"):
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, Mapping) else "unknown"
        name = str(method).upper()
        refuse(
            where, f"its weights are quantised ({name}), which is not supported; use the unquantised one", "quantised"
        )
    architecture = _architecture(raw, where)
    _refuse_partial_attention(raw, where)
    if (activation := raw.get("hidden_act", "silu")) not in ("silu", "swish"):
        refuse(where, f"activation {activation!r} is not supported, only silu", "unknown-activation")

    hidden, heads = _size(raw, "hidden_size", where), _size(raw, "num_attention_heads", where)
    kv_heads = heads if raw.get("num_key_value_heads") is None else _size(raw, "num_key_value_heads", where)
    default_head_dim = 128 if architecture == "qwen3" else hidden // heads
    head_dim = default_head_dim if raw.get("head_dim") is None else _size(raw, "head_dim", where)
    check_heads(heads, kv_heads, head_dim, where)
    max_positions = _size(raw, "max_position_embeddings", where)
    bos = raw.get("bos_token_id")
    llama_bias = architecture == "llama" and bool(raw.get("attention_bias", False))
    qwen3_bias = architecture == "qwen3" and bool(raw.get("attention_bias", False))
    return ModelConfig(
        architecture=architecture,
        vocab_size=_size(raw, "vocab_size", where),
        hidden_size=hidden,
        num_layers=_size(raw, "num_hidden_layers", where),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=_size(raw, "intermediate_size", where),
        rms_norm_eps=_positive(raw, "rms_norm_eps", where, 1e-6),
        rope=_rope_from_hf(raw, max_positions, where),
        max_positions=max_positions,
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=architecture == "qwen2" or llama_bias or qwen3_bias,
        o_bias=llama_bias or qwen3_bias,
        mlp_bias=architecture == "llama" and bool(raw.get("mlp_bias", False)),
        qk_norm=architecture == "qwen3",
        bos_token_id=bos if isinstance(bos, int) else None,
        eos_token_ids=token_ids(raw.get("eos_token_id"), where),
        name=str(raw.get("_name_or_path") or ""),
    )


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """A config.json from which `config_from_hf`, and transformers, read `config` again."""
    rope = {"rope_type": config.rope.kind, "rope_theta": config.rope.theta}
    if config.rope.kind != "default":
        rope |= {"factor": config.rope.factor, "original_max_position_embeddings": config.rope.original_max_positions}
    if config.rope.kind == "llama3":
        rope |= {"low_freq_factor": config.rope.low_freq_factor, "high_freq_factor": config.rope.high_freq_factor}
    if config.rope.kind == "yarn":
        yarn = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")
        rope |= {key: value for key in yarn if (value := getattr(config.rope, key)) is not None}
    eos = list(config.eos_token_ids)
    return {
        "architectures": [CAUSAL_LM_CLASSES[config.architecture]],
        "model_type": config.architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": rope,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.qkv_bias and config.architecture != "qwen2",
        "mlp_bias": config.mlp_bias,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
    }


def check_heads(heads: int, kv_heads: int, head_dim: int, where: str) -> None:
    """Raise UserError where query heads do not divide over KV heads, or a head cannot be rotated in halves."""
    if heads % kv_heads:
        refuse(where, f"{heads} attention heads cannot share {kv_heads} key/value heads evenly", "bad-config")
    if head_dim % 2:
        refuse(where, f"a head of {head_dim} elements is odd and cannot be rotated", "bad-config")


def token_ids(value: Any, where: str) -> tuple[int, ...]:
    """An `eos_token_id` entry, which is a number, a list or null, as a tuple. Raises UserError for anything else."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(item, int) for item in ids):
        refuse(where, f"eos_token_id is {value!r}, not a token id or a list of them", "bad-config")
    return tuple(ids)


def class_names(raw: Mapping[str, Any], where: str) -> list[str]:
    """The `architectures` entry of a config.json: names of model classes, none where it is absent."""
    return _strings(raw, "architectures", where)


def _architecture(raw: Mapping[str, Any], where: str) -> Architecture:
    model_type = str(raw.get("model_type") or "")
    classes = class_names(raw, where)
    named = ", ".join([model_type or "no model_type", *classes])
    if any("moe" in part.lower() for part in (model_type, *classes)) or any(raw.get(key) for key in _EXPERT_KEYS):
        refuse(where, f"a mixture of experts ({named}) is not supported; {_SUPPORTED}", "mixture-of-experts")
    for architecture in ARCHITECTURES:
        if model_type == architecture:
            return architecture
    refuse(where, f"architecture {named} is unknown; {_SUPPORTED}", "unknown-architecture")


def _refuse_partial_attention(raw: Mapping[str, Any], where: str) -> None:
    """Every layer must see the whole context."""
    layer_types = _strings(raw, "layer_types", where)
    if raw.get("layer_types") is None and raw.get("use_sliding_window") and raw.get("sliding_window"):
        first_windowed = raw.get("max_window_layers", 28)  # the default of Qwen2Config and Qwen3Config
        if not isinstance(first_windowed, int) or first_windowed < _size(raw, "num_hidden_layers", where):
            layer_types = ["sliding_attention"]
    other = sorted(set(layer_types) - {"full_attention"})
    if other == ["sliding_attention"]:
        refuse(where, "sliding-window attention is in use, which is not supported", "sliding-window")
    if other:
        refuse(where, f"hybrid attention (layers of type {', '.join(other)}) is not supported", "hybrid-attention")


def _size(raw: Mapping[str, Any], key: str, where: str) -> int:
    value = raw.get(key)
    if value is None:
        refuse(where, f"config.json has no {key}", "bad-config")
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        refuse(where, f"{key} is {value!r} in config.json, not a positive integer", "bad-config")
    return value


def _positive(entries: Mapping[str, Any], key: str, where: str, default: float | None = None) -> float:
    """A positive number; `default` where it is absent or null."""
    value = default if entries.get(key) is None else entries[key]
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        refuse(where, f"{key} is {value!r} in config.json, not a positive number", "bad-config")
    return float(value)


def _strings(raw: Mapping[str, Any], key: str, where: str) -> list[str]:
    value = raw.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        refuse(where, f"{key} is {value!r} in config.json, not a list of names", "bad-config")
    return value


def _rope_from_hf(raw: Mapping[str, Any], max_positions: int, where: str) -> RopeConfig:
    """`rope_parameters` (transformers 5), or `rope_theta` with `rope_scaling` (before)."""
    entry = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    scaling = entry.get("full_attention", entry) if isinstance(entry, Mapping) else entry  # one entry per layer type
    if not isinstance(scaling, Mapping):
        refuse(where, f"the rope parameters are {scaling!r} in config.json, not an object", "bad-config")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    theta = _positive(scaling, "rope_theta", where, _positive(raw, "rope_theta", where, 10_000.0))
    rotated = scaling.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if rotated not in (None, 1, 1.0):
        refuse(where, f"a partial rotary embedding ({rotated} of each head) is not supported", "partial-rope")
    if kind == "default":
        return RopeConfig(theta=theta)

    def number(key: str, default: float | None = None) -> float:
        return _positive(scaling, key, f"{where}: rope type {kind}", default)

    def optional(key: str) -> float | None:
        return None if scaling.get(key) is None else number(key)

    # where both places state it, transformers takes the outer one
    outer = raw if raw.get("original_max_position_embeddings") is not None else scaling
    original = int(_positive(outer, "original_max_position_embeddings", where, max_positions))
    if kind == "llama3":
        return RopeConfig(
            theta=theta,
            kind="llama3",
            factor=number("factor"),
            original_max_positions=original,
            low_freq_factor=number("low_freq_factor"),
            high_freq_factor=number("high_freq_factor"),
        )
    if kind == "yarn":
        return RopeConfig(
            theta=theta,
            kind="yarn",
            factor=number("factor", max_positions / max(1, original)),
            original_max_positions=original,
            beta_fast=number("beta_fast", 32.0),
            beta_slow=number("beta_slow", 1.0),
            attention_factor=optional("attention_factor"),
            mscale=optional("mscale"),
            mscale_all_dim=optional("mscale_all_dim"),
            truncate=bool(scaling.get("truncate", True)),
        )
    refuse(where, f"rope type {kind!r} is unknown; default, llama3 and yarn are supported", "unknown-rope")
