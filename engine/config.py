"""What a checkpoint says about its model: the typed form of config.json or of GGUF metadata."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

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
