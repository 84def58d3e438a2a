"""The built site keeps the rules of WCAG 2.1 AA that a program can check, in light and in dark colours.

``nox -s accessibility`` builds the site and runs this. ``DTRAIN_AXE`` is the file of axe-core.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from browser import Browser, browser
from pages.site_served import served
from pages.test_site import SITE, _Address, in_a_browser, until

AXE = os.environ.get("DTRAIN_AXE", "")
pytestmark = pytest.mark.skipif(not AXE or "DTRAIN_SITE" not in os.environ, reason="needs axe-core: nox -s accessibility")
WITH_A_MOUSE = "--blink-settings=primaryHoverType=2,availableHoverTypes=2,primaryPointerType=4,availablePointerTypes=4"
"""A browser without a window has no mouse, and the theme makes wide code reachable by keyboard where there is one."""
PAGES = (
    "index",
    "install",
    "quickstart",
    "concepts",
    "faq",
    "cli",
    "evidence",
    "recipes/index",
    "recipes/mixup",
    "reference/processes",
)
TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]
RUN = """
window.found = null;
axe.run(document, {runOnly: %s, resultTypes: ["violations"]}).then(
    result => { window.found = result.violations.map(each => ({
        rule: each.id, impact: each.impact, nodes: each.nodes.map(node => node.target.join(" ") + ": " + node.failureSummary)
    })); },
    error => { window.found = [{rule: "error", impact: "serious", nodes: [String(error)]}]; });
"""


@pytest.fixture(scope="module")
def desktop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Browser, str]]:
    with served(SITE) as address, browser(tmp_path_factory.mktemp("browser"), WITH_A_MOUSE) as shown:
        yield shown, address


def violations(shown: Browser) -> list[str]:
    """Return the serious and critical findings of the page that is shown."""
    shown.ask(Path(AXE).read_text() + ";0")
    shown.ask(RUN % json.dumps(TAGS) + ";0")
    until(shown, "window.found !== null", 240.0)
    results = shown.ask("window.found")
    return [
        f"{violation['rule']}: {node}"
        for violation in results
        if violation["impact"] in ("serious", "critical")
        for node in violation["nodes"]
    ]


@in_a_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_page_has_no_serious_accessibility_violation(desktop: tuple[Browser, str], name: str, dark: bool) -> None:
    shown, address = desktop
    shown.open(_Address(f"{address}{name}.html"), width=1280, dark=dark)  # type: ignore[arg-type]
    until(shown, "document.readyState === 'complete' && document.querySelector('h1') !== null")
    assert violations(shown) == []


@in_a_browser
def test_a_text_without_contrast_is_a_violation(desktop: tuple[Browser, str]) -> None:
    shown, address = desktop
    shown.open(_Address(f"{address}index.html"))  # type: ignore[arg-type]
    until(shown, "document.readyState === 'complete'")
    shown.ask("document.querySelector('h1 ~ p').style.color = '#eee'")
    assert any("color-contrast" in violation for violation in violations(shown))
