"""Save and load the objects of a run (``Step.init(loader=, stateful=)``) and the caller's objects (``extra=``).

An entry has ``state_dict`` and ``load_state_dict``, or is a dict, a list or a tensor, which a load fills in place. A number or
a text is refused, because a load cannot put it back. Entries are equal on all ranks, or marked by ``per_rank``.

Keys of entries: ``loader``, ``stateful/<name>`` and ``extra/<name>``, with ``states/<state>/`` before the keys of the objects
of one of several states. An object that several states share is stored once.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from dtrain.arguments import warn
from dtrain.checkpoint import layout, tree_json
from dtrain.checkpoint.mismatch import ReadOnlyMemory, mismatch_error, missing_row, unexpected_row, write_problem
from dtrain.checkpoint.tree_json import PER_RANK, SameAs, TensorPlaceholder, state_prefix
from dtrain.dist.collectives import raise_on_all_ranks
from dtrain.dist.dtensor import is_dtensor
from dtrain.dist.init import get_dist_info
from dtrain.errors import CheckpointMismatchError, ConfigError, CorruptCheckpointError
from dtrain.named_optimizers import list_members
from dtrain.run_objects import DICT_TYPES, LOADER, NotSaved, PerRank, check_entries, is_stateful, is_tracked_loader, unwrap
from dtrain.state import TrainState
from dtrain.typing import Stateful

if TYPE_CHECKING:
    from dtrain.checkpoint.load_plan import IgnorePatterns
    from dtrain.checkpoint.reader import CheckpointReader


_SAVE = "save_sharded"
_ADVICE = (
    "Pass it: step.init(model, optimizer, loader=loader), or stateful={'second': loader} for a further loader. To leave it out "
    "on purpose: loader=dt.checkpoint.not_saved(loader)."
)


def per_rank(value: Any) -> PerRank:
    """Mark an object of ``stateful=`` or ``extra=`` that differs between ranks on purpose: each rank saves its own value.

    Without the mark, values that differ between ranks are an error of the save. Use the mark in every process that saves or
    loads. Each rank gets its own value back. Another number of ranks is an error of the load: pass
    ``ignore=["stateful/<name>"]`` to start with a new value.

    Args:
        value: an object with ``state_dict`` and ``load_state_dict``, or a dict, list or tensor, which a load fills in place.

    Example:
        >>> import dtrain as dt
        >>> hidden = torch.zeros(2)
        >>> stateful = {"hidden": dt.checkpoint.per_rank(hidden)}
        >>> stateful["hidden"].value is hidden
        True
    """
    return PerRank(value)


def not_saved(value: Any) -> NotSaved:
    """Mark a loader whose position is left out of the checkpoint on purpose, so that a resume starts it anew.

    Pass the marked loader to ``Step.init``, for example a plain ``DataLoader``, or a loader of a dataset that cannot continue
    in the middle. Objects of ``stateful=`` take the mark, too.

    Args:
        value: the loader, or None for the loader of the last batches if it no longer exists.

    Example:
        >>> import dtrain as dt
        >>> loader = torch.utils.data.DataLoader(list(range(8)), batch_size=4)
        >>> # Pass the mark: step.init(model, optimizer, loader=marked).
        >>> marked = dt.checkpoint.not_saved(loader)
        >>> marked.value is loader
        True
    """
    return NotSaved(value)


def saved_entries(states: Mapping[str, TrainState], extra: Mapping[str, Any], caller: str) -> dict[str, Any]:
    """Return the entries of a checkpoint by key, with their marks and without entries that are not saved.

    Raises:
        ConfigError: a name that is not a string, a value that a load could not put back, or a loader in ``extra``.
    """
    check_entries(extra, caller, layout.EXTRA)
    loaders = {id(unwrap(state.loader)) for state in states.values()} - {id(None)}
    for name, value in extra.items():
        if is_tracked_loader(value) or id(unwrap(value)) in loaders:
            raise ConfigError(
                f"{caller}: extra must not hold a loader of the run, got {name}={unwrap(value)!r}. Pass it to the state: "
                f"step.init(model, optimizer, loader=loader); further loaders: stateful={{'{name}': ...}}."
            )
    entries = {**objects_of(states), **{tree_json.join_key(layout.EXTRA, name): value for name, value in extra.items()}}
    return {key: value for key, value in entries.items() if not isinstance(value, NotSaved)}


def objects_of(states: Mapping[str, TrainState]) -> dict[str, Any]:
    """Return the objects of the runs of ``states`` by key, with their marks."""
    return {state_prefix(name) + key: value for name, state in states.items() for key, value in state._objects.items()}


class EntryTrees(NamedTuple):
    """States of entries by section (``extra``, ``objects``) and name: those of the run, and those of this rank."""

    of_run: dict[str, dict[str, Any]]
    of_rank: dict[str, dict[str, Any]]


def split_entries(entries: Mapping[str, Any]) -> EntryTrees:
    """Return the states of entries. An object with several keys is stored under the first key."""
    trees = EntryTrees({layout.EXTRA: {}, layout.OBJECTS: {}}, {layout.EXTRA: {}, layout.OBJECTS: {}})
    first_keys: dict[int, str] = {}
    for key, value in entries.items():
        section, name = _place_of(key)
        if section == layout.OBJECTS and (first := first_keys.setdefault(id(unwrap(value)), name)) != name:
            trees.of_run[section][name] = SameAs(first)
            continue
        content = unwrap(value)
        tree = content.state_dict() if is_stateful(content) else content
        if isinstance(value, PerRank):
            trees.of_run[section][name] = PER_RANK
            trees.of_rank[section][name] = tree
        else:
            trees.of_run[section][name] = tree
    return trees


def _place_of(key: str) -> tuple[str, str]:
    """Return the section of an entry, and its name in the section."""
    first, _, name = key.partition("/")
    return (layout.EXTRA, tree_json.unescape_key(name)) if first == layout.EXTRA else (layout.OBJECTS, key)


def short_key(key: str) -> str:
    """Return the key of an object without the name of its state, as ``ignore=`` takes the key."""
    return key.split("/", 2)[2] if key.startswith(f"{layout.STATES}/") else key


def check_plain_tensors(tensors: Mapping[str, Tensor], owner: str) -> None:
    """Raise if a tensor of an entry or of a module's extra state is sharded.

    Raises:
        ConfigError: the key of the first DTensor.
    """
    for key, tensor in tensors.items():
        if is_dtensor(tensor):
            raise ConfigError(f"{_SAVE}: {key} must be a plain tensor, got a DTensor. {owner}")


def entry_structures(
    reader: CheckpointReader,
    entries: Mapping[str, Any],
    states: Mapping[str, TrainState],
    ignore: IgnorePatterns,
    *,
    caller: str,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the stored values of the run and of this rank for ``entries`` without ignored keys, with placeholders for tensors.

    Raises:
        CheckpointMismatchError: an entry that only the caller or only the checkpoint has, or a value that does not fit.
    """
    stored = stored_entries(reader, states)
    wanted = [key for key in (*entries, *stored) if not ignore.part(short_key(key))]
    missing = [key for key in wanted if key not in stored]
    unexpected = [key for key in wanted if key not in entries]
    caller = f"{caller}: {reader.folder}"
    if missing or unexpected:
        rows = [missing_row(key, "a value") for key in missing] + [unexpected_row(key, "a value") for key in unexpected]
        marked = {key for key, value in objects_of(states).items() if isinstance(value, NotSaved)}
        raise mismatch_error(caller, rows, source="checkpoint", advice=_entry_advice(missing, unexpected, stored, marked))
    of_run: dict[str, Any] = {}
    of_rank: dict[str, Any] = {}
    sources: dict[int, str] = {}
    for key in (key for key in entries if key in wanted):
        value, source, tree = entries[key], *stored[key]
        label = f"{caller}: {key.replace('/', ': ', 1)}"
        if isinstance(value, PerRank) != (tree is PER_RANK):
            if short_key(key) == LOADER:
                raise CheckpointMismatchError(
                    f"{label} must be a loader of the same library as in the checkpoint, got {type(unwrap(value)).__name__}. "
                    'Pass such a loader to step.init, or ignore=["loader"] to start the new one at its beginning.'
                )
            saved, advice = ("a value per rank", "with") if tree is PER_RANK else ("a single value", "without")
            raise CheckpointMismatchError(f"{label} was saved as {saved}. Pass the object {advice} dt.checkpoint.per_rank.")
        if sources.setdefault(id(unwrap(value)), source) != source:
            raise CheckpointMismatchError(f"{label} and {sources[id(unwrap(value))]} were two objects. Pass two objects.")
        if is_own := (tree is PER_RANK):
            tree = _own_structure(reader, key, source, caller)
        (of_rank if is_own else of_run)[key] = tree
        if (problem := _content_problem(value, tree)) is not None:
            raise CheckpointMismatchError(f"{label} {problem}. Pass an object as at the save.")
    return of_run, of_rank


