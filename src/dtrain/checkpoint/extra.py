"""Save and load the caller's objects (``extra=``).

An entry has ``state_dict`` and ``load_state_dict``, or is a dict, a list or a tensor, which a load fills in place. A number or
a text is refused, because a load cannot put it back. Entries are equal on all ranks, or marked by ``per_rank``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from dtrain.checkpoint import layout, strict_json, tree_json
from dtrain.checkpoint.mismatch_report import mismatch_error, missing_row, unexpected_row
from dtrain.checkpoint.module_state import set_extra_states
from dtrain.checkpoint.targets import ReadOnlyMemory, write_problem
from dtrain.checkpoint.tree_json import DICT_TYPES, PER_RANK, TensorPlaceholder
from dtrain.dist.collectives import raise_on_all_ranks
from dtrain.dist.init import get_dist_info
from dtrain.dist.rng import rng_state, set_rng_state
from dtrain.dtensor import is_dtensor
from dtrain.errors import CheckpointMismatchError, ConfigError, CorruptCheckpointError
from dtrain.state import TrainState

if TYPE_CHECKING:
    from dtrain.checkpoint.load_plan import IgnorePatterns
    from dtrain.checkpoint.reader import CheckpointReader


@runtime_checkable
class Stateful(Protocol):
    """Protocol of an object that returns its state as plain data and tensors, and loads this state again."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Load a state that ``state_dict`` returned."""


@dataclass(frozen=True, slots=True, eq=False)
class PerRank:
    """Entry of ``extra=`` that each rank saves for itself. See ``per_rank``."""

    value: Any


@dataclass(frozen=True, slots=True, eq=False)
class NotSaved:
    """Entry of ``extra=`` that stands for a loader without a saved position. See ``not_saved``."""

    loader: Any


def per_rank(value: Any) -> PerRank:
    """Mark an entry of ``extra=`` that differs between ranks on purpose: each rank saves its own value.

    Without the mark, values that differ between ranks are an error of the save. Use the mark in the save and in the load. Each
    rank gets its own value back. Another number of ranks is an error of the load: pass ``ignore=["extra/<name>"]`` to start
    with a new value.

    Args:
        value: an object with ``state_dict`` and ``load_state_dict``, or a dict, list or tensor, which a load fills in place.

    Example:
        >>> import dtrain as dt
        >>> hidden = torch.zeros(2)
        >>> extra = {"hidden": dt.checkpoint.per_rank(hidden)}
        >>> extra["hidden"].value is hidden
        True
    """
    return PerRank(value)


def not_saved(loader: Any) -> NotSaved:
    """Mark a loader in ``extra=`` whose position is left out of the checkpoint on purpose, so that a resume starts it anew.

    A save without the position of a loader that the run trains on is an error otherwise. Use the mark in the save and in the
    load, for example for a dataset that cannot continue in the middle.

    Args:
        loader: the loader, or None for the loader of the last batches if it no longer exists.

    Example:
        >>> import dtrain as dt
        >>> loader = dt.build_loader(list(range(8)), global_batch_size=4, seed=0)
        >>> extra = {"loader": dt.checkpoint.not_saved(loader)}
        >>> extra["loader"].loader is loader
        True
    """
    return NotSaved(loader)


def saved_entries(extra: Mapping[str, Any], caller: str) -> dict[str, Any]:
    """Return the entries that a checkpoint holds: ``extra`` without ``not_saved``.

    Raises:
        ConfigError: a name that is not a string, or a value that a load could not put back.
    """
    for name, value in extra.items():
        if type(name) is not str:
            raise ConfigError(
                f"{caller}: extra must have string names, got {type(name).__name__} {name!r}. "
                f"Use texts as keys, such as extra={{'loader': loader}}."
            )
        content = unwrap(value)
        plain = content is None or isinstance(content, bool | int | float | str | tuple)
        if isinstance(content, PerRank | NotSaved) and content is not value:
            raise ConfigError(f"{caller}: extra: {name} must have one mark, got two. Leave out one of them.")
        if plain and not is_stateful(content):
            raise ConfigError(
                f"{caller}: extra: {name} must be filled in place by a load, which {type(content).__name__} "
                f"{repr(content)[:60]} cannot. Put it into a dict that the loop reads: extra={{'{name}': {{'value': ...}}}}."
            )
    return {name: value for name, value in extra.items() if not isinstance(value, NotSaved)}


