"""What differs between a stored model and the one that is here: a short table."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from dtrain.errors import CheckpointMismatchError

SHOWN = 10
Row = tuple[str, str | None, str | None]
"""A name, what is stored under it, and what is here; None for nothing."""


def mismatch(where: str, rows: Sequence[Row], *, source: str, advice: str) -> CheckpointMismatchError:
    """The error that says how many entries differ in which way, with at most ten of them in a table.

    Args:
        where: the call, and what it was given.
        rows: what differs, at least one row.
        source: what the stored side is called, such as ``"checkpoint"``.
        advice: what to do.
    """
    kinds = {
        "unequal": [row for row in rows if row[1] is not None and row[2] is not None],
        f"only in the {source}": [row for row in rows if row[2] is None],
        "only here": [row for row in rows if row[1] is None],
    }
    counts = ", ".join(f"{len(of_kind)} {how}" for how, of_kind in kinds.items() if of_kind)
    # In turns, so that a kind of which there are hundreds does not hide the others.
    turns = (row for turn in zip_longest(*kinds.values()) for row in turn if row is not None)
    shown = {row for row, _ in zip(turns, range(SHOWN), strict=False)}
    lines = [
        f"  {name}: {source} {theirs or 'nothing'}, here {ours or 'nothing'}"
        for of_kind in kinds.values()
        for name, theirs, ours in of_kind
        if (name, theirs, ours) in shown
    ]
    if len(rows) > len(lines):
        lines.append(f"  and {len(rows) - len(lines)} more")
    table = "\n".join(lines)
    return CheckpointMismatchError(f"{where} does not fit, {len(rows)} entries differ ({counts}); {advice}\n{table}")
