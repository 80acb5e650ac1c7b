"""The draft model's chains and trees against its own plain greedy decoding and distributions."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from engine.drafters.contract import ANCHOR, DraftShape
from engine.drafters.draft_model import DraftModelDrafter
from engine.model import Model
from engine.plan import Plan
from engine.weights import open_checkpoint
from tests.decode.toy import PoisonedCache
from tests.drafters.checkpoints import SHAPE, save_target

WORDS = SHAPE["vocab_size"]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory):
    """A draft model, ours and transformers', of less certain taste than the others."""
    folder: Path = tmp_path_factory.mktemp("draft")
    reference = save_target(folder, seed=3, scale=0.35, max_position_embeddings=64)
    return Model(open_checkpoint(str(folder)), device="cpu", dtype=torch.float32, plan=Plan()), reference


@pytest.fixture
def model(small, monkeypatch: pytest.MonkeyPatch) -> Model:
    monkeypatch.setattr(
        Model, "new_cache", lambda self, capacity: PoisonedCache(self.config, capacity, self.device, self.dtype)
    )
    return small[0]


def logprobs(reference, text: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return reference(torch.tensor([text])).logits[0, -1].log_softmax(-1)


def greedy(reference, text: list[int], depth: int) -> list[int]:
    grown = list(text)
    for _ in range(depth):
        grown.append(int(logprobs(reference, grown).argmax()))
    return grown[len(text) :]


def rounds(drafter: DraftModelDrafter, reference, seed: int):
    """A text that grows by what was drafted, by part of it, and by something else: (text, anchor) before each draft."""
    rng = random.Random(seed)
    drafter.begin()
    text = [rng.randrange(WORDS) for _ in range(5)]
    drafter.observe(text, None)
    anchor = rng.randrange(WORDS)
    for _ in range(7):
        yield text, anchor
        right = greedy(reference, [*text, anchor], rng.randint(0, 4))
        step = [anchor, *right]
        drafter.observe(step, None)
        text = [*text, *step]
        anchor = rng.choice([rng.randrange(WORDS), greedy(reference, text, 1)[0]])


@pytest.mark.parametrize("capacity", [1, 256])
def test_chains_are_greedy_decoding_whatever_was_accepted(model: Model, small, capacity: int) -> None:
    drafter = DraftModelDrafter(model, WORDS, capacity=capacity)
    for seed in range(3):
        for text, anchor in rounds(drafter, small[1], seed):
            tree = drafter.propose(anchor, DraftShape(4, 5))
            assert list(tree.tokens) == greedy(small[1], [*text, anchor], 4)
            assert tree.is_chain


@pytest.mark.parametrize("rows", [2, 6, 17])
def test_trees_hold_the_most_probable_nodes_beside_the_trunk(model: Model, small, rows: int) -> None:
    drafter = DraftModelDrafter(model, WORDS)
    depths: set[int] = set()
    for text, anchor in rounds(drafter, small[1], 9):
        tree = drafter.propose(anchor, DraftShape(4, rows, tree=True))
        nodes: dict[tuple[int, ...], float] = {}
        trunk: tuple[int, ...] = ()
        above = 0.0
        for _ in range(4):
            distribution = logprobs(small[1], [*text, anchor, *trunk])
            for token, logprob in enumerate(distribution.tolist()):
                nodes[(*trunk, token)] = above + logprob
            trunk = (*trunk, int(distribution.argmax()))
            above = nodes[trunk]
        best = sorted(nodes.values(), reverse=True)[: rows - 1]
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(tree.tokens, tree.parents, strict=True):
            paths.append((*(paths[parent] if parent != ANCHOR else ()), token))
        assert len(set(paths)) == rows - 1
        assert sorted((nodes[path] for path in paths), reverse=True) == pytest.approx(best, abs=1e-4)
        depths.add(max(len(path) for path in paths))
        assert list(tree.logprobs) == pytest.approx([nodes[path] for path in paths], abs=1e-4)
    assert rows == 2 or len(depths) > 1  # trunks that end early and trunks that do not


def test_only_what_is_new_is_computed(model: Model, small, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    forward = model.forward
    monkeypatch.setattr(
        model, "forward", lambda ids, *rest, **named: rows.append(len(ids)) or forward(ids, *rest, **named)
    )
    drafter = DraftModelDrafter(model, WORDS)
    drafter.begin()
    drafter.observe([1, 2, 3, 4, 5, 6], None)
    drafts = drafter.propose(7, DraftShape(3, 4)).tokens
    assert rows == [7, 1, 1]  # the prompt and the anchor at once, then token by token
    drafter.observe([7, *drafts], None)
    rows.clear()
    drafter.propose(8, DraftShape(3, 4))
    assert rows == [2, 1, 1]  # the last draft was never run, and the new anchor
    drafter.observe([8], None)
    rows.clear()
    drafter.propose(9, DraftShape(1, 2))
    assert rows == [1]


def test_ids_beyond_the_targets_vocabulary_are_never_drafted(model: Model, small) -> None:
    drafter = DraftModelDrafter(model, 3)
    drafter.begin()
    drafter.observe([1, 2], None)
    assert max(drafter.propose(0, DraftShape(9, 10)).tokens) < 3
    assert max(drafter.propose(0, DraftShape(3, 9, tree=True)).tokens) < 3


def test_drafts_end_with_the_draft_models_context(model: Model, small) -> None:
    drafter = DraftModelDrafter(model, WORDS)
    drafter.begin()
    drafter.observe([1] * 61, None)
    assert [len(drafter.propose(2, DraftShape(5, 6)))] == [3]  # positions 61, 62 and 63 can be read
    drafter.observe([2, 3, 4], None)
    assert len(drafter.propose(2, DraftShape(5, 6))) == 0