def stored_entries(reader: CheckpointReader, states: Mapping[str, TrainState]) -> dict[str, tuple[str, Any]]:
    """Return the entries of a checkpoint by key, without objects of states that are not loaded.

    Each entry is the key under which the value is stored, and the value with placeholders for tensors.
    """
    values, objects = reader.section_dict(layout.EXTRA), reader.section_dict(layout.OBJECTS)
    stored = {}
    for key, tree in objects.items():
        source = tree.key if isinstance(tree, SameAs) else key
        if source not in objects or isinstance(objects[source], SameAs):
            raise CorruptCheckpointError(f"{layout.INDEX}: {layout.OBJECTS}: {key}: no {source!r}")
        if any(key.startswith(state_prefix(name)) for name in states):
            stored[key] = (source, objects[source])
    extra = {tree_json.join_key(layout.EXTRA, name): tree for name, tree in values.items()}
    return {**stored, **{key: (key, tree) for key, tree in extra.items()}}


def _own_structure(reader: CheckpointReader, key: str, source: str, caller: str) -> Any:
    """Return the stored value of this rank, with placeholders for tensors."""
    info = get_dist_info()
    if reader.world_size != info.world_size:
        raise CheckpointMismatchError(
            f"{caller}: {key.replace('/', ': ', 1)} has a value for each of {reader.world_size} ranks, and this run has "
            f"{info.world_size}. Load on {reader.world_size} ranks, or pass ignore=['{short_key(key)}'] to start anew."
        )
    section, name = _place_of(source)
    structure = reader.rank_structure(info.rank, section, section)
    if name not in structure:
        raise CorruptCheckpointError(f"{layout.index_name(info.rank)}: values: {section}: no {name!r}")
    return structure[name]


