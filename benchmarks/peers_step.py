"""Time the bare step of a tiny MLP, and count its calls: no clipping, no average, a mean over equal microbatches.

The peers run batches that are tuples, in 4 microbatches. ``CASES`` has further batches, also those on which dtrain loses most.
One process reads the loss after every step, as a loop with a progress bar does. On several ranks no loss is read: the timed
part is forward, backward, one reduction of gradients and the update. The benchmark first checks that all candidates reach the
same parameters in float64.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from operator import itemgetter
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import dtrain as dt
from dtrain.testing import Ranks
from measure import CPU, WALL, Rounds, count_calls, interleaved
from step_overhead import CHECKED_STEPS, SAME_FLOAT64, added, looped, mlp, relative_distance

Batch = Any
SIZE, MICROBATCHES, STEPS = 8, 4, 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Batches of the tiny MLP, and the way in which dtrain runs them.

    Args:
        name: words for the row of the table.
        kind: form of a batch; nested batches have 20 tensors, of which the loss reads two.
        rows: samples of a batch.
        size: samples of a microbatch.
        auto: if True, dtrain runs ``auto_microbatch``.
        declares: if True, dtrain gets the weight of a batch before the first backward.
        at_most: target of the ratio of processor times.
    """

    name: str
    kind: Literal["tuple", "dict", "nested"] = "dict"
    rows: int = SIZE * MICROBATCHES
    size: int = SIZE
    auto: bool = False
    declares: bool = False
    at_most: float = 1.2

    @property
    def pick(self) -> Callable[[Batch], tuple[Tensor, Tensor]]:
        """Function that returns the inputs and the labels of a batch."""
        return itemgetter(0, 1) if self.kind == "tuple" else itemgetter("inputs", "labels")

    def batch(self, dtype: torch.dtype, draw: torch.Generator) -> Batch:
        """A batch of random vectors and labels."""
        x, y = torch.randn(self.rows, 64, generator=draw).to(dtype), torch.randint(10, (self.rows,), generator=draw)
        if self.kind == "tuple":
            return x, y
        batch: dict[str, Any] = {"inputs": x, "labels": y}
        if self.kind == "nested":
            batch["extra"] = [{"left": torch.zeros(self.rows, 4), "right": (x[:, :2], y)} for _ in range(6)]
        return batch

    def compose(self) -> dt.step.Step:
        """The step of dtrain."""
        pick = self.pick
        spec = dt.batch_spec(weight=lambda batch: len(pick(batch)[1])) if self.declares else None
        if self.auto:
            size: dict[str, Any] = {"transforms": [dt.auto_microbatch(initial_size=self.size)]}
        else:
            size = {"microbatch_size": self.size}
        return dt.compose_step(partial(_loss_sum, pick), batch_spec=spec, **size)


BARE = Case(name="4 microbatches of a tuple", kind="tuple", at_most=1.05)
CASES = (
    Case(name="4 microbatches of a dict", at_most=1.05),
    Case(name="4 microbatches of a dict, `auto_microbatch`", auto=True, at_most=1.10),
    Case(name="a batch of 1 sample", rows=1, size=1),
    Case(name="one microbatch", size=SIZE * MICROBATCHES),
    Case(name="one microbatch, `auto_microbatch`", size=SIZE * MICROBATCHES, auto=True),
    Case(name="4 microbatches of a nested batch of 20 tensors", kind="nested"),
    Case(name="4 microbatches, a declared weight", declares=True),
)


def split_by_hand(batch: Batch, size: int) -> list[Batch]:
    """Split a batch as one writes it for nested batches."""
    if isinstance(batch, Tensor):
        return list(batch.split(size))
    if isinstance(batch, dict):
        rows = zip(*[split_by_hand(value, size) for value in batch.values()], strict=True)
        return [dict(zip(batch, row, strict=True)) for row in rows]
    return list(zip(*[split_by_hand(value, size) for value in batch], strict=True))


