"""Where and as what a node's launcher meets the others. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dtrain.launch.plan import Layout

DEFAULT_TIMEOUT_S = 300.0
SILENCE_S = 10.0  # a node that is not heard of for so long is lost: its machine, its network, or its launcher


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """What this node brings to the meeting of a job's launchers. None: not known before all of them are there.

    Either ``nodes`` or ``world_size`` is known: it tells when everybody has come.
    """

    node_rank: int
    nodes: int | None
    nproc: int
    addr: str
    port: int
    base_rank: int | None = None
    world_size: int | None = None
    token: str = ""  # the same for all nodes of a job; another job at the same address is told by it
    timeout_s: float = DEFAULT_TIMEOUT_S
    silence_s: float = SILENCE_S
    fallback_addr: str = ""  # used when ``addr`` is a name that does not resolve
    hosts: tuple[str, ...] = ()  # by node rank, where a scheduler says them: they only improve messages
    facts: Mapping[str, str] = field(default_factory=dict)  # what has to be the same on all nodes, by what it is called
    run_name: str = ""  # of node 0 only: it names the run for all
    store_port: int = 0  # of node 0 only: where the ranks' store listens

    def expected_layout(self) -> Layout:
        """The place of this node as far as it is known before the meeting, which may correct it."""
        nodes = self.nodes if self.nodes is not None else max(2, (self.world_size or 0) // self.nproc)
        return Layout(
            nproc=self.nproc,
            world_size=self.world_size if self.world_size is not None else nodes * self.nproc,
            base_rank=self.base_rank if self.base_rank is not None else self.node_rank * self.nproc,
            node_rank=self.node_rank,
            nodes=nodes,
            master_addr=self.addr,
        )

    def __post_init__(self) -> None:
        assert self.nodes is not None or self.world_size is not None, "nobody could tell when all nodes are there"
