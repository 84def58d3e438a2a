import json
from dataclasses import replace

import pytest

import browser as browsers
from dtrain.report.page import build_charts, scales
from dtrain.report.page.html import render_page

pytestmark = pytest.mark.skipif(browsers.PROGRAM is None, reason="needs the program chromium")

SIZES = """Object.fromEntries([...document.querySelectorAll('figure')].map(figure => [figure.id,
    figure.querySelector('.lines .line, .columns rect, .bars rect').getBoundingClientRect().width]))"""
OVERLAPS = """[...document.querySelectorAll('.area')].flatMap(area => [
    ...area.querySelectorAll('.grid, .across')].flatMap(axis => {
    const boxes = [...axis.querySelectorAll('text')].map(text => text.getBoundingClientRect()).filter(box => box.width > 0);
    const apart = (a, b) => a.right <= b.left || b.right <= a.left || a.bottom - 2 <= b.top || b.bottom - 2 <= a.top;
    return boxes.flatMap((a, i) => boxes.slice(i + 1).filter(b => !apart(a, b)).map(() => area.closest('figure').id));
}))"""
FOCUSED = """(element => element.className || element.id || element.value || element.textContent)(document.activeElement)"""
OUTLINED = """(element => [element, element.nextElementSibling].some(each =>
    each && getComputedStyle(each).outlineStyle === 'solid'))(document.activeElement)"""
MIDDLE = """(({left, top, width}) => [left + width / 2, top + 40])(
    document.querySelector('#chart-loss .area').getBoundingClientRect())"""


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


def test_every_chart_is_drawn_without_an_error_or_a_request(shown, made):
    keys = [f"chart-{chart.key}" for chart in build_charts.all_charts(made.report(made.run(points=200)))]
    boxes = shown.ask(SIZES)
    assert list(boxes) == keys
    assert min(boxes.values()) > 1
    assert (shown.errors, shown.requests) == ([], [])


def test_without_a_script_the_page_is_the_same(browser, page):
    read = """[...document.querySelectorAll('.area')].map(area => [...area.querySelectorAll('.lines path, text')].map(
        part => part.tagName === 'text' ? part.textContent : part.getAttribute('d').match(/[0-9]+/g).map(Number)))"""
    drawn = []
    for script in (False, True):
        browser.open(page, script=script)
        drawn.append(browser.ask(read))
        assert browser.ask("document.getElementById('controls').hidden") is not script
        assert (browser.errors, browser.requests) == ([], [])
    assert sum(len(part) for chart in drawn[0] for part in chart if isinstance(part, list)) > 1000
    for without, with_it in zip(*drawn, strict=True):
        for one, other in zip(without, with_it, strict=True):
            assert one == (other if isinstance(one, str) else pytest.approx(other, abs=2))  # of 10 000: less than a pixel


@pytest.mark.parametrize("width", [360, 768, 1280])
def test_nothing_is_wider_than_the_screen(shown, width):
    shown.look(width=width, dark=width == 360)
    assert shown.ask("document.documentElement.scrollWidth") == width
    assert shown.ask(OVERLAPS) == []


def test_the_crosshair_moves_by_keys_and_says_what_it_is_on(shown):
    read = "document.querySelector('#chart-loss .readout').textContent"
    shown.ask("document.querySelector('#chart-loss .plot').focus()")
    shown.press("Home")
    assert shown.ask(read).startswith("steps 5 loss 9.")
    shown.press("ArrowRight")
    assert shown.ask(read).startswith("steps 10 loss 9.")
    shown.press("End")
    shown.press("ArrowLeft")
    assert shown.ask(read).startswith("steps 995 ")
    assert shown.ask("document.querySelectorAll('#chart-loss .cross').length") == 1
    shown.ask("document.querySelector('#chart-time .plot').focus()")
    shown.press("ArrowRight")
    assert "compile 30.0\u202f%" in shown.ask("document.querySelector('#chart-time .readout').textContent")
    assert shown.ask(read) == ""


def test_the_crosshair_follows_the_pointer(shown):
    shown.ask("document.getElementById('chart-loss').scrollIntoView()")
    box = shown.ask(MIDDLE)
    shown.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])
    assert shown.ask("document.querySelector('#chart-loss .readout').textContent").startswith("steps 50")


def test_the_keyboard_reaches_everything_in_order(shown):
    seen = []
    for _ in range(16):
        shown.press("Tab")
        seen.append(shown.ask(FOCUSED))
        assert shown.ask(OUTLINED), seen
    assert seen == ["skip", "Loss and metrics", "Learning rate", "Speed and memory", "Where the time went", "Checkpoints",
                    "Slowest ranks", "Events", "Environment", "steps", "log", "smooth", "plot", "Table of loss", "plot",
                    "Table of eval/loss"]  # fmt: skip


