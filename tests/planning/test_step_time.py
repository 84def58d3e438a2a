"""Seconds of collectives and steps against formulas by hand; the library's own memory against that of ranks that save."""

import ctypes
import gc
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import dtrain as dt
from dtrain.dist.mesh import build_mesh
from dtrain.errors import ConfigError
from dtrain.planning.estimate import estimate_memory, library_memory
from dtrain.planning.simulate import ParallelismConfig, simulate
from dtrain.planning.step_time import (
    NETWORKS,
    Accelerator,
    Network,
    communication_seconds,
    control_seconds,
    parse_accelerator,
    step_seconds,
)
from dtrain.planning.step_work import CollectiveTraffic
from dtrain.planning.workload import Workload
from dtrain.shard.fsdp import shard_model
from dtrain.shard.materialize import materialize
from dtrain.step.compose import compose_step
from dtrain.step.microbatch_step import microbatch_step
from planning.workloads import WIDTH, linears

A, B, C, D = 1e-6, 100.0, 1e-5, 10.0  # latency and bandwidth within a node, and between nodes
NETWORK = Network(local_world_size=4, within=B, between=D, within_latency_s=A, between_latency_s=C, control_latency_s=1e-4)
S = 1000

BY_HAND = {
    "ring on a node": (("all_gather", 4, 1), 3 * A + 3 / 4 * S / B),
    "part of a node": (("reduce_scatter", 2, 1), A + S / 2 / B),
    "ring between nodes": (("all_gather", 3, 4), 2 * C + 2 / 3 * S / D),
    "two levels": (("reduce_scatter", 12, 1), 3 * A + 3 / 4 * S / B + 2 * C + 2 / 3 * S / 4 / D),
    "every second rank": (("all_gather", 6, 2), A + S / 2 / B + 2 * C + 2 / 3 * S / 2 / D),
    "all-reduce by a ring": (("all_reduce", 4, 1), 2 * (3 * A + 3 / 4 * S / B)),
    "all-reduce of two levels": (("all_reduce", 8, 1), 2 * (3 * A + 3 / 4 * S / B) + 2 * (C + S / 4 / 2 / D)),
    "broadcast": (("broadcast", 4, 1), 2 * A + S / B),
    "send": (("send", 2, 4), C + S / D),
    "permute on a node": (("permute", 4, 1), A + S / B),
    "permute between nodes": (("permute", 8, 1), C + S / D),
    "one rank": (("all_reduce", 1, 1), 0.0),
}


@pytest.mark.parametrize(("call", "expected"), BY_HAND.values(), ids=BY_HAND)
def test_seconds_follow_the_stated_model(call, expected):
    op, ranks, stride = call
    assert NETWORK.seconds(op, S, group_size=ranks, stride=stride) == pytest.approx(expected)


def test_small_all_reduce_uses_a_tree():
    assert NETWORK.seconds("all_reduce", 0, group_size=1024, stride=4) == pytest.approx(2 * 10 * C)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "all_reduce"])
def test_larger_messages_and_slower_links_take_longer(name, op):
    network = Network.preset(name)
    slow = network.replace(between=network.between / 2, within=network.within / 2)
    for ranks in (2, 8, 64, 4096):
        assert 0 < network.seconds(op, 10**6, group_size=ranks) < network.seconds(op, 10**7, group_size=ranks)
        assert network.seconds(op, 10**6, group_size=ranks) < slow.seconds(op, 10**6, group_size=ranks)


def test_seconds_of_a_step_are_the_sum_over_its_collectives():
    traffic = [
        CollectiveTraffic(op="all_gather", group_size=4, count=3, bytes=3 * S),
        CollectiveTraffic(op="all_reduce", group_size=2, count=1, bytes=S, stride=4),
    ]
    expected = 3 * NETWORK.seconds("all_gather", S, group_size=4) + NETWORK.seconds("all_reduce", S, group_size=2, stride=4)
    assert communication_seconds(traffic, NETWORK) == pytest.approx(expected)


CONTROL = {
    "one node": (4, 2 * 2 * 4e-5),
    "nodes": (16, 2 * (4 * 4e-5 + 2 * 1e-4)),
    "nodes beyond a power of two": (12, 2 * (4 * 4e-5 + 3 * 1e-4)),
    "nodes of different sizes": (5, 2 * 4 * 1e-4),
}


