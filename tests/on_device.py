"""Tests on a device: with ``DTRAIN_TEST_DEVICE=cuda`` the tensors that the core's tests make are on the GPU.

The device is torch's default device during a test, so models, batches and references of a test are all there, and dtrain
follows the tensors. Tests that need the host, or a GPU for each of several ranks, are skipped with the reason.
"""

import os
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parent
DEVICE = os.environ.get("DTRAIN_TEST_DEVICE")
ROOMS = (
    "battery", "checkpoint", "data", "memory", "monitors", "optim", "profiling", "shard", "step", "surgery", "transforms",
)  # fmt: skip

SEVERAL_RANKS = "several ranks need a GPU each"
# Names that a test uses if it is about the host.
OF_THE_HOST = {
    "memory_budget": "is about a budget of the host's memory",
    "count_host_syncs": "counts the waits for tensors of a CPU",
    "LiveBytes": "counts the bytes of tensors of a CPU",
    "subprocess": "is about processes",
    "fork": "is about processes: one that has started CUDA cannot fork",
    "spawn": "is about processes: one that has started CUDA cannot fork",
    "from_numpy": "shares the memory of NumPy",
}


def reason_to_skip(item: pytest.Item) -> str | None:
    """Return the reason why ``item`` cannot run on the device; None if it can."""
    if item.get_closest_marker("gpu") is not None:
        return None
    if item.path.relative_to(TESTS).parts[0] not in ROOMS:
        return "has no part of the core on a device"
    if not torch.get_device_module(DEVICE).is_available():
        return f"no {str(DEVICE).upper()} device"
    if "ranks" in item.fixturenames:
        return SEVERAL_RANKS
    assert isinstance(item, pytest.Function)
    names = set(item.function.__code__.co_names)
    return next((reason for name, reason in OF_THE_HOST.items() if name in names), None)


def skip_tests_of_the_host(items: list[pytest.Item]) -> None:
    """Mark the tests that cannot run on the device, if there is one."""
    for item in items if DEVICE else []:
        if (reason := reason_to_skip(item)) is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
