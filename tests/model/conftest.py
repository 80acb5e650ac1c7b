from __future__ import annotations

import random
import secrets
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _fresh_seed() -> None:
    """New random numbers in every run; pytest shows the seed of a failing test."""
    seed = secrets.randbits(31)
    print(f"seed {seed}")
    random.seed(seed)
    torch.manual_seed(seed)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny matrices gain nothing from a second thread, and lose much where the cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
