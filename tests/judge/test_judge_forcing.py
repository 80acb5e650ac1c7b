"""Token forcing on scores made by hand and at random, against independent counts."""

from __future__ import annotations

import dataclasses
import random

import pytest

from engine.judge import forcing
from engine.judge.floor import SAFETY, Floor, Sample, measure_floor, near_tie_limit
from engine.judge.forcing import ENDED, Scored, disagreements
from engine.judge.protocol import Scores, Text

STOP = (0,)
FLOOR = Floor(margin=0.01, flips=1, positions=1000, method="made up")


def decode(ids: list[int]) -> str:
    return " ".join(map(str, ids))


def scored(
    choice: list[int], ids: list[int], gaps: dict[int, float] | None = None, *, limit: int = 6, **changes: object
) -> Scored:
    """An answer `ids` where stock would choose `choice`; `gaps` by position where the two differ (default 1.0)."""
    n = len(ids)
    best = [10.0 + i for i in range(n)]
    own = [b - (0.0 if ids[i] == choice[i] else (gaps or {}).get(i, 1.0)) for i, b in enumerate(best)]
    scores = Scores(tuple(choice[:n]), tuple(best), tuple(own), (99,) * n, tuple(b - 0.5 for b in best), choice[-1])
    reason = "eos" if ids and ids[-1] in STOP else "length"
    answer = Scored("p1", "math", (50, 51), Text(tuple(ids), reason), scores, limit)
    return dataclasses.replace(answer, **changes)  # type: ignore[arg-type]


def kinds(answer: Scored) -> list[tuple[str, int, int, int]]:
    return [(d.kind, d.position, d.token, d.choice) for d in disagreements(answer, FLOOR.margin, STOP)]


def test_equal_text_has_no_disagreement() -> None:
    assert kinds(scored([5, 6, 7, 8, 9, 4, 3], [5, 6, 7, 8, 9, 4])) == []
    assert kinds(scored([5, 6, 0, 0], [5, 6, 0])) == []


def test_gap_decides_between_near_tie_and_error() -> None:
    answer = scored([5, 6, 7, 8, 9, 4, 3], [5, 1, 7, 2, 9, 4], {1: 0.0099, 3: 0.0101})
    assert kinds(answer) == [("near_tie", 1, 1, 6), ("error", 3, 2, 8)]
    tied = scored([5, 6, 7, 8, 9, 4, 3], [5, 1, 7, 8, 9, 4], {1: 0.0})
    assert kinds(tied) == [("near_tie", 1, 1, 6)]


def test_how_a_text_ends_is_judged() -> None:
    early = scored([5, 6, 7, 3], [5, 6, 0])
    assert kinds(early) == [("error", 2, 0, 7)]
    missing = scored([5, 0, 7, 8, 9, 4, 3], [5, 1, 7, 8, 9, 4])
    assert kinds(missing) == [("error", 1, 1, 0)]
    cut = scored([5, 6, 7, 8], [5, 6, 7])
    assert kinds(cut) == [("error", 3, ENDED, 8)]
    beyond = scored([5, 0, 7, 8], [5, 0, 7, 8], limit=4)
    assert kinds(beyond) == [("error", 2, 7, 0), ("error", 3, 8, 0)]
    by_near_tie = scored([5, 6, 7, 3], [5, 6, 0], {2: 0.001})
    assert kinds(by_near_tie) == [("near_tie", 2, 0, 7)]


@pytest.mark.parametrize(("ids", "said"), [([5, 0], "length"), ([5, 6, 7, 8, 9, 4], "eos"), ([5, 0], "stop")])
def test_a_falsified_stop_reason_is_an_error(ids: list[int], said: str) -> None:
    answer = scored([*ids, 3], ids, text=Text(tuple(ids), said))
    assert [kind for kind, *_ in kinds(answer)] == ["error"]
    assert said in disagreements(answer, FLOOR.margin, STOP)[0].what


