"""Record how long one and the same answer takes, over and over: the noise that the judge's rule is simulated with.

    python tests/judge/record_noise.py [RUNS]      writes tests/judge/data/noise.json

The demo model decodes one prompt in a child, as in a trial, once on the machine as it is ("quiet": runs with more
foreign load than the judge lets pass are left out) and once beside a process that burns a core for 0.05 to 0.6 s every
two seconds or so ("busy"). Each run has its seconds over the trace's median, and the foreign load that was measured
during it, in cores. "loads" has the medians beside a process that uses a fixed share of a core, of the runs in which
nothing else ran.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from engine.demo import demo_target_path  # noqa: E402
from engine.deployment import Deployment, Regime  # noqa: E402
from engine.hardware import identify_device  # noqa: E402
from engine.judge import load  # noqa: E402
from engine.judge.conditions import FOREIGN_LIMIT  # noqa: E402
from engine.judge.hidden import prepare  # noqa: E402
from engine.judge.seats import Seat, Seats, Timeouts  # noqa: E402
from engine.levers import usable_cores  # noqa: E402
from engine.plan import Plan  # noqa: E402

DATA = Path(__file__).parent / "data" / "noise.json"
NEW_TOKENS = 10
SHARES = (0.0, 0.05, 0.1, 0.2, 0.5)
LOAD_RUNS = 15
BURN = """
import random, sys, time
def burn(seconds):
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass
while True:
    {0}
"""
STEADY = "burn(0.02 * {0}); time.sleep(0.02 * (1 - {0}))"
BURSTS = "burn(random.uniform(0.05, 0.6)); time.sleep(random.expovariate(0.5))"


@contextmanager
def competitor(body: str) -> Iterator[None]:
    """A process that is not this one's child and does `body` over and over."""
    command = ["sh", "-c", '"$0" -c "$1" >/dev/null 2>&1 & echo $!', sys.executable, BURN.format(body)]
    pid = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    try:
        yield
    finally:
        subprocess.run(["kill", "-KILL", str(pid)], check=True)


def run(seat: Seat, prompt: tuple[int, ...]) -> tuple[float, float]:
    """Seconds of an answer and the foreign load in cores meanwhile."""
    before = load.read_counters()
    seconds = seat.generate(prompt, NEW_TOKENS).seconds
    after = load.read_counters()
    if before is None or after is None:
        raise SystemExit("this system counts no CPU time in /proc")
    return seconds, load.difference(before, after).foreign


def record(seat: Seat, prompt: tuple[int, ...], runs: int, shares: tuple[float, float]) -> list[tuple[float, float]]:
    """`runs` runs whose foreign load lies between the two shares of a core."""
    found: list[tuple[float, float]] = []
    for _ in range(10 * runs):
        seconds, foreign = run(seat, prompt)
        if shares[0] <= foreign - load.TICK_S / seconds <= shares[1]:
            found.append((seconds, foreign))
        if len(found) == runs:
            return found
    raise SystemExit("this machine is not quiet enough")


def trace(found: list[tuple[float, float]]) -> dict[str, list[float]]:
    middle = statistics.median(seconds for seconds, _ in found)
    return {
        "relative": [round(seconds / middle, 4) for seconds, _ in found],
        "foreign": [round(cores, 3) for _, cores in found],
        "median_s": [round(middle, 4)],
    }


def main(runs: int) -> None:
    served = Deployment(target=str(demo_target_path()), drafter="ngram", regime=Regime(max_new_tokens=NEW_TOKENS))
    material = prepare(served)
    prompt = min(material.prompts, key=lambda each: len(each.ids)).ids
    with tempfile.TemporaryDirectory() as folder:
        seats = Seats(served, material, usable_cores(), Path(folder), 1, Timeouts())
        try:
            seat = seats.start("one", "incumbent", "engine", Plan(source="none", gemm="transposed"))
            for _ in range(10):
                seat.generate(prompt, NEW_TOKENS)
            quiet = trace(record(seat, prompt, runs, (-1.0, FOREIGN_LIMIT)))
            with competitor(BURSTS):
                busy = trace(record(seat, prompt, runs, (-1.0, math.inf)))
            loads = {}
            for share in SHARES:
                with competitor(STEADY.format(share)):
                    found = record(seat, prompt, LOAD_RUNS, (share - 0.1, share + 0.05))
                seconds, cores = (statistics.median(column) for column in zip(*found, strict=True))
                loads[str(share)] = {"median": round(seconds / quiet["median_s"][0], 4), "foreign": round(cores, 3)}
        finally:
            seats.close()
    machine = identify_device("cpu")
    result = {
        "how": " ".join((__doc__ or "").split("\n\n")[2].split()),
        "date": datetime.now(UTC).date().isoformat(),
        "device": {"name": machine.name, "cores": machine.cores, "versions": machine.versions},
        "what": f"SmolLM2-135M-Instruct, fp32, autoregressive, {NEW_TOKENS} tokens a run, {usable_cores()} threads",
        "quiet": quiet,
        "busy": busy,
        "loads": loads,
    }
    DATA.parent.mkdir(exist_ok=True)
    DATA.write_text(json.dumps(result) + "\n")
    for name in ("quiet", "busy"):
        values = sorted(result[name]["relative"])
        print(name, result[name]["median_s"], [values[len(values) * q // 100] for q in (1, 10, 25, 50, 75, 90, 99)])
    print(json.dumps(loads, indent=1))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 300)
