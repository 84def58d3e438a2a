"""``items_with_changes``: let loader workers see the changes that the training loop makes to its dataset, transform or collate.

Workers have copies of these objects, and a loader reads ahead. So a loader compares a few attributes after each batch. If the
loop has changed one, the loader discards the batches in preparation and reads them again.

Only data in attributes of objects are read: numbers, strings, small containers, tensors and arrays. Modules, classes, variables
of functions and the state of other objects (models, generators, files, locks) are not read, and no large container is walked.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator
from enum import Enum
from functools import cache, partial
from io import IOBase
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from dtrain.data.position import Position, is_reached
from dtrain.schedules.durations import Duration
from dtrain.typing import Plain

if TYPE_CHECKING:
    from dtrain.data.batch_source import BatchSource, LoaderItem

_RESTARTS_IN_A_ROW = 3
# A larger container counts by its identity and length.
_CONTAINER_ENTRIES = 32
_ATTRIBUTE_ENTRIES, _NESTED_CONTAINERS = 128, 3
_OBJECTS = 64

_PLAIN = frozenset({int, float, complex, str, bytes, bool, type(None)})
# A union of types would be made again for each value.
_SEQUENCES, _SETS, _BY_IDENTITY = (list, tuple, deque), (set, frozenset), (np.ndarray, bytearray, Enum)
_CONTAINERS = (*_SEQUENCES, *_SETS, dict)
_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, partial)
# Threads of their own, or state that processes share, change these datasets.
_UNWATCHED_MODULES = ("dtrain.data.stream.", "datasets.", "streaming.", "torchdata.", "multiprocessing.")
_UNWATCHED_KINDS = (nn.Module, Tensor, type, Enum, IOBase)
_HEAP_TYPE = 1 << 9


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
        if self._reads_here:
            before, self._latest = self._latest, self._read()
            self._changed_by_reading |= differing_names(before, self._latest)

    def changed_by_loop(self) -> frozenset[str]:
        """Return the names that the loop has changed since the last call. Mutates: this object, to the current values."""
        before, self._latest = self._latest, self._read()
        return differing_names(before, self._latest) - self._changed_by_reading

    def needs_restart(self, *, ends_epoch: bool) -> bool:
        """Return True if the loop has changed an attribute, so that batches in preparation must be read again.

        An attribute that changes with every batch counts at the ends of epochs only. Mutates: this object.
        """
        changed = self.changed_by_loop() - self._at_epoch_ends
        if ends_epoch and self._at_epoch_ends:
            changed |= differing_names(self._read_by_workers, self._latest) & self._at_epoch_ends - self._changed_by_reading
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
    watch, has_warned, position = DatasetWatch(source), False, begin
    while True:
        items = read(position, state)
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
        position, state = item.position_after, item.dataset_state


def _warn(event: str) -> None:
    print(f"dtrain: loader: {event}", file=sys.stderr)


class _Same:
    """Fact that is equal for the same object only. The reference keeps the object's id from being used again."""

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


def read_attributes(dataset: Any, transform: Any, collate: Any) -> dict[str, Any]:
    """Return comparable facts of the watched attributes by name, such as ``dataset.level``.

    Watched are the attributes of the three objects, and of datasets and callable objects that their attributes hold. Names with
    a leading underscore are not watched. Reading takes 5 to 30 microseconds.
    """
    facts: dict[str, Any] = {}
    queue, seen = deque[tuple[str, Any]](), set[int]()

    def add_fact(name: str, value: Any) -> None:
        try:
            fact = _Fact(queue).of(value, name, 0)
        # A thread of the user's changes the container, or a class of the user's overrides a method of the container.
        except Exception:  # noqa: BLE001
            fact = _Same(value)
        if fact is not None:
            facts[name] = fact

    for name, root in (("dataset", dataset), ("transform", transform), ("collate", collate)):
        if root is not None:
            add_fact(name, root)
    while queue and len(seen) < _OBJECTS:
        path, owner = queue.popleft()
        kind: Any = type(owner)
        if id(owner) in seen:
            continue
        seen.add(id(owner))
        try:
            namespace = getattr(owner, "__dict__", None)
            values: dict[str, Any] = namespace.copy() if isinstance(namespace, dict) else {}
            values |= {name: getattr(owner, name, None) for name in _slot_names(kind)}
        # The class may compute its attributes with code of the user's.
        except Exception:  # noqa: BLE001
            continue
        for name, value in values.items():
            if name[:1] != "_":
                add_fact(f"{path}.{name}", value)
    return facts


