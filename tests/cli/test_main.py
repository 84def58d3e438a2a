"""The command line itself: help, version, and one line for each mistake, before anything is started."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import dtrain


def dtrain_command(*args, cwd=None, code="from dtrain.cli.main import run; run()"):
    return subprocess.run([sys.executable, "-c", code, *args], cwd=cwd, capture_output=True, text=True, timeout=90)


@pytest.mark.parametrize("args", [(), ("-h",), ("--help",)])
def test_help_lists_the_commands(args):
    result = dtrain_command(*args)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("Usage: dtrain ")
    assert " launch " in result.stdout


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_of_launch_lists_its_options(flag):
    result = dtrain_command("launch", flag)
    assert (result.returncode, result.stderr) == (0, "")
    for option in ("-n, --nproc", "-m, --module", "--run-dir", "--grace", "SCRIPT"):
        assert option in result.stdout


def test_version():
    result = dtrain_command("--version")
    assert (result.returncode, result.stdout, result.stderr) == (0, f"dtrain {dtrain.__version__}\n", "")


def test_module_form_is_the_same_command():
    result = subprocess.run([sys.executable, "-m", "dtrain", "--version"], capture_output=True, text=True, timeout=90)
    assert result.stdout == f"dtrain {dtrain.__version__}\n"


MISTAKES = {
    "no script": ([], "launch: missing argument 'SCRIPT'"),
    "missing script": (["nope.py"], "launch: no such script: 'nope.py'"),
    "missing script with a line end": (["a\nb.py"], r"launch: no such script: 'a\nb.py'"),
    "folder": (["."], "launch: '.' is a folder"),
    "syntax error": (["bad.py"], "launch: 'bad.py', line 1 is not valid Python"),
    "not utf-8": (["latin.py"], "launch: 'latin.py' is not valid Python"),
    "no module": (["-m", "nope.nope"], "launch: no module named 'nope.nope'"),
    "zero ranks": (["-n", "0", "good.py"], "launch: -n must be from 1 to 256, got 0"),
    "negative ranks": (["-n", "-1", "good.py"], "launch: -n must be from 1 to 256, got -1"),
    "too many ranks": (["-n", "1000000", "good.py"], "launch: -n must be from 1 to 256, got 1000000"),
    "ranks in letters": (["-n", "x", "good.py"], "launch: -n must be a whole number, got 'x'"),
    "no number": (["-n"], "launch: option '-n' requires an argument"),
    "unknown option": (["--fast", "good.py"], "launch: no such option: --fast"),
    "unknown short option": (["-z", "good.py"], "launch: no such option: -z"),
    "grace": (["--grace", "soon", "good.py"], "launch: --grace must be a number of seconds, got 'soon'"),
    "run folder": (["--run-dir", "good.py", "good.py"], "launch: cannot use 'good.py' as the run folder"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_one_line_and_starts_nothing(tmp_path, name):
    args, expected = MISTAKES[name]
    (tmp_path / "good.py").write_text("open('started', 'w')")
    (tmp_path / "bad.py").write_text("def f(:\n")
    (tmp_path / "latin.py").write_bytes(b"# \xff\n")
    before = sorted(os.listdir(tmp_path))
    result = dtrain_command("launch", *args, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith(f"dtrain: {expected}")
    assert "; " in result.stderr.removeprefix(f"dtrain: {expected}")  # and what to do about it
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize(
    ("args", "expected"), [(["lanch"], "no such command 'lanch'"), (["--lanch"], "no such option: --lanch")]
)
def test_mistake_before_the_command_is_one_line(args, expected):
    result = dtrain_command(*args)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"dtrain: {expected}")
    assert result.stderr.endswith("; see `dtrain --help`\n")
    assert result.stderr.count("\n") == 1


HEAVY = ("torch", "numpy", "rich", "tensordict", "asyncio", "multiprocessing")


@pytest.mark.parametrize("args", [["--help"], ["launch", "nope.py"], ["launch", "-n", "1", "good.py"]])
def test_command_line_imports_nothing_heavy(tmp_path, args):
    (tmp_path / "good.py").write_text("import sys; assert 'torch' not in sys.modules")
    code = f"""
import sys
import typer
of_typers_own = set(sys.modules)  # older releases import rich at once
from dtrain.cli.main import run
try:
    run()
finally:
    print("LOADED", [name for name in {HEAVY} if name in sys.modules and name not in of_typers_own])
"""
    result = dtrain_command(*args, cwd=tmp_path, code=code)
    assert result.stdout.splitlines()[-1] == "LOADED []", result
    assert result.returncode == (2 if "nope.py" in args else 0)


def test_heavy_imports_would_be_seen():
    result = dtrain_command(code=f"import sys, asyncio; print([name for name in {HEAVY} if name in sys.modules])")
    assert result.stdout == "['asyncio']\n"
