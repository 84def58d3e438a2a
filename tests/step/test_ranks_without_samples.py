"""Batches cut by hand: ranks with fewer microbatches than other ranks, or none, train as one process of plain torch does."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import dtrain as dt
from dtrain.dist.dtensor import full_tensor
from dtrain.dist.init import get_dist_info

STRATEGIES = ("full_shard", "shard_grad_op", "hybrid_shard", "replicate")
DIM, TASKS = 4, 3
# float64: sums of a few numbers in another order.
AT_MOST = 1e-12
# Samples of each rank in each step. Ranks without a sample change, and some of them are there in the first step.
SIZES = {
    1: [[5], [3], [1]],
    2: [[0, 5], [3, 4], [4, 0], [1, 0], [0, 7], [2, 2]],
    3: [[0, 5, 0], [1, 0, 7], [2, 3, 2], [0, 0, 1], [6, 1, 0]],
    4: [[0, 5, 0, 2], [3, 0, 1, 1], [0, 0, 0, 4]],
}


class Leaf(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, width), nn.Linear(width, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Nest(nn.Module):
    """A unit that returns the output of its last inner unit unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.left, self.right = nn.Linear(DIM, DIM), Leaf(4), Leaf(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.right(self.left(torch.tanh(self.own(x))))


class Net(nn.Module):
    """A table, blocks, a frozen teacher, one block that runs twice, and a head for each task: a batch decides which run."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.first, self.nest, self.teacher = nn.Embedding(TASKS, DIM), Leaf(2), Nest(), Leaf(8)
        self.heads = nn.ModuleList(nn.Linear(DIM, 1) for _ in range(TASKS))
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor, task: Tensor) -> Tensor:
        assert len(x) > 0, "a model must not see a batch without samples"
        self.calls += 1
        h = self.first(self.nest(self.first(x + self.table(task))))
        with torch.no_grad():
            target = self.teacher(self.teacher(self.teacher(x)))
        h = h + target
        return torch.cat([self.heads[number](h[task == number]) for number in task.unique().tolist()])


def make() -> Net:
    torch.manual_seed(0)
    return Net().double()


def freeze(net: nn.Module, step: int) -> None:
    """Train the table and the nest from the third step on."""
    net.table.requires_grad_(step >= 2)
    net.nest.own.requires_grad_(step >= 2)


def loss_fn(net: nn.Module, batch: dict) -> dt.LossSum:
    """A loss of positive data that is not finite for zeros, with names beside the tensors."""
    assert len(batch["names"]) == len(batch["x"])
    x, task = batch["x"], batch["task"]
    assert bool((x > 0).all()), "a loss must see real samples only"
    total = (net(x.log(), task) - 1).square().sum()
    return dt.LossSum(total=total, weight=len(x), aux={"mean": (x.detach().sum(), x.numel())})


def batch_of(step: int, rank: int, sizes: list[int], tasks: list[int]) -> dict:
    """The samples of one rank. Numbers depend on the position in the global batch, not on the rank."""
    generator = torch.Generator().manual_seed(step)
    x = torch.rand(sum(sizes), DIM, generator=generator, dtype=torch.float64) + 0.1
    task = torch.tensor([tasks[index % len(tasks)] for index in range(sum(sizes))])
    mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    return {"x": x[mine], "task": task[mine], "names": [f"{index}" for index in range(sum(sizes))][mine]}


# The first step of a sharded model runs all units. In the last step only one head has a sample.
def tasks_of(step: int, last: bool) -> list[int]:
    return [1] if last else list(range(TASKS)) if step == 0 else [0, 1]


def expected(sizes: list[list[int]], frozen: bool) -> tuple[list[dict[str, Tensor]], list[list[str]]]:
    """The parameters after each step of one process, and the parameters without a gradient."""
    net = make()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05, weight_decay=0.1)
    after, without = [], []
    for step, counts in enumerate(sizes):
        if frozen:
            freeze(net, step)
        batch = batch_of(step, 0, [sum(counts)], tasks_of(step, step == len(sizes) - 1))
        loss = loss_fn(net, batch)
        optimizer.zero_grad()
        (loss.total / loss.weight).backward()
        without.append([name for name, param in net.named_parameters() if param.grad is None])
        optimizer.step()
        after.append({name: param.detach().clone() for name, param in net.named_parameters()})
    return after, without


def by_feature(batch: dict) -> dict:
    """The same samples along the last axis, without names, which a spec has no axis for."""
    return {"x": batch["x"].t(), "task": batch["task"]}


def of_features(net: nn.Module, batch: dict) -> dt.LossSum:
    return loss_fn(net, {"x": batch["x"].t(), "task": batch["task"], "names": batch["task"]})


def weigh(batch: dict) -> int:
    return len(batch["x"])


SPEC = dt.batch_spec({"x": "feature batch", "task": "batch"})


def seen_grads(missing: list[list[str]]) -> dt.Transform:
    def update(inner):
        def update_fn(state, metrics):
            missing.append([name for name, param in state.params.items() if param.grad is None])
            return inner(state, metrics)

        return update_fn

    return dt.Transform(name="seen", update=update, read_only=True)


KINDS = {
    "whole": ([], dt.microbatch_step),
    "microbatches": ([], partial(dt.microbatch_step, microbatch_size=2)),
    "features": ([], partial(dt.microbatch_step, microbatch_size=2, batch_spec=SPEC)),
    "declared": ([], partial(dt.microbatch_step, microbatch_size=3, batch_spec=dt.batch_spec(weight=weigh))),
    "auto": ([dt.auto_microbatch(initial_size=2, grow_every=None)], dt.microbatch_step),
}


def mesh_of(strategy: str, tp: int = 1) -> DeviceMesh:
    return dt.build_mesh(dp_replicate=2, tp=tp) if strategy == "hybrid_shard" else dt.build_mesh(tp=tp)


def trained(kind: str, strategy: str, variant: str = "", tp: int = 1, idle: bool = False, options: dict | None = None) -> list:
    """Return the largest difference from one process, if gradients are missing alike, that of the metric, and the samples."""
    mesh = mesh_of(strategy, tp)
    rank, count = dt.dist.data_rank(mesh)
    net = make()
    if variant == "checkpointed":
        dt.shard.checkpoint_activations(net, blocks=(Leaf,))
    plan = {"**.up": ColwiseParallel(), "**.down": RowwiseParallel()} if tp > 1 else None
    blocks = () if variant == "one unit" else (Leaf, Nest, nn.Embedding)
    model = dt.shard_model(net, mesh, strategy=strategy, blocks=blocks, tp_plan=plan, **(options or {}))
    missing: list[list[str]] = []
    transforms, grad = KINDS[kind]
    step = dt.compose_step(of_features if kind == "features" else loss_fn, [*transforms, seen_grads(missing)], grad=grad)
    state = step.init(model, torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1))
    sizes = [[0, sum(counts)] for counts in SIZES[2]] if idle else SIZES[count]
    after, without = expected(sizes, variant == "frozen")
    worst, means, samples = 0.0, [], []
    for number, counts in enumerate(sizes):
        if variant == "frozen":
            freeze(model, number)
        batch = batch_of(number, rank, counts, tasks_of(number, number == len(sizes) - 1))
        state, metrics = step(state, by_feature(batch) if kind == "features" else batch)
        differences = [(full_tensor(param.detach()) - after[number][name]).abs().max() for name, param in state.params.items()]
        worst = max(worst, max(float(difference) for difference in differences))
        values = dt.reduce_metrics(metrics)
        whole = batch_of(number, 0, [sum(counts)], [0])["x"]
        means.append(abs(values["mean"] - whole.mean().item()))
        samples.append(state.clock.samples - sum(map(sum, sizes[: number + 1])))
    return [worst, missing == without, means, samples]


def check(results: list) -> None:
    for worst, missing_alike, means, samples in results:
        assert worst <= AT_MOST
        assert missing_alike
        assert max(means) <= AT_MOST
        assert not any(samples)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_without_microbatches_train_as_one_process(ranks, strategy, kind):
    check(ranks(2).run(trained, kind, strategy))


@pytest.mark.costly
@pytest.mark.parametrize("strategy", ["full_shard", "replicate"])
def test_three_ranks_of_which_two_have_no_sample_train_as_one_process(ranks, strategy):
    check(ranks(3).run(trained, "microbatches", strategy))
    check(ranks(1).run(trained, "microbatches", strategy))


def test_shards_of_a_replica_without_samples_train_as_one_process(ranks):
    check(ranks(4).run(trained, "microbatches", "hybrid_shard"))


@pytest.mark.parametrize("strategy", ["full_shard", "replicate"])
def test_sharded_accumulation_needs_no_sample_on_each_rank(ranks, strategy):
    check(ranks(2).run(trained, "microbatches", strategy, "", 1, False, {"accumulate": "sharded"}))


@pytest.mark.costly
@pytest.mark.parametrize(("kind", "strategy"), [("microbatches", "full_shard"), ("auto", "full_shard"), ("whole", "replicate")])
def test_pair_of_tensor_parallel_ranks_without_samples_trains_as_one_process(ranks, kind, strategy):
    check(ranks(4).run(trained, kind, strategy, "", 2))


# FSDP2 replicates a model with offloaded parameters.
@pytest.mark.parametrize("strategy", ["full_shard", "replicate"])
def test_ranks_without_microbatches_train_with_offloaded_parameters(ranks, strategy):
    check(ranks(2).run(trained, "microbatches", strategy, "", 1, False, {"offload": "params"}))


@pytest.mark.parametrize("strategy", ["full_shard", "replicate"])
@pytest.mark.parametrize("variant", ["checkpointed", "one unit", "frozen"])
def test_variant_of_the_model_trains_as_one_process(ranks, variant, strategy):
    check(ranks(2).run(trained, "microbatches", strategy, variant))


@pytest.mark.parametrize("strategy", ["shard_grad_op", "replicate"])
def test_rank_that_never_has_a_sample_trains_as_one_process(ranks, strategy):
    check(ranks(2).run(trained, "microbatches", strategy, "", 1, True))


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()


def told(call) -> str:
    try:
        call()
    except (dt.errors.DtrainError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "ran"


def with_collective(strategy: str, where: str, auto: bool) -> list[str]:
    """Return the outcomes of an even, an uneven and an even step of a loss or model that sums over all ranks, or gathers."""
    beside = where in ("unshard_params", "error beside")
    reference = dt.shard_model(tower(1), dt.build_mesh(), blocks=(nn.Linear,)) if beside else None

    class Summing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = small()

        def forward(self, x: Tensor) -> Tensor:
            z = self.inner(x)
            if where == "model":
                dist.all_reduce(z.detach().mean(0))
            return z

    def loss(model: nn.Module, batch: Tensor) -> dt.LossSum:
        z = model(batch)
        if reference is not None:
            with torch.no_grad(), dt.shard.unshard_params(reference) if where == "unshard_params" else nullcontext():
                target = reference(torch.cat([batch, batch[:, :1]], 1))
                if where == "error beside" and get_dist_info().rank == 0 and len(batch) == 3:
                    raise ValueError("of this rank's own")
            z = z - target
        if where == "loss":
            dist.all_reduce(z.detach().mean(0))
        if where == "error" and get_dist_info().rank == 0 and len(batch) == 3:
            raise ValueError("of this rank's own")
        return dt.LossSum(total=z.square().sum(), weight=len(batch))

    model = dt.shard_model(Summing(), mesh_of(strategy), strategy=strategy, blocks=(nn.Linear,))
    step = dt.compose_step(loss, [dt.auto_microbatch(initial_size=8)] if auto else [])
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.01), allow_equal_batches=True)
    messages = []
    for sizes in ([4, 4], [3, 0], [4, 4]):
        batch = torch.ones(sizes[get_dist_info().rank], 3, dtype=torch.float64)

        def run(batch: Tensor = batch) -> None:
            nonlocal state
            state, _ = step(state, batch)

        messages.append(told(run))
    return messages


# Samples of each rank in steps of microbatches of two samples: [0, 3], [2, 1], [1, 0] and equal numbers of microbatches.
REFERENCE_SIZES = {
    1: [[5], [3]],
    2: [[0, 5], [3, 2], [2, 2], [2, 0], [0, 1], [1, 3], [2, 0], [3, 4]],
    3: [[0, 5, 0], [3, 2, 0], [2, 1, 2], [2, 0, 0], [0, 1, 4]],
}


def tower(seed: int) -> nn.Module:
    """A model whose root has parameters of its own."""
    torch.manual_seed(seed)
    return nn.Sequential(Leaf(3), Nest(), nn.Linear(DIM, 2)).double()


def loss_beside(reference: nn.Module, how: str, model: nn.Module, batch: Tensor) -> dt.LossSum:
    """A loss that compares with a frozen reference, with the model's own earlier output, or through the reference."""
    assert len(batch) > 0
    if how == "through":
        output = reference(model(batch) @ torch.ones(2, DIM, dtype=torch.float64))
        return dt.LossSum(total=(output - 1).square().sum(), weight=len(batch))
    if how == "own":
        with dt.eval_mode(model):
            target = 0.5 * model(batch)
        return dt.LossSum(total=(model(batch) - target).square().sum(), weight=len(batch))
    output = model(batch) if how == "model first" else None
    if how == "no_grad":
        with torch.no_grad():
            target = reference(batch)
    else:
        with dt.eval_mode(reference):
            target = reference(batch)
    if how == "twice":
        with dt.eval_mode(reference):
            target = target + reference(-batch)
    output = model(batch) if output is None else output
    return dt.LossSum(total=(output - target).square().sum(), weight=len(batch))


def trained_beside(how: str, strategy: str, reference_strategy: str, auto: bool) -> float:
    """The largest difference of parameters from one process of plain torch, and the change of the reference."""
    mesh, rank, world = mesh_of(strategy), get_dist_info().rank, get_dist_info().world_size
    policy = dt.shard_model(tower(0), mesh, strategy=strategy, blocks=(Leaf, Nest))
    reference = dt.shard_model(tower(1), strategy=reference_strategy, mesh=dt.build_mesh(), blocks=(Leaf, Nest))
    alone, teacher = tower(0), tower(1).requires_grad_(False)
    reference.requires_grad_(False)
    plain = torch.optim.AdamW(alone.parameters(), lr=0.05, weight_decay=0.1)
    transforms = [dt.auto_microbatch(initial_size=2, grow_every=None)] if auto else []
    grad = dt.microbatch_step if auto else partial(dt.microbatch_step, microbatch_size=2)
    step = dt.compose_step(partial(loss_beside, reference, how), transforms, grad=grad)
    state = step.init(policy, torch.optim.AdamW(policy.parameters(), lr=0.05, weight_decay=0.1))
    worst = 0.0
    for number, sizes in enumerate(REFERENCE_SIZES[world]):
        whole = torch.randn(sum(sizes), DIM, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
        state, _ = step(state, whole[sum(sizes[:rank]) : sum(sizes[: rank + 1])])
        loss = loss_beside(teacher, how, alone, whole)
        plain.zero_grad()
        (loss.total / loss.weight).backward()
        plain.step()
        expected = dict(alone.named_parameters())
        worst = max(
            [worst, *(float((full_tensor(p.detach()) - expected[name]).abs().max()) for name, p in state.params.items())]
        )
    ones = torch.ones(2, DIM, dtype=torch.float64)
    with dt.eval_mode(reference):
        changed = (reference(ones) - teacher(ones)).abs().max()
    return max(worst, float(changed))


@pytest.mark.costly
@pytest.mark.parametrize("how", ["eval_mode", "model first", "no_grad", "twice", "through", "own"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_second_sharded_model_in_the_loss_trains_as_one_process(ranks, strategy, how):
    reference = "shard_grad_op" if strategy == "shard_grad_op" else "full_shard"
    for auto in (False, True):
        assert max(ranks(2).run(trained_beside, how, strategy, reference, auto)) <= AT_MOST


@pytest.mark.parametrize("how", ["eval_mode", "no_grad"])
def test_second_sharded_model_on_three_ranks_and_on_one_trains_as_one_process(ranks, how):
    assert max(ranks(3).run(trained_beside, how, "full_shard", "shard_grad_op", False)) <= AT_MOST
    assert max(ranks(1).run(trained_beside, how, "full_shard", "full_shard", False)) <= AT_MOST


@pytest.mark.parametrize("strategy", ["shard_grad_op", "replicate"])
def test_second_model_that_is_gathered_in_the_loss_by_hand_is_refused(ranks, strategy):
    first, second = ranks(2).run(with_collective, strategy, "unshard_params", False)
    assert first == second
    assert (first[0], first[2]) == ("ran", "ran")
    assert "rank 0 allgather" in first[1]


@pytest.mark.parametrize("auto", [False, True], ids=["fixed", "auto"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_collective_in_which_a_rank_would_be_missing_is_refused_on_all_ranks(ranks, strategy, auto):
    where = "model" if strategy == "full_shard" else "loss"
    first, second = ranks(2).run(with_collective, strategy, where, auto)
    assert first == second
    assert (first[0], first[2]) == ("ran", "ran")
    assert first[1].startswith("StepError: step: ranks were about to issue different collectives, and none was issued: rank 0")
    assert auto or first[1].endswith(
        "Give all ranks equal numbers of microbatches, or run the same modules in the same order on all ranks."
    )


@pytest.mark.parametrize("where", ["error", "error beside"])
@pytest.mark.parametrize("strategy", ["full_shard", "replicate"])
def test_error_of_a_rank_with_samples_reaches_a_rank_without(ranks, strategy, where):
    first, second = ranks(2).run(with_collective, strategy, where, False)
    assert first == ["ran", "ValueError: of this rank's own", "ran"]
    assert second == ["ran", "PeerError: microbatch_step: rank 0 failed. See its own error.", "ran"]
