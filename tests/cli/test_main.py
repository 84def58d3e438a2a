"""The command line itself: help, version, and one line for each mistake, before anything is started."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import typer

from dtrain import __version__
from dtrain.cli.main import app


def dtrain_command(*args, cwd=None, code="from dtrain.cli.main import run; run()"):
    return subprocess.run([sys.executable, "-c", code, *args], cwd=cwd, capture_output=True, text=True, timeout=90)


def test_command_without_arguments_lists_commands():
    result = dtrain_command()
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("Usage: dtrain ")
    assert " launch " in result.stdout


def test_version_option_prints_version():
    result = dtrain_command("--version")
    assert (result.returncode, result.stdout, result.stderr) == (0, f"dtrain {__version__}\n", "")


def test_module_invocation_equals_command():
    result = subprocess.run([sys.executable, "-m", "dtrain", "--version"], capture_output=True, text=True, timeout=90)
    assert result.stdout == f"dtrain {__version__}\n"


def test_invalid_arguments_exit_with_code_2(tmp_path):
    result = dtrain_command("launch", "nope.py", cwd=tmp_path)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)


# Command lines, and the beginnings of their errors, which name the command.
USAGE = [
    ("lanch", "no such command 'lanch'"),
    ("--lanch", "no such option: --lanch"),
    ("--version=3", "option '--version' does not take a value"),
    ("launch --fast x.py", "launch: no such option: --fast"),
    ("launch", "launch: missing argument 'SCRIPT'"),
    ("launch -n", "launch: option '-n' requires an argument"),
    ("launch --module=3 x", "launch: option '--module' does not take a val"),
    ("env --yaml", "env: no such option: --yaml"),
    ("env --json=3", "env: option '--json' does not take a value"),
    ("env x", "env: got unexpected extra argument"),
    ("checkpoints lst", "checkpoints: no such command 'lst'"),
    ("checkpoints --x", "checkpoints: no such option: --x"),
    ("checkpoints list", "checkpoints: list: missing argument 'ROOT'"),
    ("checkpoints list a b", "checkpoints: list: got unexpected extra argument"),
    ("checkpoints list -z a", "checkpoints: list: no such option: -z"),
    ("checkpoints verify --all", "checkpoints: verify: missing argument 'ROOT_OR_STEP'"),
    ("data read", "data: no such command 'read'"),
    ("data write a", "data: write: missing argument 'SOURCE'"),
    ("data write --fast a", "data: write: no such option: --fast"),
    ("data inspect", "data: inspect: missing argument 'URL'"),
    ("data inspect a --head", "data: inspect: option '--head' requires an argument"),
    ("checkpoints verify --all=3 a", "checkpoints: verify: option '--all' does not take a value"),
]


@pytest.mark.parametrize(("line", "expected"), USAGE)
def test_usage_error_prints_one_line_at_every_level(dtrain, line, expected):
    code, out, err = dtrain(*line.split())
    command = " ".join(["dtrain", *re.findall(r"(\w+): (?!-)", expected)])
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"dtrain: {expected}")
    assert err.endswith(f". See `{command} --help`.\n")


def help_of_commands(command=None, names=()):
    """Return the names and the help of all commands and groups."""
    command = command or typer.main.get_command(app)  # of the whole command line
    text = command.get_help(command.make_context(" ".join(["dtrain", *names]), [], resilient_parsing=True))
    below = getattr(command, "commands", {})
    texts = {names: (text, bool(below))}
    for name, subcommand in below.items():
        texts |= help_of_commands(subcommand, (*names, name))
    return texts


HELP = help_of_commands()


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_is_available_at_every_level(dtrain, flag):
    for names in HELP:
        code, out, err = dtrain(*names, flag)
        assert (code, err) == (0, "")
        assert out.startswith(f"Usage: {' '.join(['dtrain', *names])} ")
        assert "..." not in out.partition("Commands:")[2]  # the summary of a command fits its line


@pytest.mark.parametrize("names", [names for names, (_, is_group) in HELP.items() if not is_group], ids=" ".join)
def test_help_has_one_form(names):
    text, _ = HELP[names]
    lines = text.splitlines()
    examples = lines[lines.index("Examples:") + 1 :]
    assert examples, "examples are last"
    assert all(line.startswith(("  dtrain ", "  srun ")) and f"dtrain {' '.join(names)}" in line for line in examples)
    assert re.findall(r"<[a-z]+>\s", text.replace("<date and time>", "")) == [], "types are no placeholders"
    assert re.findall(r"[Bb]y default|; default|\(default\)", text) == [], "a default is written as [default: ...]"
    assert "Exit codes: " in text


def test_help_of_launch_names_the_options_of_torchrun():
    assert {"--nproc-per-node", "--no-python", "--nnodes", "--node-rank", "--rdzv-endpoint", "--standalone"} <= set(
        re.findall(r"--[a-z-]+", HELP["launch",][0])
    )


COMPLETED = {
    "command": ("dtrain la", ["launch"]),
    "option": ("dtrain launch --hang", ["--hang-timeout"]),
    "other spelling": ("dtrain launch --run_", ["--run_directory"]),
    "script": ("dtrain launch -n 2 go", ["good.py"]),
    "folder": ("dtrain launch pack", ["package/"]),
    "script in a folder": ("dtrain launch package/tr", ["package/train.py"]),
    "folder that is not there": ("dtrain launch nope/a", []),
    "task": ("dtrain new loop.py --task v", ["vision"]),
}


@pytest.mark.parametrize(("line", "expected"), COMPLETED.values(), ids=COMPLETED)
def test_shell_completes_options_scripts_and_tasks(dtrain, tmp_path, monkeypatch, line, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.py").touch()
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").touch()
    for name, value in (("COMP_WORDS", line), ("COMP_CWORD", str(line.count(" "))), ("_DTRAIN_COMPLETE", "complete_bash")):
        monkeypatch.setenv(name, value)
    code, out, _ = dtrain()
    assert (code, out.split()) == (0, expected)


def test_show_completion_prints_script_for_shell(dtrain):
    for shell in ("bash", "zsh", "fish"):
        assert f"complete_{shell}" in dtrain("--show-completion", shell)[1]
    code, out, err = dtrain("--show-completion", "ksh")
    assert (code, out) == (2, "")
    assert err.startswith("dtrain: --show-completion must be one of bash, zsh, ")
