"""The command line itself: help, version, and one line for each mistake, before anything is started."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import typer

import dtrain
from dtrain import launch_protocol
from dtrain.cli.main import _invoke, app, run


def dtrain_command(*args, cwd=None, code="from dtrain.cli.main import run; run()"):
    return subprocess.run([sys.executable, "-c", code, *args], cwd=cwd, capture_output=True, text=True, timeout=90)


def test_command_without_arguments_lists_commands():
    result = dtrain_command()
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("Usage: dtrain ")
    assert " launch " in result.stdout


def test_version_option_prints_version():
    result = dtrain_command("--version")
    assert (result.returncode, result.stdout, result.stderr) == (0, f"dtrain {dtrain.__version__}\n", "")


def test_module_invocation_equals_command():
    result = subprocess.run([sys.executable, "-m", "dtrain", "--version"], capture_output=True, text=True, timeout=90)
    assert result.stdout == f"dtrain {dtrain.__version__}\n"


MISTAKES = {
    "no script": ([], "launch: missing argument 'SCRIPT'"),
    "missing script": (["nope.py"], "launch: no such script: 'nope.py'"),
    "missing script with a line end": (["a\nb.py"], r"launch: no such script: 'a\nb.py'"),
    "folder": (["."], "launch: '.' is a folder"),
    "syntax error": (["bad.py"], "launch: bad.py:1 is not valid Python"),
    "not utf-8": (["latin.py"], "launch: 'latin.py' is not valid Python"),
    "no module": (["-m", "nope.nope"], "launch: no module named 'nope.nope'"),
    "zero ranks": (["-n", "0", "good.py"], "launch: -n must be an integer from 1 to 256, got 0"),
    "negative ranks": (["-n", "-1", "good.py"], "launch: -n must be an integer from 1 to 256, got -1"),
    "too many ranks": (["-n", "1000000", "good.py"], "launch: -n must be an integer from 1 to 256, got 1000000"),
    "ranks in letters": (["-n", "x", "good.py"], "launch: -n must be an integer from 1 to 256, got 'x'"),
    "no number": (["-n"], "launch: option '-n' requires an argument"),
    "unknown option": (["--fast", "good.py"], "launch: no such option: --fast"),
    "unknown short option": (["-z", "good.py"], "launch: no such option: -z"),
    "grace": (
        ["--grace", "soon", "good.py"],
        "launch: --grace must be a finite number at least 0 and at most 86400, got 'soon'",
    ),
    "run folder": (["--run-dir", "good.py", "good.py"], "launch: cannot use 'good.py' as the run folder"),
}


@pytest.fixture
def called(monkeypatch, capfd):
    """Run a command line in this process: its exit code, and what it wrote."""

    def call(*args):
        monkeypatch.setattr(sys, "argv", ["dtrain", *args])
        with pytest.raises(SystemExit) as end:
            run()
        return end.value.code, *capfd.readouterr()

    return call


@pytest.mark.parametrize(("args", "expected"), MISTAKES.values(), ids=MISTAKES)
def test_invalid_arguments_print_one_line_and_start_nothing(tmp_path, monkeypatch, called, args, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.py").write_text("open('started', 'w')")
    (tmp_path / "bad.py").write_text("def f(:\n")
    (tmp_path / "latin.py").write_bytes(b"# \xff\n")
    before = sorted(os.listdir(tmp_path))
    code, out, err = called("launch", *args)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith(f"dtrain: {expected}")
    assert re.search(r"\. [A-Z]", err.removeprefix(f"dtrain: {expected}"))  # and what to do about it
    assert sorted(os.listdir(tmp_path)) == before


def test_invalid_arguments_exit_with_code_2(tmp_path):
    result = dtrain_command("launch", "nope.py", cwd=tmp_path)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)


USAGE = {
    "unknown command": (["lanch"], "no such command 'lanch'", "dtrain"),
    "unknown option": (["--lanch"], "no such option: --lanch", "dtrain"),
    "value for a flag": (["--version=3"], "option '--version' does not take a value", "dtrain"),
    "launch: unknown option": (["launch", "--fast", "x.py"], "launch: no such option: --fast", "dtrain launch"),
    "launch: missing argument": (["launch"], "launch: missing argument 'SCRIPT'", "dtrain launch"),
    "launch: missing value": (["launch", "x.py", "-n"][::2], "launch: option '-n' requires an argument", "dtrain launch"),
    "launch: value for a flag": (
        ["launch", "--module=3", "x"],
        "launch: option '--module' does not take a val",
        "dtrain launch",
    ),
    "env: unknown option": (["env", "--yaml"], "env: no such option: --yaml", "dtrain env"),
    "env: value for a flag": (["env", "--json=3"], "env: option '--json' does not take a value", "dtrain env"),
    "env: argument": (["env", "x"], "env: got unexpected extra argument", "dtrain env"),
    "checkpoints: unknown command": (["checkpoints", "lst"], "checkpoints: no such command 'lst'", "dtrain checkpoints"),
    "checkpoints: unknown option": (["checkpoints", "--x"], "checkpoints: no such option: --x", "dtrain checkpoints"),
    "checkpoints list: missing argument": (
        ["checkpoints", "list"],
        "checkpoints: list: missing argument 'ROOT'",
        "dtrain checkpoints list",
    ),
    "checkpoints list: another argument": (
        ["checkpoints", "list", "a", "b"],
        "checkpoints: list: got unexpected extra argument",
        "dtrain checkpoints list",
    ),
    "checkpoints list: unknown option": (
        ["checkpoints", "list", "-z", "a"],
        "checkpoints: list: no such option: -z",
        "dtrain checkpoints list",
    ),
    "checkpoints verify: missing argument": (
        ["checkpoints", "verify", "--all"],
        "checkpoints: verify: missing argument 'ROOT_OR_STEP'",
        "dtrain checkpoints verify",
    ),
    "data: unknown command": (["data", "read"], "data: no such command 'read'", "dtrain data"),
    "data write: missing argument": (["data", "write", "a"], "data: write: missing argument 'SOURCE'", "dtrain data write"),
    "data write: unknown option": (
        ["data", "write", "--fast", "a"],
        "data: write: no such option: --fast",
        "dtrain data write",
    ),
    "data inspect: missing argument": (["data", "inspect"], "data: inspect: missing argument 'URL'", "dtrain data inspect"),
    "data inspect: missing value": (
        ["data", "inspect", "a", "--head"],
        "data: inspect: option '--head' requires an argument",
        "dtrain data inspect",
    ),
    "checkpoints verify: value for a flag": (
        ["checkpoints", "verify", "--all=3", "a"],
        "checkpoints: verify: option '--all' does not take a value",
        "dtrain checkpoints verify",
    ),
}


@pytest.mark.parametrize(("args", "expected", "command"), USAGE.values(), ids=USAGE)
def test_usage_error_prints_one_line_at_every_level(called, args, expected, command):
    code, out, err = called(*args)
    assert (code, out) == (2, "")
    assert err.startswith(f"dtrain: {expected}")
    assert err.endswith(f". See `{command} --help`.\n")
    assert err.count("\n") == 1


HELP = {
    "dtrain": ([], "Usage: dtrain ", ["launch", "env", "checkpoints", "data", "--version"]),
    "data": (["data"], "Usage: dtrain data ", ["write", "inspect"]),
    "data write": (
        ["data", "write"],
        "Usage: dtrain data write ",
        ["SOURCE", "OUT", "Input:", "--tokenizer NAME", "--max-shard-size SIZE", "Exit codes: ", "Examples:"],
    ),
    "data inspect": (["data", "inspect"], "Usage: dtrain data inspect ", ["URL", "--head K", "--verify", "Exit codes: "]),
    "launch": (
        ["launch"],
        "Usage: dtrain launch ",
        ["-n, --nproc", "-m, --module", "-c, --command", "--run-dir", "--grace", "--log-ranks", "SCRIPT", "Exit codes: "],
    ),
    "env": (["env"], "Usage: dtrain env ", ["--json", "Exit codes: "]),
    "checkpoints": (["checkpoints"], "Usage: dtrain checkpoints ", ["list", "verify"]),
    "checkpoints list": (["checkpoints", "list"], "Usage: dtrain checkpoints list ", ["ROOT", "Exit codes: "]),
    "checkpoints verify": (
        ["checkpoints", "verify"],
        "Usage: dtrain checkpoints verify ",
        ["ROOT_OR_STEP", "--all", "Exit codes"],
    ),
}


@pytest.mark.parametrize("flag", ["-h", "--help"])
@pytest.mark.parametrize(("args", "begin", "words"), HELP.values(), ids=HELP)
def test_help_is_available_at_every_level(called, args, begin, words, flag):
    code, out, err = called(*args, flag)
    assert (code, err) == (0, "")
    assert out.startswith(begin)
    assert [word for word in words if word not in out] == []
    assert "..." not in out.partition("Commands:")[2]  # the summary of a command fits its line


@pytest.mark.parametrize("args", [["--version"], ["--help"], ["checkpoints"]])
def test_full_output_device_prints_one_line(args):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "dtrain", *args]
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=90)
    assert (result.returncode, result.stderr) == (1, "dtrain: [Errno 28] No space left on device\n")


def test_too_long_path_prints_one_line():
    result = dtrain_command("checkpoints", "list", "x" * 5000)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert result.stderr.startswith("dtrain: [Errno 36] File name too long: ")


def test_checkpoints_without_command_prints_help(called):
    code, out, _ = called("checkpoints")
    assert (code, out.startswith("Usage: dtrain checkpoints ")) == (0, True)


HEAVY = ("torch", "numpy", "rich", "tensordict", "asyncio", "multiprocessing")
SLOW = ("pydantic", "importlib.metadata")  # as long as all the rest of a launch that is refused


LIGHT = (
    ["--help"],
    ["launch", "nope.py"],
    ["launch", "-n", "1", "good.py"],
    ["checkpoints"],
    ["checkpoints", "list", "nope"],
    ["data"],
    ["data", "write", "nope.jsonl", "nope"],
)


@pytest.mark.parametrize("args", LIGHT)
def test_command_line_imports_no_heavy_modules(tmp_path, args):
    (tmp_path / "good.py").write_text("import sys; assert 'torch' not in sys.modules")
    names = HEAVY + SLOW * (args[0] == "launch")
    code = f"""
