"""Loader processes: torch's ``DataLoader`` with prompt errors and a clean shutdown.

Workers ignore signals that the rank handles, and die with their rank. If a worker dies, the rank raises an error in one line
while it waits for a batch, not in the middle of a step.

Only this module uses private names of torch's ``DataLoader``: ``_workers_done_event``, ``_shutdown_workers``,
``_worker_pids_set`` and ``_remove_worker_pids``. ``tests/data/test_workers.py`` fails if one of them changes its meaning.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import io
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import connection, util
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data._utils import signal_handling

from dtrain import launch_protocol, storage
from dtrain.arguments import single_line
from dtrain.data.balance import BatchBalance
from dtrain.data.batch import pin_memory
from dtrain.dist.init import get_dist_info
from dtrain.errors import ConfigError, DataError
from dtrain.launch import heartbeats
from dtrain.typing import Batch, Plain

INLINE_TENSOR_BYTES = 2**17
SHARED_MEMORY = Path("/dev/shm")
_PR_SET_PDEATHSIG = 1
_SIGNAL_HINTS = {
    signal.SIGKILL: ". Check the memory: the usual cause is out of memory",
    signal.SIGBUS: f". Check {SHARED_MEMORY}: the usual cause is that shared memory is full",
}
_JOIN_TIMEOUT_S = 5.0
# Interval in which a waiting rank checks its workers. Some start methods do not notify the rank of a worker's death.
_POLL_INTERVAL_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Configuration of the loader workers of a rank.

    Args:
        count: loader processes of this rank; 0 loads in the rank itself.
        timeout_s: seconds without a batch after which the workers count as hung; 0 disables the limit. With ``count=0`` there
            is no limit.
        prefetch_factor: batches that each worker prepares in advance.
        start_method: ``"fork"``, ``"forkserver"`` or ``"spawn"``; None uses Python's default.
        pin_memory: if True, batches are in page-locked memory.
    """

    count: int = 0
    timeout_s: float = 300.0
    prefetch_factor: int = 2
    start_method: str | None = None
    pin_memory: bool = False


def workers_for_rank(total: int, local_rank: int, local_ranks: int) -> int:
    """Return a rank's number of the node's ``total`` workers: an equal part within one, and at least one unless total is 0.

    >>> (
    ...     [workers_for_rank(8, rank, 3) for rank in range(3)],
    ...     workers_for_rank(2, 3, 4),
    ...     workers_for_rank(0, 0, 4),
    ... )
    ([3, 3, 2], 1, 0)
    """
    least, remainder = divmod(total, local_ranks)
    return max(least + (local_rank < remainder), min(total, 1))


def divide_workers(config: WorkerConfig, *, at_most: int | None = None) -> WorkerConfig:
    """Replace the node's workers by this rank's part; local rank 0 prints the division."""
    info, total = get_dist_info(), config.count
    shares = [workers_for_rank(total, rank, info.local_world_size) for rank in range(info.local_world_size)]
    shares = [share if at_most is None else min(share, at_most) for share in shares]
    if info.local_rank == 0 and (sum(shares) != total or (len(shares) > 1 and total)):
        why = "" if at_most is None else ", since one worker per rank reads an iterable dataset in order"
        print(
            f"dtrain: build_loader: {total} loader workers for this node are {', '.join(map(str, shares))} for its ranks{why}",
            file=sys.stderr,
        )
    return replace(config, count=shares[info.local_rank])


def load_batches(source: Any, requests: Any, workers: WorkerConfig) -> Iterator[WorkerBatch]:
    """Load the batch of each request in order. If ``requests`` is None, ``source`` is an iterable dataset.

    Raises:
        DataError: a worker died or hangs.
        ConfigError: the dataset cannot be pickled for a worker.
    """
    if workers.count:
        yield from _load_in_workers(source, requests, workers)
        return
    heartbeats.heartbeat("waiting for data")
    for worker_batch in source if requests is None else map(source.__getitem__, requests):
        yield worker_batch.pin_memory() if workers.pin_memory else worker_batch
        heartbeats.heartbeat("waiting for data")