def is_stateful(value: Any) -> bool:
    """Return True if an entry has ``state_dict`` and ``load_state_dict``."""
    value = unwrap(value)
    return isinstance(value, Stateful) and not isinstance(value, type)


def plain_entries(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that are plain data, without marks."""
    return {name: unwrap(value) for name, value in extra.items() if not is_stateful(value)}


def unwrap(value: Any) -> Any:
    """Return an entry without the mark ``per_rank``."""
    return value.value if isinstance(value, PerRank) else value


def saved_objects(extra: Mapping[str, Any]) -> Iterator[Any]:
    """Iterate over the objects of ``extra`` without marks."""
    return map(unwrap, extra.values())


def state_of(value: Any) -> Any:
    """Return the state of an object, or plain data as they are."""
    return value.state_dict() if is_stateful(value) else value


def split_entries(entries: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the states of entries: those of the run, with ``PER_RANK`` for marked entries, and those of this rank."""
    of_run = {name: PER_RANK if isinstance(value, PerRank) else state_of(value) for name, value in entries.items()}
    of_rank = {name: state_of(value.value) for name, value in entries.items() if isinstance(value, PerRank)}
    return of_run, of_rank


def check_plain_tensors(tensors: Mapping[str, Tensor], owner: str) -> None:
    """Raise if a tensor of ``extra`` or of a module's extra state is sharded.

    Raises:
        ConfigError: the key of the first DTensor.
    """
    for key, tensor in tensors.items():
        if is_dtensor(tensor):
            raise ConfigError(f"save_sharded: {key} must be a plain tensor, got a DTensor. {owner}")


def extra_structures(
    reader: CheckpointReader, extra: Mapping[str, Any], ignore: IgnorePatterns, *, caller: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the stored values of the run and of this rank for ``extra`` without ignored names, with placeholders for tensors.

    Raises:
        CheckpointMismatchError: a name that only the caller or only the checkpoint has, or a value that does not fit.
    """
    stored = reader.structures[layout.EXTRA]
    if type(stored) is not dict:
        raise CorruptCheckpointError(f"{layout.INDEX}: extra: must be a dict, got {strict_json.describe_value(stored)}")
    keys = {name: tree_json.join_key(layout.EXTRA, str(name)) for name in (*extra, *stored)}
    requested = {name: key for name, key in keys.items() if not ignore.part(key)}
    missing = [key for name, key in requested.items() if name not in stored]
    unexpected = {name: key for name, key in requested.items() if name not in extra}
    caller = f"{caller}: {reader.folder}"
    if missing or unexpected:
        rows = [missing_row(key, "a value") for key in missing]
        rows += [unexpected_row(key, "a value") for key in unexpected.values()]
        raise mismatch_error(caller, rows, source="checkpoint", advice=_extra_advice(missing, unexpected, stored))
    of_run: dict[str, Any] = {}
    of_rank: dict[str, Any] = {}
    for name in (name for name in extra if name in requested):
        marked = isinstance(extra[name], PerRank)
        if marked != (stored[name] is PER_RANK):
            saved, advice = ("a single value", "without") if marked else ("a value per rank", "with")
            raise CheckpointMismatchError(
                f"{caller}: extra: {name} was saved as {saved}. Pass the object {advice} dt.checkpoint.per_rank."
            )
        tree = _own_structure(reader, name, caller) if marked else stored[name]
        (of_rank if marked else of_run)[name] = tree
        if (problem := _content_problem(extra[name], tree)) is not None:
            raise CheckpointMismatchError(f"{caller}: extra: {name} {problem}. Pass an object as at the save.")
    return of_run, of_rank


def _own_structure(reader: CheckpointReader, name: str, caller: str) -> Any:
    """Return the stored value of this rank, with placeholders for tensors."""
    info = get_dist_info()
    if reader.world_size != info.world_size:
        raise CheckpointMismatchError(
            f"{caller}: extra: {name} has a value for each of {reader.world_size} ranks, and this run has {info.world_size}. "
            f"Load on {reader.world_size} ranks, or pass ignore=['{layout.EXTRA}/{name}'] to start anew."
        )
    structure = reader.rank_structure(info.rank, layout.EXTRA, layout.EXTRA)
    if name not in structure:
        raise CorruptCheckpointError(f"{layout.index_name(info.rank)}: values: extra: no {name!r}")
    return structure[name]


def _extra_advice(missing: Sequence[str], unexpected: Mapping[str, str], stored: Mapping[str, Any]) -> str:
    """Return the advice for a difference in ``extra``."""
    advice = []
    if missing:
        names = ", ".join(map(str, stored)) or "no extra"
        advice.append(f"The checkpoint holds {names}. Leave out other names, or pass them in ignore=.")
    if unexpected:
        objects, patterns = ", ".join(f'"{name}": ...' for name in unexpected), ", ".join(f'"{k}"' for k in unexpected.values())
        advice.append(f"Pass extra={{{objects}}} to load stored values, or ignore=[{patterns}] to skip them.")
    return " ".join(advice)


def _content_problem(value: Any, stored: Any) -> str | None:
    """Return the reason why ``value`` cannot be filled with a stored value with placeholders; None if it can be filled."""
    content = unwrap(value)
    if is_stateful(content):
        return None
    if isinstance(content, Tensor):
        if type(stored) is not TensorPlaceholder:
            return f"is stored as {_kind(stored)}, and a tensor was passed"
        here = (content.dtype, tuple(content.shape))
        if here != (layout.DTYPES[stored.ref.dtype], stored.ref.shape):
            return f"is stored as {stored.ref}, and a tensor {content.dtype} {list(content.shape)} was passed"
        problem = write_problem(content)
        return None if problem is None else f"must {problem}"
    if type(stored) is not (dict if type(content) in DICT_TYPES else type(content)):
        return f"is stored as {_kind(stored)}, and {_kind(content)} was passed"
    return None


def _kind(value: Any) -> str:
    return "a tensor" if type(value) is TensorPlaceholder else f"a {type(value).__name__}"


def restore_objects(
    states: Mapping[str, TrainState],
    modules: Mapping[str, Mapping[str, Any]],
    extra: Mapping[str, Any],
    stored: Mapping[str, Any],
    *,
    caller: str,
) -> None:
    """Load the extra states of modules and the entries of ``extra``: first objects, which may refuse, then plain data.

    If an object refuses its state, the random generators and the extra states of modules are restored.

    Args:
        states: states by name.
        modules: stored extra states of the modules of each state.
        extra: entries of the caller.
        stored: stored values of entries.
        caller: prefix of messages.

    Mutates: modules and entries.
    Collective: exchanges of JSON on the control group.
    """
    random = rng_state()
    with ExitStack() as undo:
        undo.callback(set_rng_state, random)
        for name, state in states.items():
            undo.callback(set_extra_states(state.model, modules[name], caller=caller))
        with raise_on_all_ranks(f"{caller}: extra"):
            for name in sorted(stored, key=lambda name: not is_stateful(extra[name])):
                _restore_entry(extra[name], stored[name])
        undo.pop_all()


def _restore_entry(value: Any, stored: Any) -> None:
    """Load a stored value into an object, or fill a dict, list or tensor in place.

    Mutates: ``value``.
    """
    content = unwrap(value)
    if is_stateful(content):
        cast(Stateful, content).load_state_dict(stored)
    else:
        _Filling().fill(content, stored)


class _Filling:
    """Filling of one plain entry in place, also inside, where the loop may hold references."""

    def __init__(self) -> None:
        self._read_only = ReadOnlyMemory()
        # A part that occurs twice is filled once.
        self._filled: set[int] = set()

    def fill(self, target: Any, value: Any) -> None:
        """Fill a tensor, dict or list. Mutates: ``target``."""
        self._filled.add(id(target))
        if isinstance(target, Tensor):
            with torch.no_grad():
                target.copy_(value)
        elif isinstance(target, list):
            old = [*target, *[None] * len(value)]
            target[:] = [self._merge(old[at], item) for at, item in enumerate(value)]
        else:
            merged = {key: self._merge(target.get(key), item) for key, item in value.items()}
            target.clear()
            target.update(merged)

    def _merge(self, old: Any, new: Any) -> Any:
        """Return ``old``, filled with ``new``, if both are of one kind; else ``new``."""
        if isinstance(old, Tensor) and isinstance(new, Tensor):
            is_equal = (old.dtype, old.shape) == (new.dtype, new.shape)
            fits = is_equal and write_problem(old, self._read_only) is None
        else:
            fits = (type(old) in DICT_TYPES and type(new) is dict) or (type(old) is list and type(new) is list)
        if not fits or id(old) in self._filled:
            return new
        self.fill(old, new)
        return old
