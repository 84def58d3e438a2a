"""Open the page in Chromium: every chart is drawn, in both themes, without an error or a request."""

import time
from dataclasses import replace

import pytest

import browser as browsers
from dtrain.report.page import render_page

pytestmark = pytest.mark.skipif(browsers.PROGRAM is None, reason="needs the program chromium")

SIZES = """Object.fromEntries([...document.querySelectorAll('figure')].map(figure => [figure.id,
    figure.querySelector('.plot .scatterlayer path, .plot .barlayer path').getBoundingClientRect().width]))"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with browsers.browser(tmp_path_factory.mktemp("chromium")) as found:
        yield found


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
    assert min(boxes.values()) > 1
    assert (shown.errors, shown.requests) == ([], [])


@pytest.mark.parametrize(("dark", "width"), [(False, 1280), (False, 768), (True, 360)], ids=["desk", "tablet", "phone, dark"])
def test_page_fits_screen_width_and_theme(browser, page, dark, width):
    browser.open(page, width=width, dark=dark)
    assert browser.ask("document.documentElement.scrollWidth") == width
    paper = browser.ask("getComputedStyle(document.documentElement).backgroundColor")
    assert paper == ("rgb(18, 21, 24)" if dark else "rgb(255, 255, 255)")
    ink = browser.ask("getComputedStyle(document.querySelector('#chart-loss .xtick text')).fill")
    assert ink == ("rgb(232, 234, 237)" if dark else "rgb(22, 25, 29)")
    assert (browser.errors, browser.requests) == ([], [])


def test_theme_change_redraws_charts(shown):
    shown.look(width=1280, dark=True)
    ink = "getComputedStyle(document.querySelector('#chart-loss .xtick text')).fill"
    until = time.monotonic() + 30
    while shown.ask(ink) != "rgb(232, 234, 237)":
        assert time.monotonic() < until
        time.sleep(0.05)


def test_controls_redraw_the_lines(shown):
    path = "document.querySelector('#chart-loss .scatterlayer .js-line').getAttribute('d')"
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
    lines = "document.querySelectorAll('#chart-loss .scatterlayer .trace').length"
    before = shown.ask(lines)
    shown.ask("""(() => { const slider = document.getElementById('smooth'); slider.value = 90;
        slider.dispatchEvent(new Event('input', { bubbles: true })); })()""")
    assert shown.ask(lines) == before + 1
    assert (shown.errors, shown.requests) == ([], [])


def test_script_in_run_texts_is_not_executed(browser, made, tmp_path):
    attack = """</script><script>window.hit = 1</script><img src=x onerror="window.hit = 1">"""
    run = replace(made.run(attack, points=20), series={attack: made.series([1.0, 2.0])})
    path = tmp_path / "report.html"
    path.write_text(render_page(made.report(run, made.bare("bare"), title=attack, problems=[attack])), encoding="utf-8")
    browser.open(path)
    assert browser.ask("window.hit") is None
    assert browser.ask("document.title") == attack
    assert (browser.errors, browser.requests) == ([], [])
