"""Name the likely cause of a difference from the evidence in the records, in a sentence (``explain``). Pure, without torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dtrain.prove.compare import Difference, relative_difference
from dtrain.prove.run_config import SKETCH_SIZE, RunConfig
from dtrain.prove.run_records import Fact, RunRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A likely cause.

    Args:
        code: short name, stable for programs.
        sentence: the cause, and the repair.
        page: page of the documentation that explains it.
        shown: if True, the records show the cause, such as two ranks with the same samples. If False, it is a guess from
            circumstances, such as a loss that differs in a model with batch norm.
    """

    code: str
    sentence: str
    page: str
    shown: bool = True

    @property
    def advice(self) -> str:
        """The sentence, marked if it is a guess."""
        return self.sentence if self.shown or self.code == "unknown" else f"Possibly: {self.sentence}"


_SENTENCES: Mapping[str, Mapping[str, str]] = {
    "determinism": {
        "not_deterministic": (
            "Two equal runs differ: seed all generators with dt.seed_all before the model is built, and let nothing depend on "
            "the clock."
        ),
        "shared_random_per_rank": (
            "Ranks draw a random choice that all of them must share. Seed its generator without the rank."
        ),
        "same_dropout_on_ranks": (
            "All ranks draw the same random numbers for different samples. Seed with the rank: dt.seed_all(seed, rank)."
        ),
    },
    "microbatch": {
        "loss_weighting": (
            "The LossSum has a mean as total, or a weight that is not the number of items behind it. Pass it the sum and the "
            "number."
        ),
        "local_loss_count": (
            "The loss is divided by the items of this rank or microbatch, not by the items of the global batch."
        ),
        "padding_in_loss": (
            "Padding changes the loss, and microbatches are padded to different lengths. Leave it out of sum and weight, "
            "and of means in the model."
        ),
        "accumulation_not_scaled": (
            "The gradient grows with the number of microbatches. Divide each loss by the number of microbatches of the step."
        ),
        "accumulation_tail_dropped": (
            "The last microbatches of an epoch do not fill a step, and their gradient goes into a step of the next epoch."
        ),
    },
    "sharding": {
        "local_batch_norm": (
            "Batch norm normalizes with the samples of one rank and microbatch. Use group norm, or average with buffers='mean'."
        ),
        "clip_local_norm": (
            "Each rank scales its gradient by a factor of its own, as clipping by a local norm does. Use dt.clip_grad_norm_."
        ),
        "optimizer_before_sharding": (
            "The optimizer has no parameter of the model, so the model does not train. Build the optimizer after sharding."
        ),
        "weights_differ_between_ranks": (
            "Ranks begin with different weights. Broadcast the weights of rank 0, as shard_model does."
        ),
        "adapter_init": (
            "A parameter begins with other values if the model is built on the meta device. Initialize it in reset_parameters."
        ),
    },
    "data": {
        "sampler_without_rank": "All ranks read the same samples. Give the sampler the rank and the number of ranks.",
        "sampler_seed_per_rank": (
            "Ranks shuffle with different seeds, so samples repeat and others are left out. Use one seed on all ranks."
        ),
        "shuffle_without_epoch": "Every epoch has the same order. Call sampler.set_epoch(epoch) at the begin of each epoch.",
        "batch_grows_with_ranks": (
            "The batch size belongs to a rank, so the global batch grows with the ranks. Divide it by the number of ranks."
        ),
        "data_depends_on_ranks": "Global batches have other samples on another number of ranks.",
        "augmentation_by_worker": (
            "The samples are the same and their values differ: an augmentation draws from the generator of a process. Draw "
            "from a generator of the sample, as build_loader(transform=...) does."
        ),
    },
    "from_ddp": {
        "gradient_scaled_by_ranks": (
            "The gradient is divided or multiplied by the number of ranks once too often. DDP and FSDP2 average over ranks."
        ),
        "gradient_not_reduced": (
            "A parameter has another gradient on each rank at the update. Reduce it over ranks, as the other gradients."
        ),
    },
    "precision": {
        "clip_before_unscale": "The gradient is clipped while it has the loss scale. Call scaler.unscale_(optimizer) before.",
        "buffer_rounded": "A buffer is rounded to a dtype with too few bits for its values. Keep buffers in float32.",
        "rotary_rounded": (
            "A table of positions is computed in low precision. Compute frequencies and angles in float32, and round the "
            "result."
        ),
        "gradient_lost": (
            "The gradient is not that of float32: a count or a sum overflows or is rounded, or values underflow. Keep counts "
            "and sums in float32, and scale a loss in float16."
        ),
        "low_precision_error": "A module loses more digits than its dtype explains. Compute it in float32.",
    },
    "schedules": {
        "schedule_per_microbatch": "The schedule advances once a microbatch. Call scheduler.step() once after each update.",
        "schedule_by_world_size": "The schedule advances once for each rank. Call scheduler.step() once after each update.",
        "rate_by_world_size": (
            "The learning rate depends on the number of ranks. Compute it from the global batch and from the samples of "
            "all ranks."
        ),
    },
    "checkpoints": {
        "state_begins_again": (
            "After the resume the state begins at step 0, so schedules and intervals begin again. Load it with dt.load_sharded."
        ),
        "schedule_not_saved": (
            "A resume begins the schedule of the learning rate again. Save the scheduler with the checkpoint."
        ),
        "ema_not_saved": "A resume begins an average of the weights again. Pass it to step.init(stateful={...}).",
        "rng_not_saved": "A resume begins a random generator again. Save its state with the checkpoint.",
        "optimizer_not_saved": "A resume begins the state of the optimizer again. Save it with the checkpoint.",
        "parameters_not_saved": (
            "A resume begins with other parameters or buffers than the run had. Save all that train, and all buffers."
        ),
        "early_stop_not_saved": (
            "A resume forgets the best value or the patience of early stopping. Pass it to step.init(stateful={...})."
        ),
        "state_not_saved": "A resume loses a value that the loop changes. Pass it to step.init(stateful={...}).",
        "data_repeated_after_resume": (
            "A resume reads samples again that the run has trained on. Pass the loader to step.init(loader=loader)."
        ),
        "data_skipped_after_resume": (
            "A resume leaves out samples that the run has not trained on. Restore the position once, and skip no batches."
        ),
        "tied_weights_untied": "Two names of one parameter are two parameters now. Tie them again after loading.",
        "export_without_ema": "The exported weights are not the weights that were evaluated. Export inside use_average.",
        "export_dtype": "The exported weights have fewer bits than the model. Export in the dtype of the model.",
        "export_differs": "The exported weights are not the weights of the model.",
    },
    "finetuning": {
        "frozen_parameter_trains": (
            "A parameter with requires_grad=False changes in the update. Leave it out of the optimizer, or drop its gradient."
        ),
    },
    "embeddings": {
        "gather_without_gradient": (
            "The loss gathers tensors of other ranks without their gradient. Use dt.dist.all_gather_with_grad."
        ),
    },
    "loop": {
        "evaluation_drops_tail": "The evaluation leaves samples out. Use dt.evaluate, or a loader with drop_last=False.",
        "evaluation_counts_twice": (
            "The evaluation counts samples twice, as a sampler that pads to equal shares does. Use dt.evaluate."
        ),
    },
    "observing": {
        "metric_of_rank_0": "The metric is that of rank 0's samples. Reduce it over ranks: dt.reduce_metrics.",
        "metric_mean_of_means": (
            "The metric is a mean of means over different numbers of samples. Add up sums and counts, and divide once."
        ),
    },
    "memory": {
        "counter_doubled_by_recompute": (
            "A forward that activation checkpointing repeats changes a value twice. Change it outside of the checkpointed "
            "block."
        ),
        "recompute_draws_again": (
            "A block that activation checkpointing repeats draws other random numbers. Keep preserve_rng_state=True."
        ),
    },
    "prove": {
        "unknown": "The records name no cause. Compare the two runs at this place.",
    },
}
"""Cause and repair by page of the documentation, and by code."""


