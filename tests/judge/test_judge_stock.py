"""The stock backends on tiny random checkpoints, against decoding written out by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from engine.deployment import Deployment
from engine.judge import forcing, stock
from engine.judge.floor import Sample, measure_floor
from engine.judge.forcing import Scored
from engine.judge.protocol import Text, parse_scores, parse_texts

SHAPE: dict[str, Any] = {
    "vocab_size": 83,
    "hidden_size": 40,
    "intermediate_size": 72,
    "num_hidden_layers": 4,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LIMIT = 40


def randomise(model: Any, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 1 + 0.2 * noise if parameter.ndim == 1 else 0.3 * noise
    return model.float().eval()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target whose generation settings ask for sampling and a penalty, a draft model, a DFlash drafter."""
    from dflash.model import DFlashDraftModel

    root = tmp_path_factory.mktemp("stock")
    target = randomise(Qwen3ForCausalLM(Qwen3Config(**SHAPE)), 1)
    target.generation_config = GenerationConfig(do_sample=True, temperature=1.5, repetition_penalty=1.3)
    target.save_pretrained(root / "target")
    randomise(Qwen3ForCausalLM(Qwen3Config(**{**SHAPE, "num_hidden_layers": 2})), 3).save_pretrained(root / "draft")
    block = {
        "num_target_layers": 4,
        "block_size": 5,
        "dflash_config": {"mask_token_id": 7, "target_layer_ids": [0, 2]},
    }
    drafter = DFlashDraftModel(Qwen3Config(**{**SHAPE, **block, "num_hidden_layers": 2}))
    randomise(drafter, 2).save_pretrained(root / "dflash")
    return {name: root / name for name in ("target", "draft", "dflash")}


def deployment(folders: dict[str, Path], drafter: str = "ngram") -> Deployment:
    return Deployment(target=str(folders["target"]), drafter=str(folders.get(drafter, drafter)))


@pytest.fixture(scope="module")
def plain(folders: dict[str, Path]) -> Any:
    return stock.build_autoregressive(deployment(folders), None, 1)


@pytest.fixture(scope="module")
def reference(folders: dict[str, Path]) -> Any:
    return Qwen3ForCausalLM.from_pretrained(folders["target"], dtype=torch.float32).eval()


@torch.inference_mode()
def by_hand(model: Any, prompt: Sequence[int], limit: int, stop_ids: Sequence[int]) -> list[int]:
    """Greedy decoding without a cache."""
    ids: list[int] = []
    while len(ids) < limit and not (ids and ids[-1] in stop_ids):
        ids.append(int(model(torch.tensor([[*prompt, *ids]])).logits[0, -1].argmax()))
    return ids


def random_prompts(count: int) -> list[list[int]]:
    return [[random.randrange(SHAPE["vocab_size"]) for _ in range(random.randint(3, 20))] for _ in range(count)]


def texts(backend: Any, prompts: list[list[int]], stop_ids: tuple[int, ...]) -> list[Text]:
    payload = {"texts": backend.generate(prompts, LIMIT, stop_ids)}
    return parse_texts(payload, len(prompts), LIMIT, SHAPE["vocab_size"])


def test_generate_is_plain_greedy_whatever_the_checkpoint_asks_for(plain: Any, reference: Any) -> None:
    prompts = random_prompts(3)
    for prompt, text in zip(prompts, texts(plain, prompts, ()), strict=True):
        assert list(text.ids) == by_hand(reference, prompt, LIMIT, ())
        assert text.stop_reason == "length"
        assert text.steps == text.emitted == LIMIT - 1  # prefill gave the first token


def test_generate_ends_with_the_stop_id(plain: Any, reference: Any) -> None:
    prompt = random_prompts(1)[0]
    stop = (by_hand(reference, prompt, 9, ())[8],)  # an id that certainly comes
    (text,) = texts(plain, [prompt], stop)
    assert list(text.ids) == by_hand(reference, prompt, LIMIT, stop)
    assert text.ids[-1] in stop
    assert text.stop_reason == "eos"
    assert "sdpa attention" in plain.describe()["implementation"]


@pytest.mark.parametrize("width", [0, 1, 3, 8])
def test_scores_at_any_width_are_those_of_separate_passes(plain: Any, reference: Any, width: int) -> None:
    prompt = random_prompts(1)[0]
    text = [random.randrange(SHAPE["vocab_size"]) for _ in range(17)]
    found = parse_scores(plain.score(prompt, text, width), len(text), SHAPE["vocab_size"])
    with torch.inference_mode():
        for i in range(len(text) + 1):
            logits = reference(torch.tensor([[*prompt, *text[:i]]])).logits[0, -1]
            order = logits.argsort(descending=True)
            if i == len(text):
                assert found.following == int(order[0])
                break
            assert (found.choice[i], found.second[i]) == (int(order[0]), int(order[1]))
            wanted = [float(logits[order[0]]), float(logits[order[1]]), float(logits[text[i]])]
            assert [found.choice_logit[i], found.second_logit[i], found.token_logit[i]] == pytest.approx(
                wanted, abs=1e-3
            )


