"""docs/errors.md has each section, with the messages that the tests have seen, and each section has its test."""

from __future__ import annotations

import re
from pathlib import Path

from errors.said import SAID, fits
from pages.fences import DOCS

PAGE = DOCS / "errors.md"
HERE = Path(__file__).parent


def shown(text: str) -> dict[str, list[str]]:
    """The blocks of plain text, by the heading that they stand under."""
    parts = re.split(r"^## (.*)\n", text, flags=re.M)[1:]
    return {
        name: re.findall(r"^```text\n(.*?)\n```$", body, re.M | re.S)
        for name, body in zip(parts[::2], parts[1::2], strict=True)
    }


def test_page_shows_the_actual_messages() -> None:
    assert shown(PAGE.read_text()) == {name: [*said.by_hand, *said.here] for name, said in SAID.items()}


def test_every_section_has_a_test() -> None:
    tests = "".join(path.read_text() for path in HERE.glob("test_*.py"))
    assert [name for name in SAID if not re.search(rf'check\(\s*"{re.escape(name)}"', tests)] == []


def test_every_section_links_to_another_page() -> None:
    parts = re.split(r"^## (.*)\n", PAGE.read_text(), flags=re.M)[1:]
    assert [name for name, body in zip(parts[::2], parts[1::2], strict=True) if not re.search(r"\]\([\w/]+\.md", body)] == []


def test_ellipsis_is_the_only_wildcard_in_messages() -> None:
    assert fits("a ... c", "a b\nb c")
    assert fits("a.c", "a.c\n")
    assert not fits("a.c", "abc")
    assert not fits("a ... c", "a b c d")
