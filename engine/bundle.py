"""The downloadable result of a search: a zip with the plan, the evidence, and what it was measured on.

    manifest.json      schema version, tool version, when, SHA-256 and size of every other file
    plan.json          the tuned plan
    deployment.json    target, drafter, regime, platform, dtype
    evidence.json      stock and final measurements with raw samples, forcing report, hardware, versions
    checkpoints.json   names and SHA-256 of the checkpoints' files; never weights
    events.jsonl       the whole search, from which every figure above can be computed again
    README.md          how to run it

Equal content gives equal bytes. Reading checks everything before anything is believed.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from engine import __version__
from engine.archive import Archive, pack, write_atomically
from engine.checkpoint_files import CheckpointFiles, checkpoint_files, locate
from engine.codec import STRICT, from_json, to_json
from engine.deployment import NO_DRAFTER, Deployment
from engine.errors import UserError
from engine.judge.report import Comparison, Judgement
from engine.plan import Plan
from engine.search.events import Event, HardwareProbed, IncumbentChanged, SearchStarted, StockMeasured, TrialJudged

SCHEMA = 1
FILE_NAME = "bundle.zip"
_FILES = ("plan.json", "deployment.json", "evidence.json", "checkpoints.json", "events.jsonl", "README.md")
_PACKAGES = ("torch", "transformers", "tokenizers", "dflash", "numpy")
T = TypeVar("T")


@dataclass(frozen=True)
class FileEntry:
    __pydantic_config__ = STRICT

    sha256: str
    bytes: int


@dataclass(frozen=True)
class Manifest:
    __pydantic_config__ = STRICT

    schema: int
    tool: str  # "SpecPilot"
    version: str
    created: str  # ISO 8601, UTC: the time of the search's last event
    files: dict[str, FileEntry]


@dataclass(frozen=True)
class Evidence:
    """What was measured: both untouched baselines, the plan side by side with them, and the token forcing of the
    trial that made it the incumbent."""

    __pydantic_config__ = STRICT

    stock: tuple[StockMeasured, ...]
    standing: IncumbentChanged
    judgement: Judgement | None
    hardware: dict[str, Any]
    versions: dict[str, str]


@dataclass(frozen=True)
class Checkpoints:
    """Files of the target and of the drafter (None where it needs no checkpoint)."""

    __pydantic_config__ = STRICT

    target: CheckpointFiles
    drafter: CheckpointFiles | None


@dataclass(frozen=True)
class Bundle:
    """A bundle that was read and checked."""

    path: Path
    manifest: Manifest
    deployment: Deployment
    plan: Plan
    evidence: Evidence
    checkpoints: Checkpoints
    events: tuple[Event, ...]
    readme: str

    @property
    def claim(self) -> Comparison | None:
        """The claimed speedup over stock autoregressive decoding."""
        return self.evidence.standing.over_autoregressive


@dataclass(frozen=True)
class BundleInfo:
    path: Path
    sha256: str
    bytes: int


def write(events: Sequence[Event], path: Path) -> BundleInfo:
    """Write the bundle of the search that `events` tell of, atomically.

    Raises UserError where the search has no incumbent that was measured against stock, or where a checkpoint
    can no longer be read.
    """
    started = _last(events, SearchStarted)
    standing = _last((e for e in events if _is_measured(e)), IncumbentChanged)
    if started is None or standing is None:
        raise UserError(
            "This search has no plan that was measured against stock yet, so there is no bundle to write.",
            code="no-result",
        )
    evidence = _evidence(events, standing)
    checkpoints = Checkpoints(
        target=checkpoint_files(started.deployment.target),
        drafter=None if started.deployment.drafter == NO_DRAFTER else checkpoint_files(started.deployment.drafter),
    )
    files = {
        "plan.json": _text(standing.plan.to_json()),
        "deployment.json": _text(to_json(started.deployment)),
        "evidence.json": _text(to_json(evidence)),
        "checkpoints.json": _text(to_json(checkpoints)),
        "events.jsonl": "".join(json.dumps(e.to_json(), allow_nan=False) + "\n" for e in events),
        "README.md": _readme(path.name, started.deployment, evidence),
    }
    contents = {name: text.encode() for name, text in files.items()}
    manifest = Manifest(
        schema=SCHEMA,
        tool="SpecPilot",
        version=__version__,
        created=datetime.fromtimestamp(events[-1].time, UTC).isoformat(timespec="seconds"),
        files={name: FileEntry(hashlib.sha256(data).hexdigest(), len(data)) for name, data in contents.items()},
    )
    data = pack({"manifest.json": _text(to_json(manifest)).encode(), **contents})
    write_atomically(path, data)
    return BundleInfo(path, hashlib.sha256(data).hexdigest(), len(data))


def read(path: Path | str) -> Bundle:
    """Read the bundle at `path`. Raises UserError, one sentence, for anything that is not as `write` made it."""
    path = Path(path)
    archive = Archive.open(path, f"The bundle {path}")
    manifest = _manifest(archive)
    archive.check_digest()
    found = set(archive.files) - {"manifest.json"}
    for name in sorted(set(manifest.files) - found):
        raise archive.refusal(f"lacks {name}, which its manifest lists")
    for name in sorted(found - set(manifest.files)):
        raise archive.refusal(f"holds {name}, which its manifest does not list")
    for name in sorted(set(_FILES) - found):
        raise archive.refusal(f"lacks {name}")
    for name, entry in sorted(manifest.files.items()):
        content = archive.files[name]
        if len(content) != entry.bytes or hashlib.sha256(content).hexdigest() != entry.sha256:
            raise archive.refusal(f"has a changed {name} (its SHA-256 does not match)", code="bundle-changed")
    bundle = Bundle(
        path=path,
        manifest=manifest,
        deployment=_parse(archive, "deployment.json", Deployment),
        plan=_parse(archive, "plan.json", Plan),
        evidence=_parse(archive, "evidence.json", Evidence),
        checkpoints=_parse(archive, "checkpoints.json", Checkpoints),
        events=_events(archive),
        readme=_decode(archive, "README.md"),
    )
    if bundle.plan != bundle.evidence.standing.plan:
        raise archive.refusal("has evidence of another plan than its plan.json")
    return bundle


def locate_checkpoint(bundle: Bundle, override: str | None = None) -> str:
    """The target that `bundle` was tuned for, on this machine: `override` where given, else the demo target
    or the path that the bundle names. Raises UserError where it is missing or a file's SHA-256 differs."""
    return locate(bundle.deployment.target, bundle.checkpoints.target, override, role="target")


