"""Format the differences between a stored model and the current model as an error with a short table."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

from dtrain.checkpoint.layout import TensorRef
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
    """Row of the table.

    Args:
        name: name of the entry.
        kind: ``"missing"`` is not stored, ``"unexpected"`` is stored and not in the model.
        stored: description of the stored entry; None without one.
        here: description of the entry in the model; None without one.
        label: text to show instead of the name.
    """

    name: str
    kind: MismatchKind
    stored: str | None
    here: str | None
    label: str = ""


def missing_row(name: str, here: str) -> MismatchRow:
    """Return a row for an entry that is not stored."""
    return MismatchRow(name=name, kind="missing", stored=None, here=here)


def unexpected_row(name: str, stored: str, *, label: str = "") -> MismatchRow:
    """Return a row for an entry that is stored and not in the model."""
    return MismatchRow(name=name, kind="unexpected", stored=stored, here=None, label=label)


def unequal_row(name: str, stored: TensorRef, here: TensorRef, *, label: str = "") -> MismatchRow:
    """Return a row for a tensor that is stored in another shape, or else in another dtype."""
    kind: MismatchKind = "shape" if stored.shape != here.shape else "dtype"
    return MismatchRow(name=name, kind=kind, stored=str(stored), here=str(here), label=label)


def other_row(name: str, stored: str, here: str) -> MismatchRow:
    """Return a row for an entry that is not a tensor."""
    return MismatchRow(name=name, kind="other", stored=stored, here=here)


def mismatch_error(caller: str, rows: Sequence[MismatchRow], *, source: str, advice: str) -> CheckpointMismatchError:
    """Return the error with the number of differences of each kind, and at most ten of them in a table.

    A name that only one side has is shown with the most similar name that only the other side has, because the entry may have
    been renamed.

    Args:
        caller: prefix of the message: the function and its argument.
        rows: differences, at least one.
        source: name of the stored side, such as ``"checkpoint"``.
        advice: sentences of advice.
    """
    kinds = {kind: [row for row in rows if row.kind == kind] for kind in _KIND_LABELS}
    counts = ", ".join(f"{len(of_kind)} {_KIND_LABELS[kind]}" for kind, of_kind in kinds.items() if of_kind)
    # Kinds take turns, so that hundreds of rows of one kind do not hide the other kinds.
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
    differ = "entry differs" if len(rows) == 1 else "entries differ"
    return CheckpointMismatchError(f"{caller} does not fit. {len(rows)} {differ} ({counts}). {advice}\n{table}")


def _nearest(name: str, others: Sequence[str]) -> str:
    found = difflib.get_close_matches(name, others, n=1)
    return f" (nearest: {found[0]})" if found else ""
