"""Agents on loopback."""

from collections.abc import Iterator

import pytest

from hosts.agents import Nodes, several


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    """``nodes.start(rank)`` starts an agent; at the end of the test all of them have to end."""
    with several() as started:
        yield started