def _load_in_workers(source: Any, requests: Any, workers: WorkerConfig) -> Iterator[WorkerBatch]:
    _create_socket_folder()
    before = set(multiprocessing.active_children())
    batches = _start_workers(source, requests, workers)
    done_event = batches._workers_done_event = _DoneEvent(batches._workers_done_event)
    children: list[Any] = [child for child in multiprocessing.active_children() if child not in before]
    # Python ends the workers of a loop that was not closed with SIGTERM, which they ignore, and then waits.
    exited: list[int] = []
    at_exit = partial(_kill, children, only_in=os.getpid(), exited=exited)
    atexit.register(at_exit)
    try:
        yield from _next_batches(batches, children, workers)
    except BaseException:
        # The loop was left early, so nobody needs the batches in preparation.
        done_event.to_kill = children
        raise
    finally:
        batches._shutdown_workers()
        # If Python closes a loop after the hooks of exit, the names of this module are gone, and the workers are dead.
        if not exited:
            # Workers ignore SIGTERM, which torch uses to end workers.
            _kill([child for child in children if child.is_alive()])
            for child in children:
                child.join()
            _remove_leaked_shared_memory({child.pid for child in children if child.exitcode != 0})
            atexit.unregister(at_exit)
        del batches


def _kill(children: list[Any], *, only_in: int | None = None, exited: list[int] | None = None) -> None:
    """Kill workers; with ``only_in``, only if this process has that id, since a forked child inherits the hooks of exit.

    Mutates: ``exited``, which gets the id of the process.
    """
    if exited is not None:
        exited.append(os.getpid())
    if only_in in (None, os.getpid()):
        for child in children:
            child.kill()


def _create_socket_folder() -> None:
    """Create the temporary folder of this process in ``multiprocessing``, where its workers create their sockets.

    A killed process cannot remove its folder. So the folder belongs to the rank, not to a worker, and has a name by which the
    launcher removes the folder of a killed rank.

    Mutates: the configuration of ``multiprocessing`` in this process.
    """
    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    prefix = os.environ.get(launch_protocol.SOCKET_FOLDER_PREFIX)
    if prefix and "tempdir" not in config:
        # Without access to the launcher's temporary folder, Python's choice remains.
        with suppress(OSError):
            folder = tempfile.mkdtemp(prefix=os.path.basename(prefix), dir=os.path.dirname(prefix))
            util.Finalize(None, partial(shutil.rmtree, ignore_errors=True), args=(folder,), exitpriority=-100)
            config["tempdir"] = folder
    util.get_temp_dir()


def _start_workers(source: Any, requests: Any, workers: WorkerConfig) -> Any:
    options = {
        "sampler": requests,
        "batch_size": None,
        "pin_memory": workers.pin_memory,
        # Without a generator, torch draws the seeds of the workers from the global generator.
        "generator": torch.Generator("cpu"),
        "num_workers": workers.count,
        "prefetch_factor": workers.prefetch_factor,
        "timeout": min(_POLL_INTERVAL_S, workers.timeout_s or _POLL_INTERVAL_S),
        "multiprocessing_context": workers.start_method,
        "worker_init_fn": _init_worker,
    }
    try:
        # torch draws the seed of the workers on the default device, with the generator above.
        with warnings.catch_warnings(), torch.device("cpu"):
            # torch compares the workers with the cores of the node as if the node had one rank.
            warnings.filterwarnings("ignore", "This DataLoader will create")
            # The ConfigError below names the part that cannot be pickled.
            warnings.filterwarnings("ignore", "Got pickle error")
            batches: Any = iter(DataLoader(source, **options))
    except Exception as error:
        shortage = describe_shared_memory_error(error)
        if shortage is not None:
            raise ConfigError(f"loader: {shortage}") from error
        where = find_unpicklable(source, "")
        reason = f"{type(error).__name__}: {single_line(error)}"
        if where is None:
            raise ConfigError(
                f"loader: workers could not be started ({reason}). "
                "Pass num_workers=0, or raise the limit that the reason names."
            ) from error
        raise ConfigError(f"loader: {where} cannot be sent to a worker ({reason}). Open it where it is used.") from error
    # torch's handler of SIGCHLD raises at any point of a step if a worker dies, unless torch does not know the worker.
    signal_handling._remove_worker_pids(id(batches))
    batches._worker_pids_set = False
    return batches


def _next_batches(batches: Any, children: list[Any], workers: WorkerConfig) -> Iterator[WorkerBatch]:
    while True:
        heartbeats.heartbeat("waiting for data")
        began = time.monotonic()
        worker_batch = None
        while worker_batch is None:
            try:
                with _raise_on_death(children):
                    worker_batch = next(batches)
                    # Unpacking requests the shared memory of the tensors from the worker.
                    worker_batch.unpack()
            except StopIteration:
                return
            except (RuntimeError, OSError, EOFError) as error:
                # torch or a worker's socket raised the error. Errors of the dataset arrive in the worker batch.
                dead = _dead_workers(children, wait=not isinstance(error, RuntimeError))
                is_late = workers.timeout_s and time.monotonic() - began >= workers.timeout_s
                if dead or is_late or "timed out" not in str(error):
                    raise DataError(_failure_message(dead, workers, error)) from None
        yield worker_batch


