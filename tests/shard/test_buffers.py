"""Buffers that a forward changes: rank 0's, the mean, or each rank's own."""

import re
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel

import dtrain as dt
from dtrain.dist.init import get_dist_info
from dtrain.dist.mesh import build_mesh
from dtrain.errors import ConfigError, StepError
from dtrain.shard.fsdp import shard_model
from dtrain.state import init_state
from dtrain.step.microbatch_step import microbatch_step
from dtrain.testing import count_collectives
from dtrain.typing import LossSum


class Odd(nn.Module):
    """A model with a replaced buffer, an untouched buffer, and a buffer that no state dict holds."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("table", torch.arange(3.0))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)
        self.register_buffer("flags", torch.zeros(3, dtype=torch.bool))

    def forward(self, x):
        self.seen = self.seen + x.mean()
        self.scratch += x.mean()
        return self.norm(x) * self.table


def data(rank: int) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(rank)) + rank


def loss_fn(net: nn.Module, batch: dict) -> LossSum:
    return LossSum(total=net(batch["x"]).square().sum(), weight=len(batch["x"]))


def values(net: nn.Module) -> dict[str, list]:
    return {name: buffer.tolist() for name, buffer in net.named_buffers()}


def trained(buffers: str, samples: list, size: int) -> dict[str, list]:
    net = shard_model(Odd(), build_mesh(), buffers=buffers)
    state = init_state(net, torch.optim.SGD(net.parameters(), lr=0.1))
    batch = {"x": data(get_dist_info().rank)[: samples[get_dist_info().rank]]}
    microbatch_step(state, batch, loss_fn=loss_fn, microbatch_size=size)
    return values(net)


def alone(rank: int, size: int = 4, samples: int = 4) -> dict[str, list]:
    net = Odd()
    for microbatch in data(rank)[:samples].split(size) if samples else ():
        net(microbatch)
    return values(net)


SAMPLES = [4, 4]


def test_broadcast_uses_the_buffers_of_rank_0(ranks):
    first, second = ranks(2).run(trained, "broadcast", SAMPLES, 4)
    expected = alone(0)
    for name in ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "seen", "table"):
        assert first[name] == second[name] == expected[name], name
    assert first["scratch"] == second["scratch"] == expected["scratch"], "no state dict holds it, and the rule is the same"


def test_mean_averages_floating_point_buffers(ranks):
    first, second = ranks(2).run(trained, "mean", SAMPLES, 4)
    a, b = alone(0), alone(1)
    for name in ("norm.running_mean", "norm.running_var", "seen", "scratch"):
        assert first[name] == second[name]
        torch.testing.assert_close(torch.tensor(first[name]), (torch.tensor(a[name]) + torch.tensor(b[name])) / 2)
    assert first["norm.num_batches_tracked"] == second["norm.num_batches_tracked"] == 1


def test_local_mode_keeps_per_rank_buffers(ranks):
    first, second = ranks(2).run(trained, "own", SAMPLES, 4)
    assert first["norm.running_mean"] == alone(0)["norm.running_mean"]
    assert second["norm.running_mean"] == alone(1)["norm.running_mean"]


@pytest.mark.parametrize("samples", [[4, 2], [4, 0]])
def test_padding_microbatches_do_not_update_buffers(ranks, samples):
    second = ranks(2).run(trained, "own", samples, 2)[1]
    assert second == alone(1, 2, samples[1])
    assert second["norm.num_batches_tracked"] == samples[1] // 2


def traffic(model: str) -> list:
    net = shard_model(Odd() if model == "odd" else nn.Linear(3, 3), build_mesh())
    state = init_state(net, torch.optim.SGD(net.parameters(), lr=0.1))
    with count_collectives() as seen:
        microbatch_step(state, {"x": data(0)}, loss_fn=loss_fn)
    return [[r.op, r.bytes] for r in seen.select(op="broadcast")]


def test_only_changed_modules_are_sent_in_one_collective(ranks):
    # running_mean, running_var: 12 bytes each, num_batches_tracked: 8; seen: 8, table: 12, flags: 3 of one module
    assert ranks(2).run(traffic, "odd")[0] == [["broadcast", 12 + 12 + 8 + 8 + 12 + 3]], "scratch stays each rank's own"
    assert ranks(2).run(traffic, "linear")[0] == []


class Sometimes(nn.Module):
    """Changes its buffer on some ranks only."""

    def __init__(self, dtype: torch.dtype = torch.float32, ranks: tuple[int, ...] = (1,)) -> None:
        super().__init__()
        self.linear, self.ranks = nn.Linear(3, 3), ranks
        self.register_buffer("count", torch.zeros(1, dtype=dtype))

    def forward(self, x):
        if get_dist_info().rank in self.ranks:
            self.count += 1
        return self.linear(x)


def changed_on_one_rank() -> list:
    net = shard_model(Sometimes(), build_mesh(), buffers="mean")
    state = init_state(net, torch.optim.SGD(net.parameters(), lr=0.1))
    microbatch_step(state, {"x": data(0)}, loss_fn=loss_fn)
    return net.count.tolist()


def test_buffer_changed_on_one_rank_is_synchronized(ranks):
    assert ranks(2).run(changed_on_one_rank) == [[0.5], [0.5]]


class Twice(nn.Module):
    """Replaces its buffer twice in one forward: the last tensor may lie where the first one was."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x):
        for _ in range(2):
            self.seen = self.seen + (get_dist_info().rank + 1)
        return self.linear(x)


