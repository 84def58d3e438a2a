"""The code asks ``dtrain.device`` and ``torch.accelerator``, so any accelerator works; uses of ``torch.cuda`` have a reason."""

import ast
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils._device import _device_constructors

import dtrain
import dtrain as dt
from dtrain import device as device_module
from dtrain.checkpoint.data_file import StagedFiles
from dtrain.device import (
    backend_function,
    collective_backend,
    default_generators,
    device_name,
    find_accelerator,
    is_accelerator,
    started_accelerator,
)
from dtrain.dist.collectives import all_gather_json, all_gather_numbers, reduce_sum
from dtrain.dist.init import init_dist
from dtrain.dist.rendezvous import select_device
from dtrain.dist.rng import RNGSnapshot, hash_rng_state, rng_state, set_rng_state
from dtrain.errors import ConfigError, RankError
from dtrain.memory.device_memory import MemoryStats, get_device_memory, release_cached_memory
from dtrain.monitors.hardware import local_memory_stats, system_metrics
from dtrain.run_context import AsyncScalar
from dtrain.step.oom_guard import MicrobatchProber
from dtrain.transforms.batches.image_ops import to_device_async
from dtrain.transforms.precision import _check_device
from dtrain.typing import index_tensor
from on_device import names_used

SOURCE = Path(dtrain.__file__).parent
XPU = torch.device("xpu", 0)

# Uses of ``torch.cuda`` in code, by module, with the reason for each.
USES_OF_CUDA = {
    "cli/torch_probe.py": (4, "`dtrain env` compares torch's build for CUDA, and its NCCL, with NVIDIA's driver"),
    "dist/rng.py": (2, "a variable of cuBLAS"),
    "experts.py": (1, "torch's grouped product on a GPU needs a compute capability, a number of NVIDIA's GPUs"),
    "memory/device_memory.py": (1, "the snapshot of allocations is a format of the CUDA allocator"),
    "profiling/profiler.py": (2, "the history of allocations exists on CUDA"),
    "prove/overrides.py": (1, "a script may name a GPU, which the CPU replaces"),
    "shard/precision.py": (2, "compute capability is a number of NVIDIA's GPUs"),
}
# Comparisons with the device type "cuda" and reads of ``is_cuda``.
COMPARISONS_WITH_CUDA = {
    "experts.py": (1, "torch's grouped product exists on CUDA"),
    "memory/device_memory.py": (2, "the snapshot of allocations is a format of the CUDA allocator"),
    "planning/estimate.py": (1, "NCCL's buffers and batches in device memory exist on CUDA"),
    "planning/simulate.py": (2, "the plan simulates CUDA or a CPU"),
    "profiling/profiler.py": (1, "the history of allocations exists on CUDA"),
    "prove/overrides.py": (3, "a script may name a GPU, which the CPU replaces"),
    "shard/sequence_attention.py": (1, "attention of variable length exists on CUDA"),
    "shard/fsdp.py": (1, "symmetric memory exists on CUDA"),
    "surgery/normalization.py": (1, "torch's fused norms exist on CUDA"),
}


def uses_of_cuda(source: str) -> tuple[int, int]:
    """Count the uses of ``torch.cuda``, and the comparisons of a device with CUDA, outside of text."""
    nodes = list(ast.walk(ast.parse(source)))
    uses = sum(isinstance(node, ast.Attribute) and node.attr == "cuda" and is_torch(node.value) for node in nodes)
    compared = sum(
        (isinstance(node, ast.Compare) and "cuda" in [getattr(side, "value", "") for side in (node.left, *node.comparators)])
        or (isinstance(node, ast.Attribute) and node.attr == "is_cuda")
        for node in nodes
    )
    return uses, compared


