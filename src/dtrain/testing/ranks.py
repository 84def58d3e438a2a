"""Run a function on several real ranks inside a test.

``run_ranks(fn, 2)`` starts two processes joined by gloo, calls ``fn`` on both, and returns both results. ``Ranks`` keeps
the processes, so that a test session pays for them once.
"""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait
from types import TracebackType
from typing import Any

from dtrain.errors import ConfigError, RankError
from dtrain.testing.processes import Pool
from dtrain.types import Plain

RankFn = Callable[..., Plain]
"""A module-level function; arguments and result are plain data."""

SETTLE_S = 0.1  # for reports that are on their way when the first failure is read: the earliest one counts
CULPRIT_S = 10.0  # for the rank that failed by itself, when the first to report is one that only lost its peer


def run_ranks(fn: RankFn, world_size: int, *args: Plain, timeout_s: float = 120.0) -> list[Any]:
    """``fn(*args)`` on ``world_size`` real ranks, inside ``init_dist``; the results by rank.

    It never hangs, and no process is left, whatever happens: a rank that raises, dies, or is stopped, Ctrl-C, or the
    caller being killed. When one rank fails, the others are ended at once: they may be waiting for it.

    Args:
        fn: a function at the top level of a file. The other processes import that file once more, under a name of their
            own, so a script that calls ``run_ranks`` does it below ``if __name__ == "__main__":``.
        world_size: how many CPU ranks, joined by gloo on loopback.
        args: plain data, the same on every rank; ``torch.distributed.get_rank()`` tells them apart.
        timeout_s: after this many seconds all ranks are ended, and the error names those that had not finished, with stacks.

    Returns:
        What each rank returned, plain data, by rank.

    Raises:
        ConfigError: ``fn`` is not at the top level of a file, ``args`` are not plain data, or ``world_size`` < 1.
        RankError: a rank raised, died, or did not finish, with the traceback of the rank that failed *first*, not of one that
            lost its connection because of it.
    """
    with Ranks(world_size) as ranks:
        return ranks.run(fn, *args, timeout_s=timeout_s)


class Ranks:
    """``world_size`` processes with an open process group that run one function after another.

    They start with the first ``run``, in the caller's current folder and with its environment variables as they are then. A
    function that raises on any rank ends all the processes (they may be waiting for each other); the next ``run`` starts new
    ones. A context manager; without it, call ``close``. As a pytest fixture::

        @pytest.fixture(scope="session")
        def two_ranks():
            with Ranks(2) as ranks:
                yield ranks

        def test_all_ranks_are_there(two_ranks):
            assert two_ranks.run(world_size) == [2, 2]

    Args:
        world_size: how many CPU ranks, joined by gloo on loopback.

    Raises:
        ConfigError: ``world_size`` < 1.
    """

    def __init__(self, world_size: int) -> None:
        if type(world_size) is not int or world_size < 1:
            raise ConfigError(f"Ranks: needs a whole number of at least one rank, got {world_size=}")
        self.world_size = world_size
        self._pool: Pool | None = None
        self._end: weakref.finalize[..., Ranks] | None = None

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(kill=kind is not None)

    def run(self, fn: RankFn, *args: Plain, timeout_s: float = 120.0) -> list[Any]:
        """``fn(*args)`` on every rank; see ``run_ranks``."""
        task = _encoded({**_address(fn), "args": args}, fn.__qualname__)
        pool = self._open()
        try:
            return _Run(pool, fn.__qualname__, timeout_s).results(task)
        except BaseException:
            self.close(kill=True)
            raise

    def close(self, *, kill: bool = False) -> None:
        """End the processes: politely (their groups are closed), or at once."""
        pool, self._pool = self._pool, None
        if pool is not None and self._end is not None:
            self._end.detach()
            pool.end(kill=kill)

    def _open(self) -> Pool:
        if self._pool is None:
            self._pool = Pool.start(self.world_size)
            # Ranks that nobody closed would keep the interpreter from exiting.
            self._end = weakref.finalize(self, self._pool.end, kill=True)
        return self._pool