def replaced_twice() -> list:
    net = shard_model(Twice(), build_mesh())
    state = init_state(net, torch.optim.SGD(net.parameters(), lr=0.1))
    values = []
    for _ in range(3):
        microbatch_step(state, {"x": data(0)}, loss_fn=loss_fn)
        values.append(net.seen[0].item())
    return values


def test_repeatedly_replaced_buffer_is_detected_as_changed(ranks):
    assert ranks(2).run(replaced_twice) == [[2.0, 4.0, 6.0]] * 2


class Table(nn.Module):
    """A constant that no forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("table", torch.rand(1000, generator=torch.Generator().manual_seed(0)))

    def forward(self, x):
        return self.linear(x)


def constant_beside_a_filler() -> bool:
    net = shard_model(Table(), build_mesh(), buffers="mean")
    before = net.table.clone()
    state = init_state(net, torch.optim.SGD(net.parameters(), lr=0.1))
    with count_collectives() as seen:
        microbatch_step(state, {"x": data(0)[: 4 if get_dist_info().rank < 2 else 0]}, loss_fn=loss_fn, microbatch_size=2)
    return torch.equal(net.table, before) and all(record.bytes < before.nbytes for record in seen.records)


def test_constant_buffer_is_not_sent_for_empty_rank_batches(ranks):
    assert ranks(3).run(constant_beside_a_filler) == [True] * 3


def sync_batch_norm() -> str:
    try:
        shard_model(nn.SyncBatchNorm.convert_sync_batchnorm(Odd()), build_mesh())
    except ConfigError as error:
        return str(error)
    return "no error"


def test_sync_batch_norm_is_refused_on_cpu(ranks):
    assert "SyncBatchNorm runs on GPUs only. On the CPU use BatchNorm with buffers='mean'." in ranks(2).run(sync_batch_norm)[1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_sync_batch_norm_trains_on_a_gpu(ranks):
    from dtrain.dist.init import init_dist

    with init_dist(device="cuda"):
        net = shard_model(nn.SyncBatchNorm.convert_sync_batchnorm(Odd()).cuda(), build_mesh())
        state = init_state(net, torch.optim.SGD(net.parameters(), lr=0.1))
        microbatch_step(state, {"x": data(0)}, loss_fn=loss_fn)
        assert int(net.norm.num_batches_tracked) == 1


class Router(nn.Module):
    """A module that counts its forwards in buffers of both kinds, and shifts its choice by a bias that an update writes."""

    def __init__(self, strays: bool = True) -> None:
        super().__init__()
        self.gate, self.out = nn.Linear(4, 4, bias=False), nn.Linear(4, 2)
        self.register_buffer("bias", torch.zeros(4, dtype=torch.float64))
        self.register_buffer("load", torch.zeros(4, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("low", torch.zeros(4, dtype=torch.bfloat16), persistent=False)

    def forward(self, x):
        pick = (self.gate(x) + self.bias).argmax(-1)
        if self.training:
            self.load += torch.bincount(pick, minlength=4)
            self.seen += len(x)
            self.low = self.low + torch.bincount(pick, minlength=4)
        return self.out(self.gate(x).gather(-1, pick[:, None]) * x)


def balance(inner):
    def balanced(state, metrics):
        state, metrics = inner(state, metrics)
        model = state.model
        with torch.no_grad():
            model.bias += 0.01 * (model.load.mean() - model.load)
            model.load.zero_()
            model.low.zero_()
        return state, metrics

    return balanced


COUNTS = {"load": "sum", "seen": "sum", "low": "sum"}
X = torch.randn(48, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def routed(strategy: str | None, buffers=COUNTS, *, tp: int = 1, sizes: list | None = None, root: str | None = None) -> dict:
    torch.manual_seed(0)
    model = Router().double()
    model.low = model.low.bfloat16()
    info = get_dist_info()
    if strategy is not None:
        many = strategy == "hybrid_shard" and info.world_size > 1
        mesh = build_mesh(dp_replicate=2 if many else 1, tp=tp)
        plan = {"out": ColwiseParallel(output_layouts=Replicate())} if tp > 1 else None
        strategy = "full_shard" if strategy == "hybrid_shard" and not many else strategy
        model = shard_model(model, mesh, strategy=strategy, buffers=buffers, tp_plan=plan)
    loss = dt.mean_loss(lambda model, x: model(x).square().mean(), weight=len)
    step = dt.compose_step(
        loss, [dt.Transform(name="balance", update=balance)], grad=partial(microbatch_step, microbatch_size=4)
    )
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1), allow_equal_batches=True)
    rank, ranks = state.spec.data_rank, state.spec.data_ranks
    for index in range(3):
        whole = X[16 * index : 16 * index + 16]
        begin, end = (
            (16 * rank // ranks, 16 * (rank + 1) // ranks) if sizes is None else (sum(sizes[:rank]), sum(sizes[: rank + 1]))
        )
        state, _ = step(state, whole[begin:end])
    return {"bias": model.bias.tolist(), "seen": int(model.seen)}


def routed_all(tp: bool) -> list:
    results = [routed(strategy) for strategy in ("replicate", "full_shard", "shard_grad_op", "hybrid_shard")]
    if get_dist_info().world_size == 2:
        results.append(routed("full_shard", sizes=[16, 0]))
    return [*results, routed("full_shard", tp=2)] if tp else results


@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_summed_counters_are_those_of_one_process(ranks, world):
    expected = routed(None)
    assert expected["seen"] == 48
    for results in ranks(world).run(routed_all, world > 1):
        for result in results:
            assert result["seen"] == 48
            torch.testing.assert_close(result["bias"], expected["bias"], rtol=0, atol=1e-15)


class Growing(nn.Module):
    """A table that grows with the longest batch of this rank."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("table", torch.ones(2), persistent=persistent)

    def forward(self, x):
        if len(x) > len(self.table):
            self.table = torch.ones(len(x))
        return self.linear(x) * self.table[: len(x), None]


