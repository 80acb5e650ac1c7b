"""Runs the unit tests of the page's modules (tests/browser/js) in node, which needs no browser."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

JS = Path(__file__).parent / "js"
NODE = shutil.which("node")


def node_major() -> int:
    if NODE is None:
        return 0
    version = subprocess.run([NODE, "--version"], capture_output=True, text=True, check=True).stdout
    return int(version.lstrip("v").split(".")[0])


@pytest.mark.skipif(node_major() < 20, reason="node 20 or later is not installed")
def test_page_modules_in_node() -> None:
    files = sorted(str(path) for path in JS.glob("*.test.js"))
    argv = [str(NODE), "--test", "--test-reporter=tap", *files]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    counts = dict(re.findall(r"^# (pass|fail|skipped) (\d+)$", done.stdout, re.MULTILINE))
    assert done.returncode == 0, done.stdout + done.stderr
    assert counts["fail"] == counts["skipped"] == "0"
    assert int(counts["pass"]) >= 30  # every file was found and ran
