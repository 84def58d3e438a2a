"""Ghost batch norm: statistics of small groups of samples, whatever the batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dtrain.errors import ConfigError
from dtrain.surgery.class_swap import Mixin, add_mixin
from dtrain.surgery.replace import replace_modules

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def ghost_batches(x: Tensor, ghost_batch_size: int) -> tuple[Tensor, ...]:
    """``x`` in as few groups along its first axis as have at most ``ghost_batch_size`` samples, as even as can be.

    So a last group is never much smaller than the others. One sample alone, for which a ``BatchNorm1d`` of features has no
    variance, is only left of an odd batch in groups of 2.

    Formula: ``groups = ceil(len(x) / ghost_batch_size)``, of sizes that differ by at most 1

    Source: Hoffer et al. 2017, arXiv:1705.08741, algorithm 1, which leaves ragged batches open.

    Example:
        >>> [len(group) for group in ghost_batches(torch.zeros(9, 2), 4)]
        [3, 3, 3]
    """
    return x.tensor_split(max(1, -(-len(x) // ghost_batch_size)))


class Ghost(Mixin):
    """Mixed into a batch norm: each group of samples is normalised by its own statistics."""

    _ghost_batch_size: int

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            out: Tensor = super().forward(x)
            return out
        return torch.cat([super(Ghost, self).forward(group) for group in ghost_batches(x, self._ghost_batch_size)])

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, ghost_batch_size={self._ghost_batch_size}"


def ghost_batch_norm(model: nn.Module, *, ghost_batch_size: int = 32) -> nn.Module:
    """Have the batch norms of ``model`` take statistics over at most ``ghost_batch_size`` samples at a time; return the model.

    Groups are cut from the batch that a forward sees: this rank's, and of that a microbatch. A smaller batch is one group. So
    two ranks equal one if their groups are the same samples. Running statistics take each group in turn with the full
    momentum, as in the paper (Composer divides it by the number of groups); on several ranks those of rank 0 count, as for
    any batch norm. Evaluation is unchanged, and so are parameters and names.

    Formula: ``out = (x - mean(group)) / sqrt(var(group) + eps) * weight + bias``, for each group
    ``running = (1 - momentum) ** groups * running + sum_i (1 - momentum) ** (groups - i) * momentum * statistic_i``, i from 1

    Args:
        model: a plain module, before ``shard_model``; on meta, too.
        ghost_batch_size: at least 2.

    Mutates: ``model``: the classes of its ``BatchNorm1d``, ``2d`` and ``3d``.
    Host sync: none of its own; torch's batch norm waits for its count where ``momentum`` is None.

    Raises:
        ConfigError: no batch norm in the model, another ``ghost_batch_size``, a model that is sharded already.

    Source: Hoffer et al. 2017, arXiv:1705.08741, algorithm 1; Dimitriou and Arandjelovic 2020, arXiv:2007.08554.

    Example:
        >>> norm = ghost_batch_norm(nn.BatchNorm1d(1, eps=1e-12), ghost_batch_size=2)
        >>> norm(torch.tensor([[0.0], [2.0], [10.0], [30.0]])).flatten().tolist()
        [-1.0, 1.0, -1.0, 1.0]
    """
    if type(ghost_batch_size) is not int or ghost_batch_size < 2:
        raise ConfigError(f"ghost_batch_norm: ghost_batch_size must be a whole number of at least 2, got {ghost_batch_size!r}")

    def ghostly(module: nn.Module, name: str) -> nn.Module | None:
        if not add_mixin(module, Ghost):
            return None
        assert isinstance(module, Ghost)
        module._ghost_batch_size = ghost_batch_size
        return module

    def wanted(name: str, module: nn.Module) -> bool:
        return isinstance(module, _BATCH_NORMS)

    return replace_modules(model, {wanted: ghostly}, caller="ghost_batch_norm").model
