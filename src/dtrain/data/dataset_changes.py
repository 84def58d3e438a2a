"""``items_with_changes``: let loader workers see the changes that the training loop makes to its dataset, transform or collate.

Workers have copies of these objects, and a loader reads ahead. So a loader compares a few attributes after each batch. If the
loop has changed one, the loader discards the batches in preparation and reads them again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING

from dtrain.data.position import Position, is_reached
from dtrain.schedules.durations import Duration
from dtrain.typing import Plain

if TYPE_CHECKING:
    from dtrain.data.batch_source import BatchSource, LoaderItem

_RESTARTS_IN_A_ROW = 3


class DatasetWatch:
    """The watched attributes of a loader's dataset, transform and collate function, compared over time."""

    def __init__(self, source: BatchSource) -> None:
        self._read, self._workers = source.fetcher.watched_attributes, source.options.workers.count
        # Reading may change the objects of this process.
        self._reads_here = self._workers == 0 or hasattr(source.fetcher.dataset, "prefetch")
        self._changed_by_reading: frozenset[str] = frozenset()
        self._restarts_in_a_row: dict[str, int] = {}
        # Attributes that changed with every batch, and the values that the current workers have.
        self._at_epoch_ends: set[str] = set()
        self._latest = self._read_by_workers = self._read()

    def after_read(self, changed: frozenset[str]) -> None:
        """Leave out attributes that reading has changed, here or (``changed``) in a worker. Mutates: this object."""
        if changed:
            self._changed_by_reading |= changed
        if self._reads_here and not self._latest.is_current():
            before, self._latest = self._latest, self._read()
            self._changed_by_reading |= before.differing_names(self._latest)

    def changed_by_loop(self) -> frozenset[str]:
        """Return the names that the loop has changed since the last call. Mutates: this object, to the current values."""
        if self._latest.is_current():
            return frozenset()
        before, self._latest = self._latest, self._read()
        return before.differing_names(self._latest) - self._changed_by_reading

    def needs_restart(self, *, ends_epoch: bool) -> bool:
        """Return True if the loop has changed an attribute, so that batches in preparation must be read again.

        An attribute that changes with every batch counts at the ends of epochs only. Mutates: this object.
        """
        changed = self.changed_by_loop() - self._at_epoch_ends
        if ends_epoch and self._at_epoch_ends:
            changed |= self._read_by_workers.differing_names(self._latest) & self._at_epoch_ends - self._changed_by_reading
        elif not ends_epoch and (changed or self._restarts_in_a_row):
            changed = self._count_restarts(changed)
        if changed:
            self._read_by_workers = self._latest
        return bool(changed)

    def _count_restarts(self, changed: frozenset[str]) -> frozenset[str]:
        """Return the names that may cost one more restart, and warn about the others."""
        counts = {name: self._restarts_in_a_row.get(name, 0) + 1 for name in changed}
        too_many = {name for name, count in counts.items() if count > _RESTARTS_IN_A_ROW}
        self._restarts_in_a_row = {name: count for name, count in counts.items() if name not in too_many}
        self._at_epoch_ends |= too_many
        for name in sorted(too_many):
            late = "workers see it at the end of each epoch" if self._workers else "prepared batches do not see it"
            _warn(
                f"{name} changes with every batch; {late} from now on. "
                f"Keep what samples do not read outside of the dataset{', or pass num_workers=0' if self._workers else ''}"
            )
        return changed - too_many


def items_with_changes(
    read: Callable[[Position, Plain], Generator[LoaderItem, None, None]],
    source: BatchSource,
    begin: Position,
    goal: Duration,
    state: Plain,
    *,
    evaluation: bool,
) -> Iterator[LoaderItem]:
    """Yield the items of ``read(position, state)``, and read the rest again after a change that the loop makes.

    An iterable dataset is not read again: its next epoch begins with new workers. A change within its epoch prints one line.

    Args:
        read: function that begins to read at a position, with the state of an iterable dataset at the position.
        source: the source that ``read`` reads.
        begin: position of the first item.
        goal: end of the items.
        state: state of an iterable dataset at ``begin``.
        evaluation: True if the items are those of an evaluation, which ends with its epoch.
    """
    watch, has_warned, at = DatasetWatch(source), False, begin
    while True:
        items = read(at, state)
        for item in items:
            if not item.position_only:
                watch.after_read(item.changed_by_reading)
            yield item
            if item.position_only or is_reached(goal, item.position_after):
                continue
            if source.is_indexed:
                if watch.needs_restart(ends_epoch=item.ends_epoch and not evaluation):
                    break
            elif (changed := watch.changed_by_loop()) and not item.ends_epoch and not has_warned:
                _warn(
                    f"the loop changed {min(changed)} in the middle of an epoch of an iterable dataset, whose worker sees it "
                    "in the next epoch. Change it after the last batch of an epoch, or pass num_workers=0"
                )
                has_warned = True
        else:
            return
        items.close()
        at, state = item.position_after, item.dataset_state


def _warn(event: str) -> None:
    print(f"dtrain: loader: {event}", file=sys.stderr)
