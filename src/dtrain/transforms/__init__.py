"""Transforms: functions that change a training step, composed by ``dt.compose_step``.

    step = dt.compose_step(loss_fn, [
        dt.transforms.clip_by_norm(1.0),
        dt.transforms.every("10ba", dt.transforms.sam(0.05)),
        dt.transforms.ema(half_life="100ba"),
    ])

Each method has a factory that returns a ``dt.Transform``. Most methods also have a function of tensors for loops without
transforms, for example ``update_ema_`` beside ``ema``. Methods are grouped by the changed object: gradients, weights, batches,
precision, hyperparameters.

All batch methods find tensors alike. The inputs are at ``"x"`` or ``"input_ids"`` of a mapping or TensorDict, or are the first
entry of a tuple. The targets are at ``"y"`` or ``"labels"``, or are the second entry. ``input_key=`` and ``target_key=`` name
other keys.
"""

from typing import TYPE_CHECKING

from dtrain.lazy_imports import attach

if TYPE_CHECKING:
    from dtrain.transforms.batches.batch_transform import as_probabilities as as_probabilities
    from dtrain.transforms.batches.cutout import colout as colout
    from dtrain.transforms.batches.cutout import colout_batch as colout_batch
    from dtrain.transforms.batches.cutout import cutout as cutout
    from dtrain.transforms.batches.cutout import cutout_batch as cutout_batch
    from dtrain.transforms.batches.mixup import cutmix as cutmix
    from dtrain.transforms.batches.mixup import cutmix_batch as cutmix_batch
    from dtrain.transforms.batches.mixup import label_smoothing as label_smoothing
    from dtrain.transforms.batches.mixup import mixup as mixup
    from dtrain.transforms.batches.mixup import mixup_batch as mixup_batch
    from dtrain.transforms.batches.mixup import smooth_labels as smooth_labels
    from dtrain.transforms.batches.progressive_resizing import progressive_resizing as progressive_resizing
    from dtrain.transforms.batches.progressive_resizing import resize_batch as resize_batch
    from dtrain.transforms.batches.rand_augment import augmix as augmix
    from dtrain.transforms.batches.rand_augment import augmix_batch as augmix_batch
    from dtrain.transforms.batches.rand_augment import jensen_shannon as jensen_shannon
    from dtrain.transforms.batches.rand_augment import rand_augment as rand_augment
    from dtrain.transforms.batches.rand_augment import rand_augment_batch as rand_augment_batch
    from dtrain.transforms.batches.selective_backprop import select_by_loss as select_by_loss
    from dtrain.transforms.batches.selective_backprop import selective_backprop as selective_backprop
    from dtrain.transforms.batches.sequence_length_warmup import sequence_length_warmup as sequence_length_warmup
    from dtrain.transforms.batches.sequence_length_warmup import shorten_batch as shorten_batch
    from dtrain.transforms.combinators import ParamFilter as ParamFilter
    from dtrain.transforms.combinators import between as between
    from dtrain.transforms.combinators import every as every
    from dtrain.transforms.combinators import masked as masked
    from dtrain.transforms.combinators import named as named
    from dtrain.transforms.combinators import on_batch as on_batch
    from dtrain.transforms.context_sharding import ContextParallelTransform as ContextParallelTransform
    from dtrain.transforms.context_sharding import context_parallel as context_parallel
    from dtrain.transforms.gradients.clipping import adaptive_clip as adaptive_clip
    from dtrain.transforms.gradients.clipping import centralize_gradients as centralize_gradients
    from dtrain.transforms.gradients.clipping import centralize_gradients_ as centralize_gradients_
    from dtrain.transforms.gradients.clipping import clip_by_norm as clip_by_norm
    from dtrain.transforms.gradients.clipping import clip_by_value as clip_by_value
    from dtrain.transforms.gradients.clipping import clip_grad_adaptive_ as clip_grad_adaptive_
    from dtrain.transforms.gradients.clipping import clip_grad_value_ as clip_grad_value_
    from dtrain.transforms.gradients.noise_scale import estimate_noise_and_signal as estimate_noise_and_signal
    from dtrain.transforms.gradients.noise_scale import noise_scale as noise_scale
    from dtrain.transforms.gradients.nonfinite import nonfinite as nonfinite
    from dtrain.transforms.gradients.sam import perturb_params_ as perturb_params_
    from dtrain.transforms.gradients.sam import restore_params_ as restore_params_
    from dtrain.transforms.gradients.sam import sam as sam
    from dtrain.transforms.hyperparameters import scale_lr as scale_lr
    from dtrain.transforms.hyperparameters import scale_option as scale_option
    from dtrain.transforms.hyperparameters import set_option as set_option
    from dtrain.transforms.precision import autocast as autocast
    from dtrain.transforms.precision import loss_scale as loss_scale
    from dtrain.transforms.weights.averaging import ema as ema
    from dtrain.transforms.weights.averaging import load_average_ as load_average_
    from dtrain.transforms.weights.averaging import swa as swa
    from dtrain.transforms.weights.averaging import update_ema_ as update_ema_
    from dtrain.transforms.weights.averaging import update_swa_ as update_swa_
    from dtrain.transforms.weights.averaging import use_average as use_average
    from dtrain.transforms.weights.balance_experts import balance_experts as balance_experts
    from dtrain.transforms.weights.balance_experts import move_bias_ as move_bias_
    from dtrain.transforms.weights.batch_norm import update_batch_norm_ as update_batch_norm_
    from dtrain.transforms.weights.freeze import freeze as freeze
    from dtrain.transforms.weights.freeze import freeze_layers as freeze_layers
    from dtrain.transforms.weights.local_sgd import average_replicas_ as average_replicas_
    from dtrain.transforms.weights.local_sgd import diloco as diloco
    from dtrain.transforms.weights.local_sgd import join_replicas as join_replicas
    from dtrain.transforms.weights.local_sgd import local_sgd as local_sgd
    from dtrain.transforms.weights.local_sgd import outer_step_ as outer_step_
    from dtrain.transforms.weights.local_sgd import split_replicas as split_replicas

__getattr__, __dir__ = attach(__name__, __file__)
