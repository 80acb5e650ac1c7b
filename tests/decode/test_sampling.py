"""Sampled text: drawn from softmax(logits / temperature), and independent of drafter, plan and tree."""

from __future__ import annotations

import dataclasses
import math
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import engine.sample
from engine.deployment import NO_DRAFTER, Deployment, Regime
from engine.generate import Decoder, StopRule, build_decoder
from engine.noise import gumbel, gumbel_on, words, words_on
from engine.plan import Plan
from engine.sample import Sampler
from engine.sampling import MAX_TEMPERATURE, Sampling
from tests.decode.toy import VOCABULARY, TestDrafter, ToyModel, random_tree, whole_text
from tests.drafters.checkpoints import SHAPE, save_dflash, save_target

CPU = torch.device("cpu")
WORDS = SHAPE["vocab_size"]
ALPHA = 1e-6
"""Chance that an honest sampler fails a distribution test."""


def sampler(sampling: Sampling, size: int, dtype: torch.dtype = torch.float32) -> Sampler:
    return Sampler(sampling, size, CPU, dtype)


def chi_square_limit(freedom: int) -> float:
    """The value that a chi-square variable exceeds with chance ALPHA (Wilson and Hilferty; 4.753 is the normal
    quantile)."""
    part = 2 / (9 * freedom)
    return freedom * (1 - part + 4.753 * math.sqrt(part)) ** 3


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 2.0])
@pytest.mark.parametrize("across", ["positions", "requests", "seeds"])
def test_choices_are_drawn_from_softmax(temperature: float, across: str) -> None:
    """Fresh random logits, wider apart where the temperature is high, so that many ids are drawn; chi-square of counts,
    ids with fewer than 8 expected draws taken together."""
    size, draws = 30, 4000
    rng = np.random.default_rng()
    logits = torch.from_numpy(temperature * rng.normal(0, 1.2, size)).float()
    seed, request, start = random.getrandbits(63), random.getrandbits(20), random.randrange(512)
    if across == "positions":
        one = sampler(Sampling(temperature, seed, (request,)), size)
        chosen = one.choose(logits.expand(draws, size), range(start, start + draws)).tolist()
    elif across == "requests":
        each = sampler(Sampling(temperature, seed, tuple(range(request, request + draws))), size)
        rows = each.perturbed(logits.expand(draws, size), range(draws), [start] * draws)
        chosen = rows.argmax(-1).tolist()
    else:
        chosen = [
            int(sampler(Sampling(temperature, seed + i, (request,)), size).choose(logits[None], [start]))
            for i in range(draws)
        ]
    expected = draws * torch.softmax(logits.double() / temperature, 0).numpy()
    counts = np.bincount(chosen, minlength=size)
    rare = expected < 8
    cells = [*zip(counts[~rare], expected[~rare], strict=True)]
    if expected[rare].sum() >= 8:
        cells.append((counts[rare].sum(), expected[rare].sum()))
    statistic = sum((count - wanted) ** 2 / wanted for count, wanted in cells)
    assert statistic < chi_square_limit(len(cells) - 1), (statistic, len(cells))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_choice_is_the_contracts_arithmetic(dtype: torch.dtype) -> None:
    size, positions = 500, [90, 91, 92, 92, 91]
    sampling = Sampling(0.8, random.getrandbits(64), (random.getrandbits(32),))
    logits = 3 * torch.randn(len(positions), size)
    rounded = logits.to(dtype).double().numpy()
    wanted = rounded + 0.8 * gumbel(sampling.seed, sampling.requests * len(positions), positions, size)
    one = sampler(sampling, size, dtype)
    assert one.choose(logits, positions).tolist() == wanted.argmax(-1).tolist()
    assert np.array_equal(one.perturbed(logits, [0] * 5, positions).numpy(), wanted)
    # Later positions, then an earlier one again: noise that was dropped is the same when it comes back.
    later = one.choose(logits, [200, 201, 202, 203, 204]).tolist()
    assert later == sampler(sampling, size, dtype).choose(logits, range(200, 205)).tolist()
    assert one.choose(logits, positions).tolist() == wanted.argmax(-1).tolist()


def test_equal_sums_go_to_the_lowest_id(monkeypatch: pytest.MonkeyPatch) -> None:
    one = sampler(Sampling(1.0, 0, (0,)), 4)
    monkeypatch.setattr(one, "noise", lambda prompts, positions: [torch.tensor([0.5, 1.5, 0.5, 0.0]).double()] * 2)
    assert one.choose(torch.tensor([[1.0, 0.0, 1.0, 1.0], [0.0, 0.0, 2.0, 1.0]]), [1, 2]).tolist() == [0, 2]


