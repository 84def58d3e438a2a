"""``DatasetWatch``: find changes that the training loop makes to its dataset, transform or collate function.

Loader workers have copies of these objects, and a loader reads ahead. So a loader compares the objects before and after each
batch. If the loop has changed an object, the loader discards the batches in preparation and reads them again.
"""

from __future__ import annotations

import ctypes
import random
import sys
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from enum import Enum
from functools import partial
from multiprocessing.sharedctypes import SynchronizedBase
from types import CodeType, FunctionType, MethodType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from dtrain.data.batch_source import BatchSource, LoaderItem
from dtrain.data.iterable_batch_source import IterableBatchSource
from dtrain.data.position import Position, is_reached
from dtrain.device import is_accelerator
from dtrain.durations import Duration
from dtrain.errors import ConfigError
from dtrain.typing import Plain

# The check of a batch takes microseconds. The check of an epoch reads more, and takes tens of milliseconds at most.
_BATCH_OBJECTS, _BATCH_ENTRIES = 256, 32
_EPOCH_OBJECTS = 20_000
_DIGEST_BLOCKS, _BLOCK_BYTES = 256, 2**16
_RESTARTS_BEFORE_WARNING = 3

_PLAIN = frozenset({int, float, complex, str, bytes, bool, type(None)})
_READING_METHODS = frozenset({"__getitem__", "__getitems__", "__iter__", "__next__", "__call__"})
# Shards are downloaded in threads, which change the dataset at any time.
_OWN_THREADS = "dtrain.data.stream."
_LIBRARIES = ("torch.", "numpy.", "pyarrow.", "datasets.", "multiprocessing.", "threading.", "concurrent.", "logging.")

# A union of types would be made again for each part.
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_BUFFERS = (np.ndarray, bytearray)
_C_VALUES = (ctypes._SimpleCData, ctypes.Array)
_GENERATORS = (random.Random, np.random.Generator, torch.Generator)

Parts: TypeAlias = Iterable[tuple[str, Any]]
Variable: TypeAlias = tuple[str, Mapping[str, Any], str]


