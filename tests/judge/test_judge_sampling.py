"""Sampled and batched questions: real stock and engine children on a tiny random checkpoint, against plain loops."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from judge_world import toy

from engine.deployment import Deployment, Regime
from engine.judge import protocol, stock
from engine.judge.hidden import Material
from engine.judge.process import ChildFailed
from engine.judge.protocol import Invalid, Scores, parse_scores, parse_texts
from engine.judge.seats import CANDIDATE, Seat, Seats, Timeouts
from engine.noise import gumbel
from engine.plan import Plan
from engine.sampling import Sampling
from tests.drafters.checkpoints import SHAPE, save_dflash, save_target

WORDS = SHAPE["vocab_size"]
LIMIT = 30
NEAR_TIE = 1e-3
"""Logits: what one row and many rows, or a padded batch, may differ by in fp32. A tiny model's are of size 10."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sampling")
    save_target(root / "target", kind="llama", words=WORDS)
    save_target(root / "draft", kind="llama", seed=5, words=WORDS, num_hidden_layers=2)
    save_dflash(root / "dflash")
    return root


def deployment(folder: Path, drafter: str = "ngram", temperature: float = 0.7) -> Deployment:
    regime = Regime(max_prompt_tokens=20, max_new_tokens=LIMIT, temperature=temperature)
    return Deployment(
        target=str(folder / "target"), drafter="ngram" if drafter == "ngram" else str(folder / drafter), regime=regime
    )


@pytest.fixture(scope="module")
def seats(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seats]:
    material = Material(prompts=(), stop_ids=(3,), vocab_size=WORDS, decode=str, read_bytes=0)
    opened = Seats(deployment(folder), material, 1, tmp_path_factory.mktemp("seats"), 4, Timeouts())
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def plain(seats: Seats) -> Seat:
    return seats.start("stock", "stock", "transformers", None)


@pytest.fixture(scope="module")
def engines(seats: Seats) -> list[Seat]:
    speculative = Plan(source="ngram", ngram_min=1, ngram_candidates=3, draft_tokens=4, tree_rows=8, threads=1)
    plans = [Plan(source="none", threads=1), speculative]
    return [seats.start(f"engine {number}", CANDIDATE, "engine", plan) for number, plan in enumerate(plans)]


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(folder / "target", dtype=torch.float32).eval()


def random_prompts(count: int) -> list[list[int]]:
    lengths = random.sample(range(1, 20), count)
    return [[random.randrange(WORDS) for _ in range(length)] for length in lengths]


def random_sampling(count: int) -> Sampling:
    """Close together, so that the requests' noise overlaps if anything is counted wrongly."""
    first = random.getrandbits(20)
    return Sampling(random.uniform(0.4, 1.5), random.getrandbits(64), tuple(range(first, first + count)))


def perturbed(model: Any, text: Sequence[int], sampling: Sampling) -> np.ndarray:
    """What the token behind `text` is the argmax of, by a whole pass without a cache."""
    with torch.inference_mode():
        logits = model(torch.tensor([list(text)])).logits[0, -1].double().numpy()
    return logits + sampling.temperature * gumbel(sampling.seed, sampling.requests, [len(text)], WORDS)[0]


def assert_own_choice(model: Any, prompt: Sequence[int], ids: Sequence[int], sampling: Sampling | None) -> None:
    """Every token is the choice on its own prefix, up to a near-tie, and the text ends where it must."""
    for i, token in enumerate(ids):
        text = [*prompt, *ids[:i]]
        if sampling is None:
            with torch.inference_mode():
                row = model(torch.tensor([text])).logits[0, -1].numpy()
        else:
            row = perturbed(model, text, sampling)
        assert row.max() - row[token] <= NEAR_TIE, (i, token, int(row.argmax()))
    assert len(ids) == LIMIT or ids[-1] == 3
    assert 3 not in ids[:-1]


def gaps(scores: Scores) -> list[float]:
    return [best - own for best, own in zip(scores.choice_logit, scores.token_logit, strict=True)]


