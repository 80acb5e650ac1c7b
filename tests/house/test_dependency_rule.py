"""The direction of imports: kernels <- engine <- webapp; templates and static know only URLs and JSON."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("engine", "kernels", "webapp", "tests")
WEB = {"django", "webapp", "celery", "channels", "rest_framework", "redis"}
KERNEL_MAY = {"torch", "triton", "cuda", "kernels"}


def imports(path: Path) -> set[str]:
    """Top-level names of all modules that a file imports, in functions too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module.split(".")[0])
    return found


def sources(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


def test_the_rooms_are_found() -> None:
    assert len(sources("engine")) > 20
    assert sources("webapp")


@pytest.mark.parametrize("path", sources("engine"), ids=lambda p: str(p.relative_to(ROOT)))
def test_engine_imports_no_web(path: Path) -> None:
    assert not imports(path) & (WEB | {"tests"})


def test_kernels_import_torch_and_triton_only() -> None:
    for path in sources("kernels"):
        outside = imports(path) - KERNEL_MAY - set(sys.stdlib_module_names)
        assert not outside, f"{path.relative_to(ROOT)} imports {outside}"


def test_product_does_not_import_tests() -> None:
    for room in ("engine", "kernels", "webapp"):
        for path in sources(room):
            assert "tests" not in imports(path), path


def test_top_level_is_fixed() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    top = {line.split("/")[0] for line in tracked.splitlines()}
    rooms = {"webapp", "engine", "kernels", "templates", "static", "tests", "manage.py", "requirements.txt"}
    about = {"README.md", "LICENSE", "Makefile", "pyproject.toml", ".gitignore", ".ci"}
    assert top <= rooms | about


BLOCKED = """
import sys, importlib, pkgutil
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"django", "webapp", "celery", "channels"}:
            raise ImportError("blocked: " + name)
sys.meta_path.insert(0, Block())
import engine
names = [m.name for m in pkgutil.walk_packages(engine.__path__, "engine.") if not m.name.endswith("__main__")]
for name in names:
    importlib.import_module(name)
print(len(names))
"""


def test_engine_imports_with_django_blocked() -> None:
    done = subprocess.run([sys.executable, "-c", BLOCKED], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20
