"""The model against transformers: same checkpoint, same tokens, logits within 1e-3 in float32."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest
import torch
from tiny import VARIANTS, random_ids, reference_logits, save

from engine.cache import KVCache
from engine.linear import packed_available
from engine.model import Model
from engine.plan import Plan
from engine.weights import open_checkpoint

TOLERANCE = 1e-3
PARENTS = [-1, 0, 0, 1, 1, 2, 5]  # of the rows of a draft tree; row 0 is the anchor
PATH = [0, 2, 5, 6]

LEVERS = [
    {"gemm": gemm, "fuse_qkv": qkv, "fuse_gate_up": gate_up, "attention": attention}
    for gemm, qkv, gate_up, attention in itertools.product(
        ("library", "transposed", "packed"), (False, True), (False, True), ("sdpa", "grouped")
    )
]


def load(folder: Path, plan: Plan | None = None, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Model:
    return Model(open_checkpoint(str(folder)), device=device, dtype=dtype, plan=plan or Plan())


def poison(cache: KVCache) -> None:
    """Whatever is not committed becomes NaN, and shows in any result that reads it."""
    cache.k[:, :, cache.length :] = float("nan")
    cache.v[:, :, cache.length :] = float("nan")


def run(model: Model, cache: KVCache, ids: list[int], **options: object) -> torch.Tensor:
    positions = torch.arange(cache.length, cache.length + len(ids), device=model.device)
    rows = torch.tensor(ids, device=model.device)
    logits = model.forward(rows, positions, cache, **options).logits  # type: ignore[arg-type]
    assert logits is not None
    return logits.cpu()


def ancestors(row: int) -> list[int]:
    """Rows from the anchor down to `row`."""
    return [*ancestors(PARENTS[row]), row] if row >= 0 else []


def tree_mask() -> torch.Tensor:
    mask = torch.zeros(len(PARENTS), len(PARENTS), dtype=torch.bool)
    for row in range(len(PARENTS)):
        mask[row, ancestors(row)] = True
    return mask


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.shape == expected.shape
    assert torch.isfinite(actual).all()
    assert expected.abs().max() > 0.5  # the comparison has something to compare
    assert (actual - expected).abs().max() < TOLERANCE


def walk(model: Model, reference: object) -> None:
    """Prefill, one-row decode, a tree, a commit of one of its paths, decode, rollback, decode: each checked."""
    cache = model.new_cache(64)
    poison(cache)
    text = random_ids(11)
    assert_close(run(model, cache, text), reference_logits(reference, text))
    cache.commit(len(text))
    poison(cache)

    token = random_ids(1)
    assert_close(run(model, cache, token), reference_logits(reference, text + token)[-1:])
    cache.commit(1)
    poison(cache)
    text += token

    nodes = random_ids(len(PARENTS))
    depths = torch.tensor([len(ancestors(row)) - 1 for row in range(len(PARENTS))])
    logits = model.forward(
        torch.tensor(nodes, device=model.device),
        (cache.length + depths).to(model.device),
        cache,
        tree_mask=tree_mask().to(model.device),
    ).logits
    expected = [
        reference_logits(reference, text + [nodes[row] for row in ancestors(last)])[-1] for last in range(len(PARENTS))
    ]
    assert logits is not None
    assert_close(logits.cpu(), torch.stack(expected))
    cache.commit(PATH)
    poison(cache)
    text += [nodes[row] for row in PATH]
    assert cache.length == len(text)

    pair = random_ids(2)
    assert_close(run(model, cache, pair), reference_logits(reference, text + pair)[-2:])
    cache.commit(1)
    cache.truncate(9)
    poison(cache)
    three = random_ids(3)
    assert_close(run(model, cache, three), reference_logits(reference, text[:9] + three)[-3:])


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_every_architecture_equals_transformers(variant: str, tmp_path: Path) -> None:
    folder, reference = save(tmp_path, variant)
    walk(load(folder), reference)


@pytest.mark.parametrize("variant", ["llama-tied-biased", "qwen3-biased-tied"])
def test_every_compute_lever_equals_transformers(variant: str, tmp_path: Path) -> None:
    folder, reference = save(tmp_path, variant)
    for levers in LEVERS:
        if levers["gemm"] == "packed" and not packed_available("cpu", torch.float32):
            continue
        walk(load(folder, Plan(**levers)), reference)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("variant", ["llama", "qwen3"])
def test_compiled_elementwise_parts_equal_transformers(variant: str, tmp_path: Path) -> None:
    folder, reference = save(tmp_path, variant)
    walk(load(folder, Plan(compile=True, fuse_gate_up=True)), reference)


def test_sharded_checkpoint_equals_transformers(tmp_path: Path) -> None:
    folder, reference = save(tmp_path, "qwen2-yarn", shard="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    text = random_ids(17)
    model = load(folder)
    assert_close(run(model, model.new_cache(17), text), reference_logits(reference, text))


def test_rope_holds_beyond_the_original_context(tmp_path: Path) -> None:
    """YaRN stretches 64 positions to 256: compare at the far end too."""
    folder, reference = save(tmp_path, "llama-yarn")
    text = random_ids(200)
    model = load(folder)
    assert_close(run(model, model.new_cache(200), text), reference_logits(reference, text))


def test_logits_of_the_last_row_only_and_of_none(tmp_path: Path) -> None:
    folder, reference = save(tmp_path, "qwen2-tied")
    model, text = load(folder), random_ids(7)
    cache = model.new_cache(8)
    assert_close(run(model, cache, text, logits="last"), reference_logits(reference, text)[-1:])
    result = model.forward(torch.tensor(text), torch.arange(7), cache, logits="none")
    assert result.logits is None
    assert result.taps is None
    cache.commit(7)
    token = random_ids(1)
    assert_close(run(model, cache, token), reference_logits(reference, text + token)[-1:])


def test_taps_are_the_outputs_of_layers(tmp_path: Path) -> None:
    folder, reference = save(tmp_path, "qwen3")
    model, text = load(folder), random_ids(9)
    with torch.no_grad():
        states = reference(input_ids=torch.tensor([text]), output_hidden_states=True).hidden_states
    taps = model.forward(torch.tensor(text), torch.arange(9), model.new_cache(9), taps=(1, 0)).taps
    assert taps is not None
    expected = torch.cat([states[2][0], states[1][0]], dim=-1)  # hidden_states[0] is the embedding
    assert (taps - expected).abs().max() < TOLERANCE


def test_embed_and_head_are_the_checkpoints(tmp_path: Path) -> None:
    folder, reference = save(tmp_path, "llama")
    model, ids = load(folder, Plan(gemm="transposed")), torch.tensor(random_ids(5))
    assert torch.equal(model.embed(ids), reference.model.embed_tokens.weight[ids])
    hidden = torch.randn(5, 66)
    assert (model.head(hidden) - hidden @ reference.lm_head.weight.T).abs().max() < TOLERANCE


@pytest.mark.parametrize("gemm", ["library", "transposed", "packed"])
def test_bf16_is_as_near_to_fp32_as_transformers_bf16(gemm: str, tmp_path: Path) -> None:
    if gemm == "packed" and not packed_available("cpu", torch.bfloat16):
        pytest.skip("no oneDNN bf16 on this CPU")
    folder, reference = save(tmp_path, "qwen3")
    text = random_ids(24)
    exact = reference_logits(reference, text)
    theirs = reference_logits(reference.bfloat16(), text).float()
    model = load(folder, Plan(gemm=gemm, attention="grouped"), torch.bfloat16)  # type: ignore[arg-type]
    logits = run(model, model.new_cache(24), text)
    assert logits.dtype == torch.bfloat16
    noise = (theirs - exact).pow(2).mean().sqrt()
    assert (logits.float() - exact).pow(2).mean().sqrt() < 2 * noise
    assert noise < 0.1 * exact.std()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_cuda_equals_transformers_on_the_cpu(variant: str, tmp_path: Path) -> None:
    folder, reference = save(tmp_path, variant)
    for levers in LEVERS:
        if levers["gemm"] != "packed":
            walk(load(folder, Plan(**levers), device="cuda"), reference)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("attention", ["sdpa", "grouped"])
def test_cuda_bf16_is_as_near_to_fp32_as_transformers_bf16(attention: str, tmp_path: Path) -> None:
    folder, reference = save(tmp_path, "llama-yarn")
    text = random_ids(24)
    exact = reference_logits(reference, text)
    theirs = reference_logits(reference.bfloat16(), text).float()
    model = load(folder, Plan(attention=attention), torch.bfloat16, "cuda")  # type: ignore[arg-type]
    logits = run(model, model.new_cache(24), text).float()
    assert (logits - exact).pow(2).mean() < 4 * (theirs - exact).pow(2).mean()


def test_a_full_cache_is_refused(tmp_path: Path) -> None:
    folder, _ = save(tmp_path, "llama")
    model = load(folder)
    with pytest.raises(ValueError, match="holds 4 tokens; 5"):
        run(model, model.new_cache(4), random_ids(5))
