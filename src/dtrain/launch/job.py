"""A job as its supervisor knows it: what outlives one start of the ranks."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dtrain.launch.attempt import Attempt
from dtrain.launch.hang.guard import Guard
from dtrain.launch.nodes.agent import Agent
from dtrain.launch.nodes.messages import Over
from dtrain.launch.output.output import Output
from dtrain.launch.plan import LaunchPlan
from dtrain.launch.restarts import Restarts
from dtrain.launch.start.starter import Starter
from dtrain.pulse import Decoder


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """Changed by the supervisor's loop alone."""

    plan: LaunchPlan
    selector: selectors.BaseSelector
    output: Output
    starter: Starter
    attempt: Attempt
    restarts: Restarts
    pulses: tuple[int, int]  # the pipe in which the ranks report
    decoder: Decoder
    null: int
    oom_kills: int | None
    listener: socket.socket | None = None  # of the ranks' store, until a process serves it
    store: int | None = None  # that process
    lost_store: int | None = None  # the code with which it ended while there were ranks
    guard: Guard | None = None  # against hangs
    agent: Agent | None = None  # the process that talks to the other nodes
    store_port: int = 0  # where the ranks meet
    joined: bool = False  # all nodes are there
    told: bool = False  # the other nodes know of a failure here, or it is theirs
    over: Over | None = None  # how the ranks of all nodes have ended
    front_gone: bool = False

    def watch(self, file: Any, action: Callable[[], None]) -> None:
        self.selector.register(file, selectors.EVENT_READ, action)
