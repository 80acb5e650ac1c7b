"""The exact record of a trial: what was asked of whom in which order, what was answered, and what followed from it.

One JSON file a trial, `trials/NNN.json` in the search's folder, for its owner only, written whole or not at all. It
holds hidden prompts and stock's tokens, so no child may see it. `replay.py` asks the same questions again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import engine
from engine.codec import STRICT, from_json, to_json
from engine.deployment import Deployment
from engine.errors import ChildError, UserError
from engine.hardware import Facts
from engine.judge.bench import ReadLimit
from engine.judge.floor import Floor
from engine.judge.forcing import Scored
from engine.judge.hidden import HiddenPrompt
from engine.judge.probes import Probe
from engine.judge.protocol import Scores, Text
from engine.judge.report import Judgement
from engine.judge.seats import BatchReply
from engine.paths import user_path
from engine.plan import Plan
from engine.sampling import Sampling

SCHEMA = 1
FOLDER = "trials"
MOST_BYTES = 256 << 20
"""Of a record's file, which is read whole."""

Role = Literal["candidate", "incumbent", "stock"]


@dataclass(frozen=True)
class Source:
    """A source candidate: the text of its file, and `function` in it, which builds the decoder."""

    __pydantic_config__ = STRICT

    function: str
    text: str
    sha256: str


@dataclass(frozen=True)
class AskedPrompt:
    __pydantic_config__ = STRICT

    id: str
    category: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Answered:
    """The text for one prompt, with stock's scores of it, and stock's own text, where they were made."""

    __pydantic_config__ = STRICT

    ids: tuple[int, ...]
    stop_reason: str
    steps: int = 0
    emitted: int = 0
    scores: Scores | None = None
    stock_ids: tuple[int, ...] | None = None
    stock_stop_reason: str = ""

    @property
    def text(self) -> Text:
        return Text(self.ids, self.stop_reason, self.steps, self.emitted)


@dataclass(frozen=True)
class Failure:
    """How a child failed, in the words of `ChildFailed`."""

    __pydantic_config__ = STRICT

    kind: str
    reason: str


@dataclass(frozen=True)
class Exchange:
    """One question and its answer.

    `pair` numbers the timed pair that it is one side of, None where its time does not count. `void` says why its block
    was thrown away. `seconds` are the judge's, of the whole question. A question without an answer has a `failure`,
    unless it only built the decoder: then `prompts` is empty.
    """

    __pydantic_config__ = STRICT

    phase: str
    role: Role
    prompts: tuple[AskedPrompt, ...]
    max_new_tokens: int
    sampling: Sampling | None = None
    probe: Probe | None = None
    texts: tuple[Answered, ...] = ()
    seconds: float = 0.0
    pair: int | None = None
    void: str = ""
    failure: Failure | None = None


@dataclass(frozen=True)
class Record:
    """A trial. `backends` names what ran as stock, candidate and incumbent; `effort` is told for the reader.
    `read_limit` is the physical floor of answers, with at most `draft_tokens` drafts a verify pass; `device` and
    `versions` are those of the machine."""

    __pydantic_config__ = STRICT

    schema: int
    written: str
    trial: int
    fresh: int
    seed: int
    deployment: Deployment
    plan: Plan
    incumbent: Plan | None
    source: Source | None
    backends: dict[str, str]
    effort: dict[str, Any]
    stop_ids: tuple[int, ...]
    vocab_size: int
    threads: int
    floor: Floor | None
    read_limit: ReadLimit | None
    draft_tokens: int | None
    exchanges: tuple[Exchange, ...]
    device: dict[str, str | int]
    versions: dict[str, str]
    judgement: Judgement

    def __post_init__(self) -> None:
        if not self.exchanges:
            raise ValueError("it holds no question")
        for exchange in self.exchanges:
            if exchange.texts and len(exchange.texts) != len(exchange.prompts):
                raise ValueError("a question has as many texts as prompts, or none")
            if exchange.sampling and len(exchange.sampling.requests) != len(exchange.prompts):
                raise ValueError("a sampled question has as many request numbers as prompts")
        if self.source and hashlib.sha256(self.source.text.encode()).hexdigest() != self.source.sha256:
            raise ValueError("the source text is not the one that was judged: its SHA-256 differs")


