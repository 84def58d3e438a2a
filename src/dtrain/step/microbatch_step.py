"""Compute the gradient of the global weighted mean loss, for any split into microbatches and ranks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import Tensor

from dtrain.data.batch import BatchSpec, to_device
from dtrain.errors import ConfigError
from dtrain.shard.precision import LOW_PRECISION_DTYPES
from dtrain.state import TrainState
from dtrain.step.gradient_run import GradientRun, run_gradient
from dtrain.step.microbatches import Microbatches, check_graph, split_microbatches
from dtrain.step.normalization import check_loss, declared_weights
from dtrain.step.sanity_checks import check_not_mean, warn_if_untrained
from dtrain.typing import Batch, LossFn, Metrics

_BACKWARD_CALLED = (
    "microbatch_step: loss_fn must not call backward(), because the step calls backward itself. Return the LossSum alone "
    "(torch.autograd.grad with respect to inputs is allowed)."
)


def microbatch_step(
    state: TrainState,
    batch: Batch,
    *,
    loss_fn: LossFn,
    microbatch_size: int | None = None,
    batch_spec: BatchSpec | None = None,
) -> tuple[TrainState, Metrics]:
    """Leave the gradient of the mean loss over the global batch in ``.grad``, and return the state and local metrics.

    The mean is the sum of ``LossSum.total`` over all microbatches and ranks, divided by the sum of ``LossSum.weight``. Up to
    rounding, the mean does not depend on the microbatch size, the world size or the split. With ``terms`` the loss is the sum
    of one such mean per term. Between ``split_replicas`` and ``join_replicas`` the mean covers this rank's replica only.

    Ranks may have different numbers of samples, or none. A rank without a further microbatch runs no loss: under ``replicate``
    it runs nothing, and otherwise it takes part in the collectives of the model's units, and of further sharded models in the
    loss. A loss or a model with collectives of its own needs equal numbers of microbatches on all ranks; use
    ``grad_cache_step`` for a loss that gathers samples.

    Args:
        state: the newest state of the run, which stays valid; its parameters do not change.
        batch: this rank's samples, on any device; microbatches are moved to the model's device.
        loss_fn: function that returns the summed loss and the weight of one microbatch.
        microbatch_size: samples per forward and backward; None uses the whole local batch.
        batch_spec: description of the batch, see ``batch_spec``; None uses the first axis and counts no tokens. Losses with
            ``terms`` need its ``weight``.

    Returns:
        ``state`` with the counts that ranks agreed on, and metrics ``loss``, the terms and ``aux``, as local sums.

    Mutates: ``.grad`` of the parameters; earlier gradients are dropped, with a warning if they are those of a call since the
    last update. Gradient hooks of parameters run once, on the mean gradient. Buffers that the model's forward changes, which
    are then synchronized across ranks as ``shard_model(buffers=...)`` says.
    Collective: one record before forward, and for a sharded model on several ranks one after backward;
    the model's own gathers; in the first step of a sharded model one record per unit, which compares the order of units; with
    several sharded models, records per unit in each step in which ranks have different numbers of microbatches; one
    reduction of gradients per unit (in the last microbatch's backward; with ``accumulate="sharded"`` in each backward), or
    per bucket under ``replicate``; one all-reduce of the weight (float64), if the weight is a tensor on a GPU or ``batch_spec``
    declares weights; one of the gradients of ignored parameters; one or two of changed buffers.
    Host sync: none, except some values of the first batches on several ranks, if the batches are on a device. These values
    detect ranks that train on equal batches; see ``Step.init(allow_equal_batches=)``. The first step of a sharded model also
    reads digests of its parameters, to detect a forward that writes parameters.

    Example:
        state, metrics = dt.microbatch_step(state, batch, loss_fn=loss_fn, microbatch_size=8)
        dt.clip_grad_norm_(state.params, 1.0)
        state, metrics = dt.optimizer_step(state, metrics)

    Raises:
        StaleStateError: ``state`` was stepped already.
        Exception: any error of ``loss_fn`` or the model, on the ranks that have it. The gradients are dropped, so all ranks may
            run the step again after an error on all ranks. Let an error on some ranks end these ranks: the others wait for
            them in the step, and raise ``DistError`` when they end, or at the timeout of ``init_dist``.
        ConfigError: a batch that cannot be counted or split, as a batch with an autograd graph cannot be split, a loss that is
            not a ``LossSum`` of single numbers, or a loss and a ``weight`` with different terms.
        PeerError: another rank could not count or split its batch, or has another such error before the forward.
        DistError: a collective timed out or lost a peer; the message names the missing ranks.
        NonFiniteError: the losses of ten steps in a row were infinite or NaN on some rank. All ranks raise, in a later step,
            because nothing waits for the device. ``dt.transforms.nonfinite`` changes the number, or stops the check.
        StepError: no rank has a sample, no parameter got a gradient, a forward wrote a parameter and the write would be lost or
            differ between ranks, gradient hooks differ between ranks, ranks have different trainable parameters, ran different
            units or have weights of different terms, or the global weight is zero. On a GPU the weight reaches the host late:
            the gradient of such a step is zero, and the next step raises.
    """

    def prepare() -> tuple[Microbatches, Mapping[str, Tensor | float]]:
        return check_graph(split_microbatches(batch, microbatch_size, batch_spec)), declared_weights(batch_spec, batch)

    return run_gradient(state, batch, "microbatch_step", prepare, partial(accumulate, loss_fn), records_units=True)


def accumulate(loss_fn: LossFn, run: GradientRun) -> None:
    """Run forward and backward for every microbatch. A rank without a further one takes part in the collectives alone."""
    state, grad_sync, guard, device = run.state, run.grad_sync, run.guard, run.device
    own, num_own = run.microbatches.batches, len(run.microbatches.batches)
    # A model on no mesh has no collectives.
    synced = state.spec.mesh is not None
    needs_all = synced and (grad_sync.needs_all_microbatches or grad_sync.follows_other_models)
    count = run.num_microbatches if needs_all else min(run.num_microbatches, num_own or 1)
    needs_copy = not run.microbatches.is_on(device)
    params = list(state._trainable.values())
    low_precision = [param for param in params if param.dtype in LOW_PRECISION_DTYPES]
    if synced:
        compare = guard is None or not guard.multi_rank
        grad_sync.follow_plan(run.replay_conditions, compare=compare, exchange=run.exchange_events, uneven=run.is_uneven)
    loss_grad: Tensor | None = None
    for index in range(count):
        grad_sync.before_microbatch(last=index == count - 1, params=low_precision)
        if index >= num_own:
            objective = grad_sync.forward_empty()
            if objective is not None:
                objective.backward()
            continue
        if guard is not None and index == 0:
            guard.begin_first_forward()
        microbatch = to_device(own[index], device) if needs_copy else own[index]
        loss = loss_fn(state.model, microbatch)
        # The first loss is checked; later losses come from the same function.
        if index == 0:
            check_loss(loss, caller="microbatch_step")
            if grad_sync.has_grads(params):
                raise ConfigError(_BACKWARD_CALLED)
            if state.step == 0:
                check_not_mean(loss, "microbatch_step", state=state, batch=microbatch, loss_fn=loss_fn)
                warn_if_untrained(loss, "microbatch_step", state=state)
            if not low_precision:
                loss_grad = run.divide_losses_by_weight(loss)
        total = grad_sync.complete_forward(loss.total) if synced else loss.total
        objective = run.normalizer.scaled_loss(loss, total)
        if guard is not None and index == 0:
            guard.end_first_forward()
        if loss_grad is not None and objective.ndim:
            objective = objective.reshape(())
        objective.backward(loss_grad)
        run.sums.add(loss)
