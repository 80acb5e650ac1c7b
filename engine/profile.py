"""Measure where a decoder's time goes, and how much better it could draft. Runs in the child, on its own decoder.

Nothing here decides a verdict: the judge's clock does. A profile explains, and picks what to attack next.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.drafters.contract import ANCHOR, EMPTY, Drafter, DraftShape, DraftTree
from engine.drafters.hybrid import HybridDrafter
from engine.generate import Decoder, Generation, StopRule
from engine.levers import MAX_DRAFT_TOKENS
from engine.model import Model
from engine.roofline import StageProfile
from engine.sampling import Sampling
from engine.stages import NULL_CLOCK, PREFILL, StageClock, WallClock
from engine.tree import chain, depths

ORACLE_ROWS: tuple[int, ...] = (4, 8, 16, 32, 64)
"""Tree sizes, in verify rows with the anchor, whose accept length the oracle finds."""

WARMUP_TOKENS = 8
VERIFY_REPEATS = 3
SEED = 0
"""Of sampling. Any will do: a profile explains, and is not forced."""


class MeasuringClock(StageClock, Protocol):
    """A stage clock that knows its sums."""

    seconds: dict[str, float]


class Event(Protocol):
    """A point on the device's own time line, as torch.cuda.Event is one."""

    def record(self) -> None: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end: Any) -> float: ...  # milliseconds


def _cuda_event() -> Event:
    event: Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return event


class CudaClock:
    """Adds up device seconds by stage from events on the current stream, without stopping the device.

    Every change of stage records one event; the time between two events belongs to the innermost stage open in
    between, as with WallClock. So device idle time, in which it waits for the host, falls to the stage in which
    it waited. Events are summed and used again once `limit` of them are outstanding, and by `finish`.
    """

    def __init__(self, *, make_event: Callable[[], Event] = _cuda_event, limit: int = 8192) -> None:
        self.seconds: dict[str, float] = {}
        self._make_event = make_event
        self._limit = limit
        self._free: list[Event] = []
        self._marks: list[tuple[Event, str]] = []  # the stage that the time after the event belongs to
        self._stack: list[str] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self._stack.append(name)
        self._mark()
        try:
            yield
        finally:
            self._stack.pop()
            self._mark()

    def finish(self) -> None:
        """Wait for the last event and bring `seconds` up to date."""
        if not self._marks:
            return
        self._marks[-1][0].synchronize()
        for (event, name), (end, _) in zip(self._marks, self._marks[1:], strict=False):
            if name:
                self.seconds[name] = self.seconds.get(name, 0.0) + event.elapsed_time(end) / 1e3
            self._free.append(event)
        del self._marks[:-1]

    def _mark(self) -> None:
        event = self._free.pop() if self._free else self._make_event()
        event.record()
        self._marks.append((event, self._stack[-1] if self._stack else ""))
        if len(self._marks) > self._limit:
            self.finish()


def clock_for(device: torch.device) -> MeasuringClock:
    """The clock that tells the truth on this device."""
    return CudaClock() if device.type == "cuda" else WallClock()


@dataclass
class Recorder:
    """A drafter that stands before another and keeps what it proposed."""

    inner: Drafter
    trees: list[DraftTree] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.name, self.taps, self.max_depth = self.inner.name, self.inner.taps, self.inner.max_depth

    def begin(self) -> None:
        self.inner.begin()

    def observe(self, ids: list[int], taps: Tensor | None) -> None:
        self.inner.observe(ids, taps)

    def propose(self, anchor: int, shape: DraftShape) -> DraftTree:
        tree = self.inner.propose(anchor, shape)
        self.trees.append(tree)
        return tree


class ReplayDrafter:
    """Proposes the recorded continuation of a prompt: what a drafter that knew the answer would draft.

    `texts` are (prompt, continuation) token ids. A text that is not among them, or has left its recording, gets
    no draft.
    """

    name = "replay"
    taps: tuple[int, ...] = ()

    def __init__(self, texts: Sequence[tuple[Sequence[int], Sequence[int]]], max_depth: int) -> None:
        self.max_depth = max_depth
        self._texts = [[*prompt, *continuation] for prompt, continuation in texts]
        self._committed: list[int] = []

    def begin(self) -> None:
        self._committed = []

    def observe(self, ids: list[int], taps: Tensor | None) -> None:
        self._committed += ids

    def propose(self, anchor: int, shape: DraftShape) -> DraftTree:
        here = [*self._committed, anchor]
        depth = min(shape.depth, shape.rows - 1)
        for text in self._texts:
            if text[: len(here)] == here:
                return chain(text[len(here) : len(here) + depth])
        return EMPTY


