"""docs/quickstart.md: its commands run in their order, and print the output on the page."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import dtrain as dt
from dtrain.cli.main import app

PAGE = (Path(__file__).parents[2] / "docs" / "quickstart.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.S)
PATIENCE_S = 600
LAST = 1920  # 30 epochs of 64 steps
README = (Path(__file__).parents[2] / "README.md").read_text()


def shape(text: str) -> str:
    """Return a line without the parts that differ between runs: numbers, lengths of time, and the folder it ran in."""
    text = re.sub(r"(?:\d+ [dhm] )*\d[\d.]* m?s\b", "TIME", text)
    text = re.sub(r"\d[\d.,]*", "#", re.sub(r"\S*/(?=run/|ckpt\b|exported)", "", text))
    return text.replace("# steps ", "# step ")


def has_in_order(printed: str, shown: str) -> bool:
    """Return True if each shown line begins a printed line, in the same order."""
    lines = iter(shape(printed).splitlines())
    return all(any(line.startswith(wanted) for line in lines) for wanted in shape(shown).splitlines())


def run(lines: list[str], folder: Path) -> str:
    """Run a block of commands and return its output."""
    if any("kill -9" in line for line in lines):
        return run_and_kill("\n".join(lines), folder)
    return "".join(run_one(line, folder) for line in lines)


def saved(folder: Path) -> dict[int, int]:
    """The number of ranks that saved each step."""
    return {checkpoint.step: checkpoint.world_size for checkpoint in dt.checkpoint.list_steps(folder / "ckpt")}


def run_one(command: str, folder: Path) -> str:
    program, *rest = command.split()
    if program == "dtrain" and rest[0] != "launch":  # in this process, which has imported torch
        with contextlib.chdir(folder):
            result = CliRunner().invoke(app, rest)
        assert result.exit_code == 0, f"{command}\n{result.output}"
        return result.output
    argv = [sys.executable, *(["-m", "dtrain"] if program == "dtrain" else []), *rest]
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stderr + done.stdout


def run_and_kill(block: str, folder: Path) -> str:
    """The page's own commands, by a shell: they kill when a checkpoint is there, so no clock decides."""
    script = f'dtrain() {{ exec {shlex.quote(sys.executable)} -m dtrain "$@"; }}\n{block}'
    shell = subprocess.Popen(
        ["bash", "-c", script], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        printed, _ = shell.communicate(timeout=PATIENCE_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
    assert shell.returncode == 0, printed
    assert 1000 <= max(saved(folder)) < LAST, printed
    return printed


def commands() -> Iterator[tuple[list[str], str]]:
    """Return the commands of each shell block behind the installation, and their output on the page."""
    blocks = [block for block in BLOCKS if block[0] in ("bash", "text")]
    for index, (language, text) in enumerate(blocks):
        if language == "bash" and "pip install" not in text:
            follows = blocks[index + 1] if index + 1 < len(blocks) else ("", "")
            yield text.splitlines(), follows[1] if follows[0] == "text" else ""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("quickstart")
    for language, text in BLOCKS:
        if language == "python":
            (folder / text.splitlines()[0].removeprefix("# ")).write_text(text)
    return folder


@pytest.mark.costly
def test_quickstart_commands_print_the_shown_output(folder, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("PYTHONWARNINGS", raising=False)
    for lines, shown in commands():
        printed = run(lines, folder)
        assert has_in_order(printed, shown), f"{lines}\nthe page shows\n{shown}\nprinted was\n{printed}"
    assert (max(saved(folder)), saved(folder)[LAST]) == (LAST, 3)


def test_output_comparison_detects_order_and_ignores_numbers():
    assert has_in_order("[rank 0] step 250 loss 2.0\nstep 3\n", "[rank 0] step 99 loss 1.5\n")
    assert not has_in_order("b 1\na 2\n", "a 1\nb 2\n")
    assert shape("goodput: 54.4%, 1 m 28 s of 2 s in /tmp/x/run/y") == "goodput: #%, TIME of TIME in run/y"
    assert shape("loading /tmp/x/ckpt/step-00000192") == "loading ckpt/step-#"
    assert len(list(commands())) == 7


def test_quickstart_loop_is_that_of_the_readme():
    loop = next(text for language, text in BLOCKS if language == "python" and text.startswith("# loop.py"))
    assert loop.removeprefix("# loop.py\n") == re.findall(r"```python\n(.*?)```", README, re.S)[0]
