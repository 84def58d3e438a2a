"""README.md: short, its badges and figures true, its picture recorded from commands that exist."""

from __future__ import annotations

import json
import re
import shlex
import struct
import tomllib
from xml.etree import ElementTree

import pytest

from pages.fences import DOCS, ROOT
from pages.test_code_blocks import refusal

README = (ROOT / "README.md").read_text()
HOME = (DOCS / "index.md").read_text()
PROJECT = (ROOT / "pyproject.toml").read_text()


def test_readme_has_at_most_700_words() -> None:
    assert len(README.split()) <= 700


def test_badges_match_the_project() -> None:
    python, torch = re.findall(r"badge/(?:python|torch)-([\d.]+)%2B", README)
    assert f'requires-python = ">={python}"' in PROJECT
    assert f'"torch>={torch}"' in PROJECT
    assert 'license = "Apache-2.0"' in PROJECT
    assert "badge/licence-Apache--2.0" in README


def test_compared_figures_are_the_measured_ones() -> None:
    rows = json.loads((ROOT / "benchmarks/results/peers.json").read_text())["rows"]
    (name,) = (name for name in rows if name.startswith("bare step of a tiny MLP, 4 microbatches, one process"))
    candidates = rows[name]["clocks"]["processor time"]["candidates"]
    shown = {name: ratio for ratio, name in re.findall(r"([\d.]+)(?: of the processor time)? with (\w+)", README)}
    assert shown == {candidate: f"{candidates[candidate]['ratio'][0]:.2f}" for candidate in ("dtrain", "Fabric", "Accelerate")}


def table(text: str) -> list[str]:
    return re.findall(r"^\|.*\|$", text, re.M)[:8]


def test_home_shows_the_loop_and_the_table_of_the_readme() -> None:
    loops = [re.findall(r"```python\n(.*?)```", text, re.S)[0] for text in (README, HOME)]
    assert loops[0] == loops[1]
    assert table(README) == table(HOME)
    assert [row.split("|")[1].strip() for row in table(HOME)][2] == "**dtrain**"
    marks = {cell.strip() for row in table(HOME)[2:] for cell in row.split("|")[2:-1]}
    assert marks == {"✓", "~", "\N{EN DASH}"}


def test_each_mark_has_a_source_on_the_page_of_figures() -> None:
    sources = (DOCS / "figures.md").read_text().split("### The marks and their sources\n")[1].split("\n### ")[0]
    rows = {row.split("|")[1].strip(): row.split("|")[2:-1] for row in table(sources)[2:]}
    assert set(rows) == {row.split("|")[1].strip(" *") for row in table(README)[2:]}
    assert all(len(cells) == 4 and all(re.search(r"\]\(|`tests/", cell) for cell in cells) for cells in rows.values())


def lines(name: str) -> list[str]:
    root = ElementTree.parse(DOCS / "images" / f"terminal-{name}.svg").getroot()
    return [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]


def test_picture_is_the_same_in_both_schemes_and_on_the_page() -> None:
    assert lines("light") == lines("dark")
    pictures = re.findall(r"(?:srcset|src)=\"(docs/images/[\w.-]+)\"", README)
    assert pictures == ["docs/images/terminal-dark.svg", "docs/images/terminal-light.svg"]


@pytest.mark.parametrize("name", ["light", "dark"])
def test_recorded_commands_exist_and_the_run_resumes(name: str) -> None:
    shown = lines(name)
    started = [shlex.split(line[2:].removesuffix(" &")) for line in shown if line.startswith("$ dtrain")]
    assert [words[:4] for words in started] == [["dtrain", "launch", "-n", "2"], ["dtrain", "launch", "-n", "3"]]
    assert [refusal(words[1:]) for words in started] == [None, None]
    killed = next(number for number, line in enumerate(shown) if "kill -9" in line)
    assert any("resuming after step 80" in line for line in shown[killed:])
    assert any("held-out loss" in line for line in shown[killed:])


def test_install_page_names_every_extra() -> None:
    extras = tomllib.loads(PROJECT)["project"]["optional-dependencies"]
    rows = re.findall(r"^\| (`.*`) \| ", (DOCS / "install.md").read_text(), re.M)
    assert {name for row in rows for name in re.findall(r"`([\w-]+)`", row)} == set(extras)


@pytest.mark.parametrize("name", ["logo.svg", "icon.svg"])
def test_logo_is_up_to_date(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "website"))
    brand = pytest.importorskip("brand")
    assert (DOCS / "images" / name).read_text() == brand.DRAWINGS[name](), "run python website/brand.py"
    assert f"images/{name}" in (ROOT / "mkdocs.yml").read_text()


def test_social_card_has_the_size_that_its_page_says() -> None:
    header = (DOCS / "images" / "social-card.png").read_bytes()[:24]
    size = struct.unpack(">II", header[16:])
    template = (ROOT / "website/overrides/main.html").read_text()
    assert (
        tuple(re.findall(r'og:image:(?:width|height)" content="(\d+)"', template)) == tuple(map(str, size)) == ("1200", "630")
    )


@pytest.mark.parametrize("name", ["concept_strategies", "concept_mesh", "concept_resume"])
def test_concept_picture_is_up_to_date(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "website"))
    concept_pictures = pytest.importorskip("concept_pictures")
    kept = (DOCS / "images" / f"{name}.svg").read_text()
    assert kept == concept_pictures.PICTURES[name](), "run python website/concept_pictures.py"
    assert f"images/{name}.svg)" in (DOCS / "concepts.md").read_text()
