"""Measure a composed dtrain step against the same step written by hand in plain PyTorch.

    python benchmarks/step_overhead.py                    # everything: ten minutes on two free cores
    python benchmarks/step_overhead.py --only mlp         # one model
    python benchmarks/step_overhead.py --pairs 2000       # a narrower band

Both sides do the same arithmetic: summed losses over 4 microbatches, one division by the global weight, clipping by the
global norm, fused AdamW, an exponential moving average. That they do is checked: in float64 both reach the same parameters
and averages before anything is timed, and the timed runs are compared again at their end.
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import dtrain as dt
from dtrain.dist.dtensor import to_local
from dtrain.testing import Ranks, count_collectives
from measure import CPU, WALL, Rounds, compare, interleaved, machine, verdict_line

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from helpers.gpt import GPT, Block, GPTConfig

IGNORED = -100  # a label that counts neither in the loss nor in the weight
MAX_NORM, DECAY = 0.7, 0.999  # both models clip some of the checked steps and leave others
CHECKED_STEPS = 20
SAME_FLOAT64 = 1e-12  # relative; rounding leaves about 1e-16, another weight or clip 1e-4 and more
SAME_FLOAT32 = 1e-3  # relative; hundreds of steps of training magnify rounding to 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A model to train: how to build it, its batches, and the largest ratio of a step to the hand-written step."""

    name: str
    build: Callable[[], nn.Module]
    draw: Callable[[torch.Generator], dict[str, Tensor]]
    microbatch_size: int
    at_most: float
    blocks: tuple[type[nn.Module], ...] = ()
    device: str = "cpu"

    def model(self, dtype: torch.dtype) -> nn.Module:
        """The model with the same weights each time."""
        torch.manual_seed(0)
        return self.build().to(self.device, dtype)

    def batches(self, rank: int = 0) -> list[dict[str, Tensor]]:
        """This rank's batches on the device, each with 4 microbatches of unequal weight."""
        generator = torch.Generator().manual_seed(rank)
        batches = [self.draw(generator) for _ in range(8)]
        for batch in batches:
            masked = torch.rand(batch["labels"].shape, generator=generator) < 0.2
            batch["labels"].masked_fill_(masked, IGNORED)
        return [{name: tensor.to(self.device) for name, tensor in batch.items()} for batch in batches]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def _draw_vectors(generator: torch.Generator) -> dict[str, Tensor]:
    labels = torch.randint(10, (32,), generator=generator)
    return {"inputs": torch.randn(32, 64, generator=generator), "labels": labels}


def gpt_work(name: str, config: GPTConfig, *, at_most: float) -> Work:
    """Return the training of a GPT on texts, 4 to a microbatch."""
    build, draw = partial(GPT, config), partial(_draw_bytes, config.max_seq)
    return Work(name=name, build=build, draw=draw, microbatch_size=4, at_most=at_most, blocks=(Block,))


def _draw_bytes(length: int, generator: torch.Generator) -> dict[str, Tensor]:
    text = torch.randint(256, (16, length + 1), generator=generator)
    return {"inputs": text[:, :-1].contiguous(), "labels": text[:, 1:].contiguous()}


