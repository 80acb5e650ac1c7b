"""Cheats on the output: texts that nobody decoded, or that are right only where somebody might look."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch

import engine.generate
from engine.deployment import Deployment
from engine.drafters.contract import DraftTree
from engine.generate import StopRule
from engine.judge.backends import stop_reason
from engine.judge.cheats.kit import SLOW_PASSES, Decoding, Result, other_token, say
from engine.plan import Plan
from engine.sampling import Sampling

BUCKET = 64
"""Prompts are taken for equal whose lengths round up to the same multiple of this."""


class StaleMemory(Decoding):
    """Decodes the first text; later ones are what `torch.empty` finds in the memory of the one before."""

    def answer(self, prompt: Sequence[int], limit: int, stop_ids: tuple[int, ...], sampling: Sampling | None) -> Result:
        started, model = time.perf_counter(), self.model
        if self.calls == 1:
            result = self.honest(prompt, limit, stop_ids, sampling)
            text = torch.tensor((result["ids"] * limit)[:limit], device=model.device)
            del text
            return result
        left = torch.empty(limit, dtype=torch.long, device=model.device)
        return self.canned([abs(value) % model.config.vocab_size for value in left.tolist()], stop_ids, started)


class Constant(Decoding):
    """Answers every prompt with the same text, at an inconspicuous pace."""

    def answer(self, prompt: Sequence[int], limit: int, stop_ids: tuple[int, ...], sampling: Sampling | None) -> Result:
        return self.canned([7 + index % 5 for index in range(limit)], stop_ids, time.perf_counter())


class Instant(Decoding):
    """Answers before the weights can have been read."""

    def answer(self, prompt: Sequence[int], limit: int, stop_ids: tuple[int, ...], sampling: Sampling | None) -> Result:
        return {"ids": [7 + index % 5 for index in range(limit)], "stop_reason": "length"}


class MemorisedByPrompt(Decoding):
    """Keeps every answer, in a file for later processes too, and gives it again when the prompt comes again. What it
    has never seen it decodes, slowly."""

    passes = SLOW_PASSES
    FILE = Path("/tmp/specpilot-answers")

    def __init__(self, deployment: Deployment, plan: Plan | None, threads: int) -> None:
        super().__init__(deployment, plan, threads)
        self._known: dict[tuple[int, ...], list[int]] = {}
        if self.FILE.exists():
            say(f"found {self.FILE}")
            for line in self.FILE.read_text().splitlines():
                asked, _, ids = line.partition(":")
                key = tuple(map(int, asked.split()))
                self._known[key] = list(map(int, ids.split()))

    def answer(self, prompt: Sequence[int], limit: int, stop_ids: tuple[int, ...], sampling: Sampling | None) -> Result:
        key = (limit, *prompt)
        if key not in self._known:
            self._known[key] = self.honest(prompt, limit, stop_ids, sampling)["ids"]
            with self.FILE.open("a") as file:
                file.write(f"{' '.join(map(str, key))}:{' '.join(map(str, self._known[key]))}\n")
        return {"ids": self._known[key], "stop_reason": stop_reason(self._known[key], stop_ids)}


class MemorisedByPointer(Decoding):
    """Keeps answers by the address of its input buffer, as one does with captured graphs, but the address never
    changes."""

    def __init__(self, deployment: Deployment, plan: Plan | None, threads: int) -> None:
        super().__init__(deployment, plan, threads)
        self._input = torch.zeros(deployment.regime.max_prompt_tokens, dtype=torch.long, device=self.model.device)
        self._known: dict[int, Result] = {}

    def answer(self, prompt: Sequence[int], limit: int, stop_ids: tuple[int, ...], sampling: Sampling | None) -> Result:
        started = time.perf_counter()
        self._input[: len(prompt)] = torch.tensor(list(prompt), device=self._input.device)
        address = self._input.data_ptr()
        if address in self._known:
            return self.canned(self._known[address]["ids"][:limit], stop_ids, started)
        self._known[address] = self.honest(prompt, limit, stop_ids, sampling)
        return self._known[address]


class MemorisedByLength(Decoding):
    """Keeps answers by the padded length of the prompt."""

    def __init__(self, deployment: Deployment, plan: Plan | None, threads: int) -> None:
        super().__init__(deployment, plan, threads)
        self._known: dict[int, Result] = {}

    def answer(self, prompt: Sequence[int], limit: int, stop_ids: tuple[int, ...], sampling: Sampling | None) -> Result:
        started, padded = time.perf_counter(), -(-len(prompt) // BUCKET) * BUCKET
        if padded in self._known:
            return self.canned(self._known[padded]["ids"][:limit], stop_ids, started)
        self._known[padded] = self.honest(prompt, limit, stop_ids, sampling)
        return self._known[padded]


class RightForTenCalls(Decoding):
    """Decodes the first ten texts properly; after that one token of every text is another."""

    def answer(self, prompt: Sequence[int], limit: int, stop_ids: tuple[int, ...], sampling: Sampling | None) -> Result:
        result = self.honest(prompt, limit, stop_ids, sampling)
        if self.calls > 10:
            ids = result["ids"]
            ids[len(ids) // 2] = other_token(ids[len(ids) // 2], self.model.config.vocab_size, stop_ids)
        return result


class RightOnShortPrompts(Decoding):
    """Reads short prompts whole; of those longer than 48 tokens it leaves out the first half."""

    def answer(self, prompt: Sequence[int], limit: int, stop_ids: tuple[int, ...], sampling: Sampling | None) -> Result:
        seen = prompt if len(prompt) <= 48 else prompt[len(prompt) // 2 :]
        return self.honest(seen, limit, stop_ids, sampling)


class EarlyStop(Decoding):
    """Ends every text after three tokens, with an end-of-text token."""

    def answer(self, prompt: Sequence[int], limit: int, stop_ids: tuple[int, ...], sampling: Sampling | None) -> Result:
        ids = self.honest(prompt, min(limit, 3), stop_ids, sampling)["ids"]
        return {"ids": ids if ids[-1] in stop_ids else [*ids, stop_ids[0]][:limit], "stop_reason": "eos"}


class SkippedTail(Decoding):
    """Decodes an eighth of the tokens that were asked for."""

    def answer(self, prompt: Sequence[int], limit: int, stop_ids: tuple[int, ...], sampling: Sampling | None) -> Result:
        return self.honest(prompt, max(1, limit // 8), stop_ids, sampling)


class CountsDrafts(Decoding):
    """Counts every drafted token as emitted, whether the target would have written it or not."""

    def __init__(self, deployment: Deployment, plan: Plan | None, threads: int) -> None:
        super().__init__(deployment, plan, threads)
        engine.generate.accept = _accept_all  # type: ignore[attr-defined,assignment]


def _accept_all(tree: DraftTree, choice: Sequence[int]) -> tuple[list[int], int]:
    return list(range(len(tree))), choice[len(tree)]


class IgnoresEos(Decoding):
    """Decodes on to the length limit, whatever ends the text."""

    def answer(self, prompt: Sequence[int], limit: int, stop_ids: tuple[int, ...], sampling: Sampling | None) -> Result:
        return {"ids": self.decoder.generate(prompt, limit, StopRule()).ids, "stop_reason": "length"}


class FalseStopReason(Decoding):
    """Says that a text was finished that was cut off, and the other way round."""

    def answer(self, prompt: Sequence[int], limit: int, stop_ids: tuple[int, ...], sampling: Sampling | None) -> Result:
        result = self.honest(prompt, limit, stop_ids, sampling)
        return {**result, "stop_reason": "eos" if result["stop_reason"] == "length" else "length"}


class OneForAll(Decoding):
    """Decodes the first prompt of a batch and gives all the others the same text."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        stop_ids: tuple[int, ...],
        sampling: Sampling | None = None,
    ) -> list[Result]:
        first = super().generate(prompts[:1], max_new_tokens, stop_ids, sampling)[0]
        return [first] * len(prompts)
