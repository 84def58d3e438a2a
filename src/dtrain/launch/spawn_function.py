"""Run a function on several real ranks, from a script or a notebook.

The ranks are forks of this process, so a closure or a function typed into a notebook works, and no module is imported twice.
They are supervised as by the launcher: the first failure ends all ranks, and no rank outlives the call or this process.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import IO, Any

from dtrain import launch_protocol
from dtrain.arguments import check_int, check_number, explain_arguments
from dtrain.errors import ConfigError, RankError
from dtrain.launch.failure import RootCause, signal_name
from dtrain.launch.launch_dir import choose_socket_prefix, remove_socket_folders
from dtrain.launch.launch_plan import MAX_RANKS
from dtrain.launch.local_ranks import LocalRanks, find_first_failure, report_failure, wait_for_exits

GRACE_S = 5.0
"""Seconds between SIGTERM and SIGKILL."""

# A peer may fail before the report of the rank that failed first arrives.
_FAILURE_COLLECT_S = 0.5


@explain_arguments
def spawn(fn: Callable[..., Any], *args: Any, world_size: int, timeout_s: float | None = None) -> list[Any]:
    """Run ``fn(*args)`` on ``world_size`` real ranks of this machine and return the results by rank.

    Each rank is a fork of this process with the environment of a launched rank, so ``fn`` calls ``init_dist`` like a script.
    ``fn`` sees copies of all objects, including random generators (``seed_all(seed, rank)`` separates ranks). Changes in a rank
    are lost. Results are converted by JSON (tuples become lists). Ranks print to this process's streams.

        def train(steps):
            with dt.init_dist() as info:
                ...
            return {"rank": info.rank, "loss": loss}

        results = dt.spawn(train, 100, world_size=2)

    A fork has none of its parent's threads. If torch was imported before, each rank computes with one thread.

    Args:
        fn: any callable, also a closure; its result must be plain data.
        args: arguments of ``fn``, which are not serialized.
        world_size: number of ranks, 1 to 256.
        timeout_s: seconds after which all ranks are ended; None waits without limit.

    Raises:
        ConfigError: ``world_size`` or ``timeout_s`` is out of range, a process group is open here or CUDA is initialized here
            (a fork can use neither), or a result is not plain data.
        RankError: a rank could not be started, raised (its traceback follows), exited, was killed, or did not finish in time.
            All ranks are then ended, as on Ctrl-C and when this process dies.
    """
    _check_spawnable(world_size, timeout_s)
    name, socket_prefix = getattr(fn, "__qualname__", repr(fn)), choose_socket_prefix()
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    # Unreferenced process groups must be freed in the process that has their threads.
    gc.collect()
    ranks = LocalRanks(world_size)
    try:
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(_open_report()) for _ in range(world_size)]
            for rank in range(world_size):
                _start_rank(ranks, rank, lambda rank=rank: _run_rank(fn, args, rank, files[rank]), socket_prefix)  # type: ignore[misc]
            _wait_for_ranks(ranks, name, deadline)
            # A rank that still runs may write at the file's offset.
            texts = [os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0) for file in files]
            # A report without its last line end is not complete.
            return _collect_results(ranks, name, [json.loads(text) if text.endswith(b"\n") else {} for text in texts])
    finally:
        try:
            # A rank that saves checkpoints treats the first SIGTERM as a stop request and the second SIGTERM as the end.
            ranks.end(grace_s=(GRACE_S / 2, GRACE_S / 2))
        finally:
            remove_socket_folders(socket_prefix)


def _check_spawnable(world_size: int, timeout_s: float | None) -> None:
    check_int("spawn", "world_size", world_size, maximum=MAX_RANKS, advice="Use 2, for example.")
    if timeout_s is not None:
        check_number("spawn", "timeout_s", timeout_s, above=0, advice="Use 60 seconds, for example, or None.")
    torch = sys.modules.get("torch")
    if torch is None:
        return
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise ConfigError("spawn: a process group is open in this process. Call spawn before init_dist, or after its block.")
    from dtrain.device import started_accelerator

    accelerator = started_accelerator()
    if accelerator is not None:
        name = accelerator.upper()
        raise ConfigError(f"spawn: {name} has started in this process, and a fork cannot use it. Call spawn before GPU use.")


def _open_report() -> IO[bytes]:
    """Open the file of a rank's report, which is in memory if possible."""
    return open(os.memfd_create("report"), "w+b") if hasattr(os, "memfd_create") else tempfile.TemporaryFile()