@pytest.mark.parametrize(("ranks", "seconds"), CONTROL.values(), ids=CONTROL)
def test_control_records_take_the_messages_of_the_control_plane(ranks, seconds):
    assert control_seconds(ranks, NETWORK) == pytest.approx(seconds)


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64, bias=False), nn.Linear(64, 16, bias=False)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


def squares(model, batch):
    return dt.LossSum(total=model(batch).square().sum(), weight=len(batch))


def mlps():
    return nn.Sequential(*(MLP() for _ in range(3)), nn.Linear(16, 16))


TENSOR_PARALLEL = Workload(
    model=mlps,
    loss_fn=squares,
    batch=lambda n: torch.zeros(n, 16),
    blocks=(MLP,),
    shard_args={"tp_plan": {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}},
)


def test_each_axis_has_its_own_distance_between_ranks():
    estimate = estimate_memory(TENSOR_PARALLEL, world_size=64, strategy="hybrid_shard", dp_replicate=4, tp=2)
    axes = {(call.op, call.group_size, call.stride) for call in estimate.traffic}
    assert axes == {("all_gather", 8, 2), ("reduce_scatter", 8, 2), ("all_reduce", 4, 16), ("all_reduce", 2, 1)}
    full = estimate_memory(TENSOR_PARALLEL, world_size=64, tp=2)
    assert {(call.op, call.group_size, call.stride) for call in full.traffic} == {
        ("all_gather", 32, 2),
        ("reduce_scatter", 32, 2),
        ("all_reduce", 2, 1),
    }


