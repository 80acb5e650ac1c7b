"""The shipped demo assets expand to checkpoints in their released layouts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from engine.demo import SHIPPED, demo_drafter_path, demo_target_path
from engine.errors import UserError


def test_target_is_found() -> None:
    assert demo_target_path().stat().st_size > 90_000_000


def test_target_missing_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPECPILOT_DEMO_TARGET", str(tmp_path / "none.gguf"))
    with pytest.raises(UserError, match="make setup"):
        demo_target_path()


@pytest.mark.parametrize("name", ["smollm2-135m-dflash", "smollm2-135m-eagle3"])
def test_expanded_drafter_equals_int8_times_scale(name: str) -> None:
    folder = demo_drafter_path(name)
    stored = load_file(SHIPPED / name / "int8.safetensors")
    with safe_open(folder / "model.safetensors", framework="pt") as built:
        assert set(built.keys()) == {key for key in stored if not key.endswith(".scale")}
        for key in built.keys():  # noqa: SIM118 - safe_open is no mapping
            value = built.get_tensor(key)
            if stored[key].dtype == torch.int8:
                exact = stored[key].double() * stored[f"{key}.scale"].double()[:, None]
                assert value.dtype == torch.bfloat16
                assert torch.allclose(value.double(), exact, rtol=2**-8, atol=0)
            else:
                assert torch.equal(value, stored[key])
    assert json.loads((folder / "config.json").read_text())["hidden_size"] == 576


def test_unknown_drafter_names_the_shipped_ones() -> None:
    with pytest.raises(UserError, match="smollm2-135m-dflash"):
        demo_drafter_path("nonesuch")
