"""The decoders that the judge keeps in memory: stock, the incumbent, the candidate, each in a child of its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.codec import to_json
from engine.deployment import Deployment
from engine.errors import ChildError
from engine.judge import protocol
from engine.judge.confinement import Confinement
from engine.judge.hidden import Material
from engine.judge.process import Answer, Child, ChildFailed
from engine.judge.protocol import Scores, Text
from engine.plan import Plan
from engine.sampling import Sampling

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


@dataclass(frozen=True)
class BatchReply:
    """The texts of one question, in the order of its prompts, and the seconds of the whole question."""

    texts: tuple[Text, ...]
    seconds: float

    @property
    def tok_s(self) -> float:
        """Generated tokens of all texts per second, prefill included."""
        return sum(len(text.ids) for text in self.texts) / self.seconds


def accept_length(replies: Sequence[BatchReply]) -> float | None:
    """Tokens emitted per verify step over all `replies`, bonus token included, as the decoder counts them; None where
    it does not say."""
    texts = [text for reply in replies for text in reply.texts]
    steps = sum(text.steps for text in texts)
    return sum(text.emitted for text in texts) / steps if steps else None


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

    def generate(self, prompt: Sequence[int], max_new_tokens: int, sampling: Sampling | None = None) -> Reply:
        """One text: greedy, or as `sampling` says, which has one request number."""
        batch = self.generate_batch([prompt], max_new_tokens, sampling)
        return Reply(batch.texts[0], batch.seconds)

    def generate_batch(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, sampling: Sampling | None = None
    ) -> BatchReply:
        """The texts of several prompts, asked for in one question; `sampling` has a request number for each."""
        self.ready()
        question = protocol.generate_question(prompts, max_new_tokens, self._material.stop_ids, sampling)
        answer = self._ask(question, self._patience.seconds(trusted=self.trusted, first=not self._answered))
        try:
            texts = protocol.parse_texts(answer.payload, len(prompts), max_new_tokens, self._material.vocab_size)
        except ChildError as error:
            raise self.child.refuse(error) from None
        self._answered = True
        if self.trusted:
            self._patience.saw(answer.seconds)
        return BatchReply(tuple(texts), answer.seconds)

    def score(
        self, prompt: Sequence[int], text: Sequence[int], width: int = 0, sampling: Sampling | None = None
    ) -> Scores:
        """Stock's logits on every prefix of `text`; `width` rows a pass, 0 = one pass. With `sampling`, of one request,
        with its noise added, so that its choices are those of the sampled question."""
        self.ready()
        question = protocol.score_question(prompt, text, width, sampling)
        answer = self._ask(question, self._patience.timeouts.trusted)
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


@dataclass(frozen=True)
class Prepared:
    """A child in which no foreign code has run yet. It sees the source file as it was when the child was made."""

    sha256: str
    confinement: Confinement | None
    child: Child


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
        self._prepared: Prepared | None = None
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

    def start(
        self,
        key: str,
        role: str,
        backend: str,
        plan: Plan | None,
        needed: Iterable[str] = (),
        confinement: Confinement | None = None,
    ) -> Seat:
        """Start a child under `key` and let it build; does not wait. Children under `needed` are not moved out. A
        source candidate comes with its `confinement`."""
        self.dismiss(key)
        self._make_room(set(needed))
        return self._seat(key, Child(role, self._log(), confinement), "", backend, plan)

    def prepare(self, sha256: str, confinement: Confinement | None) -> None:
        """Start the child of the source candidate that comes next, without its code, whose hash is `sha256`. Does not
        wait."""
        self._drop_prepared()
        child = Child(CANDIDATE, self._log(), confinement)
        self._prepared = Prepared(sha256, confinement, child)
        with suppress(ChildFailed):  # its own trial tells
            child.send({"do": "import"})

    def prepared(self) -> None:
        """Wait until what is being prepared stands still."""
        if self._prepared is not None and self._prepared.child.owes:
            with suppress(ChildFailed):
                self._prepared.child.receive(self._patience.timeouts.build)

    def start_source(
        self, key: str, backend: str, sha256: str, plan: Plan, needed: Iterable[str], confinement: Confinement | None
    ) -> Seat:
        """`start` for the source candidate `backend`, whose file has the hash `sha256`: in the child that was prepared
        for it, if there is one."""
        self.prepared()
        found = self._prepared
        if found is None or not found.child.alive or (found.sha256, found.confinement) != (sha256, confinement):
            self._drop_prepared()
            return self.start(key, CANDIDATE, backend, plan, needed, confinement)
        self._prepared = None
        self.dismiss(key)
        self._make_room(set(needed))
        return self._seat(key, found.child, "", backend, plan)

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
        self._drop_prepared()
        for key in list(self._seats):
            self.dismiss(key)

    def _drop_prepared(self) -> None:
        if self._prepared is not None:
            self._prepared.child.kill()
            self._prepared = None

    def _log(self) -> Path:
        log = self._folder / "children" / f"{next(self._numbers):03d}.log"
        log.unlink(missing_ok=True)  # of an earlier run of this search
        return log

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
