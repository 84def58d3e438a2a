"""count_collectives: FSDP2's and everybody's collectives, forward and backward, with group and logical bytes."""

import dataclasses
import threading

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from dtrain.dist.collectives import all_gather_json, all_gather_numbers
from dtrain.dist.context import current_context
from dtrain.dist.dtensor import global_norm
from dtrain.dist.init import get_dist_info, init_dist
from dtrain.dist.mesh import build_mesh
from dtrain.shard.fsdp import shard_model
from dtrain.state import init_state
from dtrain.step.microbatch_step import microbatch_step
from dtrain.testing import CollectiveCall, count_collectives
from dtrain.typing import LossSum

WIDTH = 6
UNIT_BYTES = (WIDTH * WIDTH + WIDTH) * 4  # a linear layer with its bias in float32


def sharded(strategy: str) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    return shard_model(net, build_mesh(), strategy=strategy, blocks=(nn.Linear,))


def forward_and_backward(strategy: str) -> list[list[dict]]:
    """The records of the forward, and those of the backward."""
    net = sharded(strategy)
    with count_collectives() as forward:
        loss = net(torch.ones(2, WIDTH)).sum()
    with count_collectives() as backward:
        loss.backward()
    return [[dataclasses.asdict(record) for record in seen.records] for seen in (forward, backward)]


def test_full_shard_gathers_twice_and_reduces_once_per_unit(ranks):
    for forward, backward in ranks(2).run(forward_and_backward, "full_shard"):
        gather = {"op": "all_gather", "group": "training", "group_size": 2, "bytes": UNIT_BYTES, "dtype": "float32"}
        reduce = {**gather, "op": "reduce_scatter"}
        assert forward == [gather] * 2
        assert sorted(backward, key=lambda record: record["op"]) == [gather] * 2 + [reduce] * 2


def one_step(strategy: str) -> list[dict]:
    """The records of gradients in a step."""
    net = sharded(strategy)
    state = init_state(net, torch.optim.SGD(net.parameters(), lr=0.1))
    loss_fn = lambda net, x: LossSum(total=net(x).sum(), weight=len(x))  # noqa: E731
    with count_collectives() as seen:
        microbatch_step(state, torch.ones(2, WIDTH), loss_fn=loss_fn)
    return [dataclasses.asdict(record) for record in seen.records if record.dtype == "float32"]


def test_replicate_gathers_nothing_and_all_reduces_all_units_together(ranks):
    assert ranks(2).run(forward_and_backward, "replicate") == [[[], []]] * 2
    reduce = {"op": "all_reduce", "group": "training", "group_size": 2, "bytes": 2 * UNIT_BYTES, "dtype": "float32"}
    assert ranks(2).run(one_step, "replicate") == [[reduce]] * 2


def every_operation() -> dict[str, list]:
    """The op, group size and bytes that each call shows, in float64 so that one element is eight bytes."""
    rank, size = get_dist_info().rank, get_dist_info().world_size
    one = torch.ones(3, dtype=torch.float64)
    whole, parts = torch.ones(3 * size, dtype=torch.float64), [torch.ones_like(one) for _ in range(size)]
    at_zero = parts if rank == 0 else None
    calls = {
        "all_reduce": lambda: dist.all_reduce(one),
        "all_gather": lambda: dist.all_gather(parts, one),
        "broadcast": lambda: dist.broadcast(one, src=0),
        "reduce": lambda: dist.reduce(one, 0),
        "gather": lambda: dist.gather(one, at_zero, dst=0),
        "scatter": lambda: dist.scatter(one, at_zero, src=0),
        "reduce_scatter": lambda: dist.reduce_scatter(one, parts),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(whole), whole),
        "send or recv": lambda: dist.send(one, 1) if rank == 0 else dist.recv(one, 0),
        "barrier": lambda: dist.barrier(),
        "functional all_reduce": lambda: functional.all_reduce(one, "sum", dist.group.WORLD) + 1.0,
        "functional broadcast": lambda: functional.wait_tensor(functional.broadcast(one, 0, dist.group.WORLD)),
        "functional all_to_all": lambda: functional.wait_tensor(
            functional.all_to_all_single(whole, None, None, dist.group.WORLD)
        ),
        "functional coalesced": lambda: functional.all_gather_into_tensor_coalesced([one, one], dist.group.WORLD)[0].numpy(),
    }
    shown = {}
    for name, call in calls.items():
        with count_collectives() as seen:
            call()
        shown[name] = [[r.op, r.group, r.group_size, r.bytes, r.dtype] for r in seen.records]
    return shown


