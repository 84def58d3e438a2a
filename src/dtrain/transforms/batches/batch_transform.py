"""Build transforms of whole batches: read and replace tensors of a batch, and draw random numbers.

A batch method is a function ``(batch, *, generator, ...) -> batch``. The function never changes the given batch, and draws from
the given generator, never from the global generator. ``batch_transform`` makes a transform of the function.

All methods find the inputs and the targets of a batch alike. Without ``input_key`` the inputs are at ``"x"`` or
``"input_ids"`` of a mapping or TensorDict, or are the first entry of a tuple. Without ``target_key`` the targets are at ``"y"``
or ``"labels"``, or are the second entry of a tuple. A bare tensor is its own inputs.

A target is a class index or a probability vector. Class indices are int64 ``[*]``, and ``ignore_index`` marks an ignored
target. Probabilities are float ``[*, classes]``. The sum of a row, its mass, is the weight of the target in the loss, so a row
of zeros is ignored. The first method whose result is not an index converts to probabilities. Later methods accept
probabilities. So mixup, label smoothing and soft cross entropy compose.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from dtrain.arguments import check_int, join_or
from dtrain.data.batch import list_microbatches, map_microbatches
from dtrain.device import is_accelerator
from dtrain.dist.rng import derive_seed
from dtrain.errors import ConfigError
from dtrain.schedules.clock import Clock
from dtrain.schedules.hyperparameters import Hyperparameter
from dtrain.state import TrainState
from dtrain.step.transform import Transform, empty_state, make_step_context
from dtrain.transforms.combinators import change_batch
from dtrain.typing import Batch, TransformState, is_tensordict

BatchKey: TypeAlias = str | int
"""Position of a tensor in a batch: key of a mapping or TensorDict, or index of a tuple."""

_INPUT_KEYS, _TARGET_KEYS = ("x", "input_ids"), ("y", "labels")


def get_inputs(batch: Batch, key: BatchKey | None, caller: str) -> tuple[BatchKey, Tensor]:
    """Return the key and the tensor of the inputs; the key of a bare tensor has no meaning.

    Raises:
        ConfigError: ``batch`` has no tensor at ``key``, or for None not one of the usual keys.
    """
    if isinstance(batch, Tensor):
        return _INPUT_KEYS[0], batch
    key = _find_key(batch, _INPUT_KEYS, 0, f"{caller}: input_key") if key is None else key
    return key, get_tensor(batch, key, caller)


def get_targets(batch: Batch, key: BatchKey | None, caller: str) -> tuple[BatchKey, Tensor]:
    """Return the key and the tensor of the targets of a batch with several tensors.

    Raises:
        ConfigError: as ``get_inputs``, or ``batch`` is a tensor itself.
    """
    if isinstance(batch, Tensor):
        raise ConfigError(
            f"{caller}: the batch must have inputs and targets, got one tensor. Give a mapping or a tuple of both."
        )
    key = _find_key(batch, _TARGET_KEYS, 1, f"{caller}: target_key") if key is None else key
    return key, get_tensor(batch, key, caller)


def _find_key(batch: Batch, names: tuple[str, ...], index: int, argument: str) -> BatchKey:
    if not hasattr(batch, "keys"):
        return index
    keys = list(batch.keys())
    matches = [name for name in names if name in keys]
    if len(matches) != 1:
        raise ConfigError(
            f"{argument} must be given for a batch without exactly one of {join_or(map(repr, names))}, "
            f"got a batch with {sorted(map(str, keys))}. "
            "Name the keys of inputs and targets."
        )
    return matches[0]


def get_tensor(batch: Batch, key: BatchKey, caller: str) -> Tensor:
    """Return the tensor at ``key``.

    Raises:
        ConfigError: ``batch`` has no tensor at ``key``.
    """
    try:
        value = batch[key]
    except (KeyError, IndexError, TypeError):
        keys = sorted(map(str, batch.keys())) if hasattr(batch, "keys") else f"a {type(batch).__name__}"
        raise ConfigError(f"{caller}: the batch must have {key!r}, got {keys}. Give another key.") from None
    if not isinstance(value, Tensor):
        raise ConfigError(
            f"{caller}: the value at {key!r} must be a tensor, got a {type(value).__name__}. Collate tensors in the loader."
        )
    return value


def get_images(batch: Batch, key: BatchKey | None, caller: str) -> tuple[BatchKey, Tensor]:
    """Return the key and the tensor of the images; three axes are one image.

    Raises:
        ConfigError: as ``get_inputs``, or the shape is not that of images.
    """
    key, images = get_inputs(batch, key, caller)
    if images.ndim not in (3, 4) or 0 in images.shape[-3:]:
        raise ConfigError(
            f"{caller}: images must be [batch, channels, height, width] or [channels, height, width], "
            f"got shape {tuple(images.shape)} at {key!r}. "
            "Add a channel axis with unsqueeze."
        )
    return key, images


def get_image_batch(batch: Batch, key: BatchKey | None, caller: str) -> tuple[BatchKey, Tensor]:
    """Return the key and the tensor of the images.

    Raises:
        ConfigError: as ``get_inputs``, or the shape is not ``[batch, channels, height, width]``.
    """
    key, images = get_inputs(batch, key, caller)
    if images.ndim != 4 or 0 in images.shape[-2:]:
        raise ConfigError(
            f"{caller}: images must be [batch, channels, height, width], got shape {tuple(images.shape)} at {key!r}. "
            "Add a channel axis with unsqueeze(1)."
        )
    return key, images


def replace_tensors(batch: Batch, values: Mapping[Any, Tensor]) -> Batch:
    """Return a batch of the same type with ``values`` at their keys and all other entries unchanged."""
    if isinstance(batch, Tensor):
        return next(iter(values.values()))
    if is_tensordict(batch):
        return batch.copy().update(dict(values))
    if isinstance(batch, Mapping):
        return {**batch, **values}
    items = list(batch)
    for index, value in values.items():
        items[index] = value
    return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)


def map_images(batch: Batch, key: BatchKey | None, caller: str, fn: Callable[[Tensor], Tensor]) -> Batch:
    """Apply ``fn`` to the images ``[batch, channels, height, width]`` of ``batch``.

    One image ``[channels, height, width]`` is treated as a batch of one, so a batch method also works on the samples of a
    loader.

    Raises:
        ConfigError: the inputs do not have the shape of images.
    """
    key, images = get_images(batch, key, caller)
    output = fn(images) if images.ndim == 4 else fn(images.unsqueeze(0)).squeeze(0)
    return replace_tensors(batch, {key: output})


def mix_rows(rows: Tensor, order: Tensor, coefficient: Tensor | float) -> Tensor:
    """Mix each row with the row at its index in ``order``: ``coefficient * rows + (1 - coefficient) * rows[order]``.

    Args:
        rows: float ``[batch, *]``.
        order: int64 ``[batch]``, on the device of ``rows``.
        coefficient: value in ``[0, 1]``: a number, ``[]``, ``[1]`` for all rows, or ``[batch]``.
    """
    others = rows.index_select(0, order)
    if not isinstance(coefficient, Tensor):
        return others.lerp_(rows, coefficient)
    weight = coefficient.to(rows.device, rows.dtype, non_blocking=True)
    return others.lerp_(rows, weight.reshape(-1, *(1,) * (rows.ndim - 1)))


def require_generator(generator: torch.Generator | None, caller: str, instead: str) -> torch.Generator:
    """Return ``generator`` if it is not None.

    Raises:
        ConfigError: ``generator`` is None. The error also offers the argument ``instead``.
    """
    if generator is None:
        raise ConfigError(f"{caller}: generator must be given, got None. Give generator= or {instead}.")
    return generator


def host_random(generator: torch.Generator | random.Random | None, caller: str, instead: str) -> random.Random:
    """Return a host random generator seeded with the next number of ``generator``, which must be a CPU generator.

    A transform gives a host random generator, which is returned unchanged: reading a number of a tensor counts as a host sync.

    Raises:
        ConfigError: ``generator`` is None, or on another device, which would need a host sync.
    """
    if isinstance(generator, random.Random):
        return generator
    generator = require_generator(generator, caller, instead)
    if generator.device.type != "cpu":
        raise ConfigError(
            f"{caller}: generator must be on the CPU, got a generator on {generator.device}. "
            "Give dt.dist.generator('cpu', ...)."
        )
    return random.Random(int(torch.randint(2**62, (), generator=generator, device="cpu")))


def sample_beta(alpha: float, count: int, generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return samples ``[count]`` of Beta(alpha, alpha) on ``device``; ones for ``alpha=0``, the limit without mixing.

    ``torch.distributions`` uses the global generator. A Beta sample is the first component of a Dirichlet sample of two
    components. The Dirichlet kernel divides both gammas by their sum without computing 0 / 0 for small ``alpha``.
    """
    if alpha == 0:
        return torch.ones(count, device=device, dtype=dtype)
    concentration = torch.full((count, 2), float(alpha), device=generator.device, dtype=dtype)
    return torch._sample_dirichlet(concentration, generator=generator)[:, 0].to(device, non_blocking=True)