class Memory(nn.Module):
    """A buffer that is None until a forward sets it, of the length of the batch or of one length."""

    def __init__(self, persistent: bool, length: int | None = None) -> None:
        super().__init__()
        self.linear, self.length = nn.Linear(3, 3), length
        self.register_buffer("last", None, persistent=persistent)

    def forward(self, x):
        self.last = x.detach()[: self.length].sum(-1)
        return self.linear(x)


class Cached(nn.Module):
    """A cache that the first and third forward replace and the second writes, beside a counter that is equal on all ranks."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("cache", torch.zeros(2, dtype=dtype), persistent=False)
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x):
        self.steps += 1
        if self.steps == 2:
            self.cache.fill_(len(x) + 1)
        else:
            self.register_buffer("cache", torch.full_like(self.cache, len(x)), persistent=False)
        return self.linear(x)


class Calls(nn.Module):
    """A counter outside of the state dict that differs between ranks from the third forward on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x):
        self.calls += 1 if self.calls < 2 or len(x) == 4 else 5
        return self.linear(x)


def warned(model: nn.Module, buffers, steps: int, samples: list) -> dict:
    net = shard_model(model, build_mesh(), buffers=buffers)
    state = init_state(net, torch.optim.SGD(net.parameters(), lr=0.1))
    said, records = "", []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for _ in range(steps):
                with count_collectives() as seen:
                    state, metrics = microbatch_step(
                        state, {"x": data(get_dist_info().rank)[: samples[get_dist_info().rank]]}, loss_fn=loss_fn
                    )
                    state, _ = dt.optimizer_step(state, metrics)
                records.append(seen.count(group="control"))
        except StepError as error:
            said = str(error)
    texts = [str(warning.message) for warning in caught if "changed the buffer" in str(warning.message)]
    return {"warnings": texts, "error": said, "buffers": values(net), "records": records}


