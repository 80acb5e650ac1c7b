"""Which files a checkpoint consists of, by SHA-256: how a bundle names weights that it does not hold."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from engine.archive import write_atomically
from engine.codec import STRICT
from engine.errors import UserError
from engine.paths import data_dir

DEMO_PREFIX = "demo:"


@dataclass(frozen=True)
class CheckpointFiles:
    """`files`: file name (relative to the checkpoint's folder) -> SHA-256, in hex."""

    __pydantic_config__ = STRICT

    kind: str  # "hf" | "gguf"
    files: dict[str, str]


def checkpoint_files(ref: str) -> CheckpointFiles:
    """Hash the checkpoint that `ref` names. Raises UserError where it cannot be opened."""
    from engine.weights import open_checkpoint

    checkpoint = open_checkpoint(ref)
    root = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    names = sorted(str(path.relative_to(root)) for path in checkpoint.files())
    return CheckpointFiles(kind=checkpoint.kind, files={name: file_sha256(root / name) for name in names})


def locate(ref: str, expected: CheckpointFiles, override: str | None, *, role: str) -> str:
    """Where the checkpoint `expected` is: `override`, else `ref`. Raises UserError that names the first file that is
    missing or differs. `role` is "target" or "drafter"."""
    chosen = override if override is not None else ref
    if not chosen.startswith(DEMO_PREFIX) and not Path(chosen).expanduser().exists():
        where = "" if override is not None else " (the path on the machine where the bundle was made)"
        raise UserError(
            f"The {role} checkpoint {chosen}{where} does not exist here; say where it is with --{role} PATH.",
            code="checkpoint-missing",
            field=role,
        )
    found = checkpoint_files(chosen)
    have = dict(found.files)
    if len(have) == len(expected.files) == 1:
        # A single file may have been renamed; what it holds decides.
        have = dict(zip(expected.files, have.values(), strict=True))
    for name, sha in sorted(expected.files.items()):
        have_sha = have.get(name)
        if have_sha is None:
            raise UserError(
                f"The {role} checkpoint {chosen} has no file {name}, which this bundle was tuned with; "
                f"name the right checkpoint with --{role} PATH.",
                code="checkpoint-differs",
                field=role,
            )
        if have_sha != sha:
            raise UserError(
                f"The {role} checkpoint {chosen} is not the one that this bundle was tuned for: {name} has SHA-256 "
                f"{have_sha[:12]}..., the bundle expects {sha[:12]}...; name the right one with --{role} PATH.",
                code="checkpoint-differs",
                field=role,
            )
    return chosen


def file_sha256(path: Path) -> str:
    """SHA-256 of a file in hex, remembered in the data folder by path, size and modification time."""
    path = path.resolve()
    state = path.stat()
    stamp = [state.st_size, state.st_mtime_ns]
    store = data_dir() / "hashes.json"
    known = _known(store)
    entry = known.get(str(path))
    if isinstance(entry, list) and len(entry) == 3 and entry[:2] == stamp:
        return str(entry[2])
    with path.open("rb") as source:
        value = hashlib.file_digest(source, "sha256").hexdigest()
    # Read again: another process may have added its own since. The worst that a lost race costs is a second hash.
    write_atomically(store, json.dumps({**_known(store), str(path): [*stamp, value]}, indent=1).encode())
    return value


def _known(store: Path) -> dict[str, object]:
    try:
        data = json.loads(store.read_text())
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}
