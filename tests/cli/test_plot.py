"""``dtrain plot``: its drawing in a terminal and in a file, and one line for each mistake."""

import shlex
import sys

import pytest

from dtrain.cli.plot import draw_text_plot

LOOP = """
from dtrain.schedules.curves import constant, linear
from dtrain.schedules.hyperparameters import with_unit

schedule = linear(1.0, 0.0, 10)
by_tokens = with_unit("tok", linear(1.0, 0.0, 10**6))

def make():
    return {"lr": schedule, "decay": constant(0.1)}

def by_hand(step):
    return 1.0 / (1 + step)

def failing(step):
    return 1 // (step - 5)

def stumbling():
    raise ValueError("not today")

def two(step, more):
    return step

def leaving():
    raise SystemExit(3)

def broken(step):
    return float("nan")

both = {"lr": schedule, "broken": broken}
none = {}
tiny = linear(-1.2345e-5, -1.2345e-7, 1000)
number = 3
if __name__ == "__main__":
    raise SystemExit("the loop ran")
"""


@pytest.fixture
def plot(command_line, monkeypatch, tmp_path):
    """``plot(*args)``, as of ``command_line``, in a folder with ``plotted_loop.py``."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plotted_loop.py").write_text(LOOP)
    yield command_line("plot")
    sys.modules.pop("plotted_loop", None)


def test_schedule_is_plotted_in_terminal(plot):
    code, out, err = plot("schedule", "plotted_loop.py:schedule", "--steps", "11")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "schedule, steps 0 to 10:"
    assert lines[1].lstrip().startswith("1 |***")
    assert lines[16].lstrip().startswith("0 |  ")
    assert lines[16].endswith("*")
    assert lines[-1].split() == ["0", "10"]
    assert out.isascii()


@pytest.mark.parametrize("steps", ["100", "1_00", "1e2"])
def test_schedule_factory_function_is_called(plot, steps):
    code, out, _ = plot("schedule", "plotted_loop:make", "--steps", steps)
    assert code == 0
    assert [line for line in out.splitlines() if line.endswith(":")] == ["lr, steps 0 to 99:", "decay, steps 0 to 99:"]
    assert "0.1 |****" in out


def test_plain_function_is_accepted_as_schedule(plot):
    assert plot("schedule", "plotted_loop.py:by_hand", "--steps", "3")[0] == 0


def test_plot_title_names_counted_unit(plot):
    assert plot("schedule", "plotted_loop.py:by_tokens", "--steps", "1e6")[1].startswith("by_tokens, tokens 0 to 999999:\n")


@pytest.mark.parametrize(("suffix", "begin"), [("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<?xml")])
def test_output_option_writes_image(plot, tmp_path, suffix, begin):
    assert plot("schedule", "plotted_loop.py:make", "--steps", "100", "--output", f"lr.{suffix}") == (0, "", "")
    assert (tmp_path / f"lr.{suffix}").read_bytes().startswith(begin)


@pytest.mark.parametrize(("columns", "widest"), [("40", 40), ("80", 80), ("200", 80)])
def test_text_plot_fits_terminal_width(plot, monkeypatch, columns, widest):
    monkeypatch.setenv("COLUMNS", columns)
    code, out, _ = plot("schedule", "plotted_loop.py:tiny", "--steps", "1000")
    assert (code, max(len(line) for line in out.splitlines())) == (0, widest)
    assert out.splitlines()[1].endswith("*"), "the last step is there"


def test_plot_without_command_lists_commands(plot):
    code, out, _ = plot()
    assert code == 0
    assert "  schedule " in out


MISTAKES = {
    "no target": ("--steps 5", 2, "plot: schedule: missing argument 'TARGET'. See `dtrain plot schedule --help`."),
    "no steps": ("plotted_loop.py:schedule", 2, "plot: schedule: missing option '--steps'. See"),
    "no name": ("plotted_loop.py --steps 5", 2, "plot schedule: target must name a file or module and a schedule"),
    "no file": ("nope.py:x --steps 5", 2, "plot schedule: no such file: 'nope.py'"),
    "no module": ("nope:x --steps 5", 2, "plot schedule: no module named 'nope'"),
    "not there": ("plotted_loop.py:x --steps 5", 2, "plot schedule: no 'x' in 'plotted_loop.py'. Choose from its functions"),
    "a number": (
        "plotted_loop.py:number --steps 5",
        2,
        "plot schedule: 'number' in 'plotted_loop.py' must be a schedule, a function of a number, got int",
    ),
    "two arguments": (
        "plotted_loop.py:two --steps 5",
        2,
        "plot schedule: 'two' in 'plotted_loop.py' must be a schedule, a function of a number, got func",
    ),
    "a schedule factory that fails": (
        "plotted_loop.py:stumbling --steps 5",
        2,
        "plot schedule: 'stumbling' in 'plotted_loop.py' failed: ValueError: not today (in plotted_loop.py, line ",
    ),
    "a schedule that fails": (
        "plotted_loop.py:failing --steps 9",
        1,
        "plot schedule: 'plotted_loop.py:failing' failed: ZeroDivisionError: ",
    ),
    "a schedule factory that exits": (
        "plotted_loop.py:leaving --steps 5",
        2,
        "plot schedule: 'leaving' in 'plotted_loop.py' failed: SystemExit: 3 (in plotted_loop.py, line ",
    ),
    "no number": (
        "plotted_loop.py:both --steps 5",
        2,
        "plot schedule: 'broken': the schedule must return a finite number, got nan at 0",
    ),
    "an empty mapping": (
        "plotted_loop.py:none --steps 5",
        2,
        "plot schedule: 'none' in 'plotted_loop.py' has no schedules. Add a schedule, as in {'lr': schedule}.",
    ),
    "steps": ("x.py:x --steps 0", 2, "plot schedule: --steps must be an integer of at least 1, got 0. Use 1000, for example."),
    "part of a step": ("x.py:x --steps 2.5", 2, "plot schedule: --steps must be an integer"),
    "epochs": ("x.py:x --steps 3ep", 2, "plot schedule: --steps must be an integer of at least 1, got '3ep'"),
    "no picture": ("x.py:x --steps 2 --output lr.txt", 2, "plot schedule: --output must end with .png"),
    "no folder": ("x.py:x --steps 2 --output no/lr.png", 2, "plot schedule: --output must be in an existing folder"),
}


@pytest.mark.parametrize(("args", "code", "expected"), MISTAKES.values(), ids=MISTAKES)
def test_invalid_arguments_print_one_line(plot, args, code, expected):
    exit_code, out, err = plot("schedule", *shlex.split(args))
    assert (exit_code, out, err.count("\n")) == (code, "", 1)
    assert err.startswith(f"dtrain: {expected}")
    assert "; " in err or ". " in err


def test_constant_curve_is_drawn_as_one_line():
    assert draw_text_plot([0, 5], [0.25, 0.25], width=14, height=8) == "0.25 |********\n     +--------\n      0      5"


def test_text_plot_draws_maximum_at_top_and_minimum_at_bottom():
    lines = draw_text_plot(list(range(8)), [2.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0], width=13, height=5).splitlines()
    assert lines[0] == "  2 |*"
    assert lines[2] == "  1 | *** ***"
    assert lines[4] == "  0 |    *"