_DIED, _RAISED, _BLAMES_A_PEER = range(3)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    """A rank that raised or died.

    ``order`` sorts what happened to several: a death is nobody else's fault, an error out of a collective mostly is; then by
    time (of the system's monotonic clock, the same for all processes).
    """

    rank: int
    order: tuple[int, float]
    text: str

    @property
    def own(self) -> bool:
        return self.order[0] < _BLAMES_A_PEER


class _Run:
    """One function on all ranks of a pool: the results, or the failure that came first."""

    def __init__(self, pool: Pool, name: str, timeout_s: float) -> None:
        self._pool, self._name, self._timeout_s = pool, name, timeout_s
        self._waiting = dict(enumerate(pool.pipes))
        self._results: dict[int, Any] = {}
        self._failures: list[_Failure] = []

    def results(self, task: bytes) -> list[Any]:
        for rank, pipe in enumerate(self._pool.pipes):
            try:
                pipe.send_bytes(task)
            except BrokenPipeError:
                raise RankError(f"{self._place(rank)} {self._pool.death(rank)}") from None
        self._collect(time.monotonic() + self._timeout_s)
        if self._failures:
            raise self._failed()
        if self._waiting:
            raise self._late()
        return [self._results[rank] for rank in range(len(self._results))]

    def _collect(self, deadline: float) -> None:
        """Read answers until all are there, the time is over, or nothing better is to be expected after a failure."""
        while self._waiting:
            ready = wait(list(self._waiting.values()), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                return
            for rank in [r for r, pipe in self._waiting.items() if pipe in ready]:
                self._receive(rank)
            if self._failures:
                settled = any(failure.own for failure in self._failures)
                deadline = min(deadline, time.monotonic() + (SETTLE_S if settled else CULPRIT_S))

    def _receive(self, rank: int) -> None:
        try:
            answer = json.loads(self._waiting.pop(rank).recv_bytes())
        except (EOFError, ConnectionResetError):
            order = (_DIED, time.monotonic())
            self._failures.append(_Failure(rank=rank, order=order, text=self._pool.death(rank)))
            return
        if "error" in answer:
            order = (_BLAMES_A_PEER if answer["blames_a_peer"] else _RAISED, answer["at"])
            self._failures.append(_Failure(rank=rank, order=order, text=f"raised\n{answer['error']}"))
        else:
            self._results[rank] = answer["result"]

    def _failed(self) -> RankError:
        first, *others = sorted(self._failures, key=lambda failure: failure.order)
        lines = [f"{self._place(first.rank)} {first.text.rstrip()}"]
        lines += [f"rank {other.rank} failed after it: {other.text.splitlines()[-1]}" for other in others]
        if self._waiting and not first.own:
            lines.append(f"ranks {sorted(self._waiting)} had not finished:\n{self._pool.states(self._waiting)}")
        return RankError("\n".join(lines))

    def _late(self) -> RankError:
        ranks = f"ranks {sorted(self._waiting)} of {len(self._pool.pipes)}"
        return RankError(
            f"run_ranks: {self._name}: {ranks} did not finish within {self._timeout_s:g} s\n{self._pool.states(self._waiting)}"
        )

    def _place(self, rank: int) -> str:
        return f"run_ranks: {self._name}: rank {rank} of {len(self._pool.pipes)}"


def _address(fn: RankFn) -> dict[str, str]:
    """Where the other processes find ``fn``."""
    code, name = getattr(fn, "__code__", None), getattr(fn, "__qualname__", repr(fn))
    if code is None or "<" in name:
        raise ConfigError(f"run_ranks: needs a function at the top level of a file, got {name}; other processes cannot find it")
    return {"file": code.co_filename, "name": name}


def _encoded(task: dict[str, Any], name: str) -> bytes:
    try:
        return json.dumps(task).encode()
    except (TypeError, ValueError, RecursionError) as problem:
        raise ConfigError(f"run_ranks: {name}: arguments are plain data (numbers, text, lists, dicts): {problem}") from None
