"""The child process: holds one decoder and answers the judge's questions until the pipe closes.

Started as `python -m engine.judge.child --questions FD --answers FD --parent PID`. It imports torch only when a
backend does. Its standard output and error are a log file; only frames on the answers pipe count.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import signal
import sys
import traceback
from typing import Any

from engine.codec import from_json
from engine.deployment import Deployment
from engine.errors import UserError
from engine.judge.backends import Backend, load_backend, sampling_arguments
from engine.judge.protocol import HEADER, encode_frame
from engine.plan import Plan

PR_SET_PDEATHSIG = 1
MAX_FILE_BYTES = 1 << 30
"""A child that floods its log is stopped by the kernel, not by a full disk."""


class Server:
    """Answers questions one at a time. Whatever a backend raises becomes a failure answer, never a lost pipe.

    A child may hold several decoders by name, for stock's two baselines share one copy of the target.
    """

    def __init__(self) -> None:
        self._decoders: dict[str, Backend] = {}

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """The payload for `question`. Raises what the backend raises."""
        kind, name = question["do"], question.get("decoder", "")
        if kind == "import":
            import torch  # noqa: F401 - nearly all of a start, and what every candidate needs

            return {}
        if kind == "build":
            self._decoders[name] = self._build(question)
            return self._decoders[name].describe()
        backend = self._decoders.get(name)
        if backend is None:
            raise RuntimeError(f"asked to {kind} before build")
        if kind == "describe":
            return backend.describe()
        if kind == "generate":
            prompts, stop_ids = question["prompts"], tuple(question["stop_ids"])
            how = sampling_arguments(backend, "generate", question)
            return {"texts": backend.generate(prompts, question["max_new_tokens"], stop_ids, *how)}
        if kind == "score":
            how = sampling_arguments(backend, "score", question)
            return backend.score(question["prompt"], question["text"], question["width"], *how)
        if kind == "profile":
            return backend.profile(question["prompts"], question["max_new_tokens"], tuple(question["stop_ids"]))
        raise RuntimeError(f"unknown question {kind!r}")

    @staticmethod
    def _build(question: dict[str, Any]) -> Backend:
        plan = None if question["plan"] is None else Plan.from_json(question["plan"])
        deployment = from_json(Deployment, question["deployment"], what="deployment")
        return load_backend(question["backend"], deployment, plan, question["threads"])


def serve(questions: int, answers: int) -> None:
    """Read frames from `questions` until it closes; write one answer frame to `answers` for each."""
    server = Server()
    while (question := _read(questions)) is not None:
        message = json.loads(question)
        if message["do"] == "shutdown":
            return
        try:
            answer = {"request": message["request"], "ok": server.answer(message)}
            frame = encode_frame(answer)
        except UserError as error:
            frame = encode_frame({"request": message["request"], "error": error.sentence})
        except Exception as error:  # noqa: BLE001 - the boundary: every failure of a backend is told to the judge
            traceback.print_exc()
            frame = encode_frame({"request": message["request"], "error": f"{type(error).__name__}: {error}"})
        sys.stdout.flush()
        sys.stderr.flush()
        _write(answers, frame)


def _read(descriptor: int) -> bytes | None:
    header = _read_exactly(descriptor, HEADER.size)
    if header is None:
        return None
    (length,) = HEADER.unpack(header)
    return _read_exactly(descriptor, length)


def _read_exactly(descriptor: int, count: int) -> bytes | None:
    chunks = bytearray()
    while len(chunks) < count:
        chunk = os.read(descriptor, count - len(chunks))
        if not chunk:
            return None
        chunks += chunk
    return bytes(chunks)


def _write(descriptor: int, frame: bytes) -> None:
    view = memoryview(frame)
    while view:
        view = view[os.write(descriptor, view) :]


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when the judge dies (Linux); exit at once if it is dead already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the judge is gone")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="engine.judge.child")
    for name in ("questions", "answers", "parent"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args(argv)
    die_with_parent(options.parent)
    for limit, most in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, MAX_FILE_BYTES)):
        ceiling = resource.getrlimit(limit)[1]  # a sandbox has set its own before
        most = most if ceiling == resource.RLIM_INFINITY else min(most, ceiling)
        resource.setrlimit(limit, (most, most))
    for descriptor in (options.questions, options.answers):
        os.set_inheritable(descriptor, False)  # nothing that the candidate starts gets the pipes
    serve(options.questions, options.answers)


if __name__ == "__main__":
    main()
