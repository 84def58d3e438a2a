"""A curve drawn with characters that every terminal has."""

from __future__ import annotations

from collections.abc import Sequence

_TICKS = 4
_LEAST = 8


def text_plot(times: Sequence[float], values: Sequence[float], *, width: int, height: int) -> str:
    """``values`` over ``times`` as lines of text, without a line end.

    >>> print(text_plot([0, 1, 2, 3], [0.0, 1.0, 2.0, 3.0], width=11, height=4))
    3 |      **
    2 |    **
    1 |  **
    0 |**
      +--------
       0      3

    Args:
        times: increasing, at least one.
        values: one for each time; of more than there are columns some are drawn, the first and the last among them.
        width: columns of a whole line; at least 8 are kept for the curve.
        height: lines of the curve, at least 2.
    """
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    labels = {line: f"{high - span * line / (height - 1):.4g}" for line in range(height) if _has_label(line, height)}
    if high == low:
        labels = {0: f"{high:.4g}"}
    margin = max(len(label) for label in labels.values())
    columns = max(width - margin - 2, _LEAST)
    rows = [[" "] * columns for _ in range(height)]
    for column in range(columns):
        value = values[_index(column, columns, len(values))]
        rows[round((high - value) / span * (height - 1))][column] = "*"
    drawn = [f"{labels.get(line, ''):>{margin}} |{''.join(row)}".rstrip() for line, row in enumerate(rows)]
    if high == low:
        drawn = drawn[:1]
    first, last = f"{times[0]:g}", f"{times[-1]:.15g}"
    return "\n".join([*drawn, f"{'':>{margin}} +{'-' * columns}", f"{'':>{margin}}  {first}{last:>{columns - len(first)}}"])


def _index(column: int, columns: int, count: int) -> int:
    """Which of ``count`` values a column shows: few are as wide as each other, of many the first and the last are shown."""
    return column * count // columns if count <= columns else column * (count - 1) // (columns - 1)


def _has_label(line: int, height: int) -> bool:
    return line == height - 1 or line % max(height // _TICKS, 1) == 0
