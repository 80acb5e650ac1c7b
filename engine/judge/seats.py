"""The decoders that the judge keeps in memory: stock, the incumbent, the candidate, each in a child of its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.codec import to_json
from engine.deployment import Deployment
from engine.errors import ChildError
from engine.judge import protocol
from engine.judge.hidden import Material
from engine.judge.process import Answer, Child
from engine.judge.protocol import Scores, Text
from engine.plan import Plan

CANDIDATE = "candidate"
"""The role that is judged; every other one is trusted."""


@dataclass(frozen=True)
class Timeouts:
    """Seconds that a child may take: to load (weights, imports), for its first answer (it may compile then), for any
    later one, and for a stage profile. A candidate's limit for an answer grows with stock's own time on this device
    (`patience` times the slowest answer seen); stock and incumbent, which are trusted, get `trusted` seconds."""

    build: float = 180.0
    first_answer: float = 180.0
    answer: float = 60.0
    patience: float = 10.0
    trusted: float = 900.0
    profile: float = 900.0


class Patience:
    """How long a candidate is waited for, given what trusted children took for the same kind of answer."""

    def __init__(self, timeouts: Timeouts) -> None:
        self.timeouts = timeouts
        self._slowest = 0.0

    def saw(self, seconds: float) -> None:
        """A trusted child took this long."""
        self._slowest = max(self._slowest, seconds)

    def seconds(self, *, trusted: bool, first: bool) -> float:
        if trusted:
            return self.timeouts.trusted
        least = self.timeouts.first_answer if first else self.timeouts.answer
        return max(least, self.timeouts.patience * self._slowest)


@dataclass(frozen=True)
class Reply:
    """A text and the seconds that it took on the judge's clock, from question to last byte."""

    text: Text
    seconds: float

    @property
    def tok_s(self) -> float:
        """Generated tokens per second, prefill included."""
        return len(self.text.ids) / self.seconds


def accept_length(replies: Sequence[Reply]) -> float | None:
    """Tokens emitted per verify step over all `replies`, bonus token included, as the decoder counts them; None where
    it does not say."""
    steps = sum(reply.text.steps for reply in replies)
    return sum(reply.text.emitted for reply in replies) / steps if steps else None


class Seat:
    """A decoder in a child, named `decoder` there. All failures raise ChildFailed; the child is dead afterwards."""

    def __init__(
        self, child: Child, decoder: str, build: dict[str, Any], material: Material, patience: Patience
    ) -> None:
        self.child = child
        self._decoder = decoder
        self._material = material
        self._patience = patience
        self._answered = False
        self._described: dict[str, Any] | None = None
        self._ask_later({"do": "build", **build})

    @property
    def alive(self) -> bool:
        return self.child.alive

    @property
    def name(self) -> str:
        """What a person calls it."""
        return self._decoder or self.child.role

    @property
    def trusted(self) -> bool:
        return self.child.role != CANDIDATE

    @property
    def implementation(self) -> str:
        """What decodes here, in words, as the backend says."""
        return str(self.ready().get("implementation", "unknown"))[:200]

    def ready(self) -> dict[str, Any]:
        """Wait until the decoder is built; its description."""
        if self._described is None:
            limits = self._patience.timeouts
            self._described = self.child.receive(limits.trusted if self.trusted else limits.build)
        return self._described

    def generate(self, prompt: Sequence[int], max_new_tokens: int) -> Reply:
        self.ready()
        question = protocol.generate_question([prompt], max_new_tokens, self._material.stop_ids)
        answer = self._ask(question, self._patience.seconds(trusted=self.trusted, first=not self._answered))
        try:
            (text,) = protocol.parse_texts(answer.payload, 1, max_new_tokens, self._material.vocab_size)
        except ChildError as error:
            raise self.child.refuse(error) from None
        self._answered = True
        if self.trusted:
            self._patience.saw(answer.seconds)
        return Reply(text, answer.seconds)

    def score(self, prompt: Sequence[int], text: Sequence[int], width: int = 0) -> Scores:
        """Stock's logits on every prefix of `text`; `width` rows a pass, 0 = one pass."""
        self.ready()
        answer = self._ask(protocol.score_question(prompt, text, width), self._patience.timeouts.trusted)
        try:
            return protocol.parse_scores(answer.payload, len(text), self._material.vocab_size)
        except ChildError as error:
            raise self.child.refuse(error) from None

    def profile(self, prompts: Iterable[Sequence[int]], max_new_tokens: int) -> dict[str, Any]:
        self.ready()
        question = protocol.generate_question(list(prompts), max_new_tokens, self._material.stop_ids)
        return self._ask({**question, "do": "profile"}, self._patience.timeouts.profile).payload

    def _ask(self, question: dict[str, Any], timeout: float) -> Answer:
        return self.child.ask({**question, "decoder": self._decoder}, timeout)

    def _ask_later(self, question: dict[str, Any]) -> None:
        self.child.send({**question, "decoder": self._decoder})