def measure(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    stop: StopRule,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    oracle_prompts: int = 4,
    make_clock: Callable[[torch.device], MeasuringClock] = clock_for,
) -> StageProfile:
    """Profile `decoder` on `prompts` (token ids). Leaves the decoder as it was.

    Above `temperature` 0 each prompt is sampled, always with the same noise: a text that is made again is the same.

    Each prompt is generated with the stage clock, and on CUDA once more without it, since there the clock costs
    time; the oracles look at the first `oracle_prompts` texts. Texts that end in their first token count for
    prefill only.
    """
    device = decoder.model.device
    asked = _Asked(prompts, stop, max_new_tokens, temperature)
    _warm_up(decoder, asked)
    clock = make_clock(device)
    watched = _generate_watched(decoder, asked, clock)
    made = watched.made
    unclocked = made if device.type == "cpu" else asked.generate(decoder)
    texts = [(list(prompt), generation.ids) for prompt, generation in zip(prompts, made, strict=True)]
    emitted = [count for generation in made for count in generation.emitted_per_step]
    drafted = [count for generation in made for count in generation.drafted_per_step]
    context = _mean_context(texts, made)
    mean_rows = round(1 + statistics.fmean(drafted)) if drafted else 1
    return StageProfile(
        stage_seconds={name: spent for name, spent in clock.seconds.items() if name != PREFILL},
        decode_s=sum(generation.decode_s for generation in unclocked),
        prefill_s=statistics.fmean(generation.prefill_s for generation in unclocked),
        emitted_per_step=tuple(emitted),
        drafted_per_step=tuple(drafted),
        acceptance_by_position=acceptance_by_position(emitted, watched.depth),
        context_tokens=context,
        neural_share=watched.neural_share,
        tree_oracle=tree_oracle(decoder, texts[:oracle_prompts]),
        verify_ms=verify_ms(decoder, texts[0], round(context), (1, mean_rows, *ORACLE_ROWS)),
        replay_ms_per_token=replay_ms_per_token(
            decoder, texts[:oracle_prompts], stop, max_new_tokens, temperature=temperature
        ),
    )


@dataclass(frozen=True)
class _Asked:
    """What is generated again and again. Prompt i has request number i."""

    prompts: Sequence[Sequence[int]]
    stop: StopRule
    max_new_tokens: int
    temperature: float

    def generate(self, decoder: Decoder, clock: StageClock = NULL_CLOCK) -> list[Generation]:
        return [
            decoder.generate(
                prompt,
                self.max_new_tokens,
                self.stop,
                clock=clock,
                sampling=Sampling(self.temperature, SEED, (number,)) if self.temperature else None,
            )
            for number, prompt in enumerate(self.prompts)
        ]


def _warm_up(decoder: Decoder, asked: _Asked) -> None:
    """A few tokens on a CPU. On CUDA everything once: libraries plan and compile for every new length there."""
    if decoder.model.device.type == "cpu":
        short = min(asked.max_new_tokens, WARMUP_TOKENS)
        asked = dataclasses.replace(asked, prompts=asked.prompts[:1], max_new_tokens=short)
    asked.generate(decoder)


@dataclass(frozen=True)
class _Watched:
    made: list[Generation]
    depth: int  # deepest draft of any step
    neural_share: float


def _generate_watched(decoder: Decoder, asked: _Asked, clock: MeasuringClock) -> _Watched:
    """Generate with the stage clock, and watch the drafter."""

    def generate() -> list[Generation]:
        made = asked.generate(decoder, clock)
        if isinstance(clock, CudaClock):
            clock.finish()
        return made

    drafter = decoder.drafter
    if drafter is None:
        return _Watched(generate(), 0, 0.0)
    outer = Recorder(drafter)
    neural = Recorder(drafter.neural) if isinstance(drafter, HybridDrafter) else outer
    decoder.drafter = outer
    if isinstance(drafter, HybridDrafter):
        drafter.neural = neural  # asked only where no match is found
    try:
        made = generate()
    finally:
        decoder.drafter = drafter
        if isinstance(drafter, HybridDrafter):
            drafter.neural = neural.inner
    deepest = max((max(depths(tree), default=0) for tree in outer.trees), default=0)
    share = len(neural.trees) / len(outer.trees) if outer.trees else 1.0
    return _Watched(made, deepest, share)


def acceptance_by_position(emitted_per_step: Sequence[int], depth: int) -> tuple[float, ...]:
    """Share of all steps whose draft at depth 1, 2, ... `depth` was accepted and emitted; 1 + their sum is the
    accept length."""
    steps = len(emitted_per_step)
    if not steps:
        return ()
    return tuple(sum(count > position for count in emitted_per_step) / steps for position in range(1, depth + 1))


def _mean_context(texts: Sequence[tuple[list[int], list[int]]], made: Sequence[Generation]) -> float:
    """Mean tokens in the KV cache before a step: the prompt and what was emitted, less the anchor."""
    lengths: list[int] = []
    for (prompt, _), generation in zip(texts, made, strict=True):
        length = len(prompt)
        for count in generation.emitted_per_step:
            lengths.append(length)
            length += count
    return statistics.fmean(lengths) if lengths else float(len(texts[0][0]))


