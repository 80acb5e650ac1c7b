"""Events hold any text that a child can say, in a file as in a database."""

from __future__ import annotations

import json
import random
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from engine.codec import to_json
from engine.judge.report import Divergence, Forcing, Judgement
from engine.search.events import Event, Note, TrialJudged, storable
from engine.search.journal import Journal

TEXT = st.text(st.characters(codec=None), max_size=20) | st.sampled_from(["\x00", "\ud83d", "\ude00", "\\u0000\\ud800"])


@given(TEXT)
def test_storable_text_is_the_text_with_marks_for_what_cannot_be_stored(text: str) -> None:
    found = storable(Note(text))
    assert isinstance(found, Note)
    expected = "".join("\ufffd" if char == "\x00" or 0xD800 <= ord(char) <= 0xDFFF else char for char in text)
    assert found.text == expected
    found.text.encode()
    assert storable(found) is found  # and nothing is made anew that need not be
    assert Event.from_json(json.loads(json.dumps(Event(1, 0.0, found).to_json()))).body == found


def test_every_text_of_a_judgement_is_covered(tmp_path: Path) -> None:
    bad = random.choice(["\x00", "\ud800", "\udfff"])
    first = Divergence(bad, 0, 0, 1, 0.5, bad, bad, bad, False, bad, bad)
    forcing = Forcing(9, 8, 0, 1, 1e-4, 1, bad, 1, 1, first, {bad: (8, 0, 1)})
    body = storable(TrialJudged(3, Judgement("crashed", f"said {bad}", (bad,), forcing)))
    assert bad not in json.dumps(to_json(body), ensure_ascii=False)
    assert isinstance(body, TrialJudged)
    assert (body.trial, body.judgement.reason) == (3, "said \ufffd")
    with Journal(tmp_path) as journal:
        journal.append(Event(1, 0.0, body))
    with Journal(tmp_path) as journal:
        assert [event.body for event in journal.events] == [body]
