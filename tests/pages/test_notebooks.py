"""The notebooks run from an empty interpreter, cell after cell, and the site has a page of each."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import public
from pages.fences import DOCS, ROOT

NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
CELLS = """
import json, sys
names = {"__name__": "__main__"}
for number, source in enumerate(json.load(sys.stdin)):
    exec(compile(source, f"cell {number}", "exec"), names)
"""


def sources(path: Path, kind: str) -> list[str]:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == kind]


def run(code: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error::UserWarning", "-c", CELLS]
    environment = {**os.environ, "TMPDIR": str(folder)}
    text = json.dumps(code)
    return subprocess.run(command, input=text, capture_output=True, text=True, cwd=folder, env=environment, timeout=120)


def test_there_are_two_notebooks() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["quick_start", "write_a_transform"]


@pytest.mark.costly
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_in_a_fresh_interpreter(path: Path, tmp_path: Path) -> None:
    done = run(sources(path, "code"), tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") >= 5


def test_failing_cell_fails_the_run(tmp_path: Path) -> None:
    assert "cell 1" in run(["x = 1", "x.none"], tmp_path).stderr


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_has_text_public_names_and_no_outputs(path: Path) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content["nbformat"] == 4
    assert len({cell["id"] for cell in content["cells"]}) == len(content["cells"])
    assert [cell for cell in content["cells"] if cell.get("outputs")] == []
    assert content["cells"][0]["source"][0].startswith("# ")
    code = sources(path, "code")
    assert all(ast.parse(source) for source in code)
    assert public.unknown_in("\n".join(code)) == set()
    links = re.findall(r"\]\(([^)#]+)\)", "\n".join(sources(path, "markdown")))
    assert links
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_site_has_a_page_of_each_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "website"))
    import notebooks

    pages = dict(notebooks.pages())
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert sorted(pages) == [f"notebooks/{path.stem}.md" for path in NOTEBOOKS]
    for path in NOTEBOOKS:
        text = pages[f"notebooks/{path.stem}.md"]
        assert f"notebooks/{path.stem}.md" in navigation
        assert f'href="{path.name}"' in text
        assert text.count("```python\n") == len(sources(path, "code"))
