"""Find the likely causes of a difference from the evidence in the records (``explain``). Pure, without torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dtrain.prove.causes import Cause, cause
from dtrain.prove.compare import STATISTICS, Difference, relative_difference
from dtrain.prove.run_config import SKETCH_SIZE, RunConfig
from dtrain.prove.run_records import Fact, RunRecord

_NEARLY_EQUAL = 1e-6
_NEARLY_CLIPPED = 1e-3
# Calls of the script that combine the numbers of ranks.
_REDUCTIONS = frozenset(
    {"all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "reduce", "reduce_sum", "reduce_mean"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Evidence:
    """The first difference of two runs, and both records."""

    difference: Difference
    record: RunRecord
    reference: RunRecord
    config: RunConfig

    @property
    def values(self) -> tuple[Any, Any]:
        """The fact's value in the reference and in the run that differs."""
        first, second = self.difference.reference, self.difference.other
        return None if first is None else first.value, None if second is None else second.value


def explain(
    difference: Difference,
    record: RunRecord,
    reference: RunRecord | None,
    config: RunConfig,
    resumed: bool,
) -> tuple[Cause, ...]:
    """Return the causes that the first difference between ``record`` and ``reference`` may have, the likeliest first.

    The causes after one that the records show do not count.

    Args:
        difference: the first difference.
        record: record of the run that differs.
        reference: record of the other run; None for a check of one run.
        config: the run that differs.
        resumed: if True, the run continues a killed run.
    """
    if difference.code is not None:
        return (cause(difference.code, difference.kind),)
    assert reference is not None, "a difference without a code comes from a comparison"
    if config.name.endswith("again"):
        return (cause("not_deterministic"),)
    if difference.kind in ("mode", "frozen"):
        return (cause(f"{difference.kind}_differs"),)
    if resumed:
        if again := _inputs_that_begin_again(difference, reference):
            return (replace(cause("state_not_saved", "variable"), evidence=again),)
        code = _of_resume(difference, record, reference)
        if code == "parameters_not_saved" and (part := _part_that_begins_again(record, reference, difference.step)):
            return (replace(cause("shards_not_saved"), evidence=part),)
        is_same = len(record.ranks) == len(reference.ranks)
        if code == "unknown" and is_same and (lost := _lost_variable(record, reference, difference.step)):
            return (replace(cause("state_not_saved", "variable"), evidence=lost),)
        return (cause(code, difference.kind),)
    if not config.recompute:
        draws = difference.kind == "gradient" and any(row["draws"] for row in reference.step_rows(difference.step))
        return (cause("recompute_draws_again" if draws else "counter_doubled_by_recompute"),)
    return _of_layout(_Evidence(difference=difference, record=record, reference=reference, config=config))


def _of_layout(evidence: _Evidence) -> tuple[Cause, ...]:
    """Return the causes of a difference between layouts."""
    kind, (a, b) = evidence.difference.kind, evidence.values
    if kind == "loss":
        return _of_loss(evidence)
    if kind == "gradient":
        return _of_gradient(evidence)
    if kind in ("samples", "lr"):
        return (cause((_of_samples if kind == "samples" else _of_lr)(evidence)),)
    # A loop by hand is seen after its first forward, which has changed the statistics.
    is_buffer = kind == "buffer" or (kind == "initial" and evidence.difference.name.endswith(STATISTICS))
    if is_buffer and evidence.record.note("batch_norm") is not None:
        return (cause("local_batch_norm"),)
    if kind in ("buffer", "initial") and evidence.difference.ranks and _is_updated(evidence):
        return (cause("buffer_of_rank"),)
    other = evidence.difference.other
    # Only rank 0 writes a sharded parameter. Its gradients agree, unless the optimizer has none of them.
    if kind == "parameter" and other is not None and set(other.by_rank[1:]) == {None}:
        gradient = other.step, other.optimizer_index, "gradient", other.name
        return (cause("update_of_shard" if gradient in evidence.record.facts else "unknown"),)
    if kind == "evaluation":
        return (cause("evaluation_counts_twice" if sum(b.values()) > sum(a.values()) else "evaluation_drops_tail"),)
    if kind == "metric" and evidence.difference.other is not None:
        if len(numbers := _numbers_of_ranks(evidence)) > 1:
            text = f"Ranks have other numbers: {' and '.join(f'{number:.6g}' for number in numbers[:2])}."
            return (replace(cause("metric_of_rank_0"), shown=True, evidence=text),)
        # A metric of several ranks needs a collective between the evaluation and the log.
        events = {event.split(":")[0] for event in evidence.difference.other.by_rank[0].get("events", ())}
        is_mean = evidence.config.ranks == 1 or events & _REDUCTIONS
        return (cause("metric_mean_of_means" if is_mean else "metric_of_rank_0"),)
    # Initial values that depend on the ranks belong to a model that is built in two ways, as on the meta device.
    return (cause("adapter_init" if kind == "initial" else "unknown"),)


