"""What a trial asks follows from seed, purpose and number alone, and cannot be known beforehand."""

from __future__ import annotations

import dataclasses
import random

import judge_toys as toys

from engine.deployment import Regime
from engine.judge.hidden import HiddenPrompt, Material
from engine.judge.questions import Question, Questions


def material(count: int = 24) -> Material:
    prompts = tuple(HiddenPrompt(f"p{i}", "red", tuple(range(1, 4 + i % 5)), f"text {i}") for i in range(count))
    return Material(
        prompts=prompts,
        stop_ids=(toys.EOS,),
        vocab_size=toys.VOCAB,
        decode=str,
        read_bytes=0,
        encode=lambda text: tuple(text.encode()),
    )


def test_a_batch_is_one_question_with_a_request_number_for_each_prompt() -> None:
    questions = Questions(material(), Regime(batch=4, temperature=0.7), seed=3).draw("", 2, 3)
    assert [len(question.prompts) for question in questions] == [4, 4, 4]
    assert len({prompt.id for question in questions for prompt in question.prompts}) == 12
    assert [question.requests for question in questions] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)]
    sampling = questions[1].sampling
    assert sampling is not None
    assert (sampling.temperature, sampling.requests) == (0.7, (4, 5, 6, 7))
    part = questions[1].parts[2]
    assert part.prompts == questions[1].prompts[2:3]
    assert part.sampling == sampling.one(2)


def test_greedy_questions_carry_no_sampling() -> None:
    (question,) = Questions(material(), Regime(), seed=3).draw("", 2, 1)
    assert question.sampling is None
    assert question.part(0) == question


def test_the_noise_rotates_with_every_draw_and_is_the_same_for_the_same_one() -> None:
    regime = Regime(temperature=0.7)
    draws = [
        Questions(material(), regime, seed).draw(purpose, number, 1)[0]
        for seed in (1, 2)
        for purpose in ("", "closing")
        for number in (1, 2)
    ]
    assert len({question.seed for question in draws}) == 8
    assert all(0 <= question.seed < 1 << 63 for question in draws)
    again = Questions(material(), regime, 1).draw("", 1, 1)[0]
    assert again == draws[0]


def test_salted_prompts_are_new_texts_that_nobody_can_foresee() -> None:
    source = material()
    salted = Questions(source, Regime(), 5, "a secret").draw("", 1, 6, salted=True)
    assert salted == Questions(source, Regime(), 5, "a secret").draw("", 1, 6, salted=True)
    assert salted != Questions(source, Regime(), 5, "another").draw("", 1, 6, salted=True)
    plain = [Questions(source, Regime(), 5, secret).draw("", 1, 6) for secret in ("a secret", "another")]
    assert plain[0] == plain[1]  # our own code gets what the seed says
    assert not {question.prompts[0].ids for question in salted} & {prompt.ids for prompt in source.prompts}
    other = Questions(source, Regime(), 6).draw("", 1, 24, salted=True)
    mine = Questions(source, Regime(), 5).draw("", 1, 24, salted=True)
    texts = [{bytes(question.prompts[0].ids).decode() for question in each} for each in (mine, other)]
    assert len(texts[0] | texts[1]) > 40
    assert all(text.rpartition(" ")[2].isdigit() for text in texts[0])


def test_a_salted_prompt_that_would_be_too_long_stays_as_it_is() -> None:
    source = material()
    short = Questions(source, Regime(max_prompt_tokens=8), 5).draw("", 1, 4, salted=True)
    assert {question.prompts[0] for question in short} <= set(source.prompts)
    without = Questions(dataclasses.replace(source, encode=None), Regime(), 5).draw("", 1, 4, salted=True)
    assert {question.prompts[0] for question in without} <= set(source.prompts)


def test_a_question_of_one_prompt_under_a_given_sampling() -> None:
    prompt = material().prompts[random.randrange(24)]
    assert Question.of(prompt, None).sampling is None
    (drawn,) = Questions(material(), Regime(temperature=1.1), 5).draw("", 1, 1)
    sampling = drawn.sampling
    assert sampling is not None
    assert Question.of(prompt, sampling).sampling == sampling