def test_report_counts_by_category_and_shows_the_first_error_in_context() -> None:
    good = scored([5, 6, 7, 8, 9, 4, 3], [5, 6, 7, 8, 9, 4], prompt="a", category="math")
    tie = scored([5, 6, 7, 8, 9, 4, 3], [5, 1, 7, 8, 9, 4], {1: 0.002}, prompt="b", category="code")
    bad = scored([5, 6, 7, 8, 9, 4, 3], [5, 6, 2, 8, 9, 1], {2: 3.25}, prompt="c", category="code")
    equal = dataclasses.replace(good, stock=good.text)
    differs = dataclasses.replace(tie, stock=Text((5, 6, 7, 8, 9, 4), "length"))
    found = forcing.report([equal, differs, bad, equal], FLOOR, STOP, decode)
    assert (found.tokens, found.exact, found.near_tie, found.error) == (18, 15, 1, 2)
    assert found.by_category == {"math": (6, 0, 0), "code": (9, 1, 2)}
    assert (found.free_run_equal, found.free_run_prompts) == (1, 2)
    first = found.first
    assert first is not None
    assert (first.prompt, first.position, first.candidate_token, first.stock_token) == ("c", 2, 2, 7)
    assert (first.context, first.candidate_text, first.stock_text, first.near_tie) == ("50 51 5 6", "2", "7", False)
    assert first.logit_gap == pytest.approx(3.25)
    sentence = forcing.objection(found)
    assert sentence is not None
    assert "2 of 18 tokens" in sentence
    assert "prompt c, token 3: '2' where stock has '7', 3.25 logits apart" in sentence


def test_only_near_ties_pass_up_to_the_limit() -> None:
    ties = [
        scored([5, 6, 7, 8, 9, 4, 3], [1, 1, 1, 1, 1, 1], {i: 0.001 for i in range(6)}, prompt=str(n)) for n in range(9)
    ]
    few = forcing.report([scored([5, 6, 7, 8, 9, 4, 3], [5, 1, 7, 8, 9, 4], {1: 0.002})], FLOOR, STOP, decode)
    assert few.first is not None
    assert few.first.near_tie
    assert forcing.objection(few) is None
    many = forcing.report(ties, FLOOR, STOP, decode)
    assert many.error == 0
    assert many.near_tie == 54 > many.near_tie_limit
    assert "54 near-ties in 54 tokens" in str(forcing.objection(many))


def test_near_tie_limit_against_simulation() -> None:
    rng = random.Random()
    flips, positions, tokens = 3, 400, 150
    counts = []
    for _ in range(20_000):  # rate from its posterior, then honest near-ties at that rate
        rate = rng.betavariate(flips + 0.5, positions - flips + 0.5)
        counts.append(_binomial(rng, tokens, rate))
    floor = Floor(0.01, flips, positions, "")
    for alpha in (0.2, 0.05, 0.01):
        limit = near_tie_limit(tokens, floor, alpha)
        over = sum(count > limit for count in counts) / len(counts)
        over_one_less = sum(count > limit - 1 for count in counts) / len(counts)
        assert over <= alpha * 1.25 + 0.002
        assert over_one_less >= alpha * 0.8 - 0.002


def _binomial(rng: random.Random, n: int, p: float) -> int:
    count, position = 0, 0
    while True:  # geometric jumps
        position += 1 + int(rng.expovariate(1.0) / max(p, 1e-12))
        if position > n:
            return count
        count += 1


def test_near_tie_limit_is_monotone_and_bounded() -> None:
    assert near_tie_limit(10, Floor(0.0, 0, 0, "")) <= 10  # nothing known: no claim beyond the tokens themselves
    strict, loose = Floor(0.0, 0, 5000, ""), Floor(0.0, 50, 5000, "")
    assert near_tie_limit(200, strict) < near_tie_limit(200, loose) < 30
    assert near_tie_limit(50, loose) <= near_tie_limit(500, loose)


def floor_scores(gaps: list[float], choice: list[int], second: list[int], own: list[float] | None = None) -> Scores:
    best = [20.0] * len(gaps)
    seconds = tuple(20.0 - gap for gap in gaps)
    return Scores(tuple(choice), tuple(best), tuple(own or best), tuple(second), seconds, 1)