def test_the_demo_targets_gguf_is_transformers_own_model(demo_target: Path) -> None:
    """Our quick reading of a GGUF file against transformers' own: the same parameters bit for bit, equal logits."""
    from transformers import AutoModelForCausalLM

    quick = stock.from_gguf(demo_target, torch.float32).eval()
    slow = AutoModelForCausalLM.from_pretrained(
        str(demo_target.parent), gguf_file=demo_target.name, dtype=torch.float32
    ).eval()
    ours, theirs = quick.state_dict(), slow.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert type(quick) is type(slow)
    assert quick.config._attn_implementation == slow.config._attn_implementation
    ids = torch.randint(0, quick.config.vocab_size, (1, 37))
    with torch.inference_mode():
        # Equal weights; the last bits of a product may depend on how a buffer happens to lie in memory.
        assert torch.allclose(quick(ids).logits, slow(ids).logits, rtol=0, atol=1e-3)


def test_lowest_id_wins_among_equal_logits() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [4.0, 0.0, 4.0, 4.0], [0.5, 0.25, 0.5, 0.125]])
    columns = stock.score_columns(logits, [2, 3])
    assert (columns["choice"], columns["second"], columns["following"]) == ([1, 0], [2, 2], 0)
    assert columns["token_logit"] == [3.0, 4.0]


@pytest.mark.parametrize(
    ("build", "drafter", "name"),
    [
        (stock.build_lookup, "ngram", "prompt lookup"),
        (stock.build_assisted, "draft", "assisted generation"),
        (stock.build_dflash, "dflash", "dflash 0.1.0 spec_generate"),
    ],
)
def test_released_speculative_implementations_write_stocks_text(
    folders: dict[str, Path], reference: Any, build: Any, drafter: str, name: str
) -> None:
    backend = build(deployment(folders, drafter), None, 1)
    assert name in backend.describe()["implementation"]
    prompts = random_prompts(2)
    stop = (by_hand(reference, prompts[0], 12, ())[11],)
    for prompt, text in zip(prompts, texts(backend, prompts, stop), strict=True):
        assert list(text.ids) == by_hand(reference, prompt, LIMIT, stop)
        assert text.steps <= text.emitted
        assert (text.steps == 0) <= (len(text.ids) == 1)  # a text that ends with the prompt's own pass has no step


def test_refusals(plain: Any, folders: dict[str, Path]) -> None:
    with pytest.raises(NotImplementedError, match="no stage profile"):
        plain.profile([[1]], 4, ())
    with pytest.raises(NotImplementedError, match="does not score"):
        stock.build_dflash(deployment(folders, "dflash"), None, 1).score([1], [2], 0)


def test_lower_precision_is_lossy_and_another_width_is_not(
    plain: Any, folders: dict[str, Path], reference: Any
) -> None:
    """The gate on real arithmetic: the same model in bf16 must be caught, the same model in fp32 without a cache must
    not; the floor is the one that stock measures of itself."""
    prompts = random_prompts(14)
    samples = []
    for prompt, text in zip(prompts[:3], texts(plain, prompts[:3], ()), strict=True):
        one = parse_scores(plain.score(prompt, text.ids, 0), LIMIT, SHAPE["vocab_size"])
        at = tuple((w, parse_scores(plain.score(prompt, text.ids, w), LIMIT, SHAPE["vocab_size"])) for w in (1, 8))
        samples.append(Sample(text.ids, one, at))
    floor = measure_floor(samples, "fp32")
    assert floor.margin < 0.01

    def forced(decoded: list[list[int]]) -> forcing.Forcing:
        answers = [
            Scored(
                f"p{i}", "random", tuple(prompts[i]), Text(tuple(ids), "length"),
                parse_scores(plain.score(prompts[i], ids, 0), LIMIT, SHAPE["vocab_size"]), LIMIT,
            )
            for i, ids in enumerate(decoded)
        ]  # fmt: skip
        return forcing.report(answers, floor, (), str)

    assert forcing.objection(forced([by_hand(reference, prompt, LIMIT, ()) for prompt in prompts])) is None
    rounded = Qwen3ForCausalLM.from_pretrained(folders["target"], dtype=torch.bfloat16).eval()
    lossy = forced([by_hand(rounded, prompt, LIMIT, ()) for prompt in prompts])
    assert lossy.error > 0
    assert "beyond its noise" in str(forcing.objection(lossy))