def locate_drafter(bundle: Bundle, override: str | None = None) -> str:
    """The same for the drafter; a drafter without checkpoint is returned as it is."""
    if bundle.checkpoints.drafter is None:
        if override is not None:
            raise UserError(
                f"This bundle's drafter, {bundle.deployment.drafter!r}, has no checkpoint: leave --drafter out.",
                field="drafter",
            )
        return bundle.deployment.drafter
    return locate(bundle.deployment.drafter, bundle.checkpoints.drafter, override, role="drafter")


def _manifest(archive: Archive) -> Manifest:
    if "manifest.json" not in archive.files:
        raise archive.refusal("has no manifest.json, so it is no SpecPilot bundle")
    data = _json(archive, "manifest.json")
    schema = data.get("schema") if isinstance(data, dict) else None
    if not isinstance(schema, int) or isinstance(schema, bool) or schema < 1:
        raise archive.refusal("has a manifest without a schema version")
    if schema > SCHEMA:
        raise UserError(
            f"{archive.what} has schema {schema}, and this SpecPilot ({__version__}) reads up to schema {SCHEMA}: "
            "update SpecPilot to read it.",
            code="bundle-newer",
            field="bundle",
        )
    return _parse(archive, "manifest.json", Manifest)


def _decode(archive: Archive, name: str) -> str:
    try:
        return archive.files[name].decode()
    except UnicodeDecodeError:
        raise archive.refusal(f"has a {name} that is not UTF-8 text") from None


def _json(archive: Archive, name: str) -> Any:
    try:
        return json.loads(_decode(archive, name))
    except (ValueError, RecursionError):
        raise archive.refusal(f"has a {name} that is not JSON") from None


def _parse(archive: Archive, name: str, cls: type[T]) -> T:
    try:
        return from_json(cls, _json(archive, name), what=name)
    except UserError as error:
        if error.field == "bundle":
            raise
        raise archive.refusal(f"cannot be understood ({error.sentence.rstrip('.')})") from None


