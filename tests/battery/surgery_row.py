"""``SurgeryRow``: an edit of a model under contract."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Points = Sequence[tuple[Any, Any]]
"""Pairs of what came out and what is known by hand, of numbers or tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SurgeryRow:
    """An edit under contract.

    Args:
        make: the plain model, small (it is made double); it draws its weights from the global generator,
            and gives a tensor ``[samples, ...]`` for a tensor ``[samples, ...]``, each sample's of its own sample (but for
            batch statistics: see ``per_rank``).
        edit: the surgery under test, ``Module -> Module``.
        changes: by clean name, the class of the module that stands there afterwards; every module that the edit replaces, and
            no other. Where the edit changes no classes, empty.
        inputs: shape of a sample, and how many different numbers it holds: None for floats, else whole numbers below that.
        of: the public functions that it is an example of.
        points: a case whose numbers follow from the formula or the paper: at least two pairs (computed,
            expected). Each public function has one, in one of its rows.
        blocks: classes or names of the modules that ``shard_model`` cuts apart.
        outside: a model in which the edit finds nothing to do, for which it must raise; None where there is no such model.
        per_rank: it draws or counts differently on each rank, so two ranks do not equal one.
        meta: a model made on the meta device can be edited and then materialized.
        syncs: how often a step may make the host wait for the device, beyond that of the plain model.
        initial: the edit keeps the outputs of the model in evaluation, up to rounding.
    """

    make: Callable[[], nn.Module]
    edit: Callable[[nn.Module], nn.Module]
    changes: dict[str, str]
    inputs: tuple[tuple[int, ...], int | None]
    of: tuple[str, ...] = ()
    points: Callable[[], Points] | None = None
    blocks: tuple[Any, ...] = (nn.Linear, nn.Conv2d)
    outside: Callable[[], nn.Module] | None = lambda: nn.Sequential(nn.Flatten(), nn.Identity())
    per_rank: bool = False
    meta: bool = True
    syncs: int = 0
    initial: bool = False


def scalar(value: float) -> torch.Tensor:
    """A number as a float64 tensor ``[]``, for points."""
    return torch.tensor(value, dtype=torch.float64)
