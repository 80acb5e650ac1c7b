"""What the judge finds: forcing counts, paired timing, verdict. Plain data, stored and shown as it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.codec import STRICT

Verdict = Literal["accepted", "slower", "lossy", "crashed", "timed out", "invalid"]


@dataclass(frozen=True)
class Divergence:
    """The first place where a candidate's text leaves stock's choice on that very prefix."""

    __pydantic_config__ = STRICT

    prompt: str  # prompt id
    position: int  # index of the emitted token, 0-based
    candidate_token: int
    stock_token: int
    logit_gap: float  # stock's logit for its own choice minus its logit for the candidate's token, >= 0
    context: str  # decoded text before it
    candidate_text: str
    stock_text: str
    near_tie: bool


@dataclass(frozen=True)
class Forcing:
    """Token forcing, scored on the candidate's own text and compared with stock's free run.

    `tie_margin` is the logit gap under which a disagreement is a near-tie, and `near_tie_limit` how many of
    them the measured noise floor allows; `floor_method` says how both were measured.
    """

    __pydantic_config__ = STRICT

    tokens: int
    exact: int
    near_tie: int
    error: int
    tie_margin: float
    near_tie_limit: int
    floor_method: str
    free_run_equal: int  # prompts whose ids, length and stop reason equal stock's free run
    free_run_prompts: int
    first: Divergence | None = None
    by_category: dict[str, tuple[int, int, int]] | None = None  # category -> exact, near-tie, error


@dataclass(frozen=True)
class Pair:
    """One paired observation: whole-generation wall seconds on the parent's clock, same prompt."""

    __pydantic_config__ = STRICT

    prompt: str
    reference_s: float
    candidate_s: float
    reference_tokens: int
    candidate_tokens: int


@dataclass(frozen=True)
class Comparison:
    """Candidate against reference. `ratio` above 1 means that the candidate is faster."""

    __pydantic_config__ = STRICT

    reference: str
    pairs: tuple[Pair, ...]
    ratio: float  # median of paired ratios
    low: float  # bootstrap interval of the median, 95 %
    high: float
    aa_sigma: float  # relative spread of reference against itself
    threshold: float  # the gain that the interval must clear: max(1 %, 2 sigma)
    candidate_tok_s: float
    reference_tok_s: float
    warmup_s: float = 0.0


@dataclass(frozen=True)
class Judgement:
    """Verdict with its reason in words and its evidence."""

    __pydantic_config__ = STRICT

    verdict: Verdict
    reason: str
    prompts: tuple[str, ...] = ()  # ids of the hidden prompts that were used, in order
    forcing: Forcing | None = None
    comparison: Comparison | None = None
    accept_length: float | None = None  # emitted tokens per verify step, bonus token included; explanatory
    seconds: float = 0.0
