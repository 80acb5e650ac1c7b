"""What a deployment's drafter names: no checkpoint, a DFlash folder, or a draft model. Metadata only, no torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from engine.config import DraftConfig, ModelConfig
from engine.deployment import DEMO_DRAFTER, NO_DRAFTER
from engine.drafters import dflash_config
from engine.errors import UserError
from engine.weights import Checkpoint, open_checkpoint, read_json

DrafterKind = Literal["none", "dflash", "draft_model"]


@dataclass(frozen=True)
class DrafterReference:
    """An opened drafter. `config` is a DraftConfig for "dflash", the model's own for "draft_model", else None."""

    kind: DrafterKind
    checkpoint: Checkpoint | None = None
    config: DraftConfig | ModelConfig | None = None


def open_drafter(ref: str) -> DrafterReference:
    """Open what `ref` names: "ngram", "demo:...", a folder or a .gguf file.

    Raises UserError for what is no checkpoint and, by name, for kinds of drafter that are not supported.
    """
    if ref == NO_DRAFTER:
        return DrafterReference("none")
    with blame("drafter"):
        raw = _raw_config(ref)
        _refuse_kinds(ref, raw)
        checkpoint = open_checkpoint(ref)
        if dflash_config.ARCHITECTURE in _classes(raw):
            config = dflash_config.parse(checkpoint.draft_config, checkpoint.config, ref)
            return DrafterReference("dflash", checkpoint, config)
        return DrafterReference("draft_model", checkpoint, checkpoint.config)


@contextmanager
def blame(field: str) -> Iterator[None]:
    """Name `field` as the input at fault in a UserError that names none."""
    try:
        yield
    except UserError as error:
        if error.field:
            raise
        raise UserError(error.sentence, code=error.code, field=field) from None


def _raw_config(ref: str) -> dict[str, Any]:
    """config.json as it stands, or nothing where there is none: opening tells what is wrong then."""
    path = Path(ref).expanduser() / "config.json"
    if ref == DEMO_DRAFTER or not path.is_file():
        return {"architectures": [dflash_config.ARCHITECTURE]} if ref == DEMO_DRAFTER else {}
    return read_json(path)


def _classes(raw: dict[str, Any]) -> list[str]:
    classes = raw.get("architectures") or []
    return [str(name) for name in classes] if isinstance(classes, list) else []


def _refuse_kinds(ref: str, raw: dict[str, Any]) -> None:
    classes = _classes(raw)
    kind = None
    if any("eagle" in name.lower() for name in classes) or "eagle_config" in raw:
        kind = f"an EAGLE drafter ({', '.join(classes) or 'eagle_config'})"
    elif any(name.startswith("DFlash2") for name in classes):
        kind = "a DFlash2 drafter"
    elif "speculators_model_type" in raw or "speculators_config" in raw:
        kind = "a drafter in the speculators layout"
    if kind is not None:
        raise UserError(
            f"{ref} is {kind}, which is not supported yet; use a DFlash drafter, a draft model, or {NO_DRAFTER}.",
            code="drafter-unsupported",
            field="drafter",
        )
