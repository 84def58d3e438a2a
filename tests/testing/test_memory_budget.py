"""memory_budget: the count is the profiler's, an allocation beyond the budget fails, and frees all its memory."""

import copy
import gc
import threading
import time

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from dtrain.dist.collectives import all_gather_json, all_gather_numbers
from dtrain.dist.mesh import build_mesh
from dtrain.errors import ConfigError
from dtrain.memory.device_memory import get_device_memory, is_out_of_memory
from dtrain.shard.fsdp import shard_model
from dtrain.shard.fsdp2_private import reset_iteration
from dtrain.testing import count_collectives, count_host_syncs, inject_fault, memory_budget
from dtrain.testing.checks import UNLIMITED, MemoryBudget
from dtrain.testing.fault_injection import FAULT_POINTS, patch_calls
from testing.peaks import local_tensors, profiled_peak

PLENTY = 1 << 40
FLOAT = 4


class Attention(nn.Module):
    """One block over tokens, with its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.norm = nn.LayerNorm(32)
        self.inputs, self.outputs, self.head = nn.Linear(32, 96), nn.Linear(32, 32), nn.Linear(32, 50)
        self.dropout = nn.Dropout(0.1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        q, k, v = self.inputs(self.norm(x)).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(x + self.dropout(self.outputs(mixed))).flatten(0, 1), ids.flatten())


def mlp() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)), torch.randn(64, 32)


def convolution() -> tuple[nn.Module, Tensor]:
    layers = [layer for width in (3, 8) for layer in (nn.Conv2d(width, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())]
    return nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 64, 10)), torch.randn(16, 3, 16, 16)


def attention() -> tuple[nn.Module, Tensor]:
    return Attention(), torch.randint(0, 50, (4, 32))


MODELS = {"mlp": mlp, "convolution": convolution, "attention": attention}
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, momentum=0.9),
    "adamw": torch.optim.AdamW,
    "adamw_foreach": lambda params: torch.optim.AdamW(params, foreach=True),
    "adamw_fused": lambda params: torch.optim.AdamW(params, fused=True),
}


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_budget_peak_matches_the_profiler(make, optimizer):
    model, x = make()
    chosen = optimizer(model.parameters())
    one_step(model, chosen, x)
    expected = profiled_peak(lambda: one_step(model, chosen, x))
    with memory_budget(PLENTY, existing=[x, *local_tensors(model, chosen)]) as budget:
        before = budget.live
        one_step(model, chosen, x)
        assert budget.live == before
        actual = budget.peak - before
    if make is convolution:  # its kernels copy their inputs into a layout of their own, which no code outside sees
        assert 0.8 * expected < actual < expected
    else:
        assert actual == expected


def test_first_step_counts_optimizer_state():
    model, x = mlp()
    size = sum(p.nbytes for p in model.parameters())
    with memory_budget(PLENTY, existing=model.parameters()) as budget:
        optimizer = torch.optim.AdamW(model.parameters())
        one_step(model, optimizer, x)
        assert len(optimizer.state) == 4
        assert 0 <= budget.live - 3 * size - x.nbytes <= 4 * FLOAT, "parameters, two moments, and the numbers of steps"


def two_peaks(strategy: str, axes: dict[str, int]) -> list:
    """Return peaks of steps by the profiler, peaks by the budget, and the bytes that the steps have left, on this rank."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(3)])
    model = shard_model(model, build_mesh(**axes), strategy=strategy, blocks=(nn.Linear,))
    optimizer, x = torch.optim.AdamW(model.parameters()), torch.randn(32, 64)
    one_step(model, optimizer, x)
    looks, peaks = [], []
    for _ in range(60):
        looks += profiled(model, optimizer, x)
        if all(row[0] for row in all_gather_numbers([len(looks)], caller="test")):
            break
    with memory_budget(PLENTY, existing=[x, *local_tensors(model, optimizer)]) as budget:
        before = budget.live
        for _ in range(12):
            budget.reset()
            one_step(model, optimizer, x)
            peaks.append(budget.peak - before)
        return [looks, peaks, settled(budget, before) - before]


def profiled(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> list[int]:
    """A step's peak by the profiler; nothing where it has not seen all of it."""
    try:
        return [profiled_peak(lambda: one_step(model, optimizer, x), tries=1)]
    except AssertionError:
        return []


def agree(looks: list[int], peaks: list[int], left: int) -> bool:
    """Check that the profiler has seen the whole step, the peaks are alike, and nothing is left."""
    # The lowest of each: a thread of gloo may hold sent tensors for a little longer.
    return bool(looks) and min(peaks) == pytest.approx(min(looks), rel=0.01) and left == 0


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "replicate"])
def test_sharded_model_peak_matches_the_profiler(ranks, strategy):
    for looks, peaks, left in ranks(2).run(two_peaks, strategy, {}):
        assert agree(looks, peaks, left), (looks, peaks, left)