def test_tensor_parallel_plan_divides_the_planned_parameters():
    one, two = (estimate_memory(TENSOR_PARALLEL, world_size=tp, tp=tp).max_by_part.parameters for tp in (1, 2))
    planned, whole = 3 * 2 * 16 * 64 * 4, 17 * 16 * 4
    assert (one, two) == (planned + whole, planned // 2 + whole)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = (projection.unflatten(-1, (2, 8)).transpose(1, 2) for projection in self.qkv(x).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + attended.transpose(1, 2).flatten(2)


CONTEXT_PARALLEL = Workload(
    model=lambda: nn.Sequential(*(Attention() for _ in range(3))),
    loss_fn=lambda model, batch: squares(model, batch["x"]),
    batch=lambda n: {"x": torch.zeros(n, 16, 16)},
    blocks=(Attention,),
    batch_seq_dims={"x": 1},
)


def collectives_of_a_step(strategy, dp_replicate, cp, tp, method, microbatches):
    """Count the collectives of a real step, without those of the control group."""
    torch.manual_seed(0)
    workload = CONTEXT_PARALLEL if cp > 1 else TENSOR_PARALLEL
    mesh = build_mesh(dp_replicate=dp_replicate, cp=cp, tp=tp)
    # The loss counts samples and not positions, so it is not that of the whole sequence.
    dims = workload.batch_seq_dims
    cut = [dt.transforms.context_parallel(mesh, batch_seq_dims=dims, method=method, check=False)] if cp > 1 else []
    options = workload.shard_args if tp > 1 else {}
    model = shard_model(workload.model(), mesh, strategy=strategy, blocks=workload.blocks, **options)
    model = materialize(model, seed=0)
    step = compose_step(workload.loss_fn, cut, grad=partial(microbatch_step, microbatch_size=2))
    state = step.init(model, torch.optim.AdamW(model.parameters()), allow_equal_batches=True)
    batch = workload.batch(2 * microbatches)
    state, _ = step(state, batch)
    with dt.testing.count_collectives() as records:
        step(state, batch)
    table = {}
    for call in records.records:
        if call.group_size > 1 and call.group not in ("control", "background"):
            count, size = table.get((call.op, call.group_size), (0, 0))
            table[call.op, call.group_size] = count + 1, size + call.bytes
    return sorted((*key, *value) for key, value in table.items())


# Ranks, strategy, dp_replicate, cp and tp; and the method of cp if it is not the ring.
LAYOUTS = {
    "full_shard": (2, "full_shard", 1, 1, 1),
    "shard_grad_op": (2, "shard_grad_op", 1, 1, 1),
    "replicate": (2, "replicate", 1, 1, 1),
    "tp": (2, "full_shard", 1, 1, 2),
    "cp": (2, "full_shard", 1, 2, 1),
    "ulysses": (2, "full_shard", 1, 2, 1, "ulysses"),
    "ulysses of 4": (4, "full_shard", 1, 2, 1, "ulysses"),
    "hybrid_shard of 4": (4, "hybrid_shard", 2, 1, 1),
    **{
        f"{name} of {ranks}": (ranks, strategy, replicas, cp, tp)
        for ranks in (4, 8)
        for name, strategy, replicas, cp, tp in (
            ("full_shard", "full_shard", 1, 1, 1),
            ("replicate", "replicate", 1, 1, 1),
            ("full_shard, tp 2", "full_shard", 1, 1, 2),
            ("full_shard, cp 2", "full_shard", 1, 2, 1),
            ("replicate, cp 4", "replicate", 1, 4, 1),
            ("hybrid_shard, cp 2", "hybrid_shard", 2, 2, 1),
        )
    },
    "hybrid_shard of 8": (8, "hybrid_shard", 2, 1, 1),
    "hybrid_shard of 8, tp 2": (8, "hybrid_shard", 2, 1, 2),
}


@pytest.mark.costly
@pytest.mark.parametrize("microbatches", [pytest.param(1, marks=pytest.mark.slow), 5])
@pytest.mark.parametrize(
    "layout",
    [pytest.param(layout, id=name, marks=pytest.mark.slow if layout[0] > 2 else ()) for name, layout in LAYOUTS.items()],
)
def test_planned_collectives_equal_counted_ones(layout, microbatches):
    ranks, strategy, dp_replicate, cp, tp, method = (*layout, "ring")[:6]
    options = strategy, dp_replicate, cp, tp, method, microbatches
    rows = dt.testing.run_ranks(collectives_of_a_step, ranks, *options, timeout_s=600)
    plan = estimate_memory(
        CONTEXT_PARALLEL if cp > 1 else TENSOR_PARALLEL,
        world_size=ranks,
        strategy=strategy,
        dp_replicate=dp_replicate,
        cp=cp,
        tp=tp,
        cp_method=method,
        microbatch_size=2,
        microbatches=microbatches,
        device="cpu",
    )
    # The plan tells groups of one size apart, such as two replicas and two parts of a tensor. The counters do not.
    planned: dict[tuple[str, int], list[int]] = {}
    for call in plan.traffic:
        total = planned.setdefault((call.op, call.group_size), [0, 0])
        total[:] = total[0] + call.count, total[1] + call.bytes
    assert sorted((*kind, *total) for kind, total in planned.items()) == [tuple(row) for row in rows[0]]


class GroupedAttention(nn.Module):
    def __init__(self, heads, key_heads):
        super().__init__()
        self.sizes = heads, key_heads, key_heads
        self.qkv = nn.Linear(16, 8 * sum(self.sizes))

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (-1, 8)).transpose(1, 2).split(self.sizes, 1)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return attended.transpose(1, 2).flatten(2)


@pytest.mark.parametrize(("heads", "key_heads", "sent_key_heads"), [(8, 8, 8), (8, 4, 4), (8, 2, 4), (4, 1, 4)])
@pytest.mark.parametrize("microbatches", [1, 7])
def test_planned_bytes_of_ulysses_are_those_of_query_key_value_and_output(heads, key_heads, sent_key_heads, microbatches):
    workload = replace(CONTEXT_PARALLEL, model=lambda: GroupedAttention(heads, key_heads), blocks=())
    layout = {"world_size": 8, "cp": 4, "cp_method": "ulysses"}
    with simulate(workload, ParallelismConfig(**layout)) as run:
        # A plan tries several sizes, and the bytes belong to the size.
        for size in (1, 3):
            traffic = run.step(size, microbatches).traffic
            tokens = size * 16 // 4 * 4  # of a part, times bytes of a float32
            (exchange,) = (calls for calls in traffic if calls.op == "all_to_all")
            assert (exchange.group_size, exchange.stride, exchange.count) == (4, 1, 4 * microbatches)
            # Forward and backward.
            assert exchange.bytes == microbatches * 2 * tokens * 8 * (2 * heads + 2 * sent_key_heads)


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_exchange_of_sequences_is_planned_for_a_gpu_as_for_a_cpu(method):
    layout = {"world_size": 8, "cp": 2, "cp_method": method}
    cuda, cpu = (estimate_memory(CONTEXT_PARALLEL, device=device, **layout).traffic for device in ("cuda", "cpu"))
    assert cuda == cpu
    assert {"ring": "permute", "ulysses": "all_to_all"}[method] in {calls.op for calls in cuda}


