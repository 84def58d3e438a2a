"""Measure ``auto_microbatch``: a step in between, the search, and its distance to the limit.

    python benchmarks/memory.py                    # everything: some minutes on two free cores
    python benchmarks/memory.py --only steady      # steady, search, or tries
    python benchmarks/memory.py --pairs 1000       # a narrower band

A step in between runs against the same step with a fixed size; both are composed by dtrain. Budgets of memory are those of
``dtrain.testing.memory_budget``. ``memory_options.py`` and ``memory_hybrid.py`` measure the costs of other options.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dtrain as dt
from dtrain.dist.context import current_context
from dtrain.testing import Ranks, memory_budget
from measure import CPU, WALL, compare, interleaved, machine, verdict_line

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from helpers.gpt import GPT, Block, GPTConfig

MIB = 2**20
SIZE = 4
AT_MOST = 1.02
WIDTHS = (32, 64, 96, 128, 192)
BATCHES = (7, 64, 250, 1000)


def loss_fn(model: nn.Module, batch: Tensor) -> dt.LossSum:
    """The summed cross entropy of the next byte."""
    return dt.cross_entropy(model(batch[:, :-1]), batch[:, 1:])


def square(model: nn.Module, batch: Tensor) -> dt.LossSum:
    """A loss for vectors."""
    return dt.LossSum(total=model(batch).square().sum(), weight=len(batch))


def gpt(layers: int, dim: int) -> nn.Module:
    """A byte-level GPT with the same weights each time."""
    torch.manual_seed(0)
    return GPT(GPTConfig(n_layer=layers, n_head=3, dim=dim, max_seq=64))


def composed(model: nn.Module, transforms: Sequence[dt.Transform], *, size: int | None = None, loss: Any = loss_fn) -> Any:
    """A step, and its first state."""
    step = dt.compose_step(loss, transforms, microbatch_size=size)
    return step, step.init(model, torch.optim.AdamW(model.parameters(), lr=1e-4))


def steady(pairs: int, sharded: bool) -> dict[str, Any]:
    """This rank's timings of steps with a found and a fixed size, and the records that one of them exchanges."""
    sides: dict[str, Callable[[], None]] = {}
    messages = {}
    for name, transforms, size in (("auto", [dt.auto_microbatch(initial_size=SIZE)], None), ("fixed", [], SIZE)):
        model = gpt(4, 96)
        if sharded:
            model = dt.shard_model(model, dt.build_mesh(), blocks=(Block,))
        step, state = composed(model, transforms, size=size)
        batches = cycle(torch.randint(256, (16, 65)) for _ in range(8))
        box = [state]

        def run(box: list[Any] = box, step: Any = step, batches: Any = batches) -> None:
            box[0], _ = step(box[0], next(batches))

        run()
        run()
        plane = current_context().control_plane
        before = plane["control"].num_records if plane else 0
        run()
        messages[name] = plane["control"].num_records - before if plane else 0
        sides[name] = run
    rounds = interleaved(sides, rounds=pairs // 2, warmup=3, clocks={"cpu": CPU, "wall": WALL})
    return {"rounds": rounds, "messages": messages}


def show_steady(pairs: int) -> None:
    """The ratio of both, in one process and on two ranks."""
    for ranks in (1, 2):
        with Ranks(ranks) as pool:
            results = pool.run(steady, pairs, ranks > 1, timeout_s=3600)
        for clock in ("cpu", "wall"):
            comparison = compare(results[0]["rounds"][clock]["auto"], results[0]["rounds"][clock]["fixed"])
            print(
                f"4-layer GPT, {ranks} rank(s), {clock}: {comparison}; host {comparison.difference.value * 1e6:.0f} us a step"
            )
            print(verdict_line("  a step in between", comparison.ratio, at_most=AT_MOST))
        print(f"  records a step: {results[0]['messages']}")


def searched(layers: int, dim: int, share: float) -> dict[str, float]:
    """Measure one search on this rank, in units of a step at the size found."""
    model = dt.shard_model(gpt(layers, dim), dt.build_mesh(), blocks=(Block,))
    _, state = composed(model, [])
    batch = torch.randint(256, (64, 65))
    with memory_budget(2**40, existing=state.params.values()) as held:
        whole = dt.step.find_microbatch_size(state, batch, loss_fn=loss_fn, headroom=0.0)
        held.limit = int(max(memory.peak for memory in whole.probes[-1].rank_memory) * share)
        report = dt.step.find_microbatch_size(state, batch, loss_fn=loss_fn, headroom=0.0)
        times = []
        for _ in range(5):
            begun = time.perf_counter()
            dt.microbatch_step(state, batch, loss_fn=loss_fn, microbatch_size=report.size)
            state.drop_gradients()
            times.append(time.perf_counter() - begun)
    return {"size": report.size, "tries": len(report.probes), "steps": report.seconds / sorted(times)[2]}


def show_search() -> None:
    """Time of the search in units of a step, with a part of the memory that the whole batch needs."""
    with Ranks(2) as pool:
        for layers, dim, share in ((2, 48, 0.5), (4, 96, 0.5), (4, 96, 0.25), (8, 96, 0.3)):
            search = pool.run(searched, layers, dim, share, timeout_s=3600)[0]
            print(
                f"GPT of {layers} layers, dim {dim}, {share:.0%} of the memory of the whole: size {search['size']} of 64 in "
                f"{search['tries']} tries, the time of {search['steps']:.1f} steps"
            )


def tries(width: int, samples: int) -> list[float]:
    """Count the tries of a search, and compare its result with the largest size that works by hand."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(3)]
    model: nn.Module = nn.Sequential(*blocks)
    model = dt.shard_model(model, dt.build_mesh(), blocks=("0", "1", "2"))
    _, state = composed(model, [], loss=square)
    batch = torch.randn(samples, width)
    with memory_budget(2**40, existing=state.params.values()) as held:
        whole = dt.step.find_microbatch_size(state, batch, loss_fn=square, headroom=0.0)
        least, most = (max(memory.peak for memory in t.rank_memory) for t in (whole.probes[0], whole.probes[-1]))
        held.limit = least + int(abs(most - least) * 0.37)  # the whole batch at once adds up no gradients, and may need less
        report = dt.step.find_microbatch_size(state, batch, loss_fn=square, headroom=0.0)
        low, high = report.size, samples
        while low < high:
            middle = (low + high + 1) // 2
            try:
                dt.step.find_microbatch_size(state, batch, loss_fn=square, headroom=0.0, min_size=middle, divisor=10**9)
                low = middle
            except dt.errors.OutOfMemoryError:
                high = middle - 1
    return [len(report.probes), report.size, low]


def show_tries() -> None:
    """Search for twenty shapes, on two ranks, with a budget between the needs of one sample and of the whole batch."""
    shapes = []
    with Ranks(2) as pool:
        for width in WIDTHS:
            for samples in BATCHES:
                count, size, best = pool.run(tries, width, samples, timeout_s=3600)[0]
                shapes.append((count, size / best, int(math.log2(samples)) + 2))
                print(f"width {width:>3}, batch {samples:>4}: {count} tries, size {size}, largest by hand {best}")
    counts = sorted(count for count, _, _ in shapes)
    print(
        f"{len(shapes)} shapes: median {counts[len(counts) // 2]} tries, at most {counts[-1]}, "
        f"never more than log2(batch) + 2: {all(count <= most for count, _, most in shapes)}; "
        f"size over the largest by hand: at least {min(share for _, share, _ in shapes):.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("steady", "search", "tries"), help="one part")
    parser.add_argument("--pairs", type=int, default=300, help="of steps in between")
    given = parser.parse_args()
    print(machine())
    torch.set_num_threads(1)
    if given.only in (None, "steady"):
        show_steady(given.pairs)
    if given.only in (None, "search"):
        show_search()
    if given.only in (None, "tries"):
        show_tries()


if __name__ == "__main__":
    main()
