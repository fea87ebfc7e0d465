"""The page of a long run, looked at in a real browser; screenshots are left where RATCHET_SCREENSHOTS says."""

import os
import time
from pathlib import Path

import pytest

from ratchet.tracking.report import html, read_report
from tests.browser import CHROMIUM, open_page
from tests.ratchet.tracking.report_runs import learning_run

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")]

STEPS = 1000
IS_DRAWN = "document.documentElement?.dataset.drawn > 0"
NEXT_FRAME = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))"


def test_a_long_run_opens_quickly_on_every_screen_and_loads_nothing(tmp_path: Path) -> None:
    page = tmp_path / "run.html"
    page.write_text(html(read_report(learning_run(str(tmp_path / "runs"), STEPS))), encoding="utf-8")
    assert page.stat().st_size < 5e6
    shots = Path(os.environ.get("RATCHET_SCREENSHOTS") or tmp_path / "shots")
    seconds: list[tuple[float, float]] = []
    grounds, inks = {}, {}
    with open_page() as tab:
        for width, height, scheme in [
            (1280, 900, "light"),
            (1280, 900, "dark"),
            (390, 844, "light"),
            (390, 844, "dark"),
        ]:
            tab.look(width=width, height=height, scheme=scheme)
            started = time.monotonic()
            tab.open(page.as_uri())
            tab.wait(IS_DRAWN)
            tab.run(NEXT_FRAME)
            seconds.append((tab.busy_seconds(), time.monotonic() - started))
            tab.wait("document.documentElement.dataset.complete > 0")
            assert tab.run("document.documentElement.scrollWidth <= innerWidth"), (width, "nothing sticks out")
            assert tab.run("document.querySelectorAll('.chart .bk-Figure').length") == tab.run(
                "document.querySelectorAll('.chart').length"
            )
            grounds[scheme] = tab.run("getComputedStyle(document.body).backgroundColor")
            inks[scheme] = tab.run(
                "Bokeh.documents.at(-1).all_models.size && "
                "[...Bokeh.documents.at(-1).all_models].find((one) => one.type == 'LinearAxis').major_label_text_color"
            )
            tab.screenshot(shots / f"report-{width}-{scheme}.png")
        _point_at_the_parts_of_the_reward(tab)
        tab.screenshot(shots / "report-hover.png")
        assert tab.run("document.title") == "gsm8k-grpo", "nobody's text was run"
    # The clock says more of what else the machine is at.
    assert all(busy < 2.0 for busy, _ in seconds), seconds
    assert grounds["light"] != grounds["dark"]
    assert inks["light"] != inks["dark"]
    assert {url for url in tab.requests if not url.startswith("data:")} == {page.as_uri()}
    assert tab.problems == []


def _point_at_the_parts_of_the_reward(tab) -> None:  # type: ignore[no-untyped-def]
    """Hover over the chart one of whose curves has a hostile name; its values are shown, its name is text."""
    tab.look(width=1280, height=900)
    chart = "document.querySelector('[aria-label=\"Parts of the reward\"] .chart')"
    tab.run(f"{chart}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
    tab.run(NEXT_FRAME)
    middle = "(({x, y, width, height}) => [x + width / 2, y + height / 2])"
    box = tab.run(f"{middle}({chart}.getBoundingClientRect())")
    shown = """(() => {
      const texts = [];
      const look = (node) => {
        if (node.shadowRoot) look(node.shadowRoot);
        if (node.classList?.contains('bk-Tooltip')) texts.push(node.shadowRoot.textContent);
        for (const child of node.children ?? []) look(child);
      };
      look(document);
      return texts.join();
    })()"""
    for shift in range(20):
        tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0] + shift, y=box[1])
        tab.run(NEXT_FRAME)
    tab.wait(f"{shown}.includes('onerror')")
