"""Our DFlash drafts are the `dflash` package's, token for token, on the same hidden states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dflash.model as package
import pytest
import torch
from transformers import LlamaForCausalLM

from engine.config import DraftConfig
from engine.drafters import dflash as ours
from engine.drafters.contract import DraftShape
from engine.drafters.dflash import DFlashDrafter
from engine.drafters.reference import open_drafter
from engine.linear import packed_available
from engine.model import Model
from engine.plan import Plan
from engine.weights import open_checkpoint
from tests.decode.toy import PoisonedCache
from tests.drafters.checkpoints import DRAFTER, save_dflash, save_target

TEXT = Path(__file__).with_name("smollm2_text.txt")


def load(folder: Path, target: Model, plan: Plan | None = None, capacity: int = 256) -> DFlashDrafter:
    reference = open_drafter(str(folder))
    assert reference.checkpoint is not None
    assert isinstance(reference.config, DraftConfig)
    return DFlashDrafter(reference.checkpoint, reference.config, target, plan or Plan(), capacity=capacity)


def open_target(path: Path, plan: Plan | None = None) -> Model:
    return Model(open_checkpoint(str(path)), device="cpu", dtype=torch.float32, plan=plan or Plan())


def package_blocks(
    drafter: package.DFlashDraftModel, target: Any, prompt: list[int], new: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[dict[str, Any]], list[int]]:
    """Run the package's own loop and note, of every block, what went in and what it drafted."""
    blocks: list[dict[str, Any]] = []
    embed, forward, logits = package._raw_input_embeddings, drafter.forward, drafter.compute_logits

    def noted_embed(model: Any, ids: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        blocks.append({"anchor": int(ids[0, 0]), "size": ids.shape[1]})
        return embed(model, ids, scale)

    def noted_forward(*arguments: Any, **keywords: Any) -> torch.Tensor:
        blocks[-1]["taps"] = keywords["target_hidden"][0].clone()
        return forward(*arguments, **keywords)

    def noted_logits(*arguments: Any) -> torch.Tensor:
        result = logits(*arguments)
        blocks[-1]["logits"] = result[0].clone()
        return result

    monkeypatch.setattr(package, "_raw_input_embeddings", noted_embed)
    monkeypatch.setattr(drafter, "forward", noted_forward)
    monkeypatch.setattr(drafter, "compute_logits", noted_logits)
    output = drafter.spec_generate(target, torch.tensor([prompt]), new, [])
    monkeypatch.undo()
    return blocks, output[0].tolist()


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one layer, default taps": {"num_hidden_layers": 1, "dflash_config": {"mask_token_id": 60}},
    "two layers, default taps": {"num_hidden_layers": 2, "dflash_config": {"mask_token_id": 60}},
    "taps the last layer": {"dflash_config": {"mask_token_id": 3, "target_layer_ids": [4, 0, 4]}},
    "settings beside": {"dflash_config": {}, "mask_token_id": 5, "target_layer_ids": [2], "block_size": 2},
    "biases": {"attention_bias": True},
    "one kv head for each": {"num_key_value_heads": 4, "head_dim": 14},
    "scales and soft cap": {
        "dflash_config": {
            "mask_token_id": 9,
            "target_layer_ids": [1, 0, 3],
            "input_embedding_scale": 4.9,
            "output_multiplier": 0.37,
            "final_logit_softcapping": 2.5,
        }
    },
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 48,
        }
    },
    "large block": {"block_size": 23},
}


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("gemm", ["library", "packed"])
def test_drafts_equal_the_packages(
    changes: dict[str, Any], gemm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = save_target(tmp_path / "target", tie_word_embeddings=False)
    reference = save_dflash(tmp_path / "drafter", **changes)
    prompt = [1, 17, 42, 5, 5, 60, 33]
    blocks, output = package_blocks(reference, target, prompt, 40, monkeypatch)
    assert len(blocks) >= 7

    model = open_target(tmp_path / "target")
    monkeypatch.setattr(ours, "KVCache", PoisonedCache)
    mine = load(tmp_path / "drafter", model, Plan(draft_gemm=gemm), capacity=9)  # it must grow
    cache = model.new_cache(64)
    hidden = model.forward(torch.tensor(output), torch.arange(len(output)), cache, taps=mine.taps).taps
    assert hidden is not None
    for _ in range(2):  # a second request is as the first
        mine.begin()
        seen = 0
        for block in blocks:
            taps, size = block["taps"], block["size"]
            own = hidden[seen : seen + len(taps)]
            # Our target's taps are the package's hidden states (which list the last layer after the final norm).
            torch.testing.assert_close(mine._normed_last(own), taps, atol=2e-4, rtol=1e-4)
            mine.observe([0] * len(taps), own)
            seen += len(taps)
            assert output[seen] == block["anchor"]
            if size == reference.block_size:
                tree = mine.propose(block["anchor"], DraftShape(size - 1, size))
                assert list(tree.tokens) == block["logits"].argmax(-1).tolist()
            # Near the end the package cuts the block, which we do only when told to.
            logprobs, tokens = mine.marginals(block["anchor"], size - 1, 5, block=size)
            expected = block["logits"].log_softmax(-1).topk(5)
            torch.testing.assert_close(torch.tensor(logprobs), expected.values, atol=1e-4, rtol=1e-4)
            assert tokens == expected.indices.tolist()


def test_a_tree_is_the_best_of_the_marginals(tmp_path: Path) -> None:
    save_target(tmp_path / "target")
    save_dflash(tmp_path / "drafter")
    model = open_target(tmp_path / "target")
    drafter = load(tmp_path / "drafter", model)
    drafter.begin()
    drafter.observe([1, 2, 3], torch.randn(3, 3 * 24))
    tree = drafter.propose(4, DraftShape(5, 12, tree=True))
    logprobs, tokens = drafter.marginals(4, 5, 11)
    assert len(tree) == 11
    assert tree.tokens[0] == tokens[0][0]
    for node, parent in enumerate(tree.parents):
        level = 0
        above = parent
        while above >= 0:
            level, above = level + 1, tree.parents[above]
        mine = logprobs[level][tokens[level].index(tree.tokens[node])]
        assert tree.logprobs[node] == pytest.approx(mine + (tree.logprobs[parent] if parent >= 0 else 0.0), abs=1e-5)


def test_the_last_positions_of_a_context(tmp_path: Path) -> None:
    save_target(tmp_path / "target", max_position_embeddings=20)
    save_dflash(tmp_path / "drafter")
    drafter = load(tmp_path / "drafter", open_target(tmp_path / "target"))
    drafter.begin()
    drafter.observe([1] * 17, torch.randn(17, 3 * 24))
    assert len(drafter.propose(4, DraftShape(2, 3))) == 2  # positions 17 to 19


@pytest.mark.parametrize(("vocabulary", "top_k"), [(49152, 15), (1280, 19), (1280, 20), (1000, 7), (61, 99)])
def test_top_marginals(vocabulary: int, top_k: int) -> None:
    logits = torch.randn(5, vocabulary) * 4
    logprobs, tokens = ours.top_marginals(logits, top_k)
    expected = logits.double().log_softmax(-1).topk(min(top_k, vocabulary))
    assert tokens == expected.indices.tolist()
    torch.testing.assert_close(torch.tensor(logprobs), expected.values.float(), atol=1e-5, rtol=1e-5)


def test_blocks_follow_the_depth_asked_for(tmp_path: Path) -> None:
    save_target(tmp_path / "target")
    save_dflash(tmp_path / "drafter")
    drafter = load(tmp_path / "drafter", open_target(tmp_path / "target"))
    drafter.begin()
    drafter.observe([1], torch.randn(1, 3 * 24))
    sizes = {depth: len(drafter.propose(4, DraftShape(depth, depth + 1))) for depth in (0, 1, 4, 5, 30)}
    assert sizes == {0: 0, 1: 1, 4: 4, 5: 5, 30: DRAFTER["block_size"] - 1}
    assert len(drafter.propose(4, DraftShape(5, 3))) == 2
    full = drafter.propose(4, DraftShape(5, 6)).tokens
    assert drafter.propose(4, DraftShape(2, 3)).tokens == full[:2]  # a block of the trained size, however few are read
    with pytest.raises(ValueError, match="taps"):
        drafter.observe([1, 2], torch.randn(1, 3 * 24))


def test_200_blocks_of_the_demo_drafter(demo_target: Path, demo_drafter: Path) -> None:
    """Text that SmolLM2 wrote itself, its real hidden states, commits of 1 to 8 tokens: 200 blocks, drafts equal."""
    from engine.tokenizer import load_tokenizer

    text = load_tokenizer(open_checkpoint(str(demo_target))).encode(TEXT.read_text())
    fast = "packed" if packed_available("cpu", torch.float32) else "library"  # the head is shared, so it cannot differ
    model = open_target(demo_target, Plan(gemm=fast))
    reference = package.DFlashDraftModel.from_pretrained(demo_drafter, dtype=torch.float32).eval()
    mine = load(demo_drafter, model)
    hidden = model.forward(
        torch.tensor(text), torch.arange(len(text)), model.new_cache(len(text)), logits="last", taps=mine.taps
    ).taps
    assert hidden is not None

    cache = package._make_cache(reference.config)
    commits = torch.randint(1, 9, (199,), generator=torch.Generator().manual_seed(4)).tolist()
    size = reference.block_size
    seen, compared, right = 0, 0, 0
    with torch.inference_mode():
        for new in [40, *commits]:
            start = seen + new
            assert start + size < len(text)
            ids = torch.tensor([[text[start], *[reference.mask_token_id] * (size - 1)]])
            states = reference(
                target_hidden=hidden[None, seen:start],
                noise_embedding=model.embedding[ids],
                position_ids=torch.arange(seen, start + size)[None],
                past_key_values=cache,
                use_cache=True,
            )
            package._crop_to(cache, start)
            wanted = reference.compute_logits(states[0, 1:], model.head).argmax(-1).tolist()
            mine.observe(text[seen:start], hidden[seen:start])
            drafts = list(mine.propose(text[start], DraftShape(size - 1, size)).tokens)
            assert drafts == wanted
            compared += 1
            right += drafts[0] == text[start + 1]
            seen = start
    assert compared == 200
    assert right > 80  # these are drafts of the text, not of anything else


@pytest.mark.slow
def test_the_packages_own_run_on_the_demo(
    demo_target: Path, demo_drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package's loop on transformers' own SmolLM2: every draft equal, up to the shrinking blocks at the end."""
    from engine.tokenizer import load_tokenizer

    target = LlamaForCausalLM.from_pretrained(
        demo_target.parent, gguf_file=demo_target.name, dtype=torch.float32
    ).eval()
    drafter = package.DFlashDraftModel.from_pretrained(demo_drafter, dtype=torch.float32).eval()
    prompt = load_tokenizer(open_checkpoint(str(demo_target))).chat(
        [{"role": "user", "content": "Explain to a child how a bicycle stays upright."}]
    )
    blocks, _ = package_blocks(drafter, target, prompt, 400, monkeypatch)
    assert len(blocks) >= 100
    mine = load(demo_drafter, open_target(demo_target))
    mine.begin()
    for block in blocks:
        mine.observe([0] * len(block["taps"]), block["taps"])
        _, tokens = mine.marginals(block["anchor"], block["size"] - 1, 1, block=block["size"])
        assert tokens == block["logits"].argmax(-1, keepdim=True).tolist()
