"""What a candidate of the self-test is: what it does, what the judge must say of it, and where it can be run.

A cheat counts as rejected only with one of its verdicts and for its reason. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engine.judge.report import Verdict
from engine.plan import Plan

Family = Literal["clock", "channel", "output", "quality", "fallback", "honest"]
Need = Literal["gpu", "cpu", "fp32", "near-ties", "neural"]
Served = Literal["single", "batch", "sampled"]

FOLDER = Path(__file__).parent
PLAIN = Plan(source="none", head_rows="needed")
CHAIN = Plan(source="neural", draft_tokens=4, head_rows="needed")
INCUMBENT = Plan(source="none")
INCUMBENT_SOURCE = "engine.judge.cheats.honest:Incumbent"
"""By module, as trusted code is named."""

SLOWER = r"^\d+\.\d+x the incumbent \(95 %"
"""No gain was shown."""
INTERFERES = rf"{SLOWER}|slower beside this candidate|while it was not its turn|was not idle"
DIFFERS = r"tokens differ from stock beyond its noise"
TEXT_END = DIFFERS + r".*(ends after|goes on after)"


@dataclass(frozen=True)
class Candidate:
    """One candidate. `source` is "file.py:class" in this folder; `does` a sentence without its subject.

    The judge must give one of `verdicts`, with a reason that `reason` (a regular expression) is found in. `needs` are
    properties of device or deployment without which it cannot be run; `served` names the regime that it is run in.
    """

    name: str
    family: Family
    does: str
    source: str
    verdicts: tuple[Verdict, ...]
    reason: str
    plan: Plan = PLAIN
    served: Served = "single"
    needs: tuple[Need, ...] = ()

    @property
    def honest(self) -> bool:
        return self.family == "honest"

    @property
    def reference(self) -> str:
        """The backend's name for the judge."""
        return f"{FOLDER}/{self.source}"


def slower(name: str, family: Family, does: str, source: str, *needs: Need) -> Candidate:
    """A cheat that gains nothing where the judge does not fall for it."""
    return Candidate(name, family, does, source, ("slower",), SLOWER, needs=needs)


def lossy(
    name: str,
    family: Family,
    does: str,
    source: str,
    *needs: Need,
    plan: Plan = PLAIN,
    served: Served = "single",
    reason: str = DIFFERS,
) -> Candidate:
    """A cheat that is fast, and whose text is not stock's."""
    return Candidate(name, family, does, source, ("lossy",), reason, plan, served, needs)


def broken(name: str, does: str, source: str, verdicts: tuple[Verdict, ...], reason: str) -> Candidate:
    """A cheat on the channel that the protocol rules out."""
    return Candidate(name, "channel", does, source, verdicts, reason)


def honest(name: str, does: str, source: str, *needs: Need, plan: Plan = PLAIN, served: Served = "single") -> Candidate:
    return Candidate(name, "honest", does, source, ("accepted",), "lossless", plan, served, needs)
