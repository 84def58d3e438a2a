"""Compare a run in the script's own dtypes with the same run in float32: buffers, modules, exports (``compare_precision``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from dtrain.prove.compare import Difference
from dtrain.prove.records import RunRecord

_BITS = {"float64": 53, "float32": 24, "bfloat16": 8, "float16": 11}
# A module may lose this many times the rounding of its dtype, or of what ran before it. Sums over parameters lose more.
_ALLOWED_ROUNDINGS, _ALLOWED_ROUNDINGS_OF_PARAMETERS = 8.0, 30.0


def compare_precision(exact: RunRecord, written: RunRecord) -> list[Difference]:
    """Return what the script's dtypes change more than rounding explains, at most one of each kind.

    Args:
        exact: record of the run in float32.
        written: record of the run in the script's own dtypes.
    """
    found: dict[str, Difference] = {}
    for difference in (*_buffers(exact, written), *_modules(exact, written), *_exports(written)):
        found.setdefault(str(difference.code), difference)
    return list(found.values())


def module_errors(exact: RunRecord, written: RunRecord) -> dict[str, float]:
    """Return the relative error of the output of each module in the first forward."""
    return {name: error for name, error, _ in _errors(exact, written)}


def _buffers(exact: RunRecord, written: RunRecord) -> Iterator[Difference]:
    for fact in written.of_kind("initial"):
        partner = exact.facts.get(fact.key)
        if partner is None or not fact.value.is_buffer or _BITS.get(fact.value.dtype, 64) >= 24:
            continue
        a, b = np.asarray(partner.value.sketch), np.asarray(fact.value.sketch)
        if a.shape == b.shape and not np.array_equal(a, b):
            error = float(np.abs(a - b).max())
            yield Difference(
                step=fact.step,
                kind="buffer",
                name=fact.name,
                text=f"is {fact.value.dtype}, and its values differ by up to {error:.3g} from those before the cast",
                relative=error,
                code="buffer_rounded",
            )


def _errors(exact: RunRecord, written: RunRecord) -> Iterator[tuple[str, float, Any]]:
    seen: dict[str, int] = {}
    exact_rows: dict[tuple[str, int], Any] = {}
    for row in exact.rows("activation"):
        number = seen[row["name"]] = seen.get(row["name"], -1) + 1
        exact_rows[row["name"], number] = row
    seen.clear()
    for row in written.rows("activation"):
        number = seen[row["name"]] = seen.get(row["name"], -1) + 1
        partner = exact_rows.get((row["name"], number))
        if partner is None or not row["sketch"] or not partner["sketch"] or row["shape"] != partner["shape"]:
            continue
        a, b = exact.sketch(partner), written.sketch(row)
        norm = float(np.linalg.norm(a))
        yield row["name"], float(np.linalg.norm(a - b)) / norm if norm else 0.0, row


def _modules(exact: RunRecord, written: RunRecord) -> Iterator[Difference]:
    """A module without parameters of its own that enlarges the error of what ran before it loses digits by itself."""
    before = 0.0
    for name, error, row in _errors(exact, written):
        rounding = 2.0 ** -_BITS.get(row["dtype"], 53)
        allowed = _ALLOWED_ROUNDINGS_OF_PARAMETERS if row["own"] else _ALLOWED_ROUNDINGS
        if error > allowed * max(rounding, before) and row["leaf"]:
            code = "low_precision_error" if row["own"] else "rotary_rounded"
            yield Difference(
                step=row["step"],
                kind="output of",
                name=name,
                text=f"differs by {error:.2g} of its norm from float32; the modules before it differ by {before:.2g}",
                relative=error,
                code=code,
            )
        before = max(before, error)


def _exports(written: RunRecord) -> Iterator[Difference]:
    """An export must have the dtype of the model, unless the script computes in the dtype of the export."""
    dtypes = {fact.value.dtype for fact in written.of_kind("parameter")}
    computed = {row["dtype"] for row in written.notes if row["code"] == "low_precision"}
    computed |= {row["dtype"] for row in written.rows("activation")}
    for row in written.rows("exported"):
        bits = _BITS.get(row["dtype"], 64)
        if dtypes and row["dtype"] not in dtypes | computed and bits < min(_BITS.get(dtype, 64) for dtype in dtypes):
            yield Difference(
                step=row["step"],
                kind="exported",
                name=row["name"],
                text=f"is {row['dtype']}, and the model is {', '.join(sorted(dtypes))}",
                code="export_dtype",
            )