_GUESSES: Mapping[str, Collection[str]] = {
    **dict.fromkeys(("padding_in_loss", "local_loss_count", "local_batch_norm", "shared_random_per_rank"), ()),
    **dict.fromkeys(("gather_without_gradient", "clip_local_norm", "sampler_seed_per_rank", "adapter_init"), ()),
    **dict.fromkeys(("metric_of_rank_0", "metric_mean_of_means", "rotary_rounded", "gradient_lost"), ()),
    **dict.fromkeys(("recompute_draws_again", "early_stop_not_saved", "unknown"), ()),
    "rng_not_saved": ("rng", "generator"),
    "ema_not_saved": ("transform",),
    "state_not_saved": ("variable",),
}
"""Causes that follow from circumstances, each with the kinds of differences that show it."""


def cause(code: str, kind: str = "") -> Cause:
    """Return the cause with a code, for a difference of a kind."""
    page, sentence = next((page, sentences[code]) for page, sentences in _SENTENCES.items() if code in sentences)
    return Cause(code=code, sentence=sentence, page=page, shown=code not in _GUESSES or kind in _GUESSES[code])


_NEARLY_EQUAL = 1e-6
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
) -> Cause:
    """Return the likely cause of the first difference between ``record`` and ``reference``.

    Args:
        difference: the first difference.
        record: record of the run that differs.
        reference: record of the other run; None for a check of one run.
        config: the run that differs.
        resumed: if True, the run continues a killed run.
    """
    if difference.code is not None:
        return cause(difference.code, difference.kind)
    assert reference is not None, "a difference without a code comes from a comparison"
    if config.name.endswith("again"):
        return cause("not_deterministic")
    if resumed:
        return cause(_of_resume(difference, record, reference), difference.kind)
    if not config.recompute:
        draws = difference.kind == "gradient" and any(row["draws"] for row in reference.step_rows(difference.step))
        return cause("recompute_draws_again" if draws else "counter_doubled_by_recompute")
    evidence = _Evidence(difference=difference, record=record, reference=reference, config=config)
    code = _of_layout(evidence)
    return cause(code) if code != "loss_weighting" else replace(cause(code), shown=_has_weights_of_means(evidence))


