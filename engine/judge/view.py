"""The file system that a sandbox shows, as bubblewrap's options: the deepest entry wins, nothing else is there.

Paths keep their own names. A path is followed link by link: each link becomes the same link inside, and what lies at
its end is bound read-only.
"""

from __future__ import annotations

import os
import site
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engine.errors import UserError
from engine.paths import REPOSITORY, data_dir

SCRATCH = Path("/tmp")
HOME = SCRATCH / "home"
CACHE = SCRATCH / "cache"
OWN_PACKAGES = ("engine", "kernels")
NOT_SHOWN = ("prompts_data", "results")
"""Subfolders of our packages that are no code."""
MOST_LINKS = 40

_SYSTEM = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache", "/etc/ld.so.conf",
    "/etc/ld.so.conf.d", "/nix/store", "/run/opengl-driver", "/sys/devices/system/cpu", "/sys/devices/system/node",
)  # fmt: skip
_PRIVATE = {
    "HOME": str(HOME),
    "TMPDIR": str(SCRATCH),
    "USER": "sandbox",
    "LOGNAME": "sandbox",
    "SPECPILOT_DATA": str(SCRATCH / "data"),
    "XDG_CACHE_HOME": str(CACHE),
    "TRITON_CACHE_DIR": str(CACHE / "triton"),
    "TORCHINDUCTOR_CACHE_DIR": str(CACHE / "inductor"),
    "CUDA_CACHE_PATH": str(CACHE / "cuda"),
}


