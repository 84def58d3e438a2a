"""Define command classes for typer: fast startup, options grouped by heading, one spelling per option, verbatim examples."""

from __future__ import annotations

import re
from typing import Any

from typer.core import TyperCommand, TyperGroup

# Other launchers spell options with underscores. These spellings work, but would lengthen the help.
_OTHER_SPELLING = re.compile(r", (?:--\w+_\w+|--nproc-per-node|--no-python|-np)\b")
# The type of an argument in the help.
_ARGUMENT_TYPE = re.compile(r" <.*>$")


OTHER_HEADING = "Other"
"""Heading of options without a heading, such as ``--help``."""


class _TextType:
    """Type of a parameter whose value is its text, unchanged."""

    def coerce(self, value: Any, *, param: Any, **_: Any) -> Any:
        return () if value is None and (param.multiple or param.nargs == -1) else value


class PlainGroup(TyperGroup):
    """Group whose own options are flags or text."""

    def get_params(self, ctx: Any) -> Any:
        """Return the parameters with text types."""
        return _use_text_types(super().get_params(ctx))


class GroupedCommand(TyperCommand):
    """Command that lists its options under the heading in ``rich_help_panel``, with one spelling per option.

    Examples in the epilog are printed unchanged.
    """

    def get_params(self, ctx: Any) -> Any:
        """Return the parameters with text types: flags, text, and lists of text, which the command checks itself."""
        return _use_text_types(super().get_params(ctx))

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


def _use_text_types(params: Any) -> Any:
    # Recent releases of typer import pydantic to convert text to text, which takes as long as the rest of a launch.
    for param in params:
        # Other releases import nothing.
        if hasattr(param, "_runtime_param"):
            param._runtime_param = _TextType()
    return params
