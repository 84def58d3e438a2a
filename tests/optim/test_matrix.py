"""The base of optimizers that need whole matrices: Shampoo and SOAP in every layout, their checkpoints, and errors."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dtrain as dt
from battery.matrices import USERS, ByHand, Shampoo, grouped
from dtrain.errors import ConfigError, PeerError

STRATEGIES = ("full_shard", "shard_grad_op", "hybrid_shard", "replicate")
# Replicas of shards need two ranks, and are cut on four.
LAYOUTS = [(strategy, world) for strategy in STRATEGIES for world in (1, 2) if (strategy, world) != ("hybrid_shard", 1)]
LAYOUTS.append(("hybrid_shard", 4))
TOLERANCE = 1e-10  # float64; roots and bases magnify rounding by less than 1e4
LR, STEPS = 0.05, 6
BATCH = torch.randn(8, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
LOSS = dt.mean_loss(lambda model, batch: (model(batch) - batch.sum(-1, keepdim=True)).square().mean(), weight=len)
STEP = dt.compose_step(LOSS)


def net() -> nn.Module:
    """Rows that are not even on two ranks, and a matrix of one row."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def laid_out(strategy: str) -> nn.Module:
    mesh = dt.build_mesh(dp_replicate=2) if strategy == "hybrid_shard" else dt.build_mesh()
    return dt.shard_model(net(), mesh, strategy=strategy, blocks=(nn.Linear,))


def by_hand(name: str) -> Tensor:
    model = net()
    optimizer = ByHand(name, model.parameters(), LR)
    for _ in range(STEPS):
        model.zero_grad()
        (model(BATCH) - BATCH.sum(-1, keepdim=True)).square().mean().backward()
        optimizer.step()
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def trained(strategy: str, root: str, first: int, saves: bool) -> dict[str, list[float]]:
    """All parameters of each optimizer at the end of a run that began at step ``first``, or that is saved there."""
    by_name = {}
    for name in USERS:
        model = laid_out(strategy)
        state = STEP.init(model, grouped(name, model, LR))
        if not saves and first:
            state = dt.load_sharded(f"{root}/{name}", state)
        for _ in range(first if saves else STEPS - first):
            state, _ = STEP(state, BATCH.chunk(dist.get_world_size())[dist.get_rank()])
        if saves:
            dt.save_sharded(f"{root}/{name}", state)
        by_name[name] = [value for _, param in dt.full_params(state) for value in param.flatten().tolist()]
    return by_name


def assert_as_by_hand(runs: list[dict[str, list[float]]]) -> None:
    for name in USERS:
        expected = by_hand(name)
        for by_name in runs:
            apart = (torch.tensor(by_name[name], dtype=torch.float64) - expected).norm() / expected.norm()
            assert apart.item() <= TOLERANCE, name


@pytest.mark.parametrize(("strategy", "world"), LAYOUTS)
def test_shampoo_and_soap_match_plain_torch_in_every_layout(ranks, tmp_path, strategy, world):
    assert_as_by_hand(ranks(world).run(trained, strategy, str(tmp_path), 0, False))


CHANGES = [
    (("full_shard", 2), ("full_shard", 2)),
    (("full_shard", 2), ("full_shard", 1)),
    (("full_shard", 1), ("shard_grad_op", 2)),
    (("shard_grad_op", 2), ("replicate", 1)),
    (("replicate", 2), ("full_shard", 2)),
    (("replicate", 1), ("hybrid_shard", 4)),
    (("hybrid_shard", 4), ("replicate", 2)),
    (("hybrid_shard", 2), ("full_shard", 2)),
]


@pytest.mark.parametrize(("before", "after"), CHANGES)
def test_matrix_state_resumes_on_other_ranks_and_in_other_layouts(ranks, tmp_path, before, after):
    ranks(before[1]).run(trained, before[0], str(tmp_path), 3, True)
    assert_as_by_hand(ranks(after[1]).run(trained, after[0], str(tmp_path), 3, False))


def stored_bytes() -> list[int]:
    """Bytes of the matrix state on this rank, and of the whole state."""
    model = dt.shard_model(nn.Linear(64, 64, bias=False), dt.build_mesh(), blocks=(nn.Linear,))
    state = STEP.init(model, Shampoo(model.parameters()))
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    state.optimizer.step()
    (content,) = state.optimizer.state.values()
    tensors = [value for value in content.values() if isinstance(value, Tensor)]
    return [sum(value.to_local().nbytes for value in tensors), sum(value.numel() * value.itemsize for value in tensors)]


def test_each_rank_holds_its_rows_of_the_matrix_state(ranks):
    for here, whole in ranks(2).run(stored_bytes):
        assert here == whole / 2