class DatasetWatch:
    """State of the dataset, the transform and the collate function of a loader, compared over time.

    The watch follows attributes, items, closures, and variables of a user's class and module. For each batch it reads the first
    entries of a container and the version of a tensor; for each epoch all entries, and digests of arrays.
    """

    def __init__(self, source: BatchSource, *, several_epochs: bool) -> None:
        fetcher = source.fetcher
        self._roots = [("dataset", fetcher.dataset), ("transform", fetcher.transform), ("collate", fetcher.collate)]
        # If samples are read in this process, reading may change the dataset too.
        self._reads_here = source.options.workers.count == 0 or hasattr(fetcher.dataset, "prefetch")
        self._changed_by_reading: set[str] = set()
        self._layouts: dict[type, _Layout | None] = {}
        self._globals: dict[CodeType, list[Variable]] = {}
        self._batch, self._epoch = self._facts(), self._facts(whole=True) if several_epochs else {}

    def before_batch(self, *, ends_epoch: bool) -> str | None:
        """Store the state with which the loop receives a batch.

        Returns:
            for the last batch of an epoch, the name of a part that the loop changed earlier, and that the check of a batch does
            not read: an entry of a long container or of an array.

        Mutates: this object.
        """
        if self._reads_here and (facts := self._facts()) != self._batch:
            self._changed_by_reading |= _differing_names(self._batch, facts)
            self._batch = facts
        if self._reads_here or not ends_epoch:
            return None
        before, self._epoch = self._epoch, self._facts(whole=True)
        return self._first_name(before, self._epoch)

    def changed_by_loop(self, *, ends_epoch: bool) -> str | None:
        """Return the name of a part that the loop has changed since ``before_batch``; None without a change.

        Mutates: this object, to the current state.
        """
        before, self._batch = self._batch, self._facts()
        name = self._first_name(before, self._batch)
        # The loader starts new workers after a change, so the next comparison begins here.
        if ends_epoch or (name is not None and self._epoch):
            before, self._epoch = self._epoch, self._facts(whole=True)
            name = name or self._first_name(before, self._epoch)
        return name

    def _first_name(self, before: dict[str, Any], after: dict[str, Any]) -> str | None:
        """Return the shortest name of a part that differs, and that reading does not change; None without a part."""
        if before == after:
            return None
        names = _differing_names(before, after)
        own = tuple(f"{name}{mark}" for name in self._changed_by_reading for mark in ".[ ")
        mine = (name for name in names if name not in self._changed_by_reading and not name.startswith(own))
        return min(mine, key=len, default=None)

    def _facts(self, *, whole: bool = False) -> dict[str, Any]:
        """Return comparable facts of all parts by name, breadth first."""
        facts: dict[str, Any] = {}
        queue: deque[tuple[str, Any]] = deque(self._roots)
        seen: set[int] = set()
        limit = _EPOCH_OBJECTS if whole else _BATCH_OBJECTS
        while queue:
            name, part = queue.popleft()
            kind = type(part)
            if kind in _PLAIN:
                # The type tells 1 from 1.0 and True.
                facts[name] = (kind, part)
            elif id(part) not in seen and len(seen) < limit:
                seen.add(id(part))
                fact, inner = self._inspect(part, kind, whole=whole)
                facts[name] = (kind, fact)
                queue.extend((name + step, value) for step, value in inner)
        return facts

    def _inspect(self, part: Any, kind: type, *, whole: bool) -> tuple[Any, Parts]:
        """Return a comparable fact about ``part`` itself, and its inner parts."""
        if isinstance(part, _CONTAINERS):
            return _inspect_container(part, whole=whole)
        if isinstance(part, Tensor):
            return _tensor_fact(part, whole=whole), ()
        if isinstance(part, _BUFFERS):
            return (_Same(part), part.size if isinstance(part, np.ndarray) else len(part), _digest(part) if whole else 0), ()
        if isinstance(part, _C_VALUES):
            return bytes(part), ()
        if isinstance(part, SynchronizedBase):
            return None, [(".value", part.get_obj())]
        if isinstance(part, _GENERATORS):
            return _generator_state(part), ()
        if isinstance(part, partial):
            return None, [(".func", part.func), (".args", part.args), (".keywords", part.keywords)]
        if kind is FunctionType:
            return part.__code__, self._function_parts(part)
        if kind is MethodType:
            return part.__func__, self._method_parts(part)
        if kind not in self._layouts:
            self._layouts[kind] = _Layout(kind) if _is_followed(kind) else None
        layout = self._layouts[kind]
        return (_Same(part), ()) if layout is None else (None, layout.parts(part))

    def _function_parts(self, function: FunctionType) -> Iterator[tuple[str, Any]]:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                yield f" (variable {name})", cell.cell_contents
            # The variable has no value yet.
            except ValueError:
                continue
        yield " (defaults)", function.__defaults__
        yield " (keyword defaults)", function.__kwdefaults__
        if (code := function.__code__) not in self._globals:
            self._globals[code] = list(_globals_read(function))
        for step, namespace, name in self._globals[code]:
            yield step, namespace.get(name)
        for name, value in vars(function).items():
            yield f".{name}", value

    def _method_parts(self, method: MethodType) -> Iterator[tuple[str, Any]]:
        """Yield the attributes that the method itself reads. Its object may be a loop's, which changes in each step."""
        attributes, function = getattr(method.__self__, "__dict__", {}), method.__func__
        if isinstance(function, FunctionType):
            yield from self._function_parts(function)
            names = sorted(_names_in(function.__code__))
            yield from ((f".{name}", attributes[name]) for name in names if name in attributes)


class _Same:
    """Fact that is equal for the same object only. The reference keeps the object's id from being used again."""

    __slots__ = ("_part",)

    def __init__(self, part: Any) -> None:
        self._part = part

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._part is other._part

    __hash__ = None  # type: ignore[assignment]


