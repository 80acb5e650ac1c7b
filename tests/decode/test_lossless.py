"""Real models and drafters in fp32: speculative output is the plan's own plain output, and transformers' greedy ids."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import engine.drafters.dflash
from engine.deployment import NO_DRAFTER, Deployment, Regime
from engine.drafters.contract import DraftTree
from engine.generate import Decoder, StopRule, build_decoder
from engine.model import Model
from engine.plan import Plan
from engine.weights import open_checkpoint
from tests.decode.toy import PoisonedCache, TestDrafter
from tests.drafters.checkpoints import SHAPE, save_dflash, save_target

WORDS = SHAPE["vocab_size"]
TOKENS = st.integers(0, WORDS - 1)
PROMPTS = st.lists(TOKENS, min_size=1, max_size=11)


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two targets of one shape, a DFlash drafter for them and a smaller model with the same tokenizer."""
    folder = tmp_path_factory.mktemp("zoo")
    save_target(folder / "llama", kind="llama", words=WORDS, tie_word_embeddings=True)
    save_target(folder / "qwen3", kind="qwen3", words=WORDS, tie_word_embeddings=False)
    save_target(folder / "small", kind="llama", seed=5, words=WORDS, num_hidden_layers=2, hidden_size=18)
    save_dflash(folder / "dflash")
    return folder


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots that were rolled back hold NaN, in the target's cache and in the drafters'."""
    monkeypatch.setattr(
        Model, "new_cache", lambda self, capacity: PoisonedCache(self.config, capacity, self.device, self.dtype)
    )
    monkeypatch.setattr(engine.drafters.dflash, "KVCache", PoisonedCache)


def deployment(zoo: Path, target: str, drafter: str) -> Deployment:
    """`drafter` "none" needs no checkpoint; "same model" is the target itself."""
    ref = {"none": NO_DRAFTER, "same model": str(zoo / target)}.get(drafter, str(zoo / drafter))
    return Deployment(target=str(zoo / target), drafter=ref, regime=Regime(max_prompt_tokens=12, max_new_tokens=40))


PLANS = {
    "chain": Plan(draft_tokens=5),
    "short chain, padded": Plan(draft_tokens=2, verify_widths="4", head_rows="needed"),
    "tree": Plan(draft_tokens=4, tree_rows=12, fuse_qkv=True),
    "padded tree": Plan(draft_tokens=5, tree_rows=6, verify_widths="8", fuse_gate_up=True, attention="grouped"),
    "wide tree": Plan(draft_tokens=5, tree_rows=32, gemm="packed", draft_gemm="packed"),
    "transposed": Plan(draft_tokens=5, tree_rows=8, gemm="transposed", draft_gemm="transposed", verify_widths="4"),
}
SOURCES = {
    "neural": {"source": "neural"},
    "ngram": {"source": "ngram", "ngram_min": 1},
    "hybrid": {"source": "hybrid", "ngram_min": 1, "hybrid_min_match": 2},
}


CASES = [
    ("llama", "dflash", "neural"),
    ("llama", "dflash", "hybrid"),
    ("llama", "small", "neural"),
    ("llama", "small", "hybrid"),
    ("llama", "same model", "neural"),
    ("llama", "none", "ngram"),
    ("qwen3", "dflash", "neural"),
    ("qwen3", "none", "ngram"),
]


@pytest.mark.parametrize("shape", PLANS.values(), ids=PLANS.keys())
@pytest.mark.parametrize(("target", "drafter", "source"), CASES)
def test_every_source_and_shape(zoo: Path, target: str, drafter: str, source: str, shape: Plan) -> None:
    plan = shape.with_changes({**SOURCES[source], "threads": 1, "ngram_candidates": 3 if shape.tree_rows else 1})
    served = deployment(zoo, target, drafter)
    decoder, plain = build_decoder(served, plan), build_decoder(served, dataclasses.replace(plan, source="none"))
    rng = random.Random(f"{target}{drafter}{plan}")
    for length, limit in ((1, 40), (7, 23), (12, 2)):
        prompt = [rng.randrange(WORDS) for _ in range(length)]
        expected = plain.generate(prompt, limit, StopRule())
        got = decoder.generate(prompt, limit, StopRule())
        assert (got.ids, got.stop_reason) == (expected.ids, expected.stop_reason)
        # An end inside the text: at a token, and at a pair of tokens that may lie across two blocks.
        at = rng.randrange(len(expected.ids))
        stop = StopRule((expected.ids[at],), (tuple(expected.ids[at // 2 : at // 2 + 2]),))
        expected, got = plain.generate(prompt, limit, stop), decoder.generate(prompt, limit, stop)
        assert (got.ids, got.stop_reason) == (expected.ids, expected.stop_reason)


def test_a_draft_model_equal_to_the_target_is_always_right(zoo: Path) -> None:
    plan = Plan(draft_tokens=4, threads=1)
    result = build_decoder(deployment(zoo, "llama", "same model"), plan).generate([3, 1, 4], 26, StopRule())
    assert result.emitted_per_step == [5] * 5


@pytest.mark.parametrize("target", ["llama", "qwen3"])
def test_transformers_greedy_ids(zoo: Path, target: str) -> None:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(zoo / target, dtype=torch.float32).eval()
    decoder = build_decoder(
        deployment(zoo, target, "dflash"), Plan(source="hybrid", tree_rows=12, draft_tokens=5, threads=1)
    )
    rng = random.Random(8)
    for length in (1, 3, 12):
        prompt = [rng.randrange(WORDS) for _ in range(length)]
        output = reference.generate(
            torch.tensor([prompt]), max_new_tokens=40, do_sample=False, attention_mask=torch.ones(1, length)
        )
        assert decoder.generate(prompt, 40, StopRule()).ids == output[0, length:].tolist()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Model]:
    """One target under two plans that differ in everything that computes."""
    folder = tmp_path_factory.mktemp("pair")
    save_target(folder, seed=9)
    plans = (Plan(), Plan(fuse_qkv=True, fuse_gate_up=True, attention="grouped"))
    first, second = (
        Model(open_checkpoint(str(folder)), device="cpu", dtype=torch.float32, plan=plan) for plan in plans
    )
    return first, second


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    prompt=PROMPTS,
    limit=st.integers(1, 30),
    rows=st.sampled_from([0, 3, 9, 20]),
    depth=st.integers(1, 7),
    widths=st.sampled_from(["exact", "4", "8"]),
    which=st.integers(0, 1),
    rng=st.randoms(use_true_random=False),
)
def test_random_trees_on_a_real_model(pair, prompt, limit, rows, depth, widths, which, rng) -> None:
    model = pair[which]
    text = Decoder(model, None, Plan()).generate(prompt, limit, StopRule()).ids
    truth = [*prompt, *text]

    def invent(known: list[int], shape) -> DraftTree:
        tokens, parents, levels = [], [], []
        for node in range(rng.randint(0, shape.rows - 1)):
            parent = rng.randint(-1, node - 1) if shape.tree else node - 1
            level = levels[parent] + 1 if parent >= 0 else 1
            if level > shape.depth:
                break
            at = len(known) + level - 1
            right = at < len(truth) and rng.random() < 0.8
            tokens.append(truth[at] if right else rng.randrange(WORDS))
            parents.append(parent)
            levels.append(level)
        return DraftTree(tuple(tokens), tuple(parents), (0.0,) * len(tokens))

    plan = Plan(draft_tokens=depth, tree_rows=rows, verify_widths=widths)
    assert Decoder(model, TestDrafter(invent), plan).generate(prompt, limit, StopRule()).ids == text


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32"])
def test_smollm2_against_transformers(demo_target: Path, dtype: str) -> None:
    """The demo deployment, DFlash tree and all: transformers' greedy ids on 8 prompts x 64 tokens."""
    from transformers import LlamaForCausalLM

    from engine.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(open_checkpoint(str(demo_target)))
    reference = LlamaForCausalLM.from_pretrained(
        demo_target.parent, gguf_file=demo_target.name, dtype=torch.float32
    ).eval()
    plan = Plan(source="hybrid", tree_rows=16, gemm="packed", draft_gemm="packed", head_rows="needed")
    decoder = build_decoder(Deployment(dtype=dtype), plan)
    subjects = ("rain", "prime numbers", "a tailor", "a rocket", "bread", "chess", "a river", "sorting in Python")
    for subject in subjects:
        prompt = tokenizer.chat([{"role": "user", "content": f"Write three sentences about {subject}."}])
        output = reference.generate(
            torch.tensor([prompt]),
            max_new_tokens=64,
            do_sample=False,
            attention_mask=torch.ones(1, len(prompt)),
            eos_token_id=list(tokenizer.eos_ids),
        )
        assert decoder.generate(prompt, 64, StopRule(tokenizer.eos_ids)).ids == output[0, len(prompt) :].tolist()