def _is_updated(evidence: _Evidence) -> bool:
    """Return True if a buffer changes from step to step, as statistics of samples do."""
    name = evidence.difference.name
    values = {
        fact.value.digest for kind in ("initial", "buffer") for fact in evidence.reference.of_kind(kind) if fact.name == name
    }
    return evidence.values[0].is_buffer and len(values) > 1


def _numbers_of_ranks(evidence: _Evidence) -> list[float]:
    """Return the different numbers that the ranks logged for a metric that differs, that of rank 0 first."""
    difference = evidence.difference
    rows = [row for rank in range(evidence.config.ranks) for row in evidence.record.rows("metrics", rank)]
    numbers = [row["numbers"].get(difference.name) for row in rows if row["source"] == "log" and row["step"] == difference.step]
    return list(dict.fromkeys(number for number in numbers if number is not None))


def _of_resume(difference: Difference, record: RunRecord, reference: RunRecord) -> str:
    kind, fact = difference.kind, difference.reference
    if (kind == "initial" and difference.step == 0) or _begins_again(record, reference):
        return "state_begins_again"
    if kind == "variable" and fact is not None:
        row = fact.value
        if row.get("scaler"):
            return "scaler_not_saved"
        if row["weights"]:
            return "ema_not_saved"
        return "early_stop_not_saved" if _is_best_value(record, reference) else "state_not_saved"
    if kind == "samples" and fact is not None and difference.other is not None:
        # A random input of a model is a sample, too.
        common = sum((fact.value & difference.other.value).values())
        ours, theirs = ([state.value for state in run.of_kind("rng", difference.step)] for run in (record, reference))
        if 4 * common >= sum(fact.value.values()) and ours != theirs:
            return "rng_not_saved"
        return _of_samples_after_resume(fact, difference.other, reference)
    codes = {
        "ties": "tied_weights_untied",
        "rng": "rng_not_saved",
        "generator": "rng_not_saved",
        "optimizer_state": "optimizer_not_saved",
        "lr": "schedule_not_saved",
        "transform": "ema_not_saved",
        "steps": "early_stop_not_saved",
        "metric": "state_not_saved",
    }
    if kind in codes:
        return codes[kind]
    if kind in ("loss", "gradient") and any(row["draws"] for row in reference.step_rows(difference.step)):
        return "rng_not_saved"
    # A resume that begins with this step may have other parameters than the run had after the step before.
    step = difference.step
    saved = {fact.name: fact.value for kind in ("parameter", "buffer") for fact in reference.of_kind(kind, step - 1)}
    loaded = [fact.value.digest == saved[fact.name].digest for fact in record.of_kind("initial", step) if fact.name in saved]
    return "unknown" if all(loaded) else "parameters_not_saved"


def _inputs_that_begin_again(difference: Difference, reference: RunRecord) -> str:
    """Return which inputs have the values of the first step after a resume, in a sentence, if others go on; "" without one."""
    fact, other = difference.reference, difference.other
    if difference.kind != "samples" or fact is None or other is None:
        return ""
    first = next(one for one in reference.of_kind("samples") if one.optimizer_index == fact.optimizer_index)
    names = [name for name, number in fact.fields.items() if other.fields.get(name) != number]
    if len(names) == len(fact.fields) or any(other.fields.get(name) != first.fields.get(name) for name in names):
        return ""
    return (
        f"{' and '.join(names)} of the inputs begin{'s' * (len(names) == 1)} again, and the other inputs go on."
        if names
        else ""
    )