def test_noise_is_kept_for_what_comes_only() -> None:
    one = sampler(Sampling(1.0, 1, (5,)), 8)
    for at in range(40):
        one.choose(torch.zeros(3, 8), [at, at + 1, at + 1])
    assert set(one._noise) == {(0, 39), (0, 40)}


def test_another_device_computes_ahead_and_chooses_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of a GPU, its kernels played by the CPU's: two requests, each with its own pace."""
    calls: list[int] = []

    def on_device(device: object, seed: int, requests: list[int], positions: list[int], size: int) -> torch.Tensor:
        calls.append(len(positions))
        return gumbel_on(CPU, seed, requests, positions, size)

    monkeypatch.setattr(engine.sample, "gumbel_on", on_device)
    sampling = Sampling(0.9, random.getrandbits(64), (3, 4))
    here, there = sampler(sampling, 70), sampler(sampling, 70)
    there._device = SimpleNamespace(type="elsewhere")  # type: ignore[assignment]
    for step in range(60):
        for prompt, at in ((0, 10 + 2 * step), (1, 500 + step)):
            positions = [at, at + 1, at + 2, at + 1]
            logits = torch.randn(4, 70)
            chosen = there.choose(logits, positions, prompt)
            assert chosen.tolist() == here.choose(logits, positions, prompt).tolist()
    assert len(calls) < 15
    assert len(there._noise) < 80


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_has_the_words_and_the_choices_of_a_cpu(dtype: torch.dtype) -> None:
    size, sampling, cuda = (
        49_152,
        Sampling(0.8, random.getrandbits(64), (random.getrandbits(32),)),
        torch.device("cuda"),
    )
    where = ([sampling.requests[0]] * 2, [77, 4000])
    ours = words_on(cuda, sampling.seed, *where, size).cpu().numpy()
    assert np.array_equal(ours, np.stack([words(sampling.seed, *key, size) for key in zip(*where, strict=True)]))
    logits = 3 * torch.randn(16, size)
    positions = [100 + row // 2 for row in range(16)]
    chosen = Sampler(sampling, size, cuda, dtype).choose(logits.cuda(), positions)
    assert chosen.tolist() == sampler(sampling, size, dtype).choose(logits, positions).tolist()


@pytest.mark.parametrize(
    "wrong",
    [
        (0.0, 1, (1,)),
        (-0.5, 1, (1,)),
        (float("nan"), 1, (1,)),
        (MAX_TEMPERATURE + 0.1, 1, (1,)),
        (0.7, -1, (1,)),
        (0.7, 1 << 64, (1,)),
        (0.7, 1, ()),
        (0.7, 1, (1 << 32,)),
        (0.7, 1, (-1,)),
    ],
)
def test_what_no_question_may_ask_for(wrong: tuple[float, int, tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match=r"temperature|seed|request"):
        Sampling(*wrong)


def test_a_decoder_takes_one_request_at_a_time() -> None:
    with pytest.raises(ValueError, match="one request"):
        Decoder(ToyModel(whole_text(1)), None, Plan()).generate([1], 4, StopRule(), sampling=Sampling(0.7, 1, (1, 2)))


class SampledToy(ToyModel):
    """The toy with logits over the whole vocabulary, so that sampling has something to choose from."""

    def forward(self, *arguments, **options):
        out = super().forward(*arguments, **options)
        return dataclasses.replace(out, logits=out.logits * 2.0)


@settings(max_examples=120, deadline=None)
@given(
    depth=st.integers(1, 9),
    rows=st.sampled_from([0, 2, 3, 8, 33]),
    widths=st.sampled_from(["exact", "4", "8"]),
    head=st.sampled_from(["all", "needed"]),
    prompt=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=9),
    limit=st.integers(1, 40),
    temperature=st.sampled_from([0.2, 0.7, 1.5]),
    numbers=st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1)),
    rng=st.randoms(use_true_random=False),
)
def test_any_tree_gives_the_sampled_text(depth, rows, widths, head, prompt, limit, temperature, numbers, rng) -> None:
    """Against sampling written out: the choice at absolute position n sees the noise of n and nothing else."""
    following = whole_text(rng.randrange(1 << 30))
    sampling = Sampling(temperature, numbers[0], (numbers[1],))

    def sampled(text) -> int:
        logits = np.linspace(-1, 0, VOCABULARY, dtype=np.float32)
        logits[following(text)] = 1.0
        noise = gumbel(sampling.seed, sampling.requests, [len(text)], VOCABULARY)[0]
        return int(np.argmax(2.0 * logits.astype(np.float64) + temperature * noise))

    drafter = TestDrafter(lambda text, shape: random_tree(rng, text, shape, sampled, 0.8))
    plan = Plan(draft_tokens=depth, tree_rows=rows, verify_widths=widths, head_rows=head)
    result = Decoder(SampledToy(following), drafter, plan).generate(prompt, limit, StopRule((2,)), sampling=sampling)
    ids: list[int] = []
    while len(ids) < limit and 2 not in ids:
        ids.append(sampled([*prompt, *ids]))
    assert result.ids == ids
    assert result.stop_reason == ("eos" if ids[-1] == 2 else "length")


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sampled")
    save_target(folder / "llama", kind="llama", words=WORDS, tie_word_embeddings=True)
    save_target(folder / "small", kind="llama", seed=5, words=WORDS, num_hidden_layers=2, hidden_size=18)
    save_dflash(folder / "dflash")
    return folder