def test_every_operation_has_its_name_group_and_logical_bytes(ranks):
    for rank, shown in enumerate(ranks(2).run(every_operation)):
        assert shown.pop("barrier")[0][:4] == ["barrier", "training", 2, 0]
        expected = {
            "all_reduce": ("all_reduce", 24),
            "all_gather": ("all_gather", 48),
            "broadcast": ("broadcast", 24),
            "reduce": ("reduce", 24),
            "gather": ("gather", 48),
            "scatter": ("scatter", 48),
            "reduce_scatter": ("reduce_scatter", 48),
            "all_to_all": ("all_to_all", 48),
            "send or recv": ("recv" if rank else "send", 24),
            "functional all_reduce": ("all_reduce", 24),
            "functional broadcast": ("broadcast", 24),
            "functional all_to_all": ("all_to_all", 48),
            "functional coalesced": ("all_gather", 96),
        }
        assert shown == {name: [[op, "training", 2, size, "float64"]] for name, (op, size) in expected.items()}


def groups_and_dtensors() -> list[dict]:
    other = dist.new_group(backend="gloo")
    net = sharded("full_shard")
    net(torch.ones(2, WIDTH)).sum().backward()
    with count_collectives() as records:
        all_gather_numbers([1.0])
        all_gather_json({"a": 1}, group="background")
        dist.all_reduce(torch.ones(1), group=other)
        dist.all_reduce(torch.ones(1), group=build_mesh(dp_replicate=2).get_group("dp_shard"))
    with count_collectives() as norm:
        global_norm([p.grad for p in net.parameters()])
    with count_collectives() as inside:
        net[0].weight.grad.norm().sqrt()  # a root of partial norms is no partial root: DTensor adds them up first, by itself
    return [records.counts(), norm.counts(), inside.counts()]


def test_groups_are_distinguished_and_dtensor_collectives_are_counted(ranks):
    for records, norm, inside in ranks(2).run(groups_and_dtensors):
        assert records == {
            "control": {"all_gather": 1},
            "background": {"all_gather": 1},
            "other": {"all_reduce": 1},
            "dp_shard": {"all_reduce": 1},
        }
        assert norm == inside == {"training": {"all_reduce": 1}}


def in_a_thread() -> int:
    with count_collectives() as seen:
        thread = threading.Thread(target=dist.barrier)
        thread.start()
        thread.join()
    return seen.count()


def test_collectives_of_a_user_thread_are_not_counted(ranks):
    assert ranks(2).run(in_a_thread) == [0, 0]


def test_single_rank_records_and_filtered_counts():
    with init_dist(device="cpu"), count_collectives() as seen:
        dist.all_reduce(torch.ones(3))
        dist.all_reduce(torch.ones(2), group=dist.new_group([0], backend="gloo"))
        dist.broadcast(torch.ones(1), src=0)
    dist_record = CollectiveCall(op="all_reduce", group="training", group_size=1, bytes=12, dtype="float32")
    assert seen.records[0] == dist_record
    assert seen.counts() == {"training": {"all_reduce": 1, "broadcast": 1}, "other": {"all_reduce": 1}}
    assert (seen.count(), seen.count(op="all_reduce"), seen.count(group="other", op="broadcast")) == (3, 2, 0)
    assert (seen.bytes(), seen.bytes(group="training"), seen.bytes(op="broadcast")) == (24, 16, 4)
    assert seen.select(op="all_reduce", group="training") == [dist_record]


def test_collectives_after_an_error_in_the_context_are_not_counted():
    with init_dist(device="cpu"):
        with pytest.raises(KeyError), count_collectives() as seen:  # noqa: PT012
            dist.all_reduce(torch.ones(1))
            raise KeyError
        dist.all_reduce(torch.ones(1))
    assert seen.count() == 1


def without_init_dist() -> dict:
    context = current_context()
    other = dist.new_group(backend="gloo")
    opened, context.info = context.info, None
    try:
        with count_collectives() as seen:
            dist.all_reduce(torch.ones(1))
            dist.all_reduce(torch.ones(1), group=other)
    finally:
        context.info = opened
    return seen.counts()


def test_collectives_are_counted_without_init_dist(ranks):
    assert ranks(2).run(without_init_dist) == [{"training": {"all_reduce": 1}, "other": {"all_reduce": 1}}] * 2


def test_group_that_torch_makes_for_a_mesh_over_gloo_beside_a_gpu_is_the_training_group(monkeypatch):
    with init_dist(device="cpu"):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        group = init_device_mesh("cpu", (1,)).get_group()
        assert group is not dist.group.WORLD
        with count_collectives() as seen:
            dist.all_reduce(torch.ones(1), group=group)
    assert seen.counts() == {"training": {"all_reduce": 1}}
