"""List the seeded bugs: one script each, the run that differs, the cause, and the public thread that reported such a bug.

``script.py`` has the bug and ``script.py --fixed`` does not. Each script trains a tiny model for a few steps on the CPU, writes
below the current folder only, and runs on 1, 2 and 3 ranks::

    dtrain launch -n 2 tests/prove/bugs/mean_over_tokens.py
    dtrain launch -n 2 tests/prove/bugs/mean_over_tokens.py --fixed
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

FOLDER = Path(__file__).parent

Comparison = Literal["single", "ranks", "microbatch", "resume", "evaluate", "export", "precision", "recompute"]
"""Runs that show a bug, each compared with the uninterrupted run on one rank. ``single``: one run contradicts itself.

``recompute``: activation checkpointing on against off. ``precision``: as written against float64.
"""

Style = Literal["dtrain", "plain"]
"""``dtrain``: the step, the loader or the checkpoints are dtrain's. ``plain``: a loop on torch with ``init_dist``."""

CAUSES = {
    "loss_weighting": "the loss is a mean per microbatch or rank, and its weight is not the number of tokens behind it",
    "local_loss_count": "the loss is divided by the tokens of this rank, not by those of the global batch",
    "padding_in_loss": "padded positions count in the loss or in its weight, so the loss depends on how samples are batched",
    "local_batch_norm": "batch norm uses the statistics of the rank's own microbatch",
    "sampler_without_rank": "all ranks read the same samples",
    "sampler_seed_per_rank": "ranks shuffle with different seeds, so samples are repeated and left out within an epoch",
    "shuffle_without_epoch": "every epoch has the same order",
    "batch_grows_with_ranks": "the global batch is the batch of a rank times the number of ranks",
    "shared_random_per_rank": "a random choice that all ranks must share is drawn by each rank",
    "same_dropout_on_ranks": "all ranks drop the same units, because their generators have one seed",
    "augmentation_by_worker": "an augmentation draws from the generator of its loader worker, not from one of its sample",
    "accumulation_not_scaled": "gradients of microbatches are added up and not divided",
    "accumulation_tail_dropped": "the gradient of microbatches after the last full accumulation leaks into the next epoch",
    "clip_before_unscale": "the gradient is clipped while it is multiplied by the loss scale",
    "clip_local_norm": "the gradient is clipped by the norm of the rank's own shard",
    "schedule_per_microbatch": "the schedule advances once a microbatch, not once a step",
    "schedule_by_world_size": "the schedule advances once a rank and step",
    "schedule_not_saved": "a resume begins the schedule again",
    "ema_not_saved": "a resume begins the average of the weights again",
    "rng_not_saved": "a resume begins a random generator again",
    "optimizer_not_saved": "a resume begins the optimizer's state again",
    "shards_not_saved": "a resume restores the shard of one rank, and the rest of the tensor begins again",
    "early_stop_not_saved": "a resume forgets the best value and the patience of early stopping",
    "data_repeated_after_resume": "a resume reads samples again that the run has trained on",
    "data_skipped_after_resume": "a resume leaves out samples that the run has not trained on",
    "optimizer_before_sharding": "the optimizer holds parameters that are no longer in the model",
    "frozen_parameter_trains": "a parameter with requires_grad=False changes",
    "tied_weights_untied": "two names of one parameter became two parameters",
    "weights_differ_between_ranks": "ranks begin with different weights",
    "gradient_not_reduced": "the gradient of a parameter is that of the rank's own samples",
    "gradient_scaled_by_ranks": "some or all gradients have the number of ranks as a factor too much",
    "clip_norm_differs": "the norm for clipping counts tensors more than once, or not at all",
    "update_of_shard": "the optimizer computes with the rank's shard where it needs the whole tensor",
    "buffer_of_rank": "a buffer follows the samples of its rank",
    "sequence_part_alone": "a rank computes its part of a sequence without the other parts",
    "sequence_mask_lost": "a token sees tokens that a mask hides on one rank",
    "positions_restart": "positions count from 0 in the part of each rank",
    "targets_lost": "a shift of the labels within a part loses one label of each part",
    "gather_without_gradient": "a gather between forward and loss stops the gradient",
    "gradient_not_of_loss": "a collective of a forward passes its gradient on as it is, and the loss is no sum over ranks",
    "buffer_rounded": "a buffer is rounded to a dtype with too few bits for its values",
    "rotary_rounded": "the frequencies of the rotary embedding are rounded before they are multiplied by positions",
    "evaluation_drops_tail": "the evaluation leaves out the last samples",
    "evaluation_counts_twice": "the evaluation counts padding samples of the sampler",
    "metric_of_rank_0": "a metric is that of rank 0's samples",
    "metric_mean_of_means": "a metric is a mean over ranks or batches of different sizes",
    "export_without_ema": "the exported weights are not the averaged weights that were evaluated",
    "export_dtype": "the exported weights have another dtype than the model",
    "export_differs": "a model with the exported tensors gives other outputs than the evaluated model",
    "counter_doubled_by_recompute": "a forward that activation checkpointing repeats counts twice",
    "adapter_init": "the adapter's initial values are lost on the meta device",
}
"""Short names of causes, with what each of them says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeededBug:
    """One script of this folder.

    Args:
        file: script, beside this module.
        bug: the mistake, in a sentence.
        cause: key of ``CAUSES`` that a proof names.
        runs: comparisons that differ with the bug, the clearest first.
        thread: public thread that reports such a bug, as ``owner/repository#number``.
        style: whose loop the script has.
        arguments: arguments of the script, beside ``--fixed``.
        also: other keys that are true of the bug, such as a more general cause.
        equal_when_fixed: False if ``--fixed`` may differ in ``ranks``, because its dropout draws per rank.
    """

    file: str
    bug: str
    cause: str
    runs: tuple[Comparison, ...]
    thread: str
    style: Style
    arguments: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    equal_when_fixed: bool = True

    @property
    def path(self) -> Path:
        """Return the script's path."""
        return FOLDER / self.file


