"""A plot of lines over one axis, as SVG for a light and for a dark screen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """Lines over one axis.

    Args:
        lines: points by the name in the legend; one line needs no name.
        about: sentence below the picture.
    """

    x: str
    y: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    about: str


WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM, LEGEND = 640, 260, 52, 16, 34, 44, 18
COLORS = ("a", "b", "c", "d")
STYLE = """
  .ground { fill: #ffffff; } text { font: 12px system-ui, sans-serif; fill: #1f2328; }
  .axis { stroke: #8c959f; fill: none; } polyline { fill: none; stroke-width: 2; }
  .a { stroke: #0969da; } .b { stroke: #bc4c00; } .c { stroke: #1a7f37; } .d { stroke: #8250df; }
  @media (prefers-color-scheme: dark) {
    .ground { fill: #0d1117; } text { fill: #e6edf3; } .axis { stroke: #8b949e; }
    .a { stroke: #58a6ff; } .b { stroke: #f0883e; } .c { stroke: #3fb950; } .d { stroke: #a371f7; }
  }
"""


def svg(plot: Plot) -> str:
    """Draw the lines of a plot for a light and for a dark screen."""
    points = [point for line in plot.lines.values() for point in line]
    (x0, x1), (y0, y1) = ((min(axis), max(axis)) for axis in zip(*points, strict=True))
    y0, y1 = min(y0, 0.0), max(y1, 0.0)
    named = [name for name in plot.lines if name]
    height = HEIGHT + (LEGEND * len(named) + 2 if named else 0)

    def place(x: float, y: float) -> tuple[float, float]:
        right = LEFT + (x - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT)
        return right, HEIGHT - BOTTOM - (y - y0) / (y1 - y0) * (HEIGHT - TOP - BOTTOM)

    left, low = place(x0, y0)
    right, high = place(x1, y1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img">',
        f"<style>{STYLE}</style>",
        f'<rect class="ground" width="{WIDTH}" height="{height}" rx="8"/>',
        f'<path class="axis" d="M{left:.1f} {high:.1f}V{low:.1f}H{right:.1f}"/>',
        f'<text x="{(left + right) / 2:.1f}" y="{low + 34:.1f}" text-anchor="middle">{escape(plot.x)}</text>',
        f'<text x="{left - 6:.1f}" y="20">{escape(plot.y)}</text>',
        *(f'<text x="{left - 6:.1f}" y="{place(x0, y)[1] + 4:.1f}" text-anchor="end">{y:.4g}</text>' for y in {y0: 0, y1: 0}),
        f'<text x="{left:.1f}" y="{low + 17:.1f}" text-anchor="middle">{x0:g}</text>',
        f'<text x="{right:.1f}" y="{low + 17:.1f}" text-anchor="end">{x1:g}</text>',
    ]
    for color, line in zip(COLORS, plot.lines.values(), strict=False):
        path = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in line)
        parts.append(f'<polyline class="{color}" points="{path}"/>')
    for k, (color, name) in enumerate(zip(COLORS, named, strict=False)):
        y = HEIGHT + 6 + LEGEND * k
        parts.append(f'<polyline class="{color}" points="{LEFT},{y - 4} {LEFT + 22},{y - 4}"/>')
        parts.append(f'<text x="{LEFT + 30}" y="{y}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])