class Hand:
    """The loop that one writes: a mean of the means of equal microbatches.

    Args:
        model: as it is called.
        optimizer: of its parameters.
        case: batches.
        reads: whether the loss of every step is read.
    """

    def __init__(self, model: nn.Module, optimizer: Any, *, case: Case = BARE, reads: bool = True) -> None:
        self.model, self.optimizer, self.case, self.reads = model, optimizer, case, reads
        self.params = list(model.parameters())

    def gradients(self, batch: Batch) -> Tensor:
        """Leave the gradient in ``.grad``, and return the loss."""
        case, pick = self.case, self.case.pick
        microbatches = split_by_hand(batch, case.size) if case.rows > case.size else [batch]
        total = torch.zeros((), dtype=self.params[0].dtype)
        for microbatch in microbatches:
            x, y = pick(microbatch)
            loss = F.cross_entropy(self.model(x), y) / len(microbatches)
            loss.backward()
            total += loss.detach()
        return total

    def step(self, batch: Batch) -> float | None:
        total = self.gradients(batch)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total.item() if self.reads else None


class Guided(Hand):
    """Make the same loop with the contexts of a peer, or of a model on several ranks, around a microbatch and backward.

    Args:
        around: context of a microbatch; True for the last one.
        backward: takes the loss of a microbatch.
        divisor: the loop divides each loss by it; 1 where the peer's backward does that.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        *,
        around: Callable[[bool], AbstractContextManager[object]],
        backward: Callable[[Tensor], object] = Tensor.backward,
        divisor: int = MICROBATCHES,
        reads: bool = True,
    ) -> None:
        super().__init__(model, optimizer, reads=reads)
        self.around, self.backward, self.divisor = around, backward, divisor

    def gradients(self, batch: Batch) -> Tensor:
        total = torch.zeros((), dtype=batch[0].dtype)
        microbatches = list(zip(batch[0].split(SIZE), batch[1].split(SIZE), strict=True))
        for index, (x, y) in enumerate(microbatches):
            with self.around(index == len(microbatches) - 1):
                loss = F.cross_entropy(self.model(x), y) / self.divisor
                self.backward(loss)
            total += loss.detach()
        return total * (self.divisor / MICROBATCHES) if self.divisor != MICROBATCHES else total


class Composed:
    """The step as dtrain composes it."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, case: Case = BARE, reads: bool = True) -> None:
        self.reads = reads
        self.composed = case.compose()
        self.state = self.composed.init(model, optimizer)
        self.params = list(self.state.params.values())

    def advance(self, batch: Batch) -> dt.typing.Metrics:
        """Run one step."""
        self.state, metrics = self.composed(self.state, batch)
        return metrics

    def step(self, batch: Batch) -> float | None:
        metrics = self.advance(batch)
        return dt.reduce_metrics(metrics)["loss"] if self.reads else None


class Parts(Composed):
    """The same from dtrain's functions, called in a loop by hand."""

    def advance(self, batch: Batch) -> dt.typing.Metrics:
        state, metrics = dt.microbatch_step(self.state, batch, loss_fn=_LOSS_SUM, microbatch_size=SIZE)
        self.state, metrics = dt.optimizer_step(state, metrics)
        return metrics


def _loss_sum(pick: Callable[[Batch], tuple[Tensor, Tensor]], model: nn.Module, batch: Batch) -> dt.LossSum:
    x, y = pick(batch)
    return dt.LossSum(total=F.cross_entropy(model(x), y, reduction="sum"), weight=y.numel())


_LOSS_SUM = partial(_loss_sum, BARE.pick)


def adamw(model: nn.Module, *, fused: bool = False) -> torch.optim.Optimizer:
    """The optimizer of every candidate."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)


def model_of(dtype: torch.dtype) -> nn.Module:
    """The model with the same weights each time."""
    torch.manual_seed(0)
    return mlp().to(dtype)


def batches(dtype: torch.dtype, rank: int = 0, case: Case = BARE) -> list[Batch]:
    """A rank's batches."""
    draw = torch.Generator().manual_seed(rank)
    return [case.batch(dtype, draw) for _ in range(8)]


Build = Callable[[torch.dtype], Any]
"""Builds a candidate, which has ``step(batch)`` and ``params``."""


