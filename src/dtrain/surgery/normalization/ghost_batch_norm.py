"""Compute batch norm statistics over small groups of samples (ghost batches): ``ghost_batch_norm``."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dtrain.arguments import check_int
from dtrain.surgery.replace import Mixin, add_mixin, apply_policies

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def ghost_batches(x: Tensor, ghost_batch_size: int) -> tuple[Tensor, ...]:
    """Split ``x`` along its first axis into the fewest groups of at most ``ghost_batch_size`` samples, of even size.

    No group is much smaller than the others. A group of one sample, for which ``BatchNorm1d`` has no variance, occurs only in
    an odd batch with groups of 2.

    Formula: ``groups = ceil(len(x) / ghost_batch_size)``, of sizes that differ by at most 1

    Source: Hoffer et al. 2017, arXiv:1705.08741, algorithm 1, which does not define ragged batches.

    Example:
        >>> import dtrain as dt
        >>> [len(group) for group in dt.surgery.ghost_batches(torch.zeros(9, 2), 4)]
        [3, 3, 3]
    """
    return x.tensor_split(max(1, -(-len(x) // ghost_batch_size)))


class Ghost(Mixin):
    """Mixin of a batch norm that normalizes each group of samples by its own statistics."""

    _ghost_batch_size: int

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            out: Tensor = super().forward(x)
            return out
        return torch.cat([super(Ghost, self).forward(group) for group in ghost_batches(x, self._ghost_batch_size)])

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, ghost_batch_size={self._ghost_batch_size}"


def ghost_batch_norm(model: nn.Module, *, ghost_batch_size: int = 32) -> nn.Module:
    """Compute the statistics of batch norms over at most ``ghost_batch_size`` samples; return the model.

    Groups are parts of the batch of one forward, which is a microbatch of this rank. A smaller batch is one group. Two ranks
    equal one rank if their groups contain the same samples. Each group updates the running statistics with the full momentum,
    as in the paper (Composer divides the momentum by the number of groups). On several ranks the running statistics of rank 0
    are used, as for any batch norm. Evaluation, parameters and names do not change.

    Formula: ``out = (x - mean(group)) / sqrt(var(group) + eps) * weight + bias``, for each group
    ``running = (1 - momentum) ** groups * running + sum_i (1 - momentum) ** (groups - i) * momentum * statistic_i``, i from 1

    Args:
        model: plain module before ``shard_model``; on meta, too.
        ghost_batch_size: largest group, at least 2 samples.

    Mutates: ``model``: the classes of its ``BatchNorm1d``, ``2d`` and ``3d``.
    Host sync: none of its own; torch's batch norm reads its count if ``momentum`` is None.

    Example:
        >>> import dtrain as dt
        >>> norm = dt.surgery.ghost_batch_norm(nn.BatchNorm1d(1, eps=1e-12), ghost_batch_size=2)
        >>> norm(torch.tensor([[0.0], [2.0], [10.0], [30.0]])).flatten().tolist()
        [-1.0, 1.0, -1.0, 1.0]

    Raises:
        ConfigError: no batch norm in the model, an invalid ``ghost_batch_size``, or a sharded model.

    Source: Hoffer et al. 2017, arXiv:1705.08741, algorithm 1; Dimitriou and Arandjelovic 2020, arXiv:2007.08554.

    Suggested values:
        CIFAR and ImageNet, batches of 4096: ``ghost_batch_size=128`` (Hoffer et al. 2017, experiments)
        ImageNet, ResNet-50: ``ghost_batch_size`` of 16, 32 or 64 (MosaicML Composer, method card of ghost batch norm)
    When not to use: a rank has no more samples than ``ghost_batch_size``: plain batch norm then computes the same. Small groups
        also run more kernels.
    """
    check_int("ghost_batch_norm", "ghost_batch_size", ghost_batch_size, minimum=2)

    def policy(module: nn.Module, name: str) -> nn.Module | None:
        ghost = add_mixin(module, Ghost)
        if ghost is not None:
            ghost._ghost_batch_size = ghost_batch_size
        return ghost

    def is_selected(name: str, module: nn.Module) -> bool:
        return isinstance(module, _BATCH_NORMS)

    return apply_policies(model, {is_selected: policy}, caller="ghost_batch_norm").model
