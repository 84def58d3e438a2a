"""List the pairs that were written without knowledge of the tool, and what it said about them.

Each folder has a correct script, ``twin.py``, and ``bug.diff``, which makes a mistake in it. The authors knew that the tool compares
runs on several ranks, repeated runs and resumes, and had not seen its code, its tests or its page. One had read the README, which
shows an answer. Each pair was proven once, on 2026-11-29, after all changes of the tool. ``first`` and ``objection`` are what it said
then. The pairs ``a`` and ``b`` came first. Rules for them were written before the pairs ``c`` of a third author were proven.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A bug and its correct twin.

    Args:
        name: folder.
        bug: the mistake, by its author.
        visible: False if all layouts share the mistake, so that no comparison of runs can show it, by its author.
        first: first cause that the proof of the bug named; "" if it found no difference.
        found: True if the proof objected to the bug with a finding that it does not have for the twin.
        right: True if the first cause is that of the bug, by reading both.
        objection: first cause that the proof of the twin named, a false alarm; "" without one.
        now: first cause that a proof of the bug names since a change of the tool; "" if it is still ``first``.
        mended: True if the tool was changed since, so that it does not object to the twin.
    """

    name: str
    bug: str
    visible: bool = True
    first: str = ""
    found: bool = False
    right: bool = False
    objection: str = ""
    mended: bool = False
    now: str = ""

    @property
    def twin(self) -> Path:
        """Path of the correct script."""
        return FOLDER / self.name / "twin.py"

    def text_of_bug(self) -> str:
        """Return the script with the mistake."""
        lines, result, position = self.twin.read_text(encoding="utf-8").splitlines(keepends=True), list[str](), 0
        for line in (FOLDER / self.name / "bug.diff").read_text(encoding="utf-8").splitlines(keepends=True)[2:]:
            if line.startswith("@@"):
                begin = int(line.split()[1].removeprefix("-").split(",")[0]) - 1
                result += lines[position:begin]
                position = begin
            elif line.startswith("+"):
                result.append(line[1:])
            elif line[0] in " -":
                assert lines[position].rstrip("\n") == line[1:].rstrip("\n"), f"{self.name}: bug.diff does not fit twin.py"
                result += lines[position : position + 1] if line[0] == " " else []
                position += 1
        return "".join(result + lines[position:])