def test_stocks_sampled_text_is_its_own_choice(plain: Seat, reference: Any) -> None:
    texts = set()
    for prompt in random_prompts(4):
        sampling = random_sampling(1)
        reply = plain.generate(prompt, LIMIT, sampling)
        assert_own_choice(reference, prompt, reply.text.ids, sampling)
        for width in (0, 1, 5):
            scores = plain.score(prompt, reply.text.ids, width, sampling)
            assert max(gaps(scores)) <= NEAR_TIE
            exact = sum(a == b for a, b in zip(scores.choice, reply.text.ids, strict=True))
            assert exact >= len(reply.text.ids) - 1
        texts |= {reply.text.ids, plain.generate(prompt, LIMIT).text.ids}
        greedy = plain.score(prompt, reply.text.ids)
        assert len(reply.text.ids) < 12 or max(gaps(greedy)) > NEAR_TIE  # a greedy judge would call it lossy
        assert reply.text.steps == reply.text.emitted == len(reply.text.ids) - 1
    assert len(texts) > 4  # noise that changes nothing proves nothing


def test_scores_are_the_perturbed_logits(plain: Seat, folder: Path, reference: Any) -> None:
    backend = stock.build_autoregressive(deployment(folder), None, 1)
    prompt, sampling = random_prompts(1)[0], random_sampling(1)
    text = [random.randrange(WORDS) for _ in range(stock.SCORED_ROWS + 6)]  # more than one part
    found = parse_scores(backend.score(prompt, text, 0, sampling), len(text), WORDS)
    for i in range(len(text) + 1):
        row = perturbed(reference, [*prompt, *text[:i]], sampling)
        order = np.argsort(-row)
        if i == len(text):
            assert row.max() - row[found.following] <= NEAR_TIE
            break
        assert [found.choice_logit[i], found.second_logit[i], found.token_logit[i]] == pytest.approx(
            [row[order[0]], row[order[1]], row[text[i]]], abs=NEAR_TIE
        )
        assert row[order[0]] - row[found.choice[i]] <= NEAR_TIE


def test_our_engine_writes_stocks_sampled_text(plain: Seat, engines: list[Seat]) -> None:
    for prompt in random_prompts(5):
        sampling = random_sampling(1)
        wanted = plain.generate(prompt, LIMIT, sampling).text
        for engine in engines:
            found = engine.generate(prompt, LIMIT, sampling).text
            assert max(gaps(plain.score(prompt, found.ids, 0, sampling))) <= NEAR_TIE
            if (found.ids, found.stop_reason) != (wanted.ids, wanted.stop_reason):
                at = next(i for i, pair in enumerate(zip(found.ids, wanted.ids, strict=False)) if len(set(pair)) > 1)
                scores = plain.score(prompt, [*wanted.ids[:at], found.ids[at]], 0, sampling)
                assert gaps(scores)[at] > 0  # they part at a near-tie, and nowhere else
        assert "one after another" in engines[0].ready()["batch"]


@pytest.mark.parametrize("sampled", [False, True])
def test_a_batch_of_unequal_prompts_is_one_by_one(
    plain: Seat, engines: list[Seat], reference: Any, sampled: bool
) -> None:
    prompts = random_prompts(5)
    sampling = random_sampling(5) if sampled else None
    for seat in (plain, *engines):
        batch = seat.generate_batch(prompts, LIMIT, sampling)
        assert len(batch.texts) == 5
        assert batch.seconds > 0
        assert batch.tok_s == pytest.approx(sum(len(text.ids) for text in batch.texts) / batch.seconds)
        for number, (prompt, text) in enumerate(zip(prompts, batch.texts, strict=True)):
            assert_own_choice(reference, prompt, text.ids, sampling.one(number) if sampling else None)
            assert text.stop_reason == ("eos" if text.ids[-1] == 3 else "length")


def test_rows_of_a_batch_end_by_themselves(folder: Path) -> None:
    """Stop ids that certainly come, at different steps; what a batch fills up behind them is no text."""
    backend = stock.build_autoregressive(deployment(folder), None, 1)
    prompts = random_prompts(4)
    free = [text["ids"] for text in backend.generate(prompts, LIMIT, ())]
    assert all(len(ids) == LIMIT for ids in free)
    stop_ids = (free[0][4], free[1][11])
    ended = backend.generate(prompts, LIMIT, stop_ids)
    for ids, text in zip(free, ended, strict=True):
        end = next((i for i, token in enumerate(ids) if token in stop_ids), LIMIT - 1)
        assert text["ids"] == ids[: end + 1]
    assert {text["stop_reason"] for text in ended} >= {"eos"}


def test_request_numbers_not_places_in_the_batch_key_the_noise(plain: Seat) -> None:
    prompt = random_prompts(1)[0]
    sampling = Sampling(1.0, random.getrandbits(64), (7, 8, 7))
    first, second, third = (text.ids for text in plain.generate_batch([prompt] * 3, LIMIT, sampling).texts)
    assert first == third
    assert first != second
    assert plain.generate(prompt, LIMIT, sampling.one(1)).text.ids[:3] == second[:3]