def _by_hand(dtype: torch.dtype, *, fused: bool = False, case: Case = BARE) -> Hand:
    model = model_of(dtype)
    return Hand(model, adamw(model, fused=fused), case=case)


def _composed(dtype: torch.dtype, *, fused: bool = False, kind: type[Composed] = Composed, case: Case = BARE) -> Composed:
    model = model_of(dtype)
    return kind(model, adamw(model, fused=fused), case=case)


def _fabric(dtype: torch.dtype, *, fused: bool = False, strategy: Any = "auto", reads: bool = True) -> Guided:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size() if dist.is_initialized() else 1, strategy=strategy)
    fabric.launch()
    model = fabric.setup_module(model_of(dtype))
    optimizer = fabric.setup_optimizers(adamw(model, fused=fused))
    around = partial(_no_backward_sync, fabric, model)
    return Guided(model, optimizer, around=around, backward=fabric.backward, reads=reads)


def _no_backward_sync(fabric: Any, model: nn.Module, last: bool) -> AbstractContextManager[object]:
    return fabric.no_backward_sync(model, enabled=not last)


def _accelerate(dtype: torch.dtype, *, fused: bool = False) -> Guided:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICROBATCHES)
    model = model_of(dtype)
    wrapped, optimizer = accelerator.prepare(model, adamw(model, fused=fused))
    # Its backward divides every loss by the number of microbatches.
    return Guided(
        wrapped, optimizer, around=lambda last: accelerator.accumulate(wrapped), backward=accelerator.backward, divisor=1
    )


def _installed(builds: Mapping[str, tuple[str, Build]]) -> dict[str, Build]:
    """Candidates whose package is there."""
    return {name: build for name, (package, build) in builds.items() if not package or find_spec(package)}


def one_process(pairs: int, *, fused: bool = False) -> dict[str, dict[str, Rounds]]:
    """Time a step in one process, of every candidate that is installed."""
    builds = _installed(
        {
            "by hand": ("", partial(_by_hand, fused=fused)),
            "Fabric": ("lightning", partial(_fabric, fused=fused)),
            "Accelerate": ("accelerate", partial(_accelerate, fused=fused)),
            "dtrain": ("", partial(_composed, fused=fused)),
            "dtrain, microbatch_step by hand": ("", partial(_composed, fused=fused, kind=Parts)),
        }
    )
    return _on_one_thread(builds, pairs)


def one_case(pairs: int, case: Case) -> dict[str, dict[str, Rounds]]:
    """Time a step of ``case`` in one process, by hand and with dtrain."""
    return _on_one_thread(_builds_of(case), pairs, case)


def _builds_of(case: Case) -> dict[str, Build]:
    return {"by hand": partial(_by_hand, case=case), "dtrain": partial(_composed, case=case)}