def served(zoo: Path, drafter: str) -> Deployment:
    ref = {"none": NO_DRAFTER, "same model": str(zoo / "llama")}.get(drafter, str(zoo / drafter))
    regime = Regime(max_prompt_tokens=12, max_new_tokens=40, temperature=0.7)
    return Deployment(target=str(zoo / "llama"), drafter=ref, regime=regime)


SHAPES = {
    "chain": Plan(draft_tokens=5),
    "padded chain": Plan(draft_tokens=2, verify_widths="4", head_rows="needed"),
    "tree": Plan(draft_tokens=4, tree_rows=12, fuse_qkv=True),
    "padded tree": Plan(draft_tokens=5, tree_rows=6, verify_widths="8", fuse_gate_up=True, attention="grouped"),
}
SOURCES = {
    "neural": {"source": "neural"},
    "ngram": {"source": "ngram", "ngram_min": 1},
    "hybrid": {"source": "hybrid", "ngram_min": 1, "hybrid_min_match": 2},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize(
    ("drafter", "source"),
    [
        ("dflash", "neural"),
        ("dflash", "hybrid"),
        ("small", "neural"),
        ("small", "hybrid"),
        ("same model", "neural"),
        ("none", "ngram"),
    ],
)
def test_every_drafter_gives_the_plans_own_sampled_text(zoo: Path, drafter: str, source: str, shape: Plan) -> None:
    plan = shape.with_changes({**SOURCES[source], "threads": 1, "ngram_candidates": 3 if shape.tree_rows else 1})
    deployment = served(zoo, drafter)
    decoder, plain = (build_decoder(deployment, chosen) for chosen in (plan, dataclasses.replace(plan, source="none")))
    rng = random.Random()
    for length, limit, temperature in ((1, 40, 0.7), (7, 23, 0.3), (12, 31, 1.3)):
        prompt = [rng.randrange(WORDS) for _ in range(length)]
        sampling = Sampling(temperature, rng.getrandbits(64), (rng.getrandbits(32),))
        expected = plain.generate(prompt, limit, StopRule(), sampling=sampling)
        assert decoder.generate(prompt, limit, StopRule(), sampling=sampling).ids == expected.ids
        other = dataclasses.replace(sampling, seed=sampling.seed ^ 1)
        if limit > 30 and temperature > 0.5:  # 31 equal draws are no accident
            assert plain.generate(prompt, limit, StopRule(), sampling=other).ids != expected.ids
            assert plain.generate(prompt, limit, StopRule()).ids != expected.ids


def test_the_same_noise_makes_the_same_text_at_any_moment(zoo: Path) -> None:
    """A text that is cut and continued as a prompt goes on as if it had not been cut."""
    decoder = build_decoder(served(zoo, "none"), Plan(source="ngram", ngram_min=1, threads=1))
    sampling = Sampling(0.9, random.getrandbits(64), (4,))
    whole = decoder.generate([5, 1, 7], 30, StopRule(), sampling=sampling).ids
    again = decoder.generate([5, 1, 7, *whole[:11]], 19, StopRule(), sampling=sampling).ids
    assert again == whole[11:]
