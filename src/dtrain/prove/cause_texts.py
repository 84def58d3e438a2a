"""Say the likely causes of differences in sentences, with the page that explains each (``cause``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A likely cause.

    Args:
        code: short name, stable for programs.
        sentence: the cause, and the repair.
        page: page of the documentation that explains it.
    """

    code: str
    sentence: str
    page: str


_SENTENCES: Mapping[str, tuple[str, str]] = {
    "not_deterministic": (
        "Two equal runs differ: seed all generators with dt.seed_all before the model is built.",
        "determinism",
    ),
    "loss_weighting": (
        "The loss is a mean whose weight is not the number of items behind it. Return the sum and the count as a LossSum.",
        "microbatch",
    ),
    "local_loss_count": (
        "The loss is divided by the items of this rank or microbatch, not by the items of the global batch.",
        "microbatch",
    ),
    "padding_in_loss": (
        "Padding changes the loss, and microbatches are padded to different lengths. Leave it out of sum and weight, and of "
        "means in the model.",
        "microbatch",
    ),
    "local_batch_norm": (
        "Batch norm normalizes with the samples of one rank and microbatch. Use group norm, or average with buffers='mean'.",
        "sharding",
    ),
    "sampler_without_rank": ("All ranks read the same samples. Give the sampler the rank and the number of ranks.", "data"),
    "sampler_seed_per_rank": (
        "Ranks shuffle with different seeds, so samples repeat and others are left out. Use one seed on all ranks.",
        "data",
    ),
    "shuffle_without_epoch": (
        "Every epoch has the same order. Call sampler.set_epoch(epoch) at the begin of each epoch.",
        "data",
    ),
    "batch_grows_with_ranks": (
        "The batch size belongs to a rank, so the global batch grows with the ranks. Divide it by the number of ranks.",
        "data",
    ),
    "data_depends_on_ranks": ("Global batches have other samples on another number of ranks.", "data"),
    "augmentation_by_worker": (
        "The samples are the same and their values differ: an augmentation draws from the generator of a process. "
        "Draw from a generator of the sample, as build_loader(transform=...) does.",
        "data",
    ),
    "shared_random_per_rank": (
        "Ranks draw a random choice that all of them must share. Seed its generator without the rank.",
        "determinism",
    ),
    "same_dropout_on_ranks": (
        "All ranks draw the same random numbers for different samples. Seed with the rank: dt.seed_all(seed, rank).",
        "determinism",
    ),
    "accumulation_not_scaled": (
        "The gradient grows with the number of microbatches. Divide each loss by the number of microbatches of the step.",
        "microbatch",
    ),
    "accumulation_tail_dropped": (
        "The last microbatches of an epoch do not fill a step, and their gradient goes into a step of the next epoch.",
        "microbatch",
    ),
    "gradient_scaled_by_ranks": (
        "The gradient is divided or multiplied by the number of ranks once too often. DDP and FSDP2 average over ranks.",
        "from_ddp",
    ),
    "clip_before_unscale": (
        "The gradient is clipped while it has the loss scale. Call scaler.unscale_(optimizer) before.",
        "precision",
    ),
    "clip_local_norm": (
        "Each rank scales its gradient by a factor of its own, as clipping by a local norm does. Use dt.clip_grad_norm_.",
        "sharding",
    ),
    "schedule_per_microbatch": (
        "The schedule advances once a microbatch. Call scheduler.step() once after each update.",
        "schedules",
    ),
    "schedule_by_world_size": (
        "The schedule advances once for each rank. Call scheduler.step() once after each update.",
        "schedules",
    ),
    "rate_by_world_size": (
        "The learning rate depends on the number of ranks. Compute it from the global batch and from the samples of all ranks.",
        "schedules",
    ),
    "state_begins_again": (
        "After the resume the state begins at step 0, so schedules and intervals begin again. Load it with dt.load_sharded.",
        "checkpoints",
    ),
    "schedule_not_saved": (
        "A resume begins the schedule of the learning rate again. Save the scheduler with the checkpoint.",
        "checkpoints",
    ),
    "ema_not_saved": (
        "A resume begins an average of the weights again. Pass it to step.init(stateful={...}).",
        "checkpoints",
    ),
    "rng_not_saved": ("A resume begins a random generator again. Save its state with the checkpoint.", "checkpoints"),
    "optimizer_not_saved": ("A resume begins the state of the optimizer again. Save it with the checkpoint.", "checkpoints"),
    "parameters_not_saved": (
        "A resume begins with other parameters or buffers than the run had. Save all that train, and all buffers.",
        "checkpoints",
    ),
    "early_stop_not_saved": (
        "A resume forgets the best value or the patience of early stopping. Pass it to step.init(stateful={...}).",
        "checkpoints",
    ),
    "state_not_saved": (
        "A resume loses a value that the loop changes. Pass it to step.init(stateful={...}).",
        "checkpoints",
    ),
    "data_repeated_after_resume": (
        "A resume reads samples again that the run has trained on. Pass the loader to step.init(loader=loader).",
        "checkpoints",
    ),
    "data_skipped_after_resume": (
        "A resume leaves out samples that the run has not trained on. Restore the position once, and skip no batches.",
        "checkpoints",
    ),
    "optimizer_before_sharding": (
        "The optimizer has no parameter of the model, so the model does not train. Build the optimizer after sharding.",
        "sharding",
    ),
    "frozen_parameter_trains": (
        "A parameter with requires_grad=False changes in the update. Leave it out of the optimizer, or drop its gradient.",
        "finetuning",
    ),
    "tied_weights_untied": (
        "Two names of one parameter are two parameters now. Tie them again after loading.",
        "checkpoints",
    ),
    "weights_differ_between_ranks": (
        "Ranks begin with different weights. Broadcast the weights of rank 0, as shard_model does.",
        "sharding",
    ),
    "gradient_not_reduced": (
        "A parameter has another gradient on each rank at the update. Reduce it over ranks, as the other gradients.",
        "from_ddp",
    ),
    "gather_without_gradient": (
        "The loss gathers tensors of other ranks without their gradient. Use dt.dist.all_gather_with_grad.",
        "embeddings",
    ),
    "buffer_rounded": (
        "A buffer is rounded to a dtype with too few bits for its values. Keep buffers in float32.",
        "precision",
    ),
    "rotary_rounded": (
        "A table of positions is computed in low precision. Compute frequencies and angles in float32, and round the result.",
        "precision",
    ),
    "low_precision_error": ("A module loses more digits than its dtype explains. Compute it in float32.", "precision"),
    "evaluation_drops_tail": (
        "The evaluation leaves samples out. Use dt.evaluate, or a loader with drop_last=False.",
        "loop",
    ),
    "evaluation_counts_twice": (
        "The evaluation counts samples twice, as a sampler that pads to equal shares does. Use dt.evaluate.",
        "loop",
    ),
    "metric_of_rank_0": ("The metric is that of rank 0's samples. Reduce it over ranks: dt.reduce_metrics.", "observing"),
    "metric_mean_of_means": (
        "The metric is a mean of means over different numbers of samples. Add up sums and counts, and divide once.",
        "observing",
    ),
    "export_without_ema": (
        "The exported weights are not the weights that were evaluated. Export inside use_average.",
        "checkpoints",
    ),
    "export_dtype": (
        "The exported weights have fewer bits than the model. Export in the dtype of the model.",
        "checkpoints",
    ),
    "export_differs": ("The exported weights are not the weights of the model.", "checkpoints"),
    "counter_doubled_by_recompute": (
        "A forward that activation checkpointing repeats changes a value twice. Change it outside of the checkpointed block.",
        "memory",
    ),
    "recompute_draws_again": (
        "A block that activation checkpointing repeats draws other random numbers. Keep preserve_rng_state=True.",
        "memory",
    ),
    "adapter_init": (
        "A parameter begins with other values if the model is built on the meta device. Initialize it in reset_parameters.",
        "sharding",
    ),
    "unknown": ("The records name no cause. Compare the two runs at this place.", "prove"),
}


def cause(code: str) -> Cause:
    """Return the cause with a code."""
    sentence, page = _SENTENCES[code]
    return Cause(code=code, sentence=sentence, page=page)


CODES = tuple(_SENTENCES)
"""Short names of all causes."""
