"""Sections of docstrings that Google's style does not have, as Markdown that the parser of Google's sections leaves unchanged.

``Returns:``, ``Mutates:``, ``Collective:``, ``Host sync:``, ``Formula:``, ``Source:``, ``Suggested values:`` and
``When not to use:`` become items of a list. Each item begins with its name, and each suggested value is an item below.
"""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe

OWN = (
    "Returns",
    "Yields",
    "Mutates",
    "Collective",
    "Host sync",
    "Formula",
    "Source",
    "Suggested values",
    "When not to use",
    "Exit codes",
)
_OWN = re.compile(rf"^({'|'.join(OWN)}):[ \t]*(.*)$")
_HEAD = re.compile(r"^[A-Z][A-Za-z ]+:(\s|$)")


def as_markdown(text: str) -> str:
    """A docstring whose own sections are a list."""
    # The parser knows the plural, and Markdown has no second colon before code.
    lines = ["Examples:" if line == "Example:" else re.sub(r"::$", ":", line) for line in text.splitlines()]
    out: list[str] = []
    at = 0
    while at < len(lines):
        match = _OWN.match(lines[at])
        if lines[at].startswith(">>> "):  # an example without a head
            end = next((k for k in range(at, len(lines)) if not lines[k].strip()), len(lines))
            out += ["Examples:", *(f"    {line}" for line in lines[at:end])]
            at = end
            continue
        if lines[at] == "Examples:" and at + 1 < len(lines) and not lines[at + 1].lstrip().startswith((">>> ", "```")):
            later = range(at + 1, len(lines))
            end = next((k for k in later if lines[k].strip() and not lines[k].startswith("    ")), len(lines))
            code = textwrap.dedent("\n".join(lines[at + 1 : end])).strip()
            out += ["", "```python", *code.splitlines(), "```", ""]
            at = end
            continue
        if match is None:
            out.append(lines[at])
            at += 1
            continue
        end = at + 1
        while end < len(lines) and lines[end].strip() and not _HEAD.match(lines[end]):
            end += 1
        body = [match[2], *textwrap.dedent("\n".join(lines[at + 1 : end])).splitlines()]
        if out and out[-1].strip() and not out[-1].lstrip().startswith("- "):
            out.append("")
        if match[1] == "Suggested values":
            out += [f"- **{match[1]}.**", *(f"    - {item}" for item in _items(body))]
        else:
            label = "Avoid if" if match[1] == "When not to use" else f"{match[1]}."
            out.append(f"- **{label}** {' '.join(line.strip() for line in body if line.strip())}")
        at = end
        if at < len(lines) and lines[at].strip() and not _OWN.match(lines[at]):
            out.append("")
    return "\n".join(out)


def _items(body: list[str]) -> list[str]:
    """Return the items of a section, each with its continuation lines, which are indented further."""
    items: list[str] = []
    for line in filter(str.strip, body):
        if line.startswith(" ") and items:
            items[-1] += f" {line.strip()}"
        else:
            items.append(line.strip())
    return items


class OwnSections(griffe.Extension):
    """Changes docstrings as they are read."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of a function, class, attribute or module."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
