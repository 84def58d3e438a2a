"""Hold the distributed state of this process in one object: ``DistContext``."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dtrain.dist.flight_recorder import FlightRecorder

if TYPE_CHECKING:
    from dtrain.dist.control_plane import ControlPlane
    from dtrain.dist.incident import Incidents
    from dtrain.dist.init import DistInfo
    from dtrain.dist.rendezvous import RendezvousConfig

ShutdownHook = Callable[[BaseException | None], None]
"""Called with the exception that leaves ``init_dist``'s block, or None. An exception of the hook replaces it."""


@dataclass(slots=True, kw_only=True, eq=False)
class DistContext:
    """Process groups of this process, and everything that opens and closes with them.

    ``init_dist`` opens the context, and leaving its block closes the context. Fields from ``shutdown_hooks`` on outlive the
    block, because the process may call ``init_dist`` again.

    Args:
        info: this rank and its groups; None while no groups are open.
        meshes: meshes on the open groups, by axes and degrees.
        incidents: failures of ranks, and their watch; None while no groups are open, and in a world of one.
        control_plane: connections for records and JSON; None while no groups are open.
        group_store: store of the training group, if dtrain made it.
        cpu_group: gloo group for CPU tensors, made on first use; None if the training group carries them.
        set_gloo_interface: if True, ``init_dist`` has set gloo's interface variable, which closing removes.
        preemption: stop signals, and the agreement of the ranks to stop.
        flight_recorder: thread that answers the launcher's requests.
        shutdown_hooks: hooks by name.
        last_shutdown_hooks: hooks that run after ``shutdown_hooks``, by name.
        rendezvous: rank and store address of the last rendezvous.
        store: connection to the store, which a second ``init_dist`` reuses, because rank 0 cannot listen on its port again.
        num_reused_groups: number of default groups opened by the user that ``init_dist`` has used.
        abandoned_group: NCCL groups of a failed run that could not be closed. The reference is weak, because a fork of this
            process that destroys the groups would wait for threads that exist only in this process.
        untracked_steps: number of steps of this process on batches without a ``BatchInfo``. A loader compares the number,
            because a copy of a batch has no reference to its loader.
        issuing_loader: identity of the loader that has issued a batch since the last step; None without one.
    """

    info: DistInfo | None = None
    meshes: dict[tuple[tuple[str, int], ...], DeviceMesh] = field(default_factory=dict)
    incidents: Incidents | None = None
    control_plane: ControlPlane | None = None
    cpu_group: dist.ProcessGroup | None = None
    group_store: dist.Store | None = None
    set_gloo_interface: bool = False
    preemption: Preemption = field(default_factory=Preemption)
    flight_recorder: FlightRecorder = field(default_factory=FlightRecorder)
    shutdown_hooks: dict[str, ShutdownHook] = field(default_factory=dict)
    last_shutdown_hooks: dict[str, ShutdownHook] = field(default_factory=dict)
    rendezvous: RendezvousConfig | None = None
    store: dist.Store | None = None
    num_reused_groups: int = 0
    abandoned_group: weakref.ref[dist.ProcessGroup] | None = None
    untracked_steps: int = 0
    issuing_loader: object | None = None

    @contextmanager
    def issuing(self, loader: object) -> Iterator[None]:
        """Name the loader whose batch the loop has. Mutates: ``issuing_loader``, inside the context."""
        self.issuing_loader = loader
        try:
            yield
        finally:
            # A step has taken the batch, or the loop of another loader has issued one since.
            if self.issuing_loader is loader:
                self.issuing_loader = None

    def run_shutdown_hooks(self, error: BaseException | None) -> None:
        """Run all hooks, also after one has raised. Later hooks are called with the first exception."""
        failed: BaseException | None = None
        for hook in [*self.shutdown_hooks.values(), *self.last_shutdown_hooks.values()]:
            try:
                hook(error)
            except BaseException as failure:  # noqa: BLE001 - raised below
                failed = failure if failed is None else failed
                error = failure if error is None else error
        if failed is not None:
            raise failed


# The only reference to the context. A process has one context, because torch has one default group per process, and because
# signal handlers and the launcher's pipe belong to the process.
_CONTEXT = DistContext()


def current_context() -> DistContext:
    """Return the context of this process."""
    return _CONTEXT


def register_shutdown_hook(name: str, hook: ShutdownHook, *, last: bool = False) -> None:
    """Call ``hook`` whenever ``init_dist``'s block ends, while the groups are still open.

    Args:
        name: key of the hook. A second registration under the same name replaces the first.
        hook: called on the main thread. If called with an exception, the hook must not raise.
        last: if True, run after all hooks without ``last``.

    Mutates: the hooks of the current context.
    """
    context = current_context()
    (context.last_shutdown_hooks if last else context.shutdown_hooks)[name] = hook


def exit_exception() -> BaseException | None:
    """Return the exception that ended the process, for exit handlers. None in an interactive session."""
    return None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
