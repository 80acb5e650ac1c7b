"""The plan: the complete typed tuning of a decoder. Every field is a lever; `levers.py` says what is legal."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from engine.codec import STRICT, digest, from_json, to_json

Source = Literal["none", "neural", "ngram", "hybrid"]
Gemm = Literal["library", "transposed", "packed"]


@dataclass(frozen=True)
class Plan:
    """One tuning. The defaults are a plain reading of the released drafters: a chain, library GEMMs.

    Draft and verify shape
      source            where drafts come from: nothing (autoregressive), the deployment's neural drafter,
                        suffix matches, or suffix matches first and the neural drafter otherwise
      draft_tokens      longest path of draft tokens below the anchor
      tree_rows         verify rows of a best-first tree, anchor included; 0 = chain
      ngram_min/max     shortest and longest suffix that is matched, in tokens
      ngram_candidates  continuations taken from different matches (more than 1 needs a tree)
      hybrid_min_match  in a hybrid, the match length from which the suffix match is preferred
      verify_widths     row counts that a verify pass is padded to: exact, or the next multiple of 4 or of 8
    Compute
      gemm              how a projection is computed: F.linear; W @ x^T; weights reordered once (oneDNN, CPU)
      draft_gemm        the same for the drafter
      fuse_qkv, fuse_gate_up   one GEMM instead of three, or two
      head_rows         prefill computes logits for all rows, or only for the last
      attention         PyTorch's fused attention, or explicit matmul + softmax over grouped heads
      compile           torch.compile for the elementwise parts (norm, rope, activation)
      threads           CPU threads; 0 = PyTorch's default
    """

    __pydantic_config__ = STRICT

    source: Source = "neural"
    draft_tokens: int = 7
    tree_rows: int = 0
    ngram_min: int = 2
    ngram_max: int = 4
    ngram_candidates: int = 1
    hybrid_min_match: int = 4
    verify_widths: Literal["exact", "4", "8"] = "exact"
    gemm: Gemm = "library"
    draft_gemm: Gemm = "library"
    fuse_qkv: bool = False
    fuse_gate_up: bool = False
    head_rows: Literal["all", "needed"] = "all"
    attention: Literal["sdpa", "grouped"] = "sdpa"
    compile: bool = False
    threads: int = 0

    @property
    def digest(self) -> str:
        return digest(self)

    def to_json(self) -> dict[str, Any]:
        result: dict[str, Any] = to_json(self)
        return result

    @classmethod
    def from_json(cls, data: Any) -> Plan:
        return from_json(cls, data, what="plan")

    def with_changes(self, changes: dict[str, Any]) -> Plan:
        """A new plan with these lever values. Raises UserError for an unknown lever or a wrong type."""
        return Plan.from_json({**self.to_json(), **changes})

    def changes_from(self, parent: Plan) -> dict[str, Any]:
        """Lever values that differ from `parent`, by lever name."""
        mine, theirs = self.to_json(), parent.to_json()
        return {f.name: mine[f.name] for f in dataclasses.fields(self) if mine[f.name] != theirs[f.name]}
