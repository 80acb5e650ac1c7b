"""The panel of a trial in a real browser, on the real stack with an engine that tells trials of every kind."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Locator, Page, expect, sync_playwright

from tests.browser.panel_engine import HOSTILE
from tests.browser.support import CHROMIUM, CHROMIUM_FLAGS, Models, Stack

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")]
SOON_MS = 60_000
LAUNCH = """
([target, token]) => fetch("/api/searches", {
  method: "POST",
  headers: { "Content-Type": "application/json", "X-CSRFToken": token },
  body: JSON.stringify({
    deployment: { target, drafter: "ngram", regime: { max_prompt_tokens: 96, max_new_tokens: 12 } },
    budget: { trials: 8, candidates_per_round: 7, min_rounds: 1, plateau_rounds: 1 },
  }),
}).then(async (answer) => [answer.status, await answer.json()])
"""


@pytest.fixture
def stack_env(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "hold-2").touch()  # trial 2 runs until the test lets it go
    return {"SPECPILOT_PERFORM": "tests.browser.panel_engine", "FAKE_GATE": str(tmp_path)}


@pytest.fixture
def page(stack: Stack) -> Iterator[Page]:
    """Signed in; nothing may go wrong in it."""
    errors: list[str] = []
    with sync_playwright() as playwright:
        chromium: Browser = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_FLAGS)
        page = chromium.new_context(viewport={"width": 1440, "height": 900}).new_page()
        page.set_default_timeout(SOON_MS)
        expect.set_options(timeout=SOON_MS)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda said: errors.append(said.text) if is_complaint(said) else None)
        page.goto(stack.sign_in)
        yield page
        chromium.close()
        expect.set_options(timeout=5000)  # playwright's own, for other tests
    assert errors == []


def test_the_panel_of_a_trial(page: Page, tiny_models: Models, tmp_path: Path) -> None:
    launch(page, tiny_models)
    panel = page.get_by_role("dialog")

    a_lossy_trial_by_keyboard(page, panel)
    the_same_after_a_reload(page, panel)
    a_running_trial_gets_its_verdict(page, panel, tmp_path)
    every_kind_of_trial(page, panel)
    hostile_text_stays_text(page, panel)
    narrow_and_dark(page, panel)


def is_complaint(said: ConsoleMessage) -> bool:
    """What the browser says of the missing trial that the test asks for is none."""
    return said.type in ("error", "warning") and "status of 404" not in said.text


def launch(page: Page, models: Models) -> None:
    token = page.locator("input[name=csrfmiddlewaretoken]").first.get_attribute("value")
    status, search = page.evaluate(LAUNCH, [str(models.target), token])
    assert status == 201, search
    page.goto(f"{page.url.rstrip('/')}{search['links']['page']}")
    expect(page.locator("#trial-1 .verdict")).to_contain_text("Lossy")


def a_lossy_trial_by_keyboard(page: Page, panel: Locator) -> None:
    """Opened with Enter: counts, both tokens in their text, and where the focus goes."""
    link = page.get_by_role("link", name="Evidence of trial 1")
    link.press("Enter")
    expect(page).to_have_url(re.compile(r"/searches/1/trials/1$"))
    expect(panel.get_by_role("heading", name="Trial 1")).to_be_focused()
    expect(panel.locator('[data-part="counts"] li')).to_have_text(
        [re.compile("1,148.*exact"), re.compile("1.*near-tie.*limit 4"), re.compile("3.*errors")], use_inner_text=False
    )
    expect(panel.get_by_role("row", name=re.compile("^code"))).to_contain_text("380")
    expect(panel.locator('[data-part="forcing-facts"]')).to_contain_text("6 of 8 prompts")
    expect(panel.locator('[data-part="power"]')).to_contain_text("bf16 arithmetic")
    passage = panel.locator('[data-part="passage"]')
    expect(passage).to_contain_text("if left[i]")
    expect(passage).to_contain_text("result.append(left[i])")
    expect(passage.locator("mark.candidate")).to_have_text("candidate: ·<U+200B")
    expect(passage.locator("mark.stock")).to_have_text("stock: ·<=")
    expect(panel.locator('[data-part="gap"]')).to_contain_text("0.0837 logits")
    expect(panel.locator("#command-replay")).to_have_text(
        re.compile(r"^python -m engine judge replay \S+/searches/web-1/trial-1\.json$")
    )
    page.keyboard.press("Escape")
    expect(panel).to_be_hidden()
    expect(page).to_have_url(re.compile(r"/searches/1$"))
    expect(page.locator("#trial-1 a[data-trial]").first).to_be_focused()
    page.go_forward()
    expect(panel.get_by_role("heading", name="Trial 1")).to_be_visible()


def the_same_after_a_reload(page: Page, panel: Locator) -> None:
    page.reload()
    expect(panel.get_by_role("heading", name="Trial 1")).to_be_visible()
    expect(panel.locator('[data-part="counts"]')).to_contain_text("1,148")
    expect(panel.locator('[data-part="passage"] mark.stock')).to_be_attached()


def a_running_trial_gets_its_verdict(page: Page, panel: Locator, folder: Path) -> None:
    """Its phase while it runs; the evidence when the socket tells of the verdict, without a reload."""
    panel.get_by_role("button", name="Newer trial").click()
    expect(page).to_have_url(re.compile(r"/trials/2$"))
    expect(panel.locator('[data-part="reason"]')).to_have_text("It is being judged: token forcing 3/8.")
    expect(panel.locator('[data-part="counts"]')).to_be_hidden()
    (folder / "hold-2").unlink()
    expect(panel.locator('[data-part="verdict"]')).to_have_text("Slower")
    expect(panel.locator('[data-part="reason"]')).to_contain_text(re.compile(r"^0\.9\dx the incumbent"))
    plot = panel.locator('[data-plot="pairs"]')
    expect(plot.locator(".main-svg").first).to_be_visible()
    counts = plot.locator('[data-part="plot"]').evaluate("(area) => area.data.map((trace) => trace.y.length)")
    assert counts == [12, 8]  # the pairs, and the reference against itself
    expect(plot.locator('[data-part="summary"]')).to_contain_text(re.compile(r"^Median of 12 pairs 0\.9"))
    expect(panel.locator('[data-part="disturbances"]')).to_contain_text("another process used 1.4 of 2 cores (2 times)")
    expect(panel.locator('[data-part="disturbances"]')).to_contain_text("Throttled: power cap")
    expect(panel.locator('[data-part="cost-legend"] li')).to_have_count(5)
    plot.locator('[data-part="plot"] .nsewdrag').first.scroll_into_view_if_needed()
    at = plot.locator(".points path").first.bounding_box()
    assert at is not None
    page.mouse.move(at["x"] + at["width"] / 2, at["y"] + at["height"] / 2)
    expect(plot.locator(".hoverlayer")).to_contain_text(
        re.compile(r"prompt code-01.*the incumbent: .*\ss.*candidate: ")
    )


def every_kind_of_trial(page: Page, panel: Locator) -> None:
    """A crash has its last words; an early end has words instead of a token."""
    expect(page.locator('[data-slot="status"]')).to_have_text("Finished")
    page.goto(f"{base(page)}/searches/1/trials/3")
    expect(panel.locator('[data-part="verdict"]')).to_have_text("Crashed")
    expect(panel.locator("pre.tail")).to_contain_text("RuntimeError: shape '[1, 9, 64]' is invalid")
    assert panel.locator("pre.tail").inner_text().startswith("Traceback (most recent call last):\n  File")
    panel.get_by_role("button", name="Newer trial").click()
    panel.get_by_role("button", name="Newer trial").click()
    expect(panel.locator('[data-part="verdict"]')).to_have_text("Timed out")
    expect(panel.locator('[data-plot="pairs"]')).to_contain_text("It ended before it was timed.")
    page.goto(f"{base(page)}/searches/1/trials/7")
    expect(panel.locator('[data-part="sides"]')).to_contain_text("it ends after 31 of 48 tokens")
    answer = page.goto(f"{base(page)}/searches/1/trials/99")
    assert answer is not None
    assert answer.status == 404


def hostile_text_stays_text(page: Page, panel: Locator) -> None:
    """Markup in tokens, texts, categories, prompt ids, reasons and logs is shown as it is, and does nothing."""
    page.goto(f"{base(page)}/searches/1/trials/4")
    expect(panel.locator('[data-part="passage"]')).to_contain_text(HOSTILE)
    expect(panel.locator('[data-part="passage"] mark.candidate')).to_contain_text("<script>window.hurt·=·1</script>")
    expect(panel.locator('[data-part="passage"] mark.stock')).to_contain_text("\\n\\n")
    expect(panel.locator('[data-part="passage"]')).to_contain_text("U+0007U+202E")
    expect(panel.locator('[data-part="reason"]')).to_contain_text(HOSTILE)
    expect(panel.locator('[data-part="prompts"]')).to_contain_text("<script>")
    page.goto(f"{base(page)}/searches/1/trials/3")
    expect(panel.locator('[data-part="reason"]')).to_contain_text(HOSTILE)
    expect(panel.locator("pre.tail")).to_contain_text(HOSTILE)
    assert page.evaluate("typeof window.hurt") == "undefined"
    assert panel.locator("script, img").count() == 0
    assert page.locator("#candidates img, #candidates script, #log img, #log script").count() == 0


def narrow_and_dark(page: Page, panel: Locator) -> None:
    """At 390 px nothing is wider than the panel; the dark theme reaches into it."""
    page.set_viewport_size({"width": 390, "height": 844})
    page.emulate_media(color_scheme="dark")
    for trial in (1, 2, 4, 6):
        page.goto(f"{base(page)}/searches/1/trials/{trial}")
        expect(panel.locator('[data-part="counts"]')).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        body = panel.locator('[data-part="body"]')
        assert body.evaluate("(body) => body.scrollWidth - body.clientWidth") <= 0
    ground = body.evaluate("(body) => getComputedStyle(body.closest('dialog')).backgroundColor")
    assert sum(int(part) for part in re.findall(r"\d+", ground)[:3]) < 150
    panel.get_by_role("button", name="Close").click()
    expect(panel).to_be_hidden()
    expect(page).to_have_url(re.compile(r"/searches/1$"))


def base(page: Page) -> str:
    return page.url.split("/searches")[0]
