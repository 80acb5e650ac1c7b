"""The demo target against transformers: logits and greedy text in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.linear import packed_available
from engine.model import Model
from engine.plan import Plan
from engine.tokenizer import load_tokenizer
from engine.weights import open_checkpoint

NEW_TOKENS = 64
PROMPTS = [
    "Explain why the sky is blue.",
    "Write a Python function that reverses a list.",
    "What is 17 * 23? Think step by step.",
    "Translate 'good morning' into French.",
    "Write a haiku about rain.",
    "List three uses of a paper clip.",
    "Who wrote Hamlet, and when?",
    "Give me a JSON object with the keys name and age.",
]


@pytest.fixture(scope="module")
def pair(demo_target: Path) -> tuple[Model, Any, list[list[int]]]:
    """Our model, transformers' model of the same file, and the prompts' ids."""
    checkpoint = open_checkpoint(str(demo_target))
    gemm = "packed" if packed_available("cpu", torch.float32) else "library"
    plan = Plan(gemm=gemm, fuse_qkv=True, fuse_gate_up=True)  # type: ignore[arg-type]
    model = Model(checkpoint, device="cpu", dtype=torch.float32, plan=plan)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        demo_target.parent, gguf_file=demo_target.name, dtype=torch.float32
    ).eval()
    tokenizer = load_tokenizer(checkpoint)
    return model, reference, [tokenizer.chat([{"role": "user", "content": prompt}]) for prompt in PROMPTS]


def greedy(model: Model, prompt: list[int]) -> list[int]:
    """Plain decoding, one row a step; ends after NEW_TOKENS or the end of the turn."""
    cache = model.new_cache(len(prompt) + NEW_TOKENS)
    ids, new = prompt, []
    while len(new) < NEW_TOKENS and (not new or new[-1] not in model.config.eos_token_ids):
        positions = torch.arange(cache.length, cache.length + len(ids))
        logits = model.forward(torch.tensor(ids), positions, cache, logits="last").logits
        assert logits is not None
        cache.commit(len(ids))
        ids = [int(logits[-1].argmax())]
        new += ids
    return new


@pytest.mark.parametrize("number", [0, 1])
@torch.no_grad()
def test_logits_and_greedy_choices_equal_transformers(number: int, pair: tuple[Model, Any, list[list[int]]]) -> None:
    """One pass of transformers over our text: each of our tokens is its choice on that very prefix."""
    model, reference, prompts = pair
    prompt = prompts[number]
    new = greedy(model, prompt)
    text = prompt + new
    expected = reference(input_ids=torch.tensor([text])).logits[0]
    assert expected[len(prompt) - 1 : -1].argmax(dim=-1).tolist() == new
    logits = model.forward(torch.tensor(text), torch.arange(len(text)), model.new_cache(len(text))).logits
    assert (logits - expected).abs().max() < 1e-3
    assert len(new) == NEW_TOKENS or new[-1] == 2


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(PROMPTS)))
def test_greedy_ids_equal_transformers_generate(number: int, pair: tuple[Model, Any, list[list[int]]]) -> None:
    model, reference, prompts = pair
    output = reference.generate(torch.tensor([prompts[number]]), max_new_tokens=NEW_TOKENS, do_sample=False)
    assert greedy(model, prompts[number]) == output[0, len(prompts[number]) :].tolist()
