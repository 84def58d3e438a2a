"""ColOut: drop rows and columns of images, so that the images become smaller."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dtrain.errors import ConfigError
from dtrain.schedules.hyperparameter import hyperparameter
from dtrain.state import TrainState
from dtrain.transform import Transform
from dtrain.transforms.batches.batch_transform import (
    BatchKey,
    batch_transform,
    check_fraction,
    get_tensor,
    map_images,
    replace_tensors,
    require_generator,
    sample_permutation,
)
from dtrain.typing import Batch, Schedule


def colout_batch(
    batch: Batch,
    *,
    p_row: float = 0.15,
    p_col: float = 0.15,
    input_key: BatchKey = "x",
    extra_keys: Sequence[BatchKey] = (),
    generator: torch.Generator | None = None,
    rows: Tensor | None = None,
    columns: Tensor | None = None,
) -> Batch:
    """Return a batch of smaller images without some rows and columns, the same for the whole batch.

    Formula: ``x = x[..., rows, :][..., columns]``, sorted random choices of ``floor((1 - p_row) * height)`` rows and
    ``floor((1 - p_col) * width)`` columns, each at least one.

    Args:
        batch: images ``[batch, channels, height, width]`` of any dtype, or a mapping, TensorDict or tuple with images; also one
            image ``[channels, height, width]``.
        p_row: fraction of rows to drop, in ``[0, 1)``.
        p_col: fraction of columns to drop, in ``[0, 1)``.
        input_key: key of the images.
        extra_keys: keys of tensors that end in the same height and width and are cut alike, for example segmentation targets.
        generator: generator for ``rows`` and ``columns`` if not given.
        rows: int64 ``[kept]``, indices of the kept rows.
        columns: int64 ``[kept]``, indices of the kept columns.

    Host sync: none.

    Example:
        >>> import dtrain as dt
        >>> image = torch.arange(6.0).reshape(1, 2, 3)
        >>> dt.transforms.colout_batch(image, rows=torch.tensor([1]), columns=torch.tensor([0, 2])).tolist()
        [[[3.0, 5.0]]]

    Raises:
        ConfigError: ``generator`` is required but missing, the inputs are not images, a fraction is outside of ``[0, 1)``, or
            ``extra_keys`` have other sizes.

    Source: the algorithm of this name in MosaicML's Composer, with Composer's defaults.
    """
    _check_fractions(p_row, p_col)
    shape = tuple(get_tensor(batch, input_key, "colout").shape[-2:])
    indices: list[Tensor] = []

    def cut(images: Tensor) -> Tensor:
        indices.append(_select_kept(rows, images.shape[-2], p_row, generator, images.device))
        indices.append(_select_kept(columns, images.shape[-1], p_col, generator, images.device))
        return images.index_select(-2, indices[0]).index_select(-1, indices[1])

    output = map_images(batch, input_key, "colout", cut)
    for key in extra_keys:
        other = get_tensor(batch, key, "colout")
        if tuple(other.shape[-2:]) != shape:
            raise ConfigError(f"colout: {key!r} must end in the images' height and width {shape}, got {tuple(other.shape)}.")
        output = replace_tensors(output, {key: other.index_select(-2, indices[0]).index_select(-1, indices[1])})
    return output


def colout(
    p_row: float | Schedule = 0.15,
    p_col: float | Schedule = 0.15,
    *,
    input_key: BatchKey = "x",
    extra_keys: Sequence[BatchKey] = (),
) -> Transform:
    """Train on smaller images without some rows and columns: apply ``colout_batch`` to each rank's batch.

    The number of dropped rows and columns is the same on all ranks. Each rank draws its own indices.

    Formula: ``x = x[..., rows, :][..., columns]``

    Args:
        p_row: fraction of rows to drop, in ``[0, 1)``, or a schedule.
        p_col: fraction of columns to drop, in ``[0, 1)``, or a schedule.
        input_key: key of the images.
        extra_keys: keys of tensors that are cut alike.

    Example:
        >>> import dtrain as dt
        >>> transform = dt.transforms.colout(0.1, 0.1)
        >>> transform.name
        'colout'

    Raises:
        ConfigError: a fraction is outside of ``[0, 1)`` (a schedule is checked in each step).

    Source: the algorithm of this name in MosaicML's Composer, with Composer's defaults.
    """
    row_at, col_at = hyperparameter(p_row, "colout: p_row", "[0, 1)"), hyperparameter(p_col, "colout: p_col", "[0, 1)")

    def batch_fn(batch: Batch, state: TrainState, generator: torch.Generator) -> Batch:
        now = row_at(state.clock), col_at(state.clock)
        return colout_batch(batch, p_row=now[0], p_col=now[1], input_key=input_key, extra_keys=extra_keys, generator=generator)

    return batch_transform(batch_fn, name="colout", image_key=input_key, hyperparameters=(row_at, col_at))


def _select_kept(
    indices: Tensor | None, extent: int, dropped: float, generator: torch.Generator | None, device: torch.device
) -> Tensor:
    if indices is not None:
        return indices.to(device, non_blocking=True)
    # The addend corrects a rounding: 0.9 * 10 is slightly less than 9.
    count = max(1, int((1.0 - dropped) * extent + 1e-9))
    generator = require_generator(generator, "colout", "rows= and columns=")
    return sample_permutation(extent, generator, device)[:count].sort().values


def _check_fractions(p_row: float, p_col: float) -> None:
    check_fraction(p_row, "colout", "p_row", closed=False)
    check_fraction(p_col, "colout", "p_col", closed=False)
