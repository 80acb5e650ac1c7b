"""A strict, reproducible zip: equal content gives equal bytes, and one changed byte is noticed.

The archive's comment ends the file and holds the SHA-256 of every byte before it, so a change in a header,
which zip's own checksums do not cover, is seen as well as one in a file.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
import struct
import tempfile
import zipfile
import zlib
from pathlib import Path

from engine.errors import UserError

MAX_ARCHIVE_BYTES = 128 << 20
MAX_FILE_BYTES = 64 << 20  # of one file, unpacked
MAX_TOTAL_BYTES = 128 << 20  # of all files, unpacked
MAX_FILES = 64
_EPOCH = (1980, 1, 1, 0, 0, 0)  # zip's earliest time
_COMMENT = b"specpilot sha256="
_COMMENT_BYTES = len(_COMMENT) + 64
_ZIP_ERRORS = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    NotImplementedError,
    ValueError,
    OverflowError,
)
"""What `zipfile` raises for damaged archives."""


def pack(files: dict[str, bytes]) -> bytes:
    """Zip `files` (name -> content) in the order given."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression=zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, content in files.items():
            info = zipfile.ZipInfo(name, date_time=_EPOCH)
            info.create_system = 3  # Unix, on every system
            info.external_attr = (stat.S_IFREG | 0o644) << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, content)
        archive.comment = _COMMENT + b"0" * 64
    body = buffer.getvalue()[:-_COMMENT_BYTES]
    return body + _COMMENT + hashlib.sha256(body).hexdigest().encode()


def write_atomically(path: Path, data: bytes) -> None:
    """Write `data` to `path` so that a reader, or a crash, sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        Path(scratch).chmod(0o644)
        Path(scratch).replace(path)
    except BaseException:
        Path(scratch).unlink(missing_ok=True)
        raise


class Archive:
    """A zip that was checked for everything that can be checked before its files mean anything.

    Nothing is ever unpacked to disk. `files` is name -> content.
    """

    def __init__(self, data: bytes, what: str) -> None:
        self.what = what
        self._data = data
        self.files: dict[str, bytes] = {}
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                self._check_entries(archive.infolist())
                for info in archive.infolist():
                    with archive.open(info) as member:
                        # One byte more than declared: reads to the end, which checks the CRC, and no further.
                        self.files[info.filename] = member.read(info.file_size + 1)
        except _ZIP_ERRORS as error:
            raise self.refusal(f"is no intact zip file ({_plain(error)})") from None

    @classmethod
    def open(cls, path: Path, what: str) -> Archive:
        """Read the zip at `path`. Raises UserError in one sentence that begins with `what`."""
        try:
            size = path.stat().st_size
            if not path.is_file():
                raise UserError(f"{what} is not a file.", code="bundle-unreadable", field="bundle")
            if size > MAX_ARCHIVE_BYTES:
                raise UserError(
                    f"{what} is {size >> 20} MiB; a bundle has at most {MAX_ARCHIVE_BYTES >> 20} MiB.",
                    code="bundle-too-large",
                    field="bundle",
                )
            data = path.read_bytes()
        except FileNotFoundError:
            raise UserError(f"{what} does not exist.", code="bundle-unreadable", field="bundle") from None
        except OSError as error:
            raise UserError(
                f"{what} cannot be read: {error.strerror}.", code="bundle-unreadable", field="bundle"
            ) from None
        return cls(data, what)

    def check_digest(self) -> None:
        """Refuse an archive of which any byte was changed since `pack`."""
        comment, body = self._data[-_COMMENT_BYTES:], self._data[:-_COMMENT_BYTES]
        if comment != _COMMENT + hashlib.sha256(body).hexdigest().encode():
            raise self.refusal("was changed after it was written (its SHA-256 does not match)", code="bundle-changed")

    def refusal(self, complaint: str, *, code: str = "bundle-invalid") -> UserError:
        return UserError(f"{self.what} {complaint}; get the bundle again from its source.", code=code, field="bundle")

    def _check_entries(self, entries: list[zipfile.ZipInfo]) -> None:
        if len(entries) > MAX_FILES:
            raise self.refusal(f"holds {len(entries)} files, more than the {MAX_FILES} that a bundle may have")
        seen: set[str] = set()
        for info in entries:
            # `orig_filename` is the stored name; `filename` is cut at a NUL and has other separators replaced.
            name = info.orig_filename
            kind = stat.S_IFMT(info.external_attr >> 16)
            if name.startswith(("/", "\\")) or name[1:2] == ":":
                raise self.refusal(f"holds an absolute path, {name!r}", code="bundle-path")
            if any(part in ("", ".", "..") for part in name.replace("\\", "/").split("/")) or name != info.filename:
                raise self.refusal(f"holds a path that leaves its folder or is malformed, {name!r}", code="bundle-path")
            if name in seen:
                raise self.refusal(f"holds {name!r} twice", code="bundle-path")
            if kind not in (0, stat.S_IFREG):
                raise self.refusal(f"holds {name!r}, which is a link or special file", code="bundle-path")
            if info.flag_bits & 0x1:
                raise self.refusal(f"holds {name!r} encrypted")
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise self.refusal(f"holds {name!r} in a compression that bundles do not use")
            seen.add(name)
        large = [info.filename for info in entries if info.file_size > MAX_FILE_BYTES]
        if large or sum(info.file_size for info in entries) > MAX_TOTAL_BYTES:
            name = large[0] if large else entries[0].filename
            raise self.refusal(
                f"unpacks to more than a bundle may hold (see {name!r}; {MAX_TOTAL_BYTES >> 20} MiB in all)",
                code="bundle-too-large",
            )


def _plain(error: Exception) -> str:
    """An exception's words without a final full stop, to stand inside a sentence."""
    return str(error).rstrip(".") or type(error).__name__
