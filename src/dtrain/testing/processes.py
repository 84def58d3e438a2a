"""The processes behind ``Ranks``: started together, ended together, also when the caller is killed.

They are forked from a server process that has imported torch and nothing else, so a start costs tenths of a second.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import tempfile
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from dtrain import wire
from dtrain.errors import RankError
from dtrain.testing.serve import STACK_SIGNAL, guard, serve

START_S = 120.0
STACKS_S = 5.0
END_S = 30.0  # for the last collective and the closing of the groups


@dataclass(slots=True, eq=False)
class Pool:
    """Ranks with an open process group, a pipe to each, and the guard that outlives a killed caller to end them."""

    stacks: tempfile.TemporaryDirectory[str]
    processes: list[Any] = field(default_factory=list)
    pipes: list[Connection[Any, Any]] = field(default_factory=list)
    guard: tuple[Any, Connection[Any, Any]] | None = None

    @classmethod
    def start(cls, world_size: int) -> Pool:
        """``world_size`` ranks that have met.

        Raises:
            RankError: one died, or did not come up in time; none is left then.
        """
        pool = cls(tempfile.TemporaryDirectory(prefix="dtrain-ranks-"))
        try:
            pool._start(world_size)
        except BaseException:
            pool.end(kill=True)
            raise
        return pool

    def _start(self, world_size: int) -> None:
        context = _fork_server()
        with socket.socket() as held:
            # Bound but not listening: nobody else gets the port, and rank 0 may still bind and listen on it.
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(("127.0.0.1", 0))
            for rank in range(world_size):
                env = _environment(rank, world_size, held.getsockname()[1])
                process, pipe = _process(context, serve, env, str(self._stack_file(rank)))
                self.processes.append(process)
                self.pipes.append(pipe)
            self.guard = _process(context, guard, [process.pid for process in self.processes], self.stacks.name)
            self._await_ready()

    def _await_ready(self) -> None:
        deadline = time.monotonic() + START_S
        waiting = dict(enumerate(self.pipes))
        while waiting:
            ready = wait(list(waiting.values()), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RankError(f"run_ranks: ranks {sorted(waiting)} of {len(self.pipes)} did not start within {START_S:g} s")
            for rank in [r for r, pipe in waiting.items() if pipe in ready]:
                try:
                    waiting.pop(rank).recv_bytes()
                except EOFError:
                    raise RankError(
                        f"run_ranks: rank {rank} of {len(self.pipes)} {self.death(rank)} before it was ready; see its output"
                    ) from None

    def end(self, *, kill: bool = False) -> None:
        """End the processes: politely (their groups are closed), or at once."""
        for pipe in self.pipes:
            pipe.close()
        deadline = time.monotonic() + (0.0 if kill else END_S)
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        for process in self.processes:
            process.kill()  # nothing to one that has ended; also ends one that is stopped
            process.join()
        if self.guard is not None:
            process, pipe = self.guard
            with suppress(BrokenPipeError):  # somebody has killed it too
                pipe.send_bytes(b"done")
            process.join()
            pipe.close()
        self.stacks.cleanup()

    def death(self, rank: int) -> str:
        """How a rank whose pipe has closed came to its end: ``"died with exit code 3"``."""
        process = self.processes[rank]
        process.join(10)
        return f"died with exit code {process.exitcode}"

    def states(self, ranks: Collection[int]) -> str:
        """What ranks are doing that give no answer: where each is in the code, or that a signal holds it."""
        for rank in ranks:
            with suppress(ProcessLookupError):  # it has just died
                os.kill(self.processes[rank].pid, STACK_SIGNAL)
        deadline = time.monotonic() + STACKS_S
        return "\n".join(f"rank {rank}:\n{self._state(rank, deadline)}" for rank in ranks)

    def _state(self, rank: int, deadline: float) -> str:
        if _is_stopped(self.processes[rank].pid):
            return "(stopped by a signal: it runs no code)"
        text = None
        while time.monotonic() < deadline:
            text, before = self._stack_file(rank).read_text(), text
            if text and text == before:  # it is written line by line
                return text.rstrip()
            time.sleep(0.1)
        return text or "(no stack)"

    def _stack_file(self, rank: int) -> Path:
        return Path(self.stacks.name) / f"rank-{rank}.txt"


def _process(context: Any, target: Any, *args: Any) -> tuple[Any, Connection[Any, Any]]:
    """A process that runs ``target(pipe, *args)``, and our end of the pipe."""
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *args), daemon=False)  # a rank may have children: loader workers
    process.start()
    theirs.close()
    return process, ours


def _fork_server() -> Any:
    """A context whose processes are forked from one clean process that has torch loaded and a single thread."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["dtrain.testing.serve", "torch.distributed.fsdp", "torch.testing"])
    return context


def _environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    place = wire.rank_environment(
        rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size, node_rank=0, nodes=1,
        addr="127.0.0.1", port=port,
    )  # fmt: skip
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    # The fork server has the environment of its own start, which may be long ago.
    return {**os.environ, **place, wire.LOOPBACK: "1", wire.GLOO_INTERFACE: loopback, wire.THREADS: "1"}


def _is_stopped(pid: int) -> bool:
    """Whether the process is held by SIGSTOP or a debugger; False where the system does not say."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    except OSError:
        return False
    return after_name.split()[0] in ("T", "t")
