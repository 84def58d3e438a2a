"""Pages that promise something name the test that holds it; and SECURITY.md, scope and log stay short of what is not shown."""

from __future__ import annotations

import re

import pytest

from pages.fences import DOCS, ROOT, fences

NAMED = re.compile(r"`(tests/[\w/.]+)(?:::(\w+))?`")


@pytest.mark.parametrize("page", sorted(path.name for path in DOCS.glob("*.md")))
def test_named_tests_exist(page):
    for path, test in NAMED.findall((DOCS / page).read_text()):
        assert (ROOT / path).exists(), path
        assert not test or f"def {test}(" in (ROOT / path).read_text(), f"{path} has no {test}"


@pytest.mark.parametrize("page", ["determinism.md", "security.md", "data.md"])
def test_promises_name_their_tests(page):
    assert len(NAMED.findall((DOCS / page).read_text())) >= 8


@pytest.mark.parametrize("page", ["determinism.md", "security.md"])
def test_every_promise_row_names_a_test(page):
    text = (DOCS / page).read_text()
    for table in re.findall(r"^\|.*held by \|\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.M):
        assert [row for row in table.splitlines() if not NAMED.search(row)] == []
    assert "held by |" in text


def test_trust_boundary_has_ten_numbered_items():
    assert re.findall(r"^(\d+)\. \*\*", (DOCS / "security.md").read_text(), re.M) == [str(number) for number in range(1, 11)]


def test_security_policy_contains_no_contact_address():
    text = (ROOT / "SECURITY.md").read_text()
    assert "@" not in text
    assert "http" not in text


def figures(text: str) -> set[str]:
    """Numbers with a point, which a reader takes for measured."""
    return set(re.findall(r"\d+\.\d+", re.sub(r"\]\([^)]*\)", "", text)))


def rounds_to(known: str, shown: str) -> bool:
    return f"{float(known):.{len(shown.split('.')[1])}f}" == shown


def test_log_figures_match_the_pages():
    pages = [(DOCS / name).read_text() for name in ("figures.md", "observing.md", "checkpoints.md", "planning.md")]
    known = figures("".join(pages))
    assert [each for each in figures((DOCS / "log.md").read_text()) if not any(rounds_to(one, each) for one in known)] == []


def test_log_dates_are_in_descending_order():
    dates = re.findall(r"^## (\d{4}-\d\d-\d\d)$", (DOCS / "log.md").read_text(), re.M)
    assert len(dates) >= 2
    assert dates == sorted(set(dates), reverse=True)
    assert not any(fence.language == "python" for fence in fences(DOCS / "log.md"))