def _of_layout(evidence: _Evidence) -> str:
    """Return the code of a difference between layouts."""
    kind, (a, b) = evidence.difference.kind, evidence.values
    chosen = {"samples": _of_samples, "loss": _of_loss, "gradient": _of_gradient, "lr": _of_lr}.get(kind)
    if chosen is not None:
        return chosen(evidence)
    if kind == "buffer" and evidence.record.note("batch_norm") is not None:
        return "local_batch_norm"
    if kind == "evaluation":
        return "evaluation_counts_twice" if sum(b.values()) > sum(a.values()) else "evaluation_drops_tail"
    if kind == "metric" and evidence.difference.other is not None:
        # A metric of several ranks needs a collective between the evaluation and the log.
        if evidence.config.ranks == 1:
            return "metric_mean_of_means"
        events = {event.split(":")[0] for event in evidence.difference.other.by_rank[0].get("events", ())}
        return "metric_mean_of_means" if events & _REDUCTIONS else "metric_of_rank_0"
    # Initial values that depend on the ranks belong to a model that is built in two ways, as on the meta device.
    return "adapter_init" if kind == "initial" else "unknown"


def _of_resume(difference: Difference, record: RunRecord, reference: RunRecord) -> str:
    kind, fact = difference.kind, difference.reference
    if kind == "initial" and difference.step == 0:
        return "state_begins_again"
    if kind == "variable" and fact is not None:
        row = fact.value
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