def _entry_advice(missing: Sequence[str], unexpected: Sequence[str], stored: Mapping[str, Any], marked: Collection[str]) -> str:
    """Return the advice for entries that only one side has. ``marked`` are the keys that this run does not save."""

    def patterns_of(keys: Sequence[str]) -> str:
        return ", ".join(f'"{key}"' for key in dict.fromkeys(map(short_key, keys)))

    advice = []
    left_out = [key for key in unexpected if key in marked]
    if left_out:
        names = " and ".join(map(short_key, left_out))
        patterns = patterns_of(left_out)
        advice.append(f"This run marks {names} with not_saved: pass ignore=[{patterns}] to start anew, or take the mark away.")
        unexpected = [key for key in unexpected if key not in marked]
    if missing and unexpected:
        advice.append(
            f"The checkpoint holds {', '.join(stored)}. Pass each object under the name of the save (loader= or stateful= of "
            f"step.init, extra= of the load), or ignore=[{patterns_of([*unexpected, *missing])}] to leave all of them out."
        )
    elif missing:
        held = ", ".join(stored) or "no such values"
        advice.append(f"The checkpoint holds {held}. Pass ignore=[{patterns_of(missing)}] to keep the current values.")
    elif unexpected:
        keys = dict.fromkeys(map(short_key, unexpected))
        extra = ", ".join(f'"{_place_of(key)[1]}": ...' for key in keys if key.startswith(f"{layout.EXTRA}/"))
        named = ", ".join(f'"{key.partition("/")[2]}": ...' for key in keys if key.startswith("stateful/"))
        passed = [*(["loader=loader"] if LOADER in keys else []), *([f"stateful={{{named}}}"] if named else [])]
        calls = [f"extra={{{extra}}}"] if extra else []
        calls += [f"step.init(model, optimizer, {', '.join(passed)})"] if passed else []
        advice.append(f"Pass {' and '.join(calls)} to load stored values, or ignore=[{patterns_of(unexpected)}] to skip them.")
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
    if type(stored) not in (DICT_TYPES if type(content) in DICT_TYPES else (type(content),)):
        return f"is stored as {_kind(stored)}, and {_kind(content)} was passed"
    return None


