"""Open the page in Chromium: every chart is drawn, in both themes, without an error or a request."""

import re
import time
from dataclasses import replace

import pytest

import browser as browsers
from dtrain.report.page import render_page

pytestmark = pytest.mark.skipif(browsers.PROGRAM is None, reason="needs the program chromium")

SIZES = """Object.fromEntries([...document.querySelectorAll('figure')].map(figure => [figure.id, Math.max(
    ...[...figure.querySelectorAll('.plot .line, .plot .area, .plot .bar, .plot circle')].map(
        shape => shape.getBoundingClientRect().width))]))"""
# The first word of a cell or heading that stands in two lines, if any.
BROKEN_WORD = r"""(() => { for (const cell of document.querySelectorAll('th, td')) for (const node of cell.childNodes)
    for (const match of node.textContent.matchAll(/\S{1,40}/g)) {
        const range = document.createRange();
        range.setStart(node, match.index);
        range.setEnd(node, match.index + match[0].length);
        if (new Set([...range.getClientRects()].map(box => Math.round(box.top))).size > 1) return match[0];
    } return null; })()"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with browsers.browser(tmp_path_factory.mktemp("chromium")) as started:
        yield started


@pytest.fixture(scope="module")
def page(made, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(render_page(made.report(made.run(points=200))), encoding="utf-8")
    return path


@pytest.fixture
def shown(browser, page):
    browser.open(page)
    return browser


def test_charts_are_drawn_without_errors_or_requests(shown):
    boxes = shown.ask(SIZES)
    assert len(boxes) == 12
    assert min(boxes.values()) > 5
    assert (shown.errors, shown.requests) == ([], [])


@pytest.mark.parametrize(("dark", "width"), [(False, 1280), (False, 768), (True, 390)], ids=["desk", "tablet", "phone, dark"])
def test_page_fits_screen_width_and_theme(browser, page, dark, width):
    browser.open(page, width=width, dark=dark)
    assert browser.ask("document.documentElement.scrollWidth") == width
    paper = browser.ask("getComputedStyle(document.documentElement).backgroundColor")
    assert paper == ("rgb(18, 21, 24)" if dark else "rgb(255, 255, 255)")
    ink = browser.ask("getComputedStyle(document.querySelector('#chart-loss .xtick')).fill")
    assert ink == ("rgb(232, 234, 237)" if dark else "rgb(22, 25, 29)")
    browser.ask("document.querySelectorAll('details').forEach(each => { each.open = true; })")
    assert browser.ask(BROKEN_WORD) is None
    sizes = "[...document.querySelectorAll('body *')].map(each => parseFloat(getComputedStyle(each).fontSize))"
    loss = "parseFloat(getComputedStyle(document.querySelector('.results dd')).fontSize)"
    assert browser.ask(f"{sizes}.every(size => size <= {loss}) && {sizes}.filter(size => size === {loss}).length === 1")
    assert browser.ask(
        "[...document.querySelectorAll('body *')].every(each => each.scrollHeight <= each.clientHeight + 2 "
        "|| getComputedStyle(each).overflowY === 'visible' || getComputedStyle(each).display === 'inline')"
    )
    assert (browser.errors, browser.requests) == ([], [])


def test_theme_change_recolors_charts(shown):
    shown.look(width=1280, dark=True)
    ink = "getComputedStyle(document.querySelector('#chart-loss .xtick')).fill"
    until = time.monotonic() + 30
    while shown.ask(ink) != "rgb(232, 234, 237)":
        assert time.monotonic() < until
        time.sleep(0.05)


def test_controls_redraw_the_lines(shown):
    path = "document.querySelector('#chart-loss .line').getAttribute('d')"
    title = "document.querySelector('#chart-loss .xtitle').textContent"
    choose = """(id => { const input = document.querySelector(id); input.click(); })"""
    linear = shown.ask(path)
    for axis, expected in (("time", "time (min)"), ("tokens", "tokens"), ("steps", "steps")):
        shown.ask(f"{choose}('input[value={axis}]')")
        assert shown.ask(title) == expected
    shown.ask(f"{choose}('#log')")
    assert shown.ask(path) != linear
    shown.ask(f"{choose}('#log')")
    assert shown.ask(path) == linear
    lines = "document.querySelectorAll('#chart-loss .plot .line').length"
    before = shown.ask(lines)
    shown.ask("""(() => { const slider = document.getElementById('smooth'); slider.value = 90;
        slider.dispatchEvent(new Event('input', { bubbles: true })); })()""")
    assert shown.ask(lines) == before + 1
    assert (shown.errors, shown.requests) == ([], [])


def test_legend_hides_lines_pointer_shows_values_and_a_drag_zooms(shown):
    path = "document.querySelector('#chart-throughput .line').getAttribute('d')"
    lines = "document.querySelectorAll('#chart-throughput .plot .line').length"
    button = "document.querySelector('#chart-throughput .legend button')"
    assert shown.ask(lines) == 2
    shown.ask(f"{button}.click()")
    assert (shown.ask(lines), shown.ask(f"{button}.getAttribute('aria-pressed')")) == (1, "false")
    shown.ask(f"{button}.click()")
    assert shown.ask(lines) == 2
    whole = shown.ask(path)
    shown.ask("document.querySelector('#chart-throughput').scrollIntoView()")
    left, top, width = shown.ask(
        "(box => [box.left, box.top, box.width])(document.querySelector('#chart-throughput svg').getBoundingClientRect())"
    )

    def pointer(kind, share, **options):
        shown.call("Input.dispatchMouseEvent", type=kind, x=left + share * width, y=top + 100, **options)

    pointer("mouseMoved", 0.5)
    tip = shown.ask("document.querySelector('#chart-throughput .tip').innerText").splitlines()
    assert [re.sub(r"[\d,.]+", "N", line).strip() for line in tip] == ["steps N", "all time: N", "compute alone: N"]
    pointer("mousePressed", 0.4, button="left", clickCount=1)
    pointer("mouseMoved", 0.6, button="left")
    pointer("mouseReleased", 0.6, button="left", clickCount=1)
    assert shown.ask(path) != whole
    for count in (1, 2):
        pointer("mousePressed", 0.5, button="left", clickCount=count)
        pointer("mouseReleased", 0.5, button="left", clickCount=count)
    assert shown.ask(path) == whole
    assert (shown.errors, shown.requests) == ([], [])


def test_page_without_scripts_has_its_tables(browser, page):
    browser.open(page, script=False)
    try:
        text = browser.ask("document.body.innerText")
        assert "The charts need JavaScript. The tables do not." in text
        assert "Wall time by cause" in text
        assert not browser.ask("document.querySelector('.figures').checkVisibility()")
    finally:
        browser.open(page)


def test_script_in_run_texts_is_not_executed(browser, made, tmp_path):
    attack = """</script><script>window.hit = 1</script><img src=x onerror="window.hit = 1">"""
    run = replace(made.run(attack, points=20), series={attack: made.series([1.0, 2.0])})
    path = tmp_path / "report.html"
    path.write_text(render_page(made.report(run, made.bare("bare"), title=attack, problems=[attack])), encoding="utf-8")
    browser.open(path)
    assert browser.ask("window.hit") is None
    assert browser.ask("document.title") == attack
    assert (browser.errors, browser.requests) == ([], [])
