"""Define the options of commands: their types, their headings in the help, and command classes for typer.

Typer passes the text of every option. The type of an option parses the text; its errors have one form in all commands.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from inspect import cleandoc
from typing import Annotated, Any, TypeAlias

import typer
from typer.core import TyperCommand, TyperGroup

from dtrain.arguments import check_choice, check_int, check_number, parse_bytes
from dtrain.errors import ConfigError

OTHER_HEADING = "Other"
"""Heading of options without a heading, such as ``--help``."""

ValueType: TypeAlias = Callable[[str, str, str], Any]
"""Type of an option: a function from the command, the option and its text to the value. The function raises ConfigError."""

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")]


def option(command: str, heading: str, spellings: str, help: str, type: ValueType | None = None) -> Any:
    """Define an option of ``command`` below ``heading``.

    Args:
        command: begin of the type's errors.
        heading: heading in the help.
        spellings: spellings and the placeholder of the value, as in ``"-n --nproc N"``. Errors have the first spelling.
        help: description in the help.
        type: type of the value; None keeps the text.
    """
    names = [word for word in spellings.split() if word.startswith("-")]

    def parse(value: Any) -> Any:
        # Some releases of typer also parse the default.
        if type is None or not isinstance(value, str):
            return value
        try:
            return type(command, names[0], value)
        except ConfigError as error:
            # Some releases of typer replace every ValueError.
            raise typer.BadParameter(str(error)) from error

    return typer.Option(
        *names,
        help=help,
        metavar=" ".join(spellings.split()[len(names) :]) or None,
        parser=None if type is None else parse,
        rich_help_panel=heading,
        show_default=False,
    )


def integer(minimum: int, maximum: int | None = None, *, advice: str = "") -> ValueType:
    """Return the type of integers within the limits."""

    def parse(command: str, name: str, text: str) -> int:
        value = int(text) if re.fullmatch(r"\s*[+-]?[0-9]{1,18}\s*", text, re.ASCII) else text
        return check_int(command, name, value, minimum=minimum, maximum=maximum, advice=advice)

    return parse


def number(*, advice: str = "", **limits: float) -> ValueType:
    """Return the type of finite numbers within the limits, which are arguments of ``check_number``."""

    def parse(command: str, name: str, text: str) -> float:
        try:
            value: object = float(text)
        except ValueError:
            value = text
        return check_number(command, name, value, advice=advice, **limits)

    return parse


def choice(*choices: str) -> ValueType:
    """Return the type of words in ``choices``."""
    return lambda command, name, text: check_choice(command, name, text, choices)


def size(command: str, name: str, text: str) -> int:
    """Parse a number of bytes, such as ``64MiB``. A type of ``option``."""
    return parse_bytes(f"{command}: {name}", text)


def command_group(help: str, **commands: Callable[..., int]) -> typer.Typer:
    """Return a group of commands by name. Without a command, the group prints its help."""
    app = typer.Typer()

    @app.callback(invoke_without_command=True, help=help)
    def group(context: typer.Context) -> int:
        if context.invoked_subcommand is None:
            typer.echo(context.get_help())
        return 0

    for name, function in commands.items():
        add_command(app, name, function)
    return app


def add_command(app: typer.Typer, name: str, function: Callable[..., int], *, has_script: bool = False) -> None:
    """Add a command, whose help is the docstring of its function. Examples in the docstring end the help.

    Args:
        app: group of the command.
        name: name of the command.
        function: function whose parameters are the arguments and options.
        has_script: if True, options after the first argument belong to that script.

    Mutates: ``app``.
    """
    text, _, examples = cleandoc(function.__doc__ or "").partition("\n\nExamples:\n")
    settings = {"allow_interspersed_args": False} if has_script else None
    app.command(name, cls=GroupedCommand, help=text, epilog=examples, context_settings=settings)(function)


class PlainGroup(TyperGroup):
    """Group whose own options are flags or text."""

    def get_params(self, ctx: Any) -> Any:
        """Return the parameters with the types of ``option``."""
        return _use_own_types(super().get_params(ctx))


class GroupedCommand(TyperCommand):
    """Command that lists its options under the heading in ``rich_help_panel``, with dtrain's spelling and torchrun's.

    Examples in the epilog are printed unchanged.
    """

    def get_params(self, ctx: Any) -> Any:
        """Return the parameters with the types of ``option``."""
        return _use_own_types(super().get_params(ctx))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options by heading, in the order of the first option of each heading."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if (record := param.get_help_record(ctx)) is not None:
                heading = getattr(param, "rich_help_panel", None) or (OTHER_HEADING if param.opts[0][0] == "-" else "Arguments")
                name = _ARGUMENT_TYPE.sub("", _OTHER_SPELLING.sub("", record[0]))
                groups.setdefault(heading, []).append((name, record[1]))
        for heading, rows in groups.items():
            with formatter.section(heading):
                formatter.write_dl(rows)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples line by line."""
        with formatter.section("Examples"):
            for line in (self.epilog or "").strip().splitlines():
                formatter.write(" " * formatter.current_indent + line.strip() + "\n")


# Other launchers spell options with underscores. These spellings work, but would lengthen the help. torchrun's names are shown.
_OTHER_SPELLING = re.compile(r", (?:--\w+_\w+|-np)\b")
# The type of an argument in the help.
_ARGUMENT_TYPE = re.compile(r" <.*>$")


class _OptionType:
    """Type of a parameter in releases of typer that import pydantic to convert text, which takes as long as a launch."""

    def __init__(self, parser: Callable[[Any], Any] | None) -> None:
        self._parser = parser

    def coerce(self, value: Any, *, param: Any, **_: Any) -> Any:
        if value is None:
            return () if param.multiple or param.nargs == -1 else None
        if self._parser is None:
            return value
        return tuple(map(self._parser, value)) if param.multiple and not isinstance(value, str) else self._parser(value)


def _use_own_types(params: Any) -> Any:
    for param in params:
        # Other releases of typer call the parser themselves.
        if hasattr(param, "_runtime_param"):
            param._runtime_param = _OptionType(param.type_descriptor.parameter_info.parser)
    return params
