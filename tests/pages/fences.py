"""The pages of the project, and the blocks of code in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = (
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md")),
    *sorted(DOCS.glob("*.md")),
    *sorted((DOCS / "recipes").glob("*.md")),
)
PAGES = tuple(page for page in PAGES if page.exists())
ANEW = "<!-- anew -->"  # in the line above a block: it begins with a namespace of its own
LANGUAGES = {"python", "py", "pycon", "bash", "console", "text", "yaml", "toml", "json", "ini", "diff", "mermaid"}

_FENCE = re.compile(r"^( *)(```+)([^\n`]*)\n(.*?)^\1\2 *$", re.S | re.M)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    """One code block: its language, its text, and the line of the page on which the text begins."""

    page: Path
    line: int
    language: str
    text: str
    anew: bool

    @property
    def file(self) -> str | None:
        """Name of the file that it is, if its first line is ``# name.py``."""
        match = re.match(r"# (\w+\.py)\n", self.text)
        return match[1] if match else None


def called(page: Path) -> str:
    """Return the page's name in reports: its path below the root."""
    return str(page.relative_to(ROOT))


def fences(page: Path) -> list[Fence]:
    """The blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    blocks = []
    for match in _FENCE.finditer(text):
        above = text[: match.start()]
        lines = [line.removeprefix(match[1]) for line in match[4].splitlines()]
        body = "\n".join(lines) + "\n" if lines else ""
        anew = above.rstrip().endswith(ANEW)
        blocks.append(Fence(page=page, line=above.count("\n") + 2, language=match[3].strip(), text=body, anew=anew))
    return blocks


def prose(page: Path) -> str:
    """A page without its blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def commands(fence: Fence) -> Iterator[list[str]]:
    """The commands of a block of ``bash`` (every line) or ``console`` (after ``$``), as the words of each."""
    text = fence.text.replace("\\\n", " ")
    lines = text.splitlines()
    if fence.language == "console":
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    for line in lines:
        for command in re.split(r" && | \|\| | \| |; ", line):
            try:
                words = shlex.split(command, comments=True)
            except ValueError:  # a string over several lines
                continue
            if words:
                yield words


def ours(words: list[str]) -> list[str] | None:
    """Return the arguments of ``dtrain`` in a command, behind any starter (variables, ``srun``, ``ssh``); None without it."""
    for index, word in enumerate(words):
        if word == "dtrain" and words[max(index - 1, 0)] not in ("install", "import", "cd"):
            return words[index + 1 :]
    return None