def _lost_variable(record: RunRecord, reference: RunRecord, step: int) -> str:
    """Return which number of the script a resume has lost, in a sentence; "" without one. A later step may overwrite others."""
    end = max(reference.steps, default=0)
    for fact in record.of_kind("variable", step):
        value, names = fact.value, (fact.name, fact.optimizer_index)
        last = [run.facts.get((end, names[1], "variable", names[0])) for run in (reference, record)]
        before = reference.facts.get(fact.key)
        if value["type"] != "number" or before is None or None in last:
            continue
        if all(a is not None and b is not None and a.value["digest"] != b.value["digest"] for a, b in ((before, fact), last)):
            return f"{fact.name} is {value['value']:.6g} instead of {before.value['value']:.6g}."
    return ""


def _begins_again(record: RunRecord, reference: RunRecord) -> bool:
    """Return True if a resume begins with the values that the other run had before its first step."""
    first = {fact.name: fact.value.digest for fact in reference.of_kind("initial", 0)}
    changed = {fact.name for fact in reference.of_kind("parameter") if first.get(fact.name) != fact.value.digest}
    resumed = [fact for fact in record.of_kind("initial") if fact.name in changed]
    return bool(resumed) and all(fact.value.digest == first.get(fact.name) for fact in resumed)


def _part_that_begins_again(record: RunRecord, reference: RunRecord, step: int) -> str:
    """Return how much of a tensor has its first value after a resume, in a sentence; "" if no tensor has a part of it."""
    places = ("initial", 0), ("parameter", step - 1)
    began, saved = ({fact.name: fact.value for fact in reference.of_kind(*place)} for place in places)
    for fact in record.of_kind("initial", step):
        values = [facts[fact.name].sketch for facts in (began, saved) if fact.name in facts]
        if len(values) == 2 and len(values[0]) == len(values[1]) == len(fact.value.sketch) == math.prod(fact.value.shape):
            again, kept = (np.isclose(fact.value.sketch, value, rtol=_NEARLY_EQUAL, atol=0.0) for value in values)
            if (again | kept).all() and (again & ~kept).any() and (kept & ~again).any():
                return f"{int((again & ~kept).sum())} of {len(again)} elements of {fact.name} have their first value."
    return ""


def _is_best_value(record: RunRecord, reference: RunRecord) -> bool:
    """Return True if a variable that differs after a resume began as infinity, or has the value of a metric."""
    metrics = {float(fact.value) for fact in reference.of_kind("metric")}
    for fact in record.of_kind("variable"):
        partner = reference.facts.get(fact.key)
        if partner is not None and fact.value["type"] == "number" and partner.value["digest"] != fact.value["digest"]:
            values = {fact.value["value"], partner.value["value"]}
            if values & {float("inf"), float("-inf")} or any(value in metrics for value in values if value not in (0.0, 1.0)):
                return True
    return False


def _of_samples_after_resume(fact: Fact, partner: Fact, reference: RunRecord) -> str:
    if _same_labels(fact.value, partner.value) and _same_planned(reference, reference):
        integers = {sample.split("/")[0] for sample in fact.value}
        if len(integers) > 1:
            return "augmentation_by_worker"
    for other in reference.of_kind("samples"):
        if other.value == partner.value:
            return "data_repeated_after_resume" if other.step < fact.step else "data_skipped_after_resume"
    before = Counter[str]()
    for other in reference.of_kind("samples"):
        if other.step < fact.step:
            before |= other.value
    seen = sum((partner.value & before).values())
    return "data_repeated_after_resume" if seen * 2 > sum(partner.value.values()) else "data_skipped_after_resume"


def _same_labels(a: Counter[str], b: Counter[str]) -> bool:
    def labels(samples: Counter[str]) -> Counter[str]:
        return Counter(sample.split("/")[0] for sample in samples.elements())

    return labels(a) == labels(b)


