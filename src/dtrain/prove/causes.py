"""List the causes of differences, with their sentences, pages and experiments (``cause``). Pure, without torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A likely cause.

    Args:
        code: short name, stable for programs.
        sentence: the cause, and the repair.
        page: page of the documentation that explains it.
        shown: if True, the records or an experiment show the cause, such as two ranks with the same samples. If False, it is a
            guess from circumstances, such as a loss that differs in a model with batch norm.
        evidence: what shows the cause, in a sentence; "" if the difference itself does.
    """

    code: str
    sentence: str
    page: str
    shown: bool = True
    evidence: str = ""

    @property
    def advice(self) -> str:
        """The sentence, marked if it is a guess."""
        return self.sentence if self.shown or self.code == "unknown" else f"Possibly: {self.sentence}"


_SENTENCES: Mapping[str, Mapping[str, str]] = {
    "determinism": {
        "not_deterministic": (
            "Two equal runs differ: seed all generators with dt.seed_all before the model is built, and let nothing depend on "
            "the clock, or on the order of a set or a folder. Sort them."
        ),
        "shared_random_per_rank": (
            "Ranks draw a random choice that all of them must share. Seed its generator without the rank."
        ),
        "random_numbers_repeat": (
            "A seed is set again during the training, so its random numbers repeat. Draw for an evaluation from a generator of "
            "its own."
        ),
        "same_dropout_on_ranks": (
            "All ranks draw the same random numbers for different samples. Seed with the rank: dt.seed_all(seed, rank)."
        ),
        "same_noise_on_ranks": (
            "All ranks draw the same noise for different samples. Seed the generator with the rank, draw for the global batch "
            "and take the rank's part, or draw from a generator of the sample."
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
        "samples_interact": (
            "The loss of a sample depends on the other samples of its rank and microbatch, as with negatives within a batch, a "
            "statistic of the batch or a sort. Gather the samples of all ranks, or use grad_cache_step."
        ),
        "counts_microbatches": (
            "A value of the script advances once for each microbatch of a rank. Advance it once a step, or compute it from "
            "state.step."
        ),
        "accumulation_not_scaled": (
            "The gradient grows with the number of microbatches. Divide each loss by the number of microbatches of the step."
        ),
        "clip_before_accumulation": (
            "The gradient is clipped before the last backward of the step has added to it, as in each microbatch. Clip once, "
            "right before the update."
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
        "clip_norm_differs": (
            "The norm for clipping counts tensors twice or not at all. Add up the squares of shards over ranks, and those of "
            "replicas once, as dt.clip_grad_norm_ does."
        ),
        "update_of_shard": (
            "The gradients agree and the update differs: the optimizer computes a norm or a matrix of the rank's shard. "
            "Gather the tensor, or reduce over ranks."
        ),
        "buffer_of_rank": "A buffer follows the samples of the rank. Reduce the sums and the count behind it over ranks.",
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
        "workers_read_the_same": (
            "Each worker of a loader reads the whole stream, so samples repeat. Share the stream between the workers of "
            "get_worker_info()."
        ),
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
    "collectives": {
        "gradient_not_of_loss": (
            "The gradient is not the derivative of the loss. A forward uses numbers of other ranks without their gradient, as "
            "dist.all_reduce gives them, or the gradient is changed before the update. torch.distributed.nn.functional has "
            "collectives with a backward."
        ),
    },
    "parallelism": {
        "sequence_part_alone": (
            "A rank computes its part of a sequence without the other parts. Exchange keys and values, or states, over ranks."
        ),
        "sequence_mask_lost": (
            "A token sees tokens that it does not see on one rank, as those of another document. Keep the mask of attention "
            "where ranks share sequences."
        ),
        "positions_restart": (
            "Positions count from 0 in the part of each rank. Compute them for the whole sequence, and take the rank's part."
        ),
        "targets_lost": (
            "The loss has fewer labels: a shift within the part of a rank leaves its last token without one. Shift labels "
            "before the sequence is split."
        ),
    },
    "precision": {
        "clip_before_unscale": "The gradient is clipped while it has the loss scale. Call scaler.unscale_(optimizer) before.",
        "buffer_rounded": "A buffer is rounded to a dtype with too few bits for its values. Keep buffers in float32.",
        "rotary_rounded": (
            "A table of positions is computed in low precision. Compute frequencies and angles in float32, and round the "
            "result."
        ),
        "sum_rounded": "A sum of many numbers loses terms in low precision. Add in float32, or call item() on each term.",
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
            "After the resume the training begins at step 0. Load the checkpoint, with its step: dt.load_sharded does both."
        ),
        "schedule_not_saved": (
            "A resume begins the schedule of the learning rate again. Save the scheduler with the checkpoint."
        ),
        "ema_not_saved": "A resume begins an average of the weights again. Pass it to step.init(stateful={...}).",
        "rng_not_saved": "A resume begins a random generator again. Save its state with the checkpoint.",
        "scaler_not_saved": "A resume begins the loss scale again. Save scaler.state_dict() with the checkpoint.",
        "optimizer_not_saved": "A resume begins the state of the optimizer again. Save it with the checkpoint.",
        "state_of_rank_lost": (
            "A resume restores the state on some ranks only. Load the checkpoint on all ranks, and save the state of each rank "
            "that has a state of its own."
        ),
        "names_not_matched": (
            "A resume finds no weights under its names, as with the prefix of a compiled or wrapped module, and "
            "load_state_dict(strict=False) says nothing. Save and load the same module, with strict=True."
        ),
        "shards_not_saved": (
            "A resume restores a part of a tensor, as the shard of one rank, and the rest begins again. Save and load the "
            "shards of all ranks, as dt.save_sharded does."
        ),
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
        "kept_weights_change": (
            "A state dict that is kept has the memory of the model, and later updates change it. Copy its tensors, as with "
            "copy.deepcopy(model.state_dict())."
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
        "frozen_statistics_change": (
            "Batch norm with frozen parameters updates its running statistics. Call eval() on the frozen modules, after each "
            "model.train()."
        ),
        "frozen_differs": (
            "A parameter trains in one place and is frozen in the other. Set requires_grad alike on all ranks, and again after "
            "a resume."
        ),
    },
    "embeddings": {
        "gather_without_gradient": (
            "The loss gathers tensors of other ranks without their gradient. Use dt.dist.all_gather_with_grad."
        ),
    },
    "loop": {
        "mode_differs": (
            "A module is in training mode in one place and in evaluation mode in the other. Call model.train() on all ranks "
            "after an evaluation, and after a load."
        ),
        "teacher_in_training_mode": (
            "A model that only gives targets or rewards drops values or updates its statistics. Call eval() on it, after each "
            "train() of a module that holds it."
        ),
        "loss_parameter_not_trained": (
            "A loss has parameters that no optimizer trains. Pass them to the optimizer, or set requires_grad=False."
        ),
        "average_before_update": ("The average of the weights lacks the last update. Update it after optimizer.step()."),
        "evaluation_with_dropout": "An evaluation runs with dropout. Call model.eval() before it, and model.train() after it.",
        "evaluation_drops_tail": "The evaluation leaves samples out. Use dt.evaluate, or a loader with drop_last=False.",
        "evaluation_counts_twice": (
            "The evaluation counts samples twice, as a sampler that pads to equal shares does. Use dt.evaluate."
        ),
    },
    "observing": {
        "metric_of_rank_0": "The metric is that of rank 0's samples. Reduce it over ranks: dt.reduce_metrics.",
        "metric_mean_of_means": (
            "The metric is a mean of the values of ranks or batches. Add up sums and counts, and divide once. Gather the "
            "scores of a metric that is no mean, such as AUC."
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
    "augmentation_by_worker": (),
    **dict.fromkeys(("metric_of_rank_0", "metric_mean_of_means", "rotary_rounded", "gradient_lost"), ()),
    **dict.fromkeys(
        ("recompute_draws_again", "early_stop_not_saved", "samples_interact", "counts_microbatches", "unknown"), ()
    ),
    **dict.fromkeys(("sequence_part_alone", "sequence_mask_lost", "clip_norm_differs", "gradient_not_of_loss"), ()),
    "rng_not_saved": ("rng", "generator"),
    "same_noise_on_ranks": ("samples",),
    "ema_not_saved": ("transform",),
    "state_not_saved": ("variable",),
}
"""Causes that follow from circumstances, each with the kinds of differences that show it."""


def cause(code: str, kind: str = "") -> Cause:
    """Return the cause with a code, for a difference of a kind."""
    page, sentence = next((page, sentences[code]) for page, sentences in _SENTENCES.items() if code in sentences)
    return Cause(code=code, sentence=sentence, page=page, shown=code not in _GUESSES or kind in _GUESSES[code])


OF_SEEDS = ("shared_random_per_rank", "sampler_seed_per_rank")
"""Causes whose experiment gives all ranks the seeds of rank 0."""

OF_REACH = ("sequence_part_alone", "sequence_mask_lost")
"""Causes whose experiment counts the outputs that a change of one input reaches: too few, and too many."""

OF_WIDTH = "padding_in_loss"
"""Cause whose experiment pads all batches to one width."""

OF_SLOPE = "gradient_not_of_loss"
"""Cause whose experiment compares a gradient with a finite difference of the loss."""

EXPERIMENTS: Mapping[str, str] = {
    "local_batch_norm": "with batch norm that uses its initial statistics",
    **dict.fromkeys(OF_SEEDS, "with the seeds of rank 0 on all ranks"),
    "gather_without_gradient": "with a gather that returns gradients",
    "clip_local_norm": "without clipping",
    "padding_in_loss": "with batches padded to one width",
    "augmentation_by_worker": "with a seed of its own for each sample that a dataset reads",
    "recompute_draws_again": "with the random state restored before a block runs again",
    **dict.fromkeys(OF_REACH, "with another first element of a sequence"),
    OF_SLOPE: "with the parameter moved up and down",
}
"""Experiments by the code of the cause that they take out of both runs, as the begin of a sentence."""