@pytest.mark.slow
def test_hybrid_shard_peak_matches_the_profiler(ranks):
    for looks, peaks, left in ranks(4).run(two_peaks, "hybrid_shard", {"dp_replicate": 2, "dp_shard": 2}):
        assert agree(looks, peaks, left), (looks, peaks, left)


def test_allocation_beyond_the_budget_raises_and_is_freed():
    with memory_budget(100) as budget:
        kept = torch.zeros(10)
        with pytest.raises(torch.OutOfMemoryError) as refused:
            kept.repeat(2)
        assert (budget.live, budget.peak, budget.refused) == (40, 40, 1)
        assert torch.zeros(15).nbytes == 60, "to the byte"
    assert is_out_of_memory(refused.value)
    assert str(refused.value) == (
        "CPU out of memory. Tried to allocate 80 B. The memory budget of rank 0 is 100 B, of which 60 B is free; "
        "its tensors hold 40 B, at most 40 B."
    )


BEFORE = torch.ones(30)
FROM_OUTSIDE = {
    "python": lambda: torch.tensor([1.0] * 30),
    "deep_copy": lambda: copy.deepcopy(BEFORE),
    "storage": lambda: torch.zeros(0).set_(torch.UntypedStorage(120)),
}


@pytest.mark.parametrize("make", FROM_OUTSIDE.values(), ids=FROM_OUTSIDE)
def test_externally_allocated_tensor_memory_is_refused(make):
    """It is allocated before the dispatcher hears of it, and refused when it does."""
    with memory_budget(100) as budget:
        with pytest.raises(torch.OutOfMemoryError):
            make()
        assert (budget.live, budget.refused) == (0, 1)


def test_oom_message_uses_readable_units():
    with memory_budget(3 << 19) as budget:
        with pytest.raises(torch.OutOfMemoryError, match=r"allocate 4 MiB.* is 1\.5 MiB, .* 1\.49 MiB is free; .* 10 KiB"):
            (torch.zeros(2560), torch.zeros(1 << 20))
        assert "refused=1" in repr(budget)


def test_lowered_limit_applies_to_the_next_allocation():
    with memory_budget(100) as budget:
        kept = torch.zeros(20)
        budget.limit = 50
        assert (budget.live, budget.limit, kept.add_(1).sum == 0) == (80, 50, False)
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(1)
        budget.limit = 84
        torch.zeros(1)
        assert budget.refused == 1


def grow_by_resize(tensor: Tensor) -> None:
    tensor.resize_(30)


def grow_storage(tensor: Tensor) -> None:
    tensor.untyped_storage().resize_(120)


def grow_by_out(tensor: Tensor) -> None:
    torch.cat([tensor[:0], torch.zeros(15), torch.zeros(0)], out=tensor[:0])
    torch.add(torch.zeros(1).expand(30), 1, out=tensor.resize_(0))


@pytest.mark.parametrize("grow", [grow_by_resize, grow_storage, grow_by_out])
def test_refused_storage_growth_keeps_the_old_storage(grow):
    with memory_budget(159) as budget:
        kept = torch.ones(10)
        with pytest.raises(torch.OutOfMemoryError):
            grow(kept)
        assert budget.live == kept.untyped_storage().nbytes() == 40
        assert kept.numel() in (0, 10)
        assert budget.peak <= 159


