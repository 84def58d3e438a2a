"""Hold the mutable facts that all states of a run share (``RunContext``), and copy scalars asynchronously (``AsyncScalar``)."""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dtrain.device import is_accelerator


class AsyncScalar:
    """Device scalar that is copied to the host asynchronously.

    ``copy_from`` starts a copy into a host buffer. ``try_read`` returns the value if the copy is complete, always on a CPU.
    ``wait`` waits for a copy that should be complete by now.
    """

    __slots__ = ("_buffer", "_event", "_pending", "_view")

    def __init__(self, device: torch.device) -> None:
        pinned = is_accelerator(device)
        if pinned:
            self._buffer = torch.zeros((), dtype=torch.float64, device="cpu", pin_memory=True)
            self._view = self._buffer.numpy()
        else:
            # Tools that count waits for a device count ``numpy()`` of a tensor.
            self._view = np.zeros(())
            self._buffer = torch.from_numpy(self._view)
        self._event = torch.Event(device) if pinned else None
        self._pending = False

    def copy_from(self, value: Tensor) -> None:
        """Start a copy of the scalar ``value`` ``[]``."""
        self._buffer.copy_(value, non_blocking=True)
        self._pending = True
        if self._event is not None:
            self._event.record()

    def clear(self) -> None:
        """Discard the value."""
        self._pending = False

    def try_read(self) -> float | None:
        """Return the last value, or None without a value or if the copy is not complete."""
        if not self._pending or (self._event is not None and not self._event.query()):
            return None
        return float(self._view)

    def wait(self) -> float | None:
        """Wait for the copy and return the last value, or None without a value."""
        if self._event is not None and self._pending:
            self._event.synchronize()
        return self.try_read()


MAX_NONFINITE_STEPS = 10
"""Default number of steps in a row without a finite loss that stop a run.

An update with NaN damages the parameters permanently, so the run cannot recover. Ten skipped updates are more than a few bad
batches.
"""


@dataclass(slots=True, eq=False)
class NonfiniteLossCounter:
    """Count the steps in a row in which this rank's loss was not finite, without a wait for a device.

    The loss of a CPU is read at once. Another device counts its losses itself. A new count is sent to the host after the
    previous count has arrived, so no count is lost.

    Args:
        limit: number of steps that stops the run; None counts nothing.
        skipped_updates: number of updates in a row that were skipped, if the host knows them.
    """

    limit: int | None = MAX_NONFINITE_STEPS
    skipped_updates: int = 0
    _count: Tensor | int = 0
    _previous: Tensor | int = 0
    _step: int = -1
    _sent_step: int | None = None
    _host: AsyncScalar | None = None

    def record(self, step: int, total: Tensor | float) -> None:
        """Count the loss ``total``, a number or ``[]``, of ``step``; a second loss of one step replaces it. Host sync: none."""
        if self.limit is None:
            return
        if step != self._step:
            self._previous = self._count if step == self._step + 1 else 0
            self._step = step
        if not isinstance(total, Tensor):
            self._count = 0 if math.isfinite(total) else self._previous + 1
            self._sent_step = step
            return
        host = self._host = self._host or AsyncScalar(total.device)
        broken = torch.nan_to_num(total - total, nan=1.0)  # 0 if finite, 1 if infinite or NaN
        self._count = broken if isinstance(self._previous, int) else torch.addcmul(broken, broken, self._previous)
        if self._sent_step is None:
            host.copy_from(self._count)
            self._sent_step = step

    def first_failed_step(self) -> int | None:
        """Return the first of too many nonfinite steps; None if there are fewer or the count is unknown. Host sync: none."""
        if self._sent_step is None or self.limit is None:
            return None
        count = self._count if isinstance(self._count, int) or self._host is None else self._host.try_read()
        if count is None:
            return None
        sent, self._sent_step = self._sent_step, None
        return sent - int(count) + 1 if count >= self.limit else None

    def reset(self) -> None:
        """Reset all counts."""
        self._count = self._previous = 0
        self._step, self._sent_step, self.skipped_updates = -1, None, 0


# A single equal batch may be a coincidence, as the first batch of a stream.
_EQUAL_BATCHES_TO_WARN = 3
# A loop may run several steps on one batch.
_STEPS_TO_COMPARE = 16


@dataclass(slots=True, eq=False)
class EqualBatchCheck:
    """Comparison of a run's first batches with the batches of other ranks.

    Args:
        remaining_matches: number of further equal batches before the warning.
        steps_left: number of steps that may still be compared; 0 ends the comparison.
        last_step: last compared step. A repeated gradient of the step, or a simulated step, has the same batch.
        last_hash: hash of the last batch that was equal on all ranks. A loop that overfits one batch gets no warning.
    """

    remaining_matches: int = _EQUAL_BATCHES_TO_WARN
    steps_left: int = _STEPS_TO_COMPARE
    last_step: int | None = None
    last_hash: int = 0


@dataclass(slots=True, eq=False)
class StepMonitor:
    """Observations of one gradient that only a later gradient reports. A gradient changes them without a new state.

    Args:
        pending_weight: global weight of the last step, while it is copied to the host.
        nonfinite_losses: count of the losses that are not finite, while it is copied to the host.
        equal_batches: progress of the comparison of batches between ranks.
        last_step_started_at: time of this process's monotonic clock at which the last step began, also if the step failed.
        uneven_plans: facts of the steps in which ranks had different numbers of microbatches, and all collectives matched.
        used_up_batch: step and tensors of the last batch that its own run used up: the loss wrote into them, or backward freed
            their graph. The step must not run them again.
    """

    pending_weight: AsyncScalar | None = None
    nonfinite_losses: NonfiniteLossCounter = field(default_factory=NonfiniteLossCounter)
    equal_batches: EqualBatchCheck = field(default_factory=EqualBatchCheck)
    last_step_started_at: float | None = None
    uneven_plans: set[tuple[object, ...]] = field(default_factory=set)
    used_up_batch: tuple[int, list[weakref.ref[Tensor]]] | None = None


