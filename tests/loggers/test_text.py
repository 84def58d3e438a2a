"""Lines for people: their content, when they come, and when they reach the disk."""

import io
import os
import pty
import re
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from dtrain.errors import ConfigError
from dtrain.loggers.logger import close
from dtrain.loggers.text import console, progress_bar, text_file


def test_line_contains_selected_metrics():
    out = io.StringIO()
    log = console(select=["loss", "speed/*"], stream=out)
    log(120, {"loss": torch.tensor(2.103412), "lr": 3e-3, "speed/tokens": 51_200, "bad": torch.ones(2)})
    assert out.getvalue() == "step 120  loss 2.1034  speed/tokens 51200\n"


def test_line_shows_non_numeric_values(capsys):
    console()(1, {"nan": float("nan"), "text": "é" * 100, "bad": torch.ones(2), "none": None})
    assert capsys.readouterr().out == f'step 1  nan nan  text "{"é" * 58}…  bad <Tensor [2]>  none null\n'


def test_lines_follow_interval_after_step_goes_back(capsys):
    log = console(every="10ba", select=[])
    for step in (1, 5, 10, 19, 40, 12, 13):
        log(step, {"loss": 1.0})
    assert capsys.readouterr().out.split() == ["step", "1", "step", "10", "step", "40", "step", "12"]


def test_closed_stream_warns_once():
    out = io.StringIO()
    out.close()
    log = console(stream=out)
    with pytest.warns(
        UserWarning, match=r"console: ValueError: I/O operation on closed file. Metrics are no longer logged there"
    ):
        log(1, {})
    log(2, {})


def test_text_file_is_flushed_at_interval(tmp_path):
    path = tmp_path / "logs" / "rank-0.txt"
    log = text_file(tmp_path / "logs" / "rank-{rank}.txt", flush_every=3)
    log(1, {"loss": 2.0})
    log(2, {"loss": 1.0})
    assert not path.exists()
    log(3, {"loss": 0.5})
    log(4, {"loss": 0.25})
    assert len(path.read_text().splitlines()) == 3
    close(log)
    log(5, {"loss": 0.0})
    lines = path.read_text().splitlines()
    assert len(lines) == 4
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ  step 4  loss 0.25", lines[3])


def test_unwritable_text_file_warns_once(tmp_path):
    (tmp_path / "file").write_text("")
    log = text_file(tmp_path / "file" / "log.txt")
    with pytest.warns(UserWarning, match="text_file .*no longer logged there"):
        log(1, {})
    log(2, {})


BAD = {
    "unit": (lambda: console(every="3ep"), r"console: every must be a number of steps, got '3ep'"),
    "names": (lambda: console(select="loss"), r"console: select must be a list of names or patterns, got 'loss'"),
    "names of numbers": (lambda: console(select=[1]), r"select must be a list of names or patterns, got \[1\]"),
    "ranks": (lambda: console(ranks=True), "console: ranks must be 0 or 'all', got True"),
    "flush": (lambda: text_file("log.txt", flush_every=0), "flush_every must be an integer of at least 1, got 0"),
    "server": (lambda: text_file("s3://bucket/log.txt"), "text_file: path must be local"),
    "bar, unit": (lambda: progress_bar("3ep"), "progress_bar: run_length must be a number of steps, got '3ep'"),
    "bar, names": (lambda: progress_bar(select="loss"), "progress_bar: select must be a list of names"),
    "bar, seconds": (lambda: progress_bar(line_every_s=-1), "line_every_s must be a finite number at least 0, got -1"),
    "bar, seconds of nan": (lambda: progress_bar(line_every_s=float("nan")), "at least 0, got nan"),
    "bar, seconds of bool": (lambda: progress_bar(line_every_s=True), "at least 0, got True"),
}


@pytest.mark.parametrize(("make", "message"), BAD.values(), ids=BAD)
def test_invalid_arguments_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


ESCAPE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Terminal:
    """A stream that keeps the text it receives."""

    def __init__(self) -> None:
        self._master, slave = pty.openpty()
        self.stream = os.fdopen(slave, "w")
        self._parts: list[bytes] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                output = os.read(self._master, 65536)
            except OSError:  # the other end is closed
                return
            self._parts.append(output)

    def sent(self) -> str:
        self.stream.close()
        self._reader.join()
        os.close(self._master)
        return b"".join(self._parts).decode()


