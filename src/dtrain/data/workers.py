"""Loader processes: torch's ``DataLoader`` with what a training run needs of it.

Workers leave signals to their rank, die with it, and what is wrong with one is known at once, in one line, where the rank waits
for a batch and not in the middle of a step.
"""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection, util
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader

from dtrain import heartbeats, storage
from dtrain.data.worker_batch import WorkerBatch, find_unpicklable
from dtrain.errors import ConfigError, DataError

_PR_SET_PDEATHSIG = 1
_SHARED_MEMORY = Path("/dev/shm")
_JOIN_TIMEOUT_S = 5.0
_POLL_INTERVAL_S = 5.0  # how often a rank that waits looks whether its workers live: not every start method tells it of a death


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """How a rank loads.

    Args:
        count: processes of this rank; 0 loads in the rank itself.
        timeout_s: seconds without a batch after which workers count as hanging; 0 waits for ever. The rank itself has none.
        prefetch_factor: batches that each worker prepares in advance.
        start_method: ``"fork"``, ``"forkserver"`` or ``"spawn"``; None is Python's own choice.
        pin_memory: give batches in page-locked memory.
    """

    count: int = 0
    timeout_s: float = 300.0
    prefetch_factor: int = 2
    start_method: str | None = None
    pin_memory: bool = False


def workers_for_rank(total: int, local_rank: int, local_ranks: int) -> int:
    """How many of a node's ``total`` workers belong to a rank: as many as to the others, give or take one; at least one.

    >>> [workers_for_rank(8, rank, 3) for rank in range(3)], workers_for_rank(2, 3, 4), workers_for_rank(0, 0, 4)
    ([3, 3, 2], 1, 0)
    """
    least, more = divmod(total, local_ranks)
    return max(least + (local_rank < more), min(total, 1))


def load_batches(source: Any, requests: Any, workers: WorkerConfig) -> Iterator[WorkerBatch]:
    """What ``source`` makes of each ticket, in order; ``source`` is an iterable dataset where ``requests`` is None.

    Raises:
        DataError: a worker died or hangs.
        ConfigError: the dataset cannot be sent to a worker.
    """
    common: dict[str, Any] = {
        "sampler": requests,
        "batch_size": None,
        "collate_fn": _identity,
        "pin_memory": workers.pin_memory,
        "generator": torch.Generator(),  # torch would draw from the global one, and what workers draw is ours to decide
    }
    if workers.count == 0:
        yield from _load_in_process(source, requests, workers)
        return
    common |= {
        "num_workers": workers.count,
        "prefetch_factor": workers.prefetch_factor,
        "timeout": min(_POLL_INTERVAL_S, workers.timeout_s or _POLL_INTERVAL_S),
        "multiprocessing_context": workers.start_method,
        "worker_init_fn": _init_worker,
    }
    util.get_temp_dir()  # workers use this process's for their sockets: one that is killed could not remove its own
    before = set(multiprocessing.active_children())
    with _WorkerDeathHandler() as notices:
        batches = _start_workers(source, common)
        notices.install()
        children = [child for child in multiprocessing.active_children() if child not in before]
        at_exit = partial(_kill_at_exit, os.getpid(), children)
        atexit.register(at_exit)
        try:
            yield from _load_from_workers(batches, children, notices, workers)
        except BaseException:
            for child in children:  # the loop was left early: what they are busy with is for nobody
                child.kill()
            raise
        finally:
            _stop_workers(batches, children)
            atexit.unregister(at_exit)
            del batches


def _identity(parcel: Any) -> Any:
    return parcel


def _load_in_process(source: Any, requests: Any, workers: WorkerConfig) -> Iterator[WorkerBatch]:
    """Read in this process, with a word to the launcher before each wait."""
    made = iter(source) if requests is None else map(source.__getitem__, requests)
    while True:
        heartbeats.heartbeat("waiting for data")
        try:
            parcel = next(made)
        except StopIteration:
            return
        yield parcel.pin_memory() if workers.pin_memory else parcel


def _load_from_workers(
    batches: Any, children: list[Any], notices: _WorkerDeathHandler, workers: WorkerConfig
) -> Iterator[WorkerBatch]:
    while True:
        heartbeats.heartbeat("waiting for data")
        began = time.monotonic()
        parcel = None
        while parcel is None:
            try:
                with notices.raise_on_death(children):
                    parcel = next(batches)
                    parcel.open()  # asks the worker for the memory that its tensors are in
            except StopIteration:
                return
            except (
                RuntimeError,
                OSError,
                EOFError,
            ) as error:  # torch's, or of a worker's socket; the dataset's come in a parcel
                died = _dead_workers(children, wait=not isinstance(error, RuntimeError))
                passed = workers.timeout_s and time.monotonic() - began >= workers.timeout_s
                if died or passed or "timed out" not in str(error):
                    raise DataError(_failure_message(died, workers, error)) from None
        yield parcel


def _dead_workers(children: list[Any], *, wait: bool) -> list[Any]:
    """Those that ended badly; a socket may be closed before its process has ended."""
    if wait:
        ended = connection.wait([child.sentinel for child in children], _JOIN_TIMEOUT_S)
        for child in children:
            child.join(_JOIN_TIMEOUT_S if child.sentinel in ended else 0)  # that, too, closes a moment before
    return [child for child in children if child.exitcode not in (None, 0)]


