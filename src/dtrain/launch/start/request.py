"""What is to be started: a rank, or the process that serves the ranks' store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dtrain import wire

STORE_ID = -1
"""The id of the store's process among those of the ranks, which are their numbers."""

VARIABLES = {"pulse": wire.PULSE_FD, "ask": wire.ASK_FD}
"""Descriptors that a process knows by a variable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One process. ``fds`` are named ``stdin``, ``stdout``, ``stderr``, or as in ``VARIABLES``, or ``listener``."""

    id: int  # the global rank, or STORE_ID
    kind: Literal["rank", "store"]
    fds: Mapping[str, int]
    owned: frozenset[str] = frozenset()  # names of descriptors that are closed in the parent once the process has them
    environment: Mapping[str, str]  # what it has besides that of all ranks
    cores: Sequence[int] = ()  # those it may run on; empty: as its parent
    address: str = ""  # where the listener is bound, and its port
    port: int = 0

    @property
    def variables(self) -> dict[str, str]:
        """By name, the variables of those descriptors that it was given."""
        return {name: variable for name, variable in VARIABLES.items() if name in self.fds}
