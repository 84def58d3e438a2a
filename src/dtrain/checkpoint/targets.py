"""Where the tensors of a checkpoint go: whether it fits a state, and which part of each tensor this rank needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from dtrain.checkpoint import closed, layout, plain
from dtrain.checkpoint.differences import Difference, mismatch, missing, unequal, unexpected
from dtrain.checkpoint.ignored import OPTIMIZER, SLICES, Ignored
from dtrain.checkpoint.opened import Opened
from dtrain.checkpoint.optimizer_state import Make, group_differences, place_optimizer, stray_state
from dtrain.checkpoint.plain import TensorRef
from dtrain.checkpoint.plan import Region
from dtrain.clock import Clock, Place
from dtrain.errors import DamagedCheckpointError
from dtrain.names import clean_buffers
from dtrain.state import TrainState
from dtrain.tensors import extent


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Asked:
    """What the caller of a load has asked for.

    Args:
        model_only: parameters and buffers, and nothing else.
        strict: whether names that only one side has are an error.
        ignored: names of the model and parts of the checkpoint that are left out, whatever is stored under them.
        cast: whether floating-point tensors may be stored in another dtype than they have here.
    """

    model_only: bool
    strict: bool
    ignored: Ignored
    cast: bool

    def summary(self, extra: Iterable[str]) -> str:
        """What is asked for, in a line, which must be equal on all ranks."""
        only = "only=('model',), " if self.model_only else ""
        return f"{only}extra={sorted(extra)}, ignore={sorted(self.ignored.patterns)}, strict={self.strict}, cast={self.cast}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Fit:
    """How a checkpoint fits a state.

    Args:
        regions: which part of each stored tensor this rank needs, by key.
        into: for those that the state has already, its tensor.
        make: for the others, what makes the state's tensor of the one that was read.
        optimizer: the optimizer's tree; None if the optimizer stays as it is, with ``model_only`` or because it is ignored.
        slices: the tree of the slices, without ignored ones; None with ``model_only``, as are clock and seed.
        left: names in the model that are neither written nor removed.
        missing: names that only the state has.
        unexpected: names that only the checkpoint has.
    """

    regions: Mapping[str, Region]
    into: Mapping[str, Tensor]
    make: Mapping[str, Make]
    optimizer: dict[str, Any] | None
    slices: dict[str, Any] | None
    clock: Clock | None
    seed: int | None
    left: frozenset[str]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def fit(opened: Opened, state: TrainState, asked: Asked, *, where: str, first: bool = True) -> Fit:
    """The targets of a checkpoint in ``state``; nothing is changed.

    Args:
        opened: the checkpoint, or the part of it that belongs to one of several states.
        state: what it is to go into.
        asked: what is wanted.
        where: begins a message.
        first: of several states, the one whose step is that of the checkpoint.

    Raises:
        CheckpointMismatchError: names, shapes, dtypes or hyperparameters that differ, the first ten in a table.
        DamagedCheckpointError: values that make no sense.
    """
    found = _Comparison(asked, partial=opened.manifest.only == ("trainable",))
    for section, tensors in (("params", state.params), ("buffers", clean_buffers(state.model, persistent_only=True))):
        found.compare_model(section, _section(opened, section), tensors)
    optimizer = slices = clock = seed = None
    if not asked.model_only:
        slices = dict(_dict_of(opened, SLICES))
        found.compare_slices(_section(opened, SLICES), slices, state)
        if not asked.ignored.part(OPTIMIZER):
            optimizer = closed.record(_dict_of(opened, OPTIMIZER), f"{layout.index_name(0)}: {OPTIMIZER}", ("state", "groups"))
            found.rows.extend(stray_state(optimizer, state, found.touched, strict=asked.strict))
            found.rows.extend(group_differences(optimizer, state, found.touched))
    if found.rows:
        raise mismatch(where, found.rows, source="checkpoint", advice=_advice(found.rows, asked))
    if not asked.model_only:
        clock, seed = _clock(opened, check_step=first), _seed(opened)
    if optimizer is not None:
        kept = {
            name: content for name, content in optimizer["state"].items() if name in state.params and name not in found.touched
        }
        optimizer = {**optimizer, "state": kept}
        place_optimizer(optimizer, state, opened.refs, found, cast=asked.cast)
    return Fit(
        regions=found.regions,
        into=found.into,
        make=found.make,
        optimizer=optimizer,
        slices=slices,
        clock=clock,
        seed=seed,
        left=frozenset(found.touched),
        missing=tuple(found.missing),
        unexpected=tuple(found.unexpected),
    )


@dataclass(slots=True, eq=False, repr=False)
class _Comparison:
    """What was found so far; ``touched`` are the names in the model about which the two sides do not agree."""

    asked: Asked
    partial: bool
    rows: list[Difference] = field(default_factory=list)
    touched: set[str] = field(default_factory=set)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    regions: dict[str, Region] = field(default_factory=dict)
    into: dict[str, Tensor] = field(default_factory=dict)
    make: dict[str, Make] = field(default_factory=dict)
    _known: dict[Any, Region] = field(default_factory=dict)

    def region_of(self, tensor: Tensor) -> Region:
        """The part of a tensor that this rank has; computed once for all that lie alike."""
        lies = (tensor.shape, getattr(tensor, "placements", None), id(getattr(tensor, "device_mesh", None)))
        region = self._known.get(lies)
        if region is None:
            box = extent(tensor)
            region = self._known[lies] = Region(offset=box.offset, size=box.size)
        return region

    def compare_model(self, section: str, stored: Mapping[str, TensorRef], here: Mapping[str, Tensor]) -> None:
        """Parameters, or buffers."""
        left = {plain.join(section, name): name for name in here}
        for key, ref in stored.items():
            name = left.pop(key, None)
            if name is not None and not self.asked.ignored.name(name):
                if self._matches(key, ref, here[name]):
                    self._take(key, here[name])
                else:
                    self.touched.add(name)
            elif name is not None:
                self.touched.add(name)
            else:
                stored_name = plain.unescaped(key.partition("/")[2])
                self._unexpected(stored_name, key, str(ref), ignored=self.asked.ignored.name(stored_name))
        for key, name in left.items():
            if self.asked.ignored.name(name):
                self.touched.add(name)
            elif not self.partial or (section == "params" and here[name].requires_grad):
                self._missing(name, key, str(plain.ref_of(here[name])))

    def compare_slices(self, stored: Mapping[str, TensorRef], tree: dict[str, Any], state: TrainState) -> None:
        """Transforms by name, and the tensors of those that are on both sides.

        Mutates: ``tree``, which loses the transforms that are not taken over.
        """
        for name in {**state.slices, **tree}:
            key = plain.join(SLICES, name)
            if self.asked.ignored.part(key):
                self.touched.add(name)
            elif name not in tree:
                self._missing(name, key, "a transform")
            elif name not in state.slices:
                self._unexpected(name, key, "a transform", ignored=False)
            else:
                continue
            tree.pop(name, None)
        here = plain.encode({name: content for name, content in state.slices.items() if name in tree}, "slices")[1]
        for key in {**stored, **here}:
            if self._is_touched(key):
                continue
            ref, tensor = stored.get(key), here.get(key)
            if ref is None:
                self.rows.append(missing(key, str(plain.ref_of(here[key]))))
            elif tensor is None:
                self.rows.append(unexpected(key, str(ref)))
            elif self._matches(key, ref, tensor):
                self._take(key, tensor)

    def _is_touched(self, key: str) -> bool:
        """Whether a tensor of a slice belongs to something about which enough was said."""
        return bool(self.touched) and not self.touched.isdisjoint(map(plain.unescaped, key.split("/")[1:]))

    def _matches(self, key: str, ref: TensorRef, tensor: Tensor) -> bool:
        dtype = layout.DTYPES[ref.dtype]
        if ref.shape == tuple(tensor.shape):
            if dtype == tensor.dtype:
                return True
            if self.asked.cast and dtype.is_floating_point and tensor.dtype.is_floating_point:
                return True
        self.rows.append(unequal(key, ref, plain.ref_of(tensor)))
        return False

    def _take(self, key: str, tensor: Tensor) -> None:
        self.regions[key], self.into[key] = self.region_of(tensor), tensor

    def _missing(self, name: str, key: str, here: str) -> None:
        self.touched.add(name)
        if self.asked.strict:
            self.rows.append(missing(key, here))
        else:
            self.missing.append(name)

    def _unexpected(self, name: str, key: str, stored: str, *, ignored: bool) -> None:
        self.touched.add(name)
        if ignored:
            return
        if self.asked.strict:
            self.rows.append(unexpected(key, stored))
        else:
            self.unexpected.append(name)


def _advice(rows: list[Difference], asked: Asked) -> str:
    """What to do, by what there is to be done."""
    kinds = {row.kind for row in rows}
    ways = ["build model, optimizer and transforms as in the run that wrote it, or load another checkpoint"]
    if asked.strict and kinds <= {"missing", "unexpected"}:
        ways.append("strict=False leaves what only one side has")
    if all(row.name.startswith(f"{OPTIMIZER}/") for row in rows):
        ways.append('ignore=["optimizer"] leaves the optimizer as it is here')
    elif kinds <= {"missing", "unexpected"}:
        ways.append('ignore=[...] leaves the names that it lists, as in ignore=["head.*", "slices/ema"]')
    if kinds == {"dtype"} and not asked.cast:
        ways.append("cast=True converts floating-point dtypes")
    return "; ".join(ways)


def _section(opened: Opened, name: str) -> dict[str, TensorRef]:
    begin = f"{name}/"
    return {key: ref for key, ref in opened.refs.items() if key.startswith(begin)}


def _dict_of(opened: Opened, section: str) -> dict[str, Any]:
    """A section with a ``Leaf`` in place of each tensor, which must be a dict with text keys."""
    found = opened.outlines[section]
    if type(found) is not dict or not all(type(key) is str for key in found):
        raise DamagedCheckpointError(f"{layout.index_name(0)}: {section}: needs a dict, got {closed.kind(found)}")
    return found


def _clock(opened: Opened, *, check_step: bool) -> Clock:
    where = f"{layout.index_name(0)}: clock"
    raw = {"before": None, "start": None, **_dict_of(opened, "clock")}  # they may be missing
    before, start = raw.pop("before"), raw.pop("start")
    if before is not None and type(before) is not dict:
        raise DamagedCheckpointError(f"{where}: before: needs a dict, got {closed.kind(before)}")
    counts = _counts(raw, where)
    if check_step and counts["step"] != opened.manifest.step:
        raise DamagedCheckpointError(f"{where}: is at step {counts['step']}, the manifest at step {opened.manifest.step}")
    return Clock(
        **counts,
        before=None if before is None else Clock(**_counts(before, f"{where}: before")),
        start=None if start is None else _place(start, f"{where}: start"),
    )


def _place(raw: Any, where: str) -> Place:
    numbers = [closed.whole(value, where) for value in raw] if type(raw) is list else []
    if len(numbers) != 2:
        raise DamagedCheckpointError(f"{where}: needs two whole numbers, got {closed.kind(raw)}")
    return Place(*numbers)


def _counts(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """The counts of a clock, checked."""
    closed.record(raw, where, tuple(name for name in Clock().state_dict() if name != "before"))
    seconds = raw["seconds"]
    if type(seconds) is not float:
        raise DamagedCheckpointError(f"{where}: seconds: needs a float, got {closed.kind(seconds)}")
    return {
        **{name: closed.whole(value, f"{where}: {name}") for name, value in raw.items() if name != "seconds"},
        "seconds": seconds,
    }


def _seed(opened: Opened) -> int:
    seed = opened.shared["seed"]
    if type(seed) is not int:
        raise DamagedCheckpointError(f"{layout.index_name(0)}: seed: needs a whole number, got {closed.kind(seed)}")
    return seed
