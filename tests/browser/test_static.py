"""What can be said of templates and static files without a browser: the security policy, and contrast."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEMPLATES = sorted((ROOT / "templates").rglob("*.html"))
MODULES = sorted((ROOT / "static/js").rglob("*.js"))
TOKENS = (ROOT / "static/css/tokens.css").read_text()


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_templates_hold_nothing_inline_and_nothing_from_elsewhere(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"\sstyle\s*=", text)
    assert not re.search(r"<style|\son[a-z]+\s*=\s*[\"']|javascript:", text)
    assert not re.search(r"<script(?![^>]*\ssrc=)", text)
    assert not re.search(r"\|\s*safe\b|autoescape\s+off|mark_safe", text)
    assert not re.search(r"(src|href)\s*=\s*[\"'](https?:)?//", text)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_modules_never_turn_text_into_markup(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|createContextualFragment", text)
    assert not re.search(r"\beval\(|new Function|setAttribute\(\"style\"", text)
    assert not re.search(r"[\"'`](https?:)?//(?!www\.w3\.org/2000/svg)[a-z]", text)


def test_plotly_is_vendored_with_its_licence_and_styles() -> None:
    folder = ROOT / "static/vendor/plotly"
    assert "MIT" in (folder / "LICENSE").read_text()
    version = re.search(
        r"plotly\.js \(basic - minified\) v([\d.]+)", (folder / "plotly-basic.min.js").read_text()[:200]
    )
    assert version is not None
    assert f"plotly.js {version[1]} " in (folder / "plotly.css").read_text()[:200]  # both are renewed together


def luminance(colour: str) -> float:
    """Relative luminance of "#rrggbb" as WCAG 2 defines it."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def palettes() -> dict[str, dict[str, str]]:
    """The colours of each block of tokens.css that sets them."""
    blocks = re.findall(r"(:root[^{]*)\{([^{}]*--bg:[^{}]*)\}", TOKENS)
    return {name.strip(): dict(re.findall(r"--([a-z0-9-]+):\s*(#[0-9a-f]{6})", body)) for name, body in blocks}


PALETTES = palettes()


def test_dark_is_the_same_by_preference_and_by_choice() -> None:
    assert PALETTES[':root[data-theme="dark"]'] == PALETTES[":root:not([data-theme])"]
    assert set(PALETTES[":root"]) == set(PALETTES[':root[data-theme="dark"]'])


@pytest.mark.parametrize("name", PALETTES)
def test_text_has_contrast_aa(name: str) -> None:
    colours = PALETTES[name]
    grounds = ("bg", "surface", "sunken")
    words = ("text", "muted", "faint", "accent", "bad", "ok", "series-1", "series-2", "series-3")
    pairs = list(product(words, grounds))
    pairs += [(tone, f"{tone}-soft") for tone in ("ok", "warn", "bad", "idle")]
    pairs += [("text", f"{tone}-soft") for tone in ("ok", "warn", "bad", "idle", "accent")]
    pairs += [("accent-strong", "accent-soft"), ("on-accent", "accent"), ("on-accent", "accent-strong")]
    weak = {pair: round(contrast(colours[pair[0]], colours[pair[1]]), 2) for pair in pairs}
    assert {pair: ratio for pair, ratio in weak.items() if ratio < 4.5} == {}


@pytest.mark.parametrize("name", PALETTES)
def test_controls_and_lines_of_plots_have_contrast_3(name: str) -> None:
    colours = PALETTES[name]
    pairs = list(product(("control", "focus", "series-1", "series-2", "series-3"), ("bg", "surface")))
    weak = {pair: round(contrast(colours[pair[0]], colours[pair[1]]), 2) for pair in pairs}
    assert {pair: ratio for pair, ratio in weak.items() if ratio < 3} == {}
