"""A tiny model for the judge's self-test: random weights, made so that everything a judge looks at occurs.

A Llama checkpoint with a draft model beside it, written as Hugging Face folders, and prompts of random token ids.
  - Text does not loop: the first layer attends sharply, so each token depends on the whole context.
  - The draft model is the target's first layer with its embedding and head. The later layers add little, so most of
    its drafts are right, and those that are wrong are plausible.
  - More than half of the tokens have a twin whose row of the head differs by a little only. How little spans decades,
    from what single precision cannot resolve to what eight bits can: near-ties occur, and lower precision flips tokens.
  - The end-of-text token's row is longer than the others, so a good share of the texts ends by itself.
  - A pass takes a few milliseconds on two cores, far longer than a question takes on its way.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.deployment import Deployment, Dtype, Regime
from engine.judge.bench import ReadLimit
from engine.judge.hidden import ELEMENT_BYTES, HiddenPrompt, Material
from engine.paths import data_dir

if TYPE_CHECKING:
    from torch import Tensor

VOCAB, HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 1024, 384, 896, 3, 6, 3, 64
CONTEXT = 512
EOS = 0
EOS_LENGTH = 1.65
"""Length of the end-of-text token's row of the head, others having 1: about one token in twenty."""
TWINS = 300
TWIN_GAPS = (6e-6, 0.2)
"""Smallest and largest spread of the logit gap between a token and its twin (spread over decades evenly)."""
LOGIT_SPREAD = 6.0
LATER_LAYERS = 0.06
"""What a later layer adds to the residual stream, relative to the first one."""
PROMPTS = 192
LENGTHS = {"short": (4, 16), "middle": (20, 40), "long": (64, 96)}
"""Category -> fewest and most tokens of its prompts."""
LAST_LEVEL_BYTES_PER_SECOND = 500e9
"""The model may stay in the last-level cache: this is how fast such a cache could be read at the very most."""


@dataclass(frozen=True)
class Tiny:
    """The tiny model on disk: folders of target and draft model, and the prompts."""

    target: Path
    drafter: Path
    prompts: tuple[HiddenPrompt, ...]

    def deployment(self, regime: Regime, platform: str, dtype: Dtype) -> Deployment:
        return Deployment(str(self.target), str(self.drafter), regime, platform, dtype)

    def material(self, dtype: Dtype) -> Material:
        return Material(
            prompts=self.prompts,
            stop_ids=(EOS,),
            vocab_size=VOCAB,
            decode=lambda ids: " ".join(map(_word, ids)),
            read_bytes=read_bytes(dtype),
            drafter_kind="draft_model",
        )


def read_bytes(dtype: Dtype) -> int:
    """Bytes of the matrices that a target pass must read."""
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    layer = HIDDEN * (2 * q + 2 * kv) + 3 * HIDDEN * INTERMEDIATE
    return (LAYERS * layer + VOCAB * HIDDEN) * ELEMENT_BYTES[dtype]


def read_limit(dtype: Dtype) -> ReadLimit:
    """The physical floor of a target pass, also where all weights stay in the last-level cache."""
    return ReadLimit(read_bytes(dtype), 0.0, LAST_LEVEL_BYTES_PER_SECOND)


def tiny(seed: int = 1) -> Tiny:
    """The tiny model as this module makes it, written into the data folder where it is not there yet. Prompts are fresh
    with every `seed`; the weights are always the same."""
    folder = data_dir() / "tiny" / hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    if not folder.exists():
        part = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}.part")
        write(part)
        try:
            part.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(part)
    return Tiny(folder / "target", folder / "drafter", make_prompts(seed))


def make_prompts(seed: int) -> tuple[HiddenPrompt, ...]:
    rng = random.Random(f"tiny prompts {seed}")
    names = list(LENGTHS)
    return tuple(
        HiddenPrompt(
            f"{name}-{number:03d}",
            name,
            tuple(rng.randrange(1, VOCAB) for _ in range(rng.randint(*LENGTHS[name]))),
        )
        for number, name in ((number, names[number % len(names)]) for number in range(PROMPTS))
    )


def write(folder: Path) -> None:
    """Write both checkpoints into `folder`."""
    from safetensors.torch import save_file

    weights = make_weights()
    first = {name: tensor for name, tensor in weights.items() if ".layers." not in name or ".layers.0." in name}
    for name, layers, tensors in (("target", LAYERS, weights), ("drafter", 1, first)):
        place = folder / name
        place.mkdir(parents=True)
        save_file(tensors, place / "model.safetensors", {"format": "pt"})
        (place / "config.json").write_text(json.dumps(_config(layers), indent=1))
        (place / "tokenizer.json").write_text(json.dumps(_tokenizer()))
        with (place / "model.safetensors").open("rb") as file:
            os.fsync(file.fileno())


def make_weights() -> dict[str, Tensor]:
    """All tensors of the target by Hugging Face name, float32, the same on every machine."""
    import numpy as np
    import torch

    rng = np.random.default_rng(20)

    def normal(rows: int, columns: int, spread: float) -> Tensor:
        """Rows of unit-variance outputs for unit-variance inputs, times `spread`."""
        return torch.from_numpy((rng.standard_normal((rows, columns)) * (spread / math.sqrt(columns))).astype("f4"))

    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    head = normal(VOCAB, HIDDEN, LOGIT_SPREAD)
    smallest, largest = TWIN_GAPS
    for number in range(TWINS):  # ids 2, 3, then 4, 5, ...
        gap = smallest * (largest / smallest) ** (number / (TWINS - 1))
        head[2 * number + 3] = head[2 * number + 2] + normal(1, HIDDEN, gap)[0]
    head[EOS] *= EOS_LENGTH
    weights = {
        "model.embed_tokens.weight": torch.from_numpy(rng.standard_normal((VOCAB, HIDDEN)).astype("f4")),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": head,
    }
    for layer in range(LAYERS):
        at, share = f"model.layers.{layer}", 1.0 if layer == 0 else LATER_LAYERS
        weights |= {
            f"{at}.input_layernorm.weight": torch.ones(HIDDEN),
            f"{at}.post_attention_layernorm.weight": torch.ones(HIDDEN),
            f"{at}.self_attn.q_proj.weight": normal(q, HIDDEN, 3.0),
            f"{at}.self_attn.k_proj.weight": normal(kv, HIDDEN, 3.0),
            f"{at}.self_attn.v_proj.weight": normal(kv, HIDDEN, 1.5),
            f"{at}.self_attn.o_proj.weight": normal(HIDDEN, q, 1.5 * share),
            f"{at}.mlp.gate_proj.weight": normal(INTERMEDIATE, HIDDEN, 1.5),
            f"{at}.mlp.up_proj.weight": normal(INTERMEDIATE, HIDDEN, 1.5),
            f"{at}.mlp.down_proj.weight": normal(HIDDEN, INTERMEDIATE, 1.5 * share),
        }
    return weights


def _config(layers: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "dtype": "float32",
    }


def _tokenizer() -> dict[str, Any]:
    """A vocabulary of words, for the check that target and draft model share one."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {_word(i): i for i in range(VOCAB)}, "unk_token": _word(1)},
    }


def _word(token: int) -> str:
    return "<end>" if token == EOS else f"t{token}"