@pytest.mark.parametrize(
    ("build", "drafter"),
    [(stock.build_lookup, "ngram"), (stock.build_assisted, "draft"), (stock.build_dflash, "dflash")],
)
def test_released_implementations_sample_by_themselves(folder: Path, build: Any, drafter: str) -> None:
    backend = build(deployment(folder, drafter), None, 1)
    described = backend.describe()
    assert "own sampling at temperature 0.7, timed only" in described["implementation"]
    assert "its text is not compared" in described["sampling"]
    assert "one after another" in described["batch"]
    assert "sampling" not in build(deployment(folder, drafter, 0.0), None, 1).describe()["implementation"]
    prompts, sampling = random_prompts(2), random_sampling(2)

    def texts(sampling: Sampling | None) -> list[protocol.Text]:
        return parse_texts({"texts": backend.generate(prompts, LIMIT, (3,), sampling)}, 2, LIMIT, WORDS)

    again, other = texts(sampling), dataclasses.replace(sampling, seed=sampling.seed ^ 1)
    assert texts(sampling) == again
    assert texts(other) != again
    assert texts(None) != again


def test_a_backend_that_only_decodes_greedily_says_so(seats: Seats) -> None:
    seat = seats.start("toy", CANDIDATE, toy("stock"), Plan())
    assert seat.generate([1, 2], 4).text.ids
    with pytest.raises(ChildFailed, match="Toy does not sample") as failure:
        seat.generate([1, 2], 4, Sampling(0.7, 1, (1,)))
    assert failure.value.kind == "crashed"
    scorer = seats.start("toy", CANDIDATE, toy("stock"), Plan())
    with pytest.raises(ChildFailed, match="does not sample"):
        scorer.score([1, 2], [3], 0, Sampling(0.7, 1, (1,)))


def test_a_batch_with_a_text_too_few_is_invalid(seats: Seats) -> None:
    seat = seats.start("few", CANDIDATE, toy("too_few_texts"), Plan())
    with pytest.raises(ChildFailed, match="gave 0 texts for 2 prompts") as failure:
        seat.generate_batch([[1], [2]], 4)
    assert failure.value.kind == "invalid"


@pytest.mark.parametrize(
    "texts",
    [
        [{"ids": [1], "stop_reason": "length"}],
        [{"ids": [1], "stop_reason": "length"}] * 3,
        [{"ids": [1], "stop_reason": "length"}, {"ids": [10], "stop_reason": "length"}],
        [{"ids": [1], "stop_reason": "length"}, {"ids": [-1], "stop_reason": "length"}],
        [{"ids": [1], "stop_reason": "length"}, {"ids": [], "stop_reason": "length"}],
        [{"ids": [1], "stop_reason": "length"}, {"ids": [1, 2, 3, 4, 5], "stop_reason": "length"}],
        [{"ids": [1], "stop_reason": "length"}, None],
        {"0": {"ids": [1]}, "1": {"ids": [1]}},
        None,
    ],
)
def test_malformed_batches_are_refused(texts: object) -> None:
    with pytest.raises(Invalid):
        parse_texts({"texts": texts}, 2, 4, 10)


def test_questions_on_the_wire() -> None:
    assert protocol.generate_question([[1, 2]], 8, [0]) == {
        "do": "generate",
        "prompts": [[1, 2]],
        "max_new_tokens": 8,
        "stop_ids": [0],
    }
    assert protocol.score_question([1], [2], 4) == {"do": "score", "prompt": [1], "text": [2], "width": 4}
    sampling = Sampling(0.7, 2**64 - 1, (5, 6))
    asked = protocol.generate_question([[1, 2], [3]], 8, [0], sampling)
    assert asked["sampling"] == {"temperature": 0.7, "seed": 2**64 - 1, "requests": [5, 6]}
    assert protocol.sampling_of(asked) == sampling
    assert protocol.score_question([1], [2], 0, sampling.one(1))["sampling"]["requests"] == [6]
    with pytest.raises(ValueError, match="2 request numbers for 1 prompts"):
        protocol.generate_question([[1]], 8, [0], sampling)
    with pytest.raises(Exception, match="temperature"):
        protocol.sampling_of({"sampling": {"temperature": 0.0, "seed": 1, "requests": [1]}})
