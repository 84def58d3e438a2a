"""Test ``dtrain report``: output, exit codes, and one line for each mistake."""

import io
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from fcntl import ioctl

import pytest

import runs_made
from dtrain.cli.report import _follow, render_screen, render_text
from dtrain.report.read_run import LiveRun
from dtrain.run import run_files
from runs_made import KILLED_TWICE, Part, write_run


@pytest.fixture
def report(command_line, monkeypatch, tmp_path):
    """``report(*args)``, as of ``command_line``, in a folder where ``gpt`` is a run."""
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "gpt", KILLED_TWICE, straggler=1)
    return command_line("report")


def test_report_writes_page_and_prints_summary(report, tmp_path):
    code, out, err = report("gpt")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert len(lines) <= 10
    assert lines[0] == "gpt: done at step 1,000, after 10 m 20 s on 2 ranks"
    assert lines[1] == "result: loss 3.273 (best 3.26 at step 993), evaluation loss 3.389"
    assert lines[2].startswith("run: ")
    assert " tokens/s, 2 ranks on " in lines[2]
    assert lines[3] == "goodput: 53.3%, 5 m 31 s of 10 m 20 s in steps that count"
    assert lines[5] == "restarts: 2; down 1 m 05 s, set up again 18 s, lost 60 steps and 30 s"
    assert "failed: attempt 2, rank 0: RuntimeError: CUDA error: device-side assert" in lines
    assert lines[-1] == "gpt/report.html"
    assert (tmp_path / "gpt" / "report.html").read_text().startswith("<!doctype html>")
    assert sorted(os.listdir(tmp_path / "gpt")) == ["attempts", "ledger", "metrics.jsonl", "report.html"]


def test_output_option_sets_path_of_page(report, tmp_path):
    assert report("gpt", "--output", "page.html", "--quiet") == (0, "page.html\n", "")
    assert (tmp_path / "page.html").is_file()
    assert not (tmp_path / "gpt" / "report.html").exists()


def test_json_prints_report_data(report, tmp_path):
    code, out, err = report("gpt", "--json")
    report_data = json.loads(out)
    assert (code, err, report_data["format"], report_data["runs"][0]["attempts"][1]["lost_steps"]) == (0, "", 2, 20)
    assert not (tmp_path / "gpt" / "report.html").exists()
    code, out, _ = report("gpt", "--json", "--output", "page.html")
    assert json.loads(out) | {"written_at": 0} == report_data | {"written_at": 0}
    assert (tmp_path / "page.html").exists()


def test_several_runs_are_compared(report, tmp_path):
    write_run(tmp_path / "wide", [Part(begin=0, end=100)])
    code, out, err = report("gpt", "wide")
    assert (code, err) == (0, "")
    assert out.splitlines()[1].startswith("wide: done at step 100, after 58 s on 2 ranks, goodput 70.")
    assert out.splitlines()[-1] == "report.html"
    assert (tmp_path / "report.html").is_file()


def test_damaged_run_is_reported_with_missing_parts(report, tmp_path):
    (tmp_path / "gpt" / "ledger" / "rank-00001.jsonl").unlink()
    code, out, _ = report("gpt")
    assert code == 0
    assert "missing: attempt 1: nothing from rank 1 of 2; means are over those there (and 2 more, in the report)" in out


def test_unreadable_folder_exits_with_1(report, tmp_path):
    (tmp_path / "dust").mkdir()
    (tmp_path / "dust" / "metrics.jsonl").write_bytes(b"\x00" * 100)
    code, out, err = report("dust")
    assert (code, err) == (1, "")
    assert "missing: " in out
    assert (tmp_path / "dust" / "report.html").is_file()


def test_control_characters_in_names_are_escaped(report, tmp_path):
    write_run(tmp_path / "red\x1b[31m", [Part(begin=0, end=40)])
    code, out, _ = report("red\x1b[31m")
    assert code == 0
    assert "\x1b" not in out
    assert r"red\x1b[31m: done" in out


END = runs_made.START + 58  # of the first hundred steps