def test_controls_draw_the_lines_again(shown):
    path = "document.querySelector('#chart-loss .line').getAttribute('d')"
    labels = "[...document.querySelectorAll('#chart-loss .across .tick text')].map(text => text.textContent)"
    linear = shown.ask(path)
    shown.ask("document.querySelector('input[value=time]').click()")
    assert shown.ask("document.querySelector('#chart-loss .axis').textContent") == "time"
    assert "2\u202fm" in shown.ask(labels)
    shown.ask("document.querySelector('input[value=tokens]').click()")
    assert "100M" in shown.ask(labels)
    shown.ask("document.querySelector('input[value=steps]').click(); document.getElementById('log').click()")
    assert shown.ask(path) != linear
    shown.ask("document.getElementById('log').click()")
    assert shown.ask(path) == linear
    shown.ask("const slider = document.getElementById('smooth'); slider.value = 90; slider.dispatchEvent(new Event('input'))")
    assert shown.ask("document.querySelectorAll('#chart-loss .line.raw').length") == 1
    assert shown.ask("document.getElementById('smoothed').value") == "0.90"
    shown.ask("document.querySelector('#chart-throughput button.series').click()")
    assert shown.ask("document.querySelectorAll('#chart-throughput .lines .line').length") == 1
    assert shown.ask("document.querySelector('#chart-throughput button.series').getAttribute('aria-pressed')") == "false"
    assert shown.errors == []


def test_axes_of_the_script_are_those_of_the_page(shown):
    cases = [
        (0, 1, "number"), (2.1, 10.8, "number"), (0, 1e6, "number"), (0, 3e-4, "number"), (-2, 1, "number"),
        (0, 3e20, "number"), (1_000_000, 1_000_003, "number"), (5, 5, "number"), (0, 4000, "seconds"), (0, 300_000, "seconds"),
        (0, 9e6, "seconds"), (0, 0.01, "seconds"), (0, 3e9, "bytes"), (0, 900, "bytes"), (0, 0.431, "percent"),
    ]  # fmt: skip
    found = shown.ask(f"{json.dumps(cases)}.map(([low, high, kind]) => tickLabels(ticks(low, high, kind), kind))")
    assert found == [scales.tick_labels(scales.ticks(low, high, kind), kind) for low, high, kind in cases]
    logs = [(1e-6, 1.0), (2.0, 11.0), (2.0, 2.3), (1e-30, 1e30)]
    for (low, high), there in zip(logs, shown.ask(f"{json.dumps(logs)}.map(pair => logTicks(...pair))"), strict=True):
        assert there == pytest.approx(scales.log_ticks(low, high))
    values = [0, 1, 3.14159, 12_345, 123_456, 1.5e9, -7.25, 0.00012, 0.41, 2.5e16, 59.96, 61, 3599.9, 7500, 86_399, 200_000]
    for kind in ("number", "seconds", "bytes", "percent"):
        there = shown.ask(f"{json.dumps(values)}.map(number => value(number, '{kind}'))")
        assert there == [scales.format_value(number, kind) for number in values]


def test_bad_texts_run_nothing(browser, made, tmp_path):
    attack = """</script><script>window.hit = 1</script><img src=x onerror="window.hit = 1">"""
    run = replace(made.run(attack, points=20), series={attack: made.series([1.0, 2.0], marks=[(1, "inf")])})
    path = tmp_path / "report.html"
    path.write_text(render_page(made.report(run, made.bare("bare"), title=attack, problems=[attack])), encoding="utf-8")
    browser.open(path)
    assert browser.ask("window.hit") is None
    assert browser.ask("document.title") == attack
    assert (browser.errors, browser.requests) == ([], [])


@pytest.mark.parametrize(("dark", "width"), [(False, 1280), (True, 360)], ids=["desk", "phone in the dark"])
def test_pictures_of_the_page_have_the_colours_of_the_theme(shown, tmp_path, dark, width):
    shown.look(width=width, dark=dark)
    shown.picture(tmp_path / "page.png", whole=False)
    assert (tmp_path / "page.png").read_bytes()[:4] == b"\x89PNG"
    paper = shown.ask("getComputedStyle(document.documentElement).backgroundColor")
    assert paper == ("rgb(18, 21, 24)" if dark else "rgb(255, 255, 255)")
