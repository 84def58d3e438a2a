"""Render reports: the texts on the page, its charts, and its content security policy."""

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

import numpy as np
import pytest

from dtrain.report import charts
from dtrain.report.page import format_facts, render_page
from dtrain.spans import TIME_CATEGORIES

ATTACK = """</script><script>alert("1")</script><img src=x onerror='alert(2)'>&amp;"""


class Parts(HTMLParser):
    """Tags with their attributes, and the texts of scripts."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.scripts, self._in = [], [], False
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._in = tag == "script"
        if self._in:
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._in = False

    def handle_data(self, data):
        if self._in:
            self.scripts[-1] += data

    def of(self, name):
        return [attributes for tag, attributes in self.tags if tag == name]


@pytest.fixture(scope="module")
def page(made):
    return render_page(made.report(made.run(points=40)))


def drawn(page):
    return json.loads(Parts(page).scripts[0])


def test_render_page_has_every_chart(page):
    parts = Parts(page)
    keys = ["chart-loss", "chart-lr", "chart-mfu", "chart-norm-gradient", "chart-throughput", "chart-memory",
            "chart-time", "chart-attempts", "chart-ranks", "chart-checkpoints", "chart-checkpoint-size"]  # fmt: skip
    assert [figure["id"] for figure in parts.of("figure")] == keys
    assert list(drawn(page)) == keys


def test_every_color_of_a_chart_is_in_both_themes(page):
    colors = {trace["color"] for chart in drawn(page).values() for trace in chart["data"]}
    for theme in _themes():
        assert colors <= set(theme)


def test_page_with_the_most_points_is_at_most_1_2_megabytes(made):
    run = made.run(steps=100_000, points=1000)
    noise = np.random.default_rng(0)
    series = {f"loss/{number}": made.series(noise.random(1000) * 1e-3, every=100) for number in range(charts.MAX_SINGLE_CHARTS)}
    page = render_page(made.report(replace(run, series=series)))
    assert 300_000 < len(page.encode()) <= 1_200_000


def test_single_values_are_texts_and_not_charts(made):
    run = made.run(ranks=1, points=20)
    run = replace(run, attempts=run.attempts[:1], checkpoints=run.checkpoints[:1],
                  series={"loss": made.series([2.5, 2.0]), "eval/loss": made.series([1.25])})  # fmt: skip
    page = render_page(made.report(run))
    assert list(drawn(page)) == ["chart-loss", "chart-throughput", "chart-memory", "chart-time"]
    assert [figure["id"] for figure in Parts(page).of("figure")] == list(drawn(page))
    for text in (
        "<b>evaluation loss</b>: eval/loss 1.25 at step 1",
        "<b>Time of each attempt</b>: attempt 1 was the only one",
        "<b>Time of each rank</b>: rank 0 was the only one",
        "<b>Size of checkpoints</b>: size 1,430.51 MiB at step 100",
    ):
        assert text in page, text


def test_norm_of_gradients_has_one_chart(made):
    series = {"grad_norm": made.series([3.0, 2.0]), "norm/grad": made.series([3.0, 2.5]), "norm/param": made.series([1.0, 2.0])}
    by_key, _ = charts.metric_charts(made.report(replace(made.bare(), series=series)))
    assert list(by_key) == ["chart-grad-norm", "chart-norm-param"]
    assert [line["name"] for line in by_key["chart-grad-norm"]["data"]] == ["grad_norm", "norm/grad"]


def test_settings_are_visible_and_the_result_is_first(page):
    settings = page[page.index("<h2>Settings</h2>") :]
    settings = settings[: settings.index("</section>")]
    for name, value in (("lr", "0.0002"), ("layers", "12"), ("optimizer.name", "adamw"), ("optimizer.betas", "[0.9, 0.95]")):
        assert f"<dt>{name}</dt><dd>{value}</dd>" in settings
    assert "<details" not in settings
    assert page.index("<dt>loss</dt>") < page.index("<dt>goodput</dt>") < page.index("<h2>Metrics</h2>")


def test_render_page_does_not_repeat_the_throughput_of_the_ledger(made):
    report = made.report(made.run(points=40))
    assert "speed/tokens_per_s" in report.runs[0].series
    assert list(charts.speed_charts(report)) == ["chart-throughput", "chart-memory"]
    alone = made.report(replace(report.runs[0], timeline=None))
    assert list(charts.speed_charts(alone)) == ["chart-throughput", "chart-speed-tokens-per-s", "chart-memory"]


def test_render_page_forbids_the_network_and_other_scripts(page):
    parts = Parts(page)
    (policy,) = [tag["content"] for tag in parts.of("meta") if tag.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; ")
    assert "connect-src" not in policy
    _, script = parts.scripts
    assert f"script-src 'sha256-{b64encode(hashlib.sha256(script.encode()).digest()).decode()}';" in policy
    outside = [value for _, attributes in parts.tags for name, value in attributes.items() if name in ("src", "href") and value]
    assert [value for value in outside if not value.startswith(("#", "data:"))] == []


@pytest.mark.parametrize("place", ["name", "error", "setting", "metric", "event", "problem", "title"])
def test_render_page_escapes_texts_of_a_run(made, place):
    run = made.run(points=20)
    if place == "name":
        run = replace(run, name=ATTACK, folder=ATTACK)
    elif place == "error":
        run = replace(run, attempts=[replace(attempt, error=ATTACK, resumed_from=ATTACK) for attempt in run.attempts])
    elif place == "setting":
        run = replace(run, about={1: {"settings": {ATTACK: ATTACK}}, 2: {"settings": {"a": [ATTACK]}}})
    elif place == "metric":
        run = replace(run, series={ATTACK: made.series([1.0, 2.0]), f"lr/{ATTACK}": made.series([1.0, 2.0])})
    elif place == "event":
        run = replace(run, events=[run.events[0] | {"name": ATTACK, "fields": {ATTACK: ATTACK, "x": math.nan}}])
    problems = [ATTACK] if place == "problem" else []
    page = render_page(
        made.report(run, replace(run, name="other"), problems=problems, title=ATTACK if place == "title" else "runs")
    )
    parts = Parts(page)
    assert len(parts.of("script")) == 2
    assert parts.of("img") == []
    assert not [attributes for _, attributes in parts.tags if "onerror" in attributes]
    assert ATTACK not in page


def test_render_page_names_missing_parts(made):
    page = render_page(made.report(made.bare(), problems=["bare: no ledger"]))
    for text in ("no metric was logged", "no throughput is known", "no memory was measured",
                 "no ledger: it is not known where the time went", "no ledger of any rank", "no checkpoint was written",
                 "no event was recorded", "it is not known what was run", "Something is missing or damaged",
                 "no ledger says where the time went"):  # fmt: skip
        assert text in page
    assert Parts(page).of("figure") == []
    assert drawn(page) == {}


def test_render_page_without_runs_lists_problems(made):
    assert "2 things are missing or damaged" in render_page(made.report(problems=["a: no such folder", "b: no such folder"]))


def test_render_page_includes_breakdown_causes_and_settings(page):
    for text in ("70.0%", "goodput", "attempt 2 failed: rank 3: RuntimeError: CUDA error: device-side assert",
                 "rank 3 spent 59 s more on data than the median rank", "steps done again",
                 "<tr><td>restart<td>47 s<td>8.0%", "<tr><td>2<td>3 m 35 s<td>failed<td>300 to 720"):  # fmt: skip
        assert text in page, text
    by_key = drawn(page)
    assert [trace["name"] for trace in by_key["chart-attempts"]["data"]][:2] == ["compute", "communication"]
    assert by_key["chart-attempts"]["rows"] == ["attempt 1", "attempt 2", "attempt 3"]
    assert by_key["chart-ranks"]["rows"] == [f"rank {rank}" for rank in range(8)]


def test_curves_can_be_plotted_over_steps_tokens_and_time(made):
    chart = charts.metric_charts(made.report(replace(made.bare(), series={"loss": made.series([3.25, 2.5])}, duration_s=1.0)))[
        0
    ]
    (line,) = chart["chart-loss"]["data"]
    assert (line["y"], line["over"]) == ([3.25, 2.5], {"steps": [1, 2], "tokens": [262144, 524288], "time": [500, 1000]})
    assert (chart["chart-loss"]["axes"], chart["chart-loss"]["timeTitle"]) == (["steps", "tokens", "time"], "time (ms)")


def test_non_finite_values_are_drawn_as_marks(made):
    series = made.series([3.0, 2.0, math.nan, 1.0, -math.inf, math.inf])
    chart = charts.metric_charts(made.report(replace(made.bare(), series={"loss": series})))[0]["chart-loss"]
    line, *marks = chart["data"]
    assert line["y"] == [3, 2, None, 1, None, None]
    assert {mark["name"]: mark["over"]["steps"] for mark in marks} == {"NaN": [3], "+inf": [6], "-inf": [5]}


def test_series_without_finite_values_has_only_marks(made):
    series = replace(made.series([math.nan]), last=None, low=None, high=None)
    chart = charts.metric_charts(made.report(replace(made.bare(), series={"loss": series})))[0]["chart-loss"]
    assert [trace["name"] for trace in chart["data"]] == ["NaN"]


def test_render_page_compares_runs(made):
    one, two = made.run("gpt", points=40), made.run("gpt-wide", seed=1, points=40)
    page = render_page(made.report(one, two))
    assert [trace["name"] for trace in drawn(page)["chart-loss"]["data"][:2]] == ["gpt", "gpt-wide"]
    table = page[page.index("Settings that differ") :]
    assert "<td>layers<td>12<td>13" in table
    assert "optimizer.name" not in table[: table.index("</table>")]
    assert {"chart-time-1", "chart-time-2"} <= set(drawn(page))


def test_runs_with_equal_names_are_labeled_by_their_folders(made):
    one = made.run(points=40)
    lines = charts.metric_charts(made.report(one, replace(one, folder="old/gpt")))[0]["chart-loss"]["data"]
    assert [line["name"] for line in lines[:2]] == ["runs/gpt", "old/gpt"]


def test_restarts_and_failures_are_marked(made):
    run = made.run(points=40)
    restart = charts.metric_charts(made.report(run))[0]["chart-loss"]["data"][-1]
    assert restart["name"] == "restart"
    assert restart["over"]["steps"] == [300, 700]
    minute_s = 60.0
    assert restart["over"]["time"] == pytest.approx([215 / minute_s, 450 / minute_s])
    assert restart["texts"][0] == "attempt 2 began at step 300 after attempt 1 was killed, 40 repeated steps"
    names = [trace["name"] for trace in charts.run_charts(run, "")["chart-time"]["data"]]
    assert names[-2:] == ["restart", "killed or failed"]
    ends = charts.run_charts(run, "")["chart-time"]["data"][-1]
    assert ends["texts"][1] == "attempt 2 failed: rank 3: RuntimeError: CUDA error: device-side assert"


def test_changes_between_attempts_are_listed(page):
    assert "What changed between attempts" in page
    assert "<td>settings.lr<td>0.0003<td>0.0003<td>0.0002" in page


def test_many_metrics_are_limited_in_charts_and_points(made):
    values = [float(number % 97) for number in range(97)]
    names = [f"norm/{kind}/layers.{layer}.weight" for layer in range(200) for kind in ("gradient", "update")]
    run = replace(made.run(), series={name: made.series(values) for name in names}, attempts=[])
    by_key, left_out = charts.metric_charts(made.report(run))
    assert (len(by_key), left_out) == (50, 0)
    first = next(iter(by_key.values()))
    assert first["title"] == "norm of gradient of \u2026 (1 to 8 of 200)"
    assert len(first["data"][0]["y"]) <= 75
    assert max(first["data"][0]["y"]) == 96.0
    assert len(json.dumps(by_key)) < 2e6
    many = {f"group{number}/x": made.series([1.0]) for number in range(80)}
    assert charts.metric_charts(made.report(replace(run, series=many)))[1] == 20


def test_rank_bars_are_limited_and_include_slowest_ranks(made):
    run = made.run(ranks=100)
    run = replace(run, slowest=[replace(run.slowest[0], rank=77)])
    bars = charts.run_charts(run, "")["chart-ranks"]
    assert len(bars["rows"]) == len(bars["data"][0]["x"]) == charts.MAX_BARS
    assert bars["rows"][-1] == "rank 77"
    assert bars["title"] == "Time of each rank, 32 of 100 with the slowest among them"


def test_thin_points_keeps_the_ends_and_the_extremes():
    values = np.zeros(10_000)
    values[1234], values[8765], values[5000] = 9.0, -9.0, math.nan
    kept = charts.thin_points(values, 100)
    assert {0, 1234, 8765, 9999, 5000} <= set(kept)
    assert len(kept) <= 101
    assert charts.thin_points(np.array([1.0, 2.0]), 100) == [0, 1]


@pytest.mark.parametrize("values", [[1e308, -1e308, 1.0], [5e-324, 1e-323], [0.0], [7.0, 7.0], [1e300, -1e300]], ids=str)
def test_extreme_values_are_drawable(made, values):
    run = replace(made.bare(), series={"loss": made.series(values), "lr": made.series(values)})
    by_key = drawn(render_page(made.report(run)))
    assert set(by_key) == ({"chart-loss", "chart-lr"} if len(values) > 1 else set())
    numbers = [y for chart in by_key.values() for trace in chart["data"] for y in trace.get("y", ()) if y is not None]
    assert all(y == 0 or 1e-300 < abs(y) <= 1e300 for y in numbers)


def test_zero_length_run_is_drawable(made):
    run = made.run(points=20)
    still = {cause: 0 * seconds for cause, seconds in run.timeline.by_cause.items()}
    timeline = replace(run.timeline, at=0 * run.timeline.at, seconds=0 * run.timeline.seconds, by_cause=still)
    run = replace(run, duration_s=0.0, timeline=timeline, goodput=replace(run.goodput, total_s=0.0, share=0.0, by_cause={}))
    assert "<dt>goodput</dt><dd>0.0%" in render_page(made.report(run))


def test_format_facts_limits_texts():
    assert format_facts({"a": {"b": 1, "c": {}}, "d": ["x"]}) == {"a.b": "1", "a.c": "{}", "d": '["x"]'}
    assert len(format_facts({"a": "x" * 1000})["a"]) == 301


def _luminance(colour):
    channels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4 for channel in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _contrast(one, two):
    low, high = sorted((_luminance(one), _luminance(two)))
    return (high + 0.05) / (low + 0.05)


def _themes():
    style = files("dtrain.report").joinpath("page.css").read_text(encoding="utf-8")
    return [
        {name: value if len(value) == 7 else "#" + "".join(2 * digit for digit in value[1:])
         for name, value in re.findall(r"--([\w-]+): (#\w+)", block)}
        for block in re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    ]  # fmt: skip


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_text_and_line_colors_have_enough_contrast(theme):
    colours = _themes()[theme]
    for text in ("ink", "quiet", "accent", "alarm", "good"):
        assert _contrast(colours[text], colours["paper"]) >= 4.5, text
        assert _contrast(colours[text], colours["panel"]) >= 4.5, text
    for number in range(8):
        assert _contrast(colours[f"line{number}"], colours["panel"]) >= 3.0, number


def test_causes_are_distinguishable_by_color_and_pattern():
    assert set(charts.CAUSE_PATTERNS) == set(TIME_CATEGORIES)
    for theme in _themes():
        assert len({theme[cause] for cause in TIME_CATEGORIES}) == len(TIME_CATEGORIES)
    patterns = [pattern for pattern in charts.CAUSE_PATTERNS.values() if pattern]
    assert len(set(patterns)) == len(patterns) == len(TIME_CATEGORIES) - 2


def test_render_page_imports_no_torch():
    program = "import sys, dtrain.report.page, dtrain.report.read_run; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