@contextmanager
def _raise_on_death(children: list[Any]) -> Iterator[None]:
    """Raise RuntimeError if a worker has died, or dies during the block, even while the rank waits for a part of a message.

    Python runs signal handlers in the main thread only. In other threads, polling detects the death of a worker.

    Mutates: this process's handler of SIGCHLD during the block.
    """
    previous: Any = signal.getsignal(signal.SIGCHLD)
    is_main_thread = threading.current_thread() is threading.main_thread()

    def check(number: int, frame: FrameType | None) -> None:
        if any(child.exitcode not in (None, 0) for child in children):
            raise RuntimeError("a worker has died")
        if frame is not None and callable(previous):
            previous(number, frame)

    try:
        if is_main_thread:
            signal.signal(signal.SIGCHLD, check)
        check(signal.SIGCHLD, None)
        yield
    finally:
        if is_main_thread:
            signal.signal(signal.SIGCHLD, previous or signal.SIG_DFL)


def _dead_workers(children: list[Any], *, wait: bool) -> list[Any]:
    """Return the workers that ended with an error. The socket of a worker may close before its process ends."""
    if wait:
        ended = connection.wait([child.sentinel for child in children], _JOIN_TIMEOUT_S)
        for child in children:
            # The sentinel, too, may close a moment before the process ends.
            child.join(_JOIN_TIMEOUT_S if child.sentinel in ended else 0)
    return [child for child in children if child.exitcode not in (None, 0)]


def _failure_message(dead: list[Any], workers: WorkerConfig, error: Exception) -> str:
    if dead:
        code = dead[0].exitcode
        cause = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        hint = _SIGNAL_HINTS.get(-code, "")
        return f"loader: worker process {dead[0].pid} {cause}{hint}"
    if "timed out" in str(error):
        return (
            f"loader: no batch from {workers.count} workers in {workers.timeout_s:g} s, because a sample hangs or is slow. "
            "Check the dataset, or raise timeout_s or num_workers of build_loader"
        )
    return f"loader: {single_line(error)}"


class _DoneEvent:
    """torch's event that tells workers to end, without its lock. ``set`` also kills the workers in ``to_kill``.

    A worker takes the lock of the event to read the event. A worker that is killed at that moment keeps the lock, so the rank
    would wait forever. Workers are killed after the event is set: before, torch ends its thread that reads from the workers,
    and that thread would wait for the rest of a message that was cut off.
    """

    def __init__(self, event: Any) -> None:
        self._event, self._is_set = event, False
        self.to_kill: list[Any] = []

    def set(self) -> None:
        # The flag is a semaphore. The lock protects processes that wait for the event, but workers only read the event.
        self._event._flag.release()
        self._is_set = True
        for child in self.to_kill:
            child.kill()

    def is_set(self) -> bool:
        return self._is_set


def _remove_leaked_shared_memory(killed: set[int]) -> None:
    """Remove shared memory that killed workers had just created, before torch could unlink the names."""
    if killed and storage.is_folder(SHARED_MEMORY):
        for name in storage.list_names(SHARED_MEMORY):
            if name.startswith(tuple(f"torch_{pid}_" for pid in killed)):
                storage.remove_file(SHARED_MEMORY / name)


def _init_worker(worker: int) -> None:
    """Initialize a worker: ignore the signals that the rank handles, and die with the rank."""
    del worker
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal.set_wakeup_fd(-1)
    if sys.platform == "linux":
        # The parent is the rank, or the fork server, which ends with its rank.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    rank = multiprocessing.parent_process()
    # The rank may have died before the call of prctl.
    if rank is None or not rank.is_alive():
        os._exit(128 + signal.SIGKILL)


# Not frozen, because a frozen record takes twice as long to make, and each batch makes a record.
@dataclass(slots=True, kw_only=True)
class Payload:
    """Result of one request.

    Args:
        batch: samples of this rank; None if no sample could be read, or on failure.
        skipped: index or position of each skipped sample, with the error.
        failure: reason of a failure, in one line.
        trace: traceback of the failure.
        dataset_state: state of an iterable dataset after this batch, if the dataset has a state.
        sample_count: samples of the global batch, for iterable datasets, whose length is unknown before reading.
        changed_by_reading: names of attributes of the dataset, transform or collate that a worker changed as it read the batch.
        balance: costs of all ranks in the global batch, for iterable datasets with a dealer.
        content_hash: hash of the global batch, which ranks compare, for iterable datasets that all ranks read.
    """

    batch: Batch = None
    skipped: list[tuple[int, str]] = field(default_factory=list)
    failure: str | None = None
    trace: str = ""
    dataset_state: Plain = None
    sample_count: int = 0
    changed_by_reading: frozenset[str] = frozenset()
    balance: BatchBalance | None = None
    content_hash: int = 0


