"""Draw the logo, the icon of a browser's tab and the social card: ``python website/brand.py`` (needs Chromium for the card).

The mark is a tensor in four shards, of which one rank holds one.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
INDIGO, PALE, AMBER = "#3f51b5", "#c5cae9", "#ffb300"
CARD = (1200, 630)
LOOP = (
    'model = dt.shard_model(model, mesh, strategy="full_shard")',
    "step = dt.compose_step(loss_fn, [dt.auto_microbatch()])",
    'for batch in loader.until("3ep"):',
    "    state, metrics = step(state, batch)",
    '    if state.crossed("1ep"):',
    '        dt.save_sharded("ckpt", state)',
)
PROMISES = (
    "FSDP2 sharding, exact gradient accumulation, automatic",
    "microbatching and crash-safe elastic checkpoints as plain",
    "functions for your own PyTorch loop",
)


def mark(x: float, y: float, size: float, others: str, own: str) -> str:
    """Return four squares of ``size``, the first in the colour ``own``."""
    step, side = size * 0.54, size * 0.46
    squares = [
        (x + step * column, y + step * row, own if row == column == 0 else others) for row in (0, 1) for column in (0, 1)
    ]
    return "".join(
        f'<rect x="{left:g}" y="{top:g}" width="{side:g}" height="{side:g}" rx="{size / 12:g}" fill="{fill}"/>'
        for left, top, fill in squares
    )


def logo() -> str:
    """Return the mark in light colours, for the dark bar on top of the pages."""
    head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 24 24" role="img"><title>dtrain</title>'
    return f"{head}{mark(2, 2, 20, '#ffffff', AMBER)}</svg>\n"


def icon() -> str:
    """Return the mark on a ground of its own, for the tab of a browser."""
    head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32">'
    return f'{head}<rect width="32" height="32" rx="6" fill="{INDIGO}"/>{mark(6, 6, 20, "#ffffff", AMBER)}</svg>\n'


def card() -> str:
    """Return the social card: the mark, the name, the promises and the loop."""
    width, height = CARD
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        f'<rect width="{width}" height="{height}" fill="#10142b"/>',
        mark(72, 64, 104, PALE, AMBER),
        '<text x="210" y="146" font-family="sans-serif" font-size="92" font-weight="700" fill="#ffffff">dtrain</text>',
    ]
    parts += [
        f'<text x="72" y="{232 + 42 * number}" font-family="sans-serif" font-size="34" fill="{PALE}">{line}</text>'
        for number, line in enumerate(PROMISES)
    ]
    parts.append('<rect x="56" y="346" width="1088" height="244" rx="14" fill="#1a2040"/>')
    parts += [
        f'<text x="80" y="{388 + 36 * number}" font-family="monospace" font-size="27" fill="#e8eaf6"'
        f' xml:space="preserve">{line}</text>'
        for number, line in enumerate(LOOP)
    ]
    return "\n".join([*parts, "</svg>", ""])


def photograph(svg: str, path: Path) -> None:
    """Write an SVG as a PNG, by a browser without a window."""
    sys.path.append(str(ROOT / "tests"))
    from browser import browser

    with tempfile.TemporaryDirectory() as name, browser(Path(name)) as shown:
        page = Path(name) / "card.html"
        page.write_text(f"<!doctype html><style>body {{ margin: 0; }} svg {{ display: block; }}</style>{svg}")
        shown.open(page, width=CARD[0], height=CARD[1])
        shown.picture(path, whole=False)


DRAWINGS = {"logo.svg": logo, "icon.svg": icon}

if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        (IMAGES / name).write_text(draw())
    photograph(card(), IMAGES / "social-card.png")
