"""A search in the terminal: a history of lines and, on a terminal, a panel with where it stands.

The panel is drawn again only when something happened: a clock that ticks by itself would take time from the
cores that are being measured.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from engine.bundle import speedup
from engine.search.events import (
    ActionFailed,
    BundleWritten,
    CandidateProposed,
    Event,
    HardwareProbed,
    IncumbentChanged,
    Note,
    Profiled,
    SearchFinished,
    SearchStarted,
    StatusChanged,
    StockMeasured,
    TrialJudged,
)

_VERDICT_STYLE = {"accepted": "green", "slower": "yellow", "lossy": "red", "crashed": "red", "timed out": "red"}
View = dict[str, Any]
"""What `engine.search.view.view` returns."""


class Screen(Protocol):
    """Where a search is shown. `event` comes after the event was stored and folded."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...
    def event(self, event: Event, view: View) -> None: ...
    def progress(self, text: str) -> None: ...
    def say(self, text: str) -> None: ...


def open_screen() -> Screen:
    """The panel on a terminal, plain lines elsewhere (a file, a pipe, CI)."""
    return TerminalScreen(Console()) if sys.stdout.isatty() else LineScreen()


class LineScreen:
    """One line for each thing that happened; long lines are left to the reader to wrap."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        sys.stdout.flush()

    def event(self, event: Event, view: View) -> None:
        line = describe(event, view)
        if line is not None:
            print(line[0], flush=True)

    def progress(self, text: str) -> None:
        """Left out: a file of phases tells nobody anything."""

    def say(self, text: str) -> None:
        print(text, flush=True)


class TerminalScreen:
    """The same lines, above a panel."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._view: View | None = None
        self._phase = ""

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.stop()

    def event(self, event: Event, view: View) -> None:
        self._view = view
        self._phase = ""  # of what came before this event
        line = describe(event, view)
        if line is not None:
            self._console.print(Text(line[0], style=line[1]))
        self._draw()

    def progress(self, text: str) -> None:
        self._phase = text
        self._draw()

    def say(self, text: str) -> None:
        self._console.print(Text(text))

    def _draw(self) -> None:
        if self._view is not None:
            self._live.update(panel(self._view, self._phase), refresh=True)


def panel(view: View, phase: str) -> RenderableType:
    """Where the search stands: speedup, largest gap, what is running, budget."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column()
    doing = view["sentence"]
    if phase and view["finished"] is None:
        doing = f"{doing.removesuffix('.')}: {phase}."
    facts.add_row("now", Text(doing))
    headline = view["headline"]
    for key, label in _OVER:
        if headline.get(key) is not None:
            facts.add_row(label, Text(_interval(headline[key]), style="bold green"))
    for stock in view["stocks"]:
        facts.add_row(f"stock {stock['name']}", Text(_stock_rate(stock)))
    gap = view["largest_gap"]
    if gap is not None:
        facts.add_row("largest gap", Text(f"{gap['label']}, {gap['gap_ms']:.2f} ms per token"))
    for item in view["candidates"]:
        if item["status"] == "running":
            facts.add_row(f"trial {item['trial']}", Text(_changes(item)))
    return Panel(Group(facts, _budget(view)), title=f"round {view['round']}", title_align="left", border_style="dim")


def describe(event: Event, view: View) -> tuple[str, str] | None:
    """The line that tells of this event, with its rich style; None for one that only moves the panel."""
    body = event.body
    match body:
        case SearchStarted():
            what = body.deployment
            trials = f"{body.budget.trials} {'trial' if body.budget.trials == 1 else 'trials'}"
            return (
                f"Searching {view['title']} (target {what.target}, drafter {what.drafter}); "
                f"at most {body.budget.seconds:.0f} s and {trials}.",
                "bold",
            )
        case HardwareProbed():
            device = body.profile
            return (
                f"Device: {device['name']}, reads {device['read_gb_s']:.1f} GB/s, "
                f"multiplies {device['matmul_gflop_s']:.0f} GFLOP/s.",
                "",
            )
        case StockMeasured():
            accept = _drafted(body.name, body.accept_length)
            return f"Stock {body.name} ({body.implementation}): {body.tok_s:.1f} tokens/s{accept}.", ""
        case Profiled():
            gap = view["largest_gap"]
            largest = f"; largest gap: {gap['sentence']}" if gap is not None else ""
            return (
                f"Round {body.round}: {body.ms_per_token:.1f} ms per token, accept length "
                f"{body.accept_length:.2f}{largest}",
                "bold",
            )
        case CandidateProposed():
            return f"  trial {body.trial} ({body.kind}, {body.arm}): {_changes(_candidate(view, body.trial))}", "dim"
        case TrialJudged():
            verdict = body.judgement.verdict
            text = f"  trial {body.trial} {verdict}: {body.judgement.reason}"
            return text, _VERDICT_STYLE.get(verdict, "")
        case IncumbentChanged():
            return f"Best so far: {_standing(body)}.", "bold green"
        case ActionFailed():
            return f"Something of ours failed and is tried again ({body.key}): {body.reason}", "red"
        case StatusChanged():
            return f"The search is {body.status}.", "yellow"
        case Note():
            return body.text, ""
        case BundleWritten():
            return f"Bundle: {body.file}, {body.bytes / 1024:.0f} KiB, SHA-256 {body.sha256[:16]}...", ""
        case SearchFinished():
            return body.sentence, "bold"
    return None


_OVER = (
    ("over_autoregressive", "over stock autoregressive"),
    ("over_speculative", "over stock speculative"),
    ("over_own_autoregressive", "over our own autoregressive"),
)


def _standing(body: IncumbentChanged) -> str:
    parts = [f"{speedup(comparison)} {label}" for key, label in _OVER if (comparison := getattr(body, key)) is not None]
    name = "the closing measurement" if body.final else f"trial {body.trial}"
    return f"{name}, " + ", ".join(parts) if parts else f"{name}, {body.over_incumbent:.2f}x over the one before"


def _interval(ratio: View) -> str:
    return f"{ratio['ratio']:.2f}x ({ratio['low']:.2f} to {ratio['high']:.2f})"


def _stock_rate(stock: View) -> str:
    return f"{stock['tok_s']:.1f} tokens/s{_drafted(stock['name'], stock['accept_length'])}"


def _drafted(name: str, accept_length: float | None) -> str:
    """A baseline's accept length, where it drafts at all."""
    return "" if accept_length is None or name == "autoregressive" else f", accept length {accept_length:.2f}"


def _candidate(view: View, trial: int) -> View:
    found: View = next(item for item in view["candidates"] if item["trial"] == trial)
    return found


def _changes(item: View) -> str:
    changes = [f"{c['lever']} {_value(c['from'])} -> {_value(c['to'])}" for c in item["changes"]]
    return ", ".join(changes) or "the plan as it is"


def _value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _budget(view: View) -> RenderableType:
    """Two bars: seconds and trials; the search ends by itself when either is full, or before."""
    budget = view["budget"]
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(width=30)
    grid.add_column(no_wrap=True)
    for name, unit in (("seconds", " s"), ("trials", "")):
        used, total = budget[f"{name}_used"], budget[name]
        left = max(0, total - used)
        grid.add_row(
            name,
            ProgressBar(total=max(total, 1), completed=min(used, total), width=30),
            f"{used:.0f} of {total:.0f}{unit}, {left:.0f}{unit} left",
        )
    return grid
