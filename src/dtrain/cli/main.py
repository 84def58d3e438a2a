"""Run the ``dtrain`` command: dispatch to its sub-commands, and print errors in one line. Imports no torch."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from dtrain import __version__
from dtrain.cli.checkpoints import app as checkpoints
from dtrain.cli.data import app as data
from dtrain.cli.env import env
from dtrain.cli.launch import launch, torchrun_advice
from dtrain.cli.output import print_json
from dtrain.cli.parameters import AsJson, PlainGroup, add_command, integer, number, option
from dtrain.cli.plan import plan
from dtrain.cli.plot import app as plot
from dtrain.cli.report import report, top
from dtrain.errors import ConfigError, DistError, DtrainError, escape_unprintable
from dtrain.launch.terminal import occupy_standard_streams
from dtrain.packages import install_command

_FAILED_EXIT_CODE = 1
_USAGE_EXIT_CODE = 2
_INTERRUPTED_EXIT_CODE = 130
_SHELLS = ("bash", "zsh", "fish", "powershell", "pwsh")

# The class of the parser's errors belongs to click or to typer, depending on the release of typer.
_UsageError: type[Exception] = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "UsageError")


def hang(
    run_dir: Annotated[str, typer.Argument(metavar="RUN_DIR", help="The run folder of `dtrain launch`, or of dt.open_run.")],
) -> int:
    """Show the state of a job's ranks, and the blocking rank.

    While the job runs on this machine, its launcher queries the ranks, and the job continues. Afterwards, the last records are
    shown. All stacks and the last collectives of every rank are in hang/report.txt of the run folder.

    Exit codes: 0 shown; 1 the launcher does not answer; 2 there are no records.

    Examples:
        dtrain hang runs/gpt     the run folder that `dtrain launch` prints at the start
    """
    from dtrain.launch.hang_report import explain_hang

    try:
        typer.echo(explain_hang(run_dir))
    except (ConfigError, DistError) as error:
        raise type(error)(str(error).replace("explain_hang:", "hang:", 1)) from None
    return 0


TASKS = {
    "blank": "your own model, data and loss, with random numbers until then",
    "lm": "a byte-level language model, on the source code of Python",
    "vision": "image classification, on drawn images",
    "finetune": "text classification, with a model of transformers",
    "diffusion": "image generation by diffusion, on drawn images",
}
"""Description of each task. ``templates`` has a file for each task: a loop named ``loop.py``, which runs unchanged."""

# The name also occurs in the text of the loop.
_LOOP_NAME = re.compile(r"[\w-]+\.py", re.ASCII)
_RESERVED_NAMES = {"dtrain", "numpy", "tensordict", "torch", "transformers", "tokenizers"}
# Modules, and the extras that install them.
_REQUIRED_EXTRAS = {"finetune": [("transformers", "hf")]}


def new(
    path: Annotated[str, typer.Argument(metavar="LOOP", help="The file to write, as in loop.py.", show_default=False)],
    task: Annotated[
        str,
        typer.Option(
            "--task",
            metavar="TASK",
            help=f"Training task: {', '.join(TASKS)}.",
            autocompletion=lambda incomplete: [task for task in TASKS if task.startswith(incomplete)],
        ),
    ] = "blank",
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> int:
    """Write a training loop to start from.

    The loop is one file of at most 82 lines that runs unchanged on any number of processes. It shards, logs, saves, evaluates,
    and resumes with the same command. Its data is generated or installed, so nothing is downloaded.

    Exit codes: 0 written; 1 the file could not be written; 2 bad usage, or the file exists.

    Examples:
        dtrain new loop.py                  for your model, data and loss
        dtrain new train_gpt.py --task lm
        dtrain new loop.py --task vision --force
    """
    if task not in TASKS:
        raise ConfigError(f"new: --task must be one of {', '.join(TASKS)}, got {task!r}. Use blank for a loop without a task.")
    file_path = _check_path(path)
    template = files("dtrain.cli").joinpath("templates", f"{task}.py.txt").read_text(encoding="utf-8")
    try:
        with file_path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(template.replace("loop.py", file_path.name).replace("runs/loop", f"runs/{file_path.stem}"))
    except FileExistsError:
        raise ConfigError(f"new: {path!r} exists already. Choose another name, or pass --force to overwrite it.") from None
    except OSError as error:
        raise OSError(f"new: {path!r} cannot be written: {error.strerror}. Choose another path.") from error
    typer.echo(f"{escape_unprintable(path)}: {TASKS[task]}")
    for module, extra in _REQUIRED_EXTRAS.get(task, ()):
        if find_spec(module) is None:
            typer.echo(f"first:  {install_command(extra)}  ({module} is not installed here)")
    typer.echo(f"run it: dtrain launch -n 2 --run-dir runs/{file_path.stem} {shlex.quote(path)}")
    return 0


def _check_path(path: str) -> Path:
    """Return the path of the loop if a loop can be written and run there."""
    file_path = Path(path)
    if not _LOOP_NAME.fullmatch(file_path.name):
        raise ConfigError(
            f"new: LOOP must be a name of letters, digits, - and _ that ends with .py, got {path!r}. Use loop.py, for example."
        )
    if file_path.stem in _RESERVED_NAMES or file_path.stem in sys.stdlib_module_names:
        raise ConfigError(
            f"new: LOOP must not shadow the module {file_path.stem!r}, got {path!r}. Use another name, such as loop.py."
        )
    if file_path.is_dir():
        raise ConfigError(f"new: {path!r} is a folder. Name a file in it, as in {path}/loop.py.")
    if not file_path.parent.is_dir():
        raise ConfigError(f"new: no such folder: {str(file_path.parent)!r}. Create the folder, or choose another.")
    return file_path


_prove_option = partial(option, "prove", "Runs")


def parse_ranks(command: str, name: str, text: str) -> tuple[int, ...]:
    """Parse numbers of ranks such as ``2,3``.

    Raises:
        ConfigError: another text, or a number below 2.
    """
    words = text.split(",")
    if not all(re.fullmatch(r"[0-9]{1,3}", word) and int(word) >= 2 for word in words):
        raise ConfigError(f"{command}: {name} must be numbers of at least 2, got {text!r}. Pass 2,3, for example.")
    return tuple(map(int, words))


def parse_allowed(texts: Sequence[str]) -> dict[str, str]:
    """Parse known differences of the form ``NAME=REASON``, or ``@FILE`` with one in each line. A line with # is a comment.

    Raises:
        ConfigError: a name without a reason, or a file that cannot be read.
    """
    allowed = {}
    for text in texts:
        entries = [text]
        if text.startswith("@"):
            if not Path(text[1:]).is_file():
                raise ConfigError(f"prove: --allow must be NAME=REASON or @FILE, got no file {text[1:]!r}. Check the path.")
            lines = map(str.strip, Path(text[1:]).read_text(encoding="utf-8").splitlines())
            entries = [line for line in lines if line and not line.startswith("#")]
        for entry in entries:
            name, _, reason = map(str.strip, entry.partition("="))
            if not name or not reason:
                raise ConfigError(
                    f"prove: --allow must be NAME=REASON, got {entry!r}. Say why it is right: 'metric tokens=counted per rank'."
                )
            allowed[name] = reason
    return allowed


def prove(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python file that trains.")],
    args: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="Arguments of the script.")] = None,
    steps: Annotated[int, _prove_option("--steps N", "Steps of each run.  [default: 4]", integer(2))] = 4,
    ranks: Annotated[
        Any, _prove_option("--ranks LIST", "Numbers of ranks to compare with one rank.  [default: 2,3]", parse_ranks)
    ] = (2, 3),
    keep_precision: Annotated[
        bool,
        _prove_option("--keep-precision", "Compute in the script's own dtypes, so that rounding counts as a difference."),
    ] = False,
    seed: Annotated[int, _prove_option("--seed N", "Selects the step and the rank of the kill.  [default: 0]", integer(0))] = 0,
    timeout: Annotated[float, _prove_option("--timeout SECONDS", "Longest run.  [default: 300]", number(above=0))] = 300.0,
    fast: Annotated[
        bool, _prove_option("--fast", "Compare only 1 rank and the first number of --ranks, without metrics and resumes.")
    ] = False,
    allow: Annotated[
        list[str] | None,
        _prove_option(
            "--allow NAME=REASON", "A known difference, by fact or cause; @FILE has one in each line; may be repeated."
        ),
    ] = None,
    junit: Annotated[str | None, _prove_option("--junit FILE", "Also write the result to FILE as JUnit XML.")] = None,
    as_json: AsJson = False,
) -> int:
    """Run a script in several ways, and compare the runs.

    The script runs for a few steps in float64: twice on one rank, on several ranks with each strategy, with other microbatches,
    and killed and resumed. The answer names the first difference, and its likely cause.

    Exit codes: 0 all runs agree; 1 a run differs, fails or shows nothing; 2 bad usage.

    Examples:
        dtrain prove loop.py                       4 steps in each run, on 1, 2 and 3 ranks
        dtrain prove --steps 6 loop.py --width 32  options after the script belong to the script
        dtrain prove --json loop.py > proof.json
        dtrain prove --fast --junit proof.xml --allow 'metric tokens=counted per rank' loop.py
    """
    if junit is not None and not Path(junit).absolute().parent.is_dir():
        raise ConfigError(f"prove: --junit must be a file in a folder that exists, got {junit!r}. Create the folder.")
    from dtrain.prove.proof import prove as run_proof

    report = run_proof(
        script,
        args or (),
        steps=steps,
        world_sizes=ranks,
        keep_precision=keep_precision,
        fast=fast,
        allow=parse_allowed(allow or ()),
        seed=seed,
        timeout_s=timeout,
        on_progress=lambda line: typer.echo(f"dtrain: prove: {line}", err=True),
    )
    if junit is not None:
        Path(junit).write_text(report.junit(), encoding="utf-8")
    print_json(report.as_dict()) if as_json else typer.echo(report.text())
    return 0 if report.passed else 1


app = typer.Typer(
    name="dtrain",
    cls=PlainGroup,
    # Plain help does not import rich.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _command in (launch, new, env, hang, plan, prove, report, top):
    add_command(app, _command.__name__, _command, has_script=_command in (launch, prove))
app.add_typer(checkpoints, name="checkpoints")
app.add_typer(data, name="data")
app.add_typer(plot, name="plot")


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> int:
    """Distributed-training primitives for people who write their own PyTorch loop."""
    if version:
        typer.echo(f"dtrain {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
    return 0


def run() -> NoReturn:
    """Run the command line of this process and exit with its exit code. A usage error is one line on stderr, and code 2."""
    occupy_standard_streams()
    sys.exit(_flush_stdout(_invoke(sys.argv[1:])))


def _flush_stdout(code: int) -> int:
    """Flush standard output and return the exit code.

    Mutates: standard output if it cannot be written: Python would otherwise retry at exit, and use an exit code of its own.
    """
    # Standard output may have been closed before Python started.
    if sys.stdout is None:
        return code
    try:
        sys.stdout.flush()
    except OSError as error:
        # A closed pipe is not an error, because the reader needs no further output.
        if not isinstance(error, BrokenPipeError):
            code = code or _print_error(str(error), _FAILED_EXIT_CODE)
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())
        os.close(devnull)
    return code


def _invoke(args: list[str]) -> int:
    try:
        # typer's own option only supports the current shell.
        if len(args) == 2 and args[0] == "--show-completion":
            return _show_completion(args[1])
        return int(typer.main.get_command(app).main(args=args, prog_name="dtrain", standalone_mode=False))
    except ConfigError as error:
        return _print_error(str(error), _USAGE_EXIT_CODE)
    # The cause of an OSError is the machine, such as a full disk or a path that is too long.
    except (DtrainError, OSError) as error:
        return _print_error(str(error), _FAILED_EXIT_CODE)
    except _UsageError as error:
        # The type of an option raised the cause.
        is_complete = isinstance(error.__cause__, ConfigError)
        return _print_error(str(error.__cause__) if is_complete else _usage_message(error, args), _USAGE_EXIT_CODE)
    except (typer.Abort, KeyboardInterrupt):
        return _INTERRUPTED_EXIT_CODE


def _show_completion(shell: str) -> int:
    if shell not in _SHELLS:
        raise ConfigError(
            f"--show-completion must be one of {', '.join(_SHELLS)}, got {shell!r}. Remove the name for the current shell."
        )
    from typer._completion_shared import get_completion_script

    typer.echo(get_completion_script(prog_name="dtrain", complete_var="_DTRAIN_COMPLETE", shell=shell))
    return 0


def _usage_message(error: Exception, args: list[str]) -> str:
    """Format the parser's exception in one line: the command, the problem, and a reference to the help."""
    command, words = typer.main.get_command(app), ["dtrain"]
    # The parser sets no context for an option with a missing or an unexpected value, so the command is read from the arguments.
    for word in args:
        if (inner := getattr(command, "commands", {}).get(word)) is None:
            break
        command, words = inner, [*words, word]
    problem: str = getattr(error, "format_message", error.__str__)()
    prefix = "".join(f"{word}: " for word in words[1:])
    # The parser sets the name of an unknown option.
    option = getattr(error, "option_name", None)
    if words == ["dtrain", "launch"] and option is not None and (advice := torchrun_advice(option)) is not None:
        return f"{prefix}{advice}"
    return f"{prefix}{problem[:1].lower()}{problem[1:].rstrip('.')}. See `{' '.join(words)} --help`."


def _print_error(message: str, code: int) -> int:
    line = " ".join(message.split())
    print(f"dtrain: {line}", file=sys.stderr)
    return code
