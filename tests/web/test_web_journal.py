"""Whatever a child says can be stored, in either database, and reads back as it was folded."""

from __future__ import annotations

import json

import pytest
from django.db import transaction

from engine.judge.report import Divergence, Forcing, Judgement
from engine.search.events import CandidateProposed, Note, RoundStarted, TrialJudged
from tests.web.support import make_search
from webapp.searches import selectors
from webapp.searches.journal import append_events, locked
from webapp.searches.models import Event, Trial
from webapp.searches.projection import PROJECTIONS

pytestmark = pytest.mark.usefixtures("database", "no_check", "rings")
HOSTILE = "a\x00b\ud800c\udfffd\u202e\x07é🙂"
STORED = "a\ufffdb\ufffdc\ufffdd\u202e\x07é🙂"


def test_text_that_no_database_takes_is_stored_with_a_mark_in_its_place() -> None:
    search = make_search()
    plan = search.plan_value
    first = Divergence("p\x00", 0, 0, 1, 0.5, HOSTILE, "\x00", "b", False, HOSTILE, HOSTILE)
    forcing = Forcing(9, 8, 0, 1, 1e-4, 1, "twice", 1, 1, first, {HOSTILE: (8, 0, 1)})
    with transaction.atomic():
        state = append_events(
            locked(search.pk),
            [
                Note(HOSTILE),
                CandidateProposed(0, 0, "baseline", "", plan, plan.digest, {}, "", "initial", "why"),
                TrialJudged(0, Judgement("lossy", HOSTILE, ("p\x00",), forcing)),
            ],
        )
    found = selectors.trial_or_404(search, 0)
    assert (found["reason"], found["place"]["divergence"]["context"]) == (STORED.replace("\u202e\x07", ""), STORED)
    assert found["place"]["divergence"]["candidate_text"] == "\ufffd"
    assert found["categories"][0]["name"] == STORED
    assert found["prompts"] == ["p\ufffd"]
    assert Trial.objects.get(search=search).reason == STORED
    PROJECTIONS.clear()
    assert PROJECTIONS.state(search.pk) == state  # what was folded is what was stored


def test_other_text_is_stored_as_it_is() -> None:
    search = make_search()
    text = "\u2028 \\u0000 \\ud800 <b> \ufffd é🙂\n"
    with transaction.atomic():
        append_events(locked(search.pk), [Note(text), RoundStarted(1)])
    assert Event.objects.get(search=search, type="note").data == {"text": text}
    assert json.loads(json.dumps(selectors.events_after(search.pk, 0)))[1]["data"]["text"] == text