def _same_planned(record: RunRecord, reference: RunRecord) -> bool:
    """Return True if the loaders of both runs read the same samples, by index, or if they did not say."""

    def planned(run: RunRecord) -> Counter[tuple[int, int]]:
        return Counter(
            (row["epoch"], number) for rows in run.ranks for row in rows if row["kind"] == "planned" for number in row["ids"]
        )

    return planned(record) == planned(reference)


def _of_samples(evidence: _Evidence) -> str:
    a, b = evidence.values
    assert evidence.difference.other is not None
    by_rank = evidence.difference.other.by_rank
    if len(by_rank) > 1 and all(Counter(samples) == Counter(by_rank[0]) for samples in by_rank):
        return "sampler_without_rank"
    if sum(b.values()) == sum(a.values()):
        labels = {sample.split("/")[0] for sample in a}
        named = len(labels) > 1 or bool(evidence.record.rows("planned"))
        if named and _same_labels(a, b) and _same_planned(evidence.record, evidence.reference):
            return "augmentation_by_worker"
        lists = [
            {sample for row in rows if row["kind"] == "step" for sample in row["samples"]} for rows in evidence.record.ranks
        ]
        overlap = any(first & second for index, first in enumerate(lists) for second in lists[index + 1 :])
        return "sampler_seed_per_rank" if overlap else "data_depends_on_ranks"
    if any(len(set(row["epochs"])) > 1 for run in (evidence.record, evidence.reference) for row in run.rows("step")):
        return "accumulation_tail_dropped"
    return "batch_grows_with_ranks" if sum(b.values()) == evidence.config.ranks * sum(a.values()) else "data_depends_on_ranks"


def _of_loss(evidence: _Evidence) -> tuple[Cause, ...]:
    a, b = evidence.values
    step, is_weighted = evidence.difference.step, a.weight is not None and b.weight is not None
    weighting = "loss_weighting" if is_weighted else "local_loss_count"
    of_parts = _of_parts(evidence)
    if of_parts and of_parts[0].shown:
        return of_parts
    if counted := _count_that_explains(evidence):
        return (replace(cause(weighting), shown=True, evidence=counted),)
    if counted := _counter_of_microbatches(evidence):
        return (replace(cause("counts_microbatches"), evidence=counted),)
    causes = (*of_parts, *_circumstances(evidence))
    if not is_weighted and not causes and (factor := _common_factor(evidence)) is not None and not _is_near(factor, 1.0):
        return (cause("accumulation_not_scaled"),)
    # Each microbatch has the weight 1, as for means.
    of_means = is_weighted and a.weight == a.count and b.weight == b.count and a.count != b.count
    weighted = replace(cause(weighting), shown=of_means)
    if not of_means and _all_weigh_alike(evidence):
        return *causes, cause("samples_interact"), weighted
    if _lengths(evidence.record, step) == _lengths(evidence.reference, step):
        return *causes, weighted
    padding = cause("padding_in_loss")
    return *causes, *((weighted, padding) if of_means else (padding, weighted))


def _of_parts(evidence: _Evidence) -> tuple[Cause, ...]:
    """Return the causes of another loss where ranks compute parts of sequences."""
    step = evidence.difference.step
    runs = evidence.reference.step_rows(step), evidence.record.step_rows(step)
    expected, targets = (sum(row.get("targets", 0) for row in rows) for rows in runs)
    if not any(row.get("parts") for row in runs[1]):
        return ()
    shapes = {fact.name: fact.value.shape for fact in evidence.reference.of_kind("gradient", step)}
    for name, pair in _gradients(evidence).items():
        shape = shapes[name]
        if len(shape) == 2 and len(pair[0]) == math.prod(shape):
            end, last = (int(np.flatnonzero(values.reshape(shape).any(1)).max(initial=-1)) for values in pair)
            if last < end:
                text = f"Rows {last + 1} to {end} of {name} have no gradient."
                return (replace(cause("positions_restart"), evidence=text),)
    if targets < expected:
        text = f"The ranks have {targets} labels, and the other run has {expected}."
        return (replace(cause("targets_lost"), evidence=text),)
    return cause("sequence_part_alone"), cause("sequence_mask_lost")


