"""How much the judge measures: counts of prompts and pairs, and how long it waits."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.judge.bench import PairRule
from engine.judge.seats import Timeouts


@dataclass(frozen=True)
class Effort:
    """Defaults keep a trial of the demo near half a minute on two cores.

    forcing_prompts  prompts forced before anything is timed; they warm the candidate up, and stock runs them freely
    rule             timed pairs of candidate and incumbent, one prompt each; each timed text is forced too
    repeats          prompts that the incumbent answers twice in a row in a trial, for the A/A spread
    solo             prompts on which a plan without a rival is timed, twice each
    stock_prompts    prompts on which stock is timed alone
    floor_texts      stock texts that the noise floor is measured on, `floor_widths` rows a pass
    standing_pairs   prompts of a new incumbent's comparison with stock; `final_pairs` of the closing one
    profile_prompts  prompts of a stage profile
    children         processes kept in memory at most: a trial needs stock, the incumbent and the candidate
    """

    forcing_prompts: int = 2
    rule: PairRule = field(default_factory=PairRule)
    repeats: int = 2
    solo: int = 2
    stock_prompts: int = 2
    floor_texts: int = 2
    floor_widths: tuple[int, ...] = (2, 8)
    standing_pairs: int = 2
    final_pairs: int = 6
    profile_prompts: int = 2
    children: int = 3
    timeouts: Timeouts = field(default_factory=Timeouts)

    @property
    def drawn(self) -> int:
        """Prompts of one trial that is decided in the usual number of pairs."""
        return self.forcing_prompts + max(self.rule.pairs, self.solo)
