"""The wire between judge and child: length-prefixed JSON frames over two pipes, and the messages in them.

A frame is four bytes (big-endian length of the body) and a UTF-8 JSON object. The judge asks, the child
answers; each question carries an unguessable number that its answer must repeat, so an answer written before
its question, or in the wrong order, is seen for what it is. Everything that comes from a child is checked here
and nowhere else; what fails a check is "invalid", whatever it was meant to say.

    question {"request": 81.., "do": "generate", "prompts": [[1, 2]], "max_new_tokens": 8, "stop_ids": [0]}
    answer   {"request": 81.., "ok": {"texts": [{"ids": [5, 0], "stop_reason": "eos"}]}}
    failure  {"request": 81.., "error": "MemoryError: ..."}

A question without "sampling" is greedy. A sampled one says {"temperature": 0.7, "seed": 9.., "requests": [3]}, a
request number for each prompt; `engine.sampling` has the rule.
"""

from __future__ import annotations

import json
import math
import os
import select
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.codec import from_json, to_json
from engine.errors import ChildError
from engine.sampling import Sampling

HEADER = struct.Struct(">I")
MAX_ANSWER_BYTES = 4 << 20
"""Largest answer that the judge reads. The largest honest one, a stage profile, is under a tenth of it."""


class Invalid(ChildError):
    """The child broke the protocol."""

    def __init__(self, reason: str) -> None:
        super().__init__("invalid", reason)


class TimedOut(ChildError):
    """The child did not answer by the deadline."""

    def __init__(self, reason: str) -> None:
        super().__init__("timed out", reason)


class Closed(Exception):
    """The other end of the pipe is gone."""


def encode_frame(message: dict[str, Any]) -> bytes:
    body = json.dumps(message, separators=(",", ":"), allow_nan=False).encode()
    return HEADER.pack(len(body)) + body


def write_frame(descriptor: int, frame: bytes, deadline: float) -> None:
    """Write all of `frame` to a non-blocking pipe. `deadline` is in `time.monotonic` seconds.

    Raises TimedOut when the reader does not drain the pipe in time, Closed when there is no reader.
    """
    view = memoryview(frame)
    poller = select.poll()
    poller.register(descriptor, select.POLLOUT)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            if not poller.poll(_milliseconds_left(deadline)):
                raise TimedOut("did not read its request in time") from None
        except BrokenPipeError:
            raise Closed from None


def read_frame(descriptor: int, deadline: float, limit: int = MAX_ANSWER_BYTES) -> dict[str, Any]:
    """Read one frame from a non-blocking pipe. `deadline` is in `time.monotonic` seconds, `limit` in bytes.

    Raises Invalid (malformed or too large), TimedOut, or Closed (end of file, also in mid-frame).
    """
    (length,) = HEADER.unpack(_read_exactly(descriptor, HEADER.size, deadline))
    if length > limit:
        raise Invalid(f"announced an answer of {length:,} bytes; {limit:,} is the limit")
    body = _read_exactly(descriptor, length, deadline)
    try:
        message = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise Invalid(f"answered with something that is not JSON: {body[:80]!r}") from None
    if not isinstance(message, dict):
        raise Invalid(f"answered with something that is not a JSON object: {body[:80]!r}")
    return message


def _read_exactly(descriptor: int, count: int, deadline: float) -> bytes:
    chunks = bytearray()
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    while len(chunks) < count:
        if not poller.poll(_milliseconds_left(deadline)):
            raise TimedOut("gave no answer in time")
        try:
            chunk = os.read(descriptor, min(count - len(chunks), 1 << 20))
        except BlockingIOError:
            continue
        if not chunk:
            raise Closed
        chunks += chunk
    return bytes(chunks)


def _milliseconds_left(deadline: float) -> float:
    return max(0.0, (deadline - time.monotonic()) * 1000.0)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


@dataclass(frozen=True)
class Text:
    """One generated text as the child gave it, checked for form but believed in nothing else.

    `steps` verify steps emitted `emitted` of its tokens: what explains the accept length, zeros where unknown.
    """

    ids: tuple[int, ...]
    stop_reason: str
    steps: int = 0
    emitted: int = 0


@dataclass(frozen=True)
class Scores:
    """Stock's view of a text of n tokens: row i belongs to the prefix that ends before token i.

    `choice[i]` is stock's own next token there, `choice_logit[i]` its logit, `token_logit[i]` the logit of the
    text's token, `second[i]` and `second_logit[i]` the runner-up; `following` is stock's choice after the text.
    """

    choice: tuple[int, ...]
    choice_logit: tuple[float, ...]
    token_logit: tuple[float, ...]
    second: tuple[int, ...]
    second_logit: tuple[float, ...]
    following: int