def _circumstances(evidence: _Evidence) -> tuple[Cause, ...]:
    """Return the causes that the step has the circumstances for."""
    step = evidence.difference.step
    circumstances = {
        "local_batch_norm": evidence.record.note("batch_norm") is not None,
        "shared_random_per_rank": _differ_between_ranks(evidence.record, step),
        "gather_without_gradient": _gathers(evidence.record, step),
    }
    return tuple(cause(code) for code, is_given in circumstances.items() if is_given)


def _all_weigh_alike(evidence: _Evidence) -> bool:
    """Return True if all counts of items are multiples of the number of samples, so that another count explains nothing."""
    runs, samples = (evidence.reference, evidence.record), "the number of samples"
    counts = [one for run in runs for row in run.step_rows(evidence.difference.step) for one in row.get("counts", ())]
    return bool(counts) and all(
        one.get(name, 0) * counts[0][samples] == counts[0][name] * one[samples] for one in counts for name in counts[0]
    )


def _counter_of_microbatches(evidence: _Evidence) -> str:
    """Return which number of the script grows with the microbatches of a step, in a sentence; "" without one."""
    step, runs = evidence.difference.step, (evidence.reference, evidence.record)
    forwards = [rows[0]["forwards"] if (rows := run.step_rows(step)) else 0 for run in runs]
    # With as many microbatches of other sizes, a sample meets another value.
    are_equal = forwards[0] == forwards[1]
    if are_equal and forwards[0] < 2:
        return ""
    for fact in evidence.reference.of_kind("variable", step):
        later = (step + 1, *fact.key[1:])
        values = [[run.facts.get(key) for key in (fact.key, later)] for run in runs]
        if fact.value["type"] == "number" and all(other is not None for pair in values for other in pair):
            grown = [pair[1].value["value"] - pair[0].value["value"] for pair in values if pair[0] and pair[1]]
            # Another multiple of the same number may be a coincidence.
            unit = forwards[0] if are_equal else grown[0]
            if unit and all(
                _is_near(growth * forwards[0], unit * count) for growth, count in zip(grown, forwards, strict=True)
            ):
                return f"{fact.name} grows by {grown[0]:.6g} and by {grown[1]:.6g} in a step, as the number of forwards."
    return ""


def _count_that_explains(evidence: _Evidence) -> str:
    """Return which count of items, as weight of the losses, makes both runs equal, in a sentence; "" if none does."""
    step, names = evidence.difference.step, None
    for run in (evidence.reference, evidence.record):
        for row in run.step_rows(step):
            if len(row.get("counts", ())) != len(row["losses"]):
                return ""
            for counts in row["counts"]:
                names = set(counts) if names is None else names & set(counts)
    for of_total in (False, True):
        for name in sorted(names or ()):
            means = [_weighted_loss(run, step, name, of_total=of_total) for run in (evidence.reference, evidence.record)]
            if means[0] is not None and means[1] is not None and _is_near(means[0], means[1]):
                what = "totals are means: with" if of_total else "losses of both runs have one mean with"
                return f"The {what} {name} as weights{', those of both runs agree' if of_total else ''}."
    return ""


def _weighted_loss(record: RunRecord, step: int, name: str, *, of_total: bool) -> float | None:
    """Return the mean of the losses of a step, or of their totals, weighted by a count of the microbatches; None if useless.

    Equal counts say nothing about losses, and totals without a weight are losses.
    """
    losses, counts = list[float](), list[float]()
    for row in record.step_rows(step):
        if of_total and any(weight in (None, 1.0) for _, weight in row["losses"]):
            return None
        losses += [total / (1.0 if of_total else weight or 1.0) for total, weight in row["losses"]]
        counts += [microbatch[name] for microbatch in row["counts"]]
    if not sum(counts) or (not of_total and len(counts) > 1 and len(set(counts)) == 1):
        return None
    return sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)