def _differing_names(before: Mapping[str, Any], after: Mapping[str, Any]) -> set[str]:
    missing = object()
    return {name for name in before.keys() | after.keys() if before.get(name, missing) != after.get(name, missing)}


def _is_followed(kind: type) -> bool:
    """Return True for a class of the user's, and for a dataset or a module of a library."""
    module = f"{kind.__module__}."
    if issubclass(kind, type | Enum) or module.startswith(_OWN_THREADS):
        return False
    is_library = module.startswith(_LIBRARIES) and not issubclass(kind, nn.Module)
    return not is_library or hasattr(kind, "__getitem__") or hasattr(kind, "__iter__")


def _inspect_container(part: Any, *, whole: bool) -> tuple[Any, Parts]:
    size = len(part)
    if isinstance(part, set | frozenset):
        return (size, hash(frozenset(part)) if whole else 0), ()
    if size > _BATCH_ENTRIES:
        first = next(iter(part.values() if isinstance(part, dict) else part))
        if not whole or size > _EPOCH_OBJECTS or type(first) in _PLAIN or type(first) is tuple:
            return (size, _hash_entries(part) if whole else 0), ()
    if isinstance(part, dict):
        return size, [(f"[{key!r}]" if type(key) in _PLAIN else f"[{id(key)}]", value) for key, value in list(part.items())]
    return size, [(f"[{at}]", entry) for at, entry in enumerate(list(part))]


def _hash_entries(part: Any) -> int:
    """Hash all entries. An entry without a hash, such as a list, counts by its identity."""
    entries = [*part.keys(), *part.values()] if isinstance(part, dict) else part
    try:
        return hash(tuple(entries))
    except TypeError:
        return hash(tuple(map(id, entries)))


def _tensor_fact(part: Tensor, *, whole: bool) -> Any:
    version = 0 if part.is_inference() else part._version
    is_readable = whole and type(part) is Tensor and part.device.type == "cpu" and part.layout == torch.strided
    if is_readable and part.is_contiguous() and part.numel() and not part.is_conj() and not part.is_neg():
        return _Same(part), version, _digest(part.detach().view(-1).view(torch.uint8).numpy())
    return _Same(part), version, 0


def _generator_state(part: Any) -> Any:
    if isinstance(part, torch.Generator):
        return part.get_state().numpy().tobytes()
    return part.getstate() if isinstance(part, random.Random) else repr(part.bit_generator.state)


