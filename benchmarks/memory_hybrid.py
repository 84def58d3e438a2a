"""Accumulation under hybrid sharding: the all-reduce once a step, against one after every microbatch.

    python benchmarks/memory_hybrid.py                    # about five minutes on two free cores
    python benchmarks/memory_hybrid.py --pairs 1000       # a narrower band

Four ranks, two copies of two shards each. Every microbatch's gradients are reduce-scattered within a copy; summing over copies
can wait for the last microbatch. Three sides do the same arithmetic on the same model: dtrain's step; a loop by hand with
FSDP2 that waits too; and the same loop with FSDP2's default, which does not. The arithmetic is checked, before and after.
"""

import argparse
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

import dtrain as dt
from dtrain.dist.dtensor import to_local
from dtrain.testing import Ranks, count_collectives
from measure import CPU, WALL, Rounds, compare, interleaved, machine, verdict_line

RANKS, COPIES, MICROBATCHES = 4, 2, 8
SAME = 1e-4  # relative, float32: sums are taken in another order
AT_MOST = 1.0  # waiting must not be slower


class Block(nn.Module):
    """A quarter of a million parameters, and little to compute with them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 512), nn.Linear(512, 256)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def build() -> nn.Module:
    """The model with the same weights each time, hybrid-sharded; gradients are shards after every microbatch."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3)))
    mesh = dt.build_mesh(dp_replicate=COPIES)
    return dt.shard_model(model, mesh, strategy="hybrid_shard", accumulate="sharded", blocks=(Block,))


def summed_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()


def loss_sum(model: nn.Module, batch: dt.typing.Batch) -> dt.LossSum:
    return dt.LossSum(total=summed_loss(model, batch), weight=len(batch))


class Composed:
    """dtrain's own step."""

    def __init__(self) -> None:
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        self.composed = dt.compose_step(loss_sum, microbatch_size=2)
        self.state = self.composed.init(model, optimizer)
        self.params = list(self.state.params.values())

    def step(self, batch: Tensor) -> None:
        self.state, _ = self.composed(self.state, batch)


class Hand:
    """The same by hand; ``waits``: the all-reduce is that of the last microbatch alone."""

    def __init__(self, waits: bool) -> None:
        self.waits, self.model = waits, build()
        self.params = list(self.model.parameters())
        self.optimizer = torch.optim.SGD(self.params, lr=1e-4)

    def step(self, batch: Tensor) -> None:
        assert isinstance(self.model, FSDPModule)
        weight = torch.tensor(float(len(batch)))
        dist.all_reduce(weight)
        parts = batch.split(2)
        for index, microbatch in enumerate(parts):
            last = index == len(parts) - 1
            self.model.set_requires_gradient_sync(True)
            self.model.set_requires_all_reduce(last or not self.waits)
            self.model.set_is_last_backward(last)
            summed_loss(self.model, microbatch).backward()
        torch._foreach_mul_([to_local(p.grad) for p in self.params], 1.0 / weight)
        self.optimizer.step()
        self.optimizer.zero_grad()


def distance(a: Any, b: Any) -> float:
    """The norm of the difference of two sides' parameters, relative to the norm, on this rank."""
    pairs = [(to_local(x.detach()).double(), to_local(y.detach()).double()) for x, y in zip(a.params, b.params, strict=True)]
    return float(torch.stack([(x - y).norm() for x, y in pairs]).norm() / torch.stack([y.norm() for _, y in pairs]).norm())


def check_same(sides: dict[str, Any]) -> None:
    """Stop here if the sides are not at the same parameters: then they did different arithmetic."""
    for name, side in sides.items():
        apart = distance(side, sides["early"])
        if not apart <= SAME:
            raise SystemExit(f"{name} and early differ by {apart:.1e} (relative), tolerance {SAME:.0e}")


def on_a_rank(pairs: int) -> dict[str, Any]:
    """A rank's timings of every side, and the all-reduces over copies of one step of each."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = [torch.randn(2 * MICROBATCHES, 256, generator=generator) for _ in range(4)]
    sides = {"dtrain": Composed(), "late": Hand(waits=True), "early": Hand(waits=False)}
    runs = {}
    for name, side in sides.items():
        endless = cycle(batches)
        runs[name] = lambda side=side, endless=endless: side.step(next(endless))
    for run in runs.values():
        run()
    check_same(sides)
    # Every rank draws the same order, so that the ranks are always in the same step.
    seen = interleaved(runs, rounds=pairs // 2, warmup=10, clocks={"cpu": CPU, "wall": WALL})
    check_same(sides)
    messages = {}
    for name, run in runs.items():
        with count_collectives() as counted:
            run()
        messages[name] = [
            counted.count(op="all_reduce", group="dp_replicate"),
            counted.bytes(op="all_reduce", group="dp_replicate"),
        ]
    return {"seen": seen, "messages": messages}


def _added(by_rank: list[Rounds]) -> Rounds:
    return [(sum(a for a, _ in same), sum(b for _, b in same)) for same in zip(*by_rank, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=300, help="ratios per figure, even (%(default)s)")
    args = parser.parse_args()
    print(machine())
    with Ranks(RANKS) as ranks:
        reports = ranks.run(on_a_rank, args.pairs, timeout_s=3600.0)
    what = f"hybrid_shard, {RANKS} ranks in {COPIES} copies, {MICROBATCHES} microbatches"
    for name, (count, size) in reports[0]["messages"].items():
        print(f"{what}, all-reduces over copies in a step, {name}: {count} ({size:,} bytes)")
    wall = reports[0]["seen"]["wall"]
    cpu = {name: _added([report["seen"]["cpu"][name] for report in reports]) for name in wall}
    for clock, seen in (("wall time", wall), ("CPU time, ranks added", cpu)):
        for name in ("late", "dtrain"):
            print(f"{what}, {clock} of a step, {name} against early: {compare(seen[name], seen['early'])}")
    for clock, seen in (("wall time", wall), ("CPU time", cpu)):
        ratio = compare(seen["dtrain"], seen["early"]).ratio
        print(verdict_line(f"{what}, {clock}, dtrain against early", ratio, at_most=AT_MOST))


if __name__ == "__main__":
    main()
