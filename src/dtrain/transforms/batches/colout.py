"""ColOut: rows and columns of images are left out, so that they get smaller."""

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
    """A batch of smaller images, without some rows and columns: the same ones in the whole batch.

    Formula: ``x = x[..., rows, :][..., columns]``, sorted random choices of ``floor((1 - p_row) * height)`` rows and
    ``floor((1 - p_col) * width)`` columns, each at least one.

    Args:
        batch: images ``[batch, channels, height, width]`` of any dtype, or a mapping, TensorDict or tuple with them; also one
            image ``[channels, height, width]``.
        p_row: the share of rows that is left out, in ``[0, 1)``.
        p_col: the share of columns.
        input_key: key of the images.
        extra_keys: keys of what is laid out like them in its last two axes and is cut alike: a segmentation's targets.
        generator: for what is not given below.
        rows: int64 ``[kept]``, those that are kept.
        columns: likewise.

    Host sync: none.

    Raises:
        ConfigError: no generator where one is needed, no images, a share outside of ``[0, 1)``, other sizes in ``extra_keys``.

    Source: the algorithm of this name in MosaicML's Composer, whose defaults these are.

    Example:
        >>> image = torch.arange(6.0).reshape(1, 2, 3)
        >>> colout_batch(image, rows=torch.tensor([1]), columns=torch.tensor([0, 2])).tolist()
        [[[3.0, 5.0]]]
    """
    _check_fractions(p_row, p_col)
    shape = tuple(get_tensor(batch, input_key, "colout").shape[-2:])
    chosen: list[Tensor] = []

    def cut(images: Tensor) -> Tensor:
        chosen.append(_select_kept(rows, images.shape[-2], p_row, generator, images.device))
        chosen.append(_select_kept(columns, images.shape[-1], p_col, generator, images.device))
        return images.index_select(-2, chosen[0]).index_select(-1, chosen[1])

    made = map_images(batch, input_key, "colout", cut)
    for key in extra_keys:
        other = get_tensor(batch, key, "colout")
        if tuple(other.shape[-2:]) != shape:
            raise ConfigError(f"colout: {key!r} must end in the images' height and width {shape}, got {tuple(other.shape)}")
        made = replace_tensors(made, {key: other.index_select(-2, chosen[0]).index_select(-1, chosen[1])})
    return made


def colout(
    p_row: float | Schedule = 0.15,
    p_col: float | Schedule = 0.15,
    *,
    input_key: BatchKey = "x",
    extra_keys: Sequence[BatchKey] = (),
) -> Transform:
    """Train on smaller images, without some rows and columns: ``colout_batch`` of each rank's batch.

    How many are left out is the same on all ranks, which ones is drawn on each.

    Formula: ``x = x[..., rows, :][..., columns]``

    Args:
        p_row: the share of rows that is left out, in ``[0, 1)``, or a schedule of such, read at the step about to run.
        p_col: likewise of columns.
        input_key: key of the images.
        extra_keys: keys of what is cut alike.

    Raises:
        ConfigError: a share outside of ``[0, 1)``; of a schedule, in the step for which it is.

    Source: the algorithm of this name in MosaicML's Composer, whose defaults these are.

    Example:
        >>> colout(0.1, 0.1).name
        'colout'
    """
    row_at, col_at = hyperparameter(p_row, "colout: p_row", "[0, 1)"), hyperparameter(p_col, "colout: p_col", "[0, 1)")

    def cut(batch: Batch, state: TrainState, generator: torch.Generator) -> Batch:
        now = row_at(state.clock), col_at(state.clock)
        return colout_batch(batch, p_row=now[0], p_col=now[1], input_key=input_key, extra_keys=extra_keys, generator=generator)

    return batch_transform(cut, name="colout", image_key=input_key, hyperparameters=(row_at, col_at))


def _select_kept(
    given: Tensor | None, extent: int, left_out: float, generator: torch.Generator | None, device: torch.device
) -> Tensor:
    if given is not None:
        return given.to(device, non_blocking=True)
    keep = max(1, int((1.0 - left_out) * extent + 1e-9))  # 0.9 * 10 is a hair less than 9
    return (
        sample_permutation(extent, require_generator(generator, "colout", "rows=... and columns=..."), device)[:keep]
        .sort()
        .values
    )


def _check_fractions(p_row: float, p_col: float) -> None:
    check_fraction(p_row, "colout", "p_row", closed=False)
    check_fraction(p_col, "colout", "p_col", closed=False)