def is_torch(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "torch"


def test_each_use_of_cuda_has_a_reason():
    uses, compared = Counter(), Counter()
    for path in SOURCE.rglob("*.py"):
        # The field ``cuda`` of the facts of `dtrain env` is not torch's module.
        if path.relative_to(SOURCE).as_posix() != "cli/env.py":
            name = path.relative_to(SOURCE).as_posix()
            uses[name], compared[name] = uses_of_cuda(path.read_text())
    assert +uses == {name: count for name, (count, _) in USES_OF_CUDA.items()}
    assert +compared == {name: count for name, (count, _) in COMPARISONS_WITH_CUDA.items()}


def test_new_uses_of_cuda_are_found():
    assert uses_of_cuda('if x.device.type == "cuda" or y.is_cuda:\n    torch.cuda.synchronize()\n"""torch.cuda"""') == (1, 2)


# Functions of torch whose tensors are on the default device unless the call names another; a generator is on the CPU.
FACTORIES = {function.__name__ for function in _device_constructors()} | {"Generator"}
# Uses of these functions without a device, by module, with the reason for each.
WITHOUT_DEVICE = {
    "experts.py": (["empty"] * 4 + ["full", "zeros", "zeros"], "parameters and buffers of modules are on the default device"),
    "planning/simulate.py": (["empty"], "passes on the arguments of the function that it stands for"),
    "prove/overrides.py": (["randint"], "keeps the function that a proof replaces; its call names the device"),
    "shard/materialize.py": (["empty", "empty_strided"], "recognizes calls of the model"),
    "shard/replicate.py": (["empty"], "is called with the device of the gradients"),
    "step/transform.py": (["randn"], "is called with the device of the parameter"),
}


def uses_without_device(source: str) -> list[str]:
    """List the functions of ``FACTORIES`` that are called without a device, or used without a call."""
    tree = ast.parse(source)
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    # A type in an annotation is no call.
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and is_torch(node.value)]
    return [node.attr for node in names if node.attr in FACTORIES and not names_device(node.attr, calls.get(id(node)))]


def names_device(name: str, call: ast.Call | None) -> bool:
    """Return True if a use of the factory ``name`` says where its tensor is; ``call`` is None for a use without a call."""
    if name == "Generator":
        return call is None or bool(call.args or call.keywords)
    return call is not None and any(keyword.arg == "device" for keyword in call.keywords)


def test_each_tensor_and_generator_names_its_device():
    """A user's default device moves no tensor of dtrain."""
    uses = {path.relative_to(SOURCE).as_posix(): uses_without_device(path.read_text()) for path in SOURCE.rglob("*.py")}
    assert {name: sorted(used) for name, used in uses.items() if used} == {
        name: used for name, (used, _) in WITHOUT_DEVICE.items()
    }


def test_new_uses_without_device_are_found():
    source = "x = torch.zeros(3)\ny = torch.ones(2, device=d)\nz: torch.Generator = torch.Generator()\nw = torch.randn"
    assert sorted(uses_without_device(source)) == ["Generator", "randn", "zeros"]
    assert uses_without_device('torch.Generator("cpu"), torch.Generator(device=d), x.new_zeros(3), np.zeros(3)') == []


