"""The gradient noise scale: how large a batch is worth while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from dtrain.batch import BatchSpec, FailedBatch, count_samples_and_tokens, select_samples, to_device
from dtrain.dist.collectives import all_gather_numbers
from dtrain.dist.rng import RNGSnapshot
from dtrain.dtensor import from_local_like, global_norm, to_local
from dtrain.durations import Duration
from dtrain.errors import ConfigError
from dtrain.schedules.hyperparameter import hyperparameter
from dtrain.shard.buffers import BufferSnapshot
from dtrain.state import TrainState
from dtrain.transform import GradFn, Transform
from dtrain.typing import Batch, Metric, Metrics, Params, Schedule, TransformState, unit_weight

_NAME = "noise_scale"


def estimate_noise_and_signal(
    part: Params, whole: Params, *, part_samples: float, whole_samples: float
) -> tuple[Tensor, Tensor]:
    """Unbiased estimates of the variance of a sample's gradient and of the squared norm of the true one, from two gradients.

    Formula: ``noise = norm(part - whole)**2 / (1 / part_samples - 1 / whole_samples)``,
    ``signal = norm(whole)**2 - noise / whole_samples``

    Their quotient, each averaged over steps, is the noise scale. For halves of a batch this ``noise`` is the mean over both
    halves of what the paper computes from the norms, ``(norm(part)**2 - norm(whole)**2) / (1 / part_samples - 1 /
    whole_samples)``; a difference of vectors is less noisy than a difference of norms.

    Args:
        part: mean gradients over a part of a batch, by parameter, plain or DTensor.
        whole: those over the whole batch. A name that is in one of the two only has a gradient of 0 in the other.
        part_samples: samples of the part.
        whole_samples: samples of the whole batch, more.

    Returns:
        ``noise`` and ``signal``, float64 scalars ``[]``, the same on every rank. ``signal`` may come out negative.

    Collective: two all-reduces of a scalar per mesh axis that gradients are sharded on.
    Host sync: none.

    Raises:
        ConfigError: not ``0 < part_samples < whole_samples``.

    Source: McCandlish et al. 2018, arXiv:1812.06162, appendix A.1.

    Example:
        >>> part, whole = {"w": torch.tensor([3.0, 0.0])}, {"w": torch.tensor([2.0, 1.0])}
        >>> noise, signal = estimate_noise_and_signal(part, whole, part_samples=2, whole_samples=4)
        >>> round(noise.item(), 5), round(signal.item(), 5)  # 2 / (1/2 - 1/4), and 5 - 8/4
        (8.0, 3.0)
    """
    if not 0 < part_samples < whole_samples:
        raise ConfigError(
            f"estimate_noise_and_signal: needs 0 < part_samples < whole_samples, got {part_samples=}, {whole_samples=}"
        )
    apart = [_subtract(part.get(name), whole.get(name)) for name in {**whole, **part}]
    noise = global_norm(apart).double().square() / (1.0 / part_samples - 1.0 / whole_samples)
    return noise, global_norm(whole.values()).double().square() - noise / whole_samples


def noise_scale(
    decay: float | Schedule = 0.9, *, interval: Duration | int | str = 10, batch_spec: BatchSpec | None = None
) -> Transform:
    """Report as ``noise_scale`` the batch size, in samples, at which noise and signal of the gradient are equal.

    Far below it, twice the batch size saves half of the steps; far above it, it saves nothing. It does not change what is
    trained, by no bit: in the first step of each interval every second sample of the global batch is run before the whole of
    it, after which the random generators and the buffers of the model are put back. Such a step costs half a step more.

    It is about the gradient that ``inner`` computes, so what is listed after it counts. Noise is that of a sample, also where
    the loss is a mean over tokens. While the signal is small its estimate may be negative, and so the scale.

    The slice is ``{"measured": int, "noise": [], "signal": []}``: how often, and the averages. They begin at 0, which their
    quotient does not see. The metric is there from the first measurement on; a global batch of one sample is not measured. A
    gradient that is infinite or NaN leaves the averages alone (until there is a finite one, the metric is NaN).

    Formula: ``noise_scale = average(noise) / average(signal)`` with ``average = decay * average + (1 - decay) * new`` and the
    estimates of ``estimate_noise_and_signal``

    Args:
        decay: of the two averages, per measurement, in ``[0, 1)``; or a schedule of such, read at the step about to run.
        interval: the first step of each is measured, as with ``every``.
        batch_spec: where the batch axis is; None takes the first one. The same that ``microbatch_step`` was given.

    Mutates: nothing that lasts. It takes the memory of a second gradient while a step is measured.
    Collective: in a measured step one record on the control group, those of a second gradient, and as ``estimate_noise_and_signal``.
    Host sync: none; in a measured step one for each sequence in a batch that has an entry per sample (names of files).

    Raises:
        ConfigError: ``decay`` outside of ``[0, 1)``; of a schedule, in the step for which it is. ``interval`` is no duration.
            In a step, a batch that cannot be counted.
        StepError: in a measured step, every second sample of the batch has no weight, so half of it has no mean loss.

    Source: McCandlish et al. 2018, arXiv:1812.06162, appendix A.1.

    Example:
        >>> from dtrain.losses import mean_loss
        >>> from dtrain.step.compose import compose_step
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> loss = mean_loss(lambda model, x: model(x).mean(), weight=len)
        >>> step = compose_step(loss, [noise_scale()])
        >>> state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> state, metrics = step(state, torch.tensor([[1.0], [2.0]]))  # gradients: 1 of the half, 1.5 of the whole
        >>> round(metrics["noise_scale"].total.item(), 6)  # noise 0.25 / (1 - 1/2) = 0.5, signal 2.25 - 0.5/2 = 2
        0.25
    """
    decay_at, each = hyperparameter(decay, "noise_scale: decay", "[0, 1)"), Duration.parse(interval)

    def init(state: TrainState) -> TransformState:
        nothing = torch.zeros((), dtype=torch.float64, device=state.device)
        return {"measured": 0, "noise": nothing, "signal": nothing.clone()}

    def grad(inner: GradFn) -> GradFn:
        def measured(state: TrainState, batch: Batch, *, microbatch_size: int | None = None) -> tuple[TrainState, Metrics]:
            if state.step and not state.clock.crossed(each):
                state, metrics = inner(state, batch, microbatch_size=microbatch_size)
                return state, {**metrics, **_noise_scale_metric(state)}
            now = decay_at(state.clock)
            half, total = _take_half(state, batch, batch_spec)
            if half is None or isinstance(half, FailedBatch):
                state, metrics = inner(state, batch if half is None else half, microbatch_size=microbatch_size)
                return state, {**metrics, **_noise_scale_metric(state)}
            with _restore_rng_and_buffers(state):
                state, _ = inner(state, half, microbatch_size=microbatch_size)
            part = _collect_grads(state)
            state, metrics = inner(state, batch, microbatch_size=microbatch_size)
            found = estimate_noise_and_signal(part, _collect_grads(state), part_samples=(total + 1) // 2, whole_samples=total)
            state = state.with_transform_state(_NAME, _update_averages(state.transform_states[_NAME], *found, decay=now))
            return state, {**metrics, **_noise_scale_metric(state)}

        return measured

    return Transform(name=_NAME, init=init, grad=grad, hyperparameters=(decay_at,))


@contextmanager
def _restore_rng_and_buffers(state: TrainState) -> Iterator[None]:
    """What runs inside draws and counts nothing that is seen afterwards."""
    randomness, buffers = RNGSnapshot(), BufferSnapshot(state.model)
    buffers.capture()
    try:
        yield
    finally:
        buffers.restore()
        randomness.restore()


def _take_half(state: TrainState, batch: Batch, spec: BatchSpec | None) -> tuple[Batch | None, int]:
    """This rank's part of every second sample of the global batch, which is the same half for any number of ranks.

    Where copies of the model train apart, the batch of this rank's copy stands for the global one.

    Returns:
        The samples; a ``FailedBatch``, for the step to raise, where this rank cannot count its own; None where there are not
        two in all, or another rank has failed. And how many the whole batch has.
    """
    mine, failed = 0, batch if isinstance(batch, FailedBatch) else None
    try:
        mine = count_samples_and_tokens(batch, spec)[0] if failed is None else 0
    except Exception as error:  # noqa: BLE001  # of any kind; raised in the step, by all ranks
        failed = FailedBatch(error)
    rows = all_gather_numbers([mine, failed is not None], caller=_NAME)
    by_data_rank = [int(count) for count, _ in rows[:: state.spec.ranks_per_batch]]
    ranks = state.spec.data_ranks // (
        state.spec.replica_info.count if state.spec.replica_info else 1
    )  # that have a batch between them
    batches = [by_data_rank[first : first + ranks] for first in range(0, len(by_data_rank), ranks)]
    if failed is not None or any(broken for _, broken in rows) or min(map(sum, batches)) < 2:
        return failed, 0
    own, place = divmod(state.spec.data_rank, ranks)
    before = sum(batches[own][:place])
    batch = to_device(batch, state.device)
    return select_samples(batch, torch.arange(mine, device=state.device)[before % 2 :: 2], spec), sum(batches[own])


def _collect_grads(state: TrainState) -> dict[str, Tensor]:
    """The gradients as they are. The next one is made of new tensors, so these need no copies."""
    return {name: param.grad for name, param in state.params.items() if param.grad is not None}


def _subtract(one: Tensor | None, other: Tensor | None) -> Tensor:
    if one is None or other is None:
        found = one if one is not None else other
        assert found is not None
        return found
    return from_local_like(one, to_local(one) - to_local(other))


def _update_averages(before: TransformState, noise: Tensor, signal: Tensor, *, decay: float) -> TransformState:
    def mean(key: str, new: Tensor) -> Tensor:
        moved = torch.lerp(before[key], new.to(before[key].device), 1.0 - decay)
        return torch.where(known.to(moved.device), moved, before[key])

    known = noise.isfinite() & signal.isfinite()  # not so while a loss scale is too large, and an average would never forget
    return {"measured": before["measured"] + 1, "noise": mean("noise", noise), "signal": mean("signal", signal)}


def _noise_scale_metric(state: TrainState) -> Metrics:
    found = state.transform_states[_NAME]
    return {_NAME: Metric(found["noise"] / found["signal"], unit_weight(state.device))} if found["measured"] else {}
