"""Find contradictions inside one run, without another run (``check_record``): frozen parameters that change, repeated orders.

On several ranks, what all ranks must share is compared between them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dtrain.prove.compare import TOLERANCE, Difference, compare_records
from dtrain.prove.run_records import BITS, TENSORS, Row, RunRecord, matching_name


def check_record(record: RunRecord) -> list[Difference]:
    """Return the contradictions of a run, at most one of each kind."""
    found: dict[str, Difference] = {}
    for check in (_weights, _optimizer, _gradients, _random, _frozen, _epochs, _accumulation, _clipping, _exports):
        for difference in check(record):
            found.setdefault(str(difference.code), difference)
    return sorted(found.values(), key=lambda difference: difference.step)


def _weights(record: RunRecord) -> Iterator[Difference]:
    """Ranks must begin with equal weights."""
    for fact in record.of_kind("initial"):
        known = {digest for digest in fact.by_rank if digest is not None}
        if len(known) > 1 and not fact.value.is_buffer:
            ranks = tuple(rank for rank, digest in enumerate(fact.by_rank) if digest not in (None, fact.value.digest))
            yield Difference(
                step=fact.step,
                kind="initial",
                name=fact.name,
                text="differs between ranks",
                ranks=ranks,
                code="weights_differ_between_ranks",
            )


def _optimizer(record: RunRecord) -> Iterator[Difference]:
    """The optimizer must have parameters of the model.

    A script with several optimizers may train a model that was not seen. So nothing is reported if one of them has parameters
    of the model.
    """
    rows = [row for row in record.rows("optimizer") if row["params"]]
    if all(len(row["unknown"]) == row["params"] for row in rows):
        for row in rows:
            yield Difference(
                step=row["step"],
                kind="optimizer",
                name=row["optimizer"],
                text=f"has {row['params']} parameters, of which the model has none",
                code="optimizer_before_sharding",
            )


def _gradients(record: RunRecord) -> Iterator[Difference]:
    """Ranks with plain parameters must apply equal gradients, if they began with equal weights."""
    if any(True for _ in _weights(record)):
        return
    for fact in record.of_kind("gradient"):
        known = {digest for digest in fact.by_rank if digest is not None}
        if len(known) > 1:
            ranks = tuple(rank for rank, digest in enumerate(fact.by_rank) if digest not in (None, fact.value.digest))
            yield Difference(
                step=fact.step,
                kind="gradient",
                name=fact.name,
                text="differs between ranks when the optimizer runs",
                ranks=ranks,
                code="gradient_not_reduced",
            )


def _random(record: RunRecord) -> Iterator[Difference]:
    """Ranks with different samples must draw different random numbers."""
    for step in record.steps:
        rows = record.step_rows(step)
        different = len({tuple(row["samples"]) for row in rows}) > 1
        if len(rows) > 1 and different and all(row["draws"] for row in rows) and len({row["rng"] for row in rows}) == 1:
            yield Difference(
                step=step,
                kind="rng",
                name="",
                text=f"is equal on all {len(rows)} ranks, and the forward draws from it",
                code="same_dropout_on_ranks",
            )


def _frozen(record: RunRecord) -> Iterator[Difference]:
    """A parameter of an optimizer with ``requires_grad=False`` must not change."""
    trained = {name for row in record.rows("optimizer") for name in row.get("names", ())}
    last = {fact.name: fact for fact in record.of_kind("initial")}
    for fact in record.of_kind("parameter"):
        before = last.get(fact.name)
        frozen = before is not None and not before.value.trains and not fact.value.trains
        if before is not None and frozen and fact.name in trained and before.value.digest != fact.value.digest:
            yield Difference(
                step=fact.step,
                kind="parameter",
                name=fact.name,
                text="has requires_grad=False and changes",
                code="frozen_parameter_trains",
            )
        last[fact.name] = fact


def _epochs(record: RunRecord) -> Iterator[Difference]:
    """Two passes over a shuffled sampler must have two epochs."""
    first: dict[int, object] = {}
    for row in record.rows("pass"):
        if row["shuffle"] and row["epoch"] is not None:
            if row["number"] and first.get(row["loader"]) == row["epoch"]:
                yield Difference(
                    step=row["step"],
                    kind="samples",
                    name="",
                    text=f"have the order of epoch {row['epoch']} in each pass of {row['sampler']}",
                    code="shuffle_without_epoch",
                )
            first[row["loader"]] = row["epoch"]


def _accumulation(record: RunRecord) -> Iterator[Difference]:
    """The microbatches of one update must be of one epoch."""
    for row in record.rows("step"):
        if len(set(row["epochs"])) > 1:
            yield Difference(
                step=row["step"],
                kind="samples",
                name="",
                text=f"of {len(row['epochs'])} microbatches are of two epochs",
                code="accumulation_tail_dropped",
            )


def _clipping(record: RunRecord) -> Iterator[Difference]:
    """Clipping between ``scale`` and the update needs ``unscale_`` before."""
    for row in record.rows("step"):
        events = [event.split(":")[0] for event in row["events"]]
        if "scale" in events and "clip" in events:
            before = events[: events.index("clip")]
            if "scale" in before and "unscale" not in before:
                yield Difference(
                    step=row["step"],
                    kind="gradient",
                    name="",
                    text="is clipped after scaler.scale and before scaler.unscale_",
                    code="clip_before_unscale",
                )


def _exports(record: RunRecord) -> Iterator[Difference]:
    """Exported weights must be those that were evaluated last, or those of the model if it was not evaluated."""
    evaluated: dict[str, tuple[str, bool]] = {}
    current: dict[str, str] = {}
    for row in record.ranks[0]:
        if row["kind"] == "evaluated_weight":
            # An average differs from the trained weights of its step.
            evaluated[row["name"]] = row["digest"], row["digest"] != current.get(row["name"])
        elif row["kind"] == "parameter":
            current[row["name"]] = row["digest"]
        elif row["kind"] == "exported":
            name = matching_name(row["name"], evaluated)
            if name is not None and evaluated[name][1] and row["digest"] == current.get(name) != evaluated[name][0]:
                yield Difference(
                    step=row["step"],
                    kind="exported",
                    name=row["name"],
                    text="is the trained weight; the last evaluation ran other weights",
                    code="export_without_ema",
                )
                return
    yield from _reloaded(record)


def _reloaded(record: RunRecord) -> Iterator[Difference]:
    """A model with the exported weights must give the outputs of the evaluated model, for one of the files of a step."""
    by_step: dict[int, list[Row]] = {}
    for row in record.rows("export_check"):
        by_step.setdefault(row["step"], []).append(row)
    for step, rows in by_step.items():
        best = min(rows, key=lambda row: float(row["error"]))
        if best["error"] <= TOLERANCE:
            continue
        missing = best["missing"]
        facts = list(best["shapes"][:1])
        if missing:
            facts.append(f"the file lacks {missing[0]}{f' and {len(missing) - 1} more' if len(missing) > 1 else ''}")
        text = f"loaded again gives outputs that differ by {best['error']:.2g} of their norm{''.join(f'; {f}' for f in facts)}"
        yield Difference(
            step=step, kind="exported", name=best["path"], text=text, relative=best["error"], code="export_differs"
        )


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
    differences = [*_rounded_exports(written)]
    if exact is not None and rounded is not None:
        # A rounded buffer explains the errors of modules.
        rounded_values = list(_rounded_buffers(exact, written)) or list(
            _imprecise_modules(module_errors(exact, written, rounded))
        )
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


def _rounded_buffers(exact: RunRecord, written: RunRecord) -> Iterator[Difference]:
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


def _imprecise_modules(errors: list[ModuleError]) -> Iterator[Difference]:
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


def _rounded_exports(written: RunRecord) -> Iterator[Difference]:
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
