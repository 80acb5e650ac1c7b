"""What a child can hold: one protocol for our engine, for stock, and for any other server.

A backend is made by `build(deployment, plan, threads)`. Built in are "engine" and the stock ones of
`stock.py`; "path/to/file.py:function" and "package.module:function" name others.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from engine.codec import to_json
from engine.deployment import Deployment
from engine.errors import UserError
from engine.judge.protocol import sampling_of
from engine.plan import Plan
from engine.sampling import Sampling

Build = Callable[[Deployment, Plan | None, int], "Backend"]

BUILT_IN = {
    "engine": "engine.judge.backends:build_engine",
    "transformers": "engine.judge.stock:build_autoregressive",
    "transformers-lookup": "engine.judge.stock:build_lookup",
    "transformers-assisted": "engine.judge.stock:build_assisted",
    "dflash": "engine.judge.stock:build_dflash",
}


class Backend(Protocol):
    """A decoder behind the judge's protocol. All results are JSON-ready.

    `sampling` is given for a sampled question only, so a backend that decodes greedily may leave it out of its
    signatures; it then answers sampled questions with "does not sample".
    """

    def describe(self) -> dict[str, Any]:
        """At least `implementation`: name and version of what decodes here, in words."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        stop_ids: tuple[int, ...],
        sampling: Sampling | None = None,
    ) -> list[dict[str, Any]]:
        """Continuation of each prompt: {"ids", "stop_reason": "eos" | "length"} and, where known, `steps` verify
        steps that emitted `emitted` of the ids. An id of `stop_ids` ends a text and belongs to it. Greedy without
        `sampling`, which has a request number for each prompt."""

    def score(
        self, prompt: Sequence[int], text: Sequence[int], width: int, sampling: Sampling | None = None
    ) -> dict[str, Any]:
        """Stock only: the columns of `protocol.Scores`, computed `width` rows a pass (0: all in one pass). With
        `sampling`, of one request, the logits are those that the choice is made of: logit + temperature * noise."""

    def profile(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_ids: tuple[int, ...]
    ) -> dict[str, Any]:
        """Our engine only: `engine.roofline.StageProfile` as JSON, at the temperature of the deployment."""


class NotOffered:
    """Refusals of the questions that only some backends answer."""

    def score(
        self, prompt: Sequence[int], text: Sequence[int], width: int, sampling: Sampling | None = None
    ) -> dict[str, Any]:
        raise NotImplementedError(f"{type(self).__name__} does not score")

    def profile(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_ids: tuple[int, ...]
    ) -> dict[str, Any]:
        raise NotImplementedError(f"{type(self).__name__} has no stage profile")


def sampling_arguments(backend: Backend, method: str, question: dict[str, Any]) -> tuple[Sampling, ...]:
    """What `method` ("generate" or "score") gets of a question beyond what a greedy one has. Raises
    NotImplementedError where the backend takes no sampling: it must not answer greedily instead."""
    sampling = sampling_of(question)
    if sampling is None:
        return ()
    try:
        inspect.signature(getattr(backend, method)).bind((), (), (), sampling)
    except TypeError:
        raise NotImplementedError(f"{type(backend).__name__} does not sample") from None
    return (sampling,)


def is_ours(name: str) -> bool:
    """Whether a backend is one of this package's: built in, or a module of it by name."""
    place = BUILT_IN.get(name, name).rpartition(":")[0]
    return not place.endswith(".py") and place.split(".")[0] == "engine"


def load_backend(name: str, deployment: Deployment, plan: Plan | None, threads: int) -> Backend:
    """Build the backend of that name. `threads` CPU threads, unless the plan says otherwise."""
    return _find(BUILT_IN.get(name, name))(deployment, plan, threads)


def _find(reference: str) -> Build:
    place, _, function = reference.rpartition(":")
    if not place:
        known = ", ".join(BUILT_IN)
        raise UserError(f"Unknown backend {reference!r}; known are {known}, or file.py:function.", code="backend")
    module = _module_from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    build: Build = getattr(module, function)
    return build


def _module_from_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UserError(f"Cannot load a backend from {path}.", code="backend")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def stop_reason(ids: Sequence[int], stop_ids: Sequence[int]) -> str:
    """What the ids themselves say: a text that ends in a stop id stopped there, any other at its length limit."""
    return "eos" if ids and ids[-1] in stop_ids else "length"


class EngineBackend(NotOffered):
    """Our decoder with a plan."""

    def __init__(self, deployment: Deployment, plan: Plan) -> None:
        from engine.generate import build_decoder

        self._decoder = build_decoder(deployment, plan)
        self._temperature = deployment.regime.temperature

    def describe(self) -> dict[str, Any]:
        import torch

        return {
            "implementation": "SpecPilot engine",
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "batch": "prompts of one question are decoded one after another",
            "sampling": "with the question's noise",
        }

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        stop_ids: tuple[int, ...],
        sampling: Sampling | None = None,
    ) -> list[dict[str, Any]]:
        from engine.generate import StopRule

        stop = StopRule(stop_ids)
        results = []
        for number, prompt in enumerate(prompts):
            how = None if sampling is None else sampling.one(number)
            text = self._decoder.generate(prompt, max_new_tokens, stop, sampling=how)
            steps = text.emitted_per_step
            results.append(
                {"ids": text.ids, "stop_reason": text.stop_reason, "steps": len(steps), "emitted": sum(steps)}
            )
        return results

    def profile(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_ids: tuple[int, ...]
    ) -> dict[str, Any]:
        from engine.generate import StopRule
        from engine.profile import measure

        profile = measure(
            self._decoder,
            [list(prompt) for prompt in prompts],
            StopRule(stop_ids),
            max_new_tokens,
            temperature=self._temperature,
        )
        result: dict[str, Any] = to_json(profile)
        return result


def build_engine(deployment: Deployment, plan: Plan | None, threads: int) -> Backend:
    import torch

    if plan is None:
        raise UserError("The engine needs a plan.", code="backend", field="plan")
    torch.set_num_threads(threads)  # before the engine is imported: its default is what it finds
    return EngineBackend(deployment, plan)
