"""The live line: separated from the stream of rank 0, and drawn below the other output of a terminal."""

import os
import pty
import re
import subprocess
import sys

import pytest

from dtrain.launch.terminal import LiveLineParser, has_live_line
from dtrain.launch_protocol import live_line

STREAM = f"a{live_line('step 1')}b\n{live_line('step 2')}c\x1b[1m".encode()


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
def test_live_lines_are_separated_for_all_chunk_sizes(size):
    parser, rest, texts = LiveLineParser(), b"", []
    for begin in range(0, len(STREAM), size):
        rest += parser.feed(STREAM[begin : begin + size])
        texts.append(parser.text)
    assert (rest + parser.close(), set(texts) - {b""}, parser.text) == (
        b"ab\nc\x1b[1m", {b"step 2"} | ({b"step 1"} if size < 100 else set()), b"step 2"
    )  # fmt: skip


def test_live_line_without_end_is_other_output():
    parser = LiveLineParser()
    text = b"\x1b_dtrain;" + b"x" * 10_000
    assert (parser.feed(text) + parser.close(), parser.text) == (text, b"")


def test_text_cannot_end_its_live_line():
    assert live_line("a\x1b\\b\nc") == "\x1b_dtrain;a \\b c\x1b\\"


@pytest.mark.parametrize("environment", [{}, {"TERM": "dumb"}])
def test_dumb_terminal_has_no_live_line(environment):
    assert not has_live_line(environment)


SCRIPT = """
import os, time
import dtrain as dt

with dt.init_dist() as dist:
    log = dt.loggers.progress_bar(3)
    for step in (1, 2, 3):
        log(step, {"loss": 1 / step})
        print("printed", step, flush=True)
        time.sleep(0.3)
"""


@pytest.fixture
def command(tmp_path):
    (tmp_path / "loop.py").write_text(SCRIPT)
    return [sys.executable, "-m", "dtrain", "launch", "-n", "2", "--run-dir", str(tmp_path / "run"), str(tmp_path / "loop.py")]


@pytest.mark.costly
def test_launch_on_terminal_shows_one_live_line(command, tmp_path):
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm"}
    job = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, env=environment, cwd=tmp_path)
    os.close(theirs)
    sent = b""
    while True:
        try:
            chunk = os.read(ours, 65536)
        # A terminal whose other end is closed
        except OSError:
            break
        sent += chunk
    os.close(ours)
    assert job.wait() == 0, sent
    text = sent.decode()
    assert re.search(r"step 1/3  loss 1  \S+ \S+ memory\r\x1b\[K", text)
    # Each state of the live line is erased by the next output.
    assert text.count("step 2/3") >= 1
    assert "\r\x1b[K" in text
    shown = [line.rsplit("\r\x1b[K", 1)[-1].rstrip("\r") for line in text.split("\n")]
    assert [line for line in shown if "step" in line] == [
        line for line in shown if line.startswith("[rank 0] step 3/3  loss 0.3333")
    ]
    assert [line for line in shown if "printed" in line] == [f"[rank 0] printed {step}" for step in (1, 2, 3)]
    log = next((tmp_path / "run" / "logs").glob("*00000.stderr")).read_text()
    assert "\x1b" not in log
    assert log.startswith("step 3/3")


@pytest.mark.costly
def test_launch_without_terminal_prints_plain_lines(command, tmp_path):
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert "\x1b" not in done.stdout + done.stderr
    assert [line.split("  ")[0] for line in done.stderr.splitlines() if "step" in line] == [
        "[rank 0] step 1/3",
        "[rank 0] step 3/3",
    ]
