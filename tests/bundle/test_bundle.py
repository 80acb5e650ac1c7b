"""Bundles: what is written is read back, equal content is equal bytes, and anything else is refused in a sentence."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import random
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from engine import bundle as bundles
from engine.archive import pack
from engine.errors import UserError
from engine.search.events import Event, IncumbentChanged

Files = dict[str, bytes]


@pytest.fixture
def written(events: list[Event], tmp_path: Path) -> Path:
    return bundles.write(events, tmp_path / "out" / "bundle.zip").path


def refusal(path: Path) -> UserError:
    with pytest.raises(UserError) as caught:
        bundles.read(path)
    sentence = caught.value.sentence
    assert sentence.endswith(".")
    assert "\n" not in sentence
    assert caught.value.field == "bundle"
    return caught.value


def unpack(path: Path) -> Files:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def repack(path: Path, change: Callable[[Files], None], *, relist: bool = True) -> Path:
    """The bundle with changed files, made consistent again as an attacker could: manifest and outer digest."""
    files = unpack(path)
    change(files)
    if relist:
        manifest = json.loads(files["manifest.json"])
        manifest["files"] = {
            name: {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
            for name, data in files.items()
            if name != "manifest.json"
        }
        files["manifest.json"] = json.dumps(manifest).encode()
    path.write_bytes(pack(files))
    return path


def test_what_is_written_is_read_back(events: list[Event], written: Path, checkpoint: Path) -> None:
    read = bundles.read(written)
    started, standing = events[0].body, events[-1].body
    assert isinstance(standing, IncumbentChanged)
    assert read.plan == standing.plan
    assert read.deployment == started.deployment  # type: ignore[union-attr]
    assert read.events == tuple(events)
    assert read.evidence.standing == standing
    assert [stock.name for stock in read.evidence.stock] == ["autoregressive", "speculative"]
    assert read.evidence.judgement is not None
    assert read.evidence.judgement.forcing is not None
    assert read.evidence.judgement.forcing.exact == 511
    assert read.evidence.hardware["name"] == "Test CPU"
    assert read.evidence.versions["torch"]
    expected = hashlib.sha256((checkpoint / "model.safetensors").read_bytes()).hexdigest()
    assert read.checkpoints.target.files["model.safetensors"] == expected
    assert set(read.checkpoints.target.files) == {"config.json", "model.safetensors"}
    assert read.checkpoints.drafter is None


def test_it_holds_no_weights(written: Path, checkpoint: Path) -> None:
    assert not any(name.endswith((".safetensors", ".gguf")) for name in unpack(written))
    weights = (checkpoint / "model.safetensors").read_bytes()
    assert not any(weights[-64:] in data for data in unpack(written).values())


def test_info_tells_size_and_digest_of_the_file(events: list[Event], tmp_path: Path) -> None:
    info = bundles.write(events, tmp_path / "bundle.zip")
    data = info.path.read_bytes()
    assert (info.sha256, info.bytes) == (hashlib.sha256(data).hexdigest(), len(data))


def test_equal_content_is_equal_bytes(events: list[Event], tmp_path: Path) -> None:
    first = bundles.write(events, tmp_path / "a" / "bundle.zip").path.read_bytes()
    second = bundles.write(events, tmp_path / "b" / "bundle.zip").path.read_bytes()
    assert first == second


def test_readme_names_claim_and_both_commands(written: Path) -> None:
    readme = bundles.read(written).readme
    assert "python -m engine generate --bundle bundle.zip --prompt" in readme
    assert "python -m engine verify --bundle bundle.zip" in readme
    assert "2.91x (2.80 to 3.02) over stock autoregressive" in readme
    assert "511 equal stock's choice exactly" in readme


def test_the_newest_measured_standing_is_bundled(events: list[Event], tmp_path: Path) -> None:
    body = events[-1].body
    assert isinstance(body, IncumbentChanged)
    unmeasured = dataclasses.replace(body, over_autoregressive=None, over_incumbent=9.0)
    more = [*events, Event(len(events) + 1, 1.8e9, unmeasured)]
    assert bundles.read(bundles.write(more, tmp_path / "b.zip").path).evidence.standing == body


def test_a_search_without_result_has_no_bundle(events: list[Event], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no plan that was measured against stock"):
        bundles.write(events[:-1], tmp_path / "b.zip")
    assert not list(tmp_path.glob("*.zip"))


def test_writing_again_replaces_the_old_one_and_leaves_no_scratch(events: list[Event], tmp_path: Path) -> None:
    path = tmp_path / "out" / "bundle.zip"
    path.parent.mkdir()
    path.write_bytes(b"torn")
    bundles.write(events, path)
    assert bundles.read(path).plan
    assert [p.name for p in path.parent.iterdir()] == ["bundle.zip"]


# Bad bundles ----------------------------------------------------------------------------------------------------


def test_any_changed_byte_is_noticed(written: Path) -> None:
    original = written.read_bytes()
    rng = random.Random(20)
    # The structure at the end wholly, the rest by a sample.
    positions = {*range(len(original) - 900, len(original)), *rng.sample(range(len(original)), 600)}
    for position in positions:
        changed = bytearray(original)
        changed[position] ^= 1 << rng.randrange(8)
        written.write_bytes(changed)
        refusal(written)


def test_truncated_and_extended(written: Path) -> None:
    original = written.read_bytes()
    for data in (original[: len(original) // 2], original[:-1], original + b"x", b""):
        written.write_bytes(data)
        refusal(written)


def test_not_a_zip(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello " * 50)
    assert "no intact zip file" in refusal(path).sentence


def test_missing_file_and_folder(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "nothing.zip").sentence
    assert "is not a file" in refusal(tmp_path).sentence


def test_changed_file_with_a_consistent_archive_is_named(written: Path) -> None:
    def edit(files: Files) -> None:
        files["plan.json"] = files["plan.json"].replace(b"true", b"false")

    error = refusal(repack(written, edit, relist=False))
    assert error.code == "bundle-changed"
    assert "plan.json" in error.sentence


def test_forged_plan_contradicts_its_evidence(written: Path) -> None:
    def edit(files: Files) -> None:
        files["plan.json"] = files["plan.json"].replace(b"packed", b"library")

    assert "evidence of another plan" in refusal(repack(written, edit)).sentence


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"schema": 2}, "schema 2"),
        ({"schema": 2, "files": "in another form"}, "schema 2"),
        ({"schema": "1"}, "without a schema version"),
        ({"schema": True}, "without a schema version"),
        ({"schema": 0}, "without a schema version"),
        ({"surplus": 1}, "surplus"),
    ],
)
def test_manifests_of_another_kind(written: Path, change: dict[str, object], complaint: str) -> None:
    def edit(files: Files) -> None:
        files["manifest.json"] = json.dumps({**json.loads(files["manifest.json"]), **change}).encode()

    assert complaint in refusal(repack(written, edit, relist=False)).sentence


def test_newer_schema_says_update(written: Path) -> None:
    def edit(files: Files) -> None:
        files["manifest.json"] = json.dumps({"schema": 7, "anything": {}}).encode()

    error = refusal(repack(written, edit, relist=False))
    assert error.code == "bundle-newer"
    assert "update SpecPilot" in error.sentence


@pytest.mark.parametrize("name", ["plan.json", "events.jsonl", "README.md", "manifest.json"])
def test_missing_member(written: Path, name: str) -> None:
    error = refusal(repack(written, lambda files: files.pop(name) and None, relist=False))
    assert name in error.sentence


@pytest.mark.parametrize("name", ["plan.json", "checkpoints.json"])
def test_missing_member_that_is_not_listed_either(written: Path, name: str) -> None:
    assert f"lacks {name}" in refusal(repack(written, lambda files: files.pop(name) and None)).sentence


def test_surplus_member(written: Path) -> None:
    error = refusal(repack(written, lambda files: files.update({"run.sh": b"rm"}), relist=False))
    assert "run.sh" in error.sentence


@pytest.mark.parametrize(
    "name", ["../plan.json", "a/../../b", "/etc/passwd", "..\\up", "C:\\x", "C:/x", "a//b", "./a", "a/", "..", "n\0m"]
)
def test_names_that_leave_the_folder(written: Path, name: str) -> None:
    files = unpack(written)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for known, data in files.items():
            archive.writestr(known, data)
        info = zipfile.ZipInfo("placeholder")
        info.filename = name  # past ZipInfo's own clean-up
        archive.writestr(info, b"x")
    written.write_bytes(buffer.getvalue())
    error = refusal(written)
    assert error.code == "bundle-path"
    assert repr(name) in error.sentence


def test_duplicate_names(written: Path) -> None:
    files = unpack(written)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for known, data in files.items():
            archive.writestr(known, data)
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("plan.json", b"{}")
    written.write_bytes(buffer.getvalue())
    assert "'plan.json' twice" in refusal(written).sentence


def test_symlinks(written: Path) -> None:
    info = zipfile.ZipInfo("link.json")
    info.create_system = 3
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(written, "a") as archive:
        archive.writestr(info, "/etc/passwd")
    assert "link or special file" in refusal(written).sentence


def test_too_many_files(written: Path) -> None:
    with zipfile.ZipFile(written, "a") as archive:
        for number in range(100):
            archive.writestr(f"extra-{number}", b"")
    assert "more than the 64" in refusal(written).sentence


def test_zip_bomb_is_refused_before_it_is_unpacked(written: Path) -> None:
    with (
        zipfile.ZipFile(written, "a", compression=zipfile.ZIP_DEFLATED) as archive,
        archive.open("bomb", "w") as out,
    ):
        for _ in range(80):
            out.write(bytes(1 << 20))
    assert written.stat().st_size < 1 << 20
    error = refusal(written)
    assert error.code == "bundle-too-large"
    assert "'bomb'" in error.sentence


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("plan.json", b"{not json"),
        ("plan.json", b'{"gemm": "magic"}'),
        ("deployment.json", b"[]"),
        ("evidence.json", b"\xff\xfe"),
        ("events.jsonl", b'{"seq": 1}\n'),
        ("plan.json", b"[" * 100_000),
    ],
)
def test_members_that_mean_nothing(written: Path, name: str, content: bytes) -> None:
    assert name in refusal(repack(written, lambda files: files.update({name: content}))).sentence


# Where its checkpoint is ----------------------------------------------------------------------------------------


def test_checkpoint_is_found_where_the_bundle_says(written: Path, checkpoint: Path) -> None:
    assert bundles.locate_checkpoint(bundles.read(written)) == str(checkpoint)
    assert bundles.locate_drafter(bundles.read(written)) == "ngram"


def test_checkpoint_is_found_by_override(written: Path, checkpoint: Path, tmp_path: Path) -> None:
    moved = checkpoint.rename(tmp_path / "elsewhere")
    read = bundles.read(written)
    with pytest.raises(UserError, match="--target PATH"):
        bundles.locate_checkpoint(read)
    assert bundles.locate_checkpoint(read, str(moved)) == str(moved)


def test_another_checkpoint_is_refused_by_name(written: Path, other_checkpoint: Path) -> None:
    with pytest.raises(UserError, match=r"model\.safetensors has SHA-256") as caught:
        bundles.locate_checkpoint(bundles.read(written), str(other_checkpoint))
    assert str(other_checkpoint) in caught.value.sentence
    assert caught.value.field == "target"


def test_a_changed_checkpoint_is_noticed_despite_the_kept_hash(written: Path, checkpoint: Path) -> None:
    read = bundles.read(written)
    assert bundles.locate_checkpoint(read)
    weights = checkpoint / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(UserError, match=r"model\.safetensors"):
        bundles.locate_checkpoint(read)


def test_an_unchanged_file_is_hashed_once(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.checkpoint_files import file_sha256

    first = file_sha256(checkpoint / "model.safetensors")
    monkeypatch.setattr(hashlib, "file_digest", lambda *_: pytest.fail("hashed again"))
    assert file_sha256(checkpoint / "model.safetensors") == first


def test_a_drafter_for_a_bundle_without_one_is_refused(written: Path, checkpoint: Path) -> None:
    with pytest.raises(UserError, match="leave --drafter out"):
        bundles.locate_drafter(bundles.read(written), str(checkpoint))