def spend(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    checkpoint(model, x, use_reentrant=False).sum().backward()
    optimizer.step()


def test_failed_step_frees_its_memory():
    """The budget is lowered to fail at the first allocation of a step, then at the next level, and so on through all phases."""
    model, x = mlp()
    phases, spare = set(), 0
    gc.collect()
    gc.disable()  # memory must be free at once, not when rings of references are found
    try:
        with memory_budget(PLENTY, existing=[x, *model.parameters()]) as budget:
            level = budget.live
            while True:
                optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
                budget.limit, refused = level + spare, budget.refused
                try:
                    spend(model, optimizer, x)
                except torch.OutOfMemoryError as error:
                    phases.add(phase_of(error))
                    # The next try gets just so far that this allocation passes.
                    spare = max(spare, budget.live - level) + 1024
                budget.limit = PLENTY
                optimizer.state.clear()
                model.zero_grad()
                assert budget.live == level
                if budget.refused == refused:
                    break
    finally:
        gc.enable()
    assert phases == {"forward", "backward", "recomputation", "optimizer"}


def phase_of(error: BaseException) -> str:
    """Return the phase of the step in which an error was raised, by the functions in its traceback."""
    names, trace = set(), error.__traceback__
    while trace is not None:
        names.add(trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    if "step" in names:
        return "optimizer"
    if "backward" not in names:
        return "forward"
    return "recomputation" if "recompute_fn" in names or "unpack_hook" in names else "backward"


def fail_at(point: str) -> list:
    """Run out of memory on both ranks where FSDP2 allocates for a collective; return the held bytes before and after it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model = shard_model(model, build_mesh(), strategy="full_shard", blocks=(nn.Linear,))
    optimizer, x = torch.optim.AdamW(model.parameters()), torch.randn(4, 64)
    one_step(model, optimizer, x)
    with memory_budget(PLENTY, existing=[x, *local_tensors(model, optimizer)]) as budget:

        def no_more() -> None:
            budget.limit = 0  # not the live bytes: a rank for which gloo drops a tensor just now would go on, into a collective

        level = budget.live  # before any collective, whose tensors gloo may hold for a little longer
        one_step(model, optimizer, x)
        with patch_calls(FAULT_POINTS[point], before=no_more), pytest.raises(torch.OutOfMemoryError):
            one_step(model, optimizer, x)
        refused, budget.limit = budget.refused, PLENTY
        reset_iteration(model)
        model.zero_grad()
        after = settled(budget, level)
        one_step(model, optimizer, x)
        return [refused, level, after, settled(budget, level)]


def settled(budget: MemoryBudget, level: int) -> int:
    """Return the bytes that are held once a gloo thread has dropped its messages, for which no caller waits."""
    end = time.monotonic() + 90
    while budget.live != level and time.monotonic() < end:
        time.sleep(0.01)
    return budget.live


@pytest.mark.parametrize("point", ["gather", "reduce"])
def test_failed_sharded_step_restores_live_memory(ranks, point):
    for refused, level, after, later in ranks(2).run(fail_at, point):
        assert (refused, after, later) == (1, level, level)


def read_budgets(kind: str) -> list:
    given = {"each": [100, 200], "mapping": {1: 200}, "one": 100}[kind]
    options = {"rank": 1} if kind == "one" else {}
    with memory_budget(given, **options) as budget:
        try:
            torch.zeros(30)
        except torch.OutOfMemoryError as error:
            return [budget.limit, str(error)]
        return [budget.limit, ""]


@pytest.mark.parametrize(
    ("kind", "limits", "refused"),
    [
        ("each", [100, 200], [True, False]),
        ("mapping", [UNLIMITED, 200], [False, False]),
        ("one", [UNLIMITED, 100], [False, True]),
    ],
)
def test_each_rank_has_its_own_budget(ranks, kind, limits, refused):
    answers = ranks(2).run(read_budgets, kind)
    assert [limit for limit, _ in answers] == limits
    assert [f"budget of rank {rank} " in message for rank, (_, message) in enumerate(answers)] == refused


def refuse_collectives() -> list:
    """Functional collectives make their result themselves; return the bytes that pass the budget, and those held at the end."""
    name, x = torch.distributed.group.WORLD.group_name, torch.ones(8)
    run = torch.ops._c10d_functional
    calls = [
        lambda: run.all_gather_into_tensor(x, 2, name),
        lambda: run.all_gather_into_tensor_coalesced([x, x], 2, name),
        lambda: run.all_reduce(x, "sum", name),
        lambda: run.reduce_scatter_tensor(x, "sum", 2, name),
        lambda: run.all_to_all_single(x, [4, 4], [4, 4], name),
    ]
    with count_collectives() as seen, memory_budget(PLENTY, existing=[x]) as budget:
        for call in calls:
            budget.limit = budget.live + 15
            with pytest.raises(torch.OutOfMemoryError):
                call()
        refused = seen.counts()
        for call in calls:
            budget.limit = PLENTY
            done = call()
            for result in done if isinstance(done, list) else [done]:
                run.wait_tensor(result).add_(1)
            del done, result
        return [refused, sum(seen.counts()["training"].values()), settled(budget, x.nbytes)]


def test_oversized_collective_is_refused_before_it_is_issued(ranks):
    assert ranks(2).run(refuse_collectives) == [[{}, 5, 32]] * 2


def agree_without_memory() -> list:
    with memory_budget(0) as budget:
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(1)
        rows = all_gather_json({"refused": budget.refused})
        return [rows, all_gather_numbers([1.0, 2.0], caller="test"), budget.refused]


def test_control_collectives_work_with_an_exhausted_budget(ranks):
    assert ranks(2).run(agree_without_memory) == [[[{"refused": 1}] * 2, [[1.0, 2.0]] * 2, 1]] * 2


def test_budget_is_the_memory_gauge_of_every_device():
    with memory_budget(1000) as budget:
        gauge = get_device_memory(torch.device("cuda", 0))
        assert gauge is budget
        kept = torch.zeros(10)
        torch.zeros(20)
        reading = gauge.read()
        assert (reading.live, reading.peak, reading.capacity, reading.free) == (40, 120, 1000, 960)
        assert (reading.used_by_others, reading.alloc_retries) == (0, 0)
        gauge.reset()
        gauge.release()
        assert gauge.read().peak == kept.nbytes
    assert get_device_memory(torch.device("cpu")) is None


def test_nested_budgets_refuse_by_the_tighter_limit():
    with memory_budget(100) as outer:
        with memory_budget(1000) as inner, pytest.raises(torch.OutOfMemoryError):
            torch.zeros(30)
        assert (outer.refused, inner.refused, outer.live, inner.live) == (1, 0, 0, 0)
        with memory_budget(50) as inner:
            kept = torch.zeros(0)
            with pytest.raises(torch.OutOfMemoryError):
                kept.untyped_storage().resize_(60)
        assert (outer.refused, inner.refused, outer.live, inner.live) == (1, 1, 0, 0)


@pytest.mark.parametrize("counter_inside", [True, False])
def test_budget_combines_with_other_counters_in_any_order(counter_inside):
    contexts = [memory_budget(100), count_host_syncs()]
    first, second = contexts if counter_inside else reversed(contexts)
    with first as one, second as two:
        budget, syncs = (one, two) if counter_inside else (two, one)
        kept = torch.zeros(10)
        assert (float(kept[0]), budget.live, syncs.count) == (0.0, 40, 1)
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(100)


@pytest.mark.parametrize("counter", [lambda: memory_budget(PLENTY), count_collectives, count_host_syncs])
def test_parameter_data_is_usable_inside_counters(counter):
    """torch names the class of a parameter to a dispatch mode here, and nowhere else."""
    parameter = nn.Parameter(torch.ones(2))
    with counter():
        parameter.data.mul_(2)
    assert parameter.tolist() == [2.0, 2.0]


def test_other_errors_propagate_and_the_context_is_cleaned_up():
    with pytest.raises(OSError, match="injected"), memory_budget(PLENTY), inject_fault("raise", at="forward"):
        nn.Linear(2, 2)(torch.ones(2))
    assert get_device_memory(torch.device("cpu")) is None
    assert "resize_" not in vars(torch.UntypedStorage)


def test_budget_does_not_apply_to_other_threads():
    tensors = []
    with memory_budget(10):
        thread = threading.Thread(target=lambda: tensors.append(torch.zeros(100)))
        thread.start()
        thread.join(90)
    assert tensors[0].nbytes == 400


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        (-1, {}, "max_bytes must be an integer of at least 0, got -1"),
        (1.5, {}, "got 1.5"),
        ("1GiB", {}, "got '1GiB'"),
        (True, {}, "got True"),
        ([1, 2], {}, "max_bytes must have a limit for each of 1 ranks"),
        ({1: 5}, {}, "max_bytes must have a limit for each of 1 ranks"),
        ([-1], {}, "got -1"),
        (10, {"rank": 1}, "rank must be an integer from 0 to 0, got 1"),
        ([10], {"rank": 0}, "Leave out rank"),
    ],
)
def test_invalid_budget_is_refused(given, options, message):
    with pytest.raises(ConfigError, match=message), memory_budget(given, **options):
        pass


def test_invalid_limit_is_refused():
    budget = MemoryBudget(10)
    with pytest.raises(ConfigError, match=r"got 2\.5"):
        budget.limit = 2.5
    assert budget.limit == 10


def held_by_dtensors() -> list[int]:
    """Bytes held after each of: a tensor that is cut over the ranks, twice it, and all of it here."""
    mesh = build_mesh()["dp_shard"]
    with memory_budget(PLENTY) as budget:
        cut = DTensor.from_local(torch.ones(4, 4), mesh, [Shard(0)])
        sizes = [budget.live]
        twice = cut * 2
        sizes.append(budget.live)
        whole = twice.full_tensor()
        del cut, twice
        return [*sizes, settled(budget, whole.nbytes)]


def test_dtensor_counts_only_its_local_shard(ranks):
    assert ranks(2).run(held_by_dtensors) == [[64, 128, 128]] * 2
