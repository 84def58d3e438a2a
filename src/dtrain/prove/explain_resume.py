"""Find the likely cause of a difference after a resume (``explain_resume``), and ranks that have lost their state. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import replace

import numpy as np

from dtrain.arguments import format_count
from dtrain.prove.causes import Cause, cause
from dtrain.prove.compare import TOLERANCE, Difference, describe_optimizer_state, relative_difference
from dtrain.prove.run_records import Fact, RunRecord

# Differences that may follow from the state of the optimizer.
_OF_UPDATES = ("loss", "gradient", "parameter", "buffer", "metric", "evaluation")


def explain_resume(difference: Difference, record: RunRecord, reference: RunRecord, whole: RunRecord | None) -> Cause:
    """Return the likely cause of the first difference of a run that continues a killed run.

    Args:
        difference: the first difference from ``reference``.
        record: record of the run that resumes.
        reference: record of the run on one rank that was not interrupted.
        whole: record of such a run on the ranks of ``record``; None without one.
    """
    if again := _inputs_that_begin_again(difference, reference):
        return replace(cause("state_not_saved", "variable"), evidence=again)
    if difference.code == "weights_differ_between_ranks":
        ranks = ", ".join(map(str, difference.ranks))
        evidence = f"Without a resume, the weights of rank {ranks} are those of rank 0."
        return replace(cause("state_of_rank_lost"), evidence=evidence)
    if _begins_again(record, reference) and (evidence := _goes_on(record, reference)):
        code = "names_not_matched" if record.note("unmatched") is not None else "parameters_not_saved"
        return replace(cause(code), evidence=f"{_unmatched_names(record)}{evidence}")
    code = _code(difference, record, reference)
    if code in ("data_repeated_after_resume", "data_skipped_after_resume"):
        steps = _samples_of_other_steps(difference, reference, is_earlier=code == "data_repeated_after_resume")
        return replace(cause(code), shown=bool(steps), evidence=steps)
    if code == "parameters_not_saved":
        if part := _part_that_begins_again(record, reference, difference.step):
            return replace(cause("shards_not_saved"), evidence=part)
        if names := _unmatched_names(record):
            return replace(cause("names_not_matched"), evidence=names.rstrip())
    if code == "unknown" and whole is not None and difference.kind in _OF_UPDATES and (lost := lost_states(record, whole)):
        return replace(cause(lost[0].code or ""), evidence=f"The state of the optimizer {lost[0].text}.")
    is_same = len(record.ranks) == len(reference.ranks)
    may_follow = is_same and (code == "unknown" or difference.kind == "transform")
    if may_follow and (number := _lost_variable(record, reference, difference.step)):
        return replace(cause("state_not_saved", "variable"), evidence=number)
    return cause(code, difference.kind)


def lost_states(record: RunRecord, whole: RunRecord) -> list[Difference]:
    """Return the optimizers whose state on some ranks is not that of an uninterrupted run on as many ranks.

    Args:
        record: record of a run that resumes.
        whole: record of the uninterrupted run.
    """
    differences = []
    for index, step in record.first_steps.items():
        states = [_states(run, step, index) for run in (whole, record)]
        if len(states[0]) != len(states[1]) or None in (*states[0], *states[1]):
            continue
        pairs = [(a, b) for a, b in zip(*states, strict=True) if a is not None and b is not None]
        ranks = tuple(rank for rank, (a, b) in enumerate(pairs) if a[0] != b[0] or relative_difference(a[1], b[1]) > TOLERANCE)
        if ranks:
            text = f"{describe_optimizer_state(*pairs[ranks[0]])} on rank {ranks[0]}"
            code = "state_of_rank_lost" if len(ranks) < len(pairs) else "optimizer_not_saved"
            differences.append(Difference(step=step, kind="optimizer_state", name="", text=text, ranks=ranks, code=code))
    return differences


def _states(record: RunRecord, step: int, index: int) -> list[tuple[int, float] | None]:
    """Return the number and the norm of the tensors in the state of an optimizer, before a step, on each rank."""
    return [
        next(
            (
                (row["tensors"], float(row["norm"]))
                for row in record.rows("optimizer_state", rank)
                if (row["step"], row["optimizer_index"]) == (step, index)
            ),
            None,
        )
        for rank in range(len(record.ranks))
    ]


def _code(difference: Difference, record: RunRecord, reference: RunRecord) -> str:
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
        return _of_samples(fact, difference.other, reference)
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
    resumed = _changed(record, reference)
    first = {fact.name: fact.value.digest for fact in reference.of_kind("initial", 0)}
    return bool(resumed) and all(fact.value.digest == first.get(fact.name) for fact in resumed)


def _changed(record: RunRecord, reference: RunRecord) -> list[Fact]:
    """Return the parameters with which a resume begins, of those that the other run changes."""
    first = {fact.name: fact.value.digest for fact in reference.of_kind("initial", 0)}
    changed = {fact.name for fact in reference.of_kind("parameter") if first.get(fact.name) != fact.value.digest}
    return [fact for fact in record.of_kind("initial") if fact.name in changed]


def _goes_on(record: RunRecord, reference: RunRecord) -> str:
    """Return that the training goes on with the weights of its begin, in a sentence; "" if it begins again as a whole."""
    step = min(record.steps, default=0)
    began, other, ours = (
        {fact.optimizer_index: fact.value for fact in run.of_kind("samples", at) if fact.value}
        for run, at in ((reference, 0), (reference, step), (record, step))
    )
    has_state = any(row["tensors"] for row in record.rows("optimizer_state") if row["step"] == step)
    if step and (has_state or (bool(ours) and ours == other != began)):
        count = format_count(len(_changed(record, reference)), "parameter")
        what = "the state of the optimizer is" if has_state else "the batch is"
        return f"{count} of {len(record.of_kind('initial', step))} begin again, and {what} that of step {step}."
    return ""


def _unmatched_names(record: RunRecord) -> str:
    """Return which names of a state dict no tensor of the model had, in a sentence and a space; "" without such names."""
    note = record.note("unmatched")
    if note is None:
        return ""
    return f"load_state_dict(strict=False) met {note['unexpected']}, and found none of {note['missing']}. "


def _part_that_begins_again(record: RunRecord, reference: RunRecord, step: int) -> str:
    """Return how much of a tensor has its first value after a resume, in a sentence; "" if no tensor has a part of it."""
    places = ("initial", 0), ("parameter", step - 1)
    began, saved = ({fact.name: fact.value for fact in reference.of_kind(*place)} for place in places)
    for fact in record.of_kind("initial", step):
        values = [facts[fact.name].sketch for facts in (began, saved) if fact.name in facts]
        if len(values) == 2 and len(values[0]) == len(values[1]) == len(fact.value.sketch) == math.prod(fact.value.shape):
            again, kept = (np.isclose(fact.value.sketch, value, rtol=TOLERANCE, atol=0.0) for value in values)
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


def _of_samples(fact: Fact, partner: Fact, reference: RunRecord) -> str:
    for other in reference.of_kind("samples"):
        if other.value == partner.value:
            return "data_repeated_after_resume" if other.step < fact.step else "data_skipped_after_resume"
    if has_same_labels(fact.value, partner.value) and len({sample.split("/")[0] for sample in fact.value}) > 1:
        return "augmentation_by_worker"
    seen = sum((partner.value & _samples_until(reference, fact.step)).values())
    return "data_repeated_after_resume" if seen * 2 > sum(partner.value.values()) else "data_skipped_after_resume"


def _samples_until(reference: RunRecord, step: int) -> Counter[str]:
    samples = Counter[str]()
    for fact in reference.of_kind("samples"):
        if fact.step < step:
            samples |= fact.value
    return samples


def _samples_of_other_steps(difference: Difference, reference: RunRecord, *, is_earlier: bool) -> str:
    """Return how many samples of a step are those of earlier or of later steps, in a sentence; "" if most of them are not."""
    assert difference.other is not None
    samples, earlier = difference.other.value, _samples_until(reference, difference.step)
    others = earlier if is_earlier else _samples_until(reference, max(reference.steps) + 1) - earlier
    count, total = sum((samples & others).values()), sum(samples.values())
    if 2 * count <= total:
        return ""
    return f"{count} of {total} samples are those of {'an earlier' if is_earlier else 'a later'} step of the other run."


def has_same_labels(a: Counter[str], b: Counter[str]) -> bool:
    """Return True if two collections of samples have the same integers, as labels, whatever their floating-point numbers."""

    def labels(samples: Collection[str]) -> Counter[str]:
        return Counter(sample.split("/")[0] for sample in samples)

    return labels(list(a.elements())) == labels(list(b.elements()))
