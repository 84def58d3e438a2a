"""Estimate the gradient noise scale: the batch size above which larger batches save few steps."""

from __future__ import annotations

import torch
from torch import Tensor

from dtrain.data.batch import BatchSpec, FailedBatch, check_rows, count_samples_and_tokens, select_samples, to_device
from dtrain.dist.collectives import all_gather_numbers
from dtrain.dist.dtensor import from_local_like, global_norm, to_local
from dtrain.dist.rng import RNGSnapshot
from dtrain.errors import ConfigError
from dtrain.schedules.durations import Duration
from dtrain.schedules.hyperparameters import hyperparameter
from dtrain.shard.buffers import restore_buffers
from dtrain.state import TrainState
from dtrain.step.normalization import divide_, unit_weight
from dtrain.step.transform import BeforeDivision, GradFn, Transform
from dtrain.typing import Batch, Metric, Metrics, Params, Schedule, TransformState

_NAME = "noise_scale"


def estimate_noise_and_signal(
    part: Params, whole: Params, *, part_samples: float, whole_samples: float
) -> tuple[Tensor, Tensor]:
    """Estimate the variance of a sample's gradient and the squared norm of the true gradient, from two mean gradients.

    Formula: ``noise = norm(part - whole)**2 / (1 / part_samples - 1 / whole_samples)``,
    ``signal = norm(whole)**2 - noise / whole_samples``

    Both estimates are unbiased. The noise scale is the quotient of their averages over steps. For halves of a batch, ``noise``
    is the mean over both halves of the paper's formula ``(norm(part)**2 - norm(whole)**2) / (1 / part_samples - 1 /
    whole_samples)``. A difference of vectors is less noisy than a difference of norms.

    Args:
        part: mean gradients over a part of a batch, by parameter, plain or DTensor.
        whole: mean gradients over the whole batch. A name in only one of both mappings has a gradient of 0 in the other
            mapping.
        part_samples: samples of the part.
        whole_samples: samples of the whole batch, more than ``part_samples``.

    Returns:
        ``noise`` and ``signal``, float64 scalars ``[]``, the same on every rank. ``signal`` may be negative.

    Collective: two all-reduces of a scalar per mesh axis that gradients are sharded on.
    Host sync: none.

    Example:
        >>> import dtrain as dt
        >>> part, whole = {"w": torch.tensor([3.0, 0.0])}, {"w": torch.tensor([2.0, 1.0])}
        >>> noise, signal = dt.transforms.estimate_noise_and_signal(
        ...     part, whole, part_samples=2, whole_samples=4
        ... )
        >>> round(noise.item(), 5), round(signal.item(), 5)  # 2 / (1/2 - 1/4), and 5 - 8/4
        (8.0, 3.0)

    Raises:
        ConfigError: not ``0 < part_samples < whole_samples``.

    Source: McCandlish et al. 2018, arXiv:1812.06162, appendix A.1.
    """
    if not 0 < part_samples < whole_samples:
        raise ConfigError(
            "estimate_noise_and_signal: part_samples must be above 0 and below whole_samples, "
            f"got {part_samples=}, {whole_samples=}. "
            "Give the samples of one part and of all parts."
        )
    differences = [_subtract(part.get(name), whole.get(name)) for name in {**whole, **part}]
    noise = global_norm(differences).double().square() / (1.0 / part_samples - 1.0 / whole_samples)
    return noise, global_norm(whole.values()).double().square() - noise / whole_samples