def _kind(value: Any) -> str:
    return "a tensor" if type(value) is TensorPlaceholder else f"a {type(value).__name__}"


def restore_entries(entries: Mapping[str, Any], stored: Mapping[str, Any], *, caller: str) -> None:
    """Load the entries: first objects, which may refuse their state, then plain data.

    Args:
        entries: entries of the states and the caller.
        stored: stored values of entries.
        caller: prefix of messages.

    Mutates: entries.
    Collective: one exchange of JSON on the control group.
    """
    # An object that states share is loaded once.
    keys = {id(unwrap(entries[key])): key for key in stored}.values()
    with raise_on_all_ranks(f"{caller}: objects of the run"):
        for key in sorted(keys, key=lambda key: not is_stateful(entries[key])):
            content = unwrap(entries[key])
            try:
                if is_stateful(content):
                    cast(Stateful, content).load_state_dict(stored[key])
                else:
                    _Filling().fill(content, stored[key])
            except Exception as error:
                error.add_note(f"{caller}: {short_key(key)} did not take its stored state.")
                raise


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
            target[:] = [self._merge(old[index], item) for index, item in enumerate(value)]
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
            # A dict would not count as a Counter does.
            fits = type(old) in (*DICT_TYPES, list) and (
                type(new) is type(old) or (type(new) is dict and type(old) is not list)
            )
        if not fits or id(old) in self._filled:
            return new
        self.fill(old, new)
        return old


def check_loaders(states: Mapping[str, TrainState]) -> None:
    """Raise if the states do not hold the loader of the last batches; also loaders that take turns with it.

    Warns once on rank 0 if the last batches may be copies of a loader's batches. Such a batch does not name its loader.

    Raises:
        ConfigError: a loader is missing.

    Mutates: ``warned_of`` of the runs.
    """
    histories = [state._loader_history for state in states.values()]
    identities = [identity for history in histories for identity in history.in_use]
    if _missing_loaders(identities, states):
        # A loader in a reference cycle is not in use any more.
        gc.collect()
    missing = _missing_loaders(identities, states)
    if missing:
        raise ConfigError(
            f"{_SAVE}: the state must hold the position of {missing[0]!r}, or a resume repeats its batches. {_ADVICE}"
        )
    is_lost = None in _resolve(history.in_use[-1] for history in histories if history.in_use)
    marked = {key: value for key, value in objects_of(states).items() if isinstance(value, NotSaved)}
    # None stands for the loader of the last batches.
    stands_in = (
        value is None or is_tracked_loader(value) or isinstance(value, DataLoader) for value in map(unwrap, marked.values())
    )
    if is_lost and not any(short_key(key) == LOADER for key in marked) and not any(stands_in):
        raise ConfigError(
            f"{_SAVE}: the state must hold the position of the last loader, which no longer exists, or a resume repeats its "
            f"batches. {_ADVICE}"
        )
    # The state may have been stepped on new tensors after a loader without a position has issued a batch.
    guessed = _missing_loaders([history.guessed for history in histories], states)
    if guessed and _is_first_warning(LOADER, states):
        warn(
            f"{_SAVE}: the state should hold the position of {guessed[0]!r} if it trains on copies of its batches, or a resume "
            f"repeats them. {_ADVICE}"
        )