def _events(archive: Archive) -> tuple[Event, ...]:
    events = []
    for number, line in enumerate(_decode(archive, "events.jsonl").splitlines(), start=1):
        try:
            event = Event.from_json(json.loads(line))
        except (ValueError, RecursionError, UserError):
            raise archive.refusal(f"has an events.jsonl whose line {number} is no event") from None
        if event.seq != number:
            raise archive.refusal(f"has an events.jsonl whose line {number} is out of order")
        events.append(event)
    return tuple(events)


def _last(events: Iterable[Event], cls: type[T]) -> T | None:
    found = [event.body for event in events if isinstance(event.body, cls)]
    return found[-1] if found else None


def _is_measured(event: Event) -> bool:
    return isinstance(event.body, IncumbentChanged) and event.body.over_autoregressive is not None


def _evidence(events: Sequence[Event], standing: IncumbentChanged) -> Evidence:
    stock = {event.body.name: event.body for event in events if isinstance(event.body, StockMeasured)}
    judged = [e.body for e in events if isinstance(e.body, TrialJudged) and e.body.trial == standing.trial]
    probed = _last(events, HardwareProbed)
    return Evidence(
        stock=tuple(stock.values()),
        standing=standing,
        judgement=judged[-1].judgement if judged else None,
        hardware=probed.profile if probed else {},
        versions={"specpilot": __version__, "python": platform.python_version(), **_package_versions()},
    )


def _package_versions() -> dict[str, str]:
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _text(data: Any) -> str:
    return json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def speedup(comparison: Comparison) -> str:
    """A ratio with its 95 % interval, as it is printed everywhere: "2.91x (2.80 to 3.02)"."""
    return f"{comparison.ratio:.2f}x ({comparison.low:.2f} to {comparison.high:.2f})"


def _readme(file: str, deployment: Deployment, evidence: Evidence) -> str:
    """How to run the bundle, and what it claims."""
    standing, judgement = evidence.standing, evidence.judgement
    claims = []
    names = (
        ("stock autoregressive decoding", standing.over_autoregressive),
        ("stock speculative decoding", standing.over_speculative),
        ("our own autoregressive decoding", standing.over_own_autoregressive),
    )
    for name, comparison in names:
        if comparison is not None:
            claims.append(f"- {speedup(comparison)} over {name}, {comparison.reference}")
    if judgement is not None and judgement.forcing is not None:
        forcing = judgement.forcing
        claims.append(
            f"- lossless: of {forcing.tokens} tokens, {forcing.exact} equal stock's choice exactly, {forcing.near_tie} "
            f"are near-ties (limit {forcing.near_tie_limit}), {forcing.error} are errors"
        )
    if judgement is not None and judgement.accept_length is not None:
        claims.append(f"- accept length {judgement.accept_length:.2f} (emitted tokens per verify step, bonus included)")
    device = evidence.hardware.get("name", "unknown device")
    return "\n".join(
        [
            "# SpecPilot bundle",
            "",
            "A tuned plan for lossless speculative decoding, with its evidence. It holds no weights.",
            "",
            f"- target: {deployment.target}",
            f"- drafter: {deployment.drafter}",
            f"- regime: batch {deployment.regime.batch}, up to {deployment.regime.max_new_tokens} new tokens, "
            f"temperature {deployment.regime.temperature:g}, prompts {deployment.regime.prompts}",
            f"- measured on: {device} ({deployment.platform}, {deployment.dtype})",
            *claims,
            "",
            "Speedups are medians of paired ratios with an exact 95 % interval.",
            "",
            "## Run it",
            "",
            "In a checkout of SpecPilot, after `make setup`:",
            "",
            f'    .venv/bin/python -m engine generate --bundle {file} --prompt "Why is the sky blue?"',
            f"    .venv/bin/python -m engine verify --bundle {file}",
            "",
            "The second command measures and token-forces the plan again on your machine and says whether the claim "
            "holds there. Where the checkpoint lies elsewhere, add `--target PATH` (and `--drafter PATH`); its files' "
            "SHA-256 must be those in checkpoints.json.",
            "",
        ]
    )
