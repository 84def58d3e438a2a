"""Pages of evidence name the test of each promise, and pages for users none; SECURITY.md and log claim only what is shown."""

from __future__ import annotations

import re

import pytest

from pages.fences import DOCS, ROOT, fences, prose

NAMED = re.compile(r"`(tests/[\w/.]+)(?:::(\w+))?`")
NAVIGATION = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
EVIDENCE = set(re.findall(r"([\w-]+\.md)$", NAVIGATION[NAVIGATION.index("  - Evidence:") :], re.M))
"""The pages of the sections "Evidence" and "Project", which are the last two."""


@pytest.mark.parametrize("page", sorted(path.name for path in DOCS.glob("*.md")))
def test_named_tests_exist(page):
    for path, test in NAMED.findall((DOCS / page).read_text()):
        assert (ROOT / path).exists(), path
        assert not test or f"def {test}(" in (ROOT / path).read_text(), f"{path} has no {test}"


@pytest.mark.parametrize("page", sorted(path.name for path in DOCS.glob("*.md") if path.name not in EVIDENCE))
def test_pages_for_users_name_no_test_file(page):
    """``tests/written.py`` is a command, and the comments above code that a page shares with a test are not shown."""
    text = re.sub(r"<!--.*?-->", "", (DOCS / page).read_text(), flags=re.S)
    own = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    assert re.findall(r"tests/(?!written\.py)[\w/.]+", text) == []
    assert own & set(re.findall(r"`(test_\w+\.py)`", prose(DOCS / page))) == set()


@pytest.mark.parametrize(("page", "least"), [("determinism.md", 8), ("security.md", 8), ("evidence.md", 180)])
def test_promises_name_their_tests(page, least):
    assert len(set(NAMED.findall((DOCS / page).read_text()))) >= least


def test_evidence_covers_every_room_of_the_tests():
    named = {path for path, _ in NAMED.findall((DOCS / "evidence.md").read_text())}
    assert len(named) >= 125
    rooms = {
        "step",
        "shard",
        "data",
        "checkpoint",
        "storage",
        "launch",
        "dist",
        "cli",
        "planning",
        "profiling",
        "report",
        "run",
    }
    rooms |= {"monitors", "loggers", "errors", "examples", "pages", "battery", "transforms"}
    assert {path.split("/")[1] for path in named} >= rooms


def test_evidence_has_the_tests_of_several_nodes():
    section = (DOCS / "evidence.md").read_text().split("\n## Processes and nodes\n")[1].split("\n## ")[0]
    assert len([path for path, _ in NAMED.findall(section) if "nodes" in path or "elastic" in path]) >= 6


@pytest.mark.parametrize("page", ["determinism.md", "security.md", "evidence.md"])
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
    pages = [(DOCS / name).read_text() for name in ("figures.md", "observing.md", "evidence.md", "planning.md")]
    known = figures("".join(pages))
    assert [each for each in figures((DOCS / "log.md").read_text()) if not any(rounds_to(one, each) for one in known)] == []


def test_log_dates_are_in_descending_order():
    dates = re.findall(r"^## (\d{4}-\d\d-\d\d)$", (DOCS / "log.md").read_text(), re.M)
    assert len(dates) >= 2
    assert dates == sorted(set(dates), reverse=True)
    assert not any(fence.language == "python" for fence in fences(DOCS / "log.md"))