class Stream:
    """A stream of the simulated accelerator, which records its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def record_event(self) -> SimpleNamespace:
        self.calls.append("record_event")
        return SimpleNamespace(synchronize=lambda: self.calls.append("synchronize"))


@pytest.fixture
def backend(monkeypatch):
    """An XPU of which this process has started two, with the functions of torch.xpu. No call reaches ``torch.cuda``."""
    generators = (torch.Generator(), torch.Generator())
    module = SimpleNamespace(
        chosen=[],
        is_initialized=lambda: True,
        get_device_name=lambda device: "Data Center GPU Max 1550",
        default_generators=generators,
        get_rng_state=lambda device=XPU: generators[0].get_state(),
        set_rng_state=lambda state: generators[0].set_state(state),
        is_bf16_supported=lambda: False,
        retries=0,
    )
    for name, function in {
        "current_accelerator": lambda check_available=False: torch.device("xpu"),
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "set_device_index": module.chosen.append,
        "memory_stats": lambda device=None: {"allocated_bytes.all.current": 3, "num_alloc_retries": module.retries},
        "get_memory_info": lambda device=None: (60, 100),
    }.items():
        monkeypatch.setattr(torch.accelerator, name, function)
    monkeypatch.setattr(torch, "get_device_module", lambda device=None: module)
    for name in ("is_available", "device_count", "set_device", "memory_stats", "get_rng_state", "get_device_name", "Event"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: pytest.fail(f"torch.cuda.{name} was called"))
    device_module.counts_memory.cache_clear()
    yield module
    device_module.counts_memory.cache_clear()


def test_ranks_use_the_accelerator_of_the_machine(backend):
    assert select_device(None, {"local_rank": 1, "local_world_size": 2}) == torch.device("xpu", 1)
    assert backend.chosen == [torch.device("xpu", 1)]
    assert select_device("cpu", {"local_rank": 1, "local_world_size": 2}).type == "cpu"
    with pytest.raises(ConfigError, match="init_dist: device='xpu' needs one GPU per rank, got 2 GPUs for 3 ranks"):
        select_device("xpu", {"local_rank": 1, "local_world_size": 3})


def test_ranks_over_gloo_share_an_accelerator_only_when_asked(backend):
    devices = [select_device("xpu", {"local_rank": rank, "local_world_size": 5}, share=True).index for rank in range(5)]
    assert devices == [0, 1, 0, 1, 0]
    with pytest.warns(UserWarning, match="running on the CPU with gloo"):
        assert select_device(None, {"local_rank": 0, "local_world_size": 5}, share=True).type == "cpu"


@pytest.mark.parametrize(
    ("gpus", "advice"),
    [(2, r"Start at most 2 ranks, or pass backend='gloo' so that ranks share"), (0, r"Pass device='cpu' or None\.")],
)
def test_too_few_gpus_are_refused_with_advice(backend, monkeypatch, gpus, advice):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: gpus)
    with pytest.raises(ConfigError, match=rf"needs one GPU per rank, got {gpus} GPUs for 3 ranks on this node\. {advice}"):
        select_device("xpu", {"local_rank": 1, "local_world_size": 3}, share=gpus == 0)


def test_init_dist_over_gloo_opens_groups_on_the_accelerator(backend):
    with init_dist(device="xpu", backend="gloo") as info:
        assert (info.device, info.backend) == (torch.device("xpu", 0), "gloo")


def default_device_of_a_rank() -> list[str]:
    with torch.device("meta"):
        moved = torch.empty(1).device.type
    return [str(torch.get_default_device()), torch.empty(1).device.type, moved, torch.distributed.get_backend()]


def test_tensors_of_ranks_are_on_their_device():
    """On a machine without GPU the device is the CPU. A device that the ranks cannot use fails and is not left out."""
    with dt.testing.Ranks(2, device="cpu") as ranks:
        assert ranks.run(default_device_of_a_rank) == [["cpu", "cpu", "meta", "gloo"]] * 2
    if find_accelerator() is None:
        with pytest.raises(RankError, match="before all ranks were ready"), dt.testing.Ranks(2, device="cuda") as ranks:
            ranks.run(default_device_of_a_rank)


def sends_to_a_rank() -> None:
    torch.distributed.send(torch.ones(1), 1)


def test_names_of_functions_that_ranks_run_are_found():
    assert {"sends_to_a_rank", "send"} <= names_used(lambda ranks: ranks(2).run(sends_to_a_rank))
    assert "send" not in names_used(default_device_of_a_rank)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cuda"}, "init_dist: device must be 'cpu', 'xpu' or None, got 'cuda'"),
        ({"backend": "nccl"}, "init_dist: backend must be 'gloo', 'xccl' or None, got 'nccl'"),
    ],
)
def test_names_of_another_accelerator_are_refused(backend, options, message):
    with pytest.raises(ConfigError, match=message):
        init_dist(**options)


def test_backend_of_collectives_is_the_devices():
    assert [collective_backend(torch.device(kind)) for kind in ("cuda", "xpu")] == ["nccl", "xccl"]
    with pytest.raises(ConfigError, match=r"init_dist: device must have a backend for collectives, got"):
        collective_backend(torch.device("privateuseone"))


def test_random_numbers_of_the_accelerator_are_saved_and_restored(backend):
    state, snapshot, before = rng_state(), RNGSnapshot(), hash_rng_state(XPU)
    backend.default_generators[0].manual_seed(5)
    assert hash_rng_state(XPU) != before
    set_rng_state(state)
    assert hash_rng_state(XPU) == before
    assert "cuda" not in state
    backend.default_generators[1].manual_seed(6)
    snapshot.restore()
    assert [generator.initial_seed() for generator in backend.default_generators] == [torch.Generator().initial_seed()] * 2


def test_memory_is_that_of_the_allocator(backend, monkeypatch):
    reading = MemoryStats(live=3, peak=0, capacity=60, used_by_others=40, alloc_retries=0)
    assert get_device_memory(XPU).read() == reading
    backend.get_per_process_memory_fraction = lambda device: 0.5
    assert get_device_memory(XPU).read().capacity == 50
    assert local_memory_stats(SimpleNamespace(device=XPU))["memory/allocated_bytes"] == 3.0


def test_memory_of_a_backend_without_counters_is_left_out(backend, monkeypatch):
    def refuse(device=None):
        raise RuntimeError("Allocator for xpu is not a DeviceAllocator.")

    monkeypatch.setattr(torch.accelerator, "memory_stats", refuse)
    assert get_device_memory(XPU) is None
    release_cached_memory(XPU)
    assert not [name for name in local_memory_stats(SimpleNamespace(device=XPU)) if "rss" not in name]


def test_retries_of_the_allocator_are_counted(backend):
    prober = SimpleNamespace(device=XPU, allocator_retries=0)
    backend.retries = 1
    assert MicrobatchProber.allocator_retried(prober)
    assert not MicrobatchProber.allocator_retried(prober)


def test_figures_that_the_backend_lacks_are_left_out(backend):
    backend.utilization, backend.temperature = (lambda index: 50 + 10 * index), (lambda index: 70 + index)
    readings = system_metrics()(SimpleNamespace(device=XPU))
    assert {name: value for name, value in readings.items() if "gpu" in name} == {
        "system/gpu_percent": 50.0,
        "system/gpu_temperature_c": 70.0,
    }


def test_name_and_support_are_those_of_the_backend(backend):
    assert device_name(XPU) == "Data Center GPU Max 1550"
    assert device_name(torch.device("cpu")) == "cpu"
    assert started_accelerator() == "xpu"
    assert tuple(default_generators()) == backend.default_generators
    assert backend_function(XPU, "power_draw") is None
    with pytest.raises(ConfigError, match="autocast: dtype must be supported on the device, got bf16 on xpu"):
        _check_device(XPU, "bf16")
    backend.is_initialized = lambda: False
    assert started_accelerator() is None
    assert default_generators() == ()


def test_copies_wait_for_events_of_the_accelerator(monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "Event", lambda device: asked.append(device))
    monkeypatch.setattr(torch, "zeros", lambda *_, pin_memory, zeros=torch.zeros, **kept: zeros((), **kept))
    AsyncScalar(XPU)
    assert asked == [XPU]
    stream = Stream()
    StagedFiles(files={}, copy_events=[stream.record_event()], memory=(), pool=None).wait()
    assert stream.calls == ["record_event", "synchronize"]


def test_cpu_meta_and_mps_have_no_streams():
    assert [kind for kind in ("cpu", "meta", "mps", "cuda", "xpu") if is_accelerator(torch.device(kind))] == ["cuda", "xpu"]


@pytest.fixture
def other_default():
    """A default device whose numbers cannot be read: a tensor for the host that is made there fails."""
    with torch.device("meta"):
        yield


def sum_loss(model: torch.nn.Module, batch: torch.Tensor) -> dt.LossSum:
    return dt.LossSum(total=model(batch).square().sum(), weight=len(batch))


def new_state(step: dt.step.Step, loader: dt.data.Loader) -> dt.TrainState:
    model = torch.nn.Linear(2, 1, device="cpu")
    # The steps of Adam would be on the default device, because torch makes them there.
    return step.init(model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9), loader=loader)


def test_training_keeps_its_own_tensors_on_the_host(other_default, tmp_path):
    """A user's call of ``torch.set_default_device`` moves no tensor that dtrain needs on the host."""
    transforms = [dt.transforms.clip_by_norm(1.0), dt.transforms.ema(0.9)]
    step = dt.compose_step(sum_loss, transforms, grad=partial(dt.microbatch_step, microbatch_size=2))
    loader = dt.build_loader(torch.ones(12, 2, device="cpu"), global_batch_size=4, seed=0, transform=lambda row, seed: row)
    state = new_state(step, loader)
    for batch in loader.until("4ba"):
        state, metrics = step(state, batch)
    assert dt.reduce_metrics(metrics)["loss"] > 0
    dt.save_sharded(tmp_path, state)
    loaded = dt.load_sharded(tmp_path, new_state(step, loader))
    assert loaded.step == 4
    assert all(map(torch.equal, loaded.model.parameters(), state.model.parameters()))


def test_small_helpers_keep_their_tensors_on_the_host(other_default):
    assert dt.dist.generator("cpu", 1).device.type == "cpu"
    scalar = AsyncScalar(torch.device("cpu"))
    scalar.copy_from(torch.ones((), device="cpu"))
    assert scalar.try_read() == 1.0
    assert index_tensor([1, 2], torch.device("cpu")).tolist() == [1, 2]
    assert to_device_async([1.0], torch.float32, torch.device("cpu")).tolist() == [1.0]
    set_rng_state(rng_state())
    with init_dist(device="cpu") as info:
        assert all_gather_json(1, caller="test") == [1]
        assert all_gather_numbers([1.0], caller="test") == [[1.0]]
        assert reduce_sum(torch.ones((), device="cpu")).item() == 1.0
        assert info.world_size == 1
