"""Measure experts: grouped products, the step that counts first, memory per rank by unit, Muon on stacks.

    python benchmarks/moe.py              # about a minute on two free cores

Times are ratios of processor time in one run, with the A/A band beside them. Memory counts the bytes of tensors on a rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import cycle

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dtrain as dt
from measure import CPU, compare, interleaved, machine

DIM, HIDDEN, EXPERTS, TOP_K = 128, 256, 16, 2
ROWS = 1024


class Block(nn.Module):
    """A norm, a router and its experts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(DIM), dt.experts.Router(DIM, EXPERTS, top_k=TOP_K)
        self.experts = dt.experts.Experts(DIM, HIDDEN, EXPERTS)

    def forward(self, x: Tensor) -> tuple[Tensor, dt.experts.Routing]:
        rows = self.norm(x)
        routing = self.router(rows)
        return x + self.experts(rows, routing), routing


class Stack(nn.Module):
    """Four blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, list[dt.experts.Routing]]:
        routings = []
        for block in self.blocks:
            x, routing = block(x)
            routings.append(routing)
        return x, routings


def loss_fn(model: nn.Module, x: Tensor) -> dt.LossSum:
    out, routings = model(x)
    terms = dt.experts.router_terms(routings, balance=0.01, z=0.001)
    return dt.LossSum(total=out.square().mean(-1).sum(), weight=len(x), terms=terms)


def weigh(x: Tensor) -> dict[str, float]:
    return {"loss": len(x), "balance": len(x), "z": len(x)}


def grouped() -> dict[str, Callable[[], object]]:
    """Forward and backward of a grouped product, by torch's function and by a loop over experts."""
    x, weight = torch.randn(ROWS * TOP_K, DIM, requires_grad=True), torch.randn(EXPERTS, HIDDEN, DIM, requires_grad=True)
    counts = torch.full((EXPERTS,), ROWS * TOP_K // EXPERTS)
    grad = torch.randn(ROWS * TOP_K, HIDDEN)

    def by_loop() -> Tensor:
        parts = x.split(counts.tolist())
        return torch.cat([F.linear(part, matrix) for part, matrix in zip(parts, weight.unbind(), strict=True)])

    def run(product: Callable[[], Tensor]) -> None:
        torch.autograd.grad(product(), [x, weight], grad)

    return {
        "grouped_linear": partial(run, partial(dt.experts.grouped_linear, x, weight, counts)),
        "loop": partial(run, by_loop),
    }


def steps() -> dict[str, Callable[[], object]]:
    """A step of four microbatches, with the shares of the batch before, and of the batch itself."""
    return {
        "count_first_step": stepping(grad=dt.step.count_first_step),
        "microbatch_step": stepping(grad=dt.microbatch_step),
    }


def stepping(**options: object) -> Callable[[], None]:
    torch.manual_seed(0)
    model = Stack()
    step = dt.compose_step(
        loss_fn,
        [dt.transforms.balance_experts(0.001)],
        microbatch_size=ROWS // 4,
        batch_spec=dt.batch_spec(weight=weigh),
        **options,
    )
    state = [step.init(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))]
    given = cycle(torch.randn(ROWS, DIM) for _ in range(4))

    def run() -> None:
        state[0], _ = step(state[0], next(given))

    return run


def muons() -> dict[str, Callable[[], object]]:
    """Muon on three stacks, and on each expert as a matrix of its own."""
    shapes = ((EXPERTS, HIDDEN, DIM), (EXPERTS, HIDDEN, DIM), (EXPERTS, DIM, HIDDEN))
    stacks = [nn.Parameter(torch.randn(*shape)) for shape in shapes]
    matrices = [nn.Parameter(matrix.detach().clone()) for stack in stacks for matrix in stack]
    for param in (*stacks, *matrices):
        param.grad = torch.randn_like(param)
    stacked, single = dt.optim.Muon(stacks, ns_dtype="fp32", stacked=True), dt.optim.Muon(matrices, ns_dtype="fp32")
    return {"stacked": stacked.step, "one by one": single.step}


def peak(blocks: str) -> int:
    """Return the most bytes of tensors on this rank in two steps."""
    torch.manual_seed(0)
    units = {"experts and blocks": (dt.experts.Experts, Block), "blocks": (Block,), "replicas": ()}[blocks]
    strategy = "replicate" if blocks == "replicas" else "full_shard"
    model = dt.shard_model(Stack(), dt.build_mesh(), strategy=strategy, **({"blocks": units} if units else {}))
    step = dt.compose_step(loss_fn, [dt.transforms.balance_experts(0.001)], batch_spec=dt.batch_spec(weight=weigh))
    state = step.init(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), allow_equal_batches=True)
    with dt.testing.memory_budget(2**40, existing=state.params.values()) as budget:
        for _ in range(2):
            state, _ = step(state, torch.randn(16, DIM))
    return budget.peak


def main() -> None:
    torch.set_num_threads(1)
    print(machine())
    for name, runs, against, rounds in (
        ("grouped product of float32, forward and backward", grouped(), ("grouped_linear", "loop"), 20),
        ("counting first, a step of four microbatches", steps(), ("count_first_step", "microbatch_step"), 20),
        ("Muon on stacks of 16 experts", muons(), ("stacked", "one by one"), 6),
    ):
        seen = interleaved(runs, rounds=rounds, warmup=1, clocks={"cpu": CPU})["cpu"]
        print(f"{name}, {against[0]} against {against[1]}: {compare(seen[against[0]], seen[against[1]])}", flush=True)
    whole = sum(param.numel() * param.element_size() for param in Stack().parameters())
    print(f"weights of the model {whole / 2**20:.1f} MiB")
    for ranks in (2, 4):
        for blocks in ("replicas", "blocks", "experts and blocks"):
            most = max(dt.testing.run_ranks(peak, ranks, blocks))
            print(f"{ranks} ranks, {blocks}: peak {most / 2**20:.1f} MiB a rank")


if __name__ == "__main__":
    main()
