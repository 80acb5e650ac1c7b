"""Errors that a person reads.

A `UserError` is a mistake in what the user gave us, told in one clear sentence that names the thing and
the way out. Shells print the sentence and nothing else: the CLI exits with status 2, the API answers with
problem details and status 4xx, the form shows it beside the field.
"""

from __future__ import annotations


class UserError(Exception):
    """One sentence for the user.

    `code` is a stable, machine-readable name ("unknown-architecture"); `field` names the input at fault
    where there is one ("target", "drafter", "prompts", "regime", "plan", "bundle").
    """

    def __init__(self, sentence: str, *, code: str = "invalid", field: str = "") -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.code = code
        self.field = field


class ChildError(RuntimeError):
    """A judged child process crashed, hung or broke the protocol. Never the user's fault."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind  # "crashed" | "timed out" | "invalid"
        self.reason = reason
