"""Fixtures shared by all parts. Nothing here downloads anything."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def _data_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tests never touch the user's data folder."""
    import os

    os.environ["SPECPILOT_DATA"] = str(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def demo_target() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct."""
    from engine.demo import demo_target_path

    return demo_target_path()


@pytest.fixture(scope="session")
def demo_drafter(_data_folder: None) -> Path:
    """The expanded DFlash demo drafter."""
    from engine.demo import demo_drafter_path

    return demo_drafter_path()
