"""The decoders that the judge keeps in memory: stock, the incumbent, the candidate, each in a child of its own."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.codec import to_json
from engine.deployment import Deployment
from engine.errors import ChildError
from engine.judge import protocol
from engine.judge.hidden import Material
from engine.judge.process import Child
from engine.judge.protocol import Scores, Text
from engine.plan import Plan


@dataclass(frozen=True)
class Timeouts:
    """Seconds that a child may take: to load (weights, imports), for its first answer (it may compile then), for any
    later one, and for a stage profile."""

    build: float = 180.0
    first_answer: float = 180.0
    answer: float = 60.0
    profile: float = 300.0


@dataclass(frozen=True)
class Reply:
    """A text and the seconds that it took on the judge's clock, from question to last byte."""

    text: Text
    seconds: float


class Seat:
    """A child with a decoder in it. All failures raise ChildFailed; the child is dead afterwards."""

    def __init__(self, role: str, log: Path, build: dict[str, Any], material: Material, timeouts: Timeouts) -> None:
        self._material = material
        self._timeouts = timeouts
        self._answered = False
        self._described: dict[str, Any] | None = None
        self._child = Child(role, log)
        self._child.send({"do": "build", **build})

    @property
    def alive(self) -> bool:
        return self._child.alive

    @property
    def role(self) -> str:
        return self._child.role

    def rename(self, role: str) -> None:
        """What the child is called in sentences from now on."""
        self._child.role = role

    @property
    def implementation(self) -> str:
        """What decodes here, in words, as the backend says."""
        return str(self.ready().get("implementation", "unknown"))[:200]

    def ready(self) -> dict[str, Any]:
        """Wait until the decoder is built; its description."""
        if self._described is None:
            self._described = self._child.receive(self._timeouts.build)
        return self._described

    def generate(self, prompt: Sequence[int], max_new_tokens: int) -> Reply:
        self.ready()
        question = protocol.generate_question([prompt], max_new_tokens, self._material.stop_ids)
        answer = self._child.ask(question, self._timeouts.answer if self._answered else self._timeouts.first_answer)
        try:
            (text,) = protocol.parse_texts(answer.payload, 1, max_new_tokens, self._material.vocab_size)
        except ChildError as error:
            raise self._child.refuse(error) from None
        self._answered = True
        return Reply(text, answer.seconds)

    def score(self, prompt: Sequence[int], text: Sequence[int], width: int = 0) -> Scores:
        """Stock's logits on every prefix of `text`; `width` rows a pass, 0 = one pass."""
        self.ready()
        answer = self._child.ask(protocol.score_question(prompt, text, width), self._timeouts.answer)
        try:
            return protocol.parse_scores(answer.payload, len(text), self._material.vocab_size)
        except ChildError as error:
            raise self._child.refuse(error) from None

    def profile(self, prompts: Iterable[Sequence[int]], max_new_tokens: int) -> dict[str, Any]:
        self.ready()
        question = protocol.generate_question(list(prompts), max_new_tokens, self._material.stop_ids)
        return self._child.ask({**question, "do": "profile"}, self._timeouts.profile).payload

    def leave(self) -> None:
        self._child.kill()


class Seats:
    """At most `limit` children at a time. The one that was used longest ago makes room for a new one."""

    def __init__(
        self, deployment: Deployment, material: Material, threads: int, folder: Path, limit: int, timeouts: Timeouts
    ) -> None:
        self._deployment = deployment
        self._material = material
        self._threads = threads
        self._folder = folder
        self._limit = limit
        self._timeouts = timeouts
        self._seats: dict[str, Seat] = {}  # least recently used first
        self._numbers = itertools.count(1)

    def get(self, key: str) -> Seat | None:
        """The living child under `key`, now the most recently used."""
        seat = self._seats.pop(key, None)
        if seat is None:
            return None
        if not seat.alive:
            seat.leave()
            return None
        self._seats[key] = seat
        return seat

    def start(self, key: str, role: str, backend: str, plan: Plan | None, needed: Iterable[str] = ()) -> Seat:
        """Start a child under `key` and let it build; does not wait. Children under `needed` are not moved out."""
        self.dismiss(key)
        kept = set(needed)
        for other in [name for name in self._seats if name not in kept]:
            if len(self._seats) < self._limit:
                break
            self.dismiss(other)
        number = next(self._numbers)
        log = self._folder / "children" / f"{number:03d}-{re.sub(r'[^a-z0-9]+', '-', role.lower())}.log"
        log.unlink(missing_ok=True)  # of an earlier run of this search
        build = {
            "backend": backend,
            "deployment": to_json(self._deployment),
            "plan": None if plan is None else plan.to_json(),
            "threads": self._threads,
        }
        self._seats[key] = Seat(role, log, build, self._material, self._timeouts)
        return self._seats[key]

    def move(self, old: str, new: str, role: str) -> None:
        """Give the child under `old` another key and role; who had that key leaves."""
        seat = self._seats.pop(old)
        self.dismiss(new)
        seat.rename(role)
        self._seats[new] = seat

    def dismiss(self, key: str) -> None:
        """Kill the child under `key`, if there is one."""
        seat = self._seats.pop(key, None)
        if seat is not None:
            seat.leave()

    def close(self) -> None:
        for key in list(self._seats):
            self.dismiss(key)
