"""What differs between a stored model and the one that is here: a short table."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

from dtrain.checkpoint.tree_json import TensorRef
from dtrain.errors import CheckpointMismatchError

MAX_ROWS = 10
MismatchKind = Literal["shape", "dtype", "unexpected", "missing", "other"]
_KIND_LABELS: dict[MismatchKind, str] = {
    "shape": "of another shape",
    "dtype": "of another dtype",
    "unexpected": "unexpected",
    "missing": "missing",
    "other": "other",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchRow:
    """One line of the table.

    Args:
        name: of what differs.
        kind: ``"missing"`` is here and not stored, ``"unexpected"`` is stored and not here.
        stored: what is stored under the name, None for nothing.
        here: what is here.
        label: the name as it is shown, where that says more.
    """

    name: str
    kind: MismatchKind
    stored: str | None
    here: str | None
    label: str = ""


def missing_row(name: str, here: str) -> MismatchRow:
    """Something that is here and not stored."""
    return MismatchRow(name=name, kind="missing", stored=None, here=here)


def unexpected_row(name: str, stored: str, *, label: str = "") -> MismatchRow:
    """Something that is stored and not here."""
    return MismatchRow(name=name, kind="unexpected", stored=stored, here=None, label=label)


def unequal_row(name: str, stored: TensorRef, here: TensorRef, *, label: str = "") -> MismatchRow:
    """A tensor that is stored in another shape, or else in another dtype."""
    kind: MismatchKind = "shape" if stored.shape != here.shape else "dtype"
    return MismatchRow(name=name, kind=kind, stored=str(stored), here=str(here), label=label)


def other_row(name: str, stored: str, here: str) -> MismatchRow:
    """Something that is no tensor."""
    return MismatchRow(name=name, kind="other", stored=stored, here=here)


def mismatch_error(where: str, rows: Sequence[MismatchRow], *, source: str, advice: str) -> CheckpointMismatchError:
    """The error that says how many entries differ in which way, with at most ten of them in a table.

    A name that only one side has is shown with the nearest of those that only the other side has: it may have been renamed.

    Args:
        where: the call, and what it was given.
        rows: what differs, at least one row.
        source: what the stored side is called, such as ``"checkpoint"``.
        advice: what to do.
    """
    kinds = {kind: [row for row in rows if row.kind == kind] for kind in _KIND_LABELS}
    counts = ", ".join(f"{len(of_kind)} {_KIND_LABELS[kind]}" for kind, of_kind in kinds.items() if of_kind)
    # In turns, so that a kind of which there are hundreds does not hide the others.
    turns = (row for turn in zip_longest(*kinds.values()) for row in turn if row is not None)
    shown = {id(row) for row, _ in zip(turns, range(MAX_ROWS), strict=False)}
    only_one_side = {"missing": [row.name for row in kinds["unexpected"]], "unexpected": [row.name for row in kinds["missing"]]}
    lines = [
        f"  {row.label or row.name}: {source} {row.stored or 'nothing'}, here {row.here or 'nothing'}"
        + _nearest(row.name, only_one_side.get(kind, ()))
        for kind, of_kind in kinds.items()
        for row in of_kind
        if id(row) in shown
    ]
    if len(rows) > len(lines):
        lines.append(f"  and {len(rows) - len(lines)} more")
    table = "\n".join(lines)
    return CheckpointMismatchError(f"{where} does not fit, {len(rows)} entries differ ({counts}); {advice}\n{table}")


def _nearest(name: str, others: Sequence[str]) -> str:
    found = difflib.get_close_matches(name, others, n=1)
    return f" (nearest: {found[0]})" if found else ""
