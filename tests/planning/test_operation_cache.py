"""Operations of equal layouts are computed once, and the plan is the one in which each operation is computed."""

from collections import Counter

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dtrain.planning import operation_cache
from dtrain.planning.estimate import compare_strategies
from dtrain.planning.operation_cache import OperationCache
from dtrain.planning.simulate import FakeValueMode, ParallelismConfig, simulate
from dtrain.shard.precision import Precision
from planning.workloads import WORKLOADS, Linears, linears

BF16 = Precision.preset("DEFAULT", "bf16")
LAYOUTS = {
    "gpt": {"world_size": 8, "dp_replicate": 2, "precision": BF16, "strategies": ["hybrid_shard"]},
    "gpt-sharded": {
        "world_size": 4,
        "accumulate": "sharded",
        "microbatches": 5,
        "strategies": ["full_shard"],
        "checkpoints": ["matmuls"],
    },
    "convs": {"world_size": 4, "device": "cpu", "strategies": ["shard_grad_op"]},
    "tied": {"world_size": 2, "device": "cpu", "strategies": ["full_shard"]},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_plan_of_repeated_operations_equals_the_plan_of_computed_ones(name, monkeypatch):
    workload, options = WORKLOADS[name.split("-")[0]], {**LAYOUTS[name], "memory": 2**26}
    repeated = compare_strategies(workload, **options)
    monkeypatch.setattr(operation_cache, "_depends_on_layouts", lambda func: False)
    assert compare_strategies(workload, **options) == repeated


def operations_of_a_new_size(blocks: int, monkeypatch, **config) -> int:
    """Return how many operations the fake mode computes for a second microbatch size."""
    counts: Counter[str] = Counter()
    dispatch = FakeTensorMode.dispatch

    def counted(self, func, types, args=(), kwargs=None):
        counts[func.namespace] += 1
        return dispatch(self, func, types, args, kwargs)

    with simulate(linears(model=lambda: Linears(blocks)), ParallelismConfig(world_size=4, **config)) as run:
        run.step(2, 1)
        with monkeypatch.context() as patch:
            patch.setattr(FakeTensorMode, "dispatch", counted)
            run.step(3, 1)
    # The collectives run, because each returns a handle. Numbers of the optimizer's state are read.
    return counts["aten"] - counts["c10d"]


@pytest.mark.parametrize("config", [{"strategy": "full_shard"}, {"strategy": "full_shard", "checkpoint": "nothing"}], ids=str)
def test_computed_operations_do_not_grow_with_the_layers(config, monkeypatch):
    few, many = (operations_of_a_new_size(blocks, monkeypatch, **config) for blocks in (4, 8))
    assert 0 < many <= few + 4


def halves(x: Tensor) -> list[Tensor]:
    return list(x.chunk(2))


def resized(x: Tensor) -> Tensor:
    return x.clone().resize_(9, 9)


def written_out(x: Tensor) -> Tensor:
    out = torch.empty(0)
    torch.add(x, 1, out=out)
    return out


def refilled(x: Tensor) -> Tensor:
    y = x.clone()
    y.untyped_storage().resize_(0)
    y.untyped_storage().resize_(x.nbytes)
    return y.mul_(2)


OPERATIONS = {
    "new": lambda x: x + 1,
    "scalar of another type": lambda x: [x.int() + value for value in (1, 1.0, True)],
    "sizes from numbers": lambda x: [torch.arange(0, 3, step) for step in (0.5, 1.0, 1)],
    "flag": lambda x: [x.sum(0, keepdim) for keepdim in (True, False)],
    "view": lambda x: x.contiguous().view(2, 12),
    "view of a view": lambda x: x[1:].t()[1:],
    "expanded": lambda x: x[:1].expand(4, 6),
    "views": halves,
    "in place": lambda x: x.clone().add_(1),
    "in place, its argument twice": lambda x: (lambda y: y.add_(y))(x.clone()),
    "transposed in place": lambda x: x.clone().t_(),
    "resized": resized,
    "out": written_out,
    "set": lambda x: torch.empty(0).set_(x.clone()),
    "foreach": lambda x: torch._foreach_add([x, x[0]], 1.0),
    "foreach in place": lambda x: torch._foreach_mul_([x.clone()], [2.0]),
    "storage that was freed": refilled,
    "dtype": lambda x: x.to(torch.bfloat16),
    "complex": lambda x: torch.view_as_real(torch.complex(x, x)),
    "conjugate": lambda x: torch.complex(x, x).conj(),
    "negative view": lambda x: torch.complex(x, x).conj().imag,
    "no elements": lambda x: x[:0] * 2,
    "overlapping": lambda x: x.as_strided((3, 3), (1, 1), 2) * 2,
    "a number of the host": lambda x: torch.tensor(2.0) * x,
    "selected by a mask": lambda x: x[x > 0],
    "two results": lambda x: x.max(0),
}


def described(function, x: Tensor) -> list[tuple[object, ...]]:
    result = function(x)
    tensors = [result] if isinstance(result, Tensor) else list(result or [])
    rows = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        layout = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device)
        rows.append((*layout, storage.nbytes(), storage is x.untyped_storage(), tensor.is_neg(), tensor.is_conj()))
    return rows


@pytest.mark.parametrize("function", OPERATIONS.values(), ids=OPERATIONS)
def test_repeated_results_have_the_layout_of_computed_ones(function, monkeypatch):
    def three_times() -> list[list[tuple[object, ...]]]:
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with fake, FakeValueMode(fake):
            inputs = [torch.empty(4, 6), torch.empty(4, 6), torch.empty(6, 4).t()]
            return [described(function, x) for x in inputs]

    repeated = three_times()
    monkeypatch.setattr(operation_cache, "_depends_on_layouts", lambda func: False)
    assert repeated == three_times()


def test_result_in_one_of_two_arguments_is_not_confused():
    fake = FakeTensorMode()
    cache = OperationCache(fake)
    add = torch.ops.aten.add.out
    with fake:
        x, y = torch.empty(3), torch.empty(3)
        assert cache.run(add, (x, x), {"out": x}) is x
        assert cache.run(add, (x, x), {"out": y}) is y
        assert cache.run(add, (x, y), {"out": y}) is y


def test_repeated_results_are_tensors_of_their_own():
    fake = FakeTensorMode()
    cache = OperationCache(fake)
    with fake:
        x = torch.empty(3)
        add = torch.ops.aten.add.Tensor
        first, second = (cache.run(add, (x, x), {}) for _ in range(2))
    assert first.untyped_storage() is not second.untyped_storage()
    assert vars(first).keys() == vars(second).keys()