@dataclass
class Recorder:
    """Notes one trial while it runs.

    Say `asked` after every question that was answered, by whomever, and `failed` after one that was not; `paired` when
    two of them make a timed pair, `voided` when a block does not count, `scored` when stock has scored texts of the
    candidate. `write` ends it.
    """

    trial: int
    fresh: int
    seed: int
    deployment: Deployment
    plan: Plan
    incumbent: Plan | None
    backends: dict[str, str]
    stop_ids: tuple[int, ...]
    vocab_size: int
    threads: int
    source: Source | None = None
    effort: dict[str, Any] = field(default_factory=dict)
    floor: Floor | None = None
    read_limit: ReadLimit | None = None
    draft_tokens: int | None = None
    exchanges: list[Exchange] = field(default_factory=list)

    def asked(
        self,
        phase: str,
        role: Role,
        prompts: Sequence[HiddenPrompt],
        max_new_tokens: int,
        reply: BatchReply,
        *,
        sampling: Sampling | None = None,
        probe: Probe | None = None,
    ) -> int:
        """Note a question and its answer; returns its number, which `paired` and `voided` take."""
        texts = tuple(Answered(text.ids, text.stop_reason, text.steps, text.emitted) for text in reply.texts)
        asked = tuple(AskedPrompt(prompt.id, prompt.category, prompt.ids) for prompt in prompts)
        self.exchanges.append(Exchange(phase, role, asked, max_new_tokens, sampling, probe, texts, reply.seconds))
        return len(self.exchanges) - 1

    def failed(
        self,
        phase: str,
        role: Role,
        prompts: Sequence[HiddenPrompt],
        max_new_tokens: int,
        failure: ChildError,
        *,
        sampling: Sampling | None = None,
        probe: Probe | None = None,
    ) -> None:
        """Note a question that a child failed at; no `prompts` where it failed to build."""
        asked = tuple(AskedPrompt(prompt.id, prompt.category, prompt.ids) for prompt in prompts)
        why = Failure(failure.kind, failure.reason)
        self.exchanges.append(Exchange(phase, role, asked, max_new_tokens, sampling, probe, failure=why))

    def paired(self, pair: int, *numbers: int) -> None:
        """The exchanges of these numbers, one of the incumbent and one of the candidate, are timed pair `pair`."""
        for number in numbers:
            self.exchanges[number] = replace(self.exchanges[number], pair=pair)

    def voided(self, why: str, *numbers: int) -> None:
        """The times of these exchanges do not count."""
        for number in numbers:
            self.exchanges[number] = replace(self.exchanges[number], pair=None, void=why)

    def scored(self, answers: Sequence[Scored]) -> None:
        """Add stock's scores and stock's own texts to the candidate's answers that they belong to."""
        known = {(answer.prompt_ids, answer.text): answer for answer in answers}
        for number, exchange in enumerate(self.exchanges):
            if exchange.role == "candidate":
                pairs = zip(exchange.prompts, exchange.texts, strict=False)
                texts = tuple(_with_scores(text, known.get((prompt.ids, text.text))) for prompt, text in pairs)
                self.exchanges[number] = replace(exchange, texts=texts)

    def write(self, folder: Path, judgement: Judgement, facts: Facts) -> str:
        """Write the record into the search's `folder`; returns its name there, which the judgement then carries."""
        name = f"{FOLDER}/{self.trial:03d}.json"
        record = Record(
            schema=SCHEMA,
            written=datetime.now(UTC).isoformat(timespec="seconds"),
            trial=self.trial,
            fresh=self.fresh,
            seed=self.seed,
            deployment=self.deployment,
            plan=self.plan,
            incumbent=self.incumbent,
            source=self.source,
            backends=self.backends,
            effort=self.effort,
            stop_ids=self.stop_ids,
            vocab_size=self.vocab_size,
            threads=self.threads,
            floor=self.floor,
            read_limit=self.read_limit,
            draft_tokens=self.draft_tokens,
            exchanges=tuple(self.exchanges),
            device={
                "kind": facts.kind,
                "name": facts.name,
                "cores": facts.cores,
                "memory_bytes": facts.memory_bytes,
                "llc_bytes": facts.llc_bytes,
            },
            versions={"specpilot": engine.__version__, **facts.versions},
            judgement=replace(judgement, record=name),
        )
        _write_whole(folder / name, json.dumps(to_json(record), allow_nan=False, separators=(",", ":")))
        return name


def _with_scores(text: Answered, scored: Scored | None) -> Answered:
    if scored is None:
        return text
    text = replace(text, scores=scored.scores)
    if scored.stock is None:
        return text
    return replace(text, stock_ids=scored.stock.ids, stock_stop_reason=scored.stock.stop_reason)


def source_of(backend: str) -> Source:
    """The source candidate "path/to/file.py:function" as it is now. Raises UserError where it cannot be read."""
    place, _, function = backend.rpartition(":")
    try:
        text = user_path(place, field="source").read_bytes().decode()
    except OSError as error:
        raise UserError(f"The source file {place} cannot be read: {error.strerror}.", field="source") from None
    except UnicodeDecodeError:
        raise UserError(f"The source file {place} is not UTF-8 text.", field="source") from None
    return Source(function, text, hashlib.sha256(text.encode()).hexdigest())


def _write_whole(path: Path, text: str) -> None:
    """Write `path` with access for its owner only; a reader sees the old file or the new one."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(part).replace(path)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise


def locate(reference: str) -> Path:
    """The file that a person names: a record's path, or SEARCH_FOLDER:NUMBER."""
    path = user_path(reference, field="trial")
    folder, separator, number = reference.rpartition(":")
    if not path.exists() and separator and re.fullmatch(r"[0-9]{1,9}", number):
        place = user_path(folder or ".", field="trial")
        path = place / FOLDER / f"{int(number):03d}.json"
        if place.is_dir() and not path.exists():
            there = sorted(int(each.stem) for each in (place / FOLDER).glob("*.json") if each.stem.isdigit())
            known = f"it has those of trials {', '.join(map(str, there))}" if there else "it has none"
            raise _refusal(f"{place} has no record of trial {int(number)}; {known}.")
    return path


def read(path: Path) -> Record:
    """The record in `path`. Raises UserError, in one sentence, where it is not one that this version reads."""
    try:
        if path.exists() and not path.is_file():
            raise _refusal(f"{path} is not a file; name a trial's record, or SEARCH_FOLDER:NUMBER.")
        if path.is_file() and path.stat().st_size > MOST_BYTES:
            raise _refusal(f"{path} has over {MOST_BYTES >> 20} MiB, which no trial's record has.")
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise _refusal(f"The trial's record {path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError):
        raise _refusal(f"The trial's record {path} is broken: it is not JSON.") from None
    schema = data.get("schema") if isinstance(data, dict) else None
    if type(schema) is not int or schema < 1:
        raise _refusal(f"{path} is no trial's record: it has no schema number.")
    if schema > SCHEMA:
        raise _refusal(
            f"The trial's record {path} was written by a newer version (schema {schema}; this one reads {SCHEMA}); "
            "replay it with that version."
        )
    return from_json(Record, data, what=f"The trial's record {path} is broken")


def _refusal(sentence: str) -> UserError:
    return UserError(sentence, code="trial-record", field="trial")
