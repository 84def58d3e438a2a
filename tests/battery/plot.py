"""A plot of lines and points over one axis, as SVG for a light and for a dark screen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """Lines over one axis.

    Args:
        lines: points by the name in the legend; one line needs no name.
        about: sentence below the picture.
        points: points without a line, by the name of their line.
        is_log: whether both axes are logarithmic.
    """

    x: str
    y: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    about: str = ""
    points: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    is_log: bool = False


WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM, LEGEND = 640, 260, 52, 16, 34, 44, 18
RANKS = (2, 8, 64, 512, 4096)
"""Where a logarithmic axis of ranks has its numbers."""
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
    """Draw a plot for a light and for a dark screen."""
    xs, ys = zip(*(point for line in (*plot.lines.values(), *plot.points.values()) for point in line), strict=True)
    (x0, x1), (y0, y1) = (min(xs), max(xs)), (min(ys), max(ys))
    scale = math.log10 if plot.is_log else float
    if plot.is_log:
        y0, y1 = 10 ** math.floor(scale(y0)), 10 ** math.ceil(scale(y1))
    else:
        y0, y1 = min(y0, 0.0), max(y1, 0.0)
    named = [name for name in plot.lines if name]
    height = HEIGHT + (LEGEND * len(named) + 2 if named else 0)

    def place(x: float, y: float) -> tuple[float, float]:
        right = LEFT + (scale(x) - scale(x0)) / (scale(x1) - scale(x0)) * (WIDTH - LEFT - RIGHT)
        return right, HEIGHT - BOTTOM - (scale(y) - scale(y0)) / (scale(y1) - scale(y0)) * (HEIGHT - TOP - BOTTOM)

    left, low = place(x0, y0)
    right, high = place(x1, y1)
    x_ticks: list[tuple[float, str, str]] = [(x0, f"{x0:g}", "middle"), (x1, f"{x1:g}", "end")]
    if plot.is_log:
        x_ticks = [(x, f"{x:,}", "middle") for x in RANKS if x0 <= x <= x1]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img">',
        f"<style>{STYLE}</style>",
        f'<rect class="ground" width="{WIDTH}" height="{height}" rx="8"/>',
        f'<path class="axis" d="M{left:.1f} {high:.1f}V{low:.1f}H{right:.1f}"/>',
        f'<text x="{(left + right) / 2:.1f}" y="{low + 34:.1f}" text-anchor="middle">{escape(plot.x)}</text>',
        f'<text x="{left - 6:.1f}" y="20">{escape(plot.y)}</text>',
        *(
            f'<text x="{left - 6:.1f}" y="{place(x0, y)[1] + 4:.1f}" text-anchor="end">{_short(y)}</text>'
            for y in _y_ticks(plot, y0, y1)
        ),
        *(
            f'<text x="{place(x, y0)[0]:.1f}" y="{low + 17:.1f}" text-anchor="{anchor}">{text}</text>'
            for x, text, anchor in x_ticks
        ),
    ]
    for color, (name, line) in zip(COLORS, plot.lines.items(), strict=False):
        path = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in line)
        parts.append(f'<polyline class="{color}" points="{path}"/>')
        for x, y in plot.points.get(name, ()):
            parts.append(
                '<circle class="{}" cx="{:.1f}" cy="{:.1f}" r="2" fill="none" stroke-width="4"/>'.format(color, *place(x, y))
            )
    for k, (color, name) in enumerate(zip(COLORS, named, strict=False)):
        y = HEIGHT + 6 + LEGEND * k
        parts.append(f'<polyline class="{color}" points="{LEFT},{y - 4} {LEFT + 22},{y - 4}"/>')
        parts.append(f'<text x="{LEFT + 30}" y="{y}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _short(value: float) -> str:
    """Write a number in few characters: 2.5, 10k, 1M."""
    if abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value / 1e3:g}k" if abs(value) >= 1e4 else f"{value:.4g}"


def _y_ticks(plot: Plot, y0: float, y1: float) -> Sequence[float]:
    """Return the values to write at the vertical axis: both ends, or powers of ten, every second one if there are many."""
    if not plot.is_log:
        return list({y0: 0, y1: 0})
    powers = range(round(math.log10(y0)), round(math.log10(y1)) + 1)
    return [10.0**power for power in (powers if len(powers) <= 6 else powers[::2])]
