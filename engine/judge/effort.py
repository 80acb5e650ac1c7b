"""How much the judge measures: counts of prompts and pairs, and how long it waits."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.judge.bench import PairRule
from engine.judge.seats import Timeouts


@dataclass(frozen=True)
class Effort:
    """Defaults keep a trial of the demo near half a minute on two cores. A regime's batch of prompts counts as one.

    forcing_prompts  prompts forced before anything is timed; they warm the candidate up, and stock runs them freely
    rule             timed pairs of candidate and incumbent, one prompt each; each timed text is forced too
    repeats          prompts that the incumbent answers twice in a row in a trial, for the A/A spread
    solo             prompts on which a plan without a rival is timed, twice each
    variants         ordinary prompts that stock looks at for a source candidate, to find sensitive ones among them
    probes           sharp prefixes that are asked at most, and twice as many tied ones
    pool             positions that they are looked for in; `source_pool` for a source candidate, `pool_growth` more
                     with every trial. A deployment that samples looks at `probe_prompts` prompts and sought seeds
    alone            prompts that the incumbent answers before a source candidate's code runs
    source_forcing   prompts forced before a source candidate is timed, in place of forcing_prompts
    stock_prompts    prompts on which stock is timed alone
    floor_texts      stock texts that the noise floor is measured on, `floor_widths` rows a pass, and
                     `floor_positions` positions of other text (in fp32 at the last width alone)
    standing_pairs   prompts of a new incumbent's comparison with stock; `final_pairs` of the closing one
    profile_prompts  prompts of a stage profile
    children         processes kept in memory at most: a trial needs stock, the incumbent and the candidate
    """

    forcing_prompts: int = 2
    rule: PairRule = field(default_factory=PairRule)
    repeats: int = 2
    solo: int = 2
    probes: int = 8
    pool: int = 2048
    pool_growth: int = 256
    source_pool: int = 10240
    probe_prompts: int = 8
    variants: int = 192
    alone: int = 3
    source_forcing: int = 6
    stock_prompts: int = 2
    floor_texts: int = 2
    floor_widths: tuple[int, ...] = (2, 8)
    floor_positions: int = 512
    standing_pairs: int = 2
    final_pairs: int = 6
    profile_prompts: int = 2
    children: int = 3
    timeouts: Timeouts = field(default_factory=Timeouts)

    def forced(self, source: bool) -> int:
        """Prompts forced before a candidate is timed."""
        return self.source_forcing if source else self.forcing_prompts

    def looked_through(self, source: bool) -> int:
        """Positions that sensitive prefixes are looked for in, at least."""
        return self.source_pool if source else self.pool

    def timed(self, rival: bool) -> int:
        """Prompts that a trial of the usual length times."""
        return self.rule.pairs if rival else self.solo
