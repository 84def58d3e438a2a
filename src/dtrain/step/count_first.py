"""Count over the whole global batch before its gradient, for a loss of one microbatch that needs numbers of all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from dtrain.data.batch import BatchSpec, to_device
from dtrain.dist.rng import RNGSnapshot
from dtrain.experts import set_shares_
from dtrain.fqn import buffer_slots
from dtrain.shard.buffers import BufferVersions, module_choice, restore_buffers
from dtrain.state import TrainState
from dtrain.step.gradient_run import GradientRun, run_gradient
from dtrain.step.microbatch_step import accumulate
from dtrain.step.microbatches import Microbatches, check_graph, split_microbatches
from dtrain.step.normalization import declared_weights
from dtrain.typing import Batch, LossFn, Metrics

_NAME = "count_first_step"


def count_first_step(
    state: TrainState,
    batch: Batch,
    *,
    loss_fn: LossFn,
    microbatch_size: int | None = None,
    batch_spec: BatchSpec | None = None,
    after_count: Callable[[nn.Module, Mapping[str, Tensor]], None] = set_shares_,
) -> tuple[TrainState, Metrics]:
    """Run the loss of all microbatches without a graph, sum the counters of all ranks, then compute the gradient.

    The load-balancing loss of a router multiplies the probabilities of each row by the shares of the *whole* global batch. The
    shares are known after the last forward on the last rank, and are needed before the first backward. So the forwards run
    twice, with the same random numbers. The gradient is that of the loss of the global batch, for every number of microbatches
    and ranks. The function replaces ``microbatch_step``, also under ``auto_microbatch``.

    Args:
        state: the newest state of the run, which stays valid; its parameters do not change.
        batch: this rank's samples, as in ``microbatch_step``.
        loss_fn: as in ``microbatch_step``. A rank without samples runs it on its empty batch, if parameters are sharded.
        microbatch_size, batch_spec: as in ``microbatch_step``.
        after_count: function of the model and of the sums by name, called on all ranks before the gradient. It writes what the
            loss needs into other buffers of the model. The sums are those of buffers with the choice ``"sum"``; of a plain
            model in one process, of all buffers that a forward changed.

    Returns:
        As ``microbatch_step``.

    Mutates: as ``microbatch_step``, and what ``after_count`` writes. Buffers change as in one forward of each microbatch.
    Collective: as ``microbatch_step``, with the gathers of the forwards once more, and one all-reduce per dtype of counters.
    Host sync: none.

    Example:
        step = dt.compose_step(
            loss_fn, [dt.transforms.balance_experts(rate=0)], microbatch_size=8, grad=dt.step.count_first_step
        )

    Raises:
        Exception: the errors of ``microbatch_step`` and of ``after_count``.

    Source: the shares of a global batch, Qiu et al. 2025, arXiv:2501.11873, which takes those of the microbatches so far.
    """

    def prepare() -> tuple[Microbatches, Mapping[str, Tensor | float]]:
        # The number of gathers depends on the number of microbatches, so traces cannot be replayed.
        if state._guard is not None:
            state._guard.traces.always_check = True
        return check_graph(split_microbatches(batch, microbatch_size, batch_spec)), declared_weights(batch_spec, batch)

    def run_both(run: GradientRun) -> None:
        after_count(run.state.model, _count(loss_fn, run))
        accumulate(loss_fn, run)

    return run_gradient(state, batch, _NAME, prepare, run_both, records_units=True)


def _count(loss_fn: LossFn, run: GradientRun) -> dict[str, Tensor]:
    """Run the forwards, and return the sums of the counters over all ranks by name. Leaves buffers and generators unchanged."""
    state, model = run.state, run.state.model
    versions = BufferVersions(list(buffer_slots(model)))
    versions.record()
    snapshot = RNGSnapshot()
    with restore_buffers(model), torch.no_grad():
        _run_forwards(loss_fn, run)
        choices = {name: module_choice(state.spec, name, module, key) for name, module, key in versions.slots}
        summed = [name for name, choice in choices.items() if choice == "sum"]
        if state.spec.mesh is None:
            summed = list(versions.changed_buffers())
        run.buffers.sum_(summed)
        sums = {name: module._buffers[key] for name, module, key in versions.slots if name in set(summed)}
        counts = {name: buffer.clone() for name, buffer in sums.items() if buffer is not None}
    snapshot.restore()
    # Forwards without a backward left parameters unsharded.
    run.grad_sync.begin_step(state)
    return counts


def _run_forwards(loss_fn: LossFn, run: GradientRun) -> None:
    """Run the loss of each microbatch. With sharded parameters a rank without a further one takes part in the gathers."""
    own, model = run.microbatches.batches, run.state.model
    count = run.num_microbatches
    if not (run.state.spec.mesh is not None and run.grad_sync.needs_all_microbatches):
        count = min(count, len(own))
    for index in range(count):
        is_own = index < len(own)
        microbatch = own[index] if is_own else own[0] if own else run.microbatches.batch
        with nullcontext() if is_own else restore_buffers(model):
            loss_fn(model, to_device(microbatch, run.device))
