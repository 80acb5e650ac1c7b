"""Widened checkpoints: a Llama-style model made w times wider without changing what it computes.

Every vector of the residual stream becomes w copies of itself. What writes it (embedding, o_proj, down_proj) writes
each copy; what reads it sums over the copies and divides by w. Heads and MLP units are repeated, too: head i of copy c
uses the KV head that head i used, of the same copy. For w a power of two the division is exact in bf16, so the wide
model writes the text of the narrow one up to the order of its sums, with the memory traffic and the kernel shapes of a
model whose matrices are w * w times as large. A tied head cannot be divided, for it is the embedding; the norm before
it is (DESIGN 7).

A DFlash drafter is widened with its target, whose embedding, hidden states and head it shares.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.config import DraftConfig, ModelConfig, config_to_hf
from engine.drafters import dflash_config
from engine.errors import UserError
from engine.weights import INDEX_FILE, Checkpoint, expected_tensors, read_json

if TYPE_CHECKING:
    from torch import Tensor

FACTORS = (2, 4, 8, 16, 32)
MARK = "specpilot_widened"
"""The key of config.json that says what a widened checkpoint is."""
SHARD_BYTES = 2 << 30
"""Tensors are collected up to this size before a file is written: what the conversion holds in memory at most, and one
tensor more."""
ELEMENT_BYTES = {"bf16": 2, "fp32": 4}


@dataclass(frozen=True)
class Tile:
    """How one tensor is repeated. Its columns are `len(scales)` equal groups; each is repeated `columns` times and
    multiplied by its scale, and the whole `rows` times. A vector has rows only."""

    rows: int = 1
    columns: int = 1
    scales: tuple[float, ...] = (1.0,)

    def size(self, elements: int) -> int:
        """Elements of the repeated tensor."""
        return elements * self.rows * self.columns


def wide_config(config: ModelConfig, factor: int) -> ModelConfig:
    """The shape of the wide model. Heads keep their size, so their rotation stays what it was."""
    return dataclasses.replace(
        config,
        hidden_size=factor * config.hidden_size,
        num_heads=factor * config.num_heads,
        num_kv_heads=factor * config.num_kv_heads,
        intermediate_size=factor * config.intermediate_size,
    )


def target_tiles(config: ModelConfig, factor: int) -> dict[str, Tile]:
    """A tile for every tensor of a target."""
    tiles = {name: _layer_tile(name, shape, factor) for name, shape in expected_tensors(config).items()}
    tiles["model.embed_tokens.weight"] = Tile(columns=factor)
    if config.tie_embeddings:
        tiles["model.norm.weight"] = Tile(rows=factor, scales=(1 / factor,))
    else:
        tiles["lm_head.weight"] = Tile(columns=factor, scales=(1 / factor,))
    return tiles


def drafter_tiles(config: DraftConfig, target: ModelConfig, factor: int) -> dict[str, Tile]:
    """A tile for every tensor of a DFlash drafter of `target`. Its `fc` reads the taps side by side, each of them w
    copies; the last layer's comes through the final norm, which a tied head has made w times smaller already."""
    tiles = {name: _layer_tile(name, shape, factor) for name, shape in dflash_config.tensor_shapes(config).items()}
    tied, last = target.tie_embeddings, target.num_layers - 1
    scales = tuple(1.0 if tied and layer == last else 1 / factor for layer in config.target_layer_ids)
    tiles["fc.weight"] = Tile(rows=factor, columns=factor, scales=scales)
    if tied:
        tiles["norm.weight"] = Tile(rows=factor, scales=(1 / factor,))
    return tiles


def _layer_tile(name: str, shape: tuple[int, ...], factor: int) -> Tile:
    if name.endswith(("q_norm.weight", "k_norm.weight")):  # of one head
        return Tile()
    return Tile(rows=factor) if len(shape) == 1 else Tile(factor, factor, (1 / factor,))


def repeat(tensor: Tensor, tile: Tile, name: str = "tensor") -> Tensor:
    """`tensor`, [N] or [N, K], repeated by `tile`, in its dtype.

    Raises UserError where a scale would lose a value, because the result is too small for the dtype.
    """
    import torch

    if tensor.dim() == 1:
        return _scaled(tensor, tile.scales[0], name).repeat(tile.rows)
    groups = tensor.chunk(len(tile.scales), dim=1)
    parts = [
        _scaled(group, scale, name).repeat(tile.rows, tile.columns)
        for group, scale in zip(groups, tile.scales, strict=True)
    ]
    return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]


def _scaled(tensor: Tensor, scale: float, name: str) -> Tensor:
    scaled = tensor * scale
    if not bool((scaled / scale == tensor).all()):
        raise UserError(
            f"{name} holds values that cannot be divided by {1 / scale:g} exactly: they are not finite, or too small.",
            code="widen",
        )
    return scaled


def note(raw: dict[str, Any]) -> str | None:
    """One line that says what a widened checkpoint is, from its config.json, or None for any other. To be printed
    wherever figures of one are."""
    mark = raw.get(MARK)
    if not isinstance(mark, dict):
        return None
    return (
        f"widened {mark.get('factor')}x from {mark.get('source')}: real text and acceptance, the memory traffic of a "
        "model of this size, and not a real model of this size"
    )


