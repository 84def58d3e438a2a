"""Files generated from the code: ``python tests/written.py`` writes them all anew and names those that have changed.

Each of them has a test that fails where it is not up to date.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from battery import cards, curves, pictures
from pages import names_page, scale_plots, seams, shown
from pages.fences import DOCS, ROOT


def files() -> Iterator[tuple[Path, str]]:
    """Yield each generated file with its content."""
    yield names_page.PAGE, names_page.page()
    yield from cards.files()
    yield from curves.files()
    yield from scale_plots.files()
    for name, draw in seams.PICTURES.items():
        yield seams.IMAGES / f"{name}.svg", seams.svg(draw())
    for page in sorted(DOCS.glob("*.md")):
        yield page, shown.with_sources(page.read_text())


if __name__ == "__main__":
    for path, text in files():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(path.relative_to(ROOT))
    for path, pixels in pictures.pictures():
        if not path.exists() or not pictures.alike(pixels, pictures.decode(path.read_bytes())):
            path.write_bytes(pictures.encode(pixels))
            print(path.relative_to(ROOT))
