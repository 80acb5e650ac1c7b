"""How a child process is started: its environment, its command line, and the thread that forks it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from subprocess import DEVNULL, Popen
from typing import Any

from engine.paths import REPOSITORY

PASSED_ON = (
    "PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER",
    "SPECPILOT_DATA", "SPECPILOT_DEMO_TARGET", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS",
    "OMP_WAIT_POLICY", "GOMP_CPU_AFFINITY", "KMP_AFFINITY", "KMP_BLOCKTIME", "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR", "XDG_CACHE_HOME",
)  # fmt: skip
"""Environment variables that a child may see. Nothing else of the judge's environment reaches it."""

_spawners: dict[int, ThreadPoolExecutor] = {}


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What a child gets of `environment`: the allow-list, the import path of this code, and no model hub."""
    kept = {name: environment[name] for name in PASSED_ON if name in environment}
    return kept | {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(REPOSITORY), environment.get("PYTHONPATH")))),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def child_command(questions: int, answers: int, parent: int) -> list[str]:
    """The command line of `engine.judge.child`; `parent` is the process id that the child sees as its parent's."""
    return [
        *(sys.executable, "-P", "-m", "engine.judge.child"),
        *("--questions", str(questions), "--answers", str(answers), "--parent", str(parent)),
    ]


def spawn(
    command: list[str], environment: Mapping[str, str], output: Any, descriptors: tuple[int, ...]
) -> Popen[bytes]:
    """Start `command` in a session of its own, with `output` (a file or descriptor) as standard output and error.
    It inherits `descriptors` and no other."""
    return (
        _spawner()
        .submit(
            Popen,
            command,
            stdin=DEVNULL,
            stdout=output,
            stderr=output,
            env=dict(environment),
            pass_fds=descriptors,
            start_new_session=True,
        )
        .result()
    )


def _spawner() -> ThreadPoolExecutor:
    """The one thread of this process that starts children, alive as long as the process.

    The kernel ties PR_SET_PDEATHSIG to the thread that started a child, not to its process: a child started by a
    thread that ends would be killed with it.
    """
    if os.getpid() not in _spawners:
        _spawners.clear()  # after a fork, the other process's thread is not here
        _spawners[os.getpid()] = ThreadPoolExecutor(max_workers=1, thread_name_prefix="judge-spawner")
    return _spawners[os.getpid()]
