import builtins
import math
import sys

import matplotlib
import pytest

from dtrain.errors import ConfigError
from dtrain.schedules.curves import constant, linear, plot, sample_times
from dtrain.schedules.hyperparameters import with_unit


def test_figure_has_the_value_of_every_step():
    (line,) = plot(linear(1.0, 0.0, 4), 5).axes[0].lines
    assert (line.get_xdata().tolist(), line.get_ydata().tolist()) == ([0, 1, 2, 3, 4], [1.0, 0.75, 0.5, 0.25, 0.0])


def test_plot_labels_several_schedules(tmp_path):
    figure = plot({"lr": linear(1.0, 0.0, 4), "wd": constant(0.1)}, 10)
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["lr", "wd"]
    assert axes.get_xlabel() == "steps"
    figure.savefig(tmp_path / "lr.png")
    assert (tmp_path / "lr.png").read_bytes()[:4] == b"\x89PNG"


def test_plot_labels_the_axis_with_the_unit():
    assert plot(with_unit("tok", constant(1.0)), 10**9, points=3).axes[0].get_xlabel() == "tokens"


def test_plot_does_not_change_matplotlib_state(monkeypatch):
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)  # which others may have imported
    before = matplotlib.rcParams.copy()  # which, unlike a dict of them, does not look for a display
    plot(constant(1.0), 10)
    assert dict(matplotlib.rcParams.copy().items()) == dict(before.items())
    assert "matplotlib.pyplot" not in sys.modules


def test_long_run_is_plotted_with_sampled_steps():
    assert sample_times(10**9, 3) == [0, 499_999_999, 999_999_999]
    assert sample_times(3, 3) == [0, 1, 2]
    assert len(plot(constant(1.0), 10**6).axes[0].lines[0].get_xdata()) == 2000


REFUSED = {
    "no steps": (lambda: plot(constant(1.0), 0), "plot: steps must be an integer of at least 1, got 0"),
    "part of a step": (lambda: plot(constant(1.0), 2.5), "steps must be an integer of at least 1, got 2.5"),
    "one point": (lambda: plot(constant(1.0), 5, points=1), "points must be an integer of at least 2, got 1"),
    "nothing": (lambda: plot({}, 5), r"plot: schedules must not be empty, got {}\. Give"),
    "no schedule": (lambda: plot(0.5, 5), "plot: schedule must be a function"),
    "units": (
        lambda: plot({"a": constant(1.0), "b": with_unit("tok", constant(1.0))}, 5),
        "plot: schedules must have one unit, got ba and tok",
    ),
    "no value": (
        lambda: plot(lambda t: math.nan if t == 3 else 1.0, 5),
        "the schedule must return a finite number, got nan at 3",
    ),
    "no value of one": (
        lambda: plot({"a": constant(1.0), "b": lambda t: None}, 5),
        "plot: 'b': the schedule must return a finite number, got None at 0",
    ),
}


@pytest.mark.parametrize(("make", "expected"), REFUSED.values(), ids=REFUSED)
def test_plot_refuses_invalid_arguments(make, expected):
    with pytest.raises(ConfigError, match=expected):
        make()


def test_missing_matplotlib_error_gives_the_install_command(monkeypatch):
    real = builtins.__import__

    def without(name, *rest, **options):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r'plot: needs the package matplotlib: pip install "dtrain\[plot\]"'):
        plot(constant(1.0), 5)
