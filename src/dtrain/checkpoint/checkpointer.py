"""Own the lock and the staging memory of one root, and close them at the end of a run (``Checkpointer``).

``save_sharded`` opens a Checkpointer per root of a run, which later saves of the run use again.
"""

from __future__ import annotations

import atexit
import os
import sys
import traceback
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from dtrain import storage
from dtrain.arguments import check_choice, explain_arguments
from dtrain.checkpoint.layout import SaveScope
from dtrain.checkpoint.lock import Lock, lock_root
from dtrain.checkpoint.process_instance import process_instance
from dtrain.checkpoint.retention import plan_retention
from dtrain.checkpoint.save_thread import StagingPool, save_thread
from dtrain.dist.context import register_shutdown_hook
from dtrain.errors import CheckpointError
from dtrain.state import TrainState
from dtrain.storage import AnyPath

if TYPE_CHECKING:
    from dtrain.checkpoint.load import OneOrSeveral
    from dtrain.checkpoint.save import SaveHandle
    from dtrain.checkpoint.step_choice import OnCorrupt

SaveMode = Literal["sync", "async"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """Options of a save that do not change its contents; see ``save_sharded``."""

    mode: SaveMode = "sync"
    incremental: bool = False
    keep_last: int | None = None
    keep_every: int | None = None
    keep_steps: Collection[int] = ()

    def check(self, caller: str) -> None:
        """Raise ConfigError if an option is invalid."""
        check_choice(caller, "mode", self.mode, get_args(SaveMode))
        plan_retention([], self.keep_last, keep_every=self.keep_every, keep_steps=self.keep_steps, caller=caller)


class Checkpointer:
    """Save and load steps under one root, with the same options each time.

    A Checkpointer owns the lock of the root, which excludes other jobs, and the host memory of asynchronous saves. Both are
    released by ``close``, at the end of the ``with`` block or of ``init_dist``'s block, or with the last reference. The next
    save takes them again. The identity of the run is in the state: saves of one run under several roots keep one run id.

        checkpoints = dt.Checkpointer("runs/gpt/ckpt", mode="async", keep_last=3)
        state = checkpoints.load(step.init(model, optimizer, loader=loader), missing_ok=True)
        for batch in loader.until("3ep"):
            state, metrics = step(state, batch)
            if state.crossed("1ep"):
                checkpoints.save(state)
        checkpoints.save(state)  # writes nothing if this step is saved already

    Args:
        root: folder on a file system that all ranks share, or a URL.
        mode: as in ``save_sharded``, like all further options.

    Raises:
        ConfigError: an invalid option.
    """

    @explain_arguments
    def __init__(
        self,
        root: AnyPath | str,
        *,
        mode: SaveMode = "sync",
        incremental: bool = False,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_steps: Collection[int] = (),
    ) -> None:
        self.root = storage.resolve_path(root)
        self._options = SaveOptions(
            mode=mode, incremental=incremental, keep_last=keep_last, keep_every=keep_every, keep_steps=keep_steps
        )
        self._options.check("Checkpointer")
        self._staging = StagingPool()
        self._lock: Lock | None = None
        process_instance(_OpenCheckpointers).members.add(self)

    def __repr__(self) -> str:
        return f"Checkpointer({str(self.root)!r})"

    @explain_arguments
    def save(
        self,
        state: TrainState | Mapping[str, TrainState],
        *,
        extra: Mapping[str, Any] | None = None,
        scope: SaveScope = "all",
        dtype: torch.dtype | None = None,
    ) -> SaveHandle:
        """Save ``state`` as one step under the root. See ``save_sharded``.

        handle = checkpoints.save(state)
        """
        from dtrain.checkpoint.save import start_save

        return start_save(self, state, extra or {}, scope, dtype, self._options)

    @explain_arguments
    def load(
        self,
        state: OneOrSeveral,
        *,
        extra: Mapping[str, Any] | None = None,
        scope: Literal["all", "weights"] = "all",
        ignore: Sequence[str] = (),
        allow_cast: bool = False,
        missing_ok: bool = False,
        on_corrupt: OnCorrupt = "raise",
    ) -> OneOrSeveral:
        """Load the newest step of the root into ``state``. See ``load_sharded``.

        state = checkpoints.load(state, missing_ok=True)
        """
        from dtrain.checkpoint.load import load_sharded

        return load_sharded(
            self.root, state, extra=extra, scope=scope, ignore=ignore, allow_cast=allow_cast,
            missing_ok=missing_ok, on_corrupt=on_corrupt,
        )  # fmt: skip

    def close(self) -> None:
        """Wait for all saves of this process, and release the lock and the memory. The next save takes them again.

        Raises:
            CheckpointError, PeerError: a save has failed, and no caller has received the failure yet.
        """
        _close([self], None)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _close([self], error)

    def _acquire_lock(self, run_id: str, protected: Collection[int], caller: str) -> None:
        """Lock the root for a run, or check that this process still owns the lock.

        Raises:
            CheckpointError: another process has locked the root.
        """
        try:
            if self._lock is None:
                self._lock = lock_root(self.root, run_id, protected=protected)
            self._lock.check()
        except CheckpointError as error:
            raise CheckpointError(f"{caller}: {error}") from None

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
        self._lock, self._staging = None, StagingPool()


def checkpointer_of(root: AnyPath | str, states: Iterable[TrainState]) -> Checkpointer:
    """Return the Checkpointer of a root that the run of ``states`` uses, opened on the first call.

    Mutates: the run context of the states.
    """
    path = storage.resolve_path(root)
    contexts = [state._run_context for state in states]
    found = next((c.checkpointers[str(path)] for c in contexts if str(path) in c.checkpointers), None)
    checkpointer: Checkpointer = Checkpointer(path) if found is None else found
    for context in contexts:
        context.checkpointers[str(path)] = checkpointer
    return checkpointer


class _OpenCheckpointers:
    """Checkpointers of this process, which the end of ``init_dist``'s block closes."""

    def __init__(self) -> None:
        self.members: weakref.WeakSet[Checkpointer] = weakref.WeakSet()
        register_shutdown_hook("checkpoints", lambda error: _close(process_instance(_OpenCheckpointers).members, error))
        atexit.register(_at_exit, os.getpid())


def _close(checkpointers: Iterable[Checkpointer], error: BaseException | None) -> None:
    """Finish all saves of this process, and release the Checkpointers. ``error`` is the exception that leaves the block."""
    failure: Exception | None = None
    try:
        save_thread().wait_all()
    except Exception as raised:  # noqa: BLE001 - raised below
        failure = raised
    for checkpointer in list(checkpointers):
        checkpointer._release()
    if failure is None:
        return
    # Without an error of its own, the program would end as if all saves had succeeded.
    if error is None or isinstance(error, SystemExit):
        raise failure
    error.add_note(f"a save in the background failed, too: {failure}")


def _at_exit(pid: int) -> None:
    """Exit with an error code if the process ends with an unreported failure, and without ``init_dist``'s block."""
    if pid != os.getpid():
        return
    try:
        save_thread().wait_all()
    except Exception as failure:  # noqa: BLE001 - an exception of an exit handler does not change the exit code
        traceback.print_exception(failure)
        message = "dtrain: a save in the background failed, and the program ended without waiting for its result"
        print(message, file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(1)
