import hashlib
import json
import math
import re
import subprocess
import sys
from base64 import b64encode
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files

import pytest

from dtrain.report.page import build_charts
from dtrain.report.page.charts import CAUSE_STYLES, known_causes
from dtrain.report.page.html import flatten_mapping, render_page
from dtrain.report.page.svg import svg_path

ATTACK = """</script><script>alert("1")</script><img src=x onerror='alert(2)'>&amp;"""


class Parts(HTMLParser):
    """Tags with their attributes, and what stands in scripts."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.scripts, self.styles, self._in = [], [], [], ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self._in = tag
            (self.scripts if tag == "script" else self.styles).append("")

    def handle_endtag(self, tag):
        self._in = "" if tag == self._in else self._in

    def handle_data(self, data):
        if self._in:
            (self.scripts if self._in == "script" else self.styles)[-1] += data

    def of(self, name):
        return [attributes for tag, attributes in self.tags if tag == name]


def test_the_page_has_every_chart_and_every_section(made):
    report = made.report(made.run(points=40))
    parts = Parts(render_page(report))
    assert [each["id"] for each in parts.of("figure")] == [f"chart-{chart.key}" for chart in build_charts.all_charts(report)]
    assert [each["id"] for each in parts.of("section")] == [
        "run", "metrics", "rate", "speed", "where", "saves", "slowest", "events", "about",
    ]  # fmt: skip
    assert len(parts.of("figcaption")) == len(parts.of("figure")) == 11


def test_a_logged_throughput_is_not_drawn_beside_that_of_the_ledger(made):
    report = made.report(made.run(points=40))
    assert "speed/tokens_per_s" in report.runs[0].series
    assert [chart.key for chart in build_charts.speed_charts(report)] == ["throughput", "mfu", "memory"]
    alone = made.report(replace(report.runs[0], speed=[]))
    assert [chart.key for chart in build_charts.speed_charts(alone)] == ["throughput", "speed-tokens-per-s", "mfu", "memory"]


def test_the_page_forbids_the_network_and_all_scripts_but_its_own(made):
    parts = Parts(render_page(made.report(made.run(points=40))))
    (policy,) = [each["content"] for each in parts.of("meta") if each.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; ")
    data, script = parts.scripts
    for text in (script, *parts.styles):
        assert b64encode(hashlib.sha256(text.encode()).digest()).decode() in policy
    assert set(json.loads(data)) >= {"chart-loss", "chart-time"}
    outside = [value for _, attributes in parts.tags for name, value in attributes.items() if name in ("src", "href") and value]
    assert [value for value in outside if not value.startswith(("#", "data:"))] == []
    assert not [attributes for _, attributes in parts.tags if "style" in attributes]


@pytest.mark.parametrize("place", ["name", "error", "setting", "metric", "event", "problem", "title"])
def test_texts_of_a_run_are_only_texts(made, place):
    run = made.run(points=20)
    if place == "name":
        run = replace(run, name=ATTACK, folder=ATTACK)
    elif place == "error":
        run = replace(run, attempts=[replace(each, error=ATTACK, resumed_from=ATTACK) for each in run.attempts])
    elif place == "setting":
        run = replace(run, about={1: {"settings": {ATTACK: ATTACK}}, 2: {"settings": {"a": [ATTACK]}}})
    elif place == "metric":
        run = replace(run, series={ATTACK: made.series([1.0, 2.0]), f"lr/{ATTACK}": made.series([1.0, 2.0])})
    elif place == "event":
        run = replace(run, events=[replace(run.events[0], name=ATTACK, fields={ATTACK: ATTACK, "x": math.nan})])
    problems = [ATTACK] if place == "problem" else []
    page = render_page(
        made.report(run, replace(run, name="other"), problems=problems, title=ATTACK if place == "title" else "runs")
    )
    parts = Parts(page)
    assert len(parts.of("script")) == 2
    assert parts.of("img") == []
    assert not [attributes for _, attributes in parts.tags if "onerror" in attributes]
    json.loads(parts.scripts[0])
    assert ATTACK not in page


def test_what_is_not_there_is_said(made):
    page = render_page(made.report(made.bare(), problems=["bare: no ledger"]))
    for text in ("no metric was logged", "no learning rate was logged", "no throughput is known", "no MFU was logged",
                 "no memory was measured", "no ledger: it is not known where the time went", "no checkpoint was written",
                 "no event was recorded", "it is not known what was run", "Something is missing or damaged"):  # fmt: skip
        assert text in page
    assert Parts(page).of("figure") != []


def test_a_report_of_nothing_is_a_page(made):
    assert "2 things are missing or damaged" in render_page(made.report(problems=["a: no such folder", "b: no such folder"]))


def test_values_that_are_not_finite_are_marked(made):
    run = replace(made.bare(), series={"loss": made.series([3.0, 2.0, 1.0], marks=[(2, "nan"), (3, "-inf"), (4, "inf")])})
    page = render_page(made.report(run))
    drawn = page[page.index('id="chart-loss"') : page.index("<details>")]
    marks = re.search('<g class="marks">(.*?)</g>', drawn)[1]
    assert [marks.count(sign) for sign in "✕▼▲"] == [1, 1, 1]
    assert "3 not finite" in drawn
    (line,) = build_charts.metric_charts(made.report(run))[0][0].lines
    assert [str(value) for value in line.values] == ["3.0", "2.0", "nan", "1.0", "-inf", "inf"]


def test_a_series_of_nothing_finite_is_marked(made):
    empty = replace(made.series([1.0]), steps=[], values=[], tokens=[], times=[], last=None, low=None, high=None)
    series = replace(empty, marks=[replace(made.series([1.0], marks=[(7, "nan")]).marks[0], tokens=None, at=None)])
    page = render_page(made.report(replace(made.bare(), series={"loss": series})))
    assert "no finite value" in page[page.index('id="chart-loss"') :]


def test_each_chart_has_its_numbers_in_a_table(made):
    page = render_page(made.report(replace(made.bare(), series={"loss": made.series([3.25, 2.5])})))
    start = page.index("<table", page.index('id="chart-loss"'))
    assert "<tr><td>1<td>262144<td>500\u202fms<td>3.25<tr><td>2<td>524288<td>1\u202fs<td>2.5" in page[start : start + 500]


def test_runs_are_compared(made):
    one, two = made.run("gpt", points=40), made.run("gpt-wide", seed=1, points=40)
    page = render_page(made.report(one, two))
    loss = build_charts.metric_charts(made.report(one, two))[0][0]
    assert [line.name for line in loss.lines] == ["gpt", "gpt-wide"]
    table = page[page.index("Settings that differ") :]
    assert "<td class=t>layers<td class=t>12<td class=t>13" in table
    assert "optimizer.name" not in table[: table.index("</table>")]
    assert 'id="chart-time-1"' in page
    assert 'id="chart-time-2"' in page


def test_runs_of_one_name_are_told_apart_by_their_folders(made):
    one = made.run(points=40)
    loss = build_charts.metric_charts(made.report(one, replace(one, folder="old/gpt")))[0][0]
    assert [line.name for line in loss.lines] == ["runs/gpt", "old/gpt"]


def test_restarts_are_drawn_where_they_were(made):
    report = made.report(made.run(points=40))
    loss = build_charts.metric_charts(report)[0][0]
    assert [dict(rule.at) for rule in loss.rules] == [{"steps": 300, "time": 215.0}, {"steps": 700, "time": 450.0}]
    assert loss.rules[0].text == "attempt 2 began at step 300 after attempt 1 was killed, 40 steps were done again"
    assert [rule.bad for rule in build_charts.time_charts(report.runs[0], "")[0].rules] == [False, False, True, True]


def test_changes_between_attempts_stand_out(made):
    page = render_page(made.report(made.run(points=40)))
    assert "<mark>settings.lr</mark>" in page
    assert "<td class=t>settings.lr<td class=t>0.0003<td class=t>0.0003<td class=t>0.0002" in page


def test_many_metrics_share_charts_and_points(made):
    values = [float(number % 97) for number in range(97)]
    names = [f"norm/{kind}/layers.{layer}.weight" for layer in range(200) for kind in ("gradient", "update")]
    run = replace(made.run(), series={name: made.series(values) for name in names})
    charts, left_out = build_charts.metric_charts(made.report(run))
    assert len(charts) == 50
    assert left_out == 0
    assert charts[0].title == "norm/gradient/\u2026 (1 to 8 of 200)"
    assert len({chart.key for chart in charts}) == 50
    assert len(charts[0].lines[0].values) <= 75
    assert max(charts[0].lines[0].values) == 96.0
    assert len(render_page(made.report(run))) < 6e6
    many = {f"group{number}/x": made.series([1.0]) for number in range(80)}
    assert build_charts.metric_charts(made.report(replace(run, series=many)))[1] == 20


def test_no_more_bars_than_fit_with_the_slowest_among_them(made):
    run = made.run(ranks=100)
    run = replace(run, slowest=[replace(run.slowest[0], rank=77)])
    bars = build_charts.time_charts(run, "")[1]
    assert len(bars.rows) == build_charts.MAX_BARS
    assert bars.rows[-1][0] == "rank 77"
    assert bars.note == "32 of 100 ranks, with the slowest among them"


def test_thinning_keeps_the_ends_and_the_extremes():
    values = [0.0] * 10_000
    values[1234], values[8765] = 9.0, -9.0
    kept = build_charts.thin_points(values, 100)
    assert {0, 1234, 8765, 9999} <= set(kept)
    assert len(kept) <= 100
    assert build_charts.thin_points([1.0, 2.0], 100) == [0, 1]


def test_a_line_is_interrupted_where_steps_were_done_again_and_where_a_value_is_not_finite():
    path = svg_path([0, 1, 2, 1, 2, 3, 4], [0.0, 1.0, 1.0, 1.0, math.nan, 0.0, 1.0], (0, 4), (0, 1))
    assert path == "M0 10000L2500 0L5000 0M2500 0M7500 10000L10000 0"


def test_a_cause_that_is_not_known_counts_as_other():
    assert known_causes({"compute": 2.0, "teleport": 3.0, "data": 0.0}) == {"compute": 2.0, "other": 3.0}


@pytest.mark.parametrize("values", [[1e308, -1e308, 1.0], [5e-324, 1e-323], [0.0], [7.0, 7.0], [1e300, -1e300]], ids=str)
def test_any_values_can_be_drawn(made, values):
    run = replace(made.bare(), series={"loss": made.series(values), "lr": made.series(values)})
    page = render_page(made.report(run))
    assert re.findall(r' (?:d|x|y|x1|y1)="[^"]*(?:nan|inf)', page) == []
    assert page.count('class="line ') >= 2


def test_a_run_of_no_length_can_be_drawn(made):
    run = made.run(points=20)
    still = [replace(each, at=0.0, seconds=0.0, by_cause=dict.fromkeys(each.by_cause, 0.0)) for each in run.timeline]
    run = replace(run, duration_s=0.0, timeline=still, goodput=replace(run.goodput, total_s=0.0, share=0.0, by_cause={}))
    assert "0.0<small>" in render_page(made.report(run))


def test_settings_are_flat_and_short():
    assert flatten_mapping({"a": {"b": 1, "c": {}}, "d": ["x"]}) == {"a.b": "1", "a.c": "{}", "d": '["x"]'}
    assert len(flatten_mapping({"a": "x" * 1000})["a"]) == 301


def _luminance(colour):
    channels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _contrast(one, two):
    low, high = sorted((_luminance(one), _luminance(two)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_texts_and_lines_have_contrast(theme):
    style = files("dtrain.report.page").joinpath("page.css").read_text(encoding="utf-8")
    block = re.findall(r":root \{(.*?)\}", style, re.DOTALL)[theme]
    colours = {name: value if len(value) == 7 else "#" + "".join(2 * each for each in value[1:])
               for name, value in re.findall(r"--([\w-]+): (#\w+)", block)}  # fmt: skip
    for text in ("ink", "quiet", "accent", "alarm", "good"):
        assert _contrast(colours[text], colours["paper"]) >= 4.5, text
        assert _contrast(colours[text], colours["panel"]) >= 4.5, text
    assert _contrast(colours["alarm"], colours["alarm-paper"]) >= 4.5
    for number in range(8):
        assert _contrast(colours[f"s{number}"], colours["paper"]) >= 3.0, number


def test_causes_are_those_of_the_ledger_and_told_apart_without_colours():
    from dtrain.spans import TIME_CATEGORIES as COUNTED

    assert {cause.name for cause in CAUSE_STYLES} == set(COUNTED)
    assert len({cause.light for cause in CAUSE_STYLES}) == len(CAUSE_STYLES)
    patterns = [cause.pattern for cause in CAUSE_STYLES if cause.pattern]
    assert len(set(patterns)) == len(patterns) == len(CAUSE_STYLES) - 2


def test_the_page_is_made_without_torch():
    heavy = "print([name for name in ('torch', 'numpy', 'matplotlib') if name in sys.modules])"
    program = f"import sys, dtrain.report.page.html, dtrain.report.png; {heavy}"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
