"""The only decode loop: prefill, then draft, verify, accept and commit until the text ends.

Output is exactly the target's own autoregressive text, whatever the drafter proposes: a draft is kept only where it
is the target's own choice, greedy or sampled, and the text is cut where plain decoding would have stopped. A sampled
choice depends on the position and not on how it was reached (`engine.sampling`), so this holds at any temperature.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from engine.cache import KVCache
from engine.deployment import Deployment, Dtype
from engine.drafters.contract import EMPTY, Drafter, DraftShape, DraftTree
from engine.errors import UserError
from engine.model import Model
from engine.plan import Plan
from engine.sample import Sampler, choose
from engine.sampling import Sampling
from engine.stages import NULL_CLOCK, PREFILL, StageClock
from engine.tree import check_shape, positions, tree_mask
from engine.verify import accept

StopReason = Literal["eos", "stop", "length"]

TORCH_DTYPES: dict[Dtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
_DEFAULT_THREADS = torch.get_num_threads()


@dataclass(frozen=True)
class StopRule:
    """Where a text ends: after an end-of-sequence id, or after one of `sequences` (token ids, none empty).

    Only generated ids count: a stop sequence cannot begin inside the prompt.
    """

    eos_ids: tuple[int, ...] = ()
    sequences: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if any(not sequence for sequence in self.sequences):
            raise ValueError("an empty stop sequence would end every text before it begins")

    def reached(self, ids: Sequence[int], limit: int) -> StopReason | None:
        """Why a text that has just grown to `ids` ends here, or None. "eos" before "stop" before "length"."""
        if ids[-1] in self.eos_ids:
            return "eos"
        if any(tuple(ids[-len(sequence) :]) == sequence for sequence in self.sequences):
            return "stop"
        return "length" if len(ids) >= limit else None


@dataclass(frozen=True)
class Generation:
    """One generated text and how it came about.

    `ids` holds the generated tokens only; an end-of-sequence id or a stop sequence that ended the text is its last
    part. The first token comes from prefill; each verify step then emitted `emitted_per_step[i]` tokens (the bonus
    token included, tokens beyond the end of the text not) after drafting `drafted_per_step[i]` nodes. Seconds are
    wall time on a device that has finished.
    """

    ids: list[int]
    stop_reason: StopReason
    emitted_per_step: list[int]
    drafted_per_step: list[int]
    prefill_s: float
    decode_s: float

    @property
    def accept_length(self) -> float | None:
        """Mean tokens emitted per verify step, bonus token included; None where prefill ended the text."""
        return sum(self.emitted_per_step) / len(self.emitted_per_step) if self.emitted_per_step else None

    @property
    def tok_s(self) -> float:
        """Generated tokens per second, prefill included."""
        return len(self.ids) / (self.prefill_s + self.decode_s)


class Decoder:
    """Target, drafter and plan, ready to generate for one request at a time.

    `drafter` None, or a plan with source "none", is plain autoregressive decoding. `capacity` is the number of tokens
    that the KV cache holds from the start; a longer request makes a larger one.
    """

    def __init__(self, model: Model, drafter: Drafter | None, plan: Plan, *, capacity: int = 0) -> None:
        self.model = model
        self.drafter = drafter if plan.source != "none" else None
        self.plan = plan
        self._capacity = capacity
        self._cache = model.new_cache(capacity) if capacity else None

    @torch.inference_mode()
    def generate(
        self,
        prompt_ids: Sequence[int],
        max_new_tokens: int,
        stop: StopRule,
        *,
        clock: StageClock = NULL_CLOCK,
        on_tokens: Callable[[list[int]], None] | None = None,
        sampling: Sampling | None = None,
    ) -> Generation:
        """Continuation of `prompt_ids`, at least one token, at most `max_new_tokens`: greedy, or sampled as `sampling`
        says, which then has one request number.

        `on_tokens` gets each step's new ids as soon as they are final. Raises UserError where prompt and output do not
        fit the model's context, or an id is not in its vocabulary.
        """
        prompt = list(prompt_ids)
        self._refuse_bad_request(prompt, max_new_tokens)
        model, drafter = self.model, self.drafter
        pick = self._chooser(sampling)
        taps = drafter.taps if drafter else ()
        cache = self._cache_for(len(prompt) + max_new_tokens + self._width(self._most_rows()))
        emit = on_tokens or _ignore

        start = time.perf_counter()
        with clock.stage(PREFILL):
            out = model.forward(
                self._ids(prompt),
                self._ids(range(len(prompt))),
                cache,
                logits="last" if self.plan.head_rows == "needed" else "all",
                taps=taps,
            )
            cache.commit(len(prompt))
            if drafter:
                drafter.begin()
                drafter.observe(prompt, out.taps)
            assert out.logits is not None
            (anchor,) = pick(out.logits[-1:], [len(prompt)])
        ids = [anchor]
        reason = stop.reached(ids, max_new_tokens)
        emit([anchor])
        decode_start = time.perf_counter()

        emitted_per_step: list[int] = []
        drafted_per_step: list[int] = []
        while reason is None:
            with clock.stage("host"):
                tree = self._draft(anchor, max_new_tokens - len(ids), clock)
                logits, step_taps = self._verify(anchor, tree, cache.length, clock)
                with clock.stage("accept"):
                    path, bonus = accept(tree, pick(logits, positions(tree, cache.length + 1)))
                    rows = [0, *(node + 1 for node in path)]
                    in_place = rows[-1] == len(rows) - 1
                    cache.commit(len(rows) if in_place else rows)
                accepted = [tree.tokens[node] for node in path]
                before = len(ids)
                for token in (*accepted, bonus):
                    ids.append(token)
                    reason = stop.reached(ids, max_new_tokens)
                    if reason is not None:
                        break
                if drafter and reason is None:
                    with clock.stage("draft"):
                        drafter.observe([anchor, *accepted], None if step_taps is None else _pick(step_taps, rows))
                anchor = bonus
                emitted_per_step.append(len(ids) - before)
                drafted_per_step.append(len(tree))
            emit(ids[before:])
        end = time.perf_counter()
        return Generation(ids, reason, emitted_per_step, drafted_per_step, decode_start - start, end - decode_start)

    def _chooser(self, sampling: Sampling | None) -> Callable[[Tensor, Sequence[int]], list[int]]:
        """Makes a token of each row of logits [R, V]; the token's absolute index in the text is `positions[r]`."""
        model = self.model
        if sampling is None:
            return lambda logits, positions: _listed(choose(logits, model.dtype))
        if len(sampling.requests) != 1:
            raise ValueError("one request is decoded at a time: it has one number")
        sampler = Sampler(sampling, model.config.vocab_size, model.device, model.dtype)
        return lambda logits, positions: _listed(sampler.choose(logits, positions))

    def _draft(self, anchor: int, remaining: int, clock: StageClock) -> DraftTree:
        """A draft that leaves room for the bonus token within the `remaining` tokens that may still be emitted."""
        drafter, plan = self.drafter, self.plan
        if drafter is None:
            return EMPTY
        depth = min(plan.draft_tokens, drafter.max_depth, remaining - 1)
        if depth < 1:
            return EMPTY
        rows = plan.tree_rows or depth + 1
        shape = DraftShape(depth, rows, tree=plan.tree_rows > 0)
        with clock.stage("draft"):
            tree = drafter.propose(anchor, shape)
        check_shape(tree, shape)
        return tree

    def _verify(self, anchor: int, tree: DraftTree, start: int, clock: StageClock) -> tuple[Tensor, Tensor | None]:
        """One target pass over anchor and drafts: logits [R, V] and taps [R, n * H] of its R = len(tree) + 1 rows.

        The pass is padded to one of the plan's widths. Rows that only pad come last, where no other row sees them, and
        are dropped here, so nothing can accept them.
        """
        assert self._cache is not None
        rows = len(tree) + 1
        width = self._width(rows)
        padding = width - rows
        mask = None if tree.is_chain else tree_mask(tree, width).to(self.model.device)
        out = self.model.forward(
            self._ids([anchor, *tree.tokens, *[anchor] * padding]),
            self._ids([*positions(tree, start), *[start] * padding]),
            self._cache,
            tree_mask=mask,
            logits="all",
            taps=self.drafter.taps if self.drafter else (),
            clock=clock,
        )
        assert out.logits is not None
        return out.logits[:rows], None if out.taps is None else out.taps[:rows]

    def _most_rows(self) -> int:
        plan = self.plan
        return (plan.tree_rows or plan.draft_tokens + 1) if self.drafter else 1

    def _width(self, rows: int) -> int:
        """`rows` padded to the plan's next verify width."""
        if self.plan.verify_widths == "exact":
            return rows
        step = int(self.plan.verify_widths)
        return -(-rows // step) * step

    def _cache_for(self, tokens: int) -> KVCache:
        if self._cache is None or self._cache.capacity < tokens:
            self._cache = None  # freed before the larger one is made
            self._cache = self.model.new_cache(tokens)
        self._cache.truncate(0)
        return self._cache

    def _ids(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self.model.device)

    def _refuse_bad_request(self, prompt: list[int], max_new_tokens: int) -> None:
        config = self.model.config
        if not prompt:
            raise UserError("The prompt is empty; at least one token is needed.", code="empty-prompt", field="prompts")
        if max_new_tokens < 1:
            raise UserError("max_new_tokens must be at least 1.", code="invalid-regime", field="regime")
        if not 0 <= min(prompt) <= max(prompt) < config.vocab_size:
            raise UserError(
                f"The prompt has a token id outside the vocabulary of {config.vocab_size}: it was encoded with the "
                "tokenizer of another model.",
                code="vocabulary",
                field="prompts",
            )
        if len(prompt) + max_new_tokens > config.max_positions:
            raise UserError(
                f"{len(prompt)} prompt tokens and {max_new_tokens} new ones do not fit the model's context of "
                f"{config.max_positions}; shorten one of them.",
                code="context",
                field="regime",
            )


def build_decoder(deployment: Deployment, plan: Plan) -> Decoder:
    """Check the deployment, load its weights and set the plan's CPU threads: a decoder ready to generate. It takes one
    request at a time, also where the regime has a batch.

    Raises UserError for everything that `check_deployment` refuses.
    """
    from engine.check import check_deployment
    from engine.drafters.build import build_drafter
    from engine.weights import open_checkpoint

    deployment = dataclasses.replace(deployment, regime=dataclasses.replace(deployment.regime, batch=1))
    check_deployment(deployment, plan)
    torch.set_num_threads(plan.threads or _DEFAULT_THREADS)
    model = Model(
        open_checkpoint(deployment.target),
        device=torch.device(deployment.platform),
        dtype=TORCH_DTYPES[deployment.dtype],
        plan=plan,
    )
    regime = deployment.regime
    spare = max(plan.tree_rows, plan.draft_tokens + 1) + 8  # rows in flight and their padding
    return Decoder(
        model,
        build_drafter(deployment, plan, model),
        plan,
        capacity=regime.max_prompt_tokens + regime.max_new_tokens + spare,
    )


def _pick(taps: Tensor, rows: list[int]) -> Tensor:
    """Rows of `taps` [R, n * H], copied: the model may use its buffer again."""
    return taps[torch.tensor(rows, device=taps.device)]


def _listed(tokens: Tensor) -> list[int]:
    ids: list[int] = tokens.tolist()
    return ids


def _ignore(ids: list[int]) -> None:
    pass
