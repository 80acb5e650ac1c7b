"""A target that checks its caller: each row must see exactly the text that leads to it.

The next token is a pure function of the visible text, so plain decoding is a few lines of Python (`plain`), and any
mistake in masks, positions, padding, commits or roll-back changes the output. Rows that see anything but a
text (a gap, two tokens at one position) get logits of NaN.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.cache import KVCache
from engine.config import ModelConfig, RopeConfig
from engine.drafters.contract import ANCHOR, DraftShape, DraftTree
from engine.generate import StopRule
from engine.model import Forward

VOCABULARY = 13
CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=VOCABULARY,
    hidden_size=2,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=2,
    intermediate_size=2,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=1e4),
    max_positions=512,
    tie_embeddings=True,
)

Next = Callable[[Sequence[int]], int]


def whole_text(salt: int) -> Next:
    """A next token that depends on every token before it."""

    def following(text: Sequence[int]) -> int:
        return hashlib.sha256(f"{salt}:{list(text)}".encode()).digest()[0] % VOCABULARY

    return following


def last_two(salt: int) -> Next:
    """A next token that depends on the last two only, so that texts soon repeat themselves."""

    def following(text: Sequence[int]) -> int:
        return hashlib.sha256(f"{salt}:{list(text[-2:])}".encode()).digest()[0] % VOCABULARY

    return following


class PoisonedCache(KVCache):
    """A KV cache whose uncommitted slots turn to NaN as soon as they may no longer be read."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self._poison()

    @torch.inference_mode()
    def _poison(self) -> None:
        self.k[:, :, self.length :] = math.nan
        self.v[:, :, self.length :] = math.nan

    def commit(self, rows: list[int] | int) -> None:
        super().commit(rows)
        self._poison()

    def truncate(self, length: int) -> None:
        super().truncate(length)
        self._poison()


class ToyModel:
    """Stands in for `engine.model.Model`. A slot's key holds (token, position); so do taps, for every layer."""

    def __init__(self, following: Next) -> None:
        self.config, self.device, self.dtype = CONFIG, torch.device("cpu"), torch.float32
        self.following = following
        self.widths: list[int] = []

    def new_cache(self, capacity: int) -> KVCache:
        return PoisonedCache(self.config, capacity, self.device, self.dtype)

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        cache: KVCache,
        *,
        tree_mask: Tensor | None = None,
        logits: str = "all",
        taps: tuple[int, ...] = (),
        clock: object = None,
    ) -> Forward:
        rows = len(ids)
        self.widths.append(rows)
        (keys,), (values,) = cache.slots(rows)
        features = torch.stack([ids, positions], dim=1).float()
        keys[0], values[0] = features, features
        (seen,), _ = cache.visible(rows)
        new = torch.ones(rows, rows, dtype=torch.bool).tril() if tree_mask is None else tree_mask
        assert new.shape == (rows, rows)
        out = torch.full((rows, VOCABULARY), math.nan)
        slots: list[tuple[float, float]] = [(position, token) for token, position in seen[0].tolist()]
        for row, (mask, at) in enumerate(zip(new.tolist(), positions.tolist(), strict=True)):
            visible = [slot for slot, sees in zip(slots[cache.length :], mask, strict=True) if sees]
            text = sorted(slots[: cache.length] + visible)
            if [position for position, _ in text] == list(range(len(text))) and at == len(text) - 1:
                out[row] = torch.linspace(-1, 0, VOCABULARY)
                out[row, self.following([int(token) for _, token in text])] = 1.0
        tapped = features.repeat(1, len(taps)) if taps else None
        return Forward(out if logits == "all" else out[-1:], tapped)


def plain(following: Next, prompt: Sequence[int], limit: int, stop: StopRule) -> tuple[list[int], str]:
    """Autoregressive decoding with its stop rule, written independently of the engine."""
    ids: list[int] = []
    while True:
        ids.append(following([*prompt, *ids]))
        if ids[-1] in stop.eos_ids:
            return ids, "eos"
        for sequence in stop.sequences:
            if len(ids) >= len(sequence) and ids[len(ids) - len(sequence) :] == list(sequence):
                return ids, "stop"
        if len(ids) == limit:
            return ids, "length"


class TestDrafter:
    """Proposes what `invent(text, shape)` says and checks how it is called."""

    __test__ = False
    name = "test"
    max_depth = 12

    def __init__(self, invent: Callable[[list[int], DraftShape], DraftTree], taps: tuple[int, ...] = ()) -> None:
        self.invent, self.taps = invent, taps
        self.text: list[int] = []
        self.shapes: list[DraftShape] = []

    def begin(self) -> None:
        self.text = []

    def observe(self, ids: list[int], taps: Tensor | None) -> None:
        assert (taps is None) == (not self.taps)
        if taps is not None:
            place = range(len(self.text), len(self.text) + len(ids))
            wanted = torch.tensor(list(zip(ids, place, strict=True))).float().repeat(1, len(self.taps))
            assert torch.equal(taps, wanted)
        self.text += ids

    def propose(self, anchor: int, shape: DraftShape) -> DraftTree:
        self.shapes.append(shape)
        return self.invent([*self.text, anchor], shape)


def random_tree(rng: random.Random, text: list[int], shape: DraftShape, following: Next, truth: float) -> DraftTree:
    """A random tree within `shape`, repeated siblings included; a node is right with probability `truth`."""
    tokens: list[int] = []
    parents: list[int] = []
    paths: list[list[int]] = []
    for node in range(rng.randint(0, shape.rows - 1)):
        parent = rng.randint(ANCHOR, node - 1) if shape.tree and rng.random() < 0.5 else node - 1
        above = paths[parent] if parent != ANCHOR else []
        if len(above) >= shape.depth:
            if not shape.tree:
                break
            parent, above = ANCHOR, []
        token = following([*text, *above]) if rng.random() < truth else rng.randrange(VOCABULARY)
        tokens.append(token)
        parents.append(parent)
        paths.append([*above, token])
    return DraftTree(tuple(tokens), tuple(parents), (0.0,) * len(tokens))