def write_target(
    checkpoint: Checkpoint, factor: int, dtype: str, folder: Path, progress: Callable[[str], None] = lambda name: None
) -> ModelConfig:
    """Write the wide form of a checked `checkpoint` into the new `folder`, tokenizer included, one tensor at a time.
    `dtype` is "bf16" or "fp32". Returns its shape."""
    from engine.tokenizer import save_tokenizer

    config = wide_config(checkpoint.config, factor)
    folder.mkdir()
    save_tokenizer(checkpoint, folder)
    raw = {**checkpoint.draft_config, **_sizes(config)} if checkpoint.draft_config else config_to_hf(config)
    _write(
        checkpoint, target_tiles(checkpoint.config, factor), _marked(raw, checkpoint, factor), dtype, folder, progress
    )
    return config


def write_drafter(
    checkpoint: Checkpoint,
    drafter: DraftConfig,
    target: ModelConfig,
    factor: int,
    dtype: str,
    folder: Path,
    progress: Callable[[str], None] = lambda name: None,
) -> ModelConfig:
    """`write_target` for a DFlash drafter of `target`, which is the narrow one."""
    config = wide_config(drafter.model, factor)
    folder.mkdir()
    raw = _marked({**checkpoint.draft_config, **_sizes(config)}, checkpoint, factor)
    _write(checkpoint, drafter_tiles(drafter, target, factor), raw, dtype, folder, progress)
    return config


def _sizes(config: ModelConfig) -> dict[str, Any]:
    """What widening changes in a config.json; the size of a head is stated, for it no longer follows."""
    return {
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
    }


def bytes_needed(tiles: dict[str, Tile], shapes: Callable[[str], tuple[int, ...]], dtype: str) -> int:
    """Bytes that the repeated tensors take."""
    return sum(tile.size(math.prod(shapes(name))) for name, tile in tiles.items()) * ELEMENT_BYTES[dtype]


def _marked(raw: dict[str, Any], checkpoint: Checkpoint, factor: int) -> dict[str, Any]:
    before = raw.get(MARK)
    if isinstance(before, dict):
        factor, source = factor * int(before["factor"]), str(before["source"])
    else:
        source = checkpoint.path.name
    return {**raw, MARK: {"factor": factor, "source": source}}


def _write(
    checkpoint: Checkpoint,
    tiles: dict[str, Tile],
    raw: dict[str, Any],
    dtype: str,
    folder: Path,
    progress: Callable[[str], None],
) -> None:
    import torch

    precision = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    for key in ("torch_dtype", "dtype"):
        raw.pop(key, None)
    raw["dtype"] = {"bf16": "bfloat16", "fp32": "float32"}[dtype]
    needed, free = bytes_needed(tiles, checkpoint.shape, dtype), shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"The wide checkpoint takes {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free on that disk: choose a "
            "smaller factor, bf16, or another folder.",
            code="disk-full",
            field="out",
        )

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, tile in tiles.items():
            progress(name)
            yield name, repeat(checkpoint.tensor(name).to(precision), tile, name)

    write_shards(tensors(), folder)
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n")


def write_shards(tensors: Iterable[tuple[str, Tensor]], folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Write safetensors files as transformers names them: one, or shards of about `shard_bytes` with an index. Raises
    UserError where the disk takes no more."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    held: dict[str, Tensor] = {}
    written: list[tuple[Path, list[str], int]] = []

    def flush() -> None:
        file = folder / f"part-{len(written) + 1:05d}.safetensors"
        try:
            save_file(held, file, metadata={"format": "pt"})
        except (SafetensorError, OSError) as error:
            raise UserError(f"The checkpoint cannot be written: {error}.", code="unwritable", field="out") from None
        written.append((file, list(held), _bytes(held)))
        held.clear()

    for name, tensor in tensors:
        held[name] = tensor.contiguous()
        if _bytes(held) >= shard_bytes:
            flush()
    if held or not written:
        flush()
    if len(written) == 1:
        written[0][0].rename(folder / "model.safetensors")
        return
    places = {}
    for number, (file, names, _) in enumerate(written, start=1):
        final = file.rename(folder / f"model-{number:05d}-of-{len(written):05d}.safetensors")
        places.update(dict.fromkeys(names, final.name))
    index = {"metadata": {"total_size": sum(size for *_, size in written)}, "weight_map": places}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def _bytes(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to write into, which gets its name when all is written; of a write that is cut short nothing stays.
    Raises UserError where the name is taken or cannot be made."""
    if folder.exists():
        raise UserError(f"{folder} exists already; name another folder.", code="exists", field="out")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror}.", code="unwritable", field="out") from None
    try:
        yield part
        part.rename(folder)
    except BaseException:  # a user who has had enough of waiting leaves nothing, either
        shutil.rmtree(part, ignore_errors=True)
        raise


def is_widened(folder: Path) -> str | None:
    """`note` of the checkpoint in a folder, None where it is no widened one."""
    file = folder / "config.json"
    return note(read_json(file)) if file.is_file() else None
