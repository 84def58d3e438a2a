"""Find mistakes in one run (``check_record``), runs that train nothing (``check_training``), and changes by a script's dtypes.

Contradictions inside a run need no other run: frozen parameters that change, repeated orders, ranks that differ where they
must agree. The size of an error that rounding explains is measured by a run whose modules round in another way.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dtrain.arguments import format_count
from dtrain.prove.compare import (
    MAX_ROUNDING,
    STATISTICS,
    TOLERANCE,
    Comparison,
    Difference,
    FactKey,
    compare_records,
    describe_names,
    metric_name,
    reduced_in_update,
    relative_difference,
)
from dtrain.prove.run_config import BASE, MOVE
from dtrain.prove.run_records import BITS, TENSORS, Fact, LossFact, Row, RunRecord, matching_name

FAR = 8.0
"""An error of this many times the measured effect of rounding is not rounding. Weights are rounded, too."""

_SUMS = 256 * 2.0 ** -BITS["float32"]
"""A sum over samples in float32 is rounded at each of its terms. Outputs of modules do not show this."""


def check_record(record: RunRecord) -> list[Difference]:
    """Return the contradictions of a run, at most one of each kind."""
    weights = _between_ranks(record, "initial", "differs between ranks", "weights_differ_between_ranks")
    # Ranks with other weights have other gradients.
    differs = "differs between ranks when the optimizer runs"
    exports = list(_check_evaluated_exports(record)) or list(_check_reloaded_exports(record))
    reduced = reduced_in_update(record)
    gradients = [] if weights else _between_ranks(record, "gradient", differs, "gradient_not_reduced", without=reduced)
    contradictions = (
        *weights,
        *_check_optimizers(record),
        *gradients,
        *_check_modes(record),
        *_check_steps(record),
        *_check_frozen(record),
        *_check_frozen_statistics(record),
        # A teacher may run on samples of its own.
        *(list(_check_teachers(record)) or _check_dropout(record)),
        *_check_averages(record),
        *_check_epochs(record),
        *_check_workers(record),
        *_check_loop(record),
        *_check_random_state(record),
        *exports,
    )
    return sorted(_first_of_each_kind(contradictions), key=lambda difference: difference.step)


def check_training(record: RunRecord) -> str:
    """Return why nothing in a run could show a mistake, such as a loss of NaN in all runs; "" if the run trains."""
    steps, gradients = record.steps, record.of_kind("gradient")
    losses = [(fact.step, fact.value.total) for fact in record.of_kind("loss") if fact.value.count]
    if not steps:
        return "no update of an optimizer was seen; give the arguments with which the script trains"
    for step, loss in losses:
        if not math.isfinite(loss):
            return f"the loss of step {step} is {loss:g}"
    for fact in gradients:
        if not math.isfinite(fact.value.norm):
            return f"the gradient of {fact.name} in step {fact.step} has the norm {fact.value.norm:g}"
    # A policy gradient may have a loss of 0, and a gradient.
    if not any(fact.value.norm for fact in gradients):
        if losses and not any(loss for _, loss in losses):
            return "the loss is 0 in every step"
        if gradients:
            return "the gradients are 0 in every step"
    values: dict[str, list[str]] = {}
    for fact in (*record.of_kind("initial"), *record.of_kind("parameter")):
        values.setdefault(fact.name, []).append(fact.value.digest)
    for row in record.rows("optimizer"):
        # A model that was seen after its first update has one value.
        digests = [values[name] for name in row.get("names", ()) if len(values.get(name, ())) > 1]
        if digests and all(len(set(own)) == 1 for own in digests):
            rates = {
                rate for fact in record.of_kind("lr") if fact.optimizer_index == row["optimizer_index"] for rate in fact.value
            }
            why = ", because its learning rate is 0; give arguments of a longer run" if rates == {0.0} else ""
            return f"no parameter of {row['optimizer']} changes{why}"
    return ""


def _first_of_each_kind(differences: Sequence[Difference]) -> list[Difference]:
    first: dict[str | None, Difference] = {}
    for difference in differences:
        first.setdefault(difference.code, difference)
    return list(first.values())


def _contradiction(code: str, step: int, kind: str, name: str, text: str, **more: Any) -> Difference:
    return Difference(code=code, step=step, kind=kind, name=name, text=text, **more)


def _between_ranks(record: RunRecord, kind: str, text: str, code: str, without: Collection[FactKey] = ()) -> list[Difference]:
    """Find tensors that all ranks must hold alike, and that differ: initial weights, gradients when the optimizer runs."""
    differences = []
    for fact in record.of_kind(kind):
        ranks = tuple(rank for rank, digest in enumerate(fact.by_rank) if digest not in (None, fact.value.digest))
        if ranks and not fact.value.is_buffer and fact.key not in without:
            differences.append(_contradiction(code, fact.step, kind, fact.name, text, ranks=ranks))
    return differences


def _check_optimizers(record: RunRecord) -> Iterator[Difference]:
    """The optimizer must have parameters of the model.

    A script with several optimizers may train a model that was not seen. So nothing is reported if one of them has parameters
    of the model, or if the model changes, as by copies of the parameters that the optimizer has.
    """
    values: dict[str, set[str]] = {}
    for kind in ("initial", "parameter", "changed"):
        for row in record.rows(kind):
            values.setdefault(row["name"], set()).update([row["digest"]] * (not row.get("buffer")))
    if any(len(digests) > 1 for digests in values.values()):
        return
    rows = [row for row in record.rows("optimizer") if row["params"]]
    if all(len(row["unknown"]) == row["params"] for row in rows):
        for row in rows:
            text = f"has {row['params']} parameters, of which the model has none"
            yield _contradiction("optimizer_before_sharding", row["step"], "optimizer", row["optimizer"], text)


def _check_steps(record: RunRecord) -> Iterator[Difference]:
    """Check random numbers of ranks with different samples, epochs of the microbatches of an update, and clipping."""
    for step in record.steps:
        rows = record.step_rows(step)
        different = len({tuple(row["samples"]) for row in rows}) > 1
        if len(rows) > 1 and different and all(row["draws"] for row in rows) and len({row["rng"] for row in rows}) == 1:
            text = f"is equal on all {len(rows)} ranks, and the forward draws from it"
            code = "same_dropout_on_ranks" if any(row.get("drops") for row in rows) else "same_noise_on_ranks"
            yield _contradiction(code, step, "rng", "", text)
    for row in record.rows("step"):
        if len(set(row["epochs"])) > 1:
            text = f"of {len(row['epochs'])} microbatches are of two epochs"
            yield _contradiction("accumulation_tail_dropped", row["step"], "samples", "", text)
        events = [event.split(":")[0] for event in row["events"]]
        before = events[: events.index("clip")] if "clip" in events else []
        if "scale" in before and "unscale" not in before:
            text = "is clipped after scaler.scale and before scaler.unscale_"
            yield _contradiction("clip_before_unscale", row["step"], "gradient", "", text)


def _check_modes(record: RunRecord) -> Iterator[Difference]:
    """All ranks must have the same modules in training mode, and the same parameters that train."""
    for kind, code in (("mode", "mode_differs"), ("frozen", "frozen_differs")):
        for fact in record.of_kind(kind):
            ranks = tuple(rank for rank, names in enumerate(fact.by_rank) if set(names) != set(fact.value))
            if ranks:
                text = describe_names(fact.value, fact.by_rank[ranks[0]], " between ranks")
                yield _contradiction(code, fact.step, kind, fact.name, text, ranks=ranks)


def _check_frozen_statistics(record: RunRecord) -> Iterator[Difference]:
    """The running statistics of a module whose parameters are all frozen must not change."""
    last = {fact.name: fact for fact in record.of_kind("initial") if fact.value.is_buffer}
    for step in record.steps:
        trains: dict[str, bool] = {}
        for fact in record.of_kind("parameter", step):
            module = fact.name.rpartition(".")[0]
            trains[module] = trains.get(module, False) or fact.value.trains
        for fact in record.of_kind("buffer", step):
            before = last.get(fact.name)
            is_frozen = fact.name.endswith(STATISTICS) and not trains.get(fact.name.rpartition(".")[0], True)
            if before is not None and is_frozen and any(trains.values()) and before.value.digest != fact.value.digest:
                text = "changes, and the parameters of its module are frozen"
                yield _contradiction("frozen_statistics_change", step, "buffer", fact.name, text)
            last[fact.name] = fact


def _check_dropout(record: RunRecord) -> Iterator[Difference]:
    """An evaluation must not draw, unless it runs the samples of a step, as a first pass of the step does."""
    for row in record.rows("evaluation"):
        trained = {sample for step in record.step_rows(row["step"], row["optimizer_index"]) for sample in step["samples"]}
        evaluated = {sample for batch in row["batches"] for sample in batch}
        names = row.get("dropout", ())
        if names and not evaluated & trained:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            text = f"run with dropout in {names[0]}{more}"
            yield _contradiction("evaluation_with_dropout", row["step"], "evaluation", "an evaluation", text)


def _check_averages(record: RunRecord) -> Iterator[Difference]:
    """An average of the weights must not move between the backward of a step and its update."""
    for row in record.rows("early_average"):
        text = f"moves toward {row['parameter']} after the backward, before the optimizer changes it"
        yield _contradiction("average_before_update", row["step"], "average", row["name"], text)


def _check_teachers(record: RunRecord) -> Iterator[Difference]:
    """A model that nothing changes, beside models that train, must be in evaluation mode.

    A copy of a model may be an average that a later step updates, and averages may run with dropout on purpose.
    """
    trained = {name for row in record.rows("optimizer") for name in row.get("names", ())}
    digests: dict[str, set[str]] = {}
    for fact in (*record.of_kind("initial"), *record.of_kind("parameter")):
        digests.setdefault(fact.name, set()).add(fact.value.digest)
    of_trained = {digest for name in trained for digest in digests.get(name, ())}
    for note in record.notes:
        names = note["parameters"] if note["code"] == "teacher" else ()
        values = [digests.get(name, set()) for name in names]
        if not values or not trained or trained & set(names) or any(len(digest) != 1 for digest in values):
            continue
        if sum(bool(digest & of_trained) for digest in values) * 2 <= len(values):
            text = "of a model that no optimizer trains runs in training mode"
            yield _contradiction("teacher_in_training_mode", note["step"], "module", note["modules"][0], text)


def _check_frozen(record: RunRecord) -> Iterator[Difference]:
    """A parameter of an optimizer with ``requires_grad=False`` must not change."""
    trained = {name for row in record.rows("optimizer") for name in row.get("names", ())}
    last = {fact.name: fact for fact in record.of_kind("initial")}
    for fact in record.of_kind("parameter"):
        before = last.get(fact.name)
        frozen = before is not None and not before.value.trains and not fact.value.trains
        if before is not None and frozen and fact.name in trained and before.value.digest != fact.value.digest:
            text = "has requires_grad=False and changes"
            yield _contradiction("frozen_parameter_trains", fact.step, "parameter", fact.name, text)
        last[fact.name] = fact


def _training_passes(record: RunRecord) -> Iterator[Row]:
    """Yield the passes over loaders that have updates, or all passes if the steps do not say their loaders.

    A pass after the last step has no batch, and may be one of training.
    """
    passes = [(place, row) for place, row in enumerate(record.ranks[0]) if row["kind"] == "pass"]
    steps = [(place, row.get("loaders", ())) for place, row in enumerate(record.ranks[0]) if row["kind"] == "step"]
    if not any(loaders for _, loaders in steps):
        yield from (row for _, row in passes)
        return
    of_training = {loader for _, loaders in steps for loader in loaders}
    for begin, row in passes:
        loader = row["loader"]
        end = next((place for place, other in passes if place > begin and other["loader"] == loader), len(record.ranks[0]))
        has_step = any(begin < place < end and loader in loaders for place, loaders in steps)
        if has_step or (row.get("is_over") and row.get("grad") and loader in of_training):
            yield row


def _check_epochs(record: RunRecord) -> Iterator[Difference]:
    """Two passes over a sampler that shuffles must have two epochs."""
    last: dict[int, Row] = {}
    for row in _training_passes(record):
        before, last[row["loader"]] = last.get(row["loader"]), row
        if before is None:
            continue
        if row["shuffle"] and row["epoch"] is not None and (before["epoch"], before["seed"]) == (row["epoch"], row["seed"]):
            text = f"have the order of epoch {row['epoch']} in two passes of {row['sampler']}"
        elif row.get("repeats") and before.get("order") == row["order"]:
            text = f"have one order in two passes of {row['ordered_by']}, and its set_epoch gives another one"
        else:
            continue
        yield _contradiction("shuffle_without_epoch", row["step"], "samples", "", text)


def _check_workers(record: RunRecord) -> Iterator[Difference]:
    """The workers of a stream must read other samples, unless the stream has one batch."""
    workers = {(row["loader"], row["number"]): row.get("workers", 0) for row in _training_passes(record)}
    for (loader, number), count in workers.items():
        batches = [
            tuple(row["samples"])
            for row in record.rows("read")
            if (row["loader"], row.get("number")) == (f"loader-{loader}", number) and row["samples"]
        ]
        rounds = [batches[begin : begin + count] for begin in range(0, len(batches) - count + 1, count)] if count > 1 else []
        if rounds and all(len(set(one)) == 1 for one in rounds) and len(set(batches)) > 1:
            text = (
                f"of all {count} workers of the loader are the same, in {format_count(len(rounds), 'batch', 'batches')} of each"
            )
            yield _contradiction("workers_read_the_same", 0, "samples", "", text)


def _check_loop(record: RunRecord) -> Iterator[Difference]:
    """Find early clipping, losses with parameters that no optimizer has, and kept state dicts that updates change."""
    for row in record.rows("early_clip"):
        text = f"is clipped after {row['after']} of {row['backwards']} backwards that add to it"
        yield _contradiction("clip_before_accumulation", row["step"], "gradient", "the step", text)
    last = max(record.steps, default=0)
    for row in record.rows("untrained"):
        if row["step"] == last:
            text = f"gets a gradient with the norm {row['norm']:.3g}, and no optimizer has it"
            yield _contradiction("loss_parameter_not_trained", row["step"], "parameter", row["name"], text)
    for row in record.rows("stale_weights"):
        taken = format_count(row["taken"], "update")
        text = f"was taken after {taken}, and has the weights after {row['used']} of them in {row['place']}"
        yield _contradiction("kept_weights_change", row["used"], "state dict", "", text)


def _check_random_state(record: RunRecord) -> Iterator[Difference]:
    """Two steps that draw must not begin with the same random state, as after an evaluation that sets the seed again."""
    if record.name != BASE:
        # Runs on several ranks restore the state after each forward.
        return
    first: dict[tuple[int, str], int] = {}
    for row in record.rows("step"):
        if row["draws"] and (before := first.setdefault((row["optimizer_index"], row["rng"]), row["step"])) < row["step"]:
            text = f"is that of step {before}, so the step draws the same numbers"
            yield _contradiction("random_numbers_repeat", row["step"], "rng", "", text)


def _check_evaluated_exports(record: RunRecord) -> Iterator[Difference]:
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
                text = "is the trained weight; the last evaluation ran other weights"
                yield _contradiction("export_without_ema", row["step"], "exported", row["name"], text)


def _check_reloaded_exports(record: RunRecord) -> Iterator[Difference]:
    """A model with the exported weights must give the outputs of the evaluated model, for one of the files of a step."""
    best: dict[int, Row] = {}
    for row in record.rows("export_check"):
        best[row["step"]] = min(best.get(row["step"], row), row, key=lambda row: float(row["error"]))
    for step, row in best.items():
        if row["error"] > TOLERANCE:
            missing, more = row["missing"], len(row["missing"]) - 1
            facts = [f"loaded again gives outputs that differ by {row['error']:.2g} of their norm", *row["shapes"][:1]]
            if missing:
                facts.append(f"the file lacks {missing[0]}{f' and {more} more' if more else ''}")
            yield _contradiction("export_differs", step, "exported", row["path"], "; ".join(facts), relative=row["error"])


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleError:
    """Errors of a module's output in the first step, all relative to the norm in float32.

    Args:
        name: module.
        kind: class of the module.
        dtype: dtype of the output.
        output: difference of the output from float32.
        gradient: difference of the output's gradient from float32; None if there is none.
        rounding: difference of the output if the modules round in another way, and at least one rounding of ``dtype``.
        gradient_rounding: the same for the output's gradient.
        own: True for a module with parameters of its own.
        leaf: True for a module without submodules.
        step: the step.
    """

    name: str
    kind: str
    dtype: str
    output: float
    gradient: float | None
    rounding: float
    gradient_rounding: float
    own: bool
    leaf: bool
    step: int

    @property
    def is_far(self) -> bool:
        """True if rounding does not explain the error."""
        return self.output > FAR * self.rounding

    @property
    def has_other_gradient(self) -> bool:
        """True if rounding does not explain the error of the gradient. Counts that overflow give an error of 1, or NaN."""
        return self.gradient is not None and not self.gradient <= max(MAX_ROUNDING, FAR * self.gradient_rounding)


def compare_precision(exact: RunRecord | None, written: RunRecord, rounded: RunRecord | None) -> list[Difference]:
    """Return what the script's dtypes change more than rounding explains, at most one of each kind.

    Args:
        exact: record of the run in float32; None if the script computes in nothing smaller.
        written: record of the run in the script's own dtypes.
        rounded: record of the run in these dtypes whose modules round in another way.
    """
    differences = [*_rounded_sums(written), *_rounded_exports(written)]
    if exact is not None and rounded is not None:
        # A rounded buffer explains the errors of modules.
        modules = module_errors(exact, written, rounded)
        rounded_values = (
            list(_rounded_buffers(exact, written))
            or list(_imprecise_modules(modules))
            or list(_other_gradients(modules, written))
        )
        differences = [*rounded_values, *differences]
    return _first_of_each_kind(differences)


def module_errors(exact: RunRecord, written: RunRecord, rounded: RunRecord) -> list[ModuleError]:
    """Return the errors of all modules in the first forward and backward, in the order of the program."""
    gradients = dict(_relative(exact, written, "activation_gradient"))
    measured, measured_gradients = (dict(_relative(written, rounded, kind)) for kind in ("activation", "activation_gradient"))
    rows = {row["name"]: row for row in reversed(written.rows("activation"))}
    errors = []
    for name, error in _relative(exact, written, "activation"):
        row = rows[name]
        unit = 2.0 ** -BITS.get(row["dtype"], 53)
        errors.append(
            ModuleError(
                name=name,
                kind=row["kind_of"],
                dtype=row["dtype"],
                output=error,
                gradient=gradients.get(name),
                rounding=max(unit, measured.get(name, 0.0)),
                gradient_rounding=max(unit, measured_gradients.get(name, 0.0)),
                own=row["own"],
                leaf=row["leaf"],
                step=row["step"],
            )
        )
    return errors


def rounding_of(reference: RunRecord, rounded: Sequence[RunRecord]) -> Mapping[FactKey, float]:
    """Return the relative difference that is rounding for each fact: the effect of other rounding, enlarged.

    The effect on a tensor is at least the median of its kind and step. The effect on a number is the largest of all steps,
    because a number has too few changes in one step to measure their size.
    """
    effects: dict[FactKey, float] = {}
    for record in rounded:
        for fact, relative in compare_records(reference, record, same_layout=False).relative:
            effects[_group(fact)] = max(effects.get(_group(fact), 0.0), relative)
    kinds: dict[tuple[int, str], list[float]] = {}
    for (step, _, kind, _), relative in effects.items():
        kinds.setdefault((step, kind), []).append(relative)
    typical = {kind: statistics.median(relatives) for kind, relatives in kinds.items()}
    return {
        fact.key: max(_SUMS, FAR * max(effects[_group(fact)], typical[_group(fact)[0], fact.kind]))
        for fact in reference.facts.values()
        if _group(fact) in effects
    }


def _group(fact: Fact) -> FactKey:
    """Return the key of a tensor, or of a number in all steps."""
    return fact.key if fact.kind in TENSORS else (-1, fact.optimizer_index, fact.kind, metric_name(fact))


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
            text = f"is {fact.value.dtype}, and its values differ by up to {error:.3g} from those before the cast"
            yield _contradiction("buffer_rounded", fact.step, "buffer", fact.name, text, relative=error)


def _imprecise_modules(errors: list[ModuleError]) -> Iterator[Difference]:
    """The first module whose error rounding does not explain loses digits by itself. The later modules follow from it."""
    first = next((error for error in errors if error.leaf and error.is_far), None)
    if first is not None:
        code = "low_precision_error" if first.own else "rotary_rounded"
        text = f"differs by {first.output:.2g} of its norm from float32, and other rounding changes {first.rounding:.2g}"
        yield _contradiction(code, first.step, "output of", first.name, text, relative=first.output)


def _other_gradients(errors: list[ModuleError], written: RunRecord) -> Iterator[Difference]:
    """The last module with another gradient is nearest to the loss. The gradients of earlier modules follow from it."""
    last = next((error for error in reversed(errors) if error.has_other_gradient), None)
    # A scaler begins with a scale that overflows, and skips these steps.
    is_scaled = any("scale" in row["events"] for row in written.rows("step"))
    if last is not None and last.gradient is not None and (math.isfinite(last.gradient) or not is_scaled):
        text = (
            f"differs by {last.gradient:.2g} of its norm from float32, and other rounding changes {last.gradient_rounding:.2g}"
        )
        yield _contradiction(
            "gradient_lost", last.step, "gradient of the output of", last.name or "the model", text, relative=last.gradient
        )


def rounding_hides(comparison: Comparison) -> tuple[str, bool]:
    """Return how many facts rounding hides, "" without such facts; and True if all gradients are among them."""
    hidden, shown = comparison.coarse, [fact for fact, _ in comparison.relative]
    hides_gradients = any(fact.kind == "gradient" for fact in hidden) and not any(fact.kind == "gradient" for fact in shown)
    text = f"rounding hides {len(hidden)} of {len(hidden) + len(shown)} facts, which it changes by more than {MAX_ROUNDING:g}"
    return text if hidden else "", hides_gradients


def _rounded_sums(written: RunRecord) -> Iterator[Difference]:
    """A sum of many numbers must not lose its last terms, which are smaller than the roundings of the sum."""
    for row in written.rows("lost_sum"):
        text = f"is {row['value']:g} in {row['dtype']} after {row['terms']} terms, and {row['total']:g} in float64"
        yield _contradiction("sum_rounded", row["step"], "sum", f"at {row['place']}", text)


def _rounded_exports(written: RunRecord) -> Iterator[Difference]:
    """An export must have the dtype of the model, unless the script computes in the dtype of the export."""
    dtypes = {fact.value.dtype for fact in written.of_kind("parameter")}
    computed = {row["dtype"] for row in written.notes if row["code"] == "low_precision"}
    computed |= {row["dtype"] for row in written.rows("activation")}
    for row in written.rows("exported"):
        bits = BITS.get(row["dtype"], 64)
        if dtypes and row["dtype"] not in dtypes | computed and bits < min(BITS.get(dtype, 64) for dtype in dtypes):
            text = f"is {row['dtype']}, and the model is {', '.join(sorted(dtypes))}"
            yield _contradiction("export_dtype", row["step"], "exported", row["name"], text)


def slope_ratios(
    moved: Sequence[tuple[RunRecord, RunRecord]], runs: tuple[RunRecord, RunRecord], place: tuple[int, int]
) -> tuple[float, float] | None:
    """Return the gradient along the move of a parameter over the finite difference of the loss, for each of two runs.

    Args:
        moved: for each run, its repetitions with the parameter moved up, and down by as much.
        runs: the two runs as they are.
        place: step and number of the optimizer.

    Returns:
        None if a loss or a gradient is missing, or a loss does not change.
    """
    losses = [[_loss(run, place) for run in pair] for pair in (*moved, runs)]
    if any(loss is None for pair in losses for loss in pair):
        return None
    *pairs, (first, second) = [[loss for loss in pair if loss is not None] for pair in losses]
    # Without weights, a loop may sum over ranks.
    is_mean = relative_difference(first.mean, second.mean) <= TOLERANCE
    ratios = []
    for (up, down), records in zip(pairs, moved, strict=True):
        rows = [[row for row in run.rows("slope") if (row["step"], row["optimizer_index"]) == place] for run in records]
        change = (up.mean - down.mean) if is_mean else (up.total - down.total)
        if not change or not all(rows):
            return None
        ratios.append(MOVE * sum(found[0]["slope"] for found in rows) / change)
    return ratios[0], ratios[1]


def _loss(record: RunRecord, place: tuple[int, int]) -> LossFact | None:
    """Return the loss of a step; None without one."""
    facts = (fact for fact in record.of_kind("loss", place[0]) if fact.optimizer_index == place[1] and fact.value.count)
    return next((fact.value for fact in facts), None)