def warnings_of_two() -> dict:
    return {
        "counter": warned(Odd(), None, 6, [4, 2]),
        "chosen": warned(Odd(), "broadcast", 2, [4, 2]),
        "by name": warned(Odd(), {"seen": "mean", "s*": "own"}, 2, [4, 2]),
        "half": warned(Odd(), {"seen": "own"}, 2, [4, 2]),
        "whole mean": warned(Sometimes(torch.int64), "mean", 2, [4, 4]),
        "batch norm": warned(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), None, 2, [4, 4]),
        "equal": warned(Sometimes(torch.float32, ranks=(0, 1)), None, 2, [4, 2]),
        "growing": warned(Growing(False), None, 2, [4, 3]),
        "growing, saved": warned(Growing(True), None, 2, [4, 3]),
        "growing, own": warned(Growing(True), {"table": "own"}, 2, [4, 3]),
        "growing on one rank": warned(Growing(True), None, 2, [4, 2]),
        "memory of one length": warned(Memory(True, 2), None, 2, [4, 3]),
        "memory": warned(Memory(False), None, 2, [4, 3]),
        "memory, saved": warned(Memory(True), None, 2, [4, 3]),
        "memory, no samples": warned(Memory(False, 2), None, 2, [4, 0]),
        "growing alike": warned(Growing(True), None, 2, [4, 4]),
        "replaced": warned(Cached(torch.float32), None, 3, [4, 2]),
        "whole, replaced": warned(Cached(torch.int64), None, 3, [4, 2]),
        "whole, not saved": warned(Calls(), None, 4, [4, 2]),
    }


