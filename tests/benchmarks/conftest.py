"""Benchmarks in the process of the tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Restore the number of torch's threads, which a benchmark sets."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
