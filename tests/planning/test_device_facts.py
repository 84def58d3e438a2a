"""Facts of a device: measured by a gauge of its memory, stored in a file, and added to a plan."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from msgspec.structs import asdict

from dtrain.dist.init import init_dist
from dtrain.errors import ConfigError
from dtrain.memory.device_memory import MemoryStats, use_device_memory
from dtrain.planning.device_facts import ASSUMED_FACTS, DeviceFacts, measure_device
from dtrain.planning.estimate import estimate_memory, library_memory
from dtrain.planning.memory_trace import allocated_bytes
from planning.workloads import linears

MIB = 2**20
FACTS = DeviceFacts(device="Test 1", torch="2.13.0", workspaces=8_519_680, bytes_per_group=3 * MIB)


class Gauge:
    """Memory of a device whose products keep ``workspaces``."""

    def __init__(self, workspaces: int) -> None:
        self.readings = [1000, 1000 + workspaces]

    def reset(self) -> None: ...

    def read(self) -> MemoryStats:
        live = self.readings.pop(0)
        return MemoryStats(live=live, peak=live, capacity=2**30, used_by_others=0, alloc_retries=0)

    def release(self) -> None: ...


def test_workspaces_are_what_products_leave_in_the_allocator():
    with use_device_memory(Gauge(workspaces=64 * MIB)):
        facts = measure_device(torch.device("cpu"))
    assert facts == DeviceFacts(
        device="cpu", torch=torch.__version__, workspaces=64 * MIB, bytes_per_group=ASSUMED_FACTS.bytes_per_group
    )


def test_device_without_counted_memory_is_refused():
    with pytest.raises(ConfigError, match="measure_device: device must count its memory, got cpu"):
        measure_device(torch.device("cpu"))


def test_facts_are_the_same_after_save_and_load(tmp_path):
    path = tmp_path / "facts.json"
    FACTS.save(path)
    assert DeviceFacts.load(str(path)) == FACTS


BROKEN = {
    "no file": (None, "cannot read"),
    "no JSON": ("{", "cannot read"),
    "no object": ("[]", "must have the names bytes_per_group, device, torch, workspaces"),
    "a name is missing": (json.dumps({"workspaces": 1}), "must have the names"),
    "an unknown name": (json.dumps({**asdict(FACTS), "speed": 1}), "must have the names .*`speed`"),
    "a number as a device": (json.dumps({**asdict(FACTS), "device": 1}), r"got another content .*`\$\.device`"),
    "negative": (json.dumps({**asdict(FACTS), "workspaces": -1}), "workspaces must be an integer of at least 0, got -1"),
    "text": (json.dumps({**asdict(FACTS), "bytes_per_group": "1"}), "bytes_per_group must be an integer of at least 0"),
}


@pytest.mark.parametrize(("text", "message"), BROKEN.values(), ids=BROKEN)
def test_broken_file_is_refused(text, message, tmp_path):
    path = tmp_path / "facts.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        DeviceFacts.load(path)


ROUNDED = [
    (0, 0),
    (1, 512),
    (512, 512),
    (513, 1024),
    (MIB + 1, MIB + 512),
    (10 * MIB, 10 * MIB),
    # Up to 1 MiB of a segment of its own would be left.
    (10 * MIB + 1, 10 * MIB + 512),
    (11 * MIB, 12 * MIB),
    (11 * MIB - 512, 11 * MIB - 512),
    (33 * MIB + 5, 34 * MIB),
]


def test_allocator_rounds_sizes():
    """By hand, from the constants of torch's allocator."""
    sizes, expected = map(np.array, zip(*ROUNDED, strict=True))
    assert allocated_bytes(sizes).tolist() == expected.tolist()


def test_rounding_of_a_plan_is_counted_by_hand():
    """SGD holds a weight of 16 KiB and a bias of 256 bytes for each of 4 layers; at the peak, tensors round up as well."""
    plain = linears(optimizer=lambda params: torch.optim.SGD(params, lr=0.1, foreach=False))
    estimate = estimate_memory(plain, world_size=1, strategy="replicate", microbatch_size=2)
    # The bias, and the gradient of the bias, of each layer.
    assert estimate.rounding >= 4 * (512 - 256)
    assert estimate.rounding < 0.2 * estimate.peak


def test_facts_are_added_to_the_device_only():
    cuda, cpu = (estimate_memory(linears(), world_size=8, device=device) for device in ("cuda", "cpu"))
    groups = len({(each.group_size, each.stride) for each in cuda.traffic})
    found, assumed = library_memory(cuda, facts=FACTS), library_memory(cuda)
    assert (found.device_workspaces, found.device_collectives) == (FACTS.workspaces, groups * FACTS.bytes_per_group)
    assert found.device_rounding == cuda.rounding > 0
    assert (assumed.device_workspaces, assumed.device_collectives) == (64 * MIB, groups * 256 * MIB)
    assert found == replace(assumed, device_workspaces=found.device_workspaces, device_collectives=found.device_collectives)
    assert library_memory(cpu, facts=FACTS).device == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_products_on_a_gpu_keep_workspaces():
    with init_dist(device="cuda"):
        facts = measure_device()
    assert 0 < facts.workspaces < 2**30
    assert facts.device == torch.cuda.get_device_name()