def test_exchange_of_ulysses_hides_behind_nothing():
    estimate = estimate_memory(CONTEXT_PARALLEL, world_size=2, cp=2, cp_method="ulysses", microbatches=4)
    network = Network.preset("pcie4-100gbe")
    (exchange,) = (calls for calls in estimate.traffic if calls.op == "all_to_all")
    seconds = step_seconds(estimate, FAST, network)
    assert seconds.compute > seconds.links
    assert seconds.exposed >= communication_seconds([exchange], network)


SAMPLES, UNITS, SIZE = 3, 4, 4
PARAMS = UNITS * (WIDTH * WIDTH + WIDTH)
FAST = Accelerator(flops={"fp32": 1e9}, bandwidth=1e6, efficiency=0.5, bandwidth_efficiency=0.25)


def test_work_of_a_step_is_that_of_its_products():
    forward = UNITS * 2 * SAMPLES * WIDTH * WIDTH
    plain = estimate_memory(linears(), world_size=1, microbatch_size=SAMPLES)
    again = estimate_memory(linears(), world_size=1, microbatch_size=SAMPLES, checkpoint="nothing")
    many = estimate_memory(linears(), world_size=1, microbatch_size=SAMPLES, microbatches=5)
    # The first layer needs no gradient of its input. Recomputation stops before the product of a Linear.
    assert plain.work.flops == {"float32": 3 * forward - forward // UNITS}
    assert again.work.flops == plain.work.flops
    assert many.work.flops == {"float32": 5 * plain.work.flops["float32"]}
    assert plain.batch_bytes == SAMPLES * WIDTH * SIZE
    assert many.batch_bytes == 5 * plain.batch_bytes


def test_optimizer_traffic_is_what_its_operations_read_and_write():
    sgd = linears(optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
    estimate = estimate_memory(sgd, world_size=1)
    # param += -lr * grad reads two and writes one.
    assert estimate.work.update_bytes == 3 * PARAMS * SIZE
    assert estimate.work.update_flops == {}


def test_seconds_of_a_step_without_network():
    estimate = estimate_memory(linears(), world_size=2, microbatch_size=SAMPLES)
    seconds = step_seconds(estimate, FAST)
    assert seconds.compute == pytest.approx(estimate.work.flops["float32"] / 1e9 / 0.5)
    assert seconds.update == pytest.approx(estimate.work.update_bytes / 1e6 / 0.25)
    assert (seconds.links, seconds.exposed, seconds.control) == (0, 0, 0)
    assert seconds.samples_per_second == pytest.approx(2 * SAMPLES / seconds.total)


@pytest.mark.parametrize("rate", [1e3, 1e15])
def test_collectives_hide_behind_computation_except_the_first_of_each_kind(rate):
    estimate = estimate_memory(linears(), world_size=64, microbatch_size=SAMPLES)
    network = Network(local_world_size=8, within=1e9, between=1e8)
    seconds = step_seconds(estimate, Accelerator(flops={"fp32": rate}, bandwidth=1e12), network)
    links = communication_seconds(estimate.traffic, network)
    first = sum(communication_seconds([call], network) / call.count for call in estimate.traffic)
    assert seconds.links == pytest.approx(links)
    assert seconds.exposed == pytest.approx(first if rate == 1e3 else links, rel=1e-3)
    assert seconds.control == control_seconds(64, network)
    assert seconds.total == pytest.approx(seconds.compute + seconds.update + seconds.exposed + seconds.control)


def test_accelerator_is_parsed_by_name_and_by_hand():
    h100 = parse_accelerator("plan", "--device", "h100")
    assert (h100.flops["bf16"], h100.bandwidth) == (989.4e12, 3.35e12)
    own = parse_accelerator("plan", "--device", "flops=400TFLOP/s,bandwidth=900GB/s")
    assert own.seconds({"bfloat16": 10**12}) == pytest.approx(1e12 / 400e12 / 0.4)
    assert own.bandwidth == 900e9


REFUSED = {
    "unknown": (lambda: Accelerator.preset("tpu"), "Accelerator.preset: name must be one of a100, .*, got 'tpu'"),
    "no rates": (lambda: Accelerator(flops={}, bandwidth=1), "Accelerator: flops must not be empty"),
    "no bandwidth": (lambda: Accelerator(flops={"bf16": 1}, bandwidth=0), "bandwidth must be a finite number above 0, got 0"),
    "unknown network": (lambda: Network.preset("h200"), r"name must be one of a100-hdr200, .*, got 'h200'\. Or build"),
    "no bandwidth of links": (
        lambda: Network(local_world_size=8, within=0, between=1),
        "within must be a finite number above 0, got 0",
    ),
    "no ranks": (
        lambda: Network(local_world_size=0, within=1, between=1),
        "local_world_size must be an integer of at least 1, got 0",
    ),
    "half a text": (lambda: parse_accelerator("plan", "--device", "flops=4TB/s,bandwidth=1TB/s"), "must be cuda, cpu, a100"),
}


@pytest.mark.parametrize(("call", "expected"), REFUSED.values(), ids=REFUSED)
def test_invalid_rates_are_refused(call, expected):
    with pytest.raises(ConfigError, match=expected):
        call()


def test_library_memory_is_counted_by_cause():
    estimate = estimate_memory(linears(transforms=[dt.transforms.ema(0.9)]), world_size=64, microbatch_size=SAMPLES)
    library = library_memory(estimate, workers=2, local_world_size=8)
    rest = estimate.at_rest
    assert library.host_staging == rest.parameters + rest.optimizer + rest.transforms
    assert library.device_batches == 2 * SAMPLES * WIDTH * SIZE
    assert library.host_batches == 3 * library.device_batches
    assert library.host_control == 2 * 2**16 * (5 + 3)  # of a node's ring of 8 five, and three other leaders
    assert library.host == library.host_staging + library.host_batches + library.host_control
    on_cpu = library_memory(estimate_memory(linears(), world_size=64, device="cpu"))
    assert (on_cpu.device, on_cpu.host_batches) == (0, 0)


BIG = 2048


def big_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(BIG, BIG), torch.nn.Linear(BIG, BIG))


def resident_bytes() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def settled_bytes() -> int:
    """Return the resident bytes when threads of gloo have given back the buffers of the last step: equal for 3 s."""
    last: list[int] = []
    while len(last) < 6 or len(set(last[-6:])) > 1:
        time.sleep(0.5)
        last.append(resident_bytes())
    return last[-1]


_M_MMAP_THRESHOLD = -3  # of malloc.h


def growth_in_a_save(root: str) -> int:
    """Return by how much this process's own memory grows with its first asynchronous save."""
    # Else glibc keeps a large block that was freed, and the save uses it first.
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 16)
    model = dt.materialize(dt.shard_model(big_model(), dt.build_mesh()), seed=0)
    step = dt.compose_step(lambda net, x: dt.LossSum(total=net(x).sum(), weight=len(x)))
    state = step.init(model, torch.optim.AdamW(model.parameters()))
    for _ in range(2):
        state, _ = step(state, torch.zeros(1, BIG))
    gc.collect()
    # A rank that is behind still sends from the buffers of the others.
    dt.dist.reduce_sum(0.0)
    before = settled_bytes()
    dt.save_sharded(root, state, mode="async").wait()
    return resident_bytes() - before


def test_staged_bytes_match_the_memory_of_ranks_that_save(tmp_path):
    workload = linears(model=big_model, batch=lambda n: torch.zeros(n, BIG), blocks=())
    planned = library_memory(estimate_memory(workload, world_size=2, device="cpu")).host_staging
    # Ranks that have run other tests have free memory that a save uses first.
    measured = dt.testing.run_ranks(growth_in_a_save, 2, str(tmp_path))
    print(f"planned {planned}, measured {measured}")
    # The save allocates some MB beside its staging buffer, at any size.
    assert all(abs(staged - planned) <= 0.15 * planned for staged in measured)
