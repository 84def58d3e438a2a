"""Compare a run in the script's own dtypes with the same run in float32: buffers, modules, exports (``compare_precision``).

The size of an error that rounding explains is measured by a third run, whose modules round in another way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dtrain.prove.compare import Difference, compare_records
from dtrain.prove.run_records import BITS, TENSORS, RunRecord

FAR = 8.0
"""An error of this many times the measured effect of rounding is not rounding. Weights are rounded, too."""


_SUMS = 256 * 2.0 ** -BITS["float32"]
"""A sum over samples in float32 is rounded at each of its terms. Outputs of modules do not show this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleError:
    """Errors of a module's output in the first step, all relative to the norm in float32.

    Args:
        name: module.
        kind: class of the module.
        order: place in the order in which the modules ran.
        dtype: dtype of the output.
        output: difference of the output from float32.
        gradient: difference of the output's gradient from float32; None if there is none.
        rounding: difference of the output if the modules round in another way, and at least one rounding of ``dtype``.
        own: True for a module with parameters of its own.
        leaf: True for a module without submodules.
        step: the step.
    """

    name: str
    kind: str
    order: int
    dtype: str
    output: float
    gradient: float | None
    rounding: float
    own: bool
    leaf: bool
    step: int

    @property
    def ratio(self) -> float:
        """Number of measured roundings in the error of the output."""
        return self.output / self.rounding

    @property
    def is_far(self) -> bool:
        """True if rounding does not explain the error."""
        return self.ratio > FAR


def compare_precision(exact: RunRecord | None, written: RunRecord, rounded: RunRecord | None) -> list[Difference]:
    """Return what the script's dtypes change more than rounding explains, at most one of each kind.

    Args:
        exact: record of the run in float32; None if the script computes in nothing smaller.
        written: record of the run in the script's own dtypes.
        rounded: record of the run in these dtypes whose modules round in another way.
    """
    found: dict[str, Difference] = {}
    differences = [*_exports(written)]
    if exact is not None and rounded is not None:
        # A rounded buffer explains the errors of modules.
        rounded_values = list(_buffers(exact, written)) or list(_modules(module_errors(exact, written, rounded)))
        differences = [*rounded_values, *differences]
    for difference in differences:
        found.setdefault(str(difference.code), difference)
    return list(found.values())


def module_errors(exact: RunRecord, written: RunRecord, rounded: RunRecord) -> list[ModuleError]:
    """Return the errors of all modules in the first forward and backward, in the order of the program."""
    gradients = dict(_relative(exact, written, "activation_gradient"))
    measured = dict(_relative(written, rounded, "activation"))
    rows = {row["name"]: row for row in reversed(written.rows("activation"))}
    errors = []
    for order, (name, error) in enumerate(_relative(exact, written, "activation")):
        row = rows[name]
        unit = 2.0 ** -BITS.get(row["dtype"], 53)
        errors.append(
            ModuleError(
                name=name,
                kind=row["kind_of"],
                order=order,
                dtype=row["dtype"],
                output=error,
                gradient=gradients.get(name),
                rounding=max(unit, measured.get(name, 0.0)),
                own=row["own"],
                leaf=row["leaf"],
                step=row["step"],
            )
        )
    return errors


def rounding_of(reference: RunRecord, rounded: Sequence[RunRecord]) -> Mapping[tuple[str, int], float]:
    """Return the difference that is rounding for each kind of fact and step: the largest effect of other rounding, enlarged."""
    largest: dict[tuple[str, int], float] = {}
    steps = {fact.step for fact in reference.facts.values()}
    for record in rounded:
        for fact, relative in compare_records(reference, record, same_layout=False).relative:
            # A single number has too few changes in one step to measure their size.
            for step in (fact.step,) if fact.kind in TENSORS else steps:
                largest[fact.kind, step] = max(largest.get((fact.kind, step), 0.0), relative)
    return {key: max(_SUMS, FAR * relative) for key, relative in largest.items()}


def computed_samples(reference: RunRecord, rounded: Sequence[RunRecord]) -> set[tuple[int, int, str, str]]:
    """Return the keys of samples that change with the rounding, because a model computes them, such as generated pictures."""
    return {
        fact.key
        for record in rounded
        for fact in (*reference.of_kind("samples"), *reference.of_kind("evaluation"))
        if fact.key in record.facts and record.facts[fact.key].value != fact.value
    }


def _relative(a: RunRecord, b: RunRecord, kind: str) -> Iterator[tuple[str, float]]:
    """Yield the relative difference of the first output of each module, in the order of ``a``."""
    partners: dict[str, Any] = {}
    for row in b.rows(kind):
        partners.setdefault(row["name"], row)
    seen = set()
    for row in a.rows(kind):
        partner = partners.get(row["name"])
        if row["name"] in seen or partner is None or not row["sketch"] or row["shape"] != partner["shape"]:
            continue
        seen.add(row["name"])
        ours, theirs = a.sketch(row), b.sketch(partner)
        norm = float(np.linalg.norm(ours))
        yield row["name"], float(np.linalg.norm(ours - theirs)) / norm if norm else 0.0


def _buffers(exact: RunRecord, written: RunRecord) -> Iterator[Difference]:
    for fact in written.of_kind("initial"):
        partner = exact.facts.get(fact.key)
        if partner is None or not fact.value.is_buffer or BITS.get(fact.value.dtype, 64) >= BITS["float32"]:
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


def _modules(errors: list[ModuleError]) -> Iterator[Difference]:
    """The first module whose error rounding does not explain loses digits by itself. The later modules follow from it."""
    first = next((error for error in errors if error.leaf and error.is_far), None)
    if first is not None:
        yield Difference(
            step=first.step,
            kind="output of",
            name=first.name,
            text=f"differs by {first.output:.2g} of its norm from float32, and other rounding changes {first.rounding:.2g}",
            relative=first.output,
            code="low_precision_error" if first.own else "rotary_rounded",
        )


def _exports(written: RunRecord) -> Iterator[Difference]:
    """An export must have the dtype of the model, unless the script computes in the dtype of the export."""
    dtypes = {fact.value.dtype for fact in written.of_kind("parameter")}
    computed = {row["dtype"] for row in written.notes if row["code"] == "low_precision"}
    computed |= {row["dtype"] for row in written.rows("activation")}
    for row in written.rows("exported"):
        bits = BITS.get(row["dtype"], 64)
        if dtypes and row["dtype"] not in dtypes | computed and bits < min(BITS.get(dtype, 64) for dtype in dtypes):
            yield Difference(
                step=row["step"],
                kind="exported",
                name=row["name"],
                text=f"is {row['dtype']}, and the model is {', '.join(sorted(dtypes))}",
                code="export_dtype",
            )
