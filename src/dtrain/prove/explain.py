"""Find the likely causes of a difference from the evidence in the records (``explain``). Pure, without torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dtrain.prove.causes import Cause, cause
from dtrain.prove.compare import STATISTICS, Difference, relative_difference
from dtrain.prove.explain_resume import explain_resume, has_same_labels
from dtrain.prove.run_config import SKETCH_SIZE, RunConfig
from dtrain.prove.run_records import Fact, RunRecord

_NEARLY_EQUAL = 1e-6
_NEARLY_CLIPPED = 1e-3
# Elements of gradients that are not parallel by chance.
_LEAST_PARALLEL = 4
# The summand of a divisor, which keeps it from 0, changes a deviation.
_NEARLY_CONSTANT = 1e-5
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
    whole: RunRecord | None = None,
) -> tuple[Cause, ...]:
    """Return the causes that the first difference between ``record`` and ``reference`` may have, the likeliest first.

    The causes after one that the records show do not count.

    Args:
        difference: the first difference.
        record: record of the run that differs.
        reference: record of the other run; None for a check of one run.
        config: the run that differs.
        resumed: if True, the run continues a killed run.
        whole: record of the run on as many ranks that was not killed; None without one.
    """
    whole_run = reference if difference.code == "gradient_not_reduced" else None
    if whole_run is not None and (factors := _factors_of_ranks(difference, record, whole_run)):
        return (replace(cause("clip_local_norm"), shown=True, evidence=factors),)
    if difference.code is not None and not (resumed and difference.code == "weights_differ_between_ranks"):
        return (cause(difference.code, difference.kind),)
    assert reference is not None, "a difference without a code comes from a comparison"
    if config.name.endswith("again"):
        return (cause("not_deterministic"),)
    if difference.kind in ("mode", "frozen"):
        return (cause(f"{difference.kind}_differs"),)
    if resumed:
        return (explain_resume(difference, record, reference, whole),)
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
    if kind == "samples":
        return _of_samples(evidence)
    if kind == "lr":
        return (cause(_of_lr(evidence)),)
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
        likely = cause("evaluation_counts_twice" if sum(b.values()) > sum(a.values()) else "evaluation_drops_tail")
        # Samples that are missing beside others that are repeated may have another cause.
        return (replace(likely, shown=not (a - b and b - a)),)
    if kind == "metric" and evidence.difference.other is not None:
        if len(numbers := _numbers_of_ranks(evidence)) > 1:
            text = f"Ranks have other numbers: {' and '.join(f'{number:.6g}' for number in numbers[:2])}."
            return (replace(cause("metric_of_rank_0"), shown=True, evidence=text),)
        # A metric of several ranks needs a collective between the evaluation and the log.
        events = [event.split(":")[0] for event in evidence.difference.other.by_rank[0].get("events", ())]
        later = events[events.index("evaluation") :] if "evaluation" in events else []
        is_mean = evidence.config.ranks == 1 or _REDUCTIONS & {*(later if "broadcast" in later else events)}
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


def _same_planned(record: RunRecord, reference: RunRecord) -> bool:
    """Return True if the loaders of both runs read the same samples, by index, or if they did not say."""

    def planned(run: RunRecord) -> Counter[tuple[int, int]]:
        return Counter(
            (row["epoch"], number) for rows in run.ranks for row in rows if row["kind"] == "planned" for number in row["ids"]
        )

    return planned(record) == planned(reference)


def _of_samples(evidence: _Evidence) -> tuple[Cause, ...]:
    a, b = evidence.values
    assert evidence.difference.other is not None
    by_rank, is_complete = evidence.difference.other.by_rank, sum(b.values()) == sum(a.values())
    if is_complete and (copies := _copies_of_draws(evidence)):
        return (replace(cause("same_noise_on_ranks", "samples"), evidence=copies),)
    if len(by_rank) > 1 and all(Counter(samples) == Counter(by_rank[0]) for samples in by_rank):
        return (cause("sampler_without_rank"),)
    if not is_complete:
        if any(len(set(row["epochs"])) > 1 for run in (evidence.record, evidence.reference) for row in run.rows("step")):
            return (cause("accumulation_tail_dropped"),)
        is_batch = sum(b.values()) == evidence.config.ranks * sum(a.values())
        return (cause("batch_grows_with_ranks" if is_batch else "data_depends_on_ranks"),)
    if _loads_same_samples(evidence):
        # The script has computed the inputs of the step from the samples of its loader.
        if constant := _constant_statistic(evidence):
            return (replace(cause("samples_interact"), shown=True, evidence=constant),)
        candidates = cause("samples_interact"), cause("augmentation_by_worker")
        return candidates[::-1] if _draws(evidence) else candidates
    named = len({sample.split("/")[0] for sample in a}) > 1 or bool(evidence.record.rows("planned"))
    if named and has_same_labels(a, b) and _same_planned(evidence.record, evidence.reference):
        return (cause("augmentation_by_worker"),)
    lists = [{sample for row in rows if row["kind"] == "step" for sample in row["samples"]} for rows in evidence.record.ranks]
    overlap = any(first & second for index, first in enumerate(lists) for second in lists[index + 1 :])
    return (cause("sampler_seed_per_rank" if overlap else "data_depends_on_ranks"),)


def _copies_of_draws(evidence: _Evidence) -> str:
    """Return what all ranks draw alike, in a sentence, if one rank draws more of it; "" without such draws."""
    ranks, reference, copied = evidence.record.ranks, evidence.reference, ""
    # A sampler with one seed draws as much on all numbers of ranks.
    for fact in evidence.record.of_kind("generator") if len(ranks) > 1 else ():
        states = [row["digest"] for rows in ranks for row in rows if row["kind"] == "variable" and _is_of(row, fact)]
        alone = reference.facts.get(fact.key)
        is_shared = not fact.value.get("is_global") and len(states) == len(ranks) and len(set(states)) == 1
        if is_shared and alone is not None and alone.value["digest"] != states[0]:
            return f"The generator {fact.name} has one state on all ranks, and has drawn other numbers on one rank."
    index = evidence.difference.reference.optimizer_index if evidence.difference.reference else 0
    for fact in evidence.record.of_kind("samples"):
        if fact.optimizer_index != index or not fact.value or len(fact.by_rank) < 2:
            continue
        first, *others = fact.by_rank
        places = [
            {place for place, pair in enumerate(zip(first, other, strict=False)) if len({*pair}) == 1} for other in others
        ]
        partner = reference.facts.get(fact.key)
        is_copy = partner is not None and all(fact.value[first[place]] > partner.value[first[place]] for place in places[0])
        if not is_copy or not 0 < len(places[0]) < len(first) or any(other != places[0] for other in places):
            return ""
        copied = f"{len(places[0])} of {len(first)} samples of each rank are copies of those of rank 0, at the same places."
    return copied


def _is_of(row: Mapping[str, Any], fact: Fact) -> bool:
    return (row["step"], row["optimizer_index"], row["name"]) == (fact.step, fact.optimizer_index, fact.name)


def _loads_same_samples(evidence: _Evidence) -> bool:
    """Return True if the loaders of training gave both runs the same samples until the step."""

    def loaded(run: RunRecord) -> Counter[str]:
        loaders = {f"loader-{loader}" for row in run.rows("step") for loader in row.get("loaders", ())}
        rows = [row for rows in run.ranks for row in rows if row["kind"] == "read" and row["step"] <= evidence.difference.step]
        of_training = [row for row in rows if row["loader"] in loaders or not row["loader"].startswith("loader-")]
        return Counter(sample for row in of_training for sample in row["samples"])

    samples = loaded(evidence.reference)
    return bool(samples) and samples == loaded(evidence.record)


_STATISTICS = ("The mean", "The deviation", "The largest size", "The sum")


def _constant_statistic(evidence: _Evidence) -> str:
    """Return which statistic of an input that differs is one number for the samples of each rank, in a sentence; "" if none."""
    first, other = evidence.difference.reference, evidence.difference.other
    if first is None or other is None:
        return ""
    runs = evidence.reference, evidence.record
    rows = [row for run in runs for rows in run.ranks for row in rows if row["kind"] == "step"]
    for name in [name for name, number in first.fields.items() if other.fields.get(name) != number]:
        values = [batch[name] for row in rows for batch in row.get("statistics", ()) if name in batch]
        for place, statistic in enumerate(_STATISTICS):
            numbers, size = [value[place] for value in values], max((value[2] for value in values), default=0.0)
            if len(numbers) > 3 and max(numbers) - min(numbers) <= _NEARLY_CONSTANT * size:
                number = numbers[0] if abs(numbers[0]) > _NEARLY_CONSTANT * size else 0.0
                return f"{statistic} of {name} is {number:.3g} over the samples of each rank, in both runs and all steps."
    return ""


def _draws(evidence: _Evidence) -> bool:
    """Return True if a generator of the process has advanced from one step to the next, or a forward draws."""
    states: dict[str, set[str]] = {}
    for fact in evidence.reference.of_kind("generator"):
        states.setdefault(fact.name, set()).add(fact.value["digest"])
    rows = evidence.reference.rows("step")
    return any(len(digests) > 1 for digests in states.values()) or any(row["draws"] for row in rows)


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
    factor = None if is_weighted or causes else _common_factor(_gradients(evidence).values())
    if factor is not None and not _is_near(factor, 1.0):
        if _is_factor_of_backwards(evidence, factor):
            return (cause("accumulation_not_scaled"),)
        if any(_is_near(factor, scale) for scale in _scales_of_ranks(evidence)) and evidence.config.ranks > 1:
            return (cause("gradient_scaled_by_ranks"),)
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
    has_parts = any(row.get("parts") for row in runs[1])
    if not has_parts and not _has_parts_of_rows(evidence):
        return ()
    for fact in evidence.reference.of_kind("gradient", step):
        other = evidence.record.facts.get(fact.key)
        if other is not None and other.value.last_row < fact.value.last_row:
            text = f"Rows {other.value.last_row + 1} to {fact.value.last_row} of {fact.name} have no gradient."
            return (replace(cause("positions_restart"), evidence=text),)
    if targets < expected:
        text = f"The ranks have {targets} labels, and the other run has {expected}."
        return (replace(cause("targets_lost"), evidence=text),)
    of_reach = cause("sequence_part_alone"), cause("sequence_mask_lost")
    # No experiment counts positions. They are left if a change of an input reaches what it must. Without the whole batch, the
    # columns may be samples, as in a recurrent network.
    return (*of_reach, replace(cause("positions_restart"), shown=False)) if has_parts else of_reach


def _has_parts_of_rows(evidence: _Evidence) -> bool:
    """Return True if each rank has a part of each sample: the ranks have the columns of the batch, and other rows."""
    key = evidence.difference.step, 0, "samples", ""
    whole, parts = (run.facts.get(key) for run in (evidence.reference, evidence.record))
    if whole is None or parts is None or not whole.columns:
        return False
    return whole.columns == parts.columns and whole.value != parts.value


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
    factor = _common_factor(_gradients(evidence).values())
    if factor is not None:
        if _is_factor_of_backwards(evidence, factor):
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


def _is_factor_of_backwards(evidence: _Evidence, factor: float) -> bool:
    """Return True if gradients differ by the factor by which the numbers of microbatches of a rank differ."""
    ours, theirs = (run.step_rows(evidence.difference.step)[0]["backwards"] for run in (evidence.record, evidence.reference))
    return bool(ours != theirs and theirs and _is_near(factor, ours / theirs))


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


def _common_factor(pairs: Iterable[tuple[Any, Any]]) -> float | None:
    """Return the number by which all pairs of gradients differ; None if there is none."""
    factors = []
    for a, b in pairs:
        factor = float(a @ b / (a @ a))
        if np.linalg.norm(b - factor * a) > _NEARLY_EQUAL * np.linalg.norm(b):
            return None
        factors.append(factor)
    if not factors or max(factors) - min(factors) > _NEARLY_EQUAL * abs(max(factors)):
        return None
    return factors[0]


def _factors_of_ranks(difference: Difference, record: RunRecord, reference: RunRecord) -> str:
    """Return by which numbers the ranks scale the gradients of the other run in a step, in a sentence; "" if they do not."""
    wholes = {fact.key: fact for fact in reference.of_kind("gradient", difference.step) if fact.value.norm}
    # Only rank 0 has a sharded gradient.
    on_all = {fact.key for fact in record.of_kind("gradient", difference.step) if None not in fact.by_rank} & wholes.keys()
    if sum(len(wholes[key].value.sketch) for key in on_all) < _LEAST_PARALLEL:
        return ""
    factors = []
    for rank in range(len(record.ranks)):
        rows = {(row["step"], row["optimizer_index"], "gradient", row["name"]): row for row in record.rows("gradient", rank)}
        pairs = [(wholes[key].value, rows[key]) for key in on_all if rows[key]["sketch"] is not None]
        if any(whole.shape != tuple(row["shape"]) for whole, row in pairs):
            return ""
        factors.append(_common_factor((whole.sketch, record.sketch(row, rank)) for whole, row in pairs))
    if None in factors:
        return ""
    numbers = " and ".join(f"{factor:.3g} on rank {rank}" for rank, factor in enumerate(factors[:2]))
    return f"The gradients of each rank are those of the other run times one number: {numbers}."


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


def width_of_batches(record: RunRecord) -> int:
    """Return the largest length of the first axis of a sample, in all steps; 0 without one."""
    return max((shape[0] for rows in record.ranks for row in rows for shape in row.get("shapes", ()) if shape), default=0)


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