def test_floor_is_the_largest_difference_that_stock_shows_to_itself() -> None:
    one = floor_scores([1.0, 0.5, 2.0, 0.001], [1, 2, 3, 4], [5, 6, 7, 8])
    wide = floor_scores([1.001, 0.5, 2.5, 0.002], [1, 2, 3, 8], [5, 6, 9, 4])  # row 2 leads with other tokens
    floor = measure_floor([Sample((1, 2, 3, 4), one, ((8, wide),))], "fp32")
    assert floor.margin == pytest.approx(SAFETY["fp32"] * 0.003)  # the swapped pair: 0.001 + 0.002
    assert (floor.flips, floor.positions) == (1, 8)
    assert "width" in floor.method


def test_a_flip_of_stocks_own_text_widens_the_floor() -> None:
    one = floor_scores([1.0, 1.0], [1, 2], [5, 6], own=[20.0, 19.98])
    floor = measure_floor([Sample((1, 6), one)], "fp32")
    assert floor.flips == 1
    assert floor.margin == pytest.approx(SAFETY["fp32"] * 0.02)


def test_floor_never_falls_under_the_rounding_of_a_logit() -> None:
    one = floor_scores([1.0], [1], [5])
    assert 0 < measure_floor([Sample((1,), one)], "fp32").margin < 1e-5
    assert measure_floor([Sample((1,), one)], "bf16").margin == pytest.approx(2 * 2**-9 * 20.0)


# Errors that stock itself does not agree on --------------------------------------------------------------------


def test_an_error_counts_only_where_stock_says_so_in_both_ways() -> None:
    ids = [5, 1, 7, 2, 9, 4]
    one_pass = scored([5, 6, 7, 2, 9, 4, 3], ids)  # token 1 is wrong
    by_rows = scored([5, 1, 7, 8, 9, 4, 3], ids)  # token 3 is wrong, token 1 is not
    (unstable,) = forcing.confirmed([one_pass], FLOOR.margin, STOP, lambda answer: by_rows.scores)
    assert disagreements(unstable, FLOOR.margin, STOP) == []
    (wrong,) = forcing.confirmed([one_pass], FLOOR.margin, STOP, lambda answer: one_pass.scores)
    assert wrong == one_pass
    assert [place.position for place in disagreements(wrong, FLOOR.margin, STOP)] == [1]


def test_answers_without_an_error_are_not_scored_again_and_one_that_is_confirmed_ends_it() -> None:
    right = scored([5, 6, 7, 8, 9, 4, 3], [5, 6, 7, 8, 9, 4])
    tied = scored([5, 6, 7, 8, 9, 4, 3], [5, 1, 7, 8, 9, 4], {1: 0.001})
    wrong = scored([5, 6, 7, 8, 9, 4, 3], [5, 1, 7, 8, 9, 4])
    asked: list[Scored] = []

    def again(answer: Scored) -> Scores:
        asked.append(answer)
        return answer.scores

    assert forcing.confirmed([right, tied, wrong, wrong], FLOOR.margin, STOP, again) == [right, tied, wrong, wrong]
    assert asked == [wrong]


def test_a_text_that_ends_wrongly_stays_wrong_however_it_is_scored() -> None:
    cut = scored([5, 6, 7, 8], [5, 6, 7])
    (kept,) = forcing.confirmed([cut], FLOOR.margin, STOP, lambda answer: answer.scores)
    assert kinds(kept) == [("error", 3, ENDED, 8)]


def test_the_kinder_scores_are_taken_position_by_position() -> None:
    rng = random.Random()
    n = 40

    def scores() -> Scores:
        best = [rng.uniform(5, 9) for _ in range(n)]
        own = [b - rng.choice((0.0, rng.expovariate(1.0))) for b in best]
        tokens = [tuple(rng.randrange(90) for _ in range(n)) for _ in range(2)]
        return Scores(tokens[0], tuple(best), tuple(own), tokens[1], tuple(b - 0.1 for b in best), rng.randrange(90))

    one, other = scores(), scores()
    kinder = forcing.kinder(one, other)
    for i in range(n):
        gaps = [each.choice_logit[i] - each.token_logit[i] for each in (one, other)]
        pick = one if gaps[0] <= gaps[1] else other
        assert kinder.choice_logit[i] - kinder.token_logit[i] == min(gaps)
        assert (kinder.choice[i], kinder.second[i]) == (pick.choice[i], pick.second[i])