def _failure_message(died: list[Any], workers: WorkerConfig, error: Exception) -> str:
    if died:
        code = died[0].exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        often = "; often out of memory" if code == -signal.SIGKILL else ""
        return f"loader: worker process {died[0].pid} {how}{often}"
    if "timed out" in str(error):
        return (
            f"loader: no batch from {workers.count} workers in {workers.timeout_s:g} s; a sample hangs or takes longer: see "
            "timeout_s and workers of build_loader"
        )
    return f"loader: {' '.join(str(error).split())}"


def _start_workers(source: Any, options: dict[str, Any]) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "This DataLoader will create")  # torch counts cores as if there were one rank
            warnings.filterwarnings("ignore", "Got pickle error")  # said better below
            return iter(DataLoader(source, **options))
    except Exception as error:
        where = find_unpicklable(source, "")
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        if where is None:
            raise ConfigError(f"loader: workers could not be started ({reason})") from error
        raise ConfigError(f"loader: {where} cannot be sent to a worker ({reason}); open it where it is used") from error


def _stop_workers(batches: Any, children: list[Any]) -> None:
    shut_down = getattr(batches, "_shutdown_workers", None)
    if shut_down is not None:
        shut_down()
    for child in children:  # deaf to SIGTERM, which is what torch ends them with
        if child.is_alive():
            child.kill()
        child.join()
    _remove_leaked_shared_memory({child.pid for child in children if child.exitcode != 0})


def _remove_leaked_shared_memory(killed: set[int]) -> None:
    """Remove the shared memory that workers had just made when they were killed; torch takes the name away a moment later."""
    if killed and storage.is_folder(_SHARED_MEMORY):
        for name in storage.list_names(_SHARED_MEMORY):
            if name.startswith(tuple(f"torch_{pid}_" for pid in killed)):
                storage.remove_file(_SHARED_MEMORY / name)


def _kill_at_exit(rank: int, children: list[Any]) -> None:
    """Python ends them with SIGTERM, to which they are deaf, and waits: for a loop that was left without being closed."""
    if os.getpid() == rank:
        for child in children:
            child.kill()


def _init_worker(worker: int) -> None:
    """In a fresh worker. The rank decides what a signal means, and a worker that it has lost is of no use to anybody."""
    del worker
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal.set_wakeup_fd(-1)
    if sys.platform == "linux":
        # Of the rank; or of the fork server, which ends with its rank.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    rank = multiprocessing.parent_process()
    if rank is None or not rank.is_alive():  # it died before that call
        os._exit(128 + signal.SIGKILL)


@dataclass(slots=True)
class _SigchldState:
    """The handler of SIGCHLD of this process, shared by all loaders that have workers; some may take turns.

    Args:
        users: how many there are.
        waiting: whether one of them waits for a batch just now.
        previous_handler: the handler that was there before the first of them.
        torch_handler: torch's, which calls that one too.
    """

    users: int = 0
    waiting: bool = False
    previous_handler: Any = None
    torch_handler: Any = None


_SIGCHLD = _SigchldState()


def _handle_sigchld(number: int, frame: FrameType | None) -> None:
    if _SIGCHLD.waiting and callable(_SIGCHLD.torch_handler):
        _SIGCHLD.torch_handler(number, frame)
    elif _SIGCHLD.torch_handler is not _SIGCHLD.previous_handler and callable(_SIGCHLD.previous_handler):
        _SIGCHLD.previous_handler(number, frame)


class _WorkerDeathHandler:
    """torch raises from a handler of SIGCHLD wherever the rank happens to be. With this it does so only where the rank waits.

    Python runs handlers in the main thread only; elsewhere nothing is done, and a death is noticed when the rank looks.

    Mutates: this process's handler of SIGCHLD, as long as there are workers.
    """

    def __enter__(self) -> _WorkerDeathHandler:
        if _SIGCHLD.users == 0:
            _SIGCHLD.previous_handler = signal.getsignal(signal.SIGCHLD)
        _SIGCHLD.users += 1
        return self

    def install(self) -> None:
        """Put ourselves before torch's handler, which is there now."""
        current = signal.getsignal(signal.SIGCHLD)
        if _is_main_thread() and current is not _handle_sigchld:
            _SIGCHLD.torch_handler = current
            signal.signal(signal.SIGCHLD, _handle_sigchld)

    @contextmanager
    def raise_on_death(self, children: list[Any]) -> Iterator[None]:
        """The time in which a rank waits for ``children``.

        Raises:
            RuntimeError: one has died already, or does so in this time.
        """
        if any(child.exitcode not in (None, 0) for child in children):
            raise RuntimeError("a worker died")
        _SIGCHLD.waiting = True
        try:
            yield
        finally:
            _SIGCHLD.waiting = False

    def __exit__(self, *failure: object) -> None:
        _SIGCHLD.users -= 1
        if _SIGCHLD.users == 0 and _is_main_thread() and signal.getsignal(signal.SIGCHLD) is _handle_sigchld:
            signal.signal(signal.SIGCHLD, _SIGCHLD.torch_handler or signal.SIG_DFL)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