def test_buffers_that_ranks_change_differently_are_named_once_on_rank_0(ranks):
    first, second = ranks(2).run(warnings_of_two)
    assert all(result["warnings"] == [] for result in second.values())
    start = "step: the ranks changed the buffer {0!r} differently in forward, and {1}. Choose: shard_model(buffers={{{0!r}: {2}"
    same, own = (
        ("all ranks get the value of rank 0", "'sum'}) for a counter"),
        ("each rank keeps its own value", "'own'}) for a cache"),
    )
    named = {
        "counter": ("seen", *same),
        "half": ("scratch", *own),
        "whole mean": ("count", *same),
        "memory of one length": ("last", *same),
        "whole, not saved": ("calls", *same),
    }
    for case, result in first.items():
        expected = [start.format(*named[case])] if case in named else []
        assert [text[: len(expected[0]) if expected else None] for text in result["warnings"]] == expected, case
    for case in ("growing, saved", "growing on one rank"):
        for rank, lengths in ((first, "[4] on rank 0 and"), (second, "[4] on rank 0 and")):
            assert rank[case]["error"].startswith(
                "step: the buffer 'table' must have one shape on all ranks, got " + lengths
            ), case
    assert [len(rank["growing"]["buffers"]["table"]) for rank in (first, second)] == [4, 3]
    assert [len(rank["growing, own"]["buffers"]["table"]) for rank in (first, second)] == [4, 3]
    for name in ("seen", "flags", "norm.running_mean"):
        assert first["counter"]["buffers"][name] == second["counter"]["buffers"][name], "the state dict holds them"
    for case, name in (("counter", "scratch"), ("half", "scratch"), ("replaced", "cache"), ("whole, replaced", "cache")):
        assert first[case]["buffers"][name] != second[case]["buffers"][name], (case, name)
    assert first["whole, not saved"]["buffers"] == second["whole, not saved"]["buffers"] == {"calls": 4}
    assert [rank["replaced"]["buffers"]["cache"][0] for rank in (first, second)] == [4, 2], "what its own last forward set"
    assert [rank["whole, replaced"]["buffers"]["cache"][0] for rank in (first, second)] == [4, 2]
    assert first["replaced"]["records"][1:] == [min(first["replaced"]["records"])] * 2, "a cache costs no exchange"
    assert first["by name"]["buffers"]["seen"] == second["by name"]["buffers"]["seen"]
    assert first["by name"]["buffers"]["scratch"] != second["by name"]["buffers"]["scratch"]
    assert first["counter"]["records"][1] - first["counter"]["records"][2] == 0, "nothing is compared after the warning"


@pytest.mark.parametrize(
    ("buffers", "message"),
    [
        ("local", "shard_model: buffers must be 'broadcast', 'mean', 'sum' or 'own', got 'local'"),
        ({"seen": "max"}, "shard_model: buffers must be 'broadcast', .* or 'own', got 'max'"),
        ({"nothing": "own"}, "shard_model: buffers must name buffers of the model, got 'nothing'; the model has seen, table, "),
        ("sum", "shard_model: buffers must not be 'sum' for 'flags', a bool buffer. Choose"),
        (
            {"norm.*": "sum"},
            "shard_model: buffers must not be 'sum' for 'norm.running_mean', a statistic of BatchNorm1d.",
        ),
        (3, "shard_model: buffers must be 'broadcast', .* or 'own', got 3"),
    ],
)
def test_invalid_choices_are_refused(ranks, buffers, message):
    (said,) = ranks(1).run(refused, buffers)
    assert re.match(message, said), said


def refused(buffers) -> str:
    try:
        shard_model(Odd(), build_mesh(), buffers=buffers)
    except ConfigError as error:
        return str(error)
    return "nothing"


# Lengths of the sequences of both ranks in each step. The model was made for 16.
LENGTHS = [(12, 48), (12, 48), (48, 12), (20, 48)]
ROPE = {"rope_theta": 1e4, "original_max_position_embeddings": 16}
ROPES = {
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, **ROPE},
    "longrope": {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0] * 4, "long_factor": [3.0] * 4, **ROPE},
}


def llama(rope: str) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 16}
    return LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=16, rope_parameters=dict(ROPES[rope])))


def tokens(length: int) -> torch.Tensor:
    return torch.randint(16, (1, length), generator=torch.Generator().manual_seed(length))