import sys
import typer
of_typers_own = set(sys.modules)  # older releases import rich at once
from dtrain.cli.main import run
try:
    run()
finally:
    print("LOADED", [name for name in {names} if name in sys.modules and name not in of_typers_own])
"""
    result = dtrain_command(*args, cwd=tmp_path, code=code)
    assert result.stdout.splitlines()[-1] == "LOADED []", result
    assert result.returncode == (2 if args[-1].startswith("nope") else 0)


def test_heavy_import_check_detects_asyncio():
    result = dtrain_command(code=f"import sys, asyncio; print([name for name in {HEAVY} if name in sys.modules])")
    assert result.stdout == "['asyncio']\n"


def test_hang_command_shows_recorded_stacks(tmp_path, capsys):
    path = launch_protocol.stacks_file(tmp_path, 0)
    path.parent.mkdir()
    path.write_text('Thread 0x01 (most recent call first):\n  File "/home/me/loop.py", line 12 in train\n')
    assert _invoke(["hang", str(tmp_path)]) == 0
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.startswith("dtrain: launch: asked: rank 0 of 1 ")
    assert second == "  rank 0: /home/me/loop.py:12 in train"
    assert third.startswith("  as of ")


@pytest.mark.parametrize(
    ("below", "says"),
    [
        pytest.param("gone", "dtrain: hang: path must be an existing folder, got ", id="no-folder"),
        pytest.param("", "dtrain: hang: '{folder}' has no records of ranks", id="nothing-there"),
    ],
)
def test_refused_hang_command_prints_one_line_and_exits_2(tmp_path, capsys, below, says):
    assert _invoke(["hang", str(tmp_path / below)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(says.format(folder=tmp_path))


def help_of_commands(command=None, names=()):
    """The help of every command that is no group, by name."""
    command = command or typer.main.get_command(app)  # of the whole command line
    below = getattr(command, "commands", None)
    if below is None:
        context = command.make_context(" ".join(["dtrain", *names]), [], resilient_parsing=True)
        return {" ".join(names): command.get_help(context)}
    return {key: text for name, each in below.items() for key, text in help_of_commands(each, (*names, name)).items()}


HELP = help_of_commands()


@pytest.mark.parametrize("name", HELP)
def test_help_has_one_form(name):
    text = HELP[name]
    lines = text.splitlines()
    examples = lines[lines.index("Examples:") + 1 :]
    assert examples, "examples are last"
    assert all(line.startswith(("  dtrain ", "  srun ")) and f"dtrain {name}" in line for line in examples)
    assert re.findall(r"<[a-z]+>\s", text.replace("<date and time>", "")) == [], "types are no placeholders"
    assert re.findall(r"[Bb]y default|; default|\(default\)", text) == [], "a default is written as [default: ...]"
    assert "Exit codes: " in text


def test_help_of_launch_names_the_options_of_torchrun():
    assert {"--nproc-per-node", "--no-python", "--nnodes", "--node-rank", "--rdzv-endpoint", "--standalone"} <= set(
        re.findall(r"--[a-z-]+", HELP["launch"])
    )