def differing_names(before: dict[str, Any], after: dict[str, Any]) -> frozenset[str]:
    """Return the names of the attributes that differ between two readings."""
    if before == after:
        return frozenset()
    missing = object()
    return frozenset(name for name in before.keys() | after.keys() if before.get(name, missing) != after.get(name, missing))


class _Fact:
    """Reader of one attribute. ``queue`` collects the objects in the attribute whose own attributes are watched."""

    __slots__ = ("_queue", "_room")

    def __init__(self, queue: deque[tuple[str, Any]]) -> None:
        self._queue, self._room = queue, _ATTRIBUTE_ENTRIES

    def of(self, value: Any, path: str, depth: int) -> Any:
        """Return a comparable fact of ``value``; None for an object that is not watched."""
        kind: Any = type(value)
        if kind in _PLAIN:
            # The type tells 1 from 1.0 and True.
            return kind, value
        if isinstance(value, Tensor):
            return _Same(value), 0 if value.is_inference() else value._version
        if isinstance(value, np.generic):
            return kind, value.tobytes()
        if isinstance(value, _BY_IDENTITY):
            return _Same(value)
        if isinstance(value, _CONTAINERS):
            return self._of_container(value, path, depth)
        if isinstance(value, _FUNCTIONS):
            return self._of_function(value, path, depth)
        if not is_watched(kind):
            return None
        self._queue.append((path, value))
        return _Same(value)

    def _of_container(self, value: Any, path: str, depth: int) -> Any:
        size = len(value)
        self._room -= size
        if size > _CONTAINER_ENTRIES or self._room < 0 or depth == _NESTED_CONTAINERS:
            return _Same(value), size
        if isinstance(value, _SETS):
            return type(value), frozenset(entry if type(entry) in _PLAIN else _Same(entry) for entry in value)
        if not isinstance(value, dict):
            return type(value), tuple(self.of(entry, f"{path}[{index}]", depth + 1) for index, entry in enumerate(value))
        entries = list(value.items())
        keys = tuple(key if type(key) in _PLAIN else _Same(key) for key, _ in entries)
        return type(value), keys, tuple(self.of(entry, f"{path}[{key!r}]", depth + 1) for key, entry in entries)

    def _of_function(self, function: Any, path: str, depth: int) -> Any:
        """Return a fact of a function. Of its variables, only the arguments of a ``partial`` are watched."""
        if isinstance(function, partial):
            if depth == _NESTED_CONTAINERS:
                return _Same(function)
            values = (function.func, function.args, function.keywords)
            return _Same(function), tuple(self.of(value, path, depth + 1) for value in values)
        if type(function) is not MethodType:
            return _Same(function)
        owner: Any = function.__self__
        kind: Any = type(owner)
        # The object of another method may be the user's training, which changes in each step.
        if is_watched(kind):
            self._queue.append((path, owner))
        # A method is another object each time it is read.
        return _Same(owner), _Same(function.__func__)


# Each value of an attribute asks for its class, whose answer never changes.
@cache
def is_watched(kind: type) -> bool:
    """Return True for a class, written in Python, of datasets or of callable objects."""
    if not kind.__flags__ & _HEAP_TYPE or f"{kind.__module__}.".startswith(_UNWATCHED_MODULES):
        return False
    # Each class can be called, so the names are looked up in its bases.
    is_read = any(name in vars(base) for base in kind.__mro__ for name in ("__getitem__", "__iter__", "__call__"))
    return is_read and not issubclass(kind, _UNWATCHED_KINDS)


@cache
def _slot_names(kind: type) -> tuple[str, ...]:
    slots = (base.__dict__.get("__slots__", ()) for base in kind.__mro__)
    names = (name for entry in slots for name in ((entry,) if isinstance(entry, str) else entry))
    return tuple(name for name in names if not name.startswith("_"))
