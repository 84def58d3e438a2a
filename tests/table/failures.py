"""Faults of ranks without a launcher, and the ranks that the others name: rows of the truth table.

All ranks train a sharded model. One fault happens, and each rank that survives reports its error and the time until it raised.
"""

from __future__ import annotations

import gc
import json
import os
import re
import select
import signal
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

import dtrain as dt
from dtrain import launch_protocol
from dtrain.dist import incident
from dtrain.dist.context import current_context
from dtrain.launch.local_ranks import reserve_port
from dtrain.launch.processes import die_with_parent
from dtrain.state import init_state
from dtrain.step.microbatch_step import microbatch_step
from dtrain.typing import LossSum

FAULT_STEP = 3
# Seconds for all ranks of a row on a busy machine.
LIMIT_S = 280
NEVER_S = 600


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One row: the event, and its ranks.

    Args:
        name: text of the row.
        culprits: ranks that may be named, by number of ranks.
        act: function of the rank that runs before step ``FAULT_STEP`` on every rank.
        in_loss: function of the rank that runs in the loss of step ``FAULT_STEP`` on every rank.
        says: pattern in the error of each survivor, by number of ranks.
        nodes: number of nodes that the ranks pretend to be on.
        timeout_s: timeout of a collective.
        survives: function that returns True for ranks that report an error of another rank.
    """

    name: str
    culprits: Callable[[int], Sequence[int]]
    act: Callable[[int, int], None] = lambda rank, world: None
    in_loss: Callable[[int, int], None] = lambda rank, world: None
    says: Callable[[int], str] = lambda world: ""
    nodes: int = 1
    timeout_s: float = NEVER_S
    everyone_reports: bool = False


@dataclass(kw_only=True)
class Outcome:
    """Result of a row.

    Args:
        errors: error by rank of ranks that report.
        seconds: time from the fault to the error of each of these ranks.
        innocent: ranks that were named without a reason.
        unclear: ranks whose error lacks the text that the row expects.
    """

    errors: dict[int, str] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    innocent: set[int] = field(default_factory=set)
    unclear: set[int] = field(default_factory=set)


def raise_error(rank: int) -> None:
    raise ValueError(f"bad sample on rank {rank}")


def kill(rank: int, world: int = 0) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop(rank: int, world: int = 0) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def break_connection(rank: int, world: int) -> None:
    """Break the connection of the control channel from rank 2 to rank 3."""
    if rank == 2:
        plane = current_context().control_plane
        assert plane is not None
        plane["control"]._connections[3].shutdown(socket.SHUT_RDWR)


def close_channel(rank: int, world: int) -> None:
    if rank == 2:
        plane = current_context().control_plane
        assert plane is not None
        plane["control"].close()


def on(culprits: Callable[[int], Sequence[int]], act: Callable[[int], None]) -> Callable[[int, int], None]:
    return lambda rank, world: act(rank) if rank in culprits(world) else None


def second_node(world: int) -> range:
    return range(world // 2, world)


def late_failures(rank: int, world: int) -> None:
    """Fail at intervals of a second: first the last rank, then the rank before."""
    if rank >= world - 3:
        time.sleep(4 * (world - 1 - rank))
        raise_error(rank)
    time.sleep(rank % 4)


def one(rank: int) -> Callable[[int], Sequence[int]]:
    return lambda world: [rank % world]


FAULTS = [
    Fault(
        name="a rank raises in its step",
        culprits=one(-2),
        in_loss=on(one(-2), raise_error),
        says=lambda world: rf"ranks \[{world - 2}\] of {world} .* left with ValueError: bad sample",
    ),
    Fault(
        name="rank 0, which serves the store, raises in its step",
        culprits=one(0),
        in_loss=on(one(0), raise_error),
        says=lambda world: rf"ranks \[0\] of {world} .* left with ValueError: bad sample",
    ),
    Fault(
        name="five ranks raise in one step",
        culprits=lambda world: range(1, 6) if world > 6 else [1, 2],
        in_loss=on(lambda world: range(1, 6) if world > 6 else [1, 2], raise_error),
        says=lambda world: rf"ranks \[.*\] of {world} .* left with ValueError: bad sample",
    ),
    Fault(
        name="three ranks raise, one every 4 s",
        culprits=lambda world: range(world - 3, world),
        in_loss=late_failures,
        says=lambda world: rf"ranks \[.*{world - 1}\] of {world} .* left with ValueError: bad sample",
    ),
    Fault(
        name="a rank is killed in its step",
        culprits=one(-2),
        in_loss=on(one(-2), kill),
        says=lambda world: rf"ranks \[{world - 2}\] of {world} did not arrive, connection lost",
    ),
    Fault(
        name="rank 0, which serves the store, is killed in its step",
        culprits=one(0),
        in_loss=on(one(0), kill),
        says=lambda world: rf"ranks \[0\] of {world} did not arrive",
    ),
    Fault(
        name="all ranks of node 1 of 2 are killed",
        culprits=second_node,
        nodes=2,
        in_loss=on(second_node, kill),
        says=lambda world: rf"node 1 is gone \(ranks {world // 2}(-|, ){world - 1}\)",
    ),
    Fault(
        name="a rank is stopped (SIGSTOP)",
        culprits=one(-2),
        act=on(one(-2), stop),
        timeout_s=30,
        says=lambda world: rf"ranks \[{world - 2}\] of {world} did not arrive within",
    ),
    Fault(
        name="a rank computes for too long",
        culprits=one(-2),
        act=on(one(-2), lambda rank: time.sleep(NEVER_S)),
        timeout_s=30,
        says=lambda world: rf"ranks \[{world - 2}\] of {world} did not arrive within",
    ),
    Fault(
        name="one connection between two living ranks breaks",
        culprits=lambda world: [2, 3],
        act=break_connection,
        says=lambda world: rf"the connection between ranks 2 and 3 of {world} was lost",
        everyone_reports=True,
    ),
    Fault(
        name="a rank closes its control channel",
        culprits=one(2),
        act=close_channel,
        says=lambda world: rf"ranks \[2\] of {world} .* Rank 2 left with a control channel that it has closed itself",
        everyone_reports=True,
    ),
]


def train(fault: Fault, rank: int, world: int) -> tuple[float, str]:
    """Train until the fault, and return the time before the fault and the error of this rank."""
    torch.set_num_threads(1)
    step_number, begin = 0, 0.0

    def loss(model: nn.Module, batch: torch.Tensor) -> LossSum:
        computed = LossSum(total=model(batch).square().sum(), weight=len(batch))
        if step_number == FAULT_STEP:
            fault.in_loss(rank, world)
        return computed

    try:
        with dt.init_dist(device="cpu", timeout_s=fault.timeout_s):
            model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)])
            model = dt.shard_model(model, dt.build_mesh(), blocks=(nn.Linear,))
            state = init_state(model, torch.optim.SGD(model.parameters(), lr=0.01))
            for step_number in range(20):
                if step_number == FAULT_STEP:
                    begin = time.monotonic()
                    fault.act(rank, world)
                state, _ = microbatch_step(state, torch.ones(2, 32), loss_fn=loss)
    except BaseException as error:  # noqa: BLE001 - the row looks at it
        return begin, f"{type(error).__name__}: {error}"
    return begin, "no error"


def run_fault(fault: Fault, world: int, *, grace_s: float | None = None) -> Outcome:
    """Run a row on real ranks."""
    outcome, pids, pipes = Outcome(), dict[int, int](), dict[int, int]()
    culprits = set(fault.culprits(world))
    reporters = set(range(world)) if fault.everyone_reports else set(range(world)) - culprits
    with reserve_port() as held:
        port = held.getsockname()[1]
        gc.collect()
        for rank in range(world):
            pids[rank], pipes[rank] = _fork(fault, rank, world, port, grace_s)
        try:
            ends = _read_answers(pipes, reporters)
        finally:
            for pid in pids.values():
                os.kill(pid, signal.SIGKILL)
            for pid in pids.values():
                os.waitpid(pid, 0)
            for pipe in pipes.values():
                os.close(pipe)
    for rank, (begin, end, text) in ends.items():
        outcome.errors[rank], outcome.seconds[rank] = text, end - begin
        outcome.innocent |= named_ranks(text) - culprits
        if not re.search(fault.says(world), text):
            outcome.unclear.add(rank)
    outcome.unclear |= reporters - ends.keys()
    return outcome


def _fork(fault: Fault, rank: int, world: int, port: int, grace_s: float | None) -> tuple[int, int]:
    parent = os.getpid()
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        return pid, read
    try:
        die_with_parent(parent)
        if grace_s is not None:
            incident.GRACE_S = grace_s
        size = world // fault.nodes
        for name in (launch_protocol.RUN_DIR, launch_protocol.AGENT_STORE):
            os.environ.pop(name, None)
        variables = launch_protocol.rank_environment(
            rank=rank, world_size=world, local_rank=rank % size, local_world_size=size, node_rank=rank // size,
            nodes=fault.nodes, addr="127.0.0.1", port=port,
        )  # fmt: skip
        os.environ.update({**variables, launch_protocol.LOOPBACK: "1", launch_protocol.GLOO_INTERFACE: "lo"})
        begin, text = train(fault, rank, world)
        os.write(write, json.dumps([begin, time.monotonic(), text]).encode() + b"\n")
        os._exit(0)
    except BaseException:  # noqa: BLE001 - a fork must not return into the caller
        traceback.print_exc()
    finally:
        os._exit(1)


def _read_answers(pipes: dict[int, int], reporters: set[int]) -> dict[int, tuple[float, float, str]]:
    """Return begin, end and error of the ranks that answer in time."""
    answers: dict[int, tuple[float, float, str]] = {}
    texts = {pipes[rank]: (rank, b"") for rank in reporters}
    deadline = time.monotonic() + LIMIT_S
    while texts and (remaining_s := deadline - time.monotonic()) > 0:
        for pipe in select.select(list(texts), [], [], remaining_s)[0]:
            rank, text = texts[pipe]
            chunk = os.read(pipe, 1 << 16)
            texts[pipe] = rank, text + chunk
            if not chunk or chunk.endswith(b"\n"):
                del texts[pipe]
                if chunk:
                    answers[rank] = tuple(json.loads(text + chunk))
    return answers


def named_ranks(text: str) -> set[int]:
    """Return the ranks that an error names."""
    numbers: set[int] = set()
    head = text.partition("this rank serves the store")[0]
    for words in re.findall(r"ranks? \[?([0-9][0-9, \-]*(?:and [0-9]+)?)\]?", head):
        for item in re.findall(r"[0-9]+-[0-9]+|[0-9]+", words):
            first, _, last = item.partition("-")
            numbers.update(range(int(first), int(last or first) + 1))
    return numbers
