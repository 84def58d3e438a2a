"""Peak memory of each option that makes a model fit, against none of them, and the time that recomputation takes.

    python benchmarks/memory_options.py                   # about five minutes on two free cores
    python benchmarks/memory_options.py --only head       # the loss without logits alone, or --only options
    python benchmarks/memory_options.py --pairs 300       # a narrower band for the times
    python benchmarks/memory_options.py --ranks 1         # on a GPU, which is then used: with its own counters

Memory is that of one rank's tensors in the second step, the optimizer's state included: on the CPU counted by
``memory_budget``, on CUDA by the allocator. All options compute the same gradient, which is checked. Times are those of
one process, and of computing alone: on the CPU nothing leaves for the host, and gloo says nothing about other networks.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import dtrain as dt
from dtrain import losses
from dtrain.dist.dtensor import full_tensor
from dtrain.memory.device_memory import get_device_memory
from dtrain.shard.activations import checkpoint_activations, offload_activations
from dtrain.testing import Ranks
from dtrain.testing.checks import UNLIMITED, memory_budget
from measure import CPU, WALL, interleaved, machine, paired

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from helpers.gpt import GPT, Block, GPTConfig

CONFIG = GPTConfig(n_layer=6, n_head=4, dim=128, max_seq=256)
SAMPLES, SEQ, MICROBATCH = 8, 256, 4  # of each rank: two microbatches
HEAD = (4096, 128, 16_384)  # tokens, dim and classes: 256 MiB of logits in float32
SAME = 1e-5  # relative, float32: microbatches are summed in another order under accumulate="sharded"

Change = Callable[[nn.Module], nn.Module]


def _unchanged(model: nn.Module) -> nn.Module:
    return model


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """Edit of the model and its sharding; ``gpu`` marks options that do nothing on a CPU."""

    change: Change = _unchanged
    sharding: dict[str, Any] = field(default_factory=dict)
    gpu: bool = False


AGAIN = partial(checkpoint_activations, blocks=(Block,))
FULL = {"strategy": "full_shard"}

OPTIONS = {
    "none (replicate)": Option(sharding={"strategy": "replicate"}),
    "shard_grad_op": Option(sharding={"strategy": "shard_grad_op"}),
    "full_shard": Option(sharding=FULL),
    "full_shard, accumulate sharded": Option(sharding={**FULL, "accumulate": "sharded"}),
    "full_shard, matmuls kept": Option(change=partial(AGAIN, keep="matmuls"), sharding=FULL),
    "full_shard, every second block again": Option(change=partial(AGAIN, every=2), sharding=FULL),
    "full_shard, every block again": Option(change=AGAIN, sharding=FULL),
    "full_shard, every block again, accumulate sharded": Option(change=AGAIN, sharding={**FULL, "accumulate": "sharded"}),
    "full_shard, activations offloaded": Option(change=partial(offload_activations, blocks=(Block,)), sharding=FULL, gpu=True),
    "full_shard, every block again, parameters offloaded": Option(
        change=AGAIN, sharding={**FULL, "accumulate": "sharded", "offload": "params"}, gpu=True
    ),
}


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> dt.LossSum:
    return dt.cross_entropy(model(batch["input_ids"]), batch["labels"])


def _batch() -> dict[str, Tensor]:
    ids = torch.randint(CONFIG.vocab, (SAMPLES, SEQ + 1), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}


def _counted() -> AbstractContextManager[Any]:
    """Count the bytes of tensors on the CPU, where torch counts nothing."""
    return nullcontext() if torch.cuda.is_available() else memory_budget(UNLIMITED)


def measured(name: str) -> dict[str, float]:
    """Return the peak bytes of this rank in the second step, the bytes live between steps, and the norm of the gradient."""
    option = OPTIONS[name]
    with _counted():
        torch.manual_seed(0)
        model = dt.shard_model(option.change(GPT(CONFIG)), dt.build_mesh(), blocks=(Block,), **option.sharding)
        state = dt.compose_step(loss_fn, []).init(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        gauge = get_device_memory(state.device)
        assert gauge is not None
        batch = _batch()
        for step in range(2):
            if step:
                gauge.reset()
            state, metrics = dt.microbatch_step(state, batch, loss_fn=loss_fn, microbatch_size=MICROBATCH)
            norm = dt.dist.global_norm(full_tensor(p.grad) for p in state.params.values() if p.grad is not None)
            state, metrics = dt.optimizer_step(state, metrics)
        reading = gauge.read()
        return {"peak": reading.peak, "live": reading.live, "norm": norm.item()}


def peaks(ranks: int) -> dict[str, dict[str, float]]:
    """The first rank's figures for each option."""
    names = [name for name, option in OPTIONS.items() if torch.cuda.is_available() or not option.gpu]
    if ranks == 1:
        with dt.init_dist():
            return {name: measured(name) for name in names}
    with Ranks(ranks) as pool:
        return {name: pool.run(measured, name)[0] for name in names}