def noise_scale(
    decay: float | Schedule = 0.9, *, every: Duration | int | str = 10, batch_spec: BatchSpec | None = None
) -> Transform:
    """Report as ``noise_scale`` the batch size, in samples, at which the noise and the signal of the gradient are equal.

    Far below this size, twice the batch size halves the number of steps. Far above it, a larger batch saves nothing. The
    training result does not change by a single bit. In the first step of each interval, every second sample of the global batch
    runs before the whole batch. Then the random generators and the buffers of the model are restored. Such a step takes half a
    step longer.

    The transform measures the gradient of its inner step, so transforms listed after it count. The noise is that of a sample,
    even if the loss is a mean over tokens. If the signal is small, its estimate may be negative, and so may the scale.

    The transform state is ``{"measured": int, "noise": [], "signal": []}``: the number of measurements and the two averages.
    Both averages begin at 0, which cancels in their quotient. The metric exists from the first measurement on. A global batch
    of one sample is not measured. A gradient that is infinite or NaN does not change the averages. Until a finite gradient, the
    metric is NaN.

    Formula: ``noise_scale = average(noise) / average(signal)`` with ``average = decay * average + (1 - decay) * new`` and the
    estimates of ``estimate_noise_and_signal``

    Args:
        decay: decay of both averages per measurement, in ``[0, 1)``, or a schedule.
        every: duration between measurements, as with ``every``; the first step of each interval is measured.
        batch_spec: axes of the batch, as for ``microbatch_step``; None uses the first axis. Samples are selected by row.

    Mutates: nothing that lasts. A measured step needs the memory of a second gradient.
    Collective: in a measured step one record on the control channel, the collectives of a second gradient, and those of
    ``estimate_noise_and_signal``.
    Host sync: none; in a measured step one for each sequence in a batch that has an entry per sample (file names).

    Example:
        >>> import dtrain as dt
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> loss_fn = dt.mean_loss(lambda model, x: model(x).mean(), weight=len)
        >>> step = dt.compose_step(loss_fn, [dt.transforms.noise_scale()])
        >>> state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> state, metrics = step(
        ...     state, torch.tensor([[1.0], [2.0]])
        ... )  # gradients: 1 of the half, 1.5 of the whole
        >>> round(
        ...     metrics["noise_scale"].total.item(), 6
        ... )  # noise 0.25 / (1 - 1/2) = 0.5, signal 2.25 - 0.5/2 = 2
        0.25

    Raises:
        ConfigError: ``decay`` is outside of ``[0, 1)`` (a schedule is checked in each step), or ``every`` is not a duration.
            In a step: the samples of a batch cannot be counted.
        StepError: in a measured step, every second sample has no weight, so the half has no mean loss.

    Source: McCandlish et al. 2018, arXiv:1812.06162, appendix A.1.

    Suggested values:
        any run: ``decay=0.9``, ``every=10`` (dtrain's defaults; the paper names no values)
        choice of the batch size: a batch size near the reported value (McCandlish et al. 2018, section 2)
    When not to use: memory for a second gradient is missing, or a global batch has one sample: the estimate needs two batch
        sizes.
    """
    decay_at, interval = hyperparameter(decay, "noise_scale: decay", "[0, 1)"), Duration.parse(every)

    def init(state: TrainState) -> TransformState:
        zero = torch.zeros((), dtype=torch.float64, device=state.device)
        return {"measured": 0, "noise": zero, "signal": zero.clone()}

    def grad(inner: GradFn) -> GradFn:
        def grad_fn(state: TrainState, batch: Batch, *, microbatch_size: int | None = None) -> tuple[TrainState, Metrics]:
            if state.step and not state.clock.crossed(interval):
                state, metrics = inner(state, batch, microbatch_size=microbatch_size)
                return state, {**metrics, **_noise_scale_metric(state)}
            now = decay_at(state.clock)
            half, total = _take_half(state, batch, batch_spec)
            if half is None or isinstance(half, FailedBatch):
                state, metrics = inner(state, batch if half is None else half, microbatch_size=microbatch_size)
                return state, {**metrics, **_noise_scale_metric(state)}
            rng = RNGSnapshot()
            try:
                with restore_buffers(state.model):
                    state, _ = inner(state, half, microbatch_size=microbatch_size)
            finally:
                rng.restore()
            half, half_divisor = _collect_grads(state), _divisor_of(state)
            state, metrics = inner(state, batch, microbatch_size=microbatch_size)
            # The gradients of the step keep their divisor, so that the training result does not change by a bit.
            divide_(list(half.values()), half_divisor / _divisor_of(state))
            estimates = estimate_noise_and_signal(
                half, _collect_grads(state), part_samples=(total + 1) // 2, whole_samples=total
            )
            noise, signal = (estimate / _divisor_of(state) ** 2 for estimate in estimates)
            averages = _update_averages(state.transform_states[_NAME], noise, signal, decay=now)
            state = state.with_transform_state(_NAME, averages)
            return state, {**metrics, **_noise_scale_metric(state)}

        return grad_fn

    return Transform(name=_NAME, init=init, grad=BeforeDivision(grad), hyperparameters=(decay_at,))


