"""Ranks that may die or hang: forked processes with time-outs of their own, all of which are gone at the end of a test."""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import signal
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from dtrain import launch_protocol
from dtrain.launch.local_ranks import reserve_port
from dtrain.launch.processes import die_with_parent

LONG_S = 300  # how long a busy test machine may take


@dataclass(kw_only=True)
class Forked:
    """Run ranks in processes of their own: ``body(rank)`` returns plain data, or its error as text."""

    pipes: dict[int, int] = field(default_factory=dict)
    pids: dict[int, int] = field(default_factory=dict)

    def run(self, body: Callable[[int], Any], world_size: int, *, results_of: Collection[int]) -> dict[int, Any]:
        """Start the ranks and wait for the results of some of them; the others may do as they like."""
        with reserve_port() as held:
            for rank in range(world_size):
                self._start(body, rank, world_size, held.getsockname()[1])
            return {rank: self.result(rank) for rank in results_of}

    def _start(self, body: Callable[[int], Any], rank: int, world_size: int, port: int) -> None:
        parent = os.getpid()
        read, write = os.pipe()
        gc.collect()  # a process group of an earlier test must be freed here: a fork has not the group's threads
        pid = os.fork()
        if pid == 0:
            try:
                die_with_parent(parent)
                faulthandler.dump_traceback_later(LONG_S - 5)  # where a rank is stuck that has not answered
                for name in (launch_protocol.RUN_DIR, launch_protocol.AGENT_STORE):
                    os.environ.pop(name, None)
                who = launch_protocol.rank_environment(
                    rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size, node_rank=0, nodes=1,
                    addr="127.0.0.1", port=port,
                )  # fmt: skip
                os.environ.update({**who, launch_protocol.LOOPBACK: "1", launch_protocol.GLOO_INTERFACE: "lo"})
                try:
                    answer = body(rank)
                except BaseException as error:  # noqa: BLE001 - the test looks at every kind of error
                    answer = f"{type(error).__name__}: {error}"
                os.write(write, json.dumps(answer).encode() + b"\n")
                os._exit(0)
            except BaseException:  # noqa: BLE001 - a fork must not return into pytest
                traceback.print_exc()
            finally:
                os._exit(1)
        os.close(write)
        self.pipes[rank], self.pids[rank] = read, pid

    def result(self, rank: int) -> Any:
        deadline, text = time.monotonic() + LONG_S, b""
        os.set_blocking(self.pipes[rank], False)
        while not text.endswith(b"\n"):
            assert time.monotonic() < deadline, f"rank {rank} has not answered"
            try:
                chunk = os.read(self.pipes[rank], 1 << 16)
                assert chunk, f"rank {rank} died before it answered"
                text += chunk
            except BlockingIOError:
                time.sleep(0.02)
        return json.loads(text)

    def end(self) -> None:
        for pid in self.pids.values():
            os.kill(pid, signal.SIGKILL)
        for pid in self.pids.values():
            os.waitpid(pid, 0)
        for pipe in self.pipes.values():
            os.close(pipe)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Forked]:
    """Fork ranks; a failed collective waits half a second for a message of the other ranks, which they inherit."""
    monkeypatch.setattr("dtrain.dist.incident.GRACE_S", 0.5)
    ranks = Forked()
    yield ranks
    ranks.end()