def _is_near(a: float, b: float) -> bool:
    return relative_difference(a, b) < _NEARLY_EQUAL


def _of_gradient(evidence: _Evidence) -> tuple[Cause, ...]:
    step, causes = evidence.difference.step, _circumstances(evidence)
    of_forward = (cause("gradient_not_of_loss"),) if evidence.config.ranks > 1 else ()
    if _lengths(evidence.record, step) != _lengths(evidence.reference, step):
        causes = (*causes, cause("padding_in_loss"))
    interact = (cause("samples_interact"),) if _all_weigh_alike(evidence) else ()
    if _gathers(evidence.record, step):
        return (*causes, *of_forward)
    factor = _common_factor(evidence)
    if factor is not None:
        ours, theirs = evidence.record.step_rows(step)[0]["backwards"], evidence.reference.step_rows(step)[0]["backwards"]
        if ours != theirs and _is_near(factor, ours / theirs):
            return (cause("accumulation_not_scaled"),)
        if any(_is_near(factor, scale) for scale in _scales_of_ranks(evidence)):
            return (cause("gradient_scaled_by_ranks"),)
        if evidence.config.ranks == 1:
            return (cause("clip_local_norm"),)
        norms = [_norm(evidence.reference, other) for other in evidence.reference.steps[:2]]
        text = f"All gradients are those of the other run times {factor:.3g}, whose norm is {norms[0]:.3g} in each step."
        # Rounding and the summand of the divisor, which keeps it from 0, change the norm of clipped gradients.
        is_clipped = len(norms) == 2 and relative_difference(*norms) < _NEARLY_CLIPPED
        of_clips = (
            replace(cause("clip_norm_differs"), shown=is_clipped, evidence=text if is_clipped else ""),
            cause("clip_local_norm"),
        )
        # A clipped gradient is not that of the loss.
        has_clip = any("clip" in row["events"] for run in (evidence.record, evidence.reference) for row in run.step_rows(step))
        return of_clips if is_clipped or has_clip else (*of_forward, *of_clips)
    if evidence.config.ranks > 1 and (scaled := _scaled_by_ranks(evidence)):
        return (replace(cause("gradient_scaled_by_ranks"), evidence=scaled),)
    if evidence.config.ranks > 1 and (factors := _few_factors(evidence)):
        text = f"Every element is that of the other run times one of {factors} factors."
        clips = cause("clip_local_norm")
        return (replace(clips, shown=True, evidence=text) if factors > 1 else clips,)
    return *causes, *of_forward, *interact, cause("unknown")


def _of_lr(evidence: _Evidence) -> str:
    ours, theirs = evidence.record.rows("step"), evidence.reference.rows("step")
    steps = min(len(ours), len(theirs))
    calls = [sum(row["events"].count("schedule") for row in rows[:steps]) for rows in (ours, theirs)]
    backwards = [sum(row["backwards"] for row in rows[:steps]) for rows in (ours, theirs)]
    if calls[0] == calls[1]:
        return "rate_by_world_size" if evidence.config.ranks > 1 else "unknown"
    if backwards[0] != backwards[1] and calls[0] * backwards[1] == calls[1] * backwards[0]:
        return "schedule_per_microbatch"
    return "schedule_by_world_size" if calls[0] > calls[1] else "schedule_per_microbatch"


def _lengths(record: RunRecord, step: int) -> set[Any]:
    """Return the shapes of the samples in the microbatches of a step."""
    return {tuple(shape) for row in record.step_rows(step) for shape in row["shapes"]}


def _gathers(record: RunRecord, step: int) -> bool:
    events = [event for row in record.step_rows(step) for event in row["events"]]
    return any(event.startswith("all_gather") and event.endswith(":grad") for event in events)