def _start_rank(ranks: LocalRanks, rank: int, run: Callable[[], int], socket_prefix: str) -> None:
    """Start ``rank`` with the environment of this process, without the variables of an outer launch."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(launch_protocol.OWNED_PREFIXES)}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    environment.setdefault(launch_protocol.OMP_THREADS, str(max(1, cores // ranks.world_size)))
    environment[launch_protocol.SOCKET_FOLDER_PREFIX] = socket_prefix
    try:
        ranks.fork(run, ranks.environment(rank, environment))
    except OSError as error:
        reason = f"could not be started: {error.strerror}. Use fewer ranks."
        raise RankError(f"spawn: rank {rank} of {ranks.world_size} {reason}") from None


def _run_rank(fn: Callable[..., Any], args: Sequence[Any], rank: int, file: IO[bytes]) -> int:
    """Call the function in a fork, write the report, and return the exit code. Exit handlers of the parent do not run.

    The report has the ``result``, or the ``failure``, or a result that is ``not_json``.
    """
    code, report = 0, dict[str, Any]()
    try:
        report["result"] = fn(*args)
    except BaseException as error:  # noqa: BLE001 - every failure is reported to the parent, which raises it
        code = launch_protocol.exit_code_for(error)
        # sys.exit() without a code means success without a result.
        report = report_failure(rank, error) if code else {"result": None}
    try:
        text = json.dumps(report)
    except (TypeError, ValueError, RecursionError) as error:
        code, text = 1, json.dumps({"not_json": f"{type(report['result']).__name__}: {error}"})
    file.write(text.encode() + b"\n")
    file.flush()
    # The reader may be gone, or the stream closed.
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    return code


def _wait_for_ranks(ranks: LocalRanks, name: str, deadline: float | None) -> None:
    """Wait until all ranks have exited, or a rank has failed and the reports of its peers are collected, or time is up."""
    decide_at: float | None = None
    while ranks.running:
        due = [limit for limit in (decide_at, deadline) if limit is not None]
        wait_for_exits([ranks], max(0.0, min(due) - time.monotonic()) if due else None)
        now = time.monotonic()
        if decide_at is None and ranks.has_failed:
            decide_at = now + _FAILURE_COLLECT_S
        if decide_at is not None and now >= decide_at:
            return
        if deadline is not None and now >= deadline and (late := ranks.running):
            raise RankError(
                f"spawn: {name}: ranks {late} of {ranks.world_size} did not finish within timeout_s and were ended. "
                "Check whether the ranks wait for each other."
            )


def _collect_results(ranks: LocalRanks, name: str, reports: Sequence[dict[str, Any]]) -> list[Any]:
    """Return the results by rank.

    Raises:
        ConfigError: a result is not plain data.
        RankError: a rank failed; the error names the first failure.
    """
    for rank, report in enumerate(reports):
        if "not_json" in report:
            raise ConfigError(
                f"spawn: {name}: the result of rank {rank} must be plain data, which JSON can hold, "
                f"got {report['not_json']}. Return numbers, strings, lists or dictionaries."
            )
    cause = find_first_failure(ranks.exits.values(), dict(enumerate(reports)))
    if cause is not None:
        raise RankError(f"spawn: {name}: rank {cause.rank} of {ranks.world_size} {_describe_cause(cause)}")
    for rank, report in enumerate(reports):
        if "result" not in report:
            subject = f"rank {rank} of {ranks.world_size}"
            raise RankError(
                f"spawn: {name}: {subject} exited with code {ranks.exits[rank].code} before it returned. "
                "Return from the function instead of calling os._exit."
            )
    return [report["result"] for report in reports]


def _describe_cause(cause: RootCause) -> str:
    failure = cause.failure
    if failure is not None and failure.error_type != "SystemExit":
        return f"failed: {failure.error_type}: {failure.message}\n{failure.traceback_text}".rstrip()
    if cause.code < 0:
        hint = "; often the kernel, out of memory" if cause.code == -signal.SIGKILL else ""
        return f"was killed by {signal_name(-cause.code)}{hint}"
    message = f": {failure.message}" if failure is not None and not failure.message.isdecimal() else ""
    return f"exited with code {cause.code}{message}"
