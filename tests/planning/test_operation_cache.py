"""Operations of equal layouts are computed once, and the plan is the one in which each operation is computed."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dtrain.memory.live_tensors import LiveBytes
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


@pytest.mark.costly
@pytest.mark.parametrize("name", LAYOUTS)
def test_plan_of_repeated_operations_equals_the_plan_of_computed_ones(name, monkeypatch):
    workload, options = WORKLOADS[name.split("-")[0]], {**LAYOUTS[name], "memory": 2**26}
    repeated = compare_strategies(workload, **options)
    monkeypatch.setattr(operation_cache, "_depends_on_layouts", lambda func: False)
    assert compare_strategies(workload, **options) == repeated


@contextmanager
def computed_operations(monkeypatch) -> Iterator[list[int]]:
    """Yield a list that gets the number of operations that the fake mode computes inside the context."""
    counts: Counter[str] = Counter()
    dispatch = FakeTensorMode.dispatch

    def counted(self, func, types, args=(), kwargs=None):
        counts[func.namespace] += 1
        return dispatch(self, func, types, args, kwargs)

    numbers: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(FakeTensorMode, "dispatch", counted)
        yield numbers
    # The collectives run, because each returns a handle. Numbers of the optimizer's state are read.
    numbers.append(counts["aten"] - counts["c10d"])


def operations_of_a_new_size(blocks: int, monkeypatch, **config) -> int:
    """Return how many operations the fake mode computes for a second microbatch size."""
    with simulate(linears(model=lambda: Linears(blocks)), ParallelismConfig(world_size=4, **config)) as run:
        run.step(2, 1)
        with computed_operations(monkeypatch) as numbers:
            run.step(3, 1)
    return numbers[0]


@pytest.mark.parametrize("config", [{"strategy": "full_shard"}, {"strategy": "full_shard", "checkpoint": "nothing"}], ids=str)
def test_computed_operations_do_not_grow_with_the_layers(config, monkeypatch):
    few, many = (operations_of_a_new_size(blocks, monkeypatch, **config) for blocks in (4, 8))
    assert 0 < many <= few + 4


@pytest.mark.parametrize("strategy", ["full_shard", "replicate"])
def test_operations_of_the_set_up_do_not_grow_with_the_layers(strategy, monkeypatch):
    def set_up(blocks: int) -> int:
        config = ParallelismConfig(world_size=4, strategy=strategy)
        with computed_operations(monkeypatch) as numbers, simulate(linears(model=lambda: Linears(blocks)), config):
            pass
        return numbers[0]

    few, many = set_up(4), set_up(8)
    assert 0 < many <= few + 4


def test_layouts_of_a_search_share_their_operations(monkeypatch):
    def search(*strategies: str) -> int:
        with computed_operations(monkeypatch) as numbers:
            compare_strategies(linears(), world_size=4, strategies=strategies, checkpoints=[None])
        return numbers[0]

    alone = search("full_shard")
    # Without a cache in common it would be twice as many. Some operations on numbers of the host are computed each time.
    assert search("full_shard", "full_shard") < 1.5 * alone


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


def of_default_dtypes(x: Tensor) -> list[Tensor]:
    """A model is built under its own default dtype, and its loss is computed under another."""
    before, quotients = torch.get_default_dtype(), []
    try:
        for dtype in (torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            quotients.append(x.int() / x.int())
    finally:
        torch.set_default_dtype(before)
    return quotients


OPERATIONS = {
    "default dtype": of_default_dtypes,
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
        with FakeValueMode(OperationCache()):
            inputs = [torch.empty(4, 6), torch.empty(4, 6), torch.empty(6, 4).t()]
            return [described(function, x) for x in inputs]

    repeated = three_times()
    monkeypatch.setattr(operation_cache, "_depends_on_layouts", lambda func: False)
    assert repeated == three_times()


def test_result_in_one_of_two_arguments_is_not_confused():
    cache = OperationCache()
    add = torch.ops.aten.add.out
    with cache.fake_mode:
        x, y = torch.empty(3), torch.empty(3)
        assert cache.run(add, (x, x), {"out": x})[0] is x
        assert cache.run(add, (x, x), {"out": y})[0] is y
        assert cache.run(add, (x, y), {"out": y})[0] is y


def test_repeated_results_are_tensors_of_their_own():
    cache = OperationCache()
    with cache.fake_mode:
        x = torch.empty(3)
        add = torch.ops.aten.add.Tensor
        computed, repeated, again = (cache.run(add, (x, x), {})[0] for _ in range(3))
    assert len({id(tensor.untyped_storage()) for tensor in (computed, repeated, again)}) == 3
    for tensor in (repeated, again):
        assert type(tensor) is type(computed)
        assert vars(tensor) == vars(computed)
        assert torch._C._dispatch_keys(tensor) == torch._C._dispatch_keys(computed)


def test_operations_of_a_repeated_product_are_counted_again():
    with FakeValueMode(OperationCache()) as values:
        x, y = torch.empty(2, 3), torch.empty(3, 5)
        for _ in range(3):
            x @ y
    assert values.work.work().flops == {"float32": 3 * 2 * 2 * 3 * 5}


def test_repeated_operation_runs_no_code_of_the_compiler_or_of_the_fake_mode():
    """Both together took a sixth of the time of a search."""
    called = set[tuple[str, str]]()

    def profile(frame, event, arg):
        if event == "call":
            called.add((frame.f_code.co_filename.rpartition("site-packages/")[2], frame.f_code.co_name))

    with FakeValueMode(OperationCache()) as values, values.counted_by(LiveBytes(fake=True)):
        x = torch.empty(3)
        results = [x + 1, x + 1]
        sys.setprofile(profile)
        try:
            results.append(x + 1)
        finally:
            sys.setprofile(None)
    assert any(name == "__torch_dispatch__" for _, name in called)
    slow = {"torch/_dynamo/eval_frame.py": "_fn", "torch/_compile.py": "inner", "torch/_subclasses/fake_tensor.py": "__new__"}
    assert called & {*slow.items(), ("torch/_subclasses/fake_tensor.py", "dispatch")} == set()