def _digest(part: Any) -> int:
    """Return a digest of the bytes of an array: all bytes, or evenly spaced blocks of a large array."""
    if isinstance(part, np.memmap) or (isinstance(part, np.ndarray) and (part.dtype.hasobject or not part.flags.c_contiguous)):
        return 0
    view: Any = memoryview(part.reshape(-1).view(np.uint8) if isinstance(part, np.ndarray) else part)  # type: ignore[arg-type]
    if len(view) <= _DIGEST_BLOCKS * _BLOCK_BYTES:
        return zlib.crc32(view)
    digest = 0
    for start in range(0, len(view), len(view) // _DIGEST_BLOCKS):
        digest = zlib.crc32(view[start : start + _BLOCK_BYTES], digest)
    return digest


def _names_in(code: CodeType) -> set[str]:
    """Return the names of globals and attributes that ``code`` and its inner functions read."""
    inner = [_names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*inner)


def _globals_read(function: FunctionType) -> Iterator[Variable]:
    """Yield the global values and functions of the user that ``function`` reads."""
    variables = function.__globals__
    for name in sorted(_names_in(function.__code__)):
        value = variables.get(name)
        is_user_function = type(value) is FunctionType and not f"{value.__module__}.".startswith((*_LIBRARIES, "dtrain."))
        if name in variables and (type(value) in _PLAIN or isinstance(value, list | dict) or is_user_function):
            yield f" (global {name})", variables, name


class _Layout:
    """Names of the parts of a class's objects, beside the attributes in ``__dict__``."""

    __slots__ = ("_kind", "_methods", "_slots", "_variables")

    def __init__(self, kind: type) -> None:
        self._kind = kind
        slots = [base.__dict__.get("__slots__", ()) for base in kind.__mro__]
        names = [name for part in slots for name in ((part,) if isinstance(part, str) else part)]
        self._slots = [name for name in names if name not in ("__dict__", "__weakref__")]
        self._variables: list[str] = []
        self._methods: list[tuple[str, FunctionType]] = []
        for base in kind.__mro__:
            if f"{base.__module__}.".startswith((*_LIBRARIES, "dtrain.", "builtins.", "typing.", "abc.", "collections.")):
                continue
            for name, value in vars(base).items():
                if type(value) is FunctionType and (name in _READING_METHODS or not name.startswith("__")):
                    if value.__closure__ or any(_globals_read(value)):
                        self._methods.append((f".{name}", value))
                elif not name.startswith("__") and (type(value) in _PLAIN or isinstance(value, list | dict)):
                    self._variables.append(name)

    def parts(self, part: Any) -> Iterator[tuple[str, Any]]:
        """Yield the inner parts of an object of the class by name."""
        for name, value in list(getattr(part, "__dict__", {}).items()):
            yield f".{name}", value
        for name in self._slots:
            yield f".{name}", getattr(part, name, None)
        for name in self._variables:
            yield f" (class attribute {name})", getattr(self._kind, name, None)
        yield from self._methods


def reads_ahead(source: BatchSource, device: torch.device | None) -> bool:
    """Return True if the loader may read a batch before the loop has ended the body of the batch before."""
    if isinstance(source, IterableBatchSource):
        # A StreamingDataset shares its state with its workers, which change it. Each epoch begins with a new read.
        return source.adapter is None
    return source.options.workers.count > 0 or (device is not None and is_accelerator(device))


def items_with_changes(
    read: Callable[[Position, Plain], Generator[LoaderItem, None, None]],
    source: BatchSource,
    begin: Position,
    goal: Duration,
    state: Plain,
    *,
    evaluation: bool,
) -> Iterator[LoaderItem]:
    """Yield the items of ``read(position, state)``, and read the rest again after each change that the loop makes.

    Args:
        read: function that begins to read at a position, with the state of an iterable dataset at the position.
        source: the source that ``read`` reads.
        begin: position of the first item.
        goal: end of the items.
        state: state of an iterable dataset at ``begin``.
        evaluation: True if the items are those of an evaluation, which ends with its epoch.

    Raises:
        ConfigError: the loop has changed an iterable dataset in the middle of an epoch.
    """
    watch, is_indexed = DatasetWatch(source, several_epochs=not evaluation), not isinstance(source, IterableBatchSource)
    at, restarts, has_warned = begin, 0, False
    while True:
        items = read(at, state)
        for item in items:
            if item.position_only:
                yield item
                continue
            ends_epoch = item.ends_epoch and not evaluation
            if (late := watch.before_batch(ends_epoch=ends_epoch)) is not None and is_indexed and not has_warned:
                _warn(f"changed {late} in the middle of an epoch, and loader workers see the change in the next epoch only")
                has_warned = True
            yield item
            if is_reached(goal, item.position_after):
                continue
            changed = watch.changed_by_loop(ends_epoch=ends_epoch) or late
            # If ranks end their epochs independently, nothing of the next epoch is read yet.
            if changed is None or (item.ends_epoch and item.independent_epochs):
                continue
            if not is_indexed and not item.ends_epoch:
                raise ConfigError(
                    f"loader: the loop changed {changed} in the middle of an epoch of an iterable dataset, whose next samples "
                    "have been read. Change it after the last batch of an epoch, or in the dataset itself."
                )
            at, state, restarts = item.position_after, item.dataset_state, restarts + (not item.ends_epoch)
            if restarts == _RESTARTS_BEFORE_WARNING and not item.ends_epoch:
                _warn(f"changed {changed} in the middle of an epoch {restarts} times, and each time prepared batches are lost")
            break
        else:
            return
        items.close()


def _warn(event: str) -> None:
    print(f"dtrain: loader: the loop {event}. Change it at the end of an epoch, or pass num_workers=0", file=sys.stderr)
