"""The page of evidence names the test of each promise, and pages for users name none."""

from __future__ import annotations

import re

import pytest

from pages.fences import DOCS, ROOT, prose

NAMED = re.compile(r"`(tests/[\w/.]+)(?:::(\w+))?`")
FOR_DEVELOPERS = {"architecture.md", "evidence.md", "figures.md", "log.md", "scale.md", "truth-table.md"}


def test_named_tests_exist():
    for page in DOCS.glob("*.md"):
        for path, test in NAMED.findall(page.read_text()):
            assert (ROOT / path).exists(), f"{page.name}: {path}"
            assert not test or f"def {test}(" in (ROOT / path).read_text(), f"{page.name}: {path} has no {test}"


@pytest.mark.parametrize("page", sorted(path.name for path in DOCS.glob("*.md") if path.name not in FOR_DEVELOPERS))
def test_pages_for_users_name_no_test_file(page):
    """``tests/written.py`` is a command, and the comments above code that a page shares with a test are not shown."""
    text = re.sub(r"<!--.*?-->", "", (DOCS / page).read_text(), flags=re.S)
    own = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    assert re.findall(r"tests/(?!written\.py)[\w/.]+", text) == []
    assert own & set(re.findall(r"`(test_\w+\.py)`", prose(DOCS / page))) == set()


def test_every_promise_row_names_a_test():
    tables = re.findall(r"^\|.*held by \|\n\|[-|]+\|\n((?:\|.*\n)+)", (DOCS / "evidence.md").read_text(), re.M)
    assert tables
    assert [row for table in tables for row in table.splitlines() if not NAMED.search(row) and "](" not in row] == []


def test_security_policy_contains_no_contact_address():
    text = (ROOT / "SECURITY.md").read_text()
    assert "@" not in text
    assert "http" not in text
