"""The profile of real tiny decoders, its clock, and both oracles against brute force."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.drafters.contract import ANCHOR, DraftShape, DraftTree
from engine.drafters.hybrid import HybridDrafter
from engine.drafters.ngram import NgramDrafter
from engine.generate import Decoder, StopRule
from engine.model import Model
from engine.plan import Plan
from engine.profile import (
    CudaClock,
    ReplayDrafter,
    acceptance_by_position,
    accepted_by_rows,
    measure,
    replay_ms_per_token,
    tree_oracle,
)
from engine.sampling import Sampling
from engine.stages import STAGE_NAMES, WallClock
from engine.tree import best_first, chain
from engine.weights import open_checkpoint

VOCABULARY = 47
LAYERS = 3
HIDDEN = 24
NEVER = StopRule()


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Matrices this small are slower on several threads, and much slower where cores are shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama, weights wide enough that its text does not settle on one token."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=3,
        num_key_value_heads=1,
        intermediate_size=40,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.4,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def model(checkpoint: Path, plan: Plan) -> Model:
    return Model(open_checkpoint(str(checkpoint)), device="cpu", dtype=torch.float32, plan=plan)


class Marginals:
    """A synthetic block drafter: random marginals that depend on the anchor and its place, in which the true
    continuation has a random rank. It checks that it is told the text, with one row of taps for each token."""

    name = "marginals"
    taps: tuple[int, ...] = (0, 2)
    max_depth = 5
    top = 6

    def __init__(self, truth: Sequence[tuple[list[int], list[int]]] = ()) -> None:
        self.truth = [[*prompt, *ids] for prompt, ids in truth]
        self.text: list[int] = []

    def begin(self) -> None:
        self.text = []

    def observe(self, ids: list[int], taps: Tensor | None) -> None:
        assert taps is not None
        assert taps.shape == (len(ids), len(self.taps) * HIDDEN)
        self.text += ids

    def marginals(self, anchor: int) -> tuple[list[list[float]], list[list[int]]]:
        here = [*self.text, anchor]
        rng = random.Random(str(here))
        following = next((text[len(here) :] for text in self.truth if text[: len(here)] == here), [])
        logprobs, tokens = [], []
        for depth in range(self.max_depth):
            weights = sorted((rng.expovariate(1) ** 2 + 1e-3 for _ in range(self.top)), reverse=True)
            logprobs.append([math.log(weight / sum(weights) * 0.97) for weight in weights])
            row = rng.sample(range(VOCABULARY), self.top)
            if depth < len(following) and following[depth] not in row:
                row[min(int(rng.expovariate(0.8)), self.top - 1)] = following[depth]
            tokens.append(row)
        return logprobs, tokens

    def propose(self, anchor: int, shape: DraftShape) -> DraftTree:
        logprobs, tokens = self.marginals(anchor)
        if shape.tree:
            return best_first(logprobs, tokens, shape)
        depth = min(shape.depth, self.max_depth)
        return chain([row[0] for row in tokens[:depth]])


def best_accepted(logprobs: list[list[float]], tokens: list[list[int]], rows: int, following: list[int]) -> int:
    """Brute force: every path of the product, the rows - 1 most probable, the longest of them that is the text."""
    paths = [
        (sum(logprobs[depth][rank] for depth, rank in enumerate(ranks)), ranks)
        for length in range(1, len(tokens) + 1)
        for ranks in itertools.product(range(len(tokens[0])), repeat=length)
    ]
    kept = sorted(paths, key=lambda path: -path[0])[: rows - 1]
    texts = {tuple(tokens[depth][rank] for depth, rank in enumerate(ranks)) for _, ranks in kept}
    return max((len(text) for text in texts if list(text) == following[: len(text)]), default=0)


def test_tree_oracle_equals_brute_force(checkpoint: Path) -> None:
    target = model(checkpoint, Plan())
    plain = Decoder(target, None, Plan(source="none"))
    prompts = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5]]
    texts = [(prompt, plain.generate(prompt, 17 + index, NEVER).ids) for index, prompt in enumerate(prompts)]
    drafter = Marginals(texts)
    budgets = (2, 3, 5, 12)
    found = dict(tree_oracle(Decoder(target, drafter, Plan()), texts, budgets))

    for rows in budgets:
        emitted = steps = 0
        for prompt, ids in texts:
            at = 0
            while at < len(ids) - 1:
                drafter.text = [*prompt, *ids[:at]]
                logprobs, tokens = drafter.marginals(ids[at])
                remaining = ids[at + 1 :]
                advance = min(best_accepted(logprobs, tokens, rows, remaining) + 1, len(remaining))
                emitted, steps, at = emitted + advance, steps + 1, at + advance
        assert found[rows] == pytest.approx(emitted / steps), rows
    assert found[2] < found[12]  # the drafter is good enough for the test to mean something


def test_tree_oracle_says_what_a_tree_then_emits(checkpoint: Path) -> None:
    """Its figure for n rows is the accept length of a plan with n rows, to the last truncated step."""
    target = model(checkpoint, Plan())
    prompts = [[7, 8, 9], [1, 2, 3, 4]]
    plain = Decoder(target, None, Plan(source="none"))
    texts = [(prompt, plain.generate(prompt, 40, NEVER).ids) for prompt in prompts]
    drafter = Marginals(texts)
    plan = Plan(draft_tokens=drafter.max_depth, tree_rows=8)
    decoder = Decoder(target, drafter, plan)
    made = [decoder.generate(prompt, 40, NEVER) for prompt in prompts]
    assert [generation.ids for generation in made] == [ids for _, ids in texts]
    oracle = dict(tree_oracle(decoder, texts, (8,)))[8]
    steps = sum(len(generation.emitted_per_step) for generation in made)
    tokens = sum(sum(generation.emitted_per_step) for generation in made)
    # near the end the loop drafts less deep, so that it may take one step more for each text
    assert tokens / steps <= oracle <= tokens / (steps - len(prompts))


def test_a_profile_at_a_temperature_is_that_of_sampled_text(checkpoint: Path) -> None:
    """The drafter knows the sampled texts and nothing else: full blocks mean that the profile wrote just these."""
    target = model(checkpoint, Plan())
    prompts = [[2, 4, 6, 8], [11, 12, 13]]
    plain = Decoder(target, None, Plan(source="none"))
    wanted = [
        plain.generate(prompt, 21, NEVER, sampling=Sampling(1.3, 0, (number,))).ids
        for number, prompt in enumerate(prompts)
    ]
    assert wanted != [plain.generate(prompt, 21, NEVER).ids for prompt in prompts]
    decoder = Decoder(target, ReplayDrafter(list(zip(prompts, wanted, strict=True)), 4), Plan(draft_tokens=4))
    assert measure(decoder, prompts, NEVER, 21, temperature=1.3).emitted_per_step == (5,) * 8
    assert max(measure(decoder, prompts, NEVER, 21).emitted_per_step[:4]) < 5


def test_accepted_by_rows_takes_the_most_probable_nodes() -> None:
    """Nodes in an order of their own (by depth, as a draft model lists them): rows count the best ones."""
    tree = DraftTree(
        tokens=(10, 11, 20, 21, 30),
        parents=(ANCHOR, ANCHOR, 0, 0, 2),
        logprobs=(-0.2, -2.5, -0.7, -1.9, -1.0),
    )
    by_rows = {rows: accepted_by_rows(tree, [10, 20, 30, 40], (rows,))[rows] for rows in range(1, 7)}
    assert by_rows == {1: 0, 2: 1, 3: 2, 4: 3, 5: 3, 6: 3}
    assert accepted_by_rows(tree, [11, 20], (4, 5, 6)) == {4: 0, 5: 0, 6: 1}
    assert accepted_by_rows(tree, [10], (6,)) == {6: 1}
    assert accepted_by_rows(DraftTree(), [10], (6,)) == {6: 0}


def test_oracle_is_silent_without_probabilities(checkpoint: Path) -> None:
    target = model(checkpoint, Plan())
    texts = [([1, 2, 1, 2], [1, 2, 1, 2, 1, 2])]
    assert tree_oracle(Decoder(target, None, Plan(source="none")), texts) == ()
    assert tree_oracle(Decoder(target, NgramDrafter(1, 3), Plan(source="ngram")), texts) == ()


@pytest.mark.parametrize("changes", [{}, {"tree_rows": 8}, {"source": "hybrid"}, {"source": "none"}])
def test_measure_tells_a_consistent_story(checkpoint: Path, changes: dict[str, object]) -> None:
    plan = Plan(draft_tokens=4).with_changes(changes)
    target = model(checkpoint, plan)
    plain = Decoder(target, None, Plan(source="none"))
    prompts = [[2, 4, 6, 8], [11, 12, 13], [5]]
    wanted = [plain.generate(prompt, 21, NEVER).ids for prompt in prompts]
    neural = Marginals(list(zip(prompts, wanted, strict=True)))
    drafter = HybridDrafter(NgramDrafter(1, 3), neural) if plan.source == "hybrid" else neural
    decoder = Decoder(target, drafter, plan)
    start = time.perf_counter()
    profile = measure(decoder, prompts, NEVER, 21, oracle_prompts=2)
    wall = time.perf_counter() - start

    assert profile.tokens == 3 * 20  # the first token of each text comes from prefill
    assert set(profile.stage_seconds) <= set(STAGE_NAMES)
    assert all(spent > 0 for spent in profile.stage_seconds.values())
    stages = sum(profile.stage_seconds.values())
    assert 0.5 * profile.decode_s < stages <= profile.decode_s < wall
    assert profile.accept_length == pytest.approx(1 + sum(profile.acceptance_by_position))
    assert list(profile.acceptance_by_position) == sorted(profile.acceptance_by_position, reverse=True)
    assert [rows for rows, _ in profile.verify_ms] == sorted({rows for rows, _ in profile.verify_ms})
    assert {1, 4, 8, 16, 32, 64} <= {rows for rows, _ in profile.verify_ms}
    assert profile.replay_ms_per_token is not None
    lengths = []
    made = iter(profile.emitted_per_step)
    for prompt in prompts:
        cached = len(prompt)
        while cached < len(prompt) + 20:
            lengths.append(cached)
            cached += next(made)
    assert profile.context_tokens == pytest.approx(sum(lengths) / len(lengths))
    if plan.source == "none":
        assert profile.tree_oracle == ()
        assert profile.acceptance_by_position == ()
        assert "draft" not in profile.stage_seconds
    else:
        assert [rows for rows, _ in profile.tree_oracle] == [4, 8, 16, 32, 64]
        assert len(profile.acceptance_by_position) == 4
    if plan.source == "hybrid":
        assert isinstance(drafter, HybridDrafter)
        assert drafter.neural is neural  # put back
        assert 0 < profile.neural_share < 1
    assert decoder.drafter is (None if plan.source == "none" else drafter)


def test_replay_accepts_everything(checkpoint: Path) -> None:
    target = model(checkpoint, Plan())
    plain = Decoder(target, None, Plan(source="none"))
    prompts = [[2, 4, 6], [1, 3, 5, 7]]
    texts = [(prompt, plain.generate(prompt, 25, NEVER).ids) for prompt in prompts]
    decoder = Decoder(target, ReplayDrafter(texts, 5), Plan(draft_tokens=5))
    for prompt, ids in texts:
        made = decoder.generate(prompt, 25, NEVER)
        assert made.ids == ids
        assert made.emitted_per_step == [6, 6, 6, 6]
    elsewhere = decoder.generate([9, 9], 5, NEVER)
    assert elsewhere.emitted_per_step == [1, 1, 1, 1]
    replay = replay_ms_per_token(Decoder(target, None, Plan(source="none", draft_tokens=5)), texts, NEVER, 25)
    assert replay is not None
    assert replay > 0
    assert replay_ms_per_token(decoder, [([1], [2])], NEVER, 1) is None


def test_acceptance_by_position() -> None:
    assert acceptance_by_position([1, 3, 2, 1, 5], 4) == (0.6, 0.4, 0.2, 0.2)
    assert acceptance_by_position([], 4) == ()


class FakeDevice:
    """A device time line whose events are stamped as they are recorded."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0

    def make_event(self) -> FakeEvent:
        self.events += 1
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self.device, self.at, self.waited = device, math.nan, False

    def record(self) -> None:
        self.at, self.waited = self.device.now, False

    def synchronize(self) -> None:
        self.waited = True

    def elapsed_time(self, end: FakeEvent) -> float:
        return end.at - self.at


