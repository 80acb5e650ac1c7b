"""The judge's workbench: what the command line and the web's worker drive.

It owns the prompts, stock's tokens, the clock and the verdict, and the child processes that hold the decoders
(`seats.py`). Children stay between calls: stock, the incumbent, and a candidate that has won.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Literal

from engine.codec import from_json, to_json
from engine.deployment import Deployment
from engine.drafters.reference import DrafterKind, open_drafter
from engine.errors import UserError
from engine.hardware import HardwareProfile, identify_device, probe
from engine.judge import bench, forcing
from engine.judge.bench import ReadLimit
from engine.judge.conditions import Watch
from engine.judge.confinement import confinement_for
from engine.judge.effort import Effort
from engine.judge.hidden import Material, draw, prepare
from engine.judge.pairs import WARMUP_TOKENS, Duel, pair_of, time_alone
from engine.judge.process import ChildFailed
from engine.judge.questions import Question, Questions
from engine.judge.record import Recorder, source_of
from engine.judge.reference import STOCK, Reference
from engine.judge.report import Judgement, Verdict
from engine.judge.rounds import MOST_VOID, NotIdle
from engine.judge.seats import CANDIDATE, BatchReply, Seat, Seats, accept_length
from engine.judge.sides import side_by_side
from engine.judge.store import Store
from engine.judge.trial import Tools, Trial
from engine.levers import MAX_DRAFT_TOKENS, usable_cores
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


class Workbench:
    """Judges plans of one deployment. Use as a context manager, or call `close`.

    `folder` is the search's: it gets children's logs and the judge's own cache. `seed` decides which prompts a trial
    sees. `progress` is told each phase in a few words; what it raises ends the call (a shell cancels that way).

    The rest is for other servers and for tests: `material` replaces what is read from the deployment, `backend_for`
    names the backend that runs a plan, `stock` those of the two baselines, `read_limit` the physical floor of a
    target pass (None: from the kept probe of this device), `watch` makes what looks after the machine while pairs are
    timed (`conditions.unwatched`: nothing does), `threads` are those of every child (None: one for each usable core).

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
        watch: Callable[[str], Watch] = Watch,
        threads: int | None = None,
    ) -> None:
        self.deployment = deployment
        self.effort = effort or Effort()
        self.material = material or prepare(deployment)
        self.seed = seed
        self._progress = progress
        self._backend_for = backend_for
        self._backends = stock or BACKENDS[self.material.drafter_kind]
        self._read_limit = read_limit
        self._folder = folder
        self._max_new_tokens = deployment.regime.max_new_tokens
        self._threads = threads or usable_cores()
        self._seats = Seats(
            deployment, self.material, self._threads, folder, self.effort.children, self.effort.timeouts
        )
        self._store = Store(folder, {"deployment": to_json(deployment), "threads": self._threads})
        self._questions = Questions(self.material, deployment.regime, seed, self._store.secret)
        self._reference = Reference(
            deployment, self._questions, self.effort, self._seats, self._store, self._backends[STOCK], progress
        )
        self._tools = Tools(
            material=self.material,
            questions=self._questions,
            reference=self._reference,
            store=self._store,
            effort=self.effort,
            watch=lambda: watch(deployment.platform),
            longest_prompt=deployment.regime.max_prompt_tokens,
            max_new_tokens=self._max_new_tokens,
            limit=self._limit,
            progress=progress,
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
        questions = self._reference.solo_questions()
        self._warm(seat, questions[0])
        replies = []
        for number, question in enumerate(questions, start=1):
            self._progress(f"timing stock {number}/{len(questions)}")
            reply = self._generate(seat, question)
            replies.append(reply)
            if name == "autoregressive":
                self._reference.keep(question, reply.texts)
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

    def judge(
        self,
        trial: int,
        plan: Plan,
        incumbent: Plan | None,
        *,
        fresh: int,
        source: str | None = None,
        following: str | None = None,
    ) -> Judgement:
        """Judge `plan` on hidden prompts: token forcing, then timing against `incumbent` on the same prompts, whose
        texts are forced too. Without an incumbent the plan is forced and timed alone.

        `fresh` numbers the draw of prompts: two numbers get different prompts as long as there are enough. What was
        asked and answered is written into the search's folder, for `judge replay`.

        `source` names the backend of a source candidate ("file.py:function"), which is given `plan`. It runs confined.
        Raises UserError where it cannot be confined.

        `following` is the source of the next trial. Its child starts while this candidate is forced, for a start takes
        one core, and most of a short trial: up to the point where foreign code would run. There it stands still.
        """
        start = time.perf_counter()
        recorder = self._recorder(trial, fresh, plan, incumbent, source)
        work = Trial(
            self._tools, recorder, trial, fresh, draft_tokens=self._deepest(plan, source), source=source is not None
        )
        accepted = False
        try:
            judgement = self._judge(work, plan, incumbent, source, following)
            accepted = judgement.verdict == "accepted"
        except ChildFailed as failure:
            if failure.role != CANDIDATE:
                raise
            judgement = work.verdict(_verdict(failure), failure.reason)
        except NotIdle as noise:
            judgement = work.verdict("invalid", f"{str(noise)[0].upper()}{str(noise)[1:]}.")
        finally:
            if accepted and source is None:
                self._seats.move(CANDIDATE, _key(plan), INCUMBENT)
            else:
                self._seats.dismiss(CANDIDATE)
        judgement = dataclasses.replace(
            judgement,
            prompts=tuple(dict.fromkeys(answer.question.id for answer in work.answers if answer.probe is None)),
            accept_length=accept_length([answer.reply for answer in work.answers if answer.probe is None]),
            seconds=time.perf_counter() - start,
            costs=work.clock.costs(),
        )
        name = recorder.write(self._folder, judgement, identify_device(self.deployment.platform))
        return dataclasses.replace(judgement, record=name)

    def standing(self, plan: Plan, trial: int, over_incumbent: float, final: bool) -> IncumbentChanged:
        """A new incumbent side by side with stock autoregressive decoding; the closing one (`final`), on more prompts,
        also with stock speculative decoding and with our own autoregressive decoding."""
        own = autoregressive(plan) if final and plan.source != "none" else None
        count = self.effort.final_pairs if final else self.effort.standing_pairs
        purpose = "closing" if final else "standing"
        warm, *questions = self._questions.draw(purpose, trial, count + MOST_VOID + 1)
        self._progress("starting stock")
        needed = {STOCK, _key(plan), *([_key(own)] if own else [])}
        seats = [self._incumbent(plan, needed), self._reference.seat()]
        if final:
            seats.append(self._speculative())
        if own:
            seats.append(self._seats.get(_key(own)) or self._start(_key(own), OWN, own, needed))
        for seat in seats:
            self._warm(seat, warm)
        rounds, conditions = side_by_side(
            seats, questions, count, self._max_new_tokens, self._tools.watch(), self._progress
        )
        for each in rounds:
            self._reference.keep(each.prompt, each.results[1].texts)
        self._recheck([(each.prompt, each.results[0]) for each in rounds])
        over = [
            bench.summarise(
                seat.implementation,
                [pair_of(each.prompt.id, each.results[i], each.results[0]) for each in rounds],
                self._store.repeats,
                conditions=conditions,
            )
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

    def _judge(
        self,
        work: Trial,
        plan: Plan,
        incumbent: Plan | None,
        source: str | None,
        following: str | None,
    ) -> Judgement:
        effort = self.effort
        forced, timed = effort.forced(source is not None), effort.timed(incumbent is not None)
        questions = work.draw("", forced + timed)
        to_force, to_time = questions[:forced], questions[forced:]
        self._progress("start-up")
        duel = None
        with work.clock.phase("start"):
            stock = self._reference.seat()
            rival = None if incumbent is None else self._incumbent(incumbent, {STOCK, _key(plan)})
            stock.ready()
            self._seats.prepared()
            if rival is not None:
                duel = Duel(work, rival, to_time)
                if source is not None:
                    rival.ready()
                    duel.alone(effort.alone)
            candidate, started = self._candidate(plan, incumbent, source)
            if following is not None:
                self._prepare(following)
            for question in to_force:  # while the candidate builds
                work.clock.generated(self._reference.free_run(question))
            work.recorder.floor = self._reference.floor()
            work.ready(candidate)
        if source is not None and work.recorder.source != source_of(source):
            raise ChildFailed("invalid", "The candidate's source was changed while it was started.", CANDIDATE)
        if objection := work.force(candidate, to_force, started):
            return objection
        with work.clock.phase("start"):
            self._seats.prepared()
        if duel is None:
            return work.accepted(time_alone(work, candidate, to_time))
        return work.compared(duel.compare(candidate))

    def _generate(self, seat: Seat, question: Question) -> BatchReply:
        return seat.generate_batch(question.ids, self._max_new_tokens, question.sampling)

    def _warm(self, seat: Seat, question: Question) -> None:
        seat.generate_batch(question.ids, WARMUP_TOKENS, question.sampling)

    def _recorder(self, trial: int, fresh: int, plan: Plan, incumbent: Plan | None, source: str | None) -> Recorder:
        candidate = source or self._backend_for(plan)
        backends = {STOCK: self._backends[STOCK], CANDIDATE: candidate}
        if incumbent is not None:
            backends[INCUMBENT] = self._backend_for(incumbent)
        return Recorder(
            trial=trial,
            fresh=fresh,
            seed=self.seed,
            deployment=self.deployment,
            plan=plan,
            incumbent=incumbent,
            backends=backends,
            stop_ids=self.material.stop_ids,
            vocab_size=self.material.vocab_size,
            threads=self._threads,
            source=None if source is None else source_of(source),
            effort=to_json(self.effort),
            read_limit=self._limit(),
            draft_tokens=self._deepest(plan, source),
        )

    def _deepest(self, plan: Plan, source: str | None) -> int:
        """Draft tokens that a verify pass of the candidate may hold: its plan's, or of foreign code any."""
        if source is not None:
            return bench.largest_draft(MAX_DRAFT_TOKENS, self._max_new_tokens)
        return plan.draft_tokens if plan.source != "none" else 0

    def _recheck(self, answers: Sequence[tuple[Question, BatchReply]]) -> None:
        """Force an incumbent's timed texts once more. Raises ChildFailed where one is not lossless."""
        scored = [
            self._reference.scored(part, text, self._max_new_tokens)
            for question, reply in answers
            for part, text in zip(question.parts, reply.texts, strict=True)
        ]
        scored = self._reference.confirmed(scored, self.material.stop_ids)
        found = forcing.report(scored, self._reference.floor(), self.material.stop_ids, self.material.decode)
        if objection := forcing.objection(found):
            raise ChildFailed("invalid", f"The incumbent is not lossless: {objection}", INCUMBENT)

    def _limit(self) -> ReadLimit:
        if self._read_limit is None:
            here = probe(self.deployment.platform, self.deployment.dtype)
            self._read_limit = ReadLimit.from_probe(self.material.read_bytes, here.llc_bytes, here.read_gb_s)
        return self._read_limit

    def _candidate(self, plan: Plan, incumbent: Plan | None, source: str | None) -> tuple[Seat, float | None]:
        """The candidate's child and when it was started; None where it is one that was there before."""
        needed = {STOCK, CANDIDATE, *([_key(incumbent)] if incumbent else [])}
        if source is not None:
            confinement, sha256 = confinement_for(self.deployment, source), source_of(source).sha256
            seat = self._seats.start_source(CANDIDATE, source, sha256, plan, needed, confinement)
            return seat, time.perf_counter()
        waiting = self._seats.get(_key(plan)) if plan != incumbent else None
        if waiting is not None:
            self._seats.move(_key(plan), CANDIDATE, CANDIDATE)
            return waiting, None
        return self._start(CANDIDATE, CANDIDATE, plan, needed), time.perf_counter()

    def _prepare(self, source: str) -> None:
        """Start the next candidate's child. What is wrong with that one is told by its own trial, not by this one."""
        with suppress(UserError):
            self._seats.prepare(source_of(source).sha256, confinement_for(self.deployment, source))

    def _incumbent(self, plan: Plan, needed: set[str] | None = None) -> Seat:
        return self._seats.get(_key(plan)) or self._start(_key(plan), INCUMBENT, plan, needed or {STOCK})

    def _speculative(self) -> Seat:
        """Stock's speculative decoder, in the same child as the plain one: they share the target's weights."""
        stock = self._reference.seat()
        return self._seats.get(SPECULATIVE) or self._seats.start_beside(stock, SPECULATIVE, self._backends[SPECULATIVE])

    def _start(self, key: str, role: str, plan: Plan, needed: set[str]) -> Seat:
        return self._seats.start(key, role, self._backend_for(plan), plan, needed)


def autoregressive(plan: Plan) -> Plan:
    """The same compute levers without drafts."""
    return dataclasses.replace(plan, source="none", tree_rows=0, ngram_candidates=1, verify_widths="exact")


def _key(plan: Plan) -> str:
    return f"plan:{plan.digest}"


def _verdict(failure: ChildFailed) -> Verdict:
    verdicts: dict[str, Verdict] = {"crashed": "crashed", "timed out": "timed out"}
    return verdicts.get(failure.kind, "invalid")
