"""Speculative output is plain autoregressive output: every drafter, tree, width, limit and stop rule."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.drafters.contract import EMPTY, DraftTree
from engine.drafters.ngram import NgramDrafter
from engine.errors import UserError
from engine.generate import Decoder, StopRule
from engine.plan import Plan
from engine.stages import WallClock
from engine.tree import chain
from tests.decode.toy import VOCABULARY, TestDrafter, ToyModel, last_two, plain, random_tree, whole_text

TOKENS = st.integers(0, VOCABULARY - 1)
STOPS = st.builds(
    StopRule,
    eos_ids=st.lists(TOKENS, max_size=1).map(tuple),
    sequences=st.lists(st.lists(TOKENS, min_size=1, max_size=4).map(tuple), max_size=3).map(tuple),
)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    return Plan(
        draft_tokens=draw(st.integers(1, 9)),
        tree_rows=draw(st.sampled_from([0, 2, 3, 5, 8, 13, 33])),
        verify_widths=draw(st.sampled_from(["exact", "4", "8"])),
        head_rows=draw(st.sampled_from(["all", "needed"])),
    )


@settings(max_examples=250, deadline=None)
@given(
    plan=plans(),
    stop=STOPS,
    prompt=st.lists(TOKENS, min_size=1, max_size=9),
    limit=st.integers(1, 40),
    taps=st.sampled_from([(), (0,), (3, 1)]),
    truth=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    rng=st.randoms(use_true_random=False),
)
def test_any_drafter_gives_the_plain_text(plan, stop, prompt, limit, taps, truth, rng) -> None:
    following = whole_text(rng.randrange(1 << 30))
    model = ToyModel(following)
    drafter = TestDrafter(lambda text, shape: random_tree(rng, text, shape, following, truth), taps)
    heard: list[list[int]] = []
    result = Decoder(model, drafter, plan).generate(prompt, limit, stop, on_tokens=heard.append)

    ids, reason = plain(following, prompt, limit, stop)
    assert (result.ids, result.stop_reason) == (ids, reason)
    assert [len(step) for step in heard] == [1, *result.emitted_per_step]
    assert [token for step in heard for token in step] == ids
    assert len(result.drafted_per_step) == len(result.emitted_per_step)
    assert drafter.text == [*prompt, *ids][: len(drafter.text)]
    multiple = 1 if plan.verify_widths == "exact" else int(plan.verify_widths)
    widths = [-(-(drafted + 1) // multiple) * multiple for drafted in result.drafted_per_step]
    assert model.widths == [len(prompt), *widths]


@settings(max_examples=60, deadline=None)
@given(depth=st.integers(1, 9), limit=st.integers(1, 40), salt=st.integers(0, 1 << 30), widths=st.sampled_from("48"))
def test_an_oracle_emits_full_blocks_and_never_drafts_too_much(depth: int, limit: int, salt: int, widths: str) -> None:
    following = whole_text(salt)

    def oracle(text: list[int], shape) -> DraftTree:
        path: list[int] = []
        while len(path) < shape.depth:
            path.append(following([*text, *path]))
        return chain(path)

    result = Decoder(ToyModel(following), TestDrafter(oracle), Plan(draft_tokens=depth, verify_widths=widths)).generate(
        [1, 2, 3], limit, StopRule()
    )
    assert result.ids == plain(following, [1, 2, 3], limit, StopRule())[0]
    blocks, rest = divmod(limit - 1, depth + 1)
    assert result.emitted_per_step == [depth + 1] * blocks + [rest] * (rest > 0)
    assert result.drafted_per_step == [depth] * blocks + [rest - 1] * (rest > 0)  # all drafts and the bonus are emitted


@settings(max_examples=60, deadline=None)
@given(
    plan=plans(),
    lengths=st.tuples(st.integers(1, 3), st.integers(0, 4)),
    candidates=st.integers(1, 4),
    stop=STOPS,
    salt=st.integers(0, 1 << 30),
    prompt=st.lists(TOKENS, min_size=1, max_size=9),
)
def test_suffix_matches_give_the_plain_text(plan, lengths, candidates, stop, salt, prompt) -> None:
    following = last_two(salt)
    drafter = NgramDrafter(lengths[0], sum(lengths), candidates)
    decoder = Decoder(ToyModel(following), drafter, plan)
    for _ in range(2):  # the second request must not see the first
        result = decoder.generate(prompt, 60, stop)
        assert (result.ids, result.stop_reason) == plain(following, prompt, 60, stop)


def test_suffix_matches_do_accept_on_a_text_that_repeats() -> None:
    result = Decoder(ToyModel(last_two(5)), NgramDrafter(2, 4), Plan(source="ngram")).generate([1, 2], 120, StopRule())
    assert result.accept_length is not None
    assert result.accept_length > 3


def test_an_end_inside_a_block_drops_what_follows() -> None:
    following = whole_text(11)
    text = plain(following, [4], 12, StopRule())[0]
    cut = next(i for i in range(3, 9) if text[i] not in text[:i])
    for stop, reason in (
        (StopRule((text[cut],)), "eos"),
        (StopRule(sequences=((text[cut - 1], text[cut]),)), "stop"),
    ):
        drafter = TestDrafter(lambda known, shape: chain(text[len(known) - 1 :][: shape.depth]))
        result = Decoder(ToyModel(following), drafter, Plan(draft_tokens=11)).generate([4], 12, stop)
        assert result.ids == text[: cut + 1]
        assert result.stop_reason == reason
        assert result.emitted_per_step == [cut]


def test_a_stop_sequence_does_not_begin_in_the_prompt() -> None:
    following = whole_text(3)
    first = following([7, 7])
    result = Decoder(ToyModel(following), None, Plan()).generate([7, 7], 5, StopRule(sequences=((7, first),)))
    assert result.stop_reason == "length"


def test_end_of_sequence_wins_over_stop_and_length() -> None:
    following = whole_text(3)
    first = following([7])
    decoder = Decoder(ToyModel(following), None, Plan())
    assert decoder.generate([7], 1, StopRule((first,), ((first,),))).stop_reason == "eos"
    assert decoder.generate([7], 1, StopRule((), ((first,),))).stop_reason == "stop"
    assert decoder.generate([7], 1, StopRule()).stop_reason == "length"


def test_one_token_needs_no_verify_step() -> None:
    model = ToyModel(whole_text(1))
    result = Decoder(model, TestDrafter(lambda text, shape: chain([0])), Plan()).generate([1, 2], 1, StopRule())
    assert (len(result.ids), result.emitted_per_step, result.accept_length) == (1, [], None)
    assert model.widths == [2]


def test_source_none_ignores_the_drafter() -> None:
    drafter = TestDrafter(lambda text, shape: chain([0]))
    result = Decoder(ToyModel(whole_text(1)), drafter, Plan(source="none")).generate([1], 9, StopRule())
    assert result.emitted_per_step == [1] * 8
    assert drafter.shapes == []


@pytest.mark.parametrize(
    "tree",
    [chain([1, 2, 3, 4]), DraftTree((1, 2), (-1, -1), (0.0, 0.0))],
    ids=["too deep", "no chain"],
)
def test_a_drafter_that_breaks_its_contract_is_an_error(tree: DraftTree) -> None:
    decoder = Decoder(ToyModel(whole_text(1)), TestDrafter(lambda text, shape: tree), Plan(draft_tokens=3))
    with pytest.raises(ValueError, match=r"draft|chain"):
        decoder.generate([1], 9, StopRule())


@pytest.mark.parametrize(
    ("prompt", "limit", "words"),
    [
        ([], 4, "empty"),
        ([1], 0, "at least 1"),
        ([1, VOCABULARY], 4, "vocabulary"),
        ([-1], 4, "vocabulary"),
        ([1] * 500, 13, "context of 512"),
    ],
)
def test_requests_that_cannot_be_served(prompt: list[int], limit: int, words: str) -> None:
    with pytest.raises(UserError, match=words):
        Decoder(ToyModel(whole_text(1)), None, Plan()).generate(prompt, limit, StopRule())


def test_the_context_can_be_filled_to_its_end() -> None:
    following = whole_text(2)
    drafter = TestDrafter(lambda text, shape: random_tree(random.Random(len(text)), text, shape, following, 0.9))
    prompt = [3] * 480
    result = Decoder(ToyModel(following), drafter, Plan(draft_tokens=8, tree_rows=20, verify_widths="8")).generate(
        prompt, 32, StopRule()
    )
    assert result.ids == plain(following, prompt, 32, StopRule())[0]


def test_empty_stop_sequences_are_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopRule(sequences=((),))


def test_the_clock_sees_every_part_of_a_step() -> None:
    clock = WallClock()
    drafter = TestDrafter(lambda text, shape: EMPTY)
    result = Decoder(ToyModel(whole_text(1)), drafter, Plan()).generate([1], 9, StopRule(), clock=clock)
    assert {"prefill", "draft", "accept", "host"} <= clock.seconds.keys()
    assert sum(clock.seconds.values()) <= result.prefill_s + result.decode_s
    assert sum(clock.seconds.values()) > 0.5 * (result.prefill_s + result.decode_s)
