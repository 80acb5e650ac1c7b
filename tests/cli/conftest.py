"""A tiny real checkpoint, prompts for it, and a scripted judge for tests of the shell around it."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.deployment import Deployment, Regime
from engine.hardware import HardwareProfile
from engine.judge.report import Comparison, Forcing, Judgement, Pair
from engine.plan import Plan
from engine.search.events import IncumbentChanged, Profiled, StageGap, StockMeasured

TEXT = "the quick brown fox jumps over a lazy dog while seven small boats sail past an old stone harbour wall"
WORDS = TEXT.split()


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of random weights and a few thousand parameters, saved by transformers, with a byte-level tokenizer.

    A small vocabulary and few layers make its greedy text fall into a cycle, so that suffix matches are accepted.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny") / "target"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    torch.manual_seed(20)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """24 short prompts in three categories."""
    path = tmp_path / "prompts.jsonl"
    lines = (
        {"id": f"p{n}", "category": "abc"[n % 3], "prompt": " ".join(WORDS[n % 9 :: 1 + n % 4])} for n in range(24)
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def deployment(tiny_target: Path, prompts: Path) -> Deployment:
    regime = Regime(max_prompt_tokens=96, max_new_tokens=24, prompts=str(prompts))
    return Deployment(target=str(tiny_target), drafter="ngram", regime=regime)


def a_comparison(reference: str, ratio: float) -> Comparison:
    pairs = tuple(Pair(f"p{n}", 0.5 * ratio, 0.5, 24, 24) for n in range(4))
    return Comparison(reference, pairs, ratio, ratio * 0.97, ratio * 1.03, 0.003, 0.01, 48.0 * ratio, 48.0)


class ScriptedJudge:
    """Stands in for `engine.judge.workbench.Workbench`: same calls, figures from a formula of the plan.

    `on_judge` is called at the start of each judgement with the trial's number, and may raise or send a signal.
    """

    opened = 0
    closed = 0
    on_judge: Callable[[int], None] | None = None

    def __init__(self, deployment: Deployment, folder: Path, seed: int, progress: Callable[[str], None]) -> None:
        type(self).opened += 1
        self.progress = progress

    def close(self) -> None:
        type(self).closed += 1

    @staticmethod
    def speed(plan: Plan) -> float:
        """Relative speed: packed weights, fused projections and trees help."""
        speed = {"library": 1.0, "transposed": 1.2, "packed": 1.6}[plan.gemm]
        return speed * (1.1 if plan.fuse_qkv else 1.0) * (1.05 if plan.fuse_gate_up else 1.0)

    def measure_stock(self, name: str) -> StockMeasured:
        self.progress(f"stock {name}")
        return StockMeasured(name, f"scripted {name}", 20.0, (19.9, 20.0, 20.2), 1.4 if name == "speculative" else None)

    def judge(self, trial: int, plan: Plan, incumbent: Plan | None, *, fresh: int) -> Judgement:
        self.progress("token forcing")
        if type(self).on_judge is not None:
            type(self).on_judge(trial)
        forcing = Forcing(240, 240, 0, 0, 1e-4, 0, "scripted", 10, 10)
        if incumbent is None:
            return Judgement("accepted", "It is lossless.", ("p1", "p2"), forcing, None, 1.5, 1.0)
        ratio = self.speed(plan) / self.speed(incumbent)
        self.progress("timing 1/2")
        verdict, reason = ("accepted", "It is faster.") if ratio > 1.02 else ("slower", "It is not faster.")
        comparison = a_comparison("incumbent", ratio)
        return Judgement(verdict, reason, ("p1", "p2"), forcing, comparison, 1.5, 1.0)  # type: ignore[arg-type]

    def profile(self, plan: Plan, round: int, hardware: HardwareProfile) -> Profiled:
        speed = self.speed(plan)
        stages = tuple(
            StageGap(stage, share / speed, 2.0, 1.0, share / speed - 1.0, 1e6, 1e6, "memory")
            for stage, share in (("verify.mlp", 12.0), ("verify.qkv", 6.0), ("verify.lm_head", 4.0), ("host", 2.0))
        )
        return Profiled(round, plan, stages, (0, 30, 20, 4), 1.5, (0.5, 0.3), 24.0 / speed)

    def standing(self, plan: Plan, trial: int, over_incumbent: float, final: bool) -> IncumbentChanged:
        speed = self.speed(plan)
        over = [a_comparison(name, speed * factor) for name, factor in (("stock", 2.0), ("lookup", 1.7), ("own", 1.2))]
        return IncumbentChanged(trial, plan, over_incumbent, *over, final)


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> type[ScriptedJudge]:
    """Judge and hardware probe replaced by scripted ones; returns the judge's class."""

    class Scripted(ScriptedJudge):
        pass

    module: Any = types.ModuleType("engine.judge.workbench")
    module.Workbench = Scripted
    monkeypatch.setitem(sys.modules, "engine.judge.workbench", module)
    profile = HardwareProfile(
        "cpu", "cpu", "Scripted CPU", 2, 1 << 34, 1 << 33, 25.0, 80.0, 1 << 25, "fp32", {"torch": "0"}, {}
    )
    monkeypatch.setattr("engine.hardware.probe", lambda *_, **__: profile)
    return Scripted