def printable(text: str) -> str:
    """Words of a child without control characters, directions of writing and half surrogates, in which it could hide
    or forge something, or which cannot be stored."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def unwrap(answer: dict[str, Any], request: int) -> dict[str, Any]:
    """The payload of an answer to `request`. Raises Invalid, or ChildError("crashed") for a reported failure."""
    if answer.get("request") != request or type(answer["request"]) is not int:
        raise Invalid(f"answered request {str(answer.get('request'))[:40]} when asked {request}")
    if "error" in answer:
        raise ChildError("crashed", printable(str(answer["error"])[:2000]))
    payload = answer.get("ok")
    if not isinstance(payload, dict):
        raise Invalid("gave neither a result nor an error")
    return payload


def parse_texts(payload: dict[str, Any], prompts: int, max_new_tokens: int, vocab_size: int) -> list[Text]:
    """Check a `generate` answer: one text a prompt, ids inside the vocabulary, no more of them than asked."""
    texts = payload.get("texts")
    if not isinstance(texts, list) or len(texts) != prompts:
        raise Invalid(f"gave {len(texts) if isinstance(texts, list) else 'no'} texts for {prompts} prompts")
    return [_parse_text(text, max_new_tokens, vocab_size) for text in texts]


def _parse_text(text: Any, max_new_tokens: int, vocab_size: int) -> Text:
    if not isinstance(text, dict):
        raise Invalid("gave a text that is not an object")
    ids = _ids(text.get("ids"), vocab_size)
    if not ids:
        raise Invalid("gave a text without a token")
    if len(ids) > max_new_tokens:
        raise Invalid(f"gave {len(ids)} tokens when at most {max_new_tokens} were asked for")
    steps, emitted = _step_counts(text.get("steps"), text.get("emitted"), len(ids))
    return Text(ids, printable(str(text.get("stop_reason"))[:40]), steps, emitted)


def _step_counts(steps: Any, emitted: Any, tokens: int) -> tuple[int, int]:
    """Explanatory figures are dropped, not punished, where they make no sense."""
    if type(steps) is int and type(emitted) is int and 0 < steps <= emitted <= tokens:
        return steps, emitted
    return 0, 0


def parse_scores(payload: dict[str, Any], tokens: int, vocab_size: int) -> Scores:
    """Check a `score` answer for a text of `tokens` tokens."""
    choice, second = _ids(payload.get("choice"), vocab_size), _ids(payload.get("second"), vocab_size)
    logits = [_floats(payload.get(name)) for name in ("choice_logit", "token_logit", "second_logit")]
    following = _ids([payload.get("following")], vocab_size)[0]
    if any(len(column) != tokens for column in (choice, second, *logits)):
        raise Invalid(f"scored another number of tokens than the {tokens} it was given")
    return Scores(choice, logits[0], logits[1], second, logits[2], following)


def _ids(values: Any, vocab_size: int) -> tuple[int, ...]:
    if not isinstance(values, list):
        raise Invalid("gave no list of token ids")
    for value in values:
        if type(value) is not int or not 0 <= value < vocab_size:
            raise Invalid(f"gave token id {str(value)[:40]}, outside the vocabulary of {vocab_size}")
    return tuple(values)


def _floats(values: Any) -> tuple[float, ...]:
    if not isinstance(values, list) or any(type(value) not in (int, float) for value in values):
        raise Invalid("gave no list of logits")
    result = tuple(float(value) for value in values)
    if not all(math.isfinite(value) for value in result):
        raise Invalid("gave a logit that is not a finite number")
    return result


def generate_question(
    prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_ids: Sequence[int], sampling: Sampling | None = None
) -> dict[str, Any]:
    """Greedy where there is no `sampling`, which has a request number for every prompt."""
    question = {
        "do": "generate",
        "prompts": [list(prompt) for prompt in prompts],
        "max_new_tokens": max_new_tokens,
        "stop_ids": list(stop_ids),
    }
    return question | _sampled(sampling, len(prompts))


def score_question(
    prompt: Sequence[int], text: Sequence[int], width: int, sampling: Sampling | None = None
) -> dict[str, Any]:
    """`width` rows a forward pass; 0 scores prompt and text in one pass. With `sampling`, which has one request number,
    the logits that come back are those that the choice is made of: rounded logit + temperature * noise."""
    question = {"do": "score", "prompt": list(prompt), "text": list(text), "width": width}
    return question | _sampled(sampling, 1)


def _sampled(sampling: Sampling | None, prompts: int) -> dict[str, Any]:
    if sampling is None:
        return {}
    if len(sampling.requests) != prompts:
        raise ValueError(f"{len(sampling.requests)} request numbers for {prompts} prompts")
    return {"sampling": to_json(sampling)}


def sampling_of(question: dict[str, Any]) -> Sampling | None:
    """What a question says of sampling, in the child. Raises UserError where it is malformed."""
    data = question.get("sampling")
    return None if data is None else from_json(Sampling, data, what="sampling")
