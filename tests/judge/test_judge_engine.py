"""The workbench as a search uses it: our engine against unmodified transformers, on a tiny checkpoint from disk."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from engine.deployment import Deployment, Regime
from engine.errors import UserError
from engine.hardware import HardwareProfile
from engine.judge.bench import PairRule, ReadLimit
from engine.judge.conditions import unwatched
from engine.judge.effort import Effort
from engine.judge.hidden import prepare
from engine.judge.workbench import Workbench
from engine.plan import Plan

WORDS = [f"word{index}" for index in range(60)]
EFFORT = Effort(forcing_prompts=2, rule=PairRule(2, 3, 3), solo=2, stock_prompts=2, floor_texts=2, profile_prompts=2)
HARDWARE = HardwareProfile("cpu", "cpu", "made up", 2, 8 << 30, 4 << 30, 500.0, 5000.0, 1 << 20, "fp32", {}, {})


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    import tokenizers
    import torch
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("engine")
    torch.manual_seed(4)
    config = LlamaConfig(
        vocab_size=64, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=None, eos_token_id=3,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * 0.4 if parameter.ndim > 1 else torch.rand_like(parameter) + 0.5
    model.save_pretrained(folder / "target")
    backend = tokenizers.Tokenizer(WordLevel({word: index for index, word in enumerate(["?", *WORDS])}, unk_token="?"))
    backend.pre_tokenizer = Whitespace()
    backend.save(str(folder / "target" / "tokenizer.json"))
    rng = random.Random(6)
    lines = [{"prompt": " ".join(rng.choices(WORDS, k=4 + n)), "category": f"c{n % 3}"} for n in range(20)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    regime = Regime(max_prompt_tokens=20, max_new_tokens=24, prompts=str(folder / "prompts.jsonl"))
    return Deployment(target=str(folder / "target"), drafter="ngram", regime=regime)


def test_what_is_read_from_a_deployment(deployment: Deployment) -> None:
    material = prepare(deployment)
    assert len(material.prompts) == 17  # of 4 to 23 tokens, those of at most 20
    assert material.left_out == 3
    assert material.stop_ids == (3,)
    assert material.vocab_size == 64
    layers = 3 * (2 * 48 * 48 + 2 * 16 * 48 + 3 * 48 * 80 + 2 * 48)
    assert material.read_bytes == 4 * (layers + 48 + 64 * 48)  # the untied embedding is not read whole
    assert material.drafter_kind == "none"
    short = Deployment(
        target=deployment.target, drafter="ngram", regime=Regime(3, 3, 3, 0.0, deployment.regime.prompts)
    )
    with pytest.raises(UserError, match="fits 3 tokens"):
        prepare(Deployment(short.target, "ngram", Regime(1, 3, 3, 0.0, deployment.regime.prompts)))


def test_our_engine_is_judged_profiled_and_compared(deployment: Deployment, tmp_path: Path) -> None:
    baseline = Plan(source="none")
    candidate = Plan(source="ngram", draft_tokens=4, head_rows="needed", fuse_qkv=True)
    phases: list[str] = []
    with Workbench(
        deployment,
        tmp_path,
        5,
        phases.append,
        effort=EFFORT,
        read_limit=ReadLimit(0.0, 0.0, 1.0),
        watch=unwatched,
    ) as bench:
        stock = bench.measure_stock("autoregressive")
        assert "transformers" in stock.implementation
        assert stock.accept_length == 1.0
        first = bench.judge(1, baseline, None, fresh=1)
        assert first.verdict == "accepted", first.reason
        assert first.forcing is not None
        assert first.forcing.free_run_equal == first.forcing.free_run_prompts >= 2
        assert first.accept_length == 1.0
        second = bench.judge(2, candidate, baseline, fresh=2)
        assert second.verdict in ("accepted", "slower"), second.reason  # a machine under test decides nothing
        assert second.forcing is not None
        assert second.forcing.error == 0
        assert second.accept_length is not None
        assert second.accept_length >= 1.0
        profiled = bench.profile(baseline, 1, HARDWARE)
        assert {"verify.mlp", "verify.lm_head", "host"} <= {row.stage for row in profiled.stages}
        assert profiled.ms_per_token > 0
    assert phases[0] == "3 prompts are longer than max_prompt_tokens and are left out"