def _differ_between_ranks(record: RunRecord, step: int) -> bool:
    """Return True if ranks ran different modules, or if a random generator or a value of the model differs between ranks."""
    rows = record.step_rows(step)
    if len({row["modules"] for row in rows}) > 1 and len({row["forwards"] for row in rows}) == 1:
        return True
    values: dict[str, set[str]] = {}
    for rank_rows in record.ranks:
        for row in rank_rows:
            is_choice = row["kind"] == "variable" and (row["type"] == "generator" or row.get("of_model"))
            if is_choice and row["step"] == step and not row.get("is_global"):
                values.setdefault(row["name"], set()).add(row["digest"])
    return any(len(digests) > 1 for digests in values.values())


def _scales_of_ranks(evidence: _Evidence) -> tuple[float, float]:
    return evidence.config.ranks, 1 / evidence.config.ranks


def _scaled_by_ranks(evidence: _Evidence) -> str:
    """Return which gradients are scaled by the number of ranks, if all others agree, in a sentence; "" if not so."""
    scaled = list[str]()
    for name, (a, b) in _gradients(evidence).items():
        if any(np.linalg.norm(b - scale * a) <= _NEARLY_EQUAL * np.linalg.norm(b) for scale in _scales_of_ranks(evidence)):
            scaled.append(name)
        elif np.linalg.norm(b - a) > _NEARLY_EQUAL * np.linalg.norm(a):
            return ""
    return f"The other gradients agree, and {', '.join(scaled[:3])} has another factor." if scaled else ""


def _norm(record: RunRecord, step: int) -> float:
    """Return the norm of all gradients of a step."""
    return math.hypot(*(fact.value.norm for fact in record.of_kind("gradient", step)))


def _gradients(evidence: _Evidence) -> dict[str, tuple[Any, Any]]:
    """Return the sketches of all gradients of the step by name, from the reference and from the run that differs."""
    pairs = {}
    for fact in evidence.reference.of_kind("gradient", evidence.difference.step):
        partner = evidence.record.facts.get(fact.key)
        if partner is not None and fact.value.norm and partner.value.shape == fact.value.shape:
            pairs[fact.name] = np.asarray(fact.value.sketch), np.asarray(partner.value.sketch)
    return pairs


def _common_factor(evidence: _Evidence) -> float | None:
    """Return the number by which all gradients of a step differ; None if there is none."""
    factors = []
    for a, b in _gradients(evidence).values():
        factor = float(a @ b / (a @ a))
        if np.linalg.norm(b - factor * a) > _NEARLY_EQUAL * np.linalg.norm(b):
            return None
        factors.append(factor)
    if not factors or max(factors) - min(factors) > _NEARLY_EQUAL * abs(max(factors)):
        return None
    return factors[0]


def _few_factors(evidence: _Evidence) -> int:
    """Return by how many factors the elements of the small gradients are scaled, if there are not more than ranks; 0 if so."""
    ratios = []
    for a, b in _gradients(evidence).values():
        # The sketch of a large tensor adds elements of several ranks.
        if len(a) < SKETCH_SIZE:
            large = np.abs(a) > _NEARLY_EQUAL * np.abs(a).max()
            ratios.append(b[large] / a[large])
    if not ratios:
        return 0
    values = np.sort(np.concatenate(ratios))
    groups = 1 + int((np.diff(values) > _NEARLY_EQUAL * np.abs(values[1:])).sum())
    return groups if groups <= evidence.config.ranks and len(values) > 2 * evidence.config.ranks else 0


def seeds_of_rank_0(ranks: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, list[int]]:
    """Return the seeds of rank 0 at each place where another rank has others, each greater or smaller by one number.

    Seeds of samples differ between ranks in other ways, as ranks have different samples.
    """
    by_place: list[dict[str, list[int]]] = []
    for rows in ranks:
        seeds: dict[str, list[int]] = {}
        for row in rows:
            if row["kind"] == "seed":
                seeds.setdefault(row["place"], []).append(row["seed"])
        by_place.append(seeds)
    equal: dict[str, list[int]] = {}
    for place, first in by_place[0].items() if by_place else ():
        others = [seeds.get(place, []) for seeds in by_place[1:]]
        offsets = [{b - a for a, b in zip(first, other, strict=False)} for other in others]
        if all(len(offset) == 1 for offset in offsets) and any(offset != {0} for offset in offsets):
            equal[place] = first
    return equal