@pytest.fixture
def top(command_line, monkeypatch, tmp_path):
    """``top(*args)``, as of ``command_line``, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return command_line("top")


def test_once_option_prints_plain_text(top, tmp_path):
    write_run(tmp_path / "gpt", KILLED_TWICE, straggler=1)
    code, out, err = top("gpt", "--once")
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert lines[0] == "gpt  attempt 3  step 1,000  2 m 40 s  done"
    assert lines[1].startswith("loss 3.")
    assert lines[1].endswith("2 steps/s  512 samples/s  524k tok/s  goodput 62.3%")
    assert lines[3].split() == ["rank", "step", "age", "compute", "data", "stall", "save", "RSS", "host", "state"]
    assert [line.split()[-1] for line in lines[4:6]] == ["done", "done"]
    assert "\x1b" not in out
    assert lines[-1].endswith("rank 0  save  step=1000 blocked_s=0.4")


def test_empty_run_prints_waiting_message(top, tmp_path):
    (tmp_path / "gpt").mkdir()
    assert top("gpt", "--once") == (0, "no data yet: waiting for gpt\n", "")


def test_output_without_terminal_prints_once(top, tmp_path):
    write_run(tmp_path / "gpt", [Part(begin=0, end=100)], ledger=False)
    code, out, err = top("gpt")
    assert (code, err, out.splitlines()[0]) == (0, "", "gpt  step 100  (no ledger)")


def test_live_run_is_updated_as_it_grows(tmp_path):
    folder = tmp_path / "gpt"
    live = LiveRun(folder)
    assert live.refresh(END).ranks == []
    write_run(folder, [Part(begin=0, end=100, reason=None)])
    now = live.refresh(END + 5)
    assert (now.attempt, now.step, [rank.age_s for rank in now.ranks], now.has_ended) == (1, 100, [5.0, 5.0], False)
    assert (now.steps_per_s, now.metrics["lr"]) == (pytest.approx(100 / 58), 3e-4)
    assert render_text("gpt", now, END + 5)[0] == "gpt  attempt 1  step 100  1 m 03 s  running"
    assert render_text("gpt", live.refresh(END + 90), END + 90)[0].endswith("silent for 1 m 30 s")
    line = {"kind": "close", "attempt": 1, "at": END + 6, "reason": "failed", "error": "boom"}
    ledger = folder / run_files.LEDGER
    half = json.dumps(line) + "\n"
    with (ledger / run_files.ledger_name(0)).open("a") as file:
        file.write(half[:20])
    assert not live.refresh(END + 7).has_ended
    with (ledger / run_files.ledger_name(0)).open("a") as file:
        file.write(half[20:])
    runs_made.append(ledger / run_files.ledger_name(1), [line | {"reason": "stopped"}])
    now = live.refresh(END + 7)
    assert now.has_ended
    assert render_text("gpt", now, END + 7)[0].endswith("1 m 04 s  failed")
    assert now.unreadable == 0


def test_rotated_metrics_are_followed(tmp_path):
    path = tmp_path / run_files.METRICS
    runs_made.append(path, [{"step": 1, "loss": 1.0}])
    live = LiveRun(tmp_path)
    assert live.refresh(END).metrics == {"loss": 1.0}
    path.rename(tmp_path / "metrics.jsonl.1")
    runs_made.append(path, [{"step": 2, "loss": "nan", "phase": "warmup", "time": 5}])
    assert str(live.refresh(END).metrics) == "{'loss': nan}"


def test_step_is_last_logged_step_of_current_attempt(tmp_path):
    folder, live = tmp_path / "gpt", LiveRun(tmp_path / "gpt")
    write_run(folder, [Part(begin=0, end=100, reason=None)])
    record = {"step": 130, "time": END + 10, "loss": 1.0}
    runs_made.append(folder / run_files.METRICS, [record])
    assert live.refresh(END + 11).step == 130
    opened = {"kind": "open", "attempt": 2, "at": END + 20, "rank": 0, "host": "a", "pid": 1, "setup_s": 1.0, "step": 0}
    runs_made.append(folder / run_files.LEDGER / run_files.ledger_name(0), [opened])
    assert live.refresh(END + 21).step == 0
    runs_made.append(folder / run_files.METRICS, [record | {"step": 101, "time": END + 25}])
    assert live.refresh(END + 26).step == 101


@pytest.mark.parametrize(("width", "height"), [(120, 40), (80, 24), (40, 12), (20, 8)])
def test_screen_fits_narrow_terminal(tmp_path, width, height):
    from rich.console import Console

    write_run(tmp_path / "gpt", [Part(begin=0, end=100, ranks=32)])
    now = LiveRun(tmp_path / "gpt").refresh(END)
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=False)
    console.print(render_screen("gpt", now, END, width, height))
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert lines[0].startswith("gpt  attempt 1"[: width - 1])
    assert any("more rank" in line for line in lines) == (height < 40)


@pytest.fixture
def on_a_terminal(tmp_path, monkeypatch):
    """Run the command on a terminal of its own, for the run ``gpt``: the process, and a function that waits for its drawing."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt").mkdir()
    mine, its = pty.openpty()  # the other end stays open here too, so that nothing that was written is lost when it exits
    ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    command = [sys.executable, "-m", "dtrain", "top", "gpt", "--every", "0.1"]
    environment = os.environ | {"TERM": "xterm"}
    process = subprocess.Popen(command, stdin=its, stdout=its, stderr=its, env=environment, start_new_session=True)
    seen = bytearray()

    def wait_for(what):
        until = time.monotonic() + 60
        while what not in seen:
            assert time.monotonic() < until, bytes(seen)
            if select.select([mine], [], [], 0.1)[0]:
                seen.extend(os.read(mine, 65536))
        return bytes(seen)

    yield process, wait_for
    process.kill()
    process.wait()
    os.close(mine)
    os.close(its)


