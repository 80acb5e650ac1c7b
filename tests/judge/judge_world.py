"""What the judge's tests share: names of toys, and how a workbench over them is opened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import judge_toys

from engine.judge.workbench import Workbench

TOYS = Path(judge_toys.__file__)
NEW_TOKENS = 24
MakeBench = Callable[..., Workbench]


def toy(name: str) -> str:
    """Backend name of a toy."""
    return f"{TOYS}:{name}"