def sample_host_beta(alpha: float, rng: random.Random) -> float:
    """Return a sample of Beta(alpha, alpha) on the host; 1 for ``alpha=0``, the limit without mixing.

    A Beta sample is the fraction of a Gamma sample of the sum of two. The logarithms of the Gamma samples stay finite for a
    small ``alpha``, whose samples are below the smallest float.
    """
    if alpha == 0:
        return 1.0
    logs = [math.log(rng.gammavariate(alpha + 1.0, 1.0)) + math.log(1.0 - rng.random()) / alpha for _ in range(2)]
    return 1.0 / (1.0 + math.exp(min(logs[1] - logs[0], 700.0)))


def sample_permutation(count: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """Return a random permutation ``[count]`` on ``device``, without a host sync."""
    order = torch.randperm(count, generator=generator, device=generator.device)
    # A copy from pageable memory would sync.
    return (order.pin_memory() if is_accelerator(device) and order.is_cpu else order).to(device, non_blocking=True)


def batch_transform(
    fn: Callable[..., Batch],
    *,
    name: str,
    at_clock: Mapping[str, Callable[[Clock], float]],
    check: Callable[[Batch], object] | None = None,
    host_generator: bool = False,
    init: Callable[[TrainState], TransformState] = empty_state,
) -> Transform:
    """Return a transform that calls ``fn`` with this rank's whole batch before the split into microbatches.

    Args:
        fn: batch method ``(batch, *, generator, ...) -> batch``.
        name: name of the transform.
        at_clock: further keyword arguments of ``fn``, as functions of the clock before the step.
        check: function that raises if the batch is no batch of a step; three axes pass for one image in ``fn``.
        host_generator: if True, the generator is a ``random.Random``, because its numbers select kernels. Reading numbers of a
            device generator on the host needs a sync. Otherwise the generator is on the device of the model.
        init: see ``Transform``.
    """

    def apply(state: TrainState, batch: Batch) -> Batch:
        if check is not None:
            for microbatch in list_microbatches(batch):
                check(microbatch)
        values = {option: value_at(state.clock) for option, value_at in at_clock.items()}
        if host_generator:
            seed = derive_seed(state.seed, name, state.step, state.spec.data_rank)
            generator: Any = random.Random(seed)
        else:
            generator = make_step_context(state, name).generator
        return map_microbatches(batch, lambda microbatch: fn(microbatch, generator=generator, **values))

    hyperparameters = tuple(value_at for value_at in at_clock.values() if isinstance(value_at, Hyperparameter))
    grad = partial(change_batch, apply, name)
    return Transform(name=name, init=init, grad=grad, uses_grad=False, hyperparameters=hyperparameters)


def as_probabilities(
    targets: Tensor,
    num_classes: int | None = None,
    *,
    ignore_index: int = -100,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Convert class indices to probabilities ``[*, classes]``. Probabilities are returned unchanged.

    Formula: ``result[..., c] = 1 if targets == c else 0``; a row of zeros where ``targets == ignore_index``.

    Args:
        targets: int64 ``[*]``, each in ``[0, num_classes)`` or ``ignore_index``; or float ``[*, classes]``.
        num_classes: number of classes; required for indices, checked for probabilities.
        ignore_index: index of ignored targets.
        dtype: dtype of the result.

    Example:
        >>> import dtrain as dt
        >>> dt.transforms.as_probabilities(torch.tensor([1, -100]), 3)
        tensor([[0., 1., 0.],
                [0., 0., 0.]])

    Raises:
        ConfigError: indices without ``num_classes``, another number of classes, or another dtype. (An index out of range raises
            a torch error, on a GPU asynchronously.)

    Source: the convention of this library; one-hot vectors with weights.
    """
    return to_probabilities(targets, num_classes, ignore_index=ignore_index, dtype=dtype, caller="as_probabilities")


def to_probabilities(
    targets: Tensor,
    num_classes: int | None,
    *,
    ignore_index: int,
    smoothing: float = 0.0,
    dtype: torch.dtype = torch.float32,
    caller: str,
) -> Tensor:
    """Convert as ``as_probabilities`` does, with the name of the calling function in errors.

    Args:
        targets: class indices or probabilities.
        num_classes: number of classes.
        ignore_index: index of ignored targets.
        smoothing: fraction of each target to spread evenly over all classes.
        dtype: dtype of the result for indices.
        caller: calling function.

    Raises:
        ConfigError: as ``as_probabilities``.
    """
    check_num_classes(num_classes, caller)
    if targets.is_floating_point():
        if num_classes is not None and (targets.ndim == 0 or targets.shape[-1] != num_classes):
            raise ConfigError(
                f"{caller}: targets must be [*, {num_classes}], got shape {tuple(targets.shape)}. "
                "Set num_classes to the number of classes of the targets."
            )
        return torch.lerp(targets, targets.mean(dim=-1, keepdim=True), smoothing) if smoothing else targets
    check_class_indices(targets, caller)
    if num_classes is None:
        raise ConfigError(f"{caller}: num_classes must be given for class indices, got None. Give num_classes=.")
    targets = targets.unsqueeze(-1)
    valid = targets != ignore_index
    mass, even = valid.to(dtype), smoothing / num_classes
    # One pass over the classes, the largest axis.
    spread = mass.expand(*targets.shape[:-1], num_classes) * even
    return spread.scatter_(-1, targets * valid, mass * (1.0 - smoothing + even))


def check_class_indices(targets: Tensor, caller: str) -> None:
    """Raise ``ConfigError`` unless non-float targets are int64."""
    if targets.dtype != torch.int64:
        raise ConfigError(
            f"{caller}: targets must be class indices (int64) or probabilities (float), got {targets.dtype}. "
            "Convert the targets with .long() or .float()."
        )


def check_num_classes(num_classes: int | None, caller: str) -> None:
    """Raise ``ConfigError`` unless ``num_classes`` is None or an int of at least 1."""
    if num_classes is not None:
        check_int(caller, "num_classes", num_classes)
