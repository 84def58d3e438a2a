"""Notebooks as pages: the text of a notebook, with its code in fences."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "docs" / "notebooks"


def pages() -> Iterator[tuple[str, str]]:
    """Yield the path in the site and the Markdown of each notebook."""
    for path in sorted(FOLDER.glob("*.ipynb")):
        yield f"notebooks/{path.stem}.md", as_markdown(path)


def as_markdown(path: Path) -> str:
    """Return the cells of a notebook, and behind the title a link to the file."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    texts = ["".join(cell["source"]) for cell in cells]
    blocks = [
        f"```python\n{text}\n```" if cell["cell_type"] == "code" else text for cell, text in zip(cells, texts, strict=True)
    ]
    title, _, rest = blocks[0].partition("\n\n")
    return "\n\n".join([title, f'<a href="{path.name}" download>Download this notebook</a>', rest, *blocks[1:]]) + "\n"
