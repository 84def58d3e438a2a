import builtins
import math
import sys

import matplotlib
import pytest

from dtrain.errors import ConfigError
from dtrain.schedules.basic import constant, linear
from dtrain.schedules.hyper import measured_in
from dtrain.schedules.plot import plot_schedule, times_of


def test_figure_has_the_value_of_every_step():
    (line,) = plot_schedule(linear(1.0, 0.0, 4), 5).axes[0].lines
    assert (line.get_xdata().tolist(), line.get_ydata().tolist()) == ([0, 1, 2, 3, 4], [1.0, 0.75, 0.5, 0.25, 0.0])


def test_several_schedules_are_named(tmp_path):
    figure = plot_schedule({"lr": linear(1.0, 0.0, 4), "wd": constant(0.1)}, 10)
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["lr", "wd"]
    assert axes.get_xlabel() == "steps"
    figure.savefig(tmp_path / "lr.png")
    assert (tmp_path / "lr.png").read_bytes()[:4] == b"\x89PNG"


def test_the_axis_says_what_is_counted():
    assert plot_schedule(measured_in("tok", constant(1.0)), 10**9, points=3).axes[0].get_xlabel() == "tokens"


def test_nothing_of_matplotlib_is_changed(monkeypatch):
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)  # which others may have imported
    before = matplotlib.rcParams.copy()  # which, unlike a dict of them, does not look for a display
    plot_schedule(constant(1.0), 10)
    assert dict(matplotlib.rcParams.copy().items()) == dict(before.items())
    assert "matplotlib.pyplot" not in sys.modules


def test_a_long_run_is_drawn_by_some_of_its_steps():
    assert times_of(10**9, 3) == [0, 499_999_999, 999_999_999]
    assert times_of(3, 3) == [0, 1, 2]
    assert len(plot_schedule(constant(1.0), 10**6).axes[0].lines[0].get_xdata()) == 2000


REFUSED = {
    "no steps": (lambda: plot_schedule(constant(1.0), 0), "plot_schedule: steps must be a whole number of at least 1, got 0"),
    "part of a step": (lambda: plot_schedule(constant(1.0), 2.5), "steps must be a whole number of at least 1, got 2.5"),
    "one point": (lambda: plot_schedule(constant(1.0), 5, points=1), "points must be a whole number of at least 2, got 1"),
    "nothing": (lambda: plot_schedule({}, 5), "plot_schedule: needs at least one schedule, got none; as in"),
    "no schedule": (lambda: plot_schedule(0.5, 5), "plot_schedule: needs a schedule"),
    "units": (
        lambda: plot_schedule({"a": constant(1.0), "b": measured_in("tok", constant(1.0))}, 5),
        "plot_schedule: schedules are measured in ba and tok",
    ),
    "no value": (
        lambda: plot_schedule(lambda t: math.nan if t == 3 else 1.0, 5),
        "the schedule must be a finite number everywhere, got nan at 3; mend it there",
    ),
    "no value of one": (
        lambda: plot_schedule({"a": constant(1.0), "b": lambda t: None}, 5),
        "plot_schedule: 'b': the schedule must be a finite number everywhere, got None at 0",
    ),
}


@pytest.mark.parametrize(("make", "expected"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_drawn_is_refused(make, expected):
    with pytest.raises(ConfigError, match=expected):
        make()


def test_without_matplotlib_the_error_says_how_to_install_it(monkeypatch):
    real = builtins.__import__

    def without(name, *rest, **options):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r'plot_schedule: needs the package matplotlib: pip install "dtrain\[plot\]"'):
        plot_schedule(constant(1.0), 5)