def _of_loss(evidence: _Evidence) -> str:
    a, b = evidence.values
    step = evidence.difference.step
    if evidence.record.note("batch_norm") is not None:
        return "local_batch_norm"
    if _differ_between_ranks(evidence.record, step):
        return "shared_random_per_rank"
    if _gathers(evidence.record, step):
        return "gather_without_gradient"
    padded = _lengths(evidence.record, step) != _lengths(evidence.reference, step)
    if a.weight is not None and b.weight is not None:
        return "padding_in_loss" if padded and not _has_weights_of_means(evidence) else "loss_weighting"
    factor = _common_factor(evidence)
    if factor is not None and relative_difference(factor, 1.0) > _NEARLY_EQUAL:
        return "accumulation_not_scaled"
    return "padding_in_loss" if padded else "local_loss_count"


def _has_weights_of_means(evidence: _Evidence) -> bool:
    """Return True if each microbatch has the weight 1 in both runs, and their numbers differ, as for means."""
    a, b = evidence.values
    return bool(a.weight == a.count and b.weight == b.count and a.count != b.count)


def _of_gradient(evidence: _Evidence) -> str:
    step = evidence.difference.step
    if _gathers(evidence.record, step):
        return "gather_without_gradient"
    factor = _common_factor(evidence)
    if factor is not None:
        ours, theirs = evidence.record.step_rows(step)[0]["backwards"], evidence.reference.step_rows(step)[0]["backwards"]
        of_microbatches = ours != theirs and relative_difference(factor, ours / theirs) < _NEARLY_EQUAL
        if of_microbatches:
            return "accumulation_not_scaled"
        of_ranks = any(
            relative_difference(factor, scale) < _NEARLY_EQUAL for scale in (evidence.config.ranks, 1 / evidence.config.ranks)
        )
        return "gradient_scaled_by_ranks" if of_ranks else "clip_local_norm"
    if evidence.config.ranks > 1 and _few_factors(evidence):
        return "clip_local_norm"
    if _differ_between_ranks(evidence.record, step):
        return "shared_random_per_rank"
    if evidence.record.note("batch_norm") is not None:
        return "local_batch_norm"
    return "unknown"


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
            if row["kind"] == "variable" and row["step"] == step and (row["type"] == "generator" or row.get("of_model")):
                values.setdefault(row["name"], set()).add(row["digest"])
    return any(len(digests) > 1 for digests in values.values())


def _gradients(evidence: _Evidence) -> list[tuple[Any, Any]]:
    """Return the sketches of all gradients of the step, from the reference and from the run that differs."""
    pairs = []
    for fact in evidence.reference.of_kind("gradient", evidence.difference.step):
        partner = evidence.record.facts.get(fact.key)
        if partner is not None and fact.value.norm and partner.value.shape == fact.value.shape:
            pairs.append((np.asarray(fact.value.sketch), np.asarray(partner.value.sketch)))
    return pairs


def _common_factor(evidence: _Evidence) -> float | None:
    """Return the number by which all gradients of a step differ; None if there is none."""
    factors = []
    for a, b in _gradients(evidence):
        factor = float(a @ b / (a @ a))
        if np.linalg.norm(b - factor * a) > _NEARLY_EQUAL * np.linalg.norm(b):
            return None
        factors.append(factor)
    if not factors or max(factors) - min(factors) > _NEARLY_EQUAL * abs(max(factors)):
        return None
    return factors[0]


def _few_factors(evidence: _Evidence) -> bool:
    """Return True if every element of the small gradients is scaled by one of at most as many factors as ranks."""
    ratios = []
    for a, b in _gradients(evidence):
        # The sketch of a large tensor adds elements of several ranks.
        if len(a) < SKETCH_SIZE:
            large = np.abs(a) > _NEARLY_EQUAL * np.abs(a).max()
            ratios.append(b[large] / a[large])
    if not ratios:
        return False
    values = np.sort(np.concatenate(ratios))
    groups = 1 + int((np.diff(values) > _NEARLY_EQUAL * np.abs(values[1:])).sum())
    return groups <= evidence.config.ranks and len(values) > 2 * evidence.config.ranks
