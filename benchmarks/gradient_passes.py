"""Count the passes over all gradients in one training step, composed by dtrain and written by hand in plain PyTorch.

    python benchmarks/gradient_passes.py               # one process and two ranks

Prints the Markdown table of ``docs/figures.md``. All figures are counts, so a busy machine does not change them. A pass is an
operation that reads or writes tensors of the size of gradients; an operation on a list of tensors is one pass over all of them,
and operations on parts of the gradients add up. Views, allocations, collectives, and the matrix products of the model do not
count. The passes of the optimizer are counted apart.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import dtrain as dt
from dtrain.dist.dtensor import is_dtensor
from dtrain.testing import Ranks

WIDTH, LAYERS, SAMPLES, MICROBATCH = 40, 3, 4, 2
# Weights, and shards of weights, are larger; activations are smaller.
LARGE = WIDTH * WIDTH // 2
ELEMENTS = LAYERS * WIDTH * WIDTH
_COMPUTE = ("mm", "addmm", "bmm", "matmul", "linear")
_ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty")
# FSDP2 copies parameters to gather them, and gathered parameters to their own tensors.
_GATHERS = ("all_gather_copy_in", "split_with_sizes_copy")
_NOT_COUNTED = frozenset((*_COMPUTE, *_ALLOCATIONS, *_GATHERS, "detach", "resize_"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kind of step.

    Args:
        strategy: ``"plain"`` (one process without a mesh), ``"replicate"`` or ``"full_shard"``.
        microbatches: number of microbatches of the step.
        fused: if True, the optimizer is fused; if False, it runs on lists of tensors.
        clips: if True, the gradient is clipped by its norm.
    """

    strategy: str
    microbatches: int
    fused: bool
    clips: bool

    def __str__(self) -> str:
        count = "one microbatch" if self.microbatches == 1 else f"{self.microbatches} microbatches"
        return f"{count}, {'fused' if self.fused else 'foreach'}, {'clipped' if self.clips else 'not clipped'}"


def list_cases(strategy: str) -> list[Case]:
    """Return all cases of ``strategy``."""
    return [
        Case(strategy=strategy, microbatches=microbatches, fused=fused, clips=clips)
        for microbatches, fused, clips in product((1, 2), (False, True), (False, True))
    ]


# Counter


@dataclass(slots=True)
class Passes:
    """Passes over all elements of the gradients: by operation outside of the optimizer, and inside."""

    outside: Counter[str] = field(default_factory=Counter)
    update: Counter[str] = field(default_factory=Counter)
    in_update: bool = False


class _PassCounter(TorchDispatchMode):
    def __init__(self, passes: Passes) -> None:
        super().__init__()
        self._passes = passes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        if not (func.is_view or "c10d" in func.namespace or name in _NOT_COUNTED):
            elements = max((_elements(value) for value in (*args, *(kwargs or {}).values(), result)), default=0)
            if elements:
                counts = self._passes.update if self._passes.in_update else self._passes.outside
                counts[name] += elements / ELEMENTS
        return result