def rotated(rope: str, strategy: str | None, rank: int | None = None) -> dict:
    """Losses of this rank's sequences and the frequencies after each step, of weights that do not move."""
    model, rank = llama(rope), get_dist_info().rank if rank is None else rank
    if strategy is not None:
        mesh = build_mesh(dp_replicate=2 if strategy == "hybrid_shard" else 1)
        model = shard_model(model, mesh, strategy=strategy)
    state = init_state(model, torch.optim.SGD(model.parameters(), lr=0.0))
    losses, frequencies = [], []

    def loss_fn(net: nn.Module, batch: dict) -> LossSum:
        loss = net(input_ids=batch["x"], labels=batch["x"], use_cache=False).loss
        losses.append(loss.item())
        return LossSum(total=loss, weight=1)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for lengths in LENGTHS:
            state, metrics = microbatch_step(state, {"x": tokens(lengths[rank])}, loss_fn=loss_fn)
            state, _ = dt.optimizer_step(state, metrics)
            frequencies.append(model.model.rotary_emb.inv_freq.tolist())
    texts = [str(warning.message) for warning in caught if "changed the buffer" in str(warning.message)]
    return {"losses": losses, "frequencies": frequencies, "warnings": texts}


def rotated_all() -> dict:
    return {
        "dynamic": [rotated("dynamic", strategy) for strategy in ("replicate", "full_shard", "shard_grad_op", "hybrid_shard")],
        "longrope": [rotated("longrope", "replicate")],
    }


@pytest.mark.costly
def test_rotary_frequencies_are_those_of_each_ranks_own_sequences(ranks):
    both = ranks(2).run(rotated_all)
    for rope in ROPES:
        for rank in (0, 1):
            expected = rotated(rope, None, rank)
            assert expected["frequencies"][0] != rotated(rope, None, 1 - rank)["frequencies"][0], "the lengths matter"
            for result in both[rank][rope]:
                torch.testing.assert_close(result["losses"], expected["losses"], rtol=1e-5, atol=1e-6)
                assert result["frequencies"] == expected["frequencies"]
    assert all(result["warnings"] == [] for rank in both for result in rank["dynamic"])
    # In place, longrope looks like an average: dtrain cannot know that each forward computes it anew.
    (text,) = both[0]["longrope"][0]["warnings"]
    assert "shard_model(buffers={'model.rotary_emb.inv_freq': 'own'}) for a cache" in text


# Samples of each rank in each step.
EMPTY = {2: [[0, 4], [4, 0], [0, 4], [4, 4]], 3: [[0, 4, 4], [0, 0, 4], [4, 0, 4], [0, 4, 0]]}


def normalized(buffers: str | None) -> list:
    """Statistics after each step of a BatchNorm whose ranks have samples in some steps only."""
    info, statistics = get_dist_info(), []
    model = shard_model(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3)).double(), build_mesh(), buffers=buffers)
    state = init_state(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step, sizes in enumerate(EMPTY[info.world_size]):
        batch = {"x": data(10 * step + info.rank)[: sizes[info.rank]].double()}
        state, metrics = microbatch_step(state, batch, loss_fn=loss_fn)
        state, _ = dt.optimizer_step(state, metrics)
        statistics.append({name: buffer.double().tolist() for name, buffer in model.named_buffers()})
    return statistics


def normalized_both() -> dict:
    return {"broadcast": normalized(None), "mean": normalized("mean")}


@pytest.mark.parametrize("world", [2, 3])
def test_statistics_are_those_of_the_ranks_with_samples(ranks, world):
    by_rank = ranks(world).run(normalized_both)
    for choice in ("broadcast", "mean"):
        norm = nn.BatchNorm1d(3).double()
        for step, sizes in enumerate(EMPTY[world]):
            active = [rank for rank in range(world) if sizes[rank]]
            used, start = active if choice == "mean" else active[:1], dict(norm.state_dict())
            parts = []
            for rank in used:
                norm.load_state_dict(start := {name: value.clone() for name, value in start.items()})
                norm(data(10 * step + rank).double())
                parts.append({name: buffer.clone().double() for name, buffer in norm.named_buffers()})
            expected = {name: sum(statistics[name] for statistics in parts) / len(parts) for name in parts[0]}
            norm.load_state_dict({**start, **expected})
            for buffers in by_rank:
                for name, value in expected.items():
                    torch.testing.assert_close(buffers[choice][step][f"0.{name}"], value.tolist(), rtol=0, atol=1e-12)
