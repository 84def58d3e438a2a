"""Check the configuration of the site without building it: every name has a place, every page is in the navigation."""

from __future__ import annotations

import itertools
import re
import sys
from types import ModuleType

import pytest

import public
from pages.fences import DOCS, ROOT

WEBSITE = ROOT / "website"


@pytest.fixture
def website(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(WEBSITE))
    for name in ("reference", "commands", "docstrings", "search"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.fixture
def reference(website: None) -> ModuleType:
    import reference

    return reference


def test_every_exported_name_has_one_reference_entry(reference: ModuleType) -> None:
    placed = [name for page in reference.all_pages() for name in page.names]
    assert sorted(placed) == sorted(public.all_names())
    assert set(reference.doors()) == set(public.DOORS)


def test_reference_pages_are_topics_of_bearable_length(reference: ModuleType) -> None:
    """A page has a title of its own, no more names than a reader scrolls over, and no name without a topic."""
    pages = reference.all_pages()
    assert {page.file: len(page.names) for page in pages if len(page.names) > 24} == {}
    assert len({page.title for page in pages}) == len(pages)
    assert [page.names for page in pages if page.file.startswith("more-")] == [], "name the module in reference.TOPICS"
    order = [page.file for page in pages]
    loop = ["processes", "sharding", "loader", "losses", "step", "state", "checkpoints"]
    assert order[: len(loop)] == loop


def test_reference_links_point_to_generated_pages(reference: ModuleType) -> None:
    files = {file for file, _ in reference.pages()}
    assert {f"reference/{target}" for target in re.findall(r"\]\(([\w-]+\.md)[#)]", reference.index())} <= files


def test_page_of_commands_has_every_command_and_option_once(website: None) -> None:
    import commands

    text = commands.with_options((DOCS / "cli.md").read_text())
    for name in ("launch", "env", "hang", "plan", "report", "top", "checkpoints convert", "data write", "plot schedule"):
        assert text.count(f"<summary>All options of <code>dtrain {name}</code>") == 1
    assert "`--hang-timeout`" in text.replace(" SECONDS", "")
    with pytest.raises(ValueError, match="missing launch, new"):
        commands.with_options("# The command line\n")


def test_custom_docstring_sections_become_a_list(website: None) -> None:
    docstrings = pytest.importorskip("docstrings", reason="needs griffe")
    given = "First.\nMutates: ``p.grad``.\nCollective: one\n    all-reduce.\n\nArgs:\n    x: it.\n\n"
    given += "Example:\n    >>> 1\n    1\n\n>>> 2\n[2]\n\nReturns:\n    A number: the sum.\n\n"
    given += "Suggested values:\n    A: 1 (B)\n    C: 2\n        (D)\nWhen not to use: the run is short."
    assert docstrings.as_markdown(given).splitlines() == [
        "First.",
        "",
        "- **Mutates.** ``p.grad``.",
        "- **Collective.** one all-reduce.",
        "",
        "Args:",
        "    x: it.",
        "",
        "Examples:",
        "    >>> 1",
        "    1",
        "",
        "Examples:",
        "    >>> 2",
        "    [2]",
        "",
        "- **Returns.** A number: the sum.",
        "",
        "- **Suggested values.**",
        "    - A: 1 (B)",
        "    - C: 2 (D)",
        "- **Avoid if** the run is short.",
    ]


def test_every_page_is_in_the_navigation_once() -> None:
    listed = re.findall(r"^ +- (?:.*: )?([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1], re.M)
    assert sorted(listed) == sorted(path.name for path in DOCS.glob("*.md"))


def test_lists_are_separated_from_preceding_text() -> None:
    """A forge takes a list without an empty line above it; the site would run it into the paragraph."""
    wrong = []
    for path in [*DOCS.glob("*.md"), ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]:
        text = re.sub(r"^ *```.*?^ *```", lambda match: "\n" * match[0].count("\n"), path.read_text(), flags=re.S | re.M)
        lines = ["", *text.splitlines()]
        for number, (above, line) in enumerate(itertools.pairwise(lines), start=1):
            if re.match(r"([-*]|1\.) ", line) and above.strip() and not re.match(r" *([-*]|\d+\.) |  |#|<!--", above):
                wrong.append(f"{path.name}:{number}")
    assert wrong == []


def test_search_settings_name_existing_pages_once_per_word(website: None, reference: ModuleType) -> None:
    import search

    made = {file for file, _ in reference.pages()} | {"project/changelog.md", "project/benchmarks.md"}
    assert [
        page for page in (*search.WORDS, *search.EXCLUDED, *search.LESS) if not (DOCS / page).exists() and page not in made
    ] == []
    words = {page: search.settings(page).get("tags", []) for page in search.WORDS}
    assert [page for page, tags in words.items() if not tags or len(set(tags)) < len(tags)] == []
    assert search.settings("log.md") == {"search": {"exclude": True}}
    boosts = [
        search.settings(page)["search"]["boost"] for page in ("memory.md", "recipes/ema.md", "figures.md", "reference/step.md")
    ]
    assert boosts == sorted(boosts, reverse=True)


@pytest.fixture
def hooks(website: None) -> ModuleType:
    pytest.importorskip("mkdocs", reason="needs mkdocs")
    import hooks

    return hooks


@pytest.mark.parametrize("given", [{}, {"SITE_URL": "https://a.test/d/", "REPO_URL": "https://b.test/d"}], ids=["none", "both"])
def test_addresses_of_the_site_come_from_the_environment(given: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    config = pytest.importorskip("mkdocs.config", reason="needs mkdocs")
    for name in ("SITE_URL", "REPO_URL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    settings = config.load_config(str(ROOT / "mkdocs.yml"))
    assert (settings["site_url"], settings["repo_url"]) == (given.get("SITE_URL", ""), given.get("REPO_URL", ""))


def test_every_page_shows_the_version_of_the_project(hooks: ModuleType) -> None:
    import dtrain

    config = {"nav": [], "extra": {}}
    hooks.on_config(config)
    assert config["copyright"].startswith(f"dtrain {dtrain.__version__}, ")


def test_options_in_text_are_not_broken_behind_a_hyphen(hooks: ModuleType) -> None:
    given = "<p><code>a -n 8</code> <code>ab</code></p><pre><span></span><code>--x</code></pre>"
    kept = '<p><code>a <span class="word">-n</span> 8</code> <code>ab</code></p><pre><span></span><code>--x</code></pre>'
    assert hooks.on_page_content(given) == kept


def test_recipe_cards_are_in_the_navigation_by_group(hooks: ModuleType) -> None:
    cards = {f"recipes/{path.name}" for path in (DOCS / "recipes").glob("*.md")} - {"recipes/index.md"}
    groups = {title: pages for group in hooks.recipes() for title, pages in group.items()}
    assert "recipes/mixup.md" in groups["Batches and targets"]
    assert sorted(itertools.chain(*groups.values())) == sorted(cards)


def test_examples_with_a_guide_exist_and_are_in_the_index(hooks: ModuleType) -> None:
    assert set(hooks.GUIDES) <= {path.stem for path in hooks.examples()}
    index = hooks.index_of_examples()
    assert [path.stem for path in hooks.examples() if f"]({path.stem}.md)" not in index] == []
    assert index.count("[guide](") == len(hooks.GUIDES)


def test_link_to_source_of_a_name_leads_to_its_reference_entry(hooks: ModuleType) -> None:
    link = "[`dt.transforms.mixup`](../../src/dtrain/transforms/batches/mixup.py)"
    match = hooks._FENCE_LINK_OR_CODE.fullmatch(link)
    assert hooks._link(match, "docs/recipes/mixup.md", "recipes/mixup.md", None) == (
        "[`dt.transforms.mixup`](../reference/transforms-images.md#dtrain.transforms.mixup)"
    )
    assert hooks._linked_names("## `dt.dist`\n| `use_tf32` | Use it. |\n| `none_such` | `use_tf32` |", "names.md") == (
        "## `dt.dist`\n| [`use_tf32`](reference/random.md#dtrain.dist.use_tf32) | Use it. |\n| `none_such` | `use_tf32` |"
    )
