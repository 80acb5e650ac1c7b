"""One search in a real browser, on the real stack: sign in, launch it, watch it, lose the connection, reload, download.

Needs Chromium (`chromium` on the PATH, or its path in $CHROMIUM). The search is real too: a tiny model of random
weights, suffix matches as drafts, judged by the real judge.
"""

from __future__ import annotations

import hashlib
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Locator, Page, expect, sync_playwright

from engine import bundle
from tests.browser.support import CHROMIUM, CHROMIUM_FLAGS, Models, Stack

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")]

SEARCH_MS = 420_000  # the whole search, on two busy cores
SOON_MS = 30_000
LATENCY_MS = 300

WATCH = """
window.watched = { violations: [], sockets: [], arrivals: [] };
document.addEventListener("securitypolicyviolation", (event) => {
  watched.violations.push(`${event.violatedDirective} ${event.blockedURI} ${event.sourceFile}:${event.lineNumber}`);
});
window.WebSocket = class extends WebSocket {
  constructor(...args) { super(...args); watched.sockets.push(this); }
};
document.addEventListener("DOMContentLoaded", () => {
  const log = document.getElementById("log");
  if (!log) return;
  const known = JSON.parse(document.getElementById("events").textContent).length;
  new MutationObserver((changes) => {
    const now = Date.now();
    for (const line of changes.flatMap((change) => [...change.addedNodes])) {
      if (Number(line.dataset.seq) <= known) continue;
      const text = line.querySelector(".what").textContent;
      watched.arrivals.push([text, now - Date.parse(line.querySelector("time").dateTime)]);
    }
  }).observe(log, { childList: true });
});
"""
"""Installed in every page: notes policy violations, sockets, and how long after it was emitted each live event was
in the page (the clock is the same machine's)."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_FLAGS)
        yield chromium
        chromium.close()


class Visit:
    """A page, and everything in it that went wrong or was noted."""

    def __init__(self, browser: Browser) -> None:
        self.page: Page = browser.new_context(viewport={"width": 1440, "height": 900}).new_page()
        self.page.set_default_timeout(SOON_MS)
        self.page.add_init_script(WATCH)
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.errors: list[str] = []
        self.noted: list[dict[str, Any]] = []

    def _said(self, message: ConsoleMessage) -> None:
        refused_form = "status of 422" in message.text  # what the browser says of the answer that the test asks for
        if message.type in ("error", "warning") and not refused_form:
            self.errors.append(message.text)

    def note(self) -> None:
        """Keep what this document watched, before it is left."""
        self.noted.append(self.page.evaluate("({ violations: watched.violations, arrivals: watched.arrivals })"))

    @property
    def violations(self) -> list[str]:
        return [violation for noted in self.noted for violation in noted["violations"]]

    @property
    def arrivals(self) -> list[tuple[str, float]]:
        return [(text, ms) for noted in self.noted for text, ms in noted["arrivals"]]


def test_a_search_from_sign_in_to_bundle(browser: Browser, stack: Stack, tiny_models: Models, tmp_path: Path) -> None:
    visit = Visit(browser)
    page = visit.page

    sign_in(page, browser, stack)
    launch(visit, tiny_models)
    pause_and_resume(page)
    lose_the_connection(page)
    watch_a_plot_change(page)
    reload_and_lose_nothing(visit)
    wait_for_the_end(page)
    check_candidates(page)
    check_bundle(page, tmp_path, tiny_models)
    check_narrow(page)
    visit.note()

    assert visit.errors == []
    assert visit.violations == []
    report_latency(visit.arrivals)


def sign_in(page: Page, browser: Browser, stack: Stack) -> None:
    """The printed address signs in once, and only once."""
    page.goto(stack.sign_in)
    expect(page.get_by_role("heading", name="No search yet")).to_be_visible()
    stranger = browser.new_context().new_page()
    answer = stranger.goto(stack.sign_in)
    assert answer is not None
    assert answer.status == 403
    expect(stranger.get_by_role("alert")).to_contain_text("does not work any more")
    stranger.context.close()


def launch(visit: Visit, models: Models) -> None:
    """By the form; a mistake is told beside its field and loses nothing of what was typed."""
    page = visit.page
    page.get_by_role("link", name="New search").first.click()
    expect(page.get_by_label("Target")).to_have_value("demo:smollm2-135m")
    page.get_by_label("Target").fill(str(models.target / "nothing-here"))
    page.get_by_label("Drafter").fill("ngram")
    page.get_by_label("Prompts").fill(str(models.prompts))
    page.get_by_label("Longest prompt").fill("96")
    page.get_by_label("New tokens").fill("12")
    page.get_by_label("Time budget").fill("400")
    page.get_by_label("Trials at most").fill("2")
    page.get_by_label("Seed").fill("5")
    visit.note()
    page.get_by_role("button", name="Launch search").click()
    target = page.get_by_label("Target")
    expect(target).to_have_attribute("aria-invalid", "true")
    expect(page.locator("#id_target_error")).to_contain_text("nothing-here")
    expect(page.get_by_label("Trials at most")).to_have_value("2")
    target.fill(str(models.target))
    visit.note()
    page.get_by_role("button", name="Launch search").click()
    page.wait_for_url(re.compile(r"/searches/\d+$"))
    expect(page.get_by_role("heading", level=1)).to_contain_text("tiny-llama")
    expect(page.locator("#connection")).to_have_text("Live")
    # nothing is measured yet: each plot says what it waits for
    expect(page.locator('[data-plot="gaps"] [data-part="empty"]')).to_contain_text("profiled")


def pause_and_resume(page: Page) -> None:
    """Both by keyboard; the page follows the event that comes back over the socket."""
    pill = page.locator('[data-slot="status"]')
    page.get_by_role("button", name="Pause").press("Enter")
    expect(pill).to_have_text("Paused")
    resume = page.get_by_role("button", name="Resume")
    expect(resume).to_be_focused()
    resume.press("Enter")
    expect(pill).to_contain_text(re.compile("running", re.IGNORECASE))


def lose_the_connection(page: Page) -> None:
    """The socket breaks; the page opens another one and asks for what comes after the last event it has."""
    with page.expect_websocket() as opened:
        page.evaluate("watched.sockets.at(-1).close()")
    assert re.search(r"after=[1-9]\d*$", opened.value.url)
    expect(page.locator("#connection")).to_have_text("Live")


def plot(page: Page) -> Locator:
    return page.locator('[data-plot="speedup"] [data-part="plot"]')


def points(page: Page) -> int:
    """Marks in the speedup plot, the line of the best plan left out."""
    count: int = plot(page).evaluate("(area) => area.data.slice(1).reduce((sum, trace) => sum + trace.x.length, 0)")
    return count


def watch_a_plot_change(page: Page) -> None:
    """The speedup plot appears with its first point, and changes, while nobody reloads."""
    expect(plot(page)).to_be_hidden()
    expect(plot(page)).to_have_attribute("data-updates", re.compile(r"\d"), timeout=SEARCH_MS)
    expect(plot(page)).to_be_visible()
    assert points(page) >= 1
    seen = plot(page).get_attribute("data-updates")
    assert seen is not None
    expect(plot(page)).not_to_have_attribute("data-updates", seen, timeout=SEARCH_MS)
    expect(page.locator('[data-slot="autoregressive.ratio"]')).to_have_text(re.compile(r"^\d+\.\d\d×$"))


def lines(page: Page) -> list[int]:
    """Sequence numbers in the log, oldest first."""
    found: list[int] = page.evaluate("[...document.querySelectorAll('#log li')].map((li) => Number(li.dataset.seq))")
    return found[::-1]


def reload_and_lose_nothing(visit: Visit) -> None:
    page = visit.page
    before, drawn = lines(page), points(page)
    visit.note()
    page.reload()
    expect(page.locator("#connection")).to_have_text("Live")
    expect(plot(page)).to_have_attribute("data-updates", re.compile(r"\d"))
    assert points(page) >= drawn
    after = lines(page)
    assert set(before[:-1]) <= set(after)  # the newest line may be progress, which the next progress replaces
    assert after == sorted(set(after))


def wait_for_the_end(page: Page) -> None:
    expect(page.locator('[data-slot="status"]')).to_have_text("Finished", timeout=SEARCH_MS)
    events = page.evaluate(
        "fetch(`${document.getElementById('live').dataset.apiUrl}/events?after=0`).then((answer) => answer.json())"
    )["events"]
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    # every event that is no progress has its line, once, and the end is the newest
    shown = lines(page)
    assert shown == sorted(set(shown))
    assert {event["seq"] for event in events if event["type"] != "trial_progress"} <= set(shown)
    assert events[-1]["type"] == "search_finished"


def check_candidates(page: Page) -> None:
    """A row for each trial, told by word; the filter and the download agree with it."""
    rows = page.locator("#candidates tbody tr")
    count = rows.count()
    assert count >= 2  # the starting plan, and what was tried
    for row in rows.all():
        expect(row.locator(".verdict")).to_have_text(
            re.compile("Accepted|Slower|Lossy|Crashed|Timed out|Invalid"), use_inner_text=True
        )
    with page.expect_download() as download:
        page.get_by_role("button", name="CSV", exact=True).click()
    assert len(Path(download.value.path()).read_text().strip().splitlines()) >= count + 1
    page.get_by_label("Filter candidates").fill("trial:0")
    expect(rows).to_have_count(1)
    expect(rows.first).to_contain_text("baseline")
    page.get_by_label("Filter candidates").fill("")
    expect(rows).to_have_count(count)


def check_bundle(page: Page, folder: Path, models: Models) -> None:
    """What is downloaded is what the page says it is, and reads as a whole bundle."""
    with page.expect_download() as download:
        page.get_by_role("link", name="Download bundle").click(timeout=90_000)
    path = folder / "downloaded.zip"
    download.value.save_as(path)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == page.locator('[data-slot="bundle.sha"]').inner_text()
    result = bundle.read(path)
    assert result.deployment.target == str(models.target)
    claim = result.claim
    assert claim is not None
    assert page.locator('[data-slot="autoregressive.ratio"]').inner_text() == f"{claim.ratio:.2f}×"


def check_narrow(page: Page) -> None:
    """At 390 px nothing is wider than the page, and no legend lies on its plot."""
    page.set_viewport_size({"width": 390, "height": 844})
    expect(plot(page).locator(".main-svg").first).to_have_attribute("width", re.compile(r"^3[0-8]\d(\.|$)"))
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    overlaps = page.evaluate(
        """[...document.querySelectorAll("[data-plot]")].filter((card) => {
             const plot = card.querySelector("[data-part=plot]");
             const legend = card.querySelector("[data-part=legend]");
             if (plot.hidden || !legend.childElementCount) return false;
             return legend.getBoundingClientRect().bottom > plot.getBoundingClientRect().top;
           }).map((card) => card.dataset.plot)"""
    )
    assert overlaps == []


def report_latency(arrivals: list[tuple[str, float]]) -> None:
    """From the event's own time to its line in the page. Further steps of a timing block are held back on purpose, so
    that the web does not disturb it; they are not news and are left out."""
    times = [ms for text, ms in arrivals if ": timing" not in text]
    assert len(times) >= 10
    median = statistics.median(times)
    print(f"\nevent to page: median {median:.0f} ms of {len(times)} events, largest {max(times):.0f} ms")
    assert median < LATENCY_MS