def tree_oracle(
    decoder: Decoder, texts: Sequence[tuple[list[int], list[int]]], budgets: Sequence[int] = ORACLE_ROWS
) -> tuple[tuple[int, float], ...]:
    """(rows, tokens per step) that best-first trees over the drafter's own marginals would have emitted.

    The drafter is run again over the finished `texts` (prompt, emitted ids), with the target's taps of that text,
    and drafts the largest tree to its full depth; its most probable rows - 1 nodes are the smaller ones. Each
    size walks the text in its own steps. Empty where there is no drafter, or where it has no probabilities
    (suffix matches).
    """
    drafter = decoder.drafter
    if drafter is None:
        return ()
    shape = DraftShape(min(drafter.max_depth, MAX_DRAFT_TOKENS), max(budgets), tree=True)
    emitted = dict.fromkeys(budgets, 0)
    steps = dict.fromkeys(budgets, 0)
    probabilities = False
    for prompt, ids in texts:
        text, last = [*prompt, *ids], len(ids) - 1  # a step at the last token would emit nothing
        taps = _taps(decoder.model, text, drafter.taps)
        drafter.begin()
        seen = 0
        at = dict.fromkeys(budgets, 0)  # the next anchor of each walk, as an index of `ids`
        while (anchor := min(at.values())) < last:
            here = len(prompt) + anchor
            drafter.observe(text[seen:here], None if taps is None else taps[seen:here])
            seen = here
            tree = drafter.propose(text[here], shape)
            probabilities = probabilities or any(score != 0.0 for score in tree.logprobs)
            accepted = accepted_by_rows(tree, ids[anchor + 1 :], budgets)
            for rows in budgets:
                if at[rows] == anchor:
                    advance = min(accepted[rows] + 1, last - anchor)
                    emitted[rows] += advance
                    steps[rows] += 1
                    at[rows] += advance
    if not probabilities:
        return ()
    return tuple((rows, emitted[rows] / steps[rows]) for rows in budgets)


def _taps(model: Model, text: list[int], layers: tuple[int, ...]) -> Tensor | None:
    if not layers:
        return None
    cache = model.new_cache(len(text))
    device = model.device
    ids, positions = torch.tensor(text, device=device), torch.arange(len(text), device=device)
    return model.forward(ids, positions, cache, logits="none", taps=layers).taps


def accepted_by_rows(tree: DraftTree, following: Sequence[int], budgets: Sequence[int]) -> dict[int, int]:
    """Drafts that would be accepted with `following` as the target's text, for the best rows - 1 nodes of `tree`.

    The best are the most probable; a parent is never less probable than its children, and comes first among
    equals, so the best nodes form a tree themselves.
    """
    order = sorted(range(len(tree)), key=lambda node: -tree.logprobs[node])
    rank = {node: place for place, node in enumerate(order)}
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parents):
        children.setdefault(parent, []).append(node)
    path: list[int] = []  # ranks of the nodes that the text follows
    parent = ANCHOR
    for token in following:
        step = next((node for node in children.get(parent, ()) if tree.tokens[node] == token), None)
        if step is None:
            break
        path.append(rank[step])
        parent = step
    return {rows: sum(place < rows - 1 for place in path) for rows in budgets}


def verify_ms(
    decoder: Decoder, text: tuple[list[int], list[int]], context: int, widths: Sequence[int]
) -> tuple[tuple[int, float], ...]:
    """(rows, ms) of one verify pass behind `context` tokens, by ascending rows: the median of a few passes."""
    model = decoder.model
    taps = decoder.drafter.taps if decoder.drafter else ()
    source = [*text[0], *text[1]]
    repeated = source * math.ceil((context + max(widths)) / len(source))
    start = min(context, model.config.max_positions - max(widths))
    cache = model.new_cache(start + max(widths))
    device = model.device
    if start:
        model.forward(
            torch.tensor(repeated[:start], device=device), torch.arange(start, device=device), cache, logits="none"
        )
        cache.commit(start)
    found: list[tuple[int, float]] = []
    for rows in sorted(set(widths)):
        ids = torch.tensor(repeated[start : start + rows], device=device)
        positions = torch.arange(start, start + rows, device=device)
        times: list[float] = []
        for _ in range(VERIFY_REPEATS + 1):
            _synchronise(device)
            begin = time.perf_counter()
            model.forward(ids, positions, cache, taps=taps, clock=NULL_CLOCK)
            _synchronise(device)
            times.append(1e3 * (time.perf_counter() - begin))
        found.append((rows, statistics.median(times[1:])))  # the first of a width may compile or tune
    return tuple(found)


def replay_ms_per_token(
    decoder: Decoder,
    texts: Sequence[tuple[list[int], list[int]]],
    stop: StopRule,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
) -> float | None:
    """Time per token of the same engine with a drafter that knows the text, at the plan's draft length. None where
    no text has a decode step."""
    plan = decoder.plan
    if plan.source == "none":
        plan = dataclasses.replace(plan, source="neural")
    replay = Decoder(decoder.model, ReplayDrafter(texts, plan.draft_tokens), plan)
    made = _Asked([prompt for prompt, _ in texts], stop, max_new_tokens, temperature).generate(replay)
    tokens = sum(sum(generation.emitted_per_step) for generation in made)
    return 1e3 * sum(generation.decode_s for generation in made) / tokens if tokens else None


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
