"""A draft model: any smaller checkpoint with the target's tokenizer, decoding ahead by itself."""

from __future__ import annotations

import heapq

import torch
from torch import Tensor

from engine.drafters.contract import ANCHOR, EMPTY, DraftShape, DraftTree
from engine.model import Model
from engine.sample import choose
from engine.tree import chain


class DraftModelDrafter:
    """Drafts greedily, token by token, with a model of its own.

    The model's KV cache is a function of the text it holds. A proposal leaves its own drafts in it; the next one
    keeps those that were committed after all and rolls the rest back, then runs what is new in one pass (the whole
    prompt, the first time). For a tree the greedy path stays the trunk, and the runners-up of each of its positions
    become leaves: the most probable nodes within the rows, which are known once the trunk is less probable
    than the least of them.

    `vocab_size` is the target's: a draft model may pad its table further, and such ids are never drafted.
    """

    name = "draft-model"
    taps: tuple[int, ...] = ()

    def __init__(self, model: Model, vocab_size: int, *, capacity: int = 256) -> None:
        self.model = model
        self.max_depth = model.config.max_positions
        self._vocab = min(vocab_size, model.config.vocab_size)
        self._cache = model.new_cache(capacity)
        self._text: list[int] = []
        self._cached: list[int] = []  # what the cache's committed slots hold

    def begin(self) -> None:
        self._text = []

    def observe(self, ids: list[int], taps: Tensor | None) -> None:
        self._text.extend(ids)

    @torch.inference_mode()
    def propose(self, anchor: int, shape: DraftShape) -> DraftTree:
        if shape.depth < 1 or shape.rows < 2:
            return EMPTY
        room = self.model.config.max_positions - len(self._text)  # positions that the model can still read
        depth = min(shape.depth, room, shape.depth if shape.tree else shape.rows - 1)
        if depth < 1:
            return EMPTY
        logits = self._catch_up([*self._text, anchor], ahead=depth)
        return self._tree(logits, depth, shape.rows - 1) if shape.tree else self._chain(logits, depth)

    def _chain(self, logits: Tensor, depth: int) -> DraftTree:
        tokens = [int(choose(logits, self.model.dtype))]
        while len(tokens) < depth:
            tokens.append(int(choose(self._step(tokens[-1]), self.model.dtype)))
        return chain(tokens)

    def _tree(self, logits: Tensor, depth: int, budget: int) -> DraftTree:
        """`budget` nodes: of each trunk position the best tokens, the first of which goes on."""
        nodes: list[tuple[float, int, int, int]] = []  # (-path log-probability, depth, rank, token)
        trunk = 0.0
        for level in range(depth):
            wide = logits.float()
            values, best = wide.topk(min(budget, wide.shape[-1]))
            logprobs: list[float] = (values - wide.logsumexp(dim=-1)).tolist()
            tokens: list[int] = best.tolist()
            nodes += [(-trunk - logprobs[rank], level, rank, token) for rank, token in enumerate(tokens)]
            trunk += logprobs[0]
            nodes = heapq.nsmallest(budget, nodes)
            if level + 1 == depth or (len(nodes) == budget and -trunk >= nodes[-1][0]):
                break
            logits = self._step(tokens[0])
        return _caterpillar(nodes)

    def _catch_up(self, text: list[int], ahead: int) -> Tensor:
        """Bring the cache to `text`, its anchor included, with room for `ahead` more: logits [V] after it."""
        if len(text) + ahead > self._cache.capacity:
            self._cache = self.model.new_cache(max(len(text) + ahead, 2 * self._cache.capacity))
            self._cached = []
        kept = 0
        for have, want in zip(self._cached, text[:-1], strict=False):  # the anchor always runs: its logits are needed
            if have != want:
                break
            kept += 1
        self._cache.truncate(kept)
        self._cached = self._cached[:kept]
        return self._run(text[kept:])

    def _step(self, token: int) -> Tensor:
        return self._run([token])

    def _run(self, ids: list[int]) -> Tensor:
        """Append `ids` to the cache; logits [V] after the last."""
        device, start = self.model.device, self._cache.length
        out = self.model.forward(
            torch.tensor(ids, device=device),
            torch.arange(start, start + len(ids), device=device),
            self._cache,
            logits="last",
        )
        self._cache.commit(len(ids))
        self._cached.extend(ids)
        assert out.logits is not None
        return out.logits[0, : self._vocab]


def _caterpillar(nodes: list[tuple[float, int, int, int]]) -> DraftTree:
    """The tree of (-log-probability, depth, rank, token) nodes, all children of the rank-0 nodes above them."""
    tokens: list[int] = []
    parents: list[int] = []
    logprobs: list[float] = []
    trunk = {-1: ANCHOR}
    for negative, level, rank, token in sorted(nodes, key=lambda node: (node[1], node[2])):
        if rank == 0:
            trunk[level] = len(tokens)
        tokens.append(token)
        parents.append(trunk[level - 1])
        logprobs.append(-negative)
    return DraftTree(tuple(tokens), tuple(parents), tuple(logprobs))
