"""docs/loop.md: its loop is that of the README, and each of its lines is explained. Its code runs with that of all pages."""

from __future__ import annotations

import re

from pages.fences import DOCS, ROOT, fences

PAGE = DOCS / "loop.md"
MODEL = "model = GPT(config)"  # explained with the line above it


def code(text: str) -> list[str]:
    """The lines of a loop without comments and indentation."""
    return [line for raw in text.splitlines() if (line := re.sub(r"\s+#.*", "", raw).strip())]


def test_the_loop_is_that_of_the_readme():
    of_readme = next(each.text for each in fences(ROOT / "README.md") if "loader.until" in each.text)
    of_page = next(each.text for each in fences(PAGE) if each.language == "python")
    assert code(of_page) == code(of_readme)


def test_every_line_is_explained_in_the_order_of_the_loop():
    lines = code(next(each.text for each in fences(PAGE) if each.language == "python"))
    explained = re.findall(r"^### `(.*)`$", PAGE.read_text(), re.M)
    assert explained == [line for line in lines if not line.startswith("import") and line != MODEL]


def test_every_line_has_a_cost_and_a_reason():
    parts = re.split(r"^### ", PAGE.read_text().split("## What is not there")[0], flags=re.M)[1:]
    silent = [part.splitlines()[0] for part in parts if not re.search(r"\*Costs\*|As above", part)]
    assert silent == []