class Seats:
    """Decoders by key, in at most `limit` children. The child that was used longest ago makes room for a new one."""

    def __init__(
        self, deployment: Deployment, material: Material, threads: int, folder: Path, limit: int, timeouts: Timeouts
    ) -> None:
        self._deployment = deployment
        self._material = material
        self._threads = threads
        self._folder = folder
        self._limit = limit
        self._patience = Patience(timeouts)
        self._seats: dict[str, Seat] = {}  # least recently used first
        self._numbers = itertools.count(1)

    def get(self, key: str) -> Seat | None:
        """The living decoder under `key`, now the most recently used."""
        seat = self._seats.get(key)
        if seat is None:
            return None
        if not seat.alive:
            self.dismiss(key)
            return None
        self._seats[key] = self._seats.pop(key)
        return seat

    def start(self, key: str, role: str, backend: str, plan: Plan | None, needed: Iterable[str] = ()) -> Seat:
        """Start a child under `key` and let it build; does not wait. Children under `needed` are not moved out."""
        self.dismiss(key)
        self._make_room(set(needed))
        log = self._folder / "children" / f"{next(self._numbers):03d}.log"
        log.unlink(missing_ok=True)  # of an earlier run of this search
        return self._seat(key, Child(role, log), "", backend, plan)

    def start_beside(self, other: Seat, key: str, backend: str) -> Seat:
        """Build another decoder in the child of `other`, and wait for it."""
        self._seats.pop(key, None)
        other.ready()
        seat = self._seat(key, other.child, key, backend, None)
        seat.ready()
        return seat

    def move(self, old: str, new: str, role: str) -> None:
        """Give the child under `old` another key and role; who had that key leaves."""
        seat = self._seats.pop(old)
        self.dismiss(new)
        seat.child.role = role
        self._seats[new] = seat

    def dismiss(self, key: str) -> None:
        """Kill the child under `key`, if there is one, with every decoder in it."""
        seat = self._seats.get(key)
        if seat is not None:
            self._seats = {other: kept for other, kept in self._seats.items() if kept.child is not seat.child}
            seat.child.kill()

    def close(self) -> None:
        for key in list(self._seats):
            self.dismiss(key)

    def _seat(self, key: str, child: Child, decoder: str, backend: str, plan: Plan | None) -> Seat:
        build = {
            "backend": backend,
            "deployment": to_json(self._deployment),
            "plan": None if plan is None else plan.to_json(),
            "threads": self._threads,
        }
        self._seats[key] = Seat(child, decoder, build, self._material, self._patience)
        return self._seats[key]

    def _make_room(self, needed: set[str]) -> None:
        kept = {id(self._seats[key].child) for key in needed & self._seats.keys()}
        for key, seat in list(self._seats.items()):
            if len({id(other.child) for other in self._seats.values()}) < self._limit:
                return
            if id(seat.child) not in kept:
                self.dismiss(key)
