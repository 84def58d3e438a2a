"""``Shared``: the one mutable part of a state, common to all states of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dtrain.dist.origin import HandsOut
from dtrain.host_scalar import HostScalar
from dtrain.types import Slice

_EQUAL = 3  # one batch could be equal by chance, as the first of a stream
_COMPARED = 16  # a loop may make several steps of a batch


@dataclass(slots=True, eq=False)
class FirstBatches:
    """The comparison of a run's first batches with those of other ranks.

    Args:
        to_find: equal batches that are still to be found before the warning.
        steps_left: steps that may still be compared; 0 ends the comparison.
        step: the last step that was compared. A second gradient of it, or a rehearsal, has the same batch.
        content: the hash of the last batch that was equal on all ranks. A loop that overfits one batch is not warned.
    """

    to_find: int = _EQUAL
    steps_left: int = _COMPARED
    step: int | None = None
    content: int = 0


@dataclass(slots=True, eq=False, weakref_slot=True)
class Shared:
    """The one mutable part of a state, shared by all states of a run: what must not be copied to be true.

    ``generation`` is that of the newest state; ``weight`` is the global weight of the last step on its way to the host. The
    rest is the run's place among checkpoints: its identity, the folder that this process resumed from, by root the steps that
    it committed or loaded, in that order, each with what it holds, and by root what keeps other jobs out as long as this lives.
    ``make_slices`` makes the slices of all transforms for a state, as ``Step.init`` did: for weights loaded into a new run.
    ``kept`` is what a transform keeps from step to step outside of checkpoints, by its name. ``stepped_early`` is whether the
    optimizer has run on some parameters already in the step in progress, and their gradients are gone. ``swapped`` names the
    average that is in the place of the parameters just now. ``first_batches`` is how far the run has compared its batches with
    those of other ranks. ``newest`` holds the fields of the newest state that is between two steps, without this object, so
    that no cycle keeps a dropped run alive. ``torn`` says
    which update or load was interrupted while it wrote parameters, None otherwise. ``loader`` is the one whose epochs count, if
    given. ``stepped_at`` is when the last step began, by this process's monotonic clock. ``saved_extra`` is, by the id of
    an object in ``extra``, the step at which a save took its state last.
    """

    generation: int = 0
    weight: HostScalar | None = None
    run_id: str | None = None
    resumed_from: str | None = None
    committed: dict[str, dict[int, object]] = field(default_factory=dict)
    locks: dict[str, object] = field(default_factory=dict)
    make_slices: Callable[[Any], dict[str, Slice]] | None = None
    kept: dict[str, Any] = field(default_factory=dict)
    stepped_early: bool = False
    swapped: str | None = None
    first_batches: FirstBatches = field(default_factory=FirstBatches)
    newest: tuple[Any, ...] = ()
    torn: str | None = None
    loader: HandsOut | None = None
    stepped_at: float | None = None
    saved_extra: dict[int, int] = field(default_factory=dict)
