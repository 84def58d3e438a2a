"""Tests on a device: with ``DTRAIN_TEST_DEVICE=cuda`` the tensors that the core's tests make are on the GPU.

The device is torch's default device, so models, batches and references of a test are all there, also those that a file of
tests makes when it is imported, and dtrain follows the tensors. Several ranks share the GPU, and gloo carries their tensors.
Tests that need the host, or a collective that gloo lacks for tensors of a GPU, are skipped with the reason.
``python tests/on_device.py`` counts the tests of each room.

``DTRAIN_TEST_DEVICE=simulated`` does so on a machine without a GPU (``simulated_accelerator.py``), for tests of one process.
"""

import inspect
import os
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import simulated_accelerator

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
    "shard_order": "is about orders of samples, which are on the CPU",
}
# Names that a test uses if it needs what the simulated accelerator lacks.
NOT_SIMULATED = {
    "autocast": "is about lower precision on a device: the simulated one has none of its own",
    "compile": "the simulated accelerator has no compiler",
}
# Names that the ranks of a test use if gloo cannot carry their tensors from a GPU.
NOT_OF_GLOO = dict.fromkeys(
    ("send", "recv", "isend", "irecv", "batch_isend_irecv", "all_gather_coalesced"),
    "gloo lacks this for tensors of a GPU",
)


TOPICS = {
    **{room: (room,) for room in ROOMS},
    "optimizers": ("optim", "battery/test_optimizers.py", "step/test_torch_optimizers.py"),
    "precision": ("shard/test_precision.py", "shard/test_fp8.py", "transforms/precision"),
    "observe": ("monitors", "profiling"),
}
"""Folders and files of the rows of ``count_table``: each room, and topics that lie in several rooms."""


def reason_to_skip(item: pytest.Item, device: str) -> str | None:
    """Return the reason why ``item`` cannot run on ``device``; None if it can."""
    if item.get_closest_marker("gpu") is not None:
        return None
    if item.path.relative_to(TESTS).parts[0] not in ROOMS:
        return "has no part of the core on a device"
    if not torch.get_device_module(device).is_available():
        return f"no {device.upper()} device"
    assert isinstance(item, pytest.Function)
    reasons = OF_THE_HOST | NOT_OF_GLOO if "ranks" in item.fixturenames else OF_THE_HOST
    if device == simulated_accelerator.NAME:
        reasons = reasons | NOT_SIMULATED
        if "ranks" in item.fixturenames:
            return "gloo carries no tensors of the simulated accelerator"
    names = names_used(item.function)
    return next((reason for name, reason in reasons.items() if name in names), None)


def names_used(function: Callable[..., object]) -> set[str]:
    """Return the names that ``function`` uses, and those that the functions of its file use that it names."""
    every: set[str] = set()
    waiting = [function]
    while waiting:
        code = waiting.pop().__code__
        # An argument such as start_method="fork" is a constant.
        names = {*code.co_names, *(value for value in code.co_consts if isinstance(value, str))} - every
        every |= names
        values = (function.__globals__.get(name) for name in names)
        waiting += [
            function_used
            for function_used in values
            if inspect.isfunction(function_used) and function_used.__module__ == function.__module__
        ]
    return every


def skip_tests_of_the_host(items: list[pytest.Item]) -> None:
    """Mark the tests that cannot run on the device, if the machine has one."""
    if not DEVICE:
        return
    for item in items:
        if (reason := reason_to_skip(item, DEVICE)) is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


RANDOM_FACTORIES = frozenset({torch.rand, torch.randn, torch.randint, torch.randperm})


class DrawsOfTests(TorchFunctionMode):
    """Random tensors that a test makes without a device are drawn where the generator is, and moved to the default device.

    Without a generator they are drawn on the CPU. So a generator of the CPU serves on any device, and the numbers are those of
    a run on the CPU. dtrain's own calls are left alone: a generator of the CPU under another default device fails there as it
    does for a user.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in RANDOM_FACTORIES and kwargs.get("device") is None and is_of_tests(sys._getframe(1).f_code.co_filename):
            grad = kwargs.pop("requires_grad", False)
            generator = kwargs.get("generator")
            drawn = func(*args, **{**kwargs, "device": "cpu" if generator is None else generator.device})
            return drawn.to(torch.get_default_device()).requires_grad_(grad)
        return func(*args, **kwargs)


def use_device(device: str) -> None:
    """Make ``device`` the default device of this process, and start it if it is simulated. Mutates: torch's modes.

    A machine without the device collects the tests on the CPU, and skips them.
    """
    if device == simulated_accelerator.NAME:
        simulated_accelerator.start()
    if not torch.get_device_module(device).is_available():
        return
    torch.set_default_device(device)
    DrawsOfTests().__enter__()


def is_of_tests(file: str) -> bool:
    return file.startswith(f"{TESTS}{os.sep}")


class Counts:
    """Tests of each topic by their result on a device. A plugin of pytest that sees the collected tests."""

    def __init__(self) -> None:
        self.by_topic = {topic: Counter[str]() for topic in TOPICS}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Count the tests that a run without ``--slow`` has. The device is the CPU, which is always there."""
        for item in session.items:
            path = item.path.relative_to(TESTS)
            topics = [topic for topic, places in TOPICS.items() if any(path.is_relative_to(place) for place in places)]
            kind = kind_of(item)
            for topic in topics if kind is not None else ():
                self.by_topic[topic][kind] += 1


def kind_of(item: pytest.Item) -> str | None:
    """Return the column of ``item`` in ``count_table``; None if the test is slow."""
    if item.get_closest_marker("slow") is not None:
        return None
    if item.get_closest_marker("gpu") is not None:
        return "marked"
    if reason_to_skip(item, "cpu") is not None:
        return "host"
    return "ranks" if "ranks" in getattr(item, "fixturenames", ()) else "alone"


def count_table() -> str:
    """Collect the tests of all rooms, and return their numbers as a table in Markdown."""
    counts = Counts()
    folders = [str(TESTS / room) for room in ROOMS]
    said = StringIO()
    with redirect_stdout(said):
        code = pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", *folders], plugins=[counts])
    if code != pytest.ExitCode.OK:
        raise SystemExit(said.getvalue())
    head = ("room", "one process", "several ranks", "skipped, about the host", "marker `gpu`")
    kinds = ("alone", "ranks", "host", "marked")
    rows = [f"| {topic} | {' | '.join(f'{counted[kind]:,}' for kind in kinds)} |" for topic, counted in counts.by_topic.items()]
    return "\n".join([f"| {' | '.join(head)} |", "|" + "---|" * len(head), *rows])


if __name__ == "__main__":
    sys.path.insert(0, str(TESTS))
    print(count_table())