@pytest.fixture
def terminal(monkeypatch) -> Iterator[Callable[[], Terminal]]:
    """Called in the test, it puts a terminal in the place of the standard error: pytest has its own there before."""
    made = Terminal()

    def use() -> Terminal:
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", "100")
        monkeypatch.setattr(sys, "stderr", made.stream)
        return made

    yield use
    if not made.stream.closed:
        made.sent()


def test_bar_is_redrawn_on_one_line(terminal):
    shown = terminal()
    stderr, stdout = sys.stderr, sys.stdout
    bar = progress_bar("600ba")
    for step in (100, 200, 600):
        bar(step, {"loss": 600 / step, "lr": 0.1, "other": 3.0})
    close(bar)
    assert (sys.stderr, sys.stdout) == (stderr, stdout)
    sent = shown.sent()
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", ESCAPE.sub("", sent)) if line.strip()]
    assert re.fullmatch(r"100/600 .*loss 6  lr 0.1", lines[0])
    assert re.fullmatch(r"200/600 .*loss 3  lr 0.1  \S+ steps/s  0:\d\d left", lines[1])
    assert re.fullmatch(r"600/600 ━+ loss 1  lr 0.1  \S+ steps/s  0:00 left", lines[-1])
    assert sent.count("\n") == 1, "all in one line"
    assert sent.rfind("\x1b[?25h") > sent.rfind("\x1b[?25l"), "the cursor is there"


def test_printed_text_appears_above_bar(terminal, monkeypatch):
    used = terminal()
    monkeypatch.setattr(sys, "stdout", used.stream)
    bar, lines = progress_bar(None, select=[]), console(select=[])
    bar(1, {})
    lines(1, {})
    bar(2, {})
    close(bar)
    shown = [line.strip() for line in ESCAPE.sub("", used.sent()).replace("\r", "\n").split("\n")]
    shown = [line for line in shown if line]
    assert "step 1" in shown
    assert shown[-1].startswith("2")


def test_text_printed_to_file_is_not_redirected(terminal, capsys):
    used = terminal()
    bar = progress_bar(10)
    bar(1, {"loss": 1.0})
    print("for the file")
    close(bar)
    assert capsys.readouterr().out == "for the file\n"
    assert "for the file" not in used.sent()


def test_interrupt_restores_terminal(terminal):
    used = terminal()
    stderr = sys.stderr
    bar = progress_bar(10)
    try:
        bar(1, {"loss": 1.0})
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert sys.stderr is not stderr, "it is still shown"
        close(bar)  # as leaving init_dist's block does
    assert sys.stderr is stderr
    sent = used.sent()
    assert ESCAPE.sub("", sent).endswith("\n")
    assert sent.rfind("\x1b[?25h") > sent.rfind("\x1b[?25l")


def test_bar_fits_narrow_terminal(terminal, monkeypatch):
    used = terminal()
    monkeypatch.setenv("COLUMNS", "30")
    bar = progress_bar(10, select=None)
    bar(1, {f"metric/{number}": 1.0 for number in range(20)})
    close(bar)
    assert used.sent().count("\n") == 1


@pytest.mark.parametrize("term", ["dumb", "xterm"])
def test_output_without_terminal_uses_plain_lines(monkeypatch, capsys, term):
    monkeypatch.setenv("TERM", term)
    if term == "xterm":
        assert not sys.stderr.isatty()
    bar = progress_bar(10)
    bar(1, {"loss": 1.0})
    close(bar)
    assert capsys.readouterr() == ("", "step 1/10  loss 1\n")


def test_metrics_follow_the_order_of_their_names(capsys):
    bar = progress_bar(10, select=["loss", "*acc*", "lr"])
    bar(1, {"accuracy": 0.5, "loss": 1.0, "lr": 0.1})
    assert capsys.readouterr().err == "step 1/10  loss 1  lr 0.1  accuracy 0.5\n"


def test_plain_lines_can_be_turned_off(capsys):
    bar = progress_bar(10, line_every_s=None)
    bar(1, {"loss": 1.0})
    close(bar)
    assert capsys.readouterr() == ("", "")


def test_plain_lines_are_first_last_and_at_interval(capsys):
    bar = progress_bar(600, line_every_s=1e6)
    for step in (100, 200, 600):
        bar(step, {"loss": 6.0})
    first, last = capsys.readouterr().err.splitlines()
    assert first == "step 100/600  loss 6"
    assert re.fullmatch(r"step 600/600  loss 6  \S+ steps/s  0:00 left", last)