def table(by_name: dict[str, dict[str, float]]) -> str:
    """The figures as text, each beside the first row's."""
    first = next(iter(by_name.values()))
    rows = [f"{'option':<52}{'peak MiB':>10}{'of none':>9}{'between steps MiB':>19}"]
    for name, figures in by_name.items():
        rows.append(
            f"{name:<52}{figures['peak'] / 2**20:>10.1f}{figures['peak'] / first['peak']:>9.2f}{figures['live'] / 2**20:>19.1f}"
        )
    return "\n".join(rows)


def check_same(by_name: dict[str, dict[str, float]]) -> None:
    """Refuse figures of options that computed other values."""
    norms = [figures["norm"] for figures in by_name.values()]
    if max(norms) - min(norms) > SAME * norms[0]:
        raise SystemExit(f"memory_options: the gradients differ: norms {norms}")


def _step(option: Option) -> Callable[[], object]:
    """Forward and backward of one microbatch, in this process."""
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = option.change(GPT(CONFIG)).to(device)
    batch = {key: value[:MICROBATCH].to(device) for key, value in _batch().items()}

    def run() -> None:
        model.zero_grad()
        loss_fn(model, batch).total.backward()
        if device.type == "cuda":
            torch.cuda.synchronize()

    return run


def times(pairs: int) -> list[str]:
    """Forward and backward of each kind of computing again, against none."""
    clock = WALL if torch.cuda.is_available() else CPU
    kinds: dict[str, Change] = {
        "matmuls kept": partial(AGAIN, keep="matmuls"),
        "every second block again": partial(AGAIN, every=2),
        "every block again": AGAIN,
    }
    if torch.cuda.is_available():
        kinds["activations offloaded"] = partial(offload_activations, blocks=(Block,))
    lines = []
    for name, change in kinds.items():
        lines.append(f"{name:<52}{paired(_step(Option(change=change)), _step(Option()), pairs=pairs, warmup=3, clock=clock)}")
    return lines


def _head_loss(sizes: Sequence[int], dtype: torch.dtype, *, full: bool) -> tuple[Callable[[], object], tuple[Tensor, ...]]:
    """Return forward and backward of the loss of a linear head, which drop the gradients, and the inputs."""
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokens, dim, classes = sizes
    hidden = torch.randn(tokens, dim, dtype=dtype, device=device, requires_grad=True)
    head = nn.Linear(dim, classes, bias=False, dtype=dtype, device=device)
    targets = torch.randint(classes, (tokens,), device=device)

    def run() -> None:
        hidden.grad = head.weight.grad = None
        loss = dt.cross_entropy(head(hidden), targets) if full else dt.linear_cross_entropy(hidden, head, targets)
        loss.total.backward()
        if device.type == "cuda":
            torch.cuda.synchronize()

    return run, (hidden, head.weight, targets)


