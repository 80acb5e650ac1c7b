"""What a DFlash drafter folder says about itself, in the z-lab layout that PyPI `dflash` 0.1.0 defines.

Reads metadata only and imports no torch.
"""

from __future__ import annotations

from typing import Any

from engine.config import DraftConfig, ModelConfig
from engine.errors import UserError

ARCHITECTURE = "DFlashDraftModel"
DEFAULT_BLOCK_SIZE = 16


def parse(raw: dict[str, Any], model: ModelConfig, name: str) -> DraftConfig:
    """The typed form of a DFlash folder's config.json; `model` is the part that any Qwen3 config has.

    Values may stand in `dflash_config` or beside it; the former wins. `extra` holds the optional
    `input_embedding_scale`, `output_multiplier` and `final_logit_softcapping` where they are given.
    Raises UserError for what is missing or not supported.
    """
    nested = raw.get("dflash_config") or {}

    def value(key: str, default: Any = None) -> Any:
        return nested.get(key, raw.get(key, default))

    _refuse_unsupported(raw, model, name)
    layers = _integer(value("num_target_layers"), "num_target_layers", name)
    ids = value("target_layer_ids")
    if ids is None:
        ids = spread_layers(layers, model.num_layers)
    if not isinstance(ids, list) or not ids:
        raise _bad(name, f"target_layer_ids is {ids!r}, which is no list of layers")
    block = _integer(value("block_size", DEFAULT_BLOCK_SIZE), "block_size", name)
    if block < 2:
        raise _bad(name, f"block_size is {block}; a block holds the anchor and at least one draft")
    extra = {
        key: float(value(key))
        for key in ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
        if value(key) is not None
    }
    return DraftConfig(
        model=model,
        block_size=block,
        mask_token_id=_integer(value("mask_token_id"), "mask_token_id", name),
        target_layer_ids=tuple(_integer(layer, "target_layer_ids", name) for layer in ids),
        num_target_layers=layers,
        extra=extra,
    )


def spread_layers(num_target_layers: int, num_draft_layers: int) -> list[int]:
    """The target layers that a drafter without `target_layer_ids` taps: spread evenly from layer 1 to layer n - 3, or
    the middle one for a drafter of one layer."""
    if num_draft_layers == 1:
        return [num_target_layers // 2]
    first, last = 1, num_target_layers - 3
    return [round(first + index * (last - first) / (num_draft_layers - 1)) for index in range(num_draft_layers)]


def tensor_shapes(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of a DFlash checkpoint, by name, with its shape."""
    model = config.model
    hidden, inner, head = model.hidden_size, model.intermediate_size, model.head_dim
    q, kv = model.num_heads * head, model.num_kv_heads * head
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(config.target_layer_ids) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for index in range(model.num_layers):
        layer = f"layers.{index}"
        for part, rows, columns in (("q", q, hidden), ("k", kv, hidden), ("v", kv, hidden), ("o", hidden, q)):
            shapes[f"{layer}.self_attn.{part}_proj.weight"] = (rows, columns)
            if model.o_bias if part == "o" else model.qkv_bias:
                shapes[f"{layer}.self_attn.{part}_proj.bias"] = (rows,)
        shapes[f"{layer}.self_attn.q_norm.weight"] = (head,)
        shapes[f"{layer}.self_attn.k_norm.weight"] = (head,)
        shapes[f"{layer}.mlp.gate_proj.weight"] = (inner, hidden)
        shapes[f"{layer}.mlp.up_proj.weight"] = (inner, hidden)
        shapes[f"{layer}.mlp.down_proj.weight"] = (hidden, inner)
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
    return shapes


def _refuse_unsupported(raw: dict[str, Any], model: ModelConfig, name: str) -> None:
    if raw.get("is_causal") is not None:
        raise _bad(name, "it sets is_causal, and only blocks without a causal mask are supported")
    nested = raw.get("dflash_config") or {}
    newer = next((key for key in ("conv_kernel_size", "selector_rank") if key in nested or key in raw), None)
    if newer is not None:
        raise _bad(name, f"it is a DFlash2 drafter ({newer}), which is not supported yet")
    if not model.qk_norm:
        raise _bad(name, f"its model_type is {raw.get('model_type')}, and only qwen3 layers are supported")


def _integer(value: Any, key: str, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise _bad(name, f"{key} is {'missing' if value is None else repr(value)}")
    return value


def _bad(name: str, what: str) -> UserError:
    return UserError(
        f"The DFlash drafter {name} cannot be used: {what}; choose another drafter, or ngram.",
        code="drafter-unsupported",
        field="drafter",
    )