def two_axes() -> list[float]:
    """Matrices that tensor parallelism has cut, and FSDP2 again, against the same ones whole."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    def build() -> nn.Module:
        torch.manual_seed(2)
        return nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 6, bias=False)).double()

    mesh = dt.build_mesh(dp_shard=2, tp=2)
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    step = dt.compose_step(dt.mean_loss(lambda model, x: model(x).square().mean(), weight=len))
    apart = []
    for name in (*USERS, "muon"):
        whole, cut = build(), dt.shard_model(build(), mesh, blocks=(nn.Linear,), tp_plan=plan)
        # Other tests compare Muon of whole matrices with torch's.
        muon = partial(dt.optim.Muon, ns_dtype="param")
        peer = muon(whole.parameters()) if name == "muon" else ByHand(name, whole.parameters(), LR)
        state = step.init(cut, muon(cut.parameters()) if name == "muon" else USERS[name](cut.parameters(), lr=LR))
        for _ in range(3):
            state, _ = step(state, x)
            whole.zero_grad()
            whole(x).square().mean().backward()
            peer.step()
        pairs = zip((param for _, param in dt.full_params(state)), whole.parameters(), strict=True)
        apart.append(max((a - b).abs().max().item() for a, b in pairs))
    return apart


def test_matrices_sharded_along_two_axes_are_gathered(ranks):
    for apart in ranks(4).run(two_axes):
        assert max(apart) <= TOLERANCE


def test_every_parameter_may_be_a_matrix_or_in_a_group_of_muon_groups():
    model = nn.Sequential(nn.Embedding(5, 2), nn.Linear(2, 4), nn.Linear(4, 5))
    optimizer = Shampoo(dt.optim.muon_groups(model, head="2.*", lr=0.5, method="matrix"))
    assert [(group["method"], len(group["params"])) for group in optimizer.param_groups] == [
        ("matrix", 1),
        ("adamw", 1),
        ("adamw", 3),
    ]


class Faulty(dt.optim.MatrixOptimizer):
    """Breaks the contract for the matrix of five rows, in the way that an option names."""

    def __init__(self, params: Any, fault: str) -> None:
        super().__init__(params, {"lr": 0.1, "fault": fault})

    def init_matrix_state(self, matrix: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return {"count": 0} if group["fault"] == "number" else {"rows": matrix.new_zeros(len(matrix), 2)}

    def matrix_update(self, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        fault = group["fault"] if len(grad) == 5 else ""
        if fault == "raises":
            raise ValueError("no root")
        if fault == "shape of state":
            state["rows"] = state["rows"].T
        if fault == "dtype of state":
            state["rows"] = state["rows"].float()
        if fault == "name of state":
            state["new"] = state["rows"]
        return grad.T if fault == "shape of update" else grad


FAULTS = {
    "raises": "no root",
    "number": "Faulty: init_matrix_state must return tensors, got int for 'count'. Keep numbers in the options of the group",
    "shape of update": "Faulty: matrix_update must return a tensor of shape (5, 3), got (3, 5). Return the",
    "shape of state": "Faulty: matrix_update must keep the names, shapes and dtypes of the state, got ((2, 5), torch.float64)",
    "dtype of state": "Faulty: matrix_update must keep the names, shapes and dtypes of the state, got ((5, 2), torch.float32)",
    "name of state": "Faulty: matrix_update must keep the names, shapes and dtypes of the state, got ((5, 2), torch.float64)",
}


def faults(strategy: str) -> dict[str, list[str]]:
    messages = {}
    for fault in FAULTS:
        model = laid_out(strategy)
        params = list(model.parameters())
        rest = {"params": [param for param in params if param.ndim != 2], "method": "adamw"}
        state = STEP.init(model, Faulty([{"params": [param for param in params if param.ndim == 2]}, rest], fault))
        with pytest.raises((ConfigError, PeerError)) as refused:
            STEP(state, BATCH.chunk(dist.get_world_size())[dist.get_rank()])
        messages[fault] = [type(refused.value).__name__, str(refused.value)]
    return messages


@pytest.mark.parametrize(("strategy", "world"), [("full_shard", 1), ("full_shard", 2), ("hybrid_shard", 4)])
def test_a_failure_of_one_matrix_reaches_all_ranks(ranks, strategy, world):
    """One rank computes the matrix, and no other rank waits for it."""
    runs = ranks(world).run(faults, strategy)
    for fault, line in FAULTS.items():
        assert any(line in messages[fault][1] for messages in runs)
        for kind, told in (messages[fault] for messages in runs):
            assert kind == "ConfigError" or (kind == "PeerError" and line in told)
