"""The web tests' engine with trials of every kind, told in full: what a panel can show, hostile text included."""

from __future__ import annotations

import random
from collections.abc import Callable

from engine.judge.report import (
    Comparison,
    Conditions,
    Costs,
    Divergence,
    Forcing,
    Judgement,
    Pair,
    Power,
    Probing,
)
from engine.search import events as ev
from engine.search.events import Body
from engine.search.policy import Action
from engine.search.state import State
from tests.web import fake_engine
from tests.web.fake_engine import FakeBench, open_bench

__all__ = ["HOSTILE", "open_bench", "perform"]

HOSTILE = "<script>window.hurt = 1</script><img src=x onerror='window.hurt = 1'>"
CONTEXT = (
    "<|im_start|>user\nWrite a function that merges two sorted lists.<|im_end|>\n<|im_start|>assistant\n"
    "Here is one that walks both lists with an index each:\n\n```python\ndef merge(left, right):\n"
    "    result, i, j = [], 0, 0\n    while i < len(left) and j < len(right):\n        if left[i]"
)
AFTER = " right[j]:\n            result.append(left[i])\n            i += 1\n        else:\n"
LOG = """Traceback (most recent call last):
  File "engine/judge/child.py", line 96, in answer
    texts = backend.generate(prompts, max_new_tokens, stop_ids)
  File "engine/generate.py", line 214, in generate
    logits = self.target.verify(rows, cache, tree=tree)
RuntimeError: shape '[1, 9, 64]' is invalid for input of size 1152"""


def perform(action: Action, state: State, bench: FakeBench, emit: Callable[[Body], None]) -> None:
    if action.kind != "trial":
        fake_engine.perform(action, state, bench, emit)
        return
    number, attempt = action.data["trial"], action.data["attempt"]
    emit(ev.TrialStarted(number, bench.worker, attempt))
    emit(ev.TrialProgress(number, "token forcing 3/8"))
    fake_engine._hold(number, attempt)
    emit(ev.TrialJudged(number, judgement(number, action.data["kind"], random.Random(f"{state.seed}/{number}"))))


def judgement(number: int, kind: str, draw: random.Random) -> Judgement:
    """Trials 1 to 7 are lossy, slower, crashed, lossy with hostile text, timed out, accepted, and lossy by an early
    end; the search proposes all of them in its first round."""
    costs = Costs(3.1, 2.4, 9.8, 21.5, 29.9)
    prompts = tuple(f"{group}-{n:02d}" for group in ("chat", "code", "math") for n in range(1, 9))
    if kind == "baseline":
        return Judgement("accepted", "24.1 tokens/s alone; lossless on 1152 tokens.", prompts[:8], forcing(), None, 2.4,
                         31.0, costs)  # fmt: skip
    if kind != "candidate":
        return timed("accepted", 3.4, draw, prompts, costs)  # far enough from 1 for a logarithmic axis
    match number:
        case 1:
            first = Divergence("code-03", 41, 6072, 2067, 0.0837, CONTEXT, " <\u200b", " <=", False, "code", AFTER)
            found = forcing(3, 1, first)
            reason = (
                "3 of 1152 tokens differ from stock beyond its noise; first at prompt code-03, token 42: ' <' where "
                "stock has ' <=', 0.0837 logits apart (near-ties end at 9.3e-05)."
            )
            return Judgement("lossy", reason, prompts[:8], found, None, 2.6, 17.2, Costs(3.0, 2.2, 10.6, 0.0, 13.0),
                             "trial-1.json")  # fmt: skip
        case 2:
            return timed("slower", 0.962, draw, prompts, costs)
        case 3:
            reason = f"The candidate failed: {HOSTILE}\nLast log lines:\n{LOG}\n{HOSTILE}"
            return Judgement("crashed", reason, seconds=6.4)
        case 4:
            first = Divergence(
                "chat-01", 3, 7, 9, 1.5, f"{HOSTILE}\x07\u202e", HOSTILE, "\n\n", False, HOSTILE, HOSTILE
            )
            reason = f"1 of 1152 tokens differ from stock beyond its noise: {HOSTILE}"
            return Judgement("lossy", reason, (HOSTILE,), forcing(1, 0, first), None, 2.2, 15.0)
        case 5:
            return Judgement("timed out", "The candidate did not answer in time (120 s).", prompts[:2], seconds=124.0)
        case 6:
            return timed("accepted", 1.184, draw, prompts, costs)
        case _:
            words = "it ends after 31 of 48 tokens without an end of text"
            first = Divergence("math-04", 31, -1, 25, 0.0, "So the answer is", words, " 42", False, "math")
            reason = f"1 of 1152 tokens differ from stock beyond its noise; first at prompt math-04, token 32: {words}."
            return Judgement("lossy", reason, prompts[:8], forcing(1, 0, first), None, 2.2, 15.0)


def forcing(error: int = 0, near_tie: int = 1, first: Divergence | None = None) -> Forcing:
    return Forcing(
        tokens=1152,
        exact=1152 - error - near_tie,
        near_tie=near_tie,
        error=error,
        tie_margin=9.3e-5,
        near_tie_limit=4,
        floor_method="stock's own text scored in one pass and at widths 1, 4, 9: largest difference 2.3e-05 and 1 "
        "changed choice in 4608 positions; margin 4 times that",
        free_run_equal=8 - min(error, 2),
        free_run_prompts=8,
        first=first,
        by_category={
            "chat": (384, 0, 0),
            "code": (384 - error - near_tie, near_tie, error),
            "math": (384, 0, 0),
        },
        probing=Probing(64, min(error, 2), 24, 3, 13, 0.05),
        power=(Power(1e-4, 0.62, "fp32 sums in another order, ten times over"), Power(4e-3, 0.9997, "bf16 arithmetic")),
    )


def timed(verdict: str, ratio: float, draw: random.Random, prompts: tuple[str, ...], costs: Costs) -> Judgement:
    """Twelve pairs around `ratio`, as the judge reports them."""
    pairs = []
    for prompt in prompts[8:20]:
        reference, tokens = draw.uniform(1.6, 2.3), draw.randint(40, 48)
        pairs.append(Pair(prompt, reference, reference / (ratio * draw.gauss(1, 0.012)), tokens, tokens))
    ordered = sorted(pair.ratio for pair in pairs if pair.ratio)
    middle = (ordered[5] + ordered[6]) / 2
    comparison = Comparison(
        reference="the incumbent",
        pairs=tuple(pairs),
        ratio=middle,
        low=ordered[3],
        high=ordered[8],
        aa_sigma=0.0061,
        threshold=0.0122,
        candidate_tok_s=24.1 * middle,
        reference_tok_s=24.1,
        warmup_s=2.4,
        aa_ratios=tuple(draw.gauss(1, 0.008) for _ in range(8)),
        conditions=Conditions(
            void=("another process used 1.4 of 2 cores",) * 2,
            throttled=("power cap",),
            clock_mhz=(1710, 1980),
            temperature_c=61,
            power_w=412.0,
            reference_slowdown=1.004,
        ),
    )
    reason = f"{middle:.2f}x the incumbent (95 % interval {ordered[3]:.2f} to {ordered[8]:.2f}; a gain must clear 1.01)"
    if verdict == "accepted":
        reason += "; lossless on 1152 tokens."
        return Judgement("accepted", reason, prompts, forcing(), comparison, 2.7, 38.6, costs, "trial-6.json")
    return Judgement("slower", reason, prompts, forcing(), comparison, 2.5, 38.6, costs, "trial-2.json")
