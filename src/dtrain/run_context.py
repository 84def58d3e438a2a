"""Hold the mutable state that all states of a run share (``RunContext``), and copy scalars asynchronously (``AsyncScalar``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dtrain.dist.batch_info import TrackedLoader
from dtrain.typing import TransformState


class AsyncScalar:
    """Device scalar that is copied to the host asynchronously.

    ``copy_from`` starts a copy into a host buffer. ``try_read`` returns the value if the copy is complete, always on a CPU.
    ``wait`` waits for a copy that should be complete by now.
    """

    __slots__ = ("_buffer", "_event", "_pending", "_view")

    def __init__(self, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self._buffer = torch.zeros((), dtype=torch.float64, pin_memory=cuda)
        self._view = self._buffer.numpy()
        self._event = torch.cuda.Event() if cuda else None
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


@dataclass(slots=True, eq=False, weakref_slot=True)
class RunContext:
    """Mutable state of a run, shared by all its ``TrainState`` objects.

    Args:
        generation: generation of the newest state.
        pending_weight: global weight of the last step, while it is copied to the host.
        run_id: identity of the run in its checkpoints.
        resumed_from: folder of the checkpoint that this process resumed from.
        committed_steps: by checkpoint root, the steps that the run committed or loaded, in that order, and their contents.
        locks: by checkpoint root, the lock that excludes other jobs as long as this object lives.
        init_transform_states: function that makes the states of all transforms, to load weights into a new run.
        transform_cache: by transform name, values that a transform keeps between steps but not in checkpoints.
        partially_stepped: if True, the optimizer has run on some parameters in the current step, and their gradients are gone.
        swapped_average: name of the average that currently replaces the parameters.
        equal_batch_check: progress of the comparison of batches between ranks.
        newest_fields: fields of the newest state between two steps, without this object, so that no reference cycle keeps a
            dropped run alive.
        interrupted_write: message about an update or load that was interrupted while writing parameters, else None.
        loader: loader whose epochs the clock counts, if given.
        last_step_started_at: time of this process's monotonic clock at which the last step began.
        extra_saved_steps: by id of an object in ``extra``, the step of the last save of its state.
    """

    generation: int = 0
    pending_weight: AsyncScalar | None = None
    run_id: str | None = None
    resumed_from: str | None = None
    committed_steps: dict[str, dict[int, object]] = field(default_factory=dict)
    locks: dict[str, object] = field(default_factory=dict)
    init_transform_states: Callable[[Any], dict[str, TransformState]] | None = None
    transform_cache: dict[str, Any] = field(default_factory=dict)
    partially_stepped: bool = False
    swapped_average: str | None = None
    equal_batch_check: EqualBatchCheck = field(default_factory=EqualBatchCheck)
    newest_fields: tuple[Any, ...] = ()
    interrupted_write: str | None = None
    loader: TrackedLoader | None = None
    last_step_started_at: float | None = None
    extra_saved_steps: dict[int, int] = field(default_factory=dict)