def _is_first_warning(topic: str, states: Mapping[str, TrainState]) -> bool:
    """Return True once in a run, on rank 0. Mutates: ``warned_of`` of the runs."""
    runs = [state._run_context for state in states.values()]
    if get_dist_info().rank != 0 or any(topic in run.warned_of for run in runs):
        return False
    for run in runs:
        run.warned_of.add(topic)
    return True


def warn_of_schedulers(states: Mapping[str, TrainState], extra: Mapping[str, Any]) -> None:
    """Warn once on rank 0 if a scheduler of torch sets the rates of an optimizer, and the checkpoint holds no scheduler.

    Mutates: ``warned_of`` of the runs.
    """
    members = [member for state in states.values() for member in (state.optimizer, *list_members(state.optimizer))]
    # A scheduler of torch marks the ``step`` of its optimizer. The optimizer does not know the scheduler.
    if not any(hasattr(member.step, "_wrapped_by_lr_sched") for member in members):
        return
    held = list(map(unwrap, (*extra.values(), *objects_of(states).values())))
    if not any(map(_holds_scheduler, held)) and _is_first_warning("scheduler", states):
        warn(
            f"{_SAVE}: the state should hold the scheduler of the optimizer, or a resume starts its schedule again. Pass it: "
            "step.init(model, optimizer, loader=loader, stateful={'scheduler': scheduler}). To leave it out on purpose: "
            "dt.checkpoint.not_saved(scheduler)."
        )


def _holds_scheduler(value: Any) -> bool:
    """Return True for a scheduler, an object or container that holds one, and the state of one."""
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    values = [value, *parts, *getattr(value, "__dict__", {}).values()]
    return any(isinstance(part, LRScheduler) or (isinstance(part, Mapping) and "last_epoch" in part) for part in values)


def check_stops(states: Mapping[str, TrainState], extra: Mapping[str, Any]) -> None:
    """Raise if a stop of the last ``until`` has judged a value, and the checkpoint does not hold the stop.

    Raises:
        ConfigError: a stop is missing, so that a resume would forget its values.
    """
    objects = [*extra.values(), *objects_of(states).values()]
    held = {id(unwrap(value)) for value in objects}
    used = _resolve(identity for state in states.values() for identity in state._loader_history.in_use)
    for loader in (unwrap(value) for value in (*objects, *used)):
        for stop in getattr(loader, "_stops", ()) if is_tracked_loader(loader) else ():
            if getattr(stop, "_has_judged", False) and id(stop) not in held:
                raise ConfigError(
                    f"{_SAVE}: the state must hold {stop!r} of loader.until(stop=...), or a resume forgets its values. "
                    "Pass it: step.init(model, optimizer, loader=loader, stateful={'stop': stop})."
                )


def _missing_loaders(identities: Iterable[object], states: Mapping[str, TrainState]) -> list[Any]:
    """Return the loaders that exist and that no state holds."""
    held = {id(unwrap(value)) for value in objects_of(states).values()}
    return [loader for loader in _resolve(identities) if loader is not None and id(loader) not in held]


def _resolve(identities: Iterable[object]) -> list[Any]:
    """Return the loaders of ``build_loader``, and None for a loader that no longer exists.

    Objects of other libraries have no position that could be saved.
    """
    return [identity() for identity in identities if isinstance(identity, weakref.ref)]