def environment(outside: Mapping[str, str]) -> dict[str, str]:
    """The environment inside, from that of an unconfined child: private folders, and search paths cut to what may be
    shown."""
    kept = {name: value for name, value in outside.items() if name not in ("CUDA_VISIBLE_DEVICES", "PYTHONPATH")}
    result = kept | _PRIVATE
    result["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), *map(str, _entries(outside.get("PYTHONPATH", "")))])
    if "LD_LIBRARY_PATH" in outside:
        result["LD_LIBRARY_PATH"] = os.pathsep.join(map(str, _entries(outside["LD_LIBRARY_PATH"])))
    if site.ENABLE_USER_SITE:
        result["PYTHONUSERBASE"] = str(site.getuserbase())
    return result


def options(
    files: Iterable[Path], devices: Iterable[Path], outside: Mapping[str, str], scratch_bytes: int
) -> list[str]:
    """bwrap's options for the whole file system. `files` are shown besides what every child needs; `outside` is the
    environment of an unconfined child."""
    shown = [*_libraries(outside), *_interpreter(outside), *_own_code(), *files]
    size = ["--size", str(scratch_bytes), "--tmpfs"]
    result = []
    covers = []
    for entry in plan(shown, (REPOSITORY, data_dir())):
        match entry.kind:
            case "bind":
                result += ["--ro-bind", entry.source, str(entry.path)]
            case "link":
                result += ["--symlink", entry.source, str(entry.path)]
            case "scratch":
                result += [*size, str(entry.path)]
            case "cover":
                result += ["--tmpfs", str(entry.path)]
                covers.append(entry.path)
    for folder in (HOME, CACHE, CACHE / "triton", CACHE / "inductor", CACHE / "cuda", SCRATCH / "data"):
        result += ["--perms", "0700", "--dir", str(folder)]
    result += [*_proc(), "--dev", "/dev", *size, "/dev/shm"]
    for device in devices:
        result += ["--dev-bind", str(device), str(device)]
    for folder in (Path("/dev"), *covers, Path("/")):
        result += ["--remount-ro", str(folder)]
    return result


def _proc() -> list[str]:
    """A /proc of its own, in which only processes can be written to (CUDA does, to its own): what belongs to the system
    is read-only, for root may write there without any capability. Init cannot be seen: who writes to its memory could
    have it outlive the judge."""
    result = ["--proc", "/proc"]
    for path in sorted(Path("/proc").iterdir()):
        if not path.name.isdigit() and not path.is_symlink() and (path.is_dir() or path.stat().st_mode & 0o222):
            result += ["--ro-bind-try", str(path), str(path)]
    return [*result, "--tmpfs", "/proc/1", "--remount-ro", "/proc/1"]


@dataclass(frozen=True)
class Entry:
    """One thing at `path`: what is bound from `source`, a link to `source`, the scratch folder, or a cover that hides
    what an entry above would show."""

    path: Path
    kind: Literal["bind", "link", "scratch", "cover"]
    source: str = ""


def plan(shown: Iterable[Path], hidden: Iterable[Path]) -> list[Entry]:
    """Entries in the order in which they have to be made. Of `hidden` folders only what is `shown` by itself can be
    seen, also where a folder above them is shown."""
    entries = {SCRATCH: Entry(SCRATCH, "scratch")}
    for path in hidden:
        real = path.resolve()
        entries[real] = Entry(real, "cover")
    for path in shown:
        links, real = follow(path)
        entries |= {link: Entry(link, "link", target) for link, target in links.items()}
        entries[real] = Entry(real, "bind", str(real))
    made: dict[Path, Entry] = {}
    for path in sorted(entries, key=lambda path: len(path.parts)):
        above = next((made[parent] for parent in path.parents if parent in made), None)
        inside = above is not None and above.kind == "bind"
        needed = not inside if entries[path].kind in ("bind", "link") else True
        if entries[path].kind == "cover":
            needed = inside
        if needed:
            made[path] = entries[path]
    return list(made.values())


def follow(path: Path) -> tuple[dict[Path, str], Path]:
    """The symbolic links on the way to `path` (absolute), by place, and the real path at the end."""
    links: dict[Path, str] = {}
    here, rest, followed = Path("/"), list(path.parts[1:]), 0
    while rest:
        part = rest.pop(0)
        if part == "..":
            here = here.parent
            continue
        step = here / part
        if not step.is_symlink():
            here = step
            continue
        followed += 1
        if followed > MOST_LINKS:  # or a circle of them
            raise UserError(f"{path} goes through more than {MOST_LINKS} symbolic links.", code="bad-path")
        links[step] = str(step.readlink())
        target = Path(links[step])
        here = Path("/") if target.is_absolute() else here
        rest = [*(target.parts[1:] if target.is_absolute() else target.parts), *rest]
    return links, here


def _libraries(outside: Mapping[str, str]) -> Iterator[Path]:
    named = (Path(text) for text in (*_SYSTEM, *_linker_folders()))
    yield from (path for path in named if path.exists())
    yield from _entries(outside.get("LD_LIBRARY_PATH", ""))


def _linker_folders() -> Iterator[str]:
    for file in sorted(Path("/etc/ld.so.conf.d").glob("*.conf")):
        yield from (line.strip() for line in file.read_text(errors="replace").splitlines() if line.startswith("/"))


def _interpreter(outside: Mapping[str, str]) -> Iterator[Path]:
    """The interpreter with the packages that it has by itself, by its virtual environment and by PYTHONPATH."""
    packages = [entry for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]
    for text in (sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix, sys.executable, *packages):
        path = Path(text).absolute()
        # An environment made in the repository itself is shown without the repository.
        parts = (
            [path / name for name in ("bin", "lib", "lib64", "pyvenv.cfg")] if path.resolve() == REPOSITORY else [path]
        )
        yield from (part for part in parts if part.exists())
    yield from _entries(outside.get("PYTHONPATH", ""))


def _own_code() -> Iterator[Path]:
    for package in OWN_PACKAGES:
        for path in sorted((REPOSITORY / package).iterdir()):
            if path.name not in NOT_SHOWN:
                yield path


def _entries(search_path: str) -> list[Path]:
    """Folders of a search path that hold nothing but libraries: none that is in the repository, or that holds it, the
    data folder or the home folder."""
    private = [folder.resolve() for folder in (REPOSITORY, data_dir(), Path.home())]
    found = []
    for text in filter(None, search_path.split(os.pathsep)):
        folder = Path(text).expanduser().absolute()
        real = folder.resolve()
        holds = any(other.is_relative_to(real) for other in private)
        if folder.is_dir() and not holds and not real.is_relative_to(private[0]):
            found.append(folder)
    return found
