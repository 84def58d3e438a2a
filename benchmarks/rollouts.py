"""Measure the pieces of a loop over rollouts: copies of a policy, log-probabilities, the meter of mismatch, and the buffer.

    python benchmarks/rollouts.py              # half a minute
    python benchmarks/rollouts.py --quick      # some seconds

One process, one thread, float32. Memory counts tensors beyond those that live before and the gradients; time is CPU time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

import dtrain as dt
from dtrain.testing import memory_budget
from measure import CPU, interleaved, machine, typical

TOKENS, DIM, CLASSES = 1024, 256, 16_384
SAMPLES, LENGTH, MINIBATCH = 1024, 512, 128


def peak(run: Callable[[], object], *given: Tensor) -> int:
    """Return the most bytes of tensors that live at the same time while ``run`` runs, without ``given``, which it reads."""
    with memory_budget(2**45) as budget:
        run()
        return budget.peak - sum(tensor.nbytes for tensor in given)


def both_ways(log_probs: Callable[[], Tensor], inputs: list[Tensor]) -> None:
    """Run forward and backward of a loss of log-probabilities."""
    for tensor in inputs:
        tensor.grad = None
    log_probs().exp().sum().backward()


def copies() -> dict[str, Callable[[], object]]:
    """Print the memory of a copy, and return what is timed."""
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)])
    params, largest, copy = [*model.parameters()], 1024 * 1024 * 4, dt.shard.snapshot(model)
    own = sum(param.nbytes for param in params)
    both = [*params, *copy.values()]

    def exchange() -> None:
        with dt.shard.use_snapshot(model, copy):
            pass

    x = torch.randn(256, 1024)
    print(
        f"snapshot: {peak(lambda: dt.shard.snapshot(model), *params) / own:.2f} of the parameters' bytes ({own / 1e6:.0f} MB)"
    )
    print(f"snapshot, into an earlier one: {peak(lambda: dt.shard.snapshot(model, into=copy), *both) / own:.2f}")
    print(f"use_snapshot: {peak(exchange, *both) / largest:.2f} of the largest parameter's bytes")
    return {
        "snapshot": lambda: dt.shard.snapshot(model),
        "snapshot, into an earlier one": lambda: dt.shard.snapshot(model, into=copy),
        "restore_": lambda: dt.shard.restore_(model, copy),
        "use_snapshot, enter and leave": exchange,
        "forward of 256 rows, for comparison": lambda: model(x),
    }


def log_probs() -> dict[str, Callable[[], object]]:
    """Print the memory of log-probabilities, and return what is timed."""
    hidden, head = torch.randn(TOKENS, DIM, requires_grad=True), nn.Linear(DIM, CLASSES, bias=False)
    tokens, size = torch.randint(CLASSES, (TOKENS,)), TOKENS * CLASSES * 4
    inputs: list[Tensor] = [hidden, head.weight]
    ways: dict[str, Callable[[], Tensor]] = {
        "log_softmax of the logits": lambda: head(hidden).log_softmax(-1).gather(-1, tokens[:, None])[:, 0],
        "token_log_probs of the logits": lambda: dt.token_log_probs(head(hidden), tokens),
        "linear_token_log_probs": lambda: dt.linear_token_log_probs(hidden, head, tokens),
    }
    gradients = hidden.nbytes + head.weight.nbytes
    for name, way in ways.items():
        share = (peak(partial(both_ways, way, inputs), *inputs, tokens) - gradients) / size
        print(f"{name}: peak {share:.2f} of the logits ({TOKENS} x {CLASSES}), forward and backward")
    now, then = torch.randn(SAMPLES, LENGTH), torch.randn(SAMPLES, LENGTH)
    meter = partial(dt.monitors.rollout_mismatch, now, then)
    print(f"rollout_mismatch: {peak(meter, now, then) / now.nbytes:.1f} of the log-probabilities' bytes")
    runs: dict[str, Callable[[], object]] = {name: partial(both_ways, way, inputs) for name, way in ways.items()}
    return {**runs, f"rollout_mismatch of {SAMPLES * LENGTH} tokens": meter}


def deal(rows: dict[str, Tensor]) -> None:
    buffer = dt.data.RolloutBuffer(global_batch_size=MINIBATCH, seed=0)
    buffer.fill(rows)
    for _ in buffer:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    print(machine())
    rows = {"tokens": torch.zeros(SAMPLES, LENGTH, dtype=torch.int64), "log_probs": torch.zeros(SAMPLES, LENGTH)}
    own = sum(column.nbytes for column in rows.values())
    share = peak(partial(deal, rows), *rows.values()) / own
    print(f"buffer: {share:.2f} of a rollout's bytes beside it at the peak ({own / 1e6:.0f} MB)")
    runs = {**copies(), **log_probs(), f"buffer, fill and deal {SAMPLES // MINIBATCH} minibatches": partial(deal, rows)}
    for name, timings in interleaved(runs, rounds=2 if quick else 5, clocks={"cpu": CPU})["cpu"].items():
        figure = typical([(1e3 * first, 1e3 * second) for first, second in timings])
        print(f"{name}: {figure.value:.1f} ms ({figure.low:.1f}..{figure.high:.1f})")


if __name__ == "__main__":
    main()