def _elements(value: Any) -> int:
    """Return the number of elements of the large tensors in one argument, which may be a list of tensors."""
    shards = [leaf._local_tensor if is_dtensor(leaf) else leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return sum(shard.numel() for shard in shards if shard.numel() >= LARGE)


@contextlib.contextmanager
def count_passes() -> Iterator[Passes]:
    """Count the passes of this thread, and of the backwards that it runs."""
    passes, step = Passes(), torch.optim.AdamW.step

    def counted(*args: Any, **options: Any) -> Any:
        passes.in_update = True
        try:
            return step(*args, **options)
        finally:
            passes.in_update = False

    with patch.object(torch.optim.AdamW, "step", counted), _PassCounter(passes):
        yield passes


# Steps

LEARNING_RATE, MAX_NORM = 0.01, 0.1


class Layer(nn.Module):
    """A unit of sharding."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def make_model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Layer() for _ in range(LAYERS)]).to(dtype)


def make_optimizer(model: nn.Module, case: Case) -> torch.optim.Optimizer:
    # AdamW divides a gradient by its own size. A large eps makes the update depend on the size, so that a wrong factor shows.
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=1e-3, fused=case.fused, foreach=not case.fused)


def make_batch(case: Case, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    return torch.randn(MICROBATCH * case.microbatches, WIDTH, generator=generator, dtype=dtype)


def loss_fn(model: nn.Module, batch: Tensor) -> dt.LossSum:
    return dt.LossSum(total=model(batch).square().sum(), weight=batch.numel())


Run = Callable[[Tensor], list[Tensor]]
"""One step on a batch, which returns the parameters."""


def declared(case: Case, dtype: torch.dtype) -> Run:
    """dtrain's step, told the weight of a batch before its first backward."""
    return _composed(case, dtype, dt.batch_spec(weight=lambda batch: batch.numel()))


def composed(case: Case, dtype: torch.dtype) -> Run:
    """dtrain's step, whose weights come with the losses."""
    return _composed(case, dtype, None)


def _composed(case: Case, dtype: torch.dtype, spec: Any) -> Run:
    model = make_model(dtype)
    if case.strategy != "plain":
        model = dt.shard_model(model, dt.build_mesh(), strategy=case.strategy, blocks=(Layer,))
    transforms = [dt.transforms.clip_by_norm(MAX_NORM)] if case.clips else []
    step = dt.compose_step(loss_fn, transforms, microbatch_size=MICROBATCH, batch_spec=spec)
    # The comparison of replicas, in every hundredth step, reads the parameters.
    state = step.init(model, make_optimizer(model, case), allow_equal_batches=True, replica_check_every=0)

    def run(batch: Tensor) -> list[Tensor]:
        nonlocal state
        state, _ = step(state, batch)
        return list(state.params.values())

    return run


def by_hand(case: Case, dtype: torch.dtype) -> Run:
    """The loop by hand, which divides each loss by the weight of the whole batch."""
    return _by_hand(case, dtype, divides_losses=True)


def by_hand_summed(case: Case, dtype: torch.dtype) -> Run:
    """The loop by hand whose weights come with the losses, so that it divides the sum of the gradients."""
    return _by_hand(case, dtype, divides_losses=False)


def _by_hand(case: Case, dtype: torch.dtype, *, divides_losses: bool) -> Run:
    """Return the step in plain PyTorch, with DDP or FSDP2, which average over ranks and reduce in the last backward."""
    model, ranks = make_model(dtype), dist.get_world_size() if case.strategy != "plain" else 1
    if case.strategy == "full_shard":
        mesh = init_device_mesh("cpu", (ranks,))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = make_optimizer(model, case)
    params = list(model.parameters())
    net = DistributedDataParallel(model) if case.strategy == "replicate" else model

    def run(batch: Tensor) -> list[Tensor]:
        weight = torch.tensor(float(batch.numel()), dtype=dtype)
        if ranks > 1:
            dist.all_reduce(weight)
        microbatches = batch.split(MICROBATCH)
        for index, microbatch in enumerate(microbatches):
            is_last = index == len(microbatches) - 1
            if case.strategy == "full_shard":
                model.set_requires_gradient_sync(is_last)
            with net.no_sync() if case.strategy == "replicate" and not is_last else contextlib.nullcontext():
                loss = net(microbatch).square().sum() * ranks
                (loss / weight if divides_losses else loss).backward()
        if not divides_losses:
            torch._foreach_div_([param.grad for param in params], weight)
        if case.clips:
            nn.utils.clip_grad_norm_(params, MAX_NORM, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return params

    return run


# Table

SIDES = {"by hand": by_hand, "by hand, summed": by_hand_summed, "dtrain, declared": declared, "dtrain": composed}


def count_sides(strategy: str) -> list[dict[str, Any]]:
    """Count the passes of a third step of every side, in which all states exist, in all cases of ``strategy``, on this rank.

    Returns:
        For each case its name, and by side two dicts: the passes by operation outside of the optimizer, and inside.
    """
    rows = []
    for case in list_cases(strategy):
        row: dict[str, Any] = {"case": str(case)}
        for name, side in SIDES.items():
            run, batch = side(case, torch.float32), make_batch(case, torch.float32)
            run(batch), run(batch)
            with count_passes() as passes:
                run(batch)
            row[name] = [dict(passes.outside), dict(passes.update)]
        rows.append(row)
    return rows


def total(row: dict[str, Any], side: str) -> float:
    """Return the passes of one side, with those of the optimizer."""
    return sum(sum(counts.values()) for counts in row[side])


def count_all() -> dict[str, list[dict[str, Any]]]:
    """Return the rows of ``count_sides`` by column of the table."""
    rows = {"one process": count_sides("plain")}
    for strategy, world_size in (("replicate", 2), ("full_shard", 1), ("full_shard", 2)):
        with Ranks(world_size) as ranks:
            name = f"`{strategy}`, {world_size} rank{'s' if world_size > 1 else ''}"
            rows[name] = ranks.run(count_sides, strategy)[0]
    return rows


def format_table(columns: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Return the lines of the table in Markdown: passes outside of the optimizer, by hand and of dtrain."""
    lines = [f"| {' | '.join(['step', *columns])} |", "|" + "---|" * (len(columns) + 1)]
    for rows in zip(*columns.values(), strict=True):
        lines.append(f"| {' | '.join([rows[0]['case'], *map(_format_cell, rows)])} |")
    return lines


def _format_cell(row: dict[str, Any]) -> str:
    hand, ours, told = (round(sum(row[side][0].values()), 2) for side in ("by hand", "dtrain", "dtrain, declared"))
    return f"{hand:g}, {ours:g}" + (f" (declared: {told:g})" if told != ours else "")


def main() -> None:
    print("\n".join(format_table(count_all())))


if __name__ == "__main__":
    main()