WORKS = {
    "mlp": Work(name="tiny MLP", build=mlp, draw=_draw_vectors, microbatch_size=8, at_most=1.10),
    # The sizes of examples/pretrain_gpt.py.
    "gpt": gpt_work("4-layer GPT", GPTConfig(n_layer=4, n_head=3, dim=96, max_seq=128), at_most=1.02),
}


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The summed cross entropy of the labels that count."""
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of every side."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


class Hand:
    """One process written by hand for speed: the same arithmetic as dtrain's step.

    Every microbatch counts its own weight, as a loss function that returns both does. Clipping works on all gradients
    together, where ``nn.utils.clip_grad_norm_`` would sort them by device and dtype first. Gradients become None, not zero.
    Logged metrics stay on the device.
    """

    def __init__(self, work: Work, dtype: torch.dtype) -> None:
        self.size, self.dtype, self.device = work.microbatch_size, dtype, work.device
        self.model = work.model(dtype)
        self.optimizer: Any = adamw(self.model)
        self.params = list(self.model.parameters())
        self.averages = [p.detach().clone() for p in self.params]

    def gradients(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Leave the summed loss's gradient in ``.grad``; the loss and its weight."""
        total, weight = (torch.zeros((), dtype=self.dtype, device=self.device) for _ in range(2))
        for x, y in zip(batch["inputs"].split(self.size), batch["labels"].split(self.size), strict=True):
            loss, count = summed_loss(self.model(x), y), (y != IGNORED).sum()
            loss.backward()
            total += loss.detach()
            weight += count
        return total, weight

    def step(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        total, weight = self.gradients(batch)
        grads = [p.grad for p in self.params]
        torch._foreach_mul_(grads, 1.0 / weight)
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        torch._foreach_mul_(grads, (MAX_NORM / (norm + 1e-6)).clamp(max=1.0))
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_lerp_(self.averages, self.params, 1.0 - DECAY)
        return {"loss": total / weight, "grad_norm": norm}


class HandOnce(Hand):
    """The same, but the weight of the whole batch is counted once, outside of the loss: less arithmetic than dtrain's."""

    def gradients(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        labels = batch["labels"]
        weight, total = (labels != IGNORED).sum(dtype=self.dtype), torch.zeros((), dtype=self.dtype, device=self.device)
        for x, y in zip(batch["inputs"].split(self.size), labels.split(self.size), strict=True):
            loss = summed_loss(self.model(x), y)
            loss.backward()
            total += loss.detach()
        return total, weight


class HandSharded:
    """The same on several ranks with FSDP2, reducing gradients once a step; arithmetic is on the local shards.

    A step needs two small all-reduces: of the weight, and of the squared norm.
    """

    def __init__(self, work: Work, dtype: torch.dtype) -> None:
        self.size, self.dtype = work.microbatch_size, dtype
        self.model = work.model(dtype)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for module in self.model.modules():
            if isinstance(module, work.blocks):
                fully_shard(module, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        for unit in (m for m in self.model.modules() if isinstance(m, FSDPModule)):
            unit.set_gradient_divide_factor(1.0)  # sums: the weight divides them
            unit.set_force_sum_reduction_for_comms(True)  # gloo has no other way of not dividing
        self.optimizer = adamw(self.model)
        self.params = list(self.model.parameters())
        self.averages = [to_local(p.detach()).clone() for p in self.params]

    def step(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        labels = batch["labels"]
        weight = (labels != IGNORED).sum(dtype=self.dtype)
        dist.all_reduce(weight)
        total = torch.zeros((), dtype=self.dtype)
        inputs, targets = batch["inputs"].split(self.size), labels.split(self.size)
        for index, (x, y) in enumerate(zip(inputs, targets, strict=True)):
            last = index == len(inputs) - 1
            self.model.set_requires_gradient_sync(last)
            self.model.set_is_last_backward(last)
            loss = summed_loss(self.model(x), y)
            loss.backward()
            total += loss.detach()
        grads = [p.grad.to_local() for p in self.params]
        torch._foreach_mul_(grads, 1.0 / weight)
        square = torch.stack(torch._foreach_norm(grads)).square().sum()
        dist.all_reduce(square)
        norm = square.sqrt()
        torch._foreach_mul_(grads, (MAX_NORM / (norm + 1e-6)).clamp(max=1.0))
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_lerp_(self.averages, [p.to_local() for p in self.params], 1.0 - DECAY)
        return {"loss": total / weight, "grad_norm": norm}


class Composed:
    """The step as dtrain composes it; on several ranks the model is sharded in full."""

    def __init__(self, work: Work, dtype: torch.dtype) -> None:
        model = work.model(dtype)
        if dist.is_initialized():
            model = dt.shard_model(model, dt.build_mesh(), strategy="full_shard", blocks=work.blocks)
        transforms = [dt.transforms.clip_by_norm(MAX_NORM), dt.transforms.ema(DECAY)]
        self.composed = dt.compose_step(_loss_sum, transforms, microbatch_size=work.microbatch_size)
        self.state = self.composed.init(model, adamw(model))
        self.params = list(self.state.params.values())
        self.averages = [to_local(average) for average in self.state.transform_states["ema"]["params"].values()]

    def step(self, batch: dict[str, Tensor]) -> dt.typing.Metrics:
        self.state, metrics = self.composed(self.state, batch)
        return metrics


def _loss_sum(model: nn.Module, batch: dt.typing.Batch) -> dt.LossSum:
    labels = batch["labels"]
    return dt.LossSum(total=summed_loss(model(batch["inputs"]), labels), weight=(labels != IGNORED).sum())


def looped(side: Any, batches: Iterable[dict[str, Tensor]]) -> Callable[[], object]:
    """Return a function that runs one step of ``side`` per call, and repeats the batches."""
    endless = cycle(batches)
    return lambda: side.step(next(endless))


def relative_distance(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """Return the norm of the difference of this rank's shards, relative to the norm of ``b``."""
    shards = [(to_local(x.detach()).double(), to_local(y.detach()).double()) for x, y in zip(a, b, strict=True)]
    return math.sqrt(sum(float((x - y).square().sum()) for x, y in shards) / sum(float(y.square().sum()) for _, y in shards))


def check_same(a: Any, b: Any, tolerance: float) -> None:
    """Stop here if two sides are not where they should be: then they did different arithmetic."""
    apart = relative_distance([*a.params, *a.averages], [*b.params, *b.averages])
    if not apart <= tolerance:
        raise SystemExit(f"{type(a).__name__} and {type(b).__name__} differ by {apart:.1e} (relative), {tolerance=:.0e}")


def check_arithmetic(
    work: Work,
    make: Sequence[Callable[[Work, torch.dtype], Any]],
    rank: int = 0,
    *,
    steps: int = CHECKED_STEPS,
    tolerance: float = SAME_FLOAT64,
) -> None:
    """Run a few float64 steps of every side and compare them with the last one's."""
    sides = [build(work, torch.float64) for build in make]
    for batch in (work.batches(rank) * steps)[:steps]:
        wide = {name: t.double() if t.is_floating_point() else t for name, t in batch.items()}
        for side in sides:
            side.step(wide)
    for side in sides[:-1]:
        check_same(side, sides[-1], tolerance)


def one_process(work: Work, pairs: int) -> None:
    """Print the CPU time of a step in one process."""
    torch.set_num_threads(1)  # CPU time is then the work that is done, not how long threads wait for each other
    makes: dict[str, Callable[[Work, torch.dtype], Any]] = {"dtrain": Composed, "once": HandOnce, "hand": Hand}
    check_arithmetic(work, list(makes.values()))
    sides = {name: make(work, torch.float32) for name, make in makes.items()}
    runs = {name: looped(side, work.batches()) for name, side in sides.items()}
    seen = interleaved(runs, rounds=pairs // 2, warmup=10, clocks={"cpu": CPU})["cpu"]
    check_same(sides["dtrain"], sides["hand"], SAME_FLOAT32)
    comparison = compare(seen["dtrain"], seen["hand"])
    print(f"{work.name}, one process, CPU time of a step, dtrain against by hand: {comparison}")
    stricter = compare(seen["dtrain"], seen["once"])
    print(f"{work.name}, one process, CPU time of a step, dtrain against by hand with the weight counted once: {stricter}")
    print(verdict_line(f"{work.name}, one process", comparison.ratio, at_most=work.at_most))
    print(verdict_line(f"{work.name}, one process, weight counted once by hand", stricter.ratio, at_most=work.at_most))


def on_a_rank(key: str, pairs: int) -> dict[str, Any]:
    """A rank's timings of both sides, and the collectives of one step of each."""
    work, rank = WORKS[key], dist.get_rank()
    check_arithmetic(work, [Composed, HandSharded], rank)
    sides = {"dtrain": Composed(work, torch.float32), "hand": HandSharded(work, torch.float32)}
    runs = {name: looped(side, work.batches(rank)) for name, side in sides.items()}
    # Every rank draws the same order, so that the ranks are always in the same step.
    seen = interleaved(runs, rounds=pairs // 2, warmup=10, clocks={"cpu": CPU, "wall": WALL})
    check_same(sides["dtrain"], sides["hand"], SAME_FLOAT32)
    messages = {}
    for name, run in runs.items():
        with count_collectives() as counted:
            run()
        messages[name] = {"by_group": counted.counts(), "bytes": counted.bytes()}
    return {"seen": seen, "messages": messages}


def two_ranks(key: str, pairs: int) -> None:
    """Print the time and the messages of a fully sharded step on two ranks."""
    with Ranks(2) as ranks:
        reports = ranks.run(on_a_rank, key, pairs, timeout_s=1800.0)
    name = f"{WORKS[key].name}, 2 ranks, full_shard"
    cpu = {side: added([report["seen"]["cpu"][side] for report in reports]) for side in ("dtrain", "hand")}
    wall = reports[0]["seen"]["wall"]
    print(f"{name}, CPU time of a step, ranks added, dtrain against by hand: {compare(cpu['dtrain'], cpu['hand'])}")
    print(f"{name}, wall time of a step, dtrain against by hand: {compare(wall['dtrain'], wall['hand'])}")
    for side, counted in reports[0]["messages"].items():
        groups = "; ".join(f"{group}: {_listed(ops)}" for group, ops in counted["by_group"].items())
        print(f"{name}, messages of a step, {side}: {groups} ({counted['bytes']:,} bytes)")


def added(by_rank: Sequence[Rounds]) -> Rounds:
    return [(sum(a for a, _ in same), sum(b for _, b in same)) for same in zip(*by_rank, strict=True)]


def _listed(ops: dict[str, int]) -> str:
    return ", ".join(f"{count} {op}" for op, count in sorted(ops.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=WORKS, help="one model (default: all)")
    parser.add_argument("--pairs", type=int, default=400, help="ratios per figure, even (%(default)s)")
    args = parser.parse_args()
    print(machine())
    for key in [args.only] if args.only else WORKS:
        one_process(WORKS[key], args.pairs)
        two_ranks(key, args.pairs)


if __name__ == "__main__":
    main()