def _on_one_thread(builds: Mapping[str, Build], pairs: int, case: Case = BARE) -> dict[str, dict[str, Rounds]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # processor time is then the work that is done, not how long threads wait for each other
    try:
        return _timed(builds, pairs, {"processor time": CPU}, case=case)
    finally:
        torch.set_num_threads(threads)


def calls_of_a_step(case: Case) -> dict[str, dict[str, Rounds]]:
    """Count the calls of a step that reads its loss, by hand and with dtrain. Counts have no noise."""
    calls = {}
    for name, build in _builds_of(case).items():
        run = looped(build(torch.float32), batches(torch.float32, case=case))
        for _ in range(3):
            run()
        calls[name] = float(count_calls(run))
    return {"calls": {name: [(count, count)] for name, count in calls.items()}}


def _timed(
    builds: Mapping[str, Build], pairs: int, clocks: Mapping[str, Any], rank: int = 0, case: Case = BARE
) -> dict[str, dict[str, Rounds]]:
    """Check that all candidates do the same arithmetic, then time them."""
    logging.getLogger("lightning").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the peers' use of torch
        sides = {name: build(torch.float64) for name, build in builds.items()}
        for batch in (batches(torch.float64, rank, case) * CHECKED_STEPS)[:CHECKED_STEPS]:
            losses = {name: side.step(batch) for name, side in sides.items()}
        for name, side in sides.items():
            apart = relative_distance(side.params, sides["by hand"].params)
            unlike = abs((losses[name] or 0.0) - (losses["by hand"] or 0.0))
            if not max(apart, unlike) <= SAME_FLOAT64:
                raise SystemExit(f"peers: {name} and the step by hand differ by {apart:.1e} (relative), losses by {unlike:.1e}")
        runs = {name: _steps(build(torch.float32), batches(torch.float32, rank, case)) for name, build in builds.items()}
        return _of_one_step(interleaved(runs, rounds=max(1, pairs // 2), warmup=3, clocks=clocks))


def _steps(side: Any, batches: list[Batch]) -> Callable[[], None]:
    """Return a function that runs ``STEPS`` steps in a row, as a loop does: a lone step finds the caches of the other sides."""
    step = looped(side, batches)

    def run() -> None:
        for _ in range(STEPS):
            step()

    return run


def _of_one_step(timings: dict[str, dict[str, list[tuple[float, float]]]]) -> dict[str, dict[str, Rounds]]:
    return {
        clock: {name: [(first / STEPS, second / STEPS) for first, second in rounds] for name, rounds in sides.items()}
        for clock, sides in timings.items()
    }


def _sharded_by_hand(dtype: torch.dtype) -> Guided:
    """FSDP2, which reduces gradients in the last microbatch only."""
    model: Any = model_of(dtype)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))

    def around(last: bool) -> AbstractContextManager[object]:
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)
        return nullcontext()

    return Guided(model, adamw(model), around=around, reads=False)


def _replicated_by_hand(dtype: torch.dtype) -> Guided:
    model = DistributedDataParallel(model_of(dtype))
    return Guided(model, adamw(model), around=lambda last: nullcontext() if last else model.no_sync(), reads=False)


def _sharded(dtype: torch.dtype, *, strategy: Any) -> Composed:
    model = dt.shard_model(model_of(dtype), dt.build_mesh(), strategy=strategy)
    return Composed(model, adamw(model), reads=False)


def _fabric_on_ranks(dtype: torch.dtype, *, sharded: bool) -> Guided:
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy

    os.environ.setdefault("TORCHELASTIC_RUN_ID", "peers")  # so that Fabric takes the ranks as they are
    if not sharded:
        return _fabric(dtype, strategy=DDPStrategy(cluster_environment=TorchElasticEnvironment()), reads=False)

    def parallelize(model: nn.Module, mesh: Any) -> nn.Module:
        return fully_shard(model, mesh=mesh["data_parallel"])

    strategy = ModelParallelStrategy(parallelize, data_parallel_size=dist.get_world_size(), tensor_parallel_size=1)
    return _fabric(dtype, strategy=strategy, reads=False)


ON_RANKS: Mapping[str, Mapping[str, tuple[str, Build]]] = {
    "full_shard": {
        "by hand": ("", _sharded_by_hand),
        "Fabric": ("lightning", partial(_fabric_on_ranks, sharded=True)),
        "dtrain": ("", partial(_sharded, strategy="full_shard")),
    },
    "replicate": {
        "by hand": ("", _replicated_by_hand),
        "Fabric": ("lightning", partial(_fabric_on_ranks, sharded=False)),
        "dtrain": ("", partial(_sharded, strategy="replicate")),
    },
}


def on_a_rank(strategy: str, pairs: int) -> dict[str, dict[str, Rounds]]:
    """Time a step on this rank. Every rank draws the same order, so that the ranks are always in the same step."""
    clocks = {"processor time": CPU, "wall time": WALL}
    return _timed(_installed(ON_RANKS[strategy]), pairs, clocks, dist.get_rank())


def on_ranks(pairs: int, *, strategy: str, world: int = 2) -> dict[str, dict[str, Rounds]]:
    """Time a step on several ranks: processor time of all, wall time of the first."""
    with Ranks(world) as ranks:
        reports = ranks.run(on_a_rank, strategy, pairs, timeout_s=1800.0)
    cpu = {name: added([report["processor time"][name] for report in reports]) for name in reports[0]["processor time"]}
    return {"processor time": cpu, "wall time": reports[0]["wall time"]}