def head_memory(sizes: Sequence[int], dtype: torch.dtype, *, full: bool) -> float:
    """Return the peak beyond inputs and gradients, over the size of the logits."""
    with _counted():
        run, (hidden, weight, targets) = _head_loss(sizes, dtype, full=full)
        gauge = get_device_memory(hidden.device)
        assert gauge is not None
        gauge.reset()
        run()
        inputs = sum(tensor.nbytes for tensor in (hidden, weight, targets))
        return (gauge.read().peak - inputs - hidden.nbytes - weight.nbytes) / (sizes[0] * sizes[2] * dtype.itemsize)


def head_errors(dtype: torch.dtype, *, full: bool) -> list[str]:
    """Return the relative errors of loss and gradients of few tokens, against float64."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(2048, 64).to(dtype), (torch.randn(2048, 64) / 8).to(dtype)
    targets = torch.randint(2048, (2048,))
    results = []
    for exact in (False, True):
        head = nn.Linear(64, 2048, bias=False, dtype=torch.float64 if exact else dtype)
        head.weight.data.copy_(weight)
        states = hidden.to(head.weight.dtype, copy=True).requires_grad_()
        # Few tokens, but as many blocks of rows as for many.
        with mock.patch.object(losses, "_LEAST_BYTES", 1):
            loss = dt.cross_entropy(head(states), targets) if full or exact else dt.linear_cross_entropy(states, head, targets)
        loss.total.backward()
        results.append([tensor.detach().double() for tensor in (loss.total, states.grad, head.weight.grad)])
    return [f"{((value - right).norm() / right.norm()).item():.1e}" for value, right in zip(*results, strict=True)]


def show_head(sizes: Sequence[int], pairs: int) -> None:
    """Print memory and time of ``linear_cross_entropy`` against the loss of all logits."""
    print(f"\nloss of a head of {sizes[1]} x {sizes[2]} for {sizes[0]} tokens, forward and backward")
    clock = WALL if torch.cuda.is_available() else CPU
    for dtype in (torch.float32, torch.bfloat16):
        shares = [head_memory(sizes, dtype, full=full) for full in (False, True)]
        print(f"{dtype}: peak beyond inputs and gradients over the logits {shares[0]:.3f}, with logits {shares[1]:.2f}")
        print(f"{dtype}: errors of loss and both gradients", *(head_errors(dtype, full=full) for full in (False, True)))
    if pairs:
        sides = {str(full): _head_loss(sizes, torch.float32, full=full)[0] for full in (False, True)}
        seconds = interleaved(sides, rounds=max(1, pairs // 2), clocks={"clock": clock})["clock"]
        least = {name: sorted(second for two in rounds for second in two) for name, rounds in seconds.items()}
        ratio = least["False"][0] / least["True"][0]
        print(f"float32: {ratio:.3f} of the time of the loss of all logits, {least['True'][0]:.3f} s (minima)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1 if torch.cuda.is_available() else 2, help="of the table of peaks")
    parser.add_argument("--pairs", type=int, default=100, help="of the times; 0 leaves them out")
    parser.add_argument("--sizes", type=int, nargs=3, default=HEAD, metavar=("TOKENS", "DIM", "CLASSES"), help="of head")
    parser.add_argument("--only", choices=("options", "head"), help="one part")
    given = parser.parse_args()
    print(machine())
    if given.only in (None, "options"):
        show_options(given.ranks, given.pairs)
    torch.set_num_threads(1)
    if given.only in (None, "head"):
        show_head(given.sizes, given.pairs // 10)


def show_options(ranks: int, pairs: int) -> None:
    """Print the peaks of all options, and the times of computing again."""
    load = f"{SAMPLES} samples of {SEQ} bytes in microbatches of {MICROBATCH}"
    print(f"\npeak of one of {ranks} ranks, {load}, AdamW, float32")
    by_name = peaks(ranks)
    check_same(by_name)
    print(table(by_name))
    if pairs:
        torch.set_num_threads(1)
        print("\nforward and backward of a microbatch, one process, against none")
        print("\n".join(times(pairs)))


if __name__ == "__main__":
    main()
