"""`bench`: real processes on a tiny checkpoint, and what it says of a text that differs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.cli import main
from engine.cli.bench import _line, _row, autoregressive_plans
from engine.deployment import Deployment


@pytest.mark.parametrize("temperature", ["0", "0.7"])
def test_plans_are_timed_and_checked(
    deployment: Deployment, tmp_path: Path, capsys: pytest.CaptureFixture[str], temperature: str
) -> None:
    out = tmp_path / "bench.json"
    regime = deployment.regime
    asked = [
        "bench", "--target", deployment.target, "--platform", "cpu", "--prompts", regime.prompts, "--count", "2",
        "--max-prompt-tokens", "96", "--max-new-tokens", "12", "--plans", "plain", "tuned", "--out", str(out),
        "--temperature", temperature,
    ]  # fmt: skip
    assert main(asked) == 0
    printed = capsys.readouterr().out.splitlines()
    result = json.loads(printed[-1])
    assert result == json.loads(out.read_text())
    assert [row["params"]["plan"] for row in result["rows"]] == ["plain", "tuned"]
    for row, line in zip(result["rows"], printed, strict=False):
        assert row["checked"].endswith("tokens of 2 texts equal the reference's")
        assert len(row["samples"]["candidate"]) == len(row["samples"]["reference"]) == 2
        assert min(row["samples"]["candidate"]) > 0
        assert "x " in line
        assert "% of the byte floor" in line
    assert result["device"]["read_gb_s"] > 0


def test_a_text_that_differs_gets_no_ratio() -> None:
    plans = autoregressive_plans(packed=False, compiled=False)
    assert set(plans) == {"plain", "tuned"}
    assert plans["tuned"].gemm == "transposed"
    samples = {"transformers": [10.0, 12.0], "tuned": [5.0, 6.0]}
    texts = {"transformers": [(1, 2), (3,)], "tuned": [(1, 2), (4,)]}
    row = _row("tuned", plans["tuned"], samples, texts, 2.0, "transformers")
    assert row["checked"] is None
    assert "no ratio" in _line(row)
    texts["tuned"][1] = (3,)
    row = _row("tuned", plans["tuned"], samples, texts, 2.2, "transformers")
    assert "2.00x" in _line(row)
    assert "40 % of the byte floor" in _line(row)