def test_cuda_clock_charges_the_innermost_stage_as_the_wall_clock_does(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    clocks = (CudaClock(make_event=device.make_event, limit=7), WallClock())
    monkeypatch.setattr(time, "perf_counter", lambda: device.now / 1e3)
    rng = random.Random(21)

    def run(depth: int) -> None:
        for _ in range(rng.randint(1, 3)):
            device.now += rng.uniform(0.1, 5)
            name = rng.choice(STAGE_NAMES)
            with clocks[0].stage(name), clocks[1].stage(name):
                device.now += rng.uniform(0.1, 5)
                if depth:
                    run(depth - 1)
                device.now += rng.uniform(0.1, 5)

    for _ in range(20):
        run(2)
    clocks[0].finish()
    clocks[0].finish()
    assert clocks[0].seconds == pytest.approx(clocks[1].seconds)
    assert device.events <= 9  # events are used again


def test_cuda_clock_survives_an_error_in_a_stage() -> None:
    device = FakeDevice()
    clock = CudaClock(make_event=device.make_event)

    def fail() -> None:
        with clock.stage("host"):
            device.now += 3
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fail()
    device.now += 100
    with clock.stage("draft"):
        device.now += 2
    clock.finish()
    assert clock.seconds == pytest.approx({"host": 0.003, "draft": 0.002})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_measure_on_cuda(checkpoint: Path) -> None:
    plan = dataclasses.replace(Plan(), draft_tokens=4, tree_rows=8)
    target = Model(open_checkpoint(str(checkpoint)), device="cuda:0", dtype=torch.float32, plan=plan)
    profile = measure(Decoder(target, Marginals(), plan), [[1, 2, 3]], NEVER, 12)
    assert profile.tokens == 11
    assert set(profile.stage_seconds) == set(STAGE_NAMES)
