"""Run the ``dtrain`` command: dispatch to its sub-commands, and print errors in one line. Imports no torch."""

from __future__ import annotations

import os
import sys
from typing import Annotated, NoReturn

import typer

from dtrain import __version__
from dtrain.cli.checkpoints import app as checkpoints
from dtrain.cli.data import app as data
from dtrain.cli.env import EXAMPLES as ENV_EXAMPLES
from dtrain.cli.env import env
from dtrain.cli.launch import launch, torchrun_advice
from dtrain.cli.launch_options import EXAMPLES
from dtrain.cli.new import EXAMPLES as NEW_EXAMPLES
from dtrain.cli.new import new
from dtrain.cli.parameters import GroupedCommand, PlainGroup
from dtrain.cli.plan import EXAMPLES as PLAN_EXAMPLES
from dtrain.cli.plan import plan
from dtrain.cli.plot import app as plot
from dtrain.cli.prove import EXAMPLES as PROVE_EXAMPLES
from dtrain.cli.prove import prove
from dtrain.cli.report import REPORT_EXAMPLES, TOP_EXAMPLES, report, top
from dtrain.errors import ConfigError, DistError, DtrainError
from dtrain.launch.terminal import occupy_standard_streams

_FAILED_EXIT_CODE = 1
_USAGE_EXIT_CODE = 2
_INTERRUPTED_EXIT_CODE = 130
_SHELLS = ("bash", "zsh", "fish", "powershell", "pwsh")

# The class of the parser's errors belongs to click or to typer, depending on the release of typer.
_UsageError: type[Exception] = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "UsageError")


_HANG_EXAMPLES = """
dtrain hang runs/gpt     the run folder that `dtrain launch` prints at the start
"""


def hang(
    run_dir: Annotated[str, typer.Argument(metavar="RUN_DIR", help="The run folder of `dtrain launch`, or of dt.open_run.")],
) -> int:
    """Show the state of a job's ranks, and the blocking rank.

    While the job runs on this machine, its launcher queries the ranks, and the job continues. Afterwards, the last records are
    shown. All stacks and the last collectives of every rank are in hang/report.txt of the run folder.

    Exit codes: 0 shown; 1 the launcher does not answer; 2 there are no records.
    """
    from dtrain.launch.hang_report import explain_hang

    try:
        typer.echo(explain_hang(run_dir))
    except (ConfigError, DistError) as error:
        raise type(error)(str(error).replace("explain_hang:", "hang:", 1)) from None
    return 0


app = typer.Typer(
    name="dtrain",
    cls=PlainGroup,
    # Plain help does not import rich.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(
    cls=GroupedCommand,
    epilog=EXAMPLES,
    # Options after the script belong to the script.
    context_settings={"allow_interspersed_args": False},
)(launch)
app.command(cls=GroupedCommand, epilog=NEW_EXAMPLES)(new)
app.command(cls=GroupedCommand, epilog=ENV_EXAMPLES)(env)
app.command(cls=GroupedCommand, epilog=_HANG_EXAMPLES)(hang)
app.command(cls=GroupedCommand, epilog=PLAN_EXAMPLES)(plan)
app.command(
    cls=GroupedCommand,
    epilog=PROVE_EXAMPLES,
    # Options after the script belong to the script.
    context_settings={"allow_interspersed_args": False},
)(prove)
app.command(cls=GroupedCommand, epilog=REPORT_EXAMPLES)(report)
app.command(cls=GroupedCommand, epilog=TOP_EXAMPLES)(top)
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
    except DtrainError as error:
        return _print_error(str(error), _FAILED_EXIT_CODE)
    # The cause is the machine, such as a full disk or a path that is too long.
    except OSError as error:
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
    context: typer.Context | None = getattr(error, "ctx", None)
    # The parser sets no context for an option with a missing or an unexpected value.
    command = _command_path(args) if context is None else context.command_path
    problem: str = getattr(error, "format_message", error.__str__)()
    prefix = "".join(f"{word}: " for word in command.split()[1:])
    # The parser sets the name of an unknown option.
    option = getattr(error, "option_name", None)
    if command == "dtrain launch" and option is not None and (advice := torchrun_advice(option)) is not None:
        return f"{prefix}{advice}"
    return f"{prefix}{problem[:1].lower()}{problem[1:].rstrip('.')}. See `{command} --help`."


def _command_path(args: list[str]) -> str:
    """Return the command path at the beginning of an argument list."""
    command, words = typer.main.get_command(app), ["dtrain"]
    for word in args:
        if (inner := getattr(command, "commands", {}).get(word)) is None:
            break
        command, words = inner, [*words, word]
    return " ".join(words)


def _print_error(message: str, code: int) -> int:
    line = " ".join(message.split())
    print(f"dtrain: {line}", file=sys.stderr)
    return code
