"""A finished search, told by hand-written events, on a small checkpoint that only has to be openable."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from engine.deployment import Deployment, Regime
from engine.judge.report import Comparison, Forcing, Judgement, Pair
from engine.plan import Plan
from engine.search.events import (
    Body,
    Budget,
    CandidateProposed,
    Event,
    HardwareProbed,
    IncumbentChanged,
    SearchStarted,
    StockMeasured,
    TrialJudged,
    TrialStarted,
)
from engine.weights import expected_tensors, open_checkpoint

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 37,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 40,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make_checkpoint(folder: Path, seed: int) -> Path:
    """A Llama checkpoint of random weights."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file({"model.norm.weight": np.ones(24, np.float32)}, folder / "model.safetensors")
    rng = np.random.default_rng(seed)
    shapes = expected_tensors(open_checkpoint(str(folder)).config)
    tensors = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "target", seed=1)


@pytest.fixture
def other_checkpoint(tmp_path: Path) -> Path:
    """Same shape, other weights."""
    return make_checkpoint(tmp_path / "other", seed=2)


def comparison(reference: str, ratio: float, low: float, high: float) -> Comparison:
    rng = random.Random(ratio)
    pairs = tuple(Pair(f"p{n}", 1.0 + rng.random(), (1.0 + rng.random()) / ratio, 48, 48) for n in range(5))
    return Comparison(reference, pairs, ratio, low, high, 0.004, 0.01, 12.5 * ratio, 12.5, 1.5)


@pytest.fixture
def events(checkpoint: Path) -> list[Event]:
    deployment = Deployment(target=str(checkpoint), drafter="ngram", regime=Regime(max_new_tokens=32))
    plan = Plan(source="ngram", gemm="packed", fuse_qkv=True)
    forcing = Forcing(512, 511, 1, 0, 1e-4, 2, "stock scored on its own text", 7, 8, None, {"code": (511, 1, 0)})
    judgement = Judgement("accepted", "It is 1.21x faster.", ("p0",), forcing, None, 1.62, 9.5)
    bodies: list[Body] = [
        SearchStarted(deployment, Budget(), 3, Plan(source="ngram"), "0.1.0"),
        HardwareProbed({"name": "Test CPU", "read_gb_s": 26.5, "matmul_gflop_s": 81.0}),
        StockMeasured("autoregressive", "transformers 5.24 generate, eager", 12.5, (12.4, 12.5, 12.7)),
        StockMeasured("speculative", "transformers 5.24 prompt lookup", 13.1, (13.0, 13.1, 13.4), 1.2),
        CandidateProposed(0, 0, "baseline", "policy", plan, plan.digest, {}, "", "baseline", "The start."),
        TrialStarted(0, "here", 1),
        TrialJudged(0, judgement),
        IncumbentChanged(
            0,
            plan,
            1.0,
            comparison("transformers 5.24 generate, eager", 2.91, 2.8, 3.02),
            comparison("transformers 5.24 prompt lookup", 2.4, 2.3, 2.5),
            comparison("our own autoregressive", 1.3, 1.25, 1.36),
            final=True,
        ),
    ]
    return [Event(number, 1.7e9 + number, body) for number, body in enumerate(bodies, start=1)]
