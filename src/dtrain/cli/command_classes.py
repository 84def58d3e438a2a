"""Commands that start at once, with their help by headings, one spelling of each option, and examples as they are typed."""

from __future__ import annotations

import re
from typing import Any

from typer.core import TyperCommand, TyperGroup

# Other launchers spell options with underscores; these work, and would only lengthen the help.
_OTHER_SPELLING = re.compile(r", (?:--\w+_\w+|--nproc-per-node|--no-python|-np)\b")
_ARGUMENT_TYPE = re.compile(r" <.*>$")  # of an argument


OTHER_HEADING = "Other"
"""Heading of the options that have none, such as ``--help``."""


class _TextType:
    """What stands for the type of a parameter: the text is the value."""

    def coerce(self, value: Any, *, param: Any, **_: Any) -> Any:
        return () if value is None and (param.multiple or param.nargs == -1) else value


class PlainGroup(TyperGroup):
    """A group whose own options are flags or text."""

    def get_params(self, ctx: Any) -> Any:
        """Its parameters, ready to be read."""
        return _use_text_types(super().get_params(ctx))


class GroupedCommand(TyperCommand):
    """A command whose options are listed under the heading in their ``rich_help_panel``, in one spelling each.

    Examples in the epilog stay as they are typed.
    """

    def get_params(self, ctx: Any) -> Any:
        """Its parameters, ready to be read: flags, text, and lists of text, which the command checks itself."""
        return _use_text_types(super().get_params(ctx))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options, heading by heading, in the order of their first option."""
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
        """Write the examples, line by line."""
        with formatter.section("Examples"):
            for line in (self.epilog or "").strip().splitlines():
                formatter.write(" " * formatter.current_indent + line.strip() + "\n")


def _use_text_types(params: Any) -> Any:
    # Recent releases of typer load pydantic to turn text into text, which takes as long as the rest of a launch.
    for param in params:
        if hasattr(param, "_runtime_param"):  # others load nothing
            param._runtime_param = _TextType()
    return params
