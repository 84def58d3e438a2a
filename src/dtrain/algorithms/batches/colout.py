"""ColOut: rows and columns of images are left out, so that they get smaller."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dtrain.algorithms.batches.drawing import check_share, needed, permutation
from dtrain.algorithms.batches.fields import Key, on_images, read, replaced
from dtrain.algorithms.batches.seam import at_batch
from dtrain.errors import ConfigError
from dtrain.schedules.hyper import hyperparameter
from dtrain.state import TrainState
from dtrain.transform import Transform
from dtrain.types import Batch, Schedule


def colout_batch(
    batch: Batch,
    *,
    p_row: float = 0.15,
    p_col: float = 0.15,
    inputs: Key = "x",
    also: Sequence[Key] = (),
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
        inputs: key of the images.
        also: keys of what is laid out like them in its last two axes and is cut alike: a segmentation's targets.
        generator: for what is not given below.
        rows: int64 ``[kept]``, those that are kept.
        columns: likewise.

    Host sync: none.

    Raises:
        ConfigError: no generator where one is needed, no images, a share outside of ``[0, 1)``, other sizes in ``also``.

    Source: the algorithm of this name in MosaicML's Composer, whose defaults these are.

    Example:
        >>> image = torch.arange(6.0).reshape(1, 2, 3)
        >>> colout_batch(image, rows=torch.tensor([1]), columns=torch.tensor([0, 2])).tolist()
        [[[3.0, 5.0]]]
    """
    _check(p_row, p_col)
    shape = tuple(read(batch, inputs, "colout").shape[-2:])
    chosen: list[Tensor] = []

    def cut(images: Tensor) -> Tensor:
        chosen.append(_kept(rows, images.shape[-2], p_row, generator, images.device))
        chosen.append(_kept(columns, images.shape[-1], p_col, generator, images.device))
        return images.index_select(-2, chosen[0]).index_select(-1, chosen[1])

    made = on_images(batch, inputs, "colout", cut)
    for key in also:
        other = read(batch, key, "colout")
        if tuple(other.shape[-2:]) != shape:
            raise ConfigError(f"colout: {key!r} must end in the images' height and width {shape}, got {tuple(other.shape)}")
        made = replaced(made, {key: other.index_select(-2, chosen[0]).index_select(-1, chosen[1])})
    return made


def colout(
    p_row: float | Schedule = 0.15, p_col: float | Schedule = 0.15, *, inputs: Key = "x", also: Sequence[Key] = ()
) -> Transform:
    """Train on smaller images, without some rows and columns: ``colout_batch`` of each rank's batch.

    How many are left out is the same on all ranks, which ones is drawn on each.

    Formula: ``x = x[..., rows, :][..., columns]``

    Args:
        p_row: the share of rows that is left out, in ``[0, 1)``, or a schedule of such, read at the step about to run.
        p_col: likewise of columns.
        inputs: key of the images.
        also: keys of what is cut alike.

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
        return colout_batch(batch, p_row=now[0], p_col=now[1], inputs=inputs, also=also, generator=generator)

    return at_batch(cut, name="colout", images=inputs, hyperparameters=(row_at, col_at))


def _kept(
    given: Tensor | None, extent: int, left_out: float, generator: torch.Generator | None, device: torch.device
) -> Tensor:
    if given is not None:
        return given.to(device, non_blocking=True)
    keep = max(1, int((1.0 - left_out) * extent + 1e-9))  # 0.9 * 10 is a hair less than 9
    return permutation(extent, needed(generator, "colout", "rows=... and columns=..."), device)[:keep].sort().values


def _check(p_row: float, p_col: float) -> None:
    check_share(p_row, "colout", "p_row", whole=False)
    check_share(p_col, "colout", "p_col", whole=False)