def _take_half(state: TrainState, batch: Batch, spec: BatchSpec | None) -> tuple[Batch | None, int]:
    """Return this rank's part of every second sample of the global batch, and the number of samples of the global batch.

    The half is the same for any number of ranks. If replicas train separately, the batch of this rank's replica is the global
    batch.

    Returns:
        The samples, or a ``FailedBatch`` that the step raises if this rank cannot count its samples, or None if the global
            batch
        has fewer than two samples or another rank failed. Then the number of samples of the global batch.
    """
    own_count, failed = 0, batch if isinstance(batch, FailedBatch) else None
    try:
        if failed is None:
            own_count = count_samples_and_tokens(batch, spec)[0]
            check_rows(batch, spec, own_count)
    # The step raises any error on all ranks.
    except Exception as error:  # noqa: BLE001
        failed = FailedBatch(error)
    rows = all_gather_numbers([own_count, failed is not None], caller=_NAME)
    by_data_rank = [int(count) for count, _ in rows[:: state.spec.ranks_per_batch]]
    # The ranks of a replica share a global batch.
    ranks = state.spec.data_ranks // (state.spec.replica_info.count if state.spec.replica_info else 1)
    batches = [by_data_rank[first : first + ranks] for first in range(0, len(by_data_rank), ranks)]
    if failed is not None or any(broken for _, broken in rows) or min(map(sum, batches)) < 2:
        return failed, 0
    replica, rank = divmod(state.spec.data_rank, ranks)
    before = sum(batches[replica][:rank])
    batch = to_device(batch, state.device)
    indices = torch.arange(own_count, device=state.device)[before % 2 :: 2]
    return select_samples(batch, indices, spec), sum(batches[replica])


def _collect_grads(state: TrainState) -> dict[str, Tensor]:
    """Return the gradients by name. No copies are needed, because the next backward allocates new gradient tensors."""
    return {name: param.grad for name, param in state._trainable.items() if param.grad is not None}


def _divisor_of(state: TrainState) -> Tensor | float:
    return 1.0 if state._grad_divisor is None else state._grad_divisor


def _subtract(first: Tensor | None, second: Tensor | None) -> Tensor:
    if first is None or second is None:
        # The sign does not matter, because only the norm is used.
        difference = first if first is not None else second
        assert difference is not None
        return difference
    return from_local_like(first, to_local(first) - to_local(second))


def _update_averages(before: TransformState, noise: Tensor, signal: Tensor, *, decay: float) -> TransformState:
    def mean(key: str, new: Tensor) -> Tensor:
        updated = torch.lerp(before[key], new.to(before[key].device), 1.0 - decay)
        return torch.where(finite.to(updated.device), updated, before[key])

    # Estimates are not finite while a loss scale is too large. A NaN would stay in the average forever.
    finite = noise.isfinite() & signal.isfinite()
    return {"measured": before["measured"] + 1, "noise": mean("noise", noise), "signal": mean("signal", signal)}


def _noise_scale_metric(state: TrainState) -> Metrics:
    averages = state.transform_states[_NAME]
    if not averages["measured"]:
        return {}
    return {_NAME: Metric(averages["noise"] / averages["signal"], unit_weight(state.device))}
