"""The judge's workbench: what the command line and the web's worker drive.

It owns the prompts, stock's tokens, the clock and the verdict, and the child processes that hold the decoders
(`seats.py`). Children stay between calls: stock, the incumbent, and a candidate that has won.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal

from engine.codec import from_json, to_json
from engine.deployment import Deployment
from engine.drafters.reference import DrafterKind, open_drafter
from engine.hardware import HardwareProfile, probe
from engine.judge import bench, forcing
from engine.judge.bench import ReadLimit
from engine.judge.effort import Effort
from engine.judge.forcing import Scored
from engine.judge.hidden import HiddenPrompt, Material, draw, prepare
from engine.judge.process import ChildFailed
from engine.judge.reference import STOCK, Reference
from engine.judge.report import Comparison, Judgement, Pair, Verdict
from engine.judge.seats import CANDIDATE, Reply, Seat, Seats, accept_length
from engine.judge.store import Store
from engine.levers import usable_cores
from engine.plan import Plan
from engine.roofline import StageProfile, profiled_event
from engine.search.events import IncumbentChanged, Profiled, StockMeasured
from engine.weights import open_checkpoint

SPECULATIVE = "stock speculative"
INCUMBENT = "incumbent"
OWN = "own autoregressive"
BACKENDS: dict[DrafterKind, dict[str, str]] = {
    "none": {STOCK: "transformers", SPECULATIVE: "transformers-lookup"},
    "dflash": {STOCK: "transformers", SPECULATIVE: "dflash"},
    "draft_model": {STOCK: "transformers", SPECULATIVE: "transformers-assisted"},
}
"""Stock by kind of drafter: plain generation, and the released speculative implementation for that drafter."""
FIRST_REPEATS = 4
"""A/A repeats that the first comparison of a search waits for."""
WARMUP_TOKENS = 8


@dataclass
class _Trial:
    """What one trial has gathered so far."""

    plan: Plan
    number: int
    fresh: int
    prompts: list[HiddenPrompt] = field(default_factory=list)
    replies: list[tuple[HiddenPrompt, Reply]] = field(default_factory=list)
    scored: list[Scored] = field(default_factory=list)
    warmup_s: float = 0.0

    @property
    def accept_length(self) -> float | None:
        """Tokens emitted per verify step over all answers, as the candidate counts them: it explains, no more."""
        return accept_length([reply for _, reply in self.replies])


class Workbench:
    """Judges plans of one deployment. Use as a context manager, or call `close`.

    `folder` is the search's: it gets children's logs and the judge's own cache. `seed` decides which prompts a trial
    sees. `progress` is told each phase in a few words; what it raises ends the call (a shell cancels that way).

    The rest is for other servers and for tests: `material` replaces what is read from the deployment, `backend_for`
    names the backend that runs a plan, `stock` those of the two baselines, `read_limit` the physical floor of a
    target pass (None: from the kept probe of this device).

    Every method raises ChildFailed where stock, the incumbent or our own engine fails; the same call may be tried
    again. A candidate that fails is a verdict.
    """

    def __init__(
        self,
        deployment: Deployment,
        folder: Path,
        seed: int,
        progress: Callable[[str], None],
        *,
        effort: Effort | None = None,
        material: Material | None = None,
        backend_for: Callable[[Plan], str] = lambda plan: "engine",
        stock: Mapping[str, str] | None = None,
        read_limit: ReadLimit | None = None,
    ) -> None:
        self.deployment = deployment
        self.effort = effort or Effort()
        self.material = material or prepare(deployment)
        self.seed = seed
        self._progress = progress
        self._backend_for = backend_for
        self._backends = stock or BACKENDS[self.material.drafter_kind]
        self._read_limit = read_limit
        self._max_new_tokens = deployment.regime.max_new_tokens
        threads = usable_cores()
        self._seats = Seats(deployment, self.material, threads, folder, self.effort.children, self.effort.timeouts)
        self._store = Store(folder, {"deployment": to_json(deployment), "threads": threads})
        self._reference = Reference(
            deployment, self.material, self.effort, seed, self._seats, self._store, self._backends[STOCK], progress
        )
        if self.material.left_out:
            progress(f"{self.material.left_out} prompts are longer than max_prompt_tokens and are left out")

    def __enter__(self) -> Workbench:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill every child. The workbench can be used again afterwards."""
        self._seats.close()

    def measure_stock(self, name: Literal["autoregressive", "speculative"] | str) -> StockMeasured:
        """Time an untouched baseline alone, after a short warm-up, on a few prompts."""
        self._progress("starting stock")
        seat = self._reference.seat() if name == "autoregressive" else self._speculative()
        prompts = self._reference.solo_prompts()
        seat.generate(prompts[0].ids, WARMUP_TOKENS)
        replies = []
        for number, prompt in enumerate(prompts, start=1):
            self._progress(f"timing stock {number}/{len(prompts)}")
            reply = seat.generate(prompt.ids, self._max_new_tokens)
            replies.append(reply)
            if name == "autoregressive":
                self._reference.keep(prompt, reply.text)
        samples = tuple(reply.tok_s for reply in replies)
        return StockMeasured(name, seat.implementation, statistics.median(samples), samples, accept_length(replies))

    def profile(self, plan: Plan, round: int, hardware: HardwareProfile) -> Profiled:
        """Stage times and gaps of a plan, measured inside its child. They explain; they decide nothing."""
        self._progress("profiling")
        prompts = draw(self.material.prompts, self.seed, round, self.effort.profile_prompts, "profile")
        payload = self._incumbent(plan).profile([prompt.ids for prompt in prompts], self._max_new_tokens)
        measured = from_json(StageProfile, payload, what="the stage profile")
        target, drafter = open_checkpoint(self.deployment.target), open_drafter(self.deployment.drafter)
        return profiled_event(measured, target.config, drafter.config, plan, self.deployment.dtype, hardware, round)

    def judge(self, trial: int, plan: Plan, incumbent: Plan | None, *, fresh: int) -> Judgement:
        """Judge `plan` on hidden prompts: token forcing, then timing against `incumbent` on the same prompts, whose
        texts are forced too. Without an incumbent the plan is forced and timed alone.

        `fresh` numbers the draw of prompts: two numbers get different prompts as long as there are enough. The
        prompts of trial `trial` are thus known from seed, `fresh` and effort, and told in the judgement.
        """
        start = time.perf_counter()
        work = _Trial(plan, trial, fresh, draw(self.material.prompts, self.seed, fresh, self.effort.drawn))
        accepted = False
        try:
            judgement = self._judge(work, incumbent)
            accepted = judgement.verdict == "accepted"
        except ChildFailed as failure:
            if failure.role != CANDIDATE:
                raise
            judgement = Judgement(_verdict(failure), failure.reason)
        finally:
            if accepted:
                self._seats.move(CANDIDATE, _key(plan), INCUMBENT)
            else:
                self._seats.dismiss(CANDIDATE)
        return dataclasses.replace(
            judgement,
            prompts=tuple(dict.fromkeys(prompt.id for prompt, _ in work.replies)),
            accept_length=work.accept_length,
            seconds=time.perf_counter() - start,
        )

    def standing(self, plan: Plan, trial: int, over_incumbent: float, final: bool) -> IncumbentChanged:
        """A new incumbent side by side with stock autoregressive decoding; the closing one (`final`), on more prompts,
        also with stock speculative decoding and with our own autoregressive decoding."""
        own = autoregressive(plan) if final and plan.source != "none" else None
        count = self.effort.final_pairs if final else self.effort.standing_pairs
        warm, *prompts = draw(self.material.prompts, self.seed, trial, count + 1, "closing" if final else "standing")
        self._progress("starting stock")
        needed = {STOCK, _key(plan), *([_key(own)] if own else [])}
        seats = [self._incumbent(plan, needed), self._reference.seat()]
        if final:
            seats.append(self._speculative())
        if own:
            seats.append(self._seats.get(_key(own)) or self._start(_key(own), OWN, own, needed))
        for seat in seats:
            seat.generate(warm.ids, WARMUP_TOKENS)

        def side(seat: Seat) -> Callable[[tuple[int, HiddenPrompt]], Reply]:
            def ask(numbered: tuple[int, HiddenPrompt]) -> Reply:
                self._progress(f"timing side by side {numbered[0]}/{count}: {seat.name}")
                return seat.generate(numbered[1].ids, self._max_new_tokens)

            return ask

        rounds = bench.run_rounds(list(enumerate(prompts, start=1)), [side(seat) for seat in seats])
        for prompt, replies in zip(prompts, rounds, strict=True):
            self._reference.keep(prompt, replies[1].text)
        self._recheck([(prompt, replies[0]) for prompt, replies in zip(prompts, rounds, strict=True)])
        over = [
            self._summary(seat.implementation, trial, prompts, [(replies[i], replies[0]) for replies in rounds])
            for i, seat in enumerate(seats)
            if i > 0
        ]
        if own:
            over[2] = dataclasses.replace(over[2], reference="our own autoregressive decoding with the same plan")
            self._seats.dismiss(_key(own))
        return IncumbentChanged(
            trial=trial,
            plan=plan,
            over_incumbent=over_incumbent,
            over_autoregressive=over[0],
            over_speculative=over[1] if final else None,
            over_own_autoregressive=over[2] if own else None,
            final=final,
        )

    def _judge(self, work: _Trial, incumbent: Plan | None) -> Judgement:
        self._progress("start-up")
        stock = self._reference.seat()
        stock.ready()
        rival = None if incumbent is None else self._incumbent(incumbent, {STOCK, _key(work.plan)})
        candidate, started = self._candidate(work.plan, incumbent)
        to_force, to_time = work.prompts[: self.effort.forcing_prompts], work.prompts[self.effort.forcing_prompts :]
        for prompt in to_force:  # while the candidate builds
            self._reference.free_run(prompt)
        floor = self._reference.floor()
        candidate.ready()

        for number, prompt in enumerate(to_force, start=1):
            self._progress(f"token forcing {number}/{len(to_force)}")
            self._answer(work, candidate, prompt)
            if number == 1 and started is not None:
                work.warmup_s = time.perf_counter() - started
        work.scored = [self._reference.scored(prompt, reply.text) for prompt, reply in work.replies]
        found = forcing.report(work.scored, floor, self.material.stop_ids, self.material.decode)
        if objection := forcing.objection(found):
            return Judgement("lossy", objection, forcing=found)

        comparison = None
        if rival is None:
            sentence = self._time_alone(work, candidate, to_time[: self.effort.solo])
        else:
            rule = self.effort.rule
            spare = draw(self.material.prompts, self.seed, work.fresh, rule.most - rule.pairs, "undecided")
            comparison = self._compare(work, candidate, rival, [*to_time[: rule.pairs], *spare])
            sentence = _sentence(comparison)
            if not bench.is_gain(comparison):
                return Judgement("slower", sentence, forcing=found, comparison=comparison)
        self._progress("scoring the timed texts")
        timed = work.replies[len(to_force) :]
        work.scored += [self._reference.scored(prompt, reply.text) for prompt, reply in timed]
        found = forcing.report(work.scored, floor, self.material.stop_ids, self.material.decode)
        if objection := forcing.objection(found):
            return Judgement("lossy", objection, forcing=found, comparison=comparison)
        return Judgement("accepted", f"{sentence}; lossless on {found.tokens} tokens.", (), found, comparison)

    def _time_alone(self, work: _Trial, candidate: Seat, prompts: Sequence[HiddenPrompt]) -> str:
        """Each prompt twice: the first times are the plan's, and their ratios to the second are this device's A/A."""
        first, repeats = [], []
        for number, prompt in enumerate(prompts, start=1):
            self._progress(f"timing {number}/{len(prompts)}")
            first.append(self._answer(work, candidate, prompt))
            repeats.append(bench.log_ratio(_pair("", first[-1], self._answer(work, candidate, prompt))))
        self._store.keep_repeats(repeats)
        return f"{statistics.median(reply.tok_s for reply in first):.1f} tokens/s alone"

    def _compare(self, work: _Trial, candidate: Seat, rival: Seat, prompts: Sequence[HiddenPrompt]) -> Comparison:
        """Timed pairs in ABBA order. On its first prompts the rival answers twice in a row: these are its A/A. They lie
        as close in time as a pair does, so a drift of the machine widens neither."""
        seed, rule = self._bootstrap_seed(work.number), self.effort.rule
        rival.generate(work.prompts[0].ids, WARMUP_TOKENS)
        count = max(self.effort.repeats, FIRST_REPEATS - len(self._store.repeats))
        repeats: list[float] = []

        def ask_rival(prompt: HiddenPrompt) -> Reply:
            first = rival.generate(prompt.ids, self._max_new_tokens)
            if len(repeats) >= count:
                return first
            second = rival.generate(prompt.ids, self._max_new_tokens)
            repeats.append(bench.log_ratio(_pair("", first, second)))
            # The answer beside the candidate's turn counts: the rival goes first in rounds 1, 3, ...
            return second if len(repeats) % 2 == 1 else first

        def ask_candidate(prompt: HiddenPrompt) -> Reply:
            return self._answer(work, candidate, prompt)

        def stop(rounds: list[list[Reply]]) -> bool:
            self._progress(f"timing {len(rounds)}/{rule.pairs if len(rounds) <= rule.pairs else rule.most}")
            ratios = [bench.ratio(_pair("", one, other)) for one, other in rounds]
            return bench.finished(ratios, [*self._store.repeats, *repeats], rule, seed)

        rounds = bench.run_rounds(prompts, [ask_rival, ask_candidate], stop)
        self._store.keep_repeats(repeats)
        return self._summary(
            "the incumbent", work.number, prompts, [(one, other) for one, other in rounds], work.warmup_s
        )

    def _summary(
        self,
        reference: str,
        trial: int,
        prompts: Sequence[HiddenPrompt],
        rounds: Sequence[tuple[Reply, Reply]],
        warmup_s: float = 0.0,
    ) -> Comparison:
        pairs = [_pair(prompt.id, *both) for prompt, both in zip(prompts, rounds, strict=False)]
        return bench.summarise(reference, pairs, self._store.repeats, self._bootstrap_seed(trial), warmup_s)

    def _answer(self, work: _Trial, candidate: Seat, prompt: HiddenPrompt) -> Reply:
        """Ask the candidate. Raises ChildFailed for an answer that came sooner than the device can read the weights."""
        reply = candidate.generate(prompt.ids, self._max_new_tokens)
        work.replies.append((prompt, reply))
        draft_tokens = work.plan.draft_tokens if work.plan.source != "none" else 0
        least = self._limit().seconds(len(reply.text.ids), draft_tokens)
        if reply.seconds < least:
            raise ChildFailed(
                "invalid",
                f"The candidate gave {len(reply.text.ids)} tokens in {reply.seconds * 1e3:.1f} ms; reading the weights "
                f"as often as that takes {least * 1e3:.1f} ms on this device. The time or the text is not real.",
                CANDIDATE,
            )
        return reply

    def _recheck(self, answers: Sequence[tuple[HiddenPrompt, Reply]]) -> None:
        """Force an incumbent's timed texts once more. Raises ChildFailed where one is not lossless."""
        scored = [self._reference.scored(prompt, reply.text) for prompt, reply in answers]
        found = forcing.report(scored, self._reference.floor(), self.material.stop_ids, self.material.decode)
        if objection := forcing.objection(found):
            raise ChildFailed("invalid", f"The incumbent is not lossless: {objection}", INCUMBENT)

    def _limit(self) -> ReadLimit:
        if self._read_limit is None:
            here = probe(self.deployment.platform, self.deployment.dtype)
            self._read_limit = ReadLimit.from_probe(self.material.read_bytes, here.llc_bytes, here.read_gb_s)
        return self._read_limit

    def _candidate(self, plan: Plan, incumbent: Plan | None) -> tuple[Seat, float | None]:
        """The candidate's child and when it was started; None where it is one that has won before."""
        needed = {STOCK, CANDIDATE, *([_key(incumbent)] if incumbent else [])}
        if plan != incumbent and self._seats.get(_key(plan)) is not None:
            self._seats.move(_key(plan), CANDIDATE, CANDIDATE)
            seat = self._seats.get(CANDIDATE)
            if seat is not None:
                return seat, None
        return self._start(CANDIDATE, CANDIDATE, plan, needed), time.perf_counter()

    def _incumbent(self, plan: Plan, needed: set[str] | None = None) -> Seat:
        return self._seats.get(_key(plan)) or self._start(_key(plan), INCUMBENT, plan, needed or {STOCK})

    def _speculative(self) -> Seat:
        """Stock's speculative decoder, in the same child as the plain one: they share the target's weights."""
        stock = self._reference.seat()
        return self._seats.get(SPECULATIVE) or self._seats.start_beside(stock, SPECULATIVE, self._backends[SPECULATIVE])

    def _start(self, key: str, role: str, plan: Plan, needed: set[str]) -> Seat:
        return self._seats.start(key, role, self._backend_for(plan), plan, needed)

    def _bootstrap_seed(self, trial: int) -> int:
        return zlib.crc32(f"{self.seed}:{trial}".encode())


def autoregressive(plan: Plan) -> Plan:
    """The same compute levers without drafts."""
    return dataclasses.replace(plan, source="none", tree_rows=0, ngram_candidates=1, verify_widths="exact")


def _key(plan: Plan) -> str:
    return f"plan:{plan.digest}"


def _pair(prompt: str, reference: Reply, candidate: Reply) -> Pair:
    return Pair(
        prompt=prompt,
        reference_s=reference.seconds,
        candidate_s=candidate.seconds,
        reference_tokens=len(reference.text.ids),
        candidate_tokens=len(candidate.text.ids),
    )


def _verdict(failure: ChildFailed) -> Verdict:
    verdicts: dict[str, Verdict] = {"crashed": "crashed", "timed out": "timed out"}
    return verdicts.get(failure.kind, "invalid")


def _sentence(comparison: Comparison) -> str:
    return (
        f"{comparison.ratio:.2f}x the incumbent (95 % interval {comparison.low:.2f} to {comparison.high:.2f}; a gain "
        f"must clear {1 + comparison.threshold:.2f})"
    )