ROWS = (
    # ---- loss and gradient ---------------------------------------------------------------------------------------------------
    SeededBug(
        file="mean_over_tokens.py",
        bug="The loss function returns the mean over a microbatch's tokens with the weight 1.",
        cause="loss_weighting",
        runs=("microbatch", "ranks"),
        thread="huggingface/transformers#24725",
        style="dtrain",
    ),
    SeededBug(
        file="local_count.py",
        bug="Each rank divides its summed loss by its own number of tokens, and DDP averages over ranks.",
        cause="local_loss_count",
        runs=("ranks",),
        thread="huggingface/transformers#34242",
        style="plain",
        also=("loss_weighting",),
    ),
    SeededBug(
        file="padding_in_mean.py",
        bug="The loss is a mean over all positions of a batch that was padded to its longest sample.",
        cause="padding_in_loss",
        runs=("ranks",),
        thread="IBM/pytorch-seq2seq#125",
        style="dtrain",
        also=("loss_weighting",),
    ),
    SeededBug(
        file="batch_norm_local.py",
        bug="Batch norm normalizes with the statistics of the rank's microbatch.",
        cause="local_batch_norm",
        runs=("ranks", "microbatch"),
        thread="huggingface/pytorch-image-models#110",
        style="dtrain",
    ),
    SeededBug(
        file="accumulation_not_scaled.py",
        bug="A hand-written accumulation adds up the mean losses of its microbatches and does not divide by their number.",
        cause="accumulation_not_scaled",
        runs=("ranks", "microbatch"),
        thread="hirofumi0810/neural_sp#168",
        style="plain",
    ),
    SeededBug(
        file="accumulation_tail.py",
        bug="Gradients of an epoch's incomplete last accumulation stay, and leak into the first step of the next epoch.",
        cause="accumulation_tail_dropped",
        runs=("resume", "single"),
        thread="timoschick/pet#36",
        style="plain",
    ),
    SeededBug(
        file="clip_before_unscale.py",
        bug="The gradient is clipped before GradScaler takes the loss scale off.",
        cause="clip_before_unscale",
        runs=("precision", "single"),
        thread="milesial/Pytorch-UNet#468",
        style="plain",
    ),
    SeededBug(
        file="clip_local_norm.py",
        bug="A transform of the script clips by the norm of the rank's own shards.",
        cause="clip_local_norm",
        runs=("ranks",),
        thread="pytorch/pytorch#72548",
        style="dtrain",
    ),
    SeededBug(
        file="loss_parameter_not_reduced.py",
        bug="The temperature of the loss is a parameter outside of the DDP module, so each rank trains its own.",
        cause="gradient_not_reduced",
        runs=("ranks",),
        thread="KevinMusgrave/pytorch-metric-learning#710",
        style="plain",
    ),
    SeededBug(
        file="no_sync_on_last.py",
        bug="no_sync is left for the first microbatch of a step instead of the last one.",
        cause="gradient_not_reduced",
        runs=("ranks",),
        thread="modelscope/FunASR#3472",
        style="plain",
    ),
    SeededBug(
        file="entropy_without_gradient.py",
        bug="An entropy needs the mean assignment of all ranks, and all_reduce has no backward.",
        cause="gradient_not_of_loss",
        runs=("ranks",),
        thread="lucidrains/vector-quantize-pytorch#158",
        style="plain",
    ),
    SeededBug(
        file="gather_without_gradient.py",
        bug="A contrastive loss gathers the rows of other ranks by all_gather, through which no gradient flows.",
        cause="gather_without_gradient",
        runs=("ranks",),
        thread="huggingface/accelerate#1154",
        style="plain",
    ),
    # ---- data ----------------------------------------------------------------------------------------------------------------
    SeededBug(
        file="sampler_without_rank.py",
        bug="A DataLoader with shuffle=True and one seed gives all ranks the same samples.",
        cause="sampler_without_rank",
        runs=("ranks",),
        thread="openspeech-team/openspeech#149",
        style="plain",
    ),
    SeededBug(
        file="sampler_seed_per_rank.py",
        bug="DistributedSampler gets a seed with the rank in it, so the shares of the ranks overlap.",
        cause="sampler_seed_per_rank",
        runs=("ranks",),
        thread="NVlabs/LongLive#71",
        style="plain",
    ),
    SeededBug(
        file="shuffle_without_epoch.py",
        bug="DistributedSampler.set_epoch is not called.",
        cause="shuffle_without_epoch",
        runs=("single",),
        thread="pytorch/pytorch#31771",
        style="plain",
    ),
    SeededBug(
        file="batch_per_rank.py",
        bug="The batch size of the script is given to the loader of each rank.",
        cause="batch_grows_with_ranks",
        runs=("ranks",),
        thread="facebookresearch/fastMRI#55",
        style="dtrain",
    ),
    SeededBug(
        file="augmentation_by_worker.py",
        bug="A dataset draws its augmentation from NumPy's generator, which is that of a loader worker.",
        cause="augmentation_by_worker",
        runs=("ranks", "resume"),
        thread="pytorch/pytorch#5059",
        style="dtrain",
    ),
    SeededBug(
        file="shared_mask_per_rank.py",
        bug="The layers to drop in a step are drawn with the rank in the seed, so the ranks drop different layers.",
        cause="shared_random_per_rank",
        runs=("ranks",),
        thread="pytorch/vision#7722",
        style="dtrain",
    ),
    SeededBug(
        file="same_dropout.py",
        bug="seed_all gets the same seed on all ranks, so all of them drop the same units.",
        cause="same_dropout_on_ranks",
        runs=("ranks",),
        thread="huggingface/transformers#31412",
        style="dtrain",
        equal_when_fixed=False,
    ),
    # ---- schedules -----------------------------------------------------------------------------------------------------------
    SeededBug(
        file="schedule_per_microbatch.py",
        bug="scheduler.step() stands in the loop over microbatches.",
        cause="schedule_per_microbatch",
        runs=("ranks", "microbatch"),
        thread="Lightning-AI/pytorch-lightning#1476",
        style="plain",
    ),
    SeededBug(
        file="schedule_by_world_size.py",
        bug="The scheduler is stepped once for each rank, as a wrapper does for a scheduler that counts single batches.",
        cause="schedule_by_world_size",
        runs=("ranks",),
        thread="huggingface/accelerate#2926",
        style="plain",
    ),
    # ---- state and resume ----------------------------------------------------------------------------------------------------
    SeededBug(
        file="schedule_not_saved.py",
        bug="The checkpoint lacks the scheduler, so a resume warms up again.",
        cause="schedule_not_saved",
        runs=("resume",),
        thread="YehLi/xmodaler#15",
        style="plain",
    ),
    SeededBug(
        file="ema_not_saved.py",
        bug="The script's own average of the weights is not in the checkpoint.",
        cause="ema_not_saved",
        runs=("resume",),
        thread="ai2cm/ace#349",
        style="dtrain",
    ),
    SeededBug(
        file="rng_not_saved.py",
        bug="The generator of the noise level is not in the checkpoint.",
        cause="rng_not_saved",
        runs=("resume",),
        thread="ai2cm/ace#690",
        style="dtrain",
    ),
    SeededBug(
        file="optimizer_not_saved.py",
        bug="The checkpoint has the weights and not the moments of AdamW.",
        cause="optimizer_not_saved",
        runs=("resume",),
        thread="EvolvingLMMs-Lab/OneVision-Encoder#65",
        style="plain",
    ),
    SeededBug(
        file="early_stop_not_saved.py",
        bug="Best value and patience of early stopping are not in the checkpoint, so a resumed run stops later.",
        cause="early_stop_not_saved",
        runs=("resume",),
        thread="huggingface/transformers#28544",
        style="dtrain",
    ),
    SeededBug(
        file="data_repeated.py",
        bug="The loader is not in the checkpoint, so a resume begins with the first batch again.",
        cause="data_repeated_after_resume",
        runs=("resume",),
        thread="hiyouga/EasyR1#57",
        style="dtrain",
    ),
    SeededBug(
        file="data_skipped.py",
        bug="A resume restores the loader's position and then skips the trained batches once more.",
        cause="data_skipped_after_resume",
        runs=("resume",),
        thread="allenai/open-instruct#681",
        style="dtrain",
    ),
    SeededBug(
        file="frozen_still_trains.py",
        bug="A layer is frozen by requires_grad_(False), but zeroed gradients stay, and momentum and weight decay go on.",
        cause="frozen_parameter_trains",
        runs=("single", "resume"),
        thread="facebookresearch/fairseq#4702",
        style="plain",
    ),
    SeededBug(
        file="tied_untied.py",
        bug="A resume loads the state with assign=True, which makes two parameters of the tied embedding and head.",
        cause="tied_weights_untied",
        runs=("resume",),
        thread="pytorch/pytorch#188346",
        style="plain",
    ),
    # ---- model ---------------------------------------------------------------------------------------------------------------
    SeededBug(
        file="optimizer_before_sharding.py",
        bug="The optimizer is made of the parameters that fully_shard replaces.",
        cause="optimizer_before_sharding",
        runs=("ranks",),
        thread="huggingface/accelerate#3256",
        style="plain",
    ),
    SeededBug(
        file="weights_per_rank.py",
        bug="The seed has the rank in it before the model is built, and nothing broadcasts the weights.",
        cause="weights_differ_between_ranks",
        runs=("ranks",),
        thread="sparticlesteve/pytorch-benchmarks#1",
        style="plain",
    ),
    SeededBug(
        file="adapter_on_meta.py",
        bug="On several ranks the model is built on meta, and its initialiser draws the adapter's B, which should be zero.",
        cause="adapter_init",
        runs=("ranks",),
        thread="PrimeIntellect-ai/prime-rl#1375",
        style="dtrain",
    ),
    SeededBug(
        file="buffers_cast.py",
        bug="Mixed precision casts the buffer of positions to bfloat16, which has no 257.",
        cause="buffer_rounded",
        runs=("precision",),
        thread="facebookresearch/fairscale#442",
        style="dtrain",
    ),
    SeededBug(
        file="rotary_rounded.py",
        bug="The rotary embedding casts its frequencies to the dtype of the activations before it multiplies by positions.",
        cause="rotary_rounded",
        runs=("precision",),
        thread="huggingface/transformers#25681",
        style="dtrain",
    ),
    SeededBug(
        file="router_counts_twice.py",
        bug="A router counts tokens in forward, which activation checkpointing repeats, and its bias follows the count.",
        cause="counter_doubled_by_recompute",
        runs=("recompute",),
        thread="pytorch/torchtitan#1593",
        style="dtrain",
    ),
    # ---- evaluation and export -----------------------------------------------------------------------------------------------
    SeededBug(
        file="eval_drops_tail.py",
        bug="The loader of the evaluation drops the last batch of each rank.",
        cause="evaluation_drops_tail",
        runs=("evaluate", "ranks"),
        thread="verl-project/verl#78",
        style="dtrain",
    ),
    SeededBug(
        file="eval_counts_twice.py",
        bug="DistributedSampler pads the evaluation's samples to equal shares, and the padding counts.",
        cause="evaluation_counts_twice",
        runs=("evaluate", "ranks"),
        thread="pytorch/pytorch#25162",
        style="dtrain",
    ),
    SeededBug(
        file="metric_of_rank_0.py",
        bug="Rank 0 logs the accuracy of its own samples.",
        cause="metric_of_rank_0",
        runs=("evaluate", "ranks"),
        thread="NVIDIA/apex#22",
        style="dtrain",
    ),
    SeededBug(
        file="metric_mean_of_means.py",
        bug="The logged accuracy is the mean over ranks and batches of means over different numbers of samples.",
        cause="metric_mean_of_means",
        runs=("evaluate", "ranks"),
        thread="Lightning-AI/pytorch-lightning#2924",
        style="dtrain",
    ),
    SeededBug(
        file="export_without_ema.py",
        bug="The script evaluates the averaged weights and exports the raw ones.",
        cause="export_without_ema",
        runs=("export",),
        thread="wandb/senpai#709",
        style="dtrain",
    ),
    SeededBug(
        file="export_dtype.py",
        bug="The export casts the weights to bfloat16; the model that was trained and evaluated is float32.",
        cause="export_dtype",
        runs=("export",),
        thread="hiyouga/LlamaFactory#2847",
        style="dtrain",
    ),
    SeededBug(
        file="export_drops_buffer.py",
        bug="The export has the parameters and not the running statistics of batch norm.",
        cause="export_differs",
        runs=("export",),
        thread="TengdaHan/DPC#10",
        style="dtrain",
    ),
    # ---- ranks that share sequences, experts or shards -----------------------------------------------------------------------
    SeededBug(
        file="documents_leak.py",
        bug="If ranks share sequences, the mask between packed documents is dropped, and causality stays.",
        cause="sequence_mask_lost",
        runs=("ranks",),
        thread="huggingface/trl#6843",
        style="plain",
    ),
    SeededBug(
        file="attention_of_part.py",
        bug="Each rank attends within its own part of the sequence, as the replaced attention function is not called.",
        cause="sequence_part_alone",
        runs=("ranks",),
        thread="pytorch/pytorch#152261",
        style="plain",
    ),
    SeededBug(
        file="positions_restart.py",
        bug="Positions count from 0 in the part of each rank.",
        cause="positions_restart",
        runs=("ranks",),
        thread="vllm-project/speculators#871",
        style="plain",
    ),
    SeededBug(
        file="shift_after_split.py",
        bug="Labels shift within the part of a rank, so the last token of each part has no label.",
        cause="targets_lost",
        runs=("ranks",),
        thread="huggingface/transformers#36607",
        style="plain",
    ),
    SeededBug(
        file="scaled_by_data_ranks.py",
        bug="DDP averages over all ranks, and the loss is multiplied by the number of ranks with other data.",
        cause="gradient_scaled_by_ranks",
        runs=("ranks",),
        thread="ByteDance-Seed/VeOmni#338",
        style="plain",
    ),
    SeededBug(
        file="norm_of_local_heads.py",
        bug="Ranks compute some heads each, and the norm that all heads share keeps the gradient of the rank's heads.",
        cause="gradient_not_reduced",
        runs=("ranks",),
        thread="NVIDIA-NeMo/RL#3716",
        style="plain",
    ),
    SeededBug(
        file="expert_gradient_scaled.py",
        bug="Experts add up the gradients of the samples of all ranks, where all other layers average.",
        cause="gradient_scaled_by_ranks",
        runs=("ranks",),
        thread="NVIDIA/Megatron-LM#5956",
        style="plain",
    ),
    SeededBug(
        file="norm_counts_replicas.py",
        bug="The norm for clipping adds up squares over ranks, also those of layers that all ranks hold.",
        cause="clip_norm_differs",
        runs=("ranks",),
        thread="NVIDIA/Megatron-LM#7452",
        style="plain",
    ),
    SeededBug(
        file="update_of_shard.py",
        bug="The optimizer orthogonalizes the rank's rows of a matrix instead of the matrix.",
        cause="update_of_shard",
        runs=("ranks",),
        thread="NVIDIA/Megatron-LM#5961",
        style="plain",
    ),
    SeededBug(
        file="statistics_of_rank.py",
        bug="A normalizer keeps running statistics of the rank's own samples.",
        cause="buffer_of_rank",
        runs=("ranks",),
        thread="leggedrobotics/rsl_rl#226",
        style="plain",
    ),
    SeededBug(
        file="adapter_of_rank_0.py",
        bug="A checkpoint has the shard of rank 0 of each adapter tensor, and other ranks restore nothing.",
        cause="shards_not_saved",
        runs=("resume",),
        thread="huggingface/accelerate#4206",
        style="plain",
    ),
)
"""All seeded bugs."""
