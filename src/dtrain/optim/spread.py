"""A function of whole matrices over matrices that are cut: each rank computes some of them, and has all for a moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.dist.timeouts import naming_missing
from dtrain.tensors import gathered, is_distributed, own_part, rows_over, with_shard

MatrixFn = Callable[[Tensor], Tensor]
"""A whole matrix in, one of the same shape and dtype out."""


def map_matrices(
    function: MatrixFn, like: Sequence[Tensor], part_of: Callable[[int], Tensor], *, where: str
) -> Iterator[tuple[int, Tensor]]:
    """``function`` of each whole matrix, as this rank's part of it: ``(index, part)``, in an order that is the same on all
    ranks.

    Matrices whose rows are cut over ``n`` ranks are taken ``n`` at a time, of like size: each rank gets one of them whole,
    computes, and gives the parts back. So the work is divided by ``n``, and a rank holds one matrix more than its shards. One
    that is cut in another way is gathered, and computed, on every rank; so is one that all ranks have anyway.

    Args:
        function: deterministic, so that ranks that compute the same get the same.
        like: the matrices, plain or DTensors, for how they lie.
        part_of: this rank's part of what ``function`` is to see, by index; a plain tensor, called once for each index.
        where: the name of the caller, in the error of a collective that fails.

    Collective: for matrices with cut rows two all-to-alls for each ``n`` of them; for others that are cut one all-gather each.
    Host sync: none.
    """
    over: dict[dist.ProcessGroup | None, list[int]] = {}
    for index, matrix in enumerate(like):
        rows = rows_over(matrix)
        over.setdefault(None if rows is None else rows[0], []).append(index)
    for group, members in over.items():
        if group is None:
            for index in members:
                whole = part_of(index)
                if is_distributed(like[index]):
                    yield index, own_part(like[index], function(gathered(with_shard(like[index], whole))))
                else:
                    yield index, function(whole)
            continue
        members.sort(key=lambda index: -like[index].numel())  # those of a round wait for its largest
        ranks = group.size()
        for start in range(0, len(members), ranks):
            with naming_missing(where):
                yield from _round(function, like, part_of, members[start : start + ranks], group)


def _round(
    function: MatrixFn, like: Sequence[Tensor], part_of: Callable[[int], Tensor], members: list[int], group: dist.ProcessGroup
) -> list[tuple[int, Tensor]]:
    """Rank ``r`` of ``group`` computes the ``r``-th of ``members``."""
    rank, ranks = group.rank(), group.size()
    parts = [part_of(index) for index in members]
    here = [part.numel() for part in parts] + [0] * (ranks - len(parts))
    mine = like[members[rank]] if rank < len(members) else None
    rows = rows_over(mine) if mine is not None else None
    there = [size * mine.shape[1] for size in rows[1]] if mine is not None and rows is not None else [0] * ranks
    flat = torch.cat([part.flatten() for part in parts])
    whole = flat.new_empty(sum(there))
    dist.all_to_all_single(whole, flat, there, here, group=group)
    if mine is not None:
        whole = function(whole.view(mine.shape)).flatten()
    dist.all_to_all_single(flat, whole, here, there, group=group)
    back = flat.split(here)
    return [(index, piece.view(part.shape)) for index, piece, part in zip(members, back, parts, strict=False)]