class WorkerBatch:
    """A ``Payload`` on its way between processes. torch calls ``pin_memory`` in its pin-memory thread."""

    __slots__ = ("_packed", "_payload")

    def __init__(self, payload: Payload | None, packed: bytes = b"") -> None:
        self._payload, self._packed = payload, packed

    @classmethod
    def pack(cls, payload: Payload) -> WorkerBatch:
        """Pack a payload for the rank. A worker pickles it, and replaces a payload that cannot be pickled by a failure."""
        if get_worker_info() is None:
            return cls(payload)
        try:
            return cls(None, _pickle_payload(payload))
        # Pickling runs the user's classes, so any exception can occur.
        except Exception as error:  # noqa: BLE001
            shortage = describe_shared_memory_error(error)
            if shortage is not None:
                return cls(None, _pickle_payload(Payload(failure=shortage)))
            where = find_unpicklable(payload, "")
            reason = f"{where} cannot be pickled ({type(error).__name__}: {single_line(error)}); return it as data"
            return cls(None, _pickle_payload(Payload(failure=reason)))

    def unpack(self) -> Payload:
        """Unpickle and return the payload."""
        if self._payload is None:
            self._payload, self._packed = pickle.loads(self._packed), b""
        return self._payload

    def pin_memory(self, device: Any = None) -> WorkerBatch:
        """Copy the tensors to page-locked memory."""
        payload = self.unpack()
        self._payload = replace(payload, batch=pin_memory(payload.batch))
        return self


def _pickle_payload(payload: Payload) -> bytes:
    file = io.BytesIO()
    _BatchPickler(file).dump(payload)
    return file.getvalue()


class _BatchPickler(ForkingPickler):
    """Pickler that sends small tensors as bytes. A piece of shared memory per tensor takes longer than a copy."""

    def reducer_override(self, value: Any) -> Any:
        """Return the reduction of a small plain tensor; ``NotImplemented`` for every other object."""
        if type(value) is not Tensor or not 0 < value.nbytes <= INLINE_TENSOR_BYTES:
            return NotImplemented
        is_cpu_strided = value.device.type == "cpu" and value.layout == torch.strided and not value.is_quantized
        if not is_cpu_strided or value.requires_grad or value.is_conj() or value.is_neg():
            return NotImplemented
        data = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return _rebuild_tensor, (data, value.dtype, tuple(value.shape))


def _rebuild_tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)


def describe_shared_memory_error(error: BaseException | None) -> str | None:
    """Describe an error of torch about shared memory in one line, with advice; None for an error of another kind.

    A collate function may have wrapped torch's error, so the causes of the error count as well.
    """
    while error is not None and not re.match("unable to .*shared memory", str(error)):
        error = error.__cause__
    if error is None:
        return None
    if os.strerror(errno.ENOSPC) in str(error):
        return (
            f"shared memory is too small: {_measure_shared_memory()}, and each worker keeps its prepared batches in it. Lower "
            "num_workers, prefetch_factor or the batch size, or enlarge it (docker run --shm-size=8g or --ipc=host)"
        )
    hint = ". Raise the limit (ulimit -n), or lower num_workers" if os.strerror(errno.EMFILE) in str(error) else ""
    return f"a tensor cannot be put into shared memory ({single_line(error)}){hint}"


def _measure_shared_memory() -> str:
    try:
        status = os.statvfs(SHARED_MEMORY)
    except OSError:
        return "the system has no more"
    total, free = (blocks * status.f_frsize // 2**20 for blocks in (status.f_blocks, status.f_bavail))
    return f"{SHARED_MEMORY} has {total} MiB, {free} MiB free"


def find_unpicklable(value: Any, path: str) -> str | None:
    """Return the path of the innermost part of ``value`` that cannot be pickled, prefixed with ``path``; None if all can."""
    try:
        ForkingPickler.dumps(value)
    # Pickling runs the user's classes, so any exception can occur.
    except Exception:  # noqa: BLE001
        inner = (find_unpicklable(item, path + step) for step, item in _children(value))
        return next((part_path for part_path in inner if part_path is not None), path.removeprefix(".") or type(value).__name__)
    return None


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif not isinstance(value, type):
        slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
        names = [*getattr(value, "__dict__", {}), *(name for name in slots if hasattr(value, name))]
        yield from ((f".{name}", getattr(value, name)) for name in names)
