"""``AsyncScalar``: a device scalar on its way to the host.

``Shared``: the one mutable part of a state, common to all states of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dtrain.dist.batch_info import TrackedLoader
from dtrain.typing import TransformState


class AsyncScalar:
    """A device scalar on its way to the host, read without waiting for the device.

    ``copy_from`` starts a copy into a host buffer that was made once; ``try_read`` returns the value if it has arrived, on a CPU it
    always has; ``wait`` is for one that should have arrived long ago.
    """

    __slots__ = ("_buffer", "_event", "_posted", "_view")

    def __init__(self, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self._buffer = torch.zeros((), dtype=torch.float64, pin_memory=cuda)
        self._view = self._buffer.numpy()
        self._event = torch.cuda.Event() if cuda else None
        self._posted = False

    def copy_from(self, value: Tensor) -> None:
        """Start copying the scalar ``value`` ``[]``."""
        self._buffer.copy_(value, non_blocking=True)
        self._posted = True
        if self._event is not None:
            self._event.record()

    def clear(self) -> None:
        """Forget what was posted."""
        self._posted = False

    def try_read(self) -> float | None:
        """The last posted value, or None when nothing was posted or it is still on its way."""
        if not self._posted or (self._event is not None and not self._event.query()):
            return None
        return float(self._view)

    def wait(self) -> float | None:
        """The last posted value, once it has arrived; None when nothing was posted."""
        if self._event is not None and self._posted:
            self._event.synchronize()
        return self.try_read()


_EQUAL_BATCHES_TO_WARN = 3  # one batch could be equal by chance, as the first of a stream
_STEPS_TO_COMPARE = 16  # a loop may make several steps of a batch


@dataclass(slots=True, eq=False)
class EqualBatchCheck:
    """The comparison of a run's first batches with those of other ranks.

    Args:
        remaining_matches: equal batches that are still to be found before the warning.
        steps_left: steps that may still be compared; 0 ends the comparison.
        last_step: the last step that was compared. A second gradient of it, or a rehearsal, has the same batch.
        last_hash: the hash of the last batch that was equal on all ranks. A loop that overfits one batch is not warned.
    """

    remaining_matches: int = _EQUAL_BATCHES_TO_WARN
    steps_left: int = _STEPS_TO_COMPARE
    last_step: int | None = None
    last_hash: int = 0


@dataclass(slots=True, eq=False, weakref_slot=True)
class RunContext:
    """The one mutable part of a state, shared by all states of a run: what must not be copied to be true.

    ``generation`` is that of the newest state; ``pending_weight`` is the global weight of the last step on its way to the host. The
    rest is the run's place among checkpoints: its identity, the folder that this process resumed from, by root the steps that
    it committed or loaded, in that order, each with what it holds, and by root what keeps other jobs out as long as this lives.
    ``init_transform_states`` makes the slices of all transforms for a state, as ``Step.init`` did: for weights loaded into a new run.
    ``transform_cache`` is what a transform keeps from step to step outside of checkpoints, by its name. ``partially_stepped`` is whether the
    optimizer has run on some parameters already in the step in progress, and their gradients are gone. ``use_average`` names the
    average that is in the place of the parameters just now. ``equal_batch_check`` is how far the run has compared its batches with
    those of other ranks. ``newest_fields`` holds the fields of the newest state that is between two steps, without this object, so
    that no cycle keeps a dropped run alive. ``interrupted_write`` says
    which update or load was interrupted while it wrote parameters, None otherwise. ``loader`` is the one whose epochs count, if
    given. ``last_step_started_at`` is when the last step began, by this process's monotonic clock. ``extra_saved_steps`` is, by the id of
    an object in ``extra``, the step at which a save took its state last.
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
