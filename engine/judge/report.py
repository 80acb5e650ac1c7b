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
    category: str = ""
    after: str = ""  # decoded text of the candidate's tokens that follow it


@dataclass(frozen=True)
class Probing:
    """What a candidate answered at prefixes where stock's two leading tokens lie close together (`probes.py`).

    A sharp prefix has a gap above the near-tie margin, up to `widest` logits: only stock's own token is right there,
    and arithmetic of lower precision flips it. A tied one has a gap inside the margin, but as large as most noise of
    stock: either token is right, but to leave stock there again and again is no accident.
    """

    __pydantic_config__ = STRICT

    sharp: int
    sharp_wrong: int
    tied: int
    tied_left: int  # tied prefixes at which the candidate took the other of the two tokens
    tied_limit: int  # how many of them an honest candidate may take
    widest: float


@dataclass(frozen=True)
class Power:
    """What the gate would have seen: with logit noise of `noise` (standard deviation) added to stock, the chance that
    this trial's tokens and probes show at least one error, or more near-ties than an honest candidate. It holds
    for a candidate that answers every question alike."""

    __pydantic_config__ = STRICT

    noise: float
    detected: float
    like: str = ""  # what has noise of this size here, in words


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
    probing: Probing | None = None
    power: tuple[Power, ...] = ()


@dataclass(frozen=True)
class Pair:
    """One paired observation: whole-generation wall seconds on the parent's clock, same prompt (or batch of them)."""

    __pydantic_config__ = STRICT

    prompt: str
    reference_s: float
    candidate_s: float
    reference_tokens: int
    candidate_tokens: int

    @property
    def ratio(self) -> float | None:
        """Seconds per token of the reference over those of the candidate; None where a side has no time or text."""
        if min(self.reference_s, self.candidate_s, self.reference_tokens, self.candidate_tokens) <= 0:
            return None
        return (self.reference_s / self.reference_tokens) / (self.candidate_s / self.candidate_tokens)


@dataclass(frozen=True)
class Conditions:
    """The state of the machine while pairs were timed."""

    __pydantic_config__ = STRICT

    void: tuple[str, ...] = ()  # why each void block was thrown away
    throttled: tuple[str, ...] = ()  # throttle reasons seen on the device, in words
    clock_mhz: tuple[int, int] | None = None  # lowest and highest clock of the device
    temperature_c: int | None = None  # highest
    power_w: float | None = None  # highest
    reference_slowdown: float | None = None  # reference beside this candidate over reference alone, seconds per token


@dataclass(frozen=True)
class Comparison:
    """Candidate against reference. `ratio` above 1 means that the candidate is faster."""

    __pydantic_config__ = STRICT

    reference: str
    pairs: tuple[Pair, ...]
    ratio: float  # median of paired ratios
    low: float  # exact interval of the median, 95 %
    high: float
    aa_sigma: float  # relative spread of reference against itself
    threshold: float  # the gain that the interval must clear: max(1 %, 2 sigma)
    candidate_tok_s: float
    reference_tok_s: float
    warmup_s: float = 0.0
    aa_ratios: tuple[float, ...] = ()  # the reference against itself, what aa_sigma was taken from
    conditions: Conditions | None = None


@dataclass(frozen=True)
class Costs:
    """Where the seconds of a trial went. `generating_s` are those in which stock, incumbent or candidate wrote texts
    that the verdict needs: the least that a trial of this effort can take."""

    __pydantic_config__ = STRICT

    start_s: float = 0.0
    warmup_s: float = 0.0
    forcing_s: float = 0.0
    timing_s: float = 0.0
    generating_s: float = 0.0


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
    costs: Costs | None = None
    record: str = ""  # file of the trial's record in the search's folder: what `judge replay` repeats
