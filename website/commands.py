"""The reference of the command line, made of the typer app: every command, argument, option, default and help text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer

from dtrain.cli.main import app

HEAD = """# Command line reference

Made of the command itself, as `dtrain COMMAND --help` has it. [The commands, explained](../cli.md) has outputs and exit codes.
`python -m dtrain` is the same.

"""


def page() -> str:
    """All commands, in the order of their help."""
    command: Any = typer.main.get_command(app)
    context = command.make_context("dtrain", [], resilient_parsing=True)
    return HEAD + "\n".join(_entry(command, context)) + "\n"


def _entry(command: Any, context: Any) -> Iterator[str]:
    """The part of the page on a command, and on those below it."""
    path = context.command_path
    if path != "dtrain":
        yield f"## {path} {{ #{path.replace(' ', '-')} }}\n"
    yield f"```text\n{' '.join([path, *command.collect_usage_pieces(context)])}\n```\n"
    yield _prose(command.help or "") + "\n"
    for heading, rows in _options(command, context).items():
        yield f"| {heading} | |\n|---|---|"
        yield from (f"| {_code(name)} | {_cell(text)} |" for name, text in rows)
        yield ""
    if getattr(command, "epilog", None):
        lines = "\n".join(line.strip() for line in command.epilog.strip().splitlines())
        yield f"For example:\n\n```bash\n{lines}\n```\n"
    for name in command.list_commands(context) if hasattr(command, "list_commands") else ():
        below = command.get_command(context, name)
        yield from _entry(below, below.make_context(name, [], parent=context, resilient_parsing=True))


def _options(command: Any, context: Any) -> dict[str, list[tuple[str, str]]]:
    """Names and help of the parameters, by heading, in the order of the command's help."""
    found: dict[str, list[tuple[str, str]]] = {}
    for param in command.get_params(context):
        if (record := param.get_help_record(context)) is None:
            continue
        given = param.opts[0].startswith("-")
        heading = getattr(param, "rich_help_panel", None) or ("Options" if given else "Arguments")
        found.setdefault(heading, []).append((re.sub(r", --\w+_\w+", "", record[0]), record[1]))
    return found


def _code(text: str) -> str:
    """Option names and the kind of their value."""
    return f"`{re.sub(r' <.*>$', '', text)}`".replace("|", "\\|")


def _cell(text: str) -> str:
    """Help text within a table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")


def _prose(text: str) -> str:
    """Help text as paragraphs; lines that are indented stay as they are."""
    parts = re.split(r"\n\s*\n", text.replace("\b", "").replace("\f", "").strip("\n"))
    return "\n\n".join(f"```text\n{part}\n```" if part.startswith("  ") else part.replace("<", "&lt;") for part in parts)