def test_terminal_display_follows_run_until_it_ends(on_a_terminal, tmp_path):
    process, wait_for = on_a_terminal
    wait_for(b"no data yet")
    write_run(tmp_path / "gpt", [Part(begin=0, end=100)])
    wait_for(b"gpt  attempt 1  step 100")
    assert process.wait(60) == 0


def test_ctrl_c_restores_terminal(on_a_terminal):
    process, wait_for = on_a_terminal
    wait_for(b"no data yet")
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    seen = wait_for(b"\x1b[?25h")  # the cursor is shown again
    assert b"Traceback" not in seen


def test_ctrl_c_during_first_refresh_shows_cursor_again(tmp_path, monkeypatch):
    from rich.live import Live as Screen

    def interrupted(self):
        raise KeyboardInterrupt

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(Screen, "refresh", interrupted)
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    with pytest.raises(KeyboardInterrupt):
        _follow("gpt", LiveRun(tmp_path / "gpt"), 0.1)
    assert sys.stdout.getvalue().endswith("\x1b[?25h")


MISTAKES = {
    "no run": ("report nowhere", 2, "path must be the folder of a run, got 'nowhere', which is not there. Pass the folder"),
    "a folder of runs": (
        "report .",
        2,
        "path must be the folder of a run, got '.', which has no ledger, no metrics.jsonl and no attempts. Runs below: gpt",
    ),
    "nothing": ("report", 2, "missing argument 'RUN_DIR'. See"),
    "output in no folder": ("report gpt --output a/b.html", 2, "--output is in a folder that does not exist, got 'a/b.html'"),
    "output is a folder": ("report gpt --output gpt", 2, "--output is a folder, got 'gpt'"),
    "output is full": ("report gpt --output /proc/report.html", 1, "/proc/report.html: "),
    "every is no number": (
        "top gpt --every x",
        2,
        "--every must be a finite number at least 0.1 and at most 3600, got 'x'. Use 2, for example.",
    ),
    "every is nan": ("top gpt --every nan", 2, "--every must be a finite number at least 0.1 and at most 3600, got nan. Use"),
    "a file": ("top file", 2, "RUN_DIR must be the folder of a run, got the file 'file'. Pass the folder of dt.open_run."),
    "no folder": (
        "top nowhere --once",
        2,
        "RUN_DIR must be the folder of a run, got 'nowhere', which is not there. Pass the folder of dt.open_run.",
    ),
    "nothing of top": ("top", 2, "missing argument 'RUN_DIR'. See `dtrain top --help`."),
}


@pytest.mark.usefixtures("report")
@pytest.mark.parametrize(("line", "code", "expected"), MISTAKES.values(), ids=MISTAKES)
def test_invalid_arguments_print_one_line(dtrain, tmp_path, line, code, expected):
    (tmp_path / "file").write_text("")
    exit_code, out, err = dtrain(*line.split())
    assert (exit_code, out, err.count("\n")) == (code, "", 1)
    assert err.startswith(f"dtrain: {line.split()[0]}: {expected}")
    assert re.search(r"[;.] \S", err)
