"""Compare the records of two runs, and list their differences in program order (``compare_records``). Pure, without torch."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np

from dtrain.arguments import format_count
from dtrain.prove.run_records import BITS, KINDS, TENSORS, Fact, LossFact, RunRecord, TensorFact, matching_name

Verdict = Literal["bitwise", "tolerance", "differs"]

TOLERANCE = 1e-6
"""Relative difference in float64 that is rounding. Another order of sums changes 1e-15, and a few steps enlarge that."""

MAX_ROUNDING = 0.1
"""Relative difference that is not called rounding: a loss with another weight changes a gradient by as much."""

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""Ends of the names of the running statistics of batch norm."""

FactKey = tuple[int, int, str, str]
"""``Fact.key``: step, number of the optimizer, kind and name."""

# Difference of two tensors with other bits and equal sketches.
_LEAST = 2.0**-53
# Values that the script may fill again before it reads them.
_OVERWRITTEN = ("variable", "buffer")
# A tensor of noise, such as the gradient of a bias that cancels, is compared with the largest tensors of its kind.
_NOISE_FLOOR = 1e-6
# Roundings of the largest gradient of a step, within which a gradient is nothing but rounding.
_NOISE_ROUNDINGS = 1024
# Tensors that an optimizer changes: it may enlarge the rounding of a gradient up to its learning rate.
_UPDATED = ("parameter", "initial", "transform", "exported")
# Terms of the size 1 that cancel leave some roundings.
_CANCELLED = 64
# A metric that is logged again in a step gets a number.
_REPETITION = re.compile(r", \d+$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A fact that differs between two runs, or that contradicts a run itself.

    Args:
        step: step, from 0.
        kind: kind of the fact, as in ``KINDS``, or of a check.
        name: parameter, buffer, metric or variable.
        text: what differs, by how much.
        relative: relative difference; None if there is no number.
        ranks: ranks with the difference; empty for all.
        reference: fact of the reference run.
        other: fact of the compared run.
        code: key of the cause, if the check knows it.
        certain: if False, the difference is reported only if a later fact of the step differs, too.
    """

    step: int
    kind: str
    name: str
    text: str
    relative: float | None = None
    ranks: tuple[int, ...] = ()
    reference: Fact | None = field(default=None, repr=False)
    other: Fact | None = field(default=None, repr=False)
    code: str | None = None
    certain: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Result of comparing two runs.

    Args:
        verdict: the verdict.
        differences: differences in program order.
        largest: largest relative difference.
        relative: relative difference of each fact.
        of_layout: metrics that are numbers of the layout, such as the number of ranks.
        coarse: facts that were not compared, because rounding changes them too much.
        not_seen: what the runs could not show, in sentences.
    """

    verdict: Verdict
    differences: tuple[Difference, ...]
    largest: float
    relative: tuple[tuple[Fact, float], ...] = field(default=(), repr=False)
    of_layout: frozenset[str] = frozenset()
    coarse: tuple[Fact, ...] = field(default=(), repr=False)
    not_seen: tuple[str, ...] = ()


def compare_records(
    reference: RunRecord,
    other: RunRecord,
    *,
    same_layout: bool,
    kinds: Collection[str] = KINDS,
    ignored: Collection[FactKey] = (),
    first_steps: Mapping[int, int] = MappingProxyType({}),
    rounding: Mapping[FactKey, float] = MappingProxyType({}),
) -> Comparison:
    """Compare ``other`` with ``reference``.

    Args:
        reference: record to compare with.
        other: record that may differ.
        same_layout: if True, both runs have the same ranks and microbatches, so that also random state, variables of the script
            and the order of samples must agree.
        kinds: kinds of facts to compare.
        ignored: keys of facts that differ between two equal runs, such as timings.
        first_steps: step of each optimizer from which on facts are compared, for a resumed run.
        rounding: relative difference that is rounding, by fact, if it is more than ``TOLERANCE``. A fact with more than
            ``MAX_ROUNDING`` is not compared.
    """
    differences, sizes, is_bitwise = list[Difference](), list[tuple[Fact, float]](), True
    scales, unit, coarse = _scales(reference), _unit(reference), list[Fact]()
    last = dict[tuple[int, str, str], bool]()
    of_run = _Options(
        same_layout=same_layout,
        drops_repeats=other.note("gather_for_metrics") is not None,
        has_shares=any(len(set(fact.by_rank)) > 1 for fact in other.of_kind("samples")),
    )
    reduced = reduced_in_update(other)
    noise = _list_noise(reference, other, scales, unit)
    of_layout = frozenset[str]() if same_layout else _metrics_of_layout(reference, other)
    if first_steps:
        ignored = {*ignored, *_of_process(reference, ignored)}
    pairs = _comparable_facts(reference, other, same_layout=same_layout, first_steps=first_steps)
    for fact, partner in pairs:
        if fact.kind not in kinds or fact.key in ignored or fact.key in reduced:
            continue
        if fact.kind == "metric" and metric_name(fact) in of_layout:
            continue
        fact, partner = _after_changes(fact, partner)
        tolerance = max(TOLERANCE, rounding.get(fact.key, 0.0))
        if tolerance > MAX_ROUNDING:
            coarse.append(fact)
            is_bitwise = False
            continue
        scale = scales.get((fact.kind, fact.step if fact.kind in TENSORS else metric_name(fact)), 0.0)
        if fact.kind not in TENSORS:
            scale = max(scale, _CANCELLED * unit / tolerance)
        is_noise = fact.kind in _UPDATED and matching_name(fact.name, noise) is not None
        options = of_run._replace(
            tolerance=tolerance, scale=scale, slack=_reach_of_updates(reference, fact) if is_noise else 0.0
        )
        result = _COMPARE.get(fact.kind, _compare_plain)(fact, partner, options)
        last[fact.optimizer_index, fact.kind, fact.name] = bool(result.text)
        is_bitwise &= result == _EQUAL
        sizes.append((fact, result.relative if result.is_certain else 0.0))
        if result.text:
            differences.append(_difference(fact, partner, result))
    differences += _missing_steps(reference, other, first_steps)
    differences = _with_effect(differences, last if first_steps else None, same_layout=same_layout)
    return Comparison(
        verdict="differs" if differences else "bitwise" if is_bitwise else "tolerance",
        differences=tuple(differences),
        largest=max((relative for _, relative in sizes), default=0.0),
        relative=tuple(sizes),
        of_layout=of_layout,
        coarse=tuple(coarse),
        not_seen=_describe_reduced(reduced) if "gradient" in kinds else (),
    )


def _with_effect(
    differences: Sequence[Difference], last: Mapping[tuple[int, str, str], bool] | None, *, same_layout: bool
) -> list[Difference]:
    """Return the differences without those that changed nothing.

    Args:
        differences: all differences.
        last: for a resumed run, True for each value that differs in its last step, by optimizer, kind and name.
        same_layout: as in ``compare_records``.
    """
    # A loss may be weighted in another way, unless the gradients of its step differ, too.
    gradients = {difference.step for difference in differences if difference.kind == "gradient"}
    relevant = [difference for difference in differences if difference.certain or difference.step in gradients]
    # Without another effect, nothing read the value.
    if all(difference.kind in _OVERWRITTEN for difference in relevant):
        if last is not None:
            return [difference for difference in relevant if not _is_overwritten(difference, last)]
        if not same_layout:
            return [difference for difference in relevant if not _is_scratch(difference)]
    return relevant


def _comparable_facts(
    reference: RunRecord, other: RunRecord, *, same_layout: bool, first_steps: Mapping[int, int]
) -> Iterator[tuple[Fact, Fact]]:
    """Yield the facts that both runs have and that must agree, in program order."""
    constants = _constant_numbers(reference)
    for fact in reference.facts.values():
        partner, first_step = other.facts.get(fact.key), first_steps.get(fact.optimizer_index)
        if partner is None or fact.step < (first_step or 0):
            continue
        of_layout = fact.kind in ("variable", "generator", "rng", "optimizer_state") or _is_local_buffer(partner, other)
        if (of_layout and not same_layout) or (fact.kind == "variable" and fact.name in constants):
            continue
        # What a closure keeps explains a difference, and is none by itself: a function may count its calls.
        if fact.kind in ("variable", "generator") and fact.value.get("of_closure"):
            continue
        # Without draws, the state of a generator changes nothing.
        if fact.kind == "rng" and not any(row["draws"] for row in reference.step_rows(fact.step, fact.optimizer_index)):
            continue
        # A resumed run begins after the evaluations and the log of its first step.
        if fact.step and fact.step == first_step and fact.kind in ("evaluation", "metric"):
            continue
        yield fact, partner


def _of_process(record: RunRecord, ignored: Collection[FactKey]) -> set[FactKey]:
    """Return the metrics of a line with a time after the last step, which tell of one process, such as its mean loss."""
    end = max(record.steps, default=0)
    metrics = [fact for fact in record.of_kind("metric") if fact.step > end]
    timed = {(fact.step, fact.order) for fact in metrics if fact.key in ignored}
    return {fact.key for fact in metrics if (fact.step, fact.order) in timed}


def _difference(fact: Fact, partner: Fact, result: _Result) -> Difference:
    ranks: tuple[int, ...] = ()
    if partner.kind in TENSORS and len(set(partner.by_rank) - {None}) > 1:
        ranks = tuple(rank for rank, value in enumerate(partner.by_rank) if value not in (None, fact.value.digest))
    return Difference(
        step=fact.step,
        kind=fact.kind,
        name=fact.name,
        text=result.text,
        relative=None if fact.kind in ("samples", "evaluation") else result.relative or None,
        ranks=ranks,
        reference=fact,
        other=partner,
        certain=result.is_certain,
    )


def _missing_steps(reference: RunRecord, other: RunRecord, first_steps: Mapping[int, int]) -> list[Difference]:
    """Return a difference if the runs do not have the same steps, each optimizer from its first step on."""
    expected, steps = (record.steps_from(first_steps) for record in (reference, other))
    if not expected or expected == steps:
        return []
    shared = min(len(expected), len(steps))
    # The proof ended the loop, which a resumed run may leave after another number of updates.
    if expected[:shared] == steps[:shared] and any(record.note("loop_cut") for record in (reference, other)):
        return []
    text = f"end after {format_count(len(steps), 'update')} instead of {len(expected)}"
    return [Difference(step=min(expected[-1:] + steps[-1:]), kind="steps", name="", text=text)]


def _is_overwritten(difference: Difference, last: Mapping[tuple[int, str, str], bool]) -> bool:
    """Return True if a value that differs is equal in its last step, as a buffer that each step fills before it reads it."""
    fact = difference.reference
    return fact is not None and not last[fact.optimizer_index, fact.kind, fact.name]


def _is_scratch(difference: Difference) -> bool:
    """Return True for a buffer that no checkpoint has. A cache of the last microbatch depends on its size."""
    return difference.reference is not None and difference.kind == "buffer" and not difference.reference.value.is_saved


def metric_name(fact: Fact) -> str:
    """Return the name of a metric in all steps."""
    return _REPETITION.sub("", fact.name)


def _metrics_of_layout(reference: RunRecord, other: RunRecord) -> frozenset[str]:
    """Return the metrics that are a number of the layout in all steps, as the number of ranks, microbatches or samples."""
    names, others = set[str](), set[str]()
    for fact in reference.of_kind("metric"):
        if (partner := other.facts.get(fact.key)) is not None:
            numbers = [_numbers_of_layout(record, fact.step, fact.optimizer_index) for record in (reference, other)]
            is_number = (float(fact.value), float(partner.value)) in zip(*numbers, strict=True)
            (names if is_number else others).add(metric_name(fact))
    return frozenset(names - others)


def _numbers_of_layout(record: RunRecord, step: int, optimizer_index: int) -> tuple[float, ...]:
    # A loop logs before or after it counts the step.
    row = next((row for before in (0, 1) for row in record.step_rows(step - before, optimizer_index)), None)
    samples, backwards = (0, 1) if row is None else (len(row["samples"]), row["backwards"] or 1)
    return len(record.ranks), backwards, samples, -(-samples // backwards)


def _is_local_buffer(fact: Fact, record: RunRecord) -> bool:
    """Return True for a buffer that the script keeps per rank, and for statistics that were not compared (``overrides``)."""
    frozen = record.note("frozen_statistics") is not None and fact.name.endswith(STATISTICS)
    if fact.kind == "exported":
        return frozen
    if fact.kind not in ("initial", "buffer") or not fact.value.is_buffer:
        return False
    sharding = record.note("sharding")
    own = () if sharding is None else tuple(sharding["own_buffers"])
    local = fact.name.endswith(own) and len(set(fact.by_rank) - {None}) > 1
    return local or frozen


def unstable_keys(first: RunRecord, second: RunRecord) -> set[FactKey]:
    """Return the keys of metrics and variables that differ between two equal runs: timings, paths, addresses.

    A metric that differs in one step is left out in all steps.
    """
    kinds = ("metric", "variable", "generator")
    facts = [fact for fact in first.facts.values() if fact.kind in kinds]
    unequal = [fact for fact in facts if fact.key not in second.facts or _plain(second.facts[fact.key]) != _plain(fact)]
    names = {metric_name(fact) for fact in unequal if fact.kind == "metric"}
    return {fact.key for fact in unequal} | {fact.key for fact in facts if fact.kind == "metric" and metric_name(fact) in names}


def _constant_numbers(record: RunRecord) -> set[str]:
    """Return the variables with one number in all steps: options of the script, not states of its loop."""
    values: dict[str, set[str]] = {}
    for fact in record.of_kind("variable"):
        if fact.value["type"] == "number":
            values.setdefault(fact.name, set()).add(fact.value["digest"])
    return {name for name, digests in values.items() if len(digests) == 1}


def _scales(record: RunRecord) -> dict[tuple[str, int | str], float]:
    """Return the largest root mean square of tensors by kind and step, and the largest value of each metric and loss."""
    scales: dict[tuple[str, int | str], float] = {}
    for fact in record.facts.values():
        key: tuple[str, int | str] = (fact.kind, metric_name(fact))
        size = 0.0
        if fact.kind in TENSORS and not fact.value.is_buffer:
            key, size = (fact.kind, fact.step), fact.value.norm / math.sqrt(math.prod(fact.value.shape) or 1)
        elif fact.kind in ("metric", "loss"):
            size = abs(float(fact.value) if fact.kind == "metric" else fact.value.mean)
        if math.isfinite(size):
            scales[key] = max(scales.get(key, 0.0), size)
    return scales


def _unit(record: RunRecord) -> float:
    """Return the relative error of a rounding of the script's numbers: that of the parameters, and at most that of float32."""
    bits = (BITS.get(fact.value.dtype, 53) for fact in record.of_kind("initial") if not fact.value.is_buffer)
    return 2.0 ** -max(BITS["float32"], min(bits, default=BITS["float64"]))


class _Options(NamedTuple):
    """Options of one comparison: layout, relative difference that is rounding, and least size for a relative difference.

    ``drops_repeats`` is True if the script drops samples that an evaluation repeats before it counts, and ``has_shares`` if
    ranks have samples of their own in some step. ``slack`` is the size of a difference of a tensor's elements that is rounding.
    """

    same_layout: bool
    drops_repeats: bool
    has_shares: bool
    tolerance: float = TOLERANCE
    scale: float = 0.0
    slack: float = 0.0


class _Result(NamedTuple):
    """Relative difference of two facts, and the text of a difference beyond rounding; an uncertain one has no other proof."""

    relative: float
    text: str = ""
    is_certain: bool = True


_EQUAL = _Result(0.0)


def _compare_tensors(fact: Fact, partner: Fact, options: _Options) -> _Result:
    a: TensorFact = fact.value
    b: TensorFact = partner.value
    if a.shape != b.shape:
        return _Result(1.0, f"has the shape {list(b.shape)} instead of {list(a.shape)}")
    if a.digest == b.digest:
        return _EQUAL
    if not math.isfinite(a.norm) or not math.isfinite(b.norm):
        both = math.isnan(a.norm) and math.isnan(b.norm)
        return _Result(_LEAST) if both else _Result(0.0, f"has the norm {b.norm:g} instead of {a.norm:g}")
    size = math.prod(a.shape) or 1
    reach = max(a.norm, b.norm, 0.0 if a.is_buffer else _NOISE_FLOOR * options.scale * math.sqrt(size))
    distance = float(np.linalg.norm(np.asarray(a.sketch) - np.asarray(b.sketch)))
    if distance <= options.slack * math.sqrt(size):
        return _Result(_LEAST)
    relative = distance / reach if reach else 0.0
    return _Result(max(relative, _LEAST), f"differs by {relative:.2g} of its norm" if relative > options.tolerance else "")


def _list_noise(
    reference: RunRecord, other: RunRecord, scales: Mapping[tuple[str, int | str], float], unit: float
) -> frozenset[str]:
    """Return the parameters whose gradients are only rounding, such as the bias of keys in attention, whose terms cancel."""
    noise, others = set[str](), set[str]()
    for fact in reference.of_kind("gradient"):
        partner = other.facts.get(fact.key)
        if partner is not None and partner.value.digest != fact.value.digest:
            size = math.sqrt(math.prod(fact.value.shape) or 1)
            rounding = _NOISE_ROUNDINGS * unit * scales.get(("gradient", fact.step), 0.0) * size
            (noise if max(fact.value.norm, partner.value.norm) <= rounding else others).add(fact.name)
    return frozenset(noise - others)


def _reach_of_updates(reference: RunRecord, fact: Fact) -> float:
    """Return how far the elements of two tensors may be apart after the updates before a fact, each of at most the rate."""
    return 2.0 * sum(max(rates.value, default=0.0) for rates in reference.of_kind("lr") if rates.step <= fact.step)


def reduced_in_update(record: RunRecord) -> frozenset[FactKey]:
    """Return the keys of gradients that the optimizer reduces itself.

    Ranks have other gradients as its step begins, and equal parameters as it ends.
    """
    keys = set[FactKey]()
    for fact in record.of_kind("gradient"):
        updated = record.facts.get((fact.step, fact.optimizer_index, "parameter", fact.name))
        if len(set(fact.by_rank) - {None}) > 1 and updated is not None:
            values = set(_after_changes(updated, updated)[1].by_rank)
            if len(values) == 1 and None not in values:
                keys.add(fact.key)
    return frozenset(keys)


def _after_changes(fact: Fact, partner: Fact) -> tuple[Fact, Fact]:
    """Return two parameters as the next forward begins, if ranks make them equal after the update, as by a broadcast."""
    if partner.changed is None or len(set(partner.by_rank)) == 1 or len(set(partner.changed_by_rank)) > 1:
        return fact, partner
    partner = replace(partner, value=partner.changed, by_rank=partner.changed_by_rank)
    return fact if fact.changed is None else replace(fact, value=fact.changed), partner


def _describe_reduced(keys: Collection[FactKey]) -> tuple[str, ...]:
    names = sorted({name for _, _, _, name in keys})
    if not names:
        return ()
    what = f"the gradient of {names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}"
    return (f"The optimizer reduces {what} in its own step, so the update was compared instead.",)


def _compare_losses(fact: Fact, partner: Fact, options: _Options) -> _Result:
    a: LossFact = fact.value
    b: LossFact = partner.value
    relative, is_weighted = relative_difference(a.mean, b.mean, options.scale), a.weight is not None and b.weight is not None
    if not is_weighted:
        # Without weights, a loop may sum or average over microbatches and ranks.
        relative = min(relative, relative_difference(a.total, b.total))
    elif (weight := relative_difference(a.weight or 0.0, b.weight or 0.0)) > options.tolerance:
        return _Result(max(relative, weight), f"has the weight {b.weight:g} over all ranks instead of {a.weight:g}")
    if relative <= options.tolerance:
        return _Result(relative)
    return _Result(relative, f"is {b.mean:.6g} instead of {a.mean:.6g}", is_weighted)


def relative_difference(a: float, b: float, scale: float = 0.0) -> float:
    """Return the difference of two numbers relative to the largest of them and of ``scale``; 0 if both are equal or NaN."""
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    if not math.isfinite(a) or not math.isfinite(b):
        return 1.0
    return abs(a - b) / max(abs(a), abs(b), scale)


def _compare_samples(fact: Fact, partner: Fact, options: _Options) -> _Result:
    a: Counter[str] = fact.value
    b: Counter[str] = partner.value
    if a == b:
        in_order = not options.same_layout or fact.by_rank == partner.by_rank
        return _EQUAL if in_order else _Result(1.0, "come in another order")
    if fact.columns and fact.columns == partner.columns and not options.same_layout:
        return _EQUAL
    if fact.kind == "samples" and not options.same_layout:
        if partner.is_alone and options.has_shares and all(samples == fact.by_rank[0] for samples in partner.by_rank):
            # Each rank trains a model for itself, on all samples, as a teacher before the loop.
            return _EQUAL
        if _same_tensors(fact, partner):
            is_of_loader = bool(fact.loaded) and fact.loaded == partner.loaded
            text = "are paired in another way; each tensor of the batch has the same rows"
            return _EQUAL if is_of_loader else _Result(0.0, text, is_certain=False)
    if fact.kind == "evaluation" and not options.same_layout:
        # Equal batches on all ranks repeat an evaluation, unless all samples are equal, as with even random numbers.
        everything = Counter(sample for samples in partner.by_rank for sample in samples)
        if all(a[sample] in (b[sample], everything[sample]) for sample in a | everything):
            return _EQUAL
        if options.drops_repeats and a.keys() == b.keys() and a <= b:
            return _EQUAL
    missing, extra = sum((a - b).values()), sum((b - a).values())
    if missing == extra:
        fields = [name for name, number in fact.fields.items() if partner.fields.get(name) != number]
        only = f"; only {' and '.join(fields)} differ{'s' * (len(fields) == 1)}" if 0 < len(fields) < len(fact.fields) else ""
        return _Result(1.0, f"are others: {extra} of {sum(b.values())} are not in the other run{only}")
    text = f"are {sum(b.values())} instead of {sum(a.values())}; {missing} are missing and {extra} are not in the other run"
    return _Result(1.0, text)


def _same_tensors(fact: Fact, partner: Fact) -> bool:
    """Return True if each tensor of the batches has the same rows over all ranks, or the rows of the reference on each rank."""
    if not fact.fields or fact.fields.keys() != partner.fields.keys():
        return False
    is_split = [partner.fields[name] == number for name, number in fact.fields.items()]
    shared = partner.shared_fields
    return any(is_split) and all(
        split or shared.get(name) == number for split, (name, number) in zip(is_split, fact.fields.items(), strict=True)
    )


def _compare_rates(fact: Fact, partner: Fact, options: _Options) -> _Result:
    a, b = tuple(fact.value), tuple(partner.value)
    if len(a) != len(b) and not options.same_layout:
        # A strategy may split a group of parameters, whose parts have one rate.
        a, b = tuple(sorted({*a})), tuple(sorted({*b}))
    first, second = (", ".join(f"{rate:.6g}" for rate in rates[:3]) for rates in (a, b))
    return _compare_tuples(a, b, options, f"is {second} instead of {first}")


def _compare_optimizers(fact: Fact, partner: Fact, options: _Options) -> _Result:
    return _compare_tuples(fact.value, partner.value, options, describe_optimizer_state(fact.value, partner.value))


def describe_optimizer_state(expected: tuple[int, float], state: tuple[int, float]) -> str:
    """Return how many tensors two states of an optimizer have, and their norms."""
    return f"has {state[0]} tensors with the norm {state[1]:.6g} instead of {expected[0]} with {expected[1]:.6g}"


def _compare_tuples(a: Sequence[float], b: Sequence[float], options: _Options, text: str) -> _Result:
    relative = 1.0 if len(a) != len(b) else max((relative_difference(x, y) for x, y in zip(a, b, strict=True)), default=0.0)
    return _Result(relative, text if relative > options.tolerance else "")


def _compare_metrics(fact: Fact, partner: Fact, options: _Options) -> _Result:
    first, second, slack = float(fact.value), float(partner.value), 0.0
    if isinstance(fact.value, str):
        # The last printed digit may differ by rounding.
        mantissa, _, exponent = fact.value.lower().partition("e")
        slack = 1.5 * 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
    relative = relative_difference(first, second, options.scale)
    is_rounding = relative <= options.tolerance or abs(first - second) <= slack
    return _Result(relative, "" if is_rounding else f"is {second:.6g} instead of {first:.6g}")


def _compare_names(fact: Fact, partner: Fact, options: _Options) -> _Result:
    text = describe_names(fact.value, partner.value)
    return _Result(0.0, text) if text else _EQUAL


def describe_names(expected: Sequence[str], names: Sequence[str], where: str = "") -> str:
    """Return in which names a list differs from the expected one, and ``where``; "" if in none."""
    different = sorted(set(expected) ^ set(names))
    if not different:
        return ""
    more = f" and {len(different) - 3} more" if len(different) > 3 else ""
    number = f"are {len(names) or 'none'} instead of {len(expected) or 'none'}{where}"
    return f"{number}: {', '.join(different[:3])}{more} {'differs' if len(different) == 1 else 'differ'}"


def _compare_plain(fact: Fact, partner: Fact, options: _Options) -> _Result:
    if _plain(fact) == _plain(partner):
        return _EQUAL
    if fact.kind in ("rng", "generator"):
        return _Result(0.0, "has another state before the step")
    if fact.kind != "variable":
        return _Result(0.0, f"are {list(partner.value) or 'none'} instead of {list(fact.value) or 'none'}")
    a, b = fact.value["value"], partner.value["value"]
    # A number of one run may be a tensor, or not finite, in the other one.
    return _Result(0.0, "has other values" if a is None or b is None else f"is {b:.6g} instead of {a:.6g}")


_COMPARE: Mapping[str, Callable[[Fact, Fact, _Options], _Result]] = {
    **dict.fromkeys(TENSORS, _compare_tensors),
    "loss": _compare_losses,
    "samples": _compare_samples,
    "evaluation": _compare_samples,
    "lr": _compare_rates,
    **dict.fromkeys(("frozen", "mode"), _compare_names),
    "optimizer_state": _compare_optimizers,
    "metric": _compare_metrics,
}


def _plain(fact: Fact) -> Any:
    return fact.value["digest"] if fact.kind in ("variable", "generator") else fact.value
