"""The options of the command line, made of the typer app, for the page that explains the commands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer

from dtrain.cli.main import app


def with_options(page: str) -> str:
    """Return docs/cli.md with every argument, option, default and help text of a command at the end of its section."""
    entries = dict(all_commands())
    sections = re.split(r"^(?=## )", page, flags=re.M)
    shown: list[str] = []
    for number, section in enumerate(sections):
        heading = section.partition("\n")[0]
        if number and heading.startswith("## dtrain "):
            said = re.split(r", | and ", heading.removeprefix("## dtrain "))
            names = [name for name in entries if name.split(" ")[0] in said or name in said]
            section = "\n".join([section.rstrip() + "\n", *("\n".join(entries[name]) for name in names)]) + "\n"
            shown += names
        sections[number] = section
    missing = [name for name in entries if name not in shown]
    if missing:
        raise ValueError(
            f"docs/cli.md: every command must be in a heading '## dtrain NAME', missing {', '.join(missing)}. Add them."
        )
    return "".join(sections)


def all_commands() -> Iterator[tuple[str, list[str]]]:
    """Yield the name of each command and its options as Markdown, in the order of their help."""
    command: Any = typer.main.get_command(app)
    yield from _commands(command, command.make_context("dtrain", [], resilient_parsing=True))


def _commands(command: Any, context: Any) -> Iterator[tuple[str, list[str]]]:
    for name in command.list_commands(context) if hasattr(command, "list_commands") else ():
        below = command.get_command(context, name)
        inside = below.make_context(name, [], parent=context, resilient_parsing=True)
        if hasattr(below, "list_commands"):
            yield from _commands(below, inside)
        else:
            yield inside.command_path.removeprefix("dtrain "), list(_entry(below, inside))


def _entry(command: Any, context: Any) -> Iterator[str]:
    """Yield the lines of one command."""
    path = context.command_path
    yield f'<details markdown id="options-of-{path.replace(" ", "-")}">'
    yield f"<summary>All options of <code>{path}</code></summary>\n"
    yield f"```text\n{' '.join([path, *command.collect_usage_pieces(context)])}\n```\n"
    yield _prose(command.help or "") + "\n"
    for heading, rows in _options(command, context).items():
        yield f"| {heading} | |\n|---|---|"
        yield from (f"| {_code(name)} | {_cell(text)} |" for name, text in rows)
        yield ""
    yield "</details>\n"


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