PAIRS = (
    Pair(
        name="a01_ring_gan",
        bug=(
            "Every rank draws its noise from a generator with the same seed, so the ranks' fake samples are copies of "
            "each other and the global noise batch depends on the number of ranks."
        ),
        first="sampler_seed_per_rank",
        found=True,
        now="same_noise_on_ranks",
    ),
    Pair(
        name="a02_digit_vae",
        bug="Reparametrisation uses exp(logvar) as standard deviation instead of exp(0.5*logvar).",
        visible=False,
    ),
    Pair(
        name="a03_fsdp2_encoder",
        bug=(
            "Gradient norm is computed from the local shards only, no all-reduce; every rank clips its shard by another factor."
        ),
        first="clip_local_norm",
        found=True,
        right=True,
    ),
    Pair(
        name="a04_zero_cnn",
        bug="After a resume only rank 0 loads the optimizer state, the other ranks' shards of Adam moments start from zero.",
        first="unknown",
        found=True,
        now="state_of_rank_lost",
    ),
    Pair(
        name="a05_padded_lm",
        bug=(
            "Each microbatch's mean over its own non-pad tokens is averaged with equal weight instead of dividing by "
            "the step's total token count."
        ),
        first="local_loss_count",
        found=True,
        right=True,
    ),
    Pair(
        name="a06_tp_mlp",
        bug="The row-parallel layer adds its replicated bias before the all-reduce, so the bias is added once per rank.",
        first="weights_differ_between_ranks",
        objection="weights_differ_between_ranks",
        mended=True,
    ),
    Pair(
        name="a07_seqpar_attention",
        bug="Position embedding starts at 0 on each rank's slice of the sequence, no offset (the causal mask has it).",
        first="padding_in_loss",
        found=True,
        now="positions_restart",
    ),
    Pair(
        name="a08_compiled_mixer",
        bug=(
            "The compiled module's state dict (keys prefixed with _orig_mod.) is saved and loaded into the plain net "
            "with strict=False on resume, so no weight is restored while optimizer and step are."
        ),
        now="names_not_matched",
    ),
    Pair(
        name="a09_reinforce_track",
        bug="Returns are normalised with mean and deviation of the rank's own environments.",
        first="samples_interact",
        found=True,
        right=True,
    ),
    Pair(
        name="a10_toy_ddpm",
        bug="EMA weights are not in the checkpoint; after a resume the EMA copy restarts from the raw weights.",
        first="state_not_saved",
        found=True,
        right=True,
    ),
    Pair(
        name="a11_stream_forecast",
        bug=(
            "The stream ignores get_worker_info, so both workers deliver the same samples and every global batch is "
            "trained on twice."
        ),
        visible=False,
        now="workers_read_the_same",
    ),
    Pair(
        name="a12_bpr_sampler",
        bug="Sampler.set_epoch is never called, every epoch has the same order.",
        visible=False,
        now="shuffle_without_epoch",
    ),
    Pair(
        name="a13_lbfgs_poisson",
        bug=(
            "The backtracking test evaluates the loss on the rank's own rows only, so ranks accept different step "
            "lengths and their weights drift apart."
        ),
        first="gradient_not_reduced",
        objection="gradient_not_reduced",
        mended=True,
    ),
    Pair(
        name="a14_two_tower",
        bug=(
            "Embeddings of other ranks are gathered without gradient, only the own slot is put back, while each rank "
            "takes the loss of its own rows only."
        ),
        first="gradient_not_of_loss",
        found=True,
        right=True,
    ),
    Pair(
        name="a15_lora_classifier",
        bug=(
            "Adapter checkpoint keeps only the keys with 'lora_', the trained classification head is missing and "
            "starts afresh on resume (strict=False)."
        ),
        first="parameters_not_saved",
        found=True,
        right=True,
    ),
    Pair(
        name="a16_stateful_lstm",
        bug="Carried hidden and cell state is not saved, restarts from zeros on resume.",
        first="state_not_saved",
        found=True,
        right=True,
    ),
    Pair(
        name="a17_seg_miou",
        bug="Mean IoU is computed per rank on its part of the validation set and then averaged over the ranks.",
        first="metric_mean_of_means",
        found=True,
        right=True,
    ),
    Pair(
        name="a18_sharded_ctr",
        bug=(
            "The sharded table's gradient is the sum over the ranks' local mean losses, not divided by the number of "
            "ranks as DDP does for the dense part."
        ),
        first="weights_differ_between_ranks",
        objection="weights_differ_between_ranks",
        mended=True,
    ),
    Pair(
        name="a19_gnn_multitask",
        bug="The learned task weights (log_vars of the criterion) are not handed to the optimizer and stay at zero.",
        visible=False,
        now="loss_parameter_not_trained",
    ),
    Pair(
        name="a20_text_vocab",
        bug=(
            "Word ids come from iterating over a Python set of strings, so the mapping changes in every process (hash "
            "randomisation): between ranks, between runs, after a resume."
        ),
        first="not_deterministic",
        found=True,
        right=True,
    ),
    Pair(
        name="b01_moe_router",
        bug=(
            "The z-loss is added as a mean to a summed cross entropy (z.mean() instead of z.sum()), so the step "
            "divides it by the weight once more."
        ),
        first="loss_weighting",
        found=True,
        right=True,
    ),
    Pair(
        name="b02_gru_lm",
        bug="The per-token mean is weighted by the number of sequences instead of the number of targets.",
        first="loss_weighting",
        found=True,
        right=True,
    ),
    Pair(
        name="b03_twin_views",
        bug="The negatives are those of the own rank only, no gather.",
        first="samples_interact",
        found=True,
        right=True,
    ),
    Pair(
        name="b04_beta_vae",
        bug="The controller's beta lives in a global dict and is not in the checkpoint.",
        first="state_not_saved",
        found=True,
        right=True,
    ),
    Pair(
        name="b05_tagger_accuracy",
        bug="The validation accuracy is computed of rank 0's counts, without a reduction.",
        first="metric_of_rank_0",
        found=True,
        right=True,
    ),
    Pair(
        name="b06_swa_forecaster",
        bug="The count of averaged models is kept in the closure of the transform, not in its state.",
        now="state_not_saved",
    ),
    Pair(
        name="b07_onecycle_mixer",
        bug="The length of the one-cycle schedule is computed with the per-rank batch, although the loader's batch is global.",
        first="rate_by_world_size",
        found=True,
        right=True,
    ),
    Pair(
        name="b08_semi_supervised",
        bug="The cursor of the own pool is not named in stateful, so a resume reads the unlabelled points from the beginning.",
        first="augmentation_by_worker",
        found=True,
        objection="augmentation_by_worker",
        mended=True,
        now="state_not_saved",
    ),
    Pair(
        name="b09_bandit_policy",
        bug="Advantages are normalised with mean and deviation of the own rank's rewards.",
        first="augmentation_by_worker",
        found=True,
        now="samples_interact",
    ),
    Pair(
        name="b10_ema_export",
        bug=(
            "The weights are exported after the use_average block, so the file holds the raw weights while the "
            "reported score is the EMA's."
        ),
        visible=False,
        first="export_without_ema",
        found=True,
        right=True,
    ),
    Pair(
        name="b11_accel_accumulate",
        bug=(
            "Clips in every microstep with torch's function, also where gradients are not synchronised, instead of "
            "once under sync_gradients."
        ),
        now="clip_before_accumulation",
    ),
    Pair(
        name="b12_accel_schedule",
        bug="The scheduler is passed to prepare, which steps it once per process.",
        first="schedule_by_world_size",
        found=True,
        right=True,
    ),
    Pair(
        name="b13_accel_eval",
        bug="Evaluation uses gather, so samples that pad the last batch are counted twice.",
        first="evaluation_counts_twice",
        found=True,
        right=True,
    ),
    Pair(
        name="b14_accel_resume",
        bug="The scheduler is neither prepared nor registered for checkpointing.",
        first="schedule_not_saved",
        found=True,
        right=True,
    ),
    Pair(
        name="b15_lora_head",
        bug=(
            "The classifier head, unfrozen by hand, is not in the adapter checkpoint (get_peft_model_state_dict holds "
            "LoRA tensors only)."
        ),
        first="parameters_not_saved",
        found=True,
        right=True,
    ),
    Pair(
        name="b16_llama_labels",
        bug="Labels are shifted by the script although the model shifts them itself, so it learns the token after the next.",
        visible=False,
    ),
    Pair(
        name="b17_bert_sentiment",
        bug="The attention mask is not passed, so padding takes part and outputs depend on the longest sample of the batch.",
        first="local_loss_count",
        found=True,
        objection="unknown",
        mended=True,
        now="padding_in_loss",
    ),
    Pair(
        name="b18_cnn_epochs",
        bug="Sampler.set_epoch is not called, so each epoch has the same order.",
        visible=False,
        now="shuffle_without_epoch",
    ),
    Pair(
        name="b19_distill_best",
        bug="The best student is kept as a reference to state_dict(), so the last weights are exported.",
        visible=False,
        first="sampler_without_rank",
        objection="sampler_without_rank",
        mended=True,
        now="kept_weights_change",
    ),
    Pair(
        name="b20_dice_trainer",
        bug="The batch Dice is computed over the own rank's pictures, without summing over ranks.",
        first="samples_interact",
        found=True,
        right=True,
    ),
    Pair(
        name="c01_gan_penalty",
        bug='The critic step calls the inner module, not the DDP wrapper, so critic gradients are never averaged over the ranks.',
        first="gradient_not_reduced",
        found=True,
        right=True,
    ),
    Pair(
        name="c02_vae_ema",
        bug='The EMA weights are not saved; a resumed run starts the EMA anew from the raw weights.',
        first="state_not_saved",
        found=True,
        right=True,
    ),
    Pair(
        name="c03_reinforce",
        bug="Returns are normalised by mean and deviation of this rank's environments instead of the whole fleet.",
        first="samples_interact",
        found=True,
        right=True,
    ),
    Pair(
        name="c04_fsdp_tokens",
        bug='The summed loss is divided by the global number of tokens although FSDP averages gradients over ranks too, so gradients are 1/world too small.',
        first="gradient_scaled_by_ranks",
        found=True,
        right=True,
    ),
    Pair(
        name="c05_zero_curriculum",
        bug="The curriculum counts only this rank's samples, so sequences grow more slowly with more ranks.",
        first="sampler_seed_per_rank",
        found=True,
    ),
    Pair(
        name="c06_accumulate",
        bug='Gradients are synchronised in the first microbatch of a window rather than in the last, so later microbatches stay local.',
        first="gradient_not_reduced",
        found=True,
        right=True,
    ),
    Pair(
        name="c07_moe_balance",
        bug="The load-balancing loss uses the expert shares of this rank's tokens, not of the global batch.",
        first="samples_interact",
        found=True,
        right=True,
    ),
    Pair(
        name="c08_contrastive",
        bug='The embeddings of other ranks are gathered without gradient.',
        first="gather_without_gradient",
        found=True,
        right=True,
    ),
    Pair(
        name="c09_distill",
        bug='The teacher is set to train mode with the whole module, so its BatchNorm uses batch statistics and changes its running ones.',
        first="frozen_statistics_change",
        found=True,
        right=True,
    ),
    Pair(
        name="c10_micro_ema",
        bug='The EMA is updated once for each microbatch instead of once for each optimizer step.',
        first="average_before_update",
        found=True,
        right=True,
    ),
    Pair(
        name="c11_diffusion",
        bug='On resume the state of the random generator is saved but not restored.',
        objection="failed",
        mended=True,
        now="rng_not_saved",
    ),
    Pair(
        name="c12_vocabulary",
        bug="The vocabulary is numbered in the order of a set of strings, which Python's hash randomisation changes in every process.",
        first="not_deterministic",
        found=True,
        right=True,
    ),
    Pair(
        name="c13_sparse_embed",
        bug='Sparse gradients are summed over the ranks while dense ones are averaged.',
        objection="failed",
        mended=True,
    ),
    Pair(
        name="c14_tensor_parallel",
        bug="The clipping norm is taken over each rank's local shards only.",
        first="gradient_not_reduced",
        found=True,
        now="clip_local_norm",
    ),
    Pair(
        name="c15_early_stop",
        bug="The decision to stop uses the validation loss of rank 0's share of the held-out set, broadcast to all.",
        objection="failed",
        mended=True,
        now="metric_of_rank_0",
    ),
    Pair(
        name="c16_int8_export",
        bug="Activation ranges are calibrated on rank 0's share of the calibration set only.",
    ),
    Pair(
        name="c17_pooling",
        bug="Mean pooling averages over padding too, with the length of the rank's longest sequence.",
        first="padding_in_loss",
        found=True,
        right=True,
    ),
    Pair(
        name="c18_eval_mode",
        bug='After the first validation the model stays in eval mode, so dropout is off; a resumed run has it on again until its next validation.',
        first="mode_differs",
        found=True,
        right=True,
    ),
    Pair(
        name="c19_accelerate_schedule",
        bug='The scheduler is passed to accelerator.prepare, so it steps once per process for each optimizer step although its length counts global steps.',
        first="schedule_by_world_size",
        found=True,
        right=True,
    ),
    Pair(
        name="c20_accelerate_resume",
        bug='A run resumed inside an epoch starts that epoch from its first batch.',
        first="data_repeated_after_resume",
        found=True,
        right=True,
        objection="early_stop_not_saved",
        mended=True,
    ),
    Pair(
        name="c21_trainer_loss",
        bug="The own loss ignores num_items_in_batch and returns the mean over its microbatch's tokens.",
        first="local_loss_count",
        found=True,
        right=True,
    ),
    Pair(
        name="c22_lora_classifier",
        bug='LoraConfig has no task_type, so the new classification head stays frozen at its random values.',
        visible=False,
    ),
    Pair(
        name="c23_dtrain_denoise",
        bug='The corruption is drawn in the loss function from the global generator, instead of belonging to the sample.',
        first="same_dropout_on_ranks",
        found=True,
        now="same_noise_on_ranks",
    ),
    Pair(
        name="c24_dtrain_temperature",
        bug='The temperature is a Python variable multiplied after each step that no checkpoint holds; a resumed run starts it anew.',
        first="state_not_saved",
        found=True,
        right=True,
    ),
    Pair(
        name="c25_dtrain_pairs",
        bug='A contrastive loss is cut into microbatches, so the negatives are only those of the microbatch (of all ranks).',
        first="samples_interact",
        found=True,
        right=True,
    ),
    Pair(
        name="c26_dtrain_f1",
        bug="F1 is computed for each rank's share of the held-out set and averaged, instead of from summed counts.",
        first="metric_mean_of_means",
        found=True,
        right=True,
    ),
    Pair(
        name="c27_dtrain_tagger",
        bug='The loss function returns a mean over real tokens with weight 1 instead of a sum with its number of tokens.',
        first="loss_weighting",
        found=True,
        right=True,
    ),
    Pair(
        name="c28_sam",
        bug='The ascent step is never taken back: the weights are not restored before the optimizer steps.',
        visible=False,
    ),
)