class Commit(NamedTuple):
    """Identity of a commit in a checkpoint root: its number there, the step, and the run."""

    serial: int
    step: int
    run_id: str


@dataclass(slots=True, eq=False)
class RootHistory:
    """Facts that a run knows about one checkpoint root. Only rank 0 knows ``newest`` and ``unknown_steps``.

    Args:
        steps: the steps that the run committed or loaded, in that order, and their contents.
        newest: newest commit that the run has seen, or made, in the root; None without a commit.
        looked: if True, ``newest`` is known.
        unknown_steps: steps of this run id that an earlier process committed after the step from which this process resumed.
    """

    steps: dict[int, object] = field(default_factory=dict)
    newest: Commit | None = None
    looked: bool = False
    unknown_steps: frozenset[int] = frozenset()


@dataclass(slots=True, eq=False)
class Lineage:
    """Identity of a run in its checkpoints, and the steps that belong to the run.

    Args:
        run_id: id of the run; None before the first save.
        resumed_from: folder of the checkpoint that this process resumed from.
        roots: facts about each checkpoint root, by the root.
        saved_steps: by id of an object of the run or of ``extra``, the step of the last save of its state.
    """

    run_id: str | None = None
    resumed_from: str | None = None
    roots: defaultdict[str, RootHistory] = field(default_factory=lambda: defaultdict(RootHistory))
    saved_steps: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True, eq=False, weakref_slot=True)
class RunContext:
    """Facts that all ``TrainState`` objects of a run must share, because a new fact concerns the older states, too.

    Args:
        generation: generation of the newest state, which makes all older states stale.
        load_generation: generation of the last loaded state, to tell a state that a load has spent.
        newest_fields: fields of the newest state between two steps, without this object, so that no reference cycle keeps a
            dropped run alive. ``TrainState.newest`` returns them when the variable of the loop is lost.
        interrupted_write: message about an update or load that was interrupted while writing parameters, else None. All
            states share the parameters.
        replaced_by: sentence that names the average or copy in the place of the parameters, and how to leave it; None without.
        monitor: observations of steps in this process.
        transform_cache: by transform name, values that a transform keeps for this run between steps but not in checkpoints.
            They belong to the run, because several runs may use one transform.
        lineage: identity of the run in its checkpoints. A load replaces the whole object.
        mark: ``StateMark`` of the state at the last save or load; None before.
        changes: number of saves that have found another mark than before on some rank.
        checkpointers: by checkpoint root, the ``Checkpointer`` that ``save_sharded`` opened for the run.
        group_options: options of each parameter group in ``Step.init``.
        optimizer_checked: True after the first update, which is checked; see ``step.optimizer_state``.
        replica_check_every: number of steps between two comparisons of replicas; see ``Step.init``.
        replica_check: ``ReplicaCheck`` of the run, made in the first step or save; None before.
        warned_of: what saves have warned of already: ``"loader"``, ``"scheduler"``.
        model_syncs: ``GradSync`` and ``BufferSync`` of the model, looked up in the first step; None before.
        children: children of each module of the model by name, and copies of these dicts as of the last look for new
            parameters; None before the first step.
    """

    generation: int = 0
    load_generation: int | None = None
    newest_fields: dict[str, Any] = field(default_factory=dict)
    interrupted_write: str | None = None
    replaced_by: str | None = None
    monitor: StepMonitor = field(default_factory=StepMonitor)
    transform_cache: dict[str, Any] = field(default_factory=dict)
    lineage: Lineage = field(default_factory=Lineage)
    mark: Any = None
    changes: int = 0
    checkpointers: dict[str, Any] = field(default_factory=dict)
    group_options: tuple[dict[str, Any], ...] = ()
    optimizer_checked: bool = False
    replica_check_every: int = 100
    replica_check: Any = None
    warned_of: set[str] = field(default_factory=set)
    model_syncs: tuple[Any, Any] | None = None
    children: tuple[list[dict[str, Any]], list[dict[str, Any]]] | None = None

    def forget_first_steps(self) -> None:
        """Forget the checks of the first steps, so that the run makes them again on all ranks, with a rank that is new."""
        limit = self.monitor.nonfinite_losses.limit
        self.monitor = StepMonitor(nonfinite_losses=NonfiniteLossCounter(limit=limit))
        self.optimizer_checked, self.replica_check = False, None
        self.transform_cache.clear()
        if self.model_syncs is not None:
            self.model_syncs[1].compare_again()


class ModelRuns:
    """Runs that train a model, oldest first. Stored on the model with weak references, which keep no run alive."""

    __slots__ = ("_runs",)

    def __init__(self) -> None:
        self._runs: list[weakref.ref[RunContext]] = []

    def add(self, run_context: RunContext) -> None:
        """Append a run."""
        self._runs = [run for run in self._runs if run() is not None]
        self._runs.append(weakref.ref(run_context))

    def live(self) -> list[RunContext]:
        """Return the runs that are alive."""
        return [run for ref in self._runs if (run := ref()) is not None]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copy of the model has no runs
