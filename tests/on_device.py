"""Tests on a device: with ``DTRAIN_TEST_DEVICE=cuda`` the tensors that the core's tests make are on the GPU.

The device is torch's default device during a test, so models, batches and references of a test are all there, and dtrain
follows the tensors. Several ranks share the GPU, and gloo carries their tensors. Tests that need the host, or a collective that
gloo lacks for tensors of a GPU, are skipped with the reason.
"""

import inspect
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parent
DEVICE = os.environ.get("DTRAIN_TEST_DEVICE")
ROOMS = (
    "battery", "checkpoint", "data", "memory", "monitors", "optim", "profiling", "shard", "step", "surgery", "transforms",
)  # fmt: skip

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
# Names that the ranks of a test use if gloo cannot carry their tensors from a GPU.
NOT_OF_GLOO = dict.fromkeys(
    ("send", "recv", "isend", "irecv", "batch_isend_irecv", "all_gather_coalesced"),
    "gloo lacks this for tensors of a GPU",
)


def reason_to_skip(item: pytest.Item) -> str | None:
    """Return the reason why ``item`` cannot run on the device; None if it can."""
    if item.get_closest_marker("gpu") is not None:
        return None
    if item.path.relative_to(TESTS).parts[0] not in ROOMS:
        return "has no part of the core on a device"
    if not torch.get_device_module(DEVICE).is_available():
        return f"no {str(DEVICE).upper()} device"
    assert isinstance(item, pytest.Function)
    reasons = OF_THE_HOST | NOT_OF_GLOO if "ranks" in item.fixturenames else OF_THE_HOST
    names = names_used(item.function)
    return next((reason for name, reason in reasons.items() if name in names), None)


def names_used(function: Callable[..., object]) -> set[str]:
    """Return the names that ``function`` uses, and those that the functions of its file use that it names."""
    found: set[str] = set()
    waiting = [function]
    while waiting:
        names = set(waiting.pop().__code__.co_names) - found
        found |= names
        known = (function.__globals__.get(name) for name in names)
        waiting += [each for each in known if inspect.isfunction(each) and each.__module__ == function.__module__]
    return found


def skip_tests_of_the_host(items: list[pytest.Item]) -> None:
    """Mark the tests that cannot run on the device, if there is one."""
    for item in items if DEVICE else []:
        if (reason := reason_to_skip(item)) is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
