"""docs/quickstart.md: its commands run in their order, in a short form, and print what the page shows."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import dtrain as dt
from example_runs import ended

PAGE = (Path(__file__).parents[2] / "docs" / "quickstart.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.S)
PATIENCE_S = 600
SHORT = {"python loop.py 1ep": "python loop.py 60ba", "dtrain launch -n 3 loop.py": "dtrain launch -n 3 loop.py 150ba"}
KILLED = re.compile(r"timeout -s KILL \d+ (.*)")
KILL_AFTER = 100  # the step whose checkpoint must be there


def shape(text: str) -> str:
    """A line without what differs between runs: numbers, lengths of time, and the folder it ran in."""
    text = re.sub(r"(?:\d+ [dhm] )*\d[\d.]* m?s\b", "TIME", text)
    return re.sub(r"\d[\d.,]*", "#", re.sub(r"\S*/(?=run/|exported)", "", text))


def has_in_order(printed: str, shown: str) -> bool:
    """Whether each line that is shown begins one that was printed, in their order."""
    lines = iter(shape(printed).splitlines())
    return all(any(line.startswith(wanted) for line in lines) for wanted in shape(shown).splitlines())


def run(command: str, folder: Path) -> str:
    """What a command of the page printed, in its short form."""
    killed = KILLED.fullmatch(command)
    if killed is not None:
        return run_and_kill(killed[1], folder)
    done = subprocess.run(argv(SHORT.get(command, command)), cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stderr + done.stdout


def run_and_kill(command: str, folder: Path) -> str:
    """The same, with SIGKILL to the launcher when a checkpoint of it is there: no clock that a slow machine could miss."""
    with (folder / "killed.txt").open("w+") as output:
        process = subprocess.Popen(argv(command), cwd=folder, stdout=output, stderr=subprocess.STDOUT)
        try:
            until = time.monotonic() + PATIENCE_S
            while not any(step.step >= KILL_AFTER for step in dt.list_checkpoints(folder / "run" / "checkpoints")):
                assert process.poll() is None, f"it ended before it was killed:\n{(folder / 'killed.txt').read_text()}"
                assert time.monotonic() < until, f"no checkpoint:\n{(folder / 'killed.txt').read_text()}"
                time.sleep(0.05)
        finally:
            process.kill()
        assert process.wait() == -signal.SIGKILL
    return (folder / "killed.txt").read_text()


def argv(command: str) -> list[str]:
    program, *rest = command.split()
    return [sys.executable, *(["-m", "dtrain"] if program == "dtrain" else []), *rest]


def commands() -> Iterator[tuple[list[str], str]]:
    """The commands of each block of the shell behind the installation, and what the page shows of their output."""
    blocks = [block for block in BLOCKS if block[0] in ("bash", "text")]
    for at, (language, text) in enumerate(blocks):
        if language == "bash" and "pip install" not in text:
            follows = blocks[at + 1] if at + 1 < len(blocks) else ("", "")
            yield text.splitlines(), follows[1] if follows[0] == "text" else ""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("quickstart")
    for language, text in BLOCKS:
        if language == "python":
            (folder / text.splitlines()[0].removeprefix("# ")).write_text(text)
    return folder


def test_the_page_does_what_it_shows(folder, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("PYTHONWARNINGS", raising=False)
    endings = []
    for lines, shown in commands():
        printed = "".join(run(line, folder) for line in lines)
        if "held-out loss" in shown:
            endings.append(ended(printed))
        assert has_in_order(printed, shown), f"{lines}\nthe page shows\n{shown}\nprinted was\n{printed}"
    found = dt.list_checkpoints(folder / "run" / "checkpoints")
    assert (found[-1].step, found[-1].world_size) == (150, 3)
    logged = list(dt.read_jsonl(folder / "run" / "metrics.jsonl"))
    assert logged == [50, 100, 150]
    assert endings[1].value < endings[0].value < endings[0].baseline - 0.3


def test_what_is_shown_is_looked_for():
    assert has_in_order("[rank 0] step 250 loss 2.0\nstep 3\n", "[rank 0] step 99 loss 1.5\n")
    assert not has_in_order("b 1\na 2\n", "a 1\nb 2\n")
    assert shape("goodput: 54.4%, 1 m 28 s of 2 s in /tmp/x/run/y") == "goodput: #%, TIME of TIME in run/y"
    assert len(list(commands())) == 6
    assert set(SHORT) <= {line for lines, _ in commands() for line in lines}


def test_the_loop_is_short():
    loop = next(text for language, text in BLOCKS if language == "python" and text.startswith("# loop.py"))
    assert len(loop.splitlines()) <= 90
