"""A deployment: target + drafter + regime + platform. It is what a search tunes; it never changes in one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.codec import STRICT

Dtype = Literal["fp32", "bf16"]
DEMO_TARGET = "demo:smollm2-135m"
DEMO_DRAFTER = "demo:smollm2-135m-dflash"
NO_DRAFTER = "ngram"
SHIPPED_PROMPTS = "shipped"


@dataclass(frozen=True)
class Regime:
    """How the target is served. Lengths are counts of tokens; `batch` 1 is a single request."""

    __pydantic_config__ = STRICT

    batch: int = 1
    max_prompt_tokens: int = 512
    max_new_tokens: int = 32
    temperature: float = 0.0
    prompts: str = SHIPPED_PROMPTS  # "shipped", or the path of a JSONL file with `prompt` or `turns`


@dataclass(frozen=True)
class Deployment:
    """Names what is tuned. `target` and `drafter` are paths, or "demo:..." for what is shipped; a drafter of
    "ngram" needs no checkpoint. `platform` is "cpu" or "cuda:0". `dtype` is the deployment's choice and
    never a lever."""

    __pydantic_config__ = STRICT

    target: str = DEMO_TARGET
    drafter: str = DEMO_DRAFTER
    regime: Regime = Regime()
    platform: str = "cpu"
    dtype: Dtype = "fp32"
