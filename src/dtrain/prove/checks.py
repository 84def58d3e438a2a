"""Find contradictions inside one run, without another run (``check_record``): frozen parameters that change, repeated orders.

On several ranks, what all ranks must share is compared between them.
"""

from __future__ import annotations

from collections.abc import Iterator

from dtrain.prove.compare import TOLERANCE, Difference
from dtrain.prove.run_records import Row, RunRecord, matching_name


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
