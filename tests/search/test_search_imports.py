"""The search core starts fast and without the heavy libraries."""

from __future__ import annotations

import subprocess
import sys

import pytest

MODULES = ("events", "state", "policy", "stopping", "memory", "propose", "tpe", "view")


@pytest.mark.parametrize("module", MODULES)
def test_importing_the_search_core_loads_neither_torch_nor_django_nor_optuna(module: str) -> None:
    code = (
        f"import sys, engine.search.{module}\n"
        "heavy = {'torch', 'transformers', 'django', 'webapp', 'optuna', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'loads {sorted(heavy)}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
