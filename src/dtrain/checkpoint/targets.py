"""Where the tensors of a checkpoint go: whether it fits a state, and which part of each tensor this rank needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from dtrain.checkpoint import closed, layout, plain
from dtrain.checkpoint.contents import optimizer_groups
from dtrain.checkpoint.differences import Row, mismatch
from dtrain.checkpoint.plain import TensorRef
from dtrain.checkpoint.plan import Region
from dtrain.checkpoint.verify import Opened
from dtrain.clock import Clock
from dtrain.errors import DamagedCheckpointError
from dtrain.names import clean_buffers
from dtrain.state import TrainState
from dtrain.tensors import extent

_ADVICE = "build model, optimizer and transforms as in the run that wrote it, or load another checkpoint"
# Hyperparameters that a schedule adds to a group on its first use, after the optimizer of a resumed run was built.
_ADDED_LATER = frozenset({"initial_lr"})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Target:
    """Which region of a stored tensor this rank needs, and the tensor to put it into (made when it is asked for)."""

    region: Region
    tensor: Callable[[], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Fit:
    """How a checkpoint fits a state: a target for every tensor, and the plain values, tensors of ``extra`` apart."""

    tensors: Mapping[str, Target]
    extra: Mapping[str, Target]
    clock: Clock
    seed: int


def fit(opened: Opened, state: TrainState, extra: Mapping[str, Any]) -> Fit:
    """The targets of a checkpoint in ``state``; nothing is changed.

    Raises:
        CheckpointMismatchError: names, shapes, dtypes or hyperparameters that differ, the first ten in a table.
        DamagedCheckpointError: values that make no sense.
    """
    tensors: dict[str, Target] = {}
    rows: list[Row] = []
    here: dict[str, Tensor] = {}
    buffers = clean_buffers(state.model, persistent_only=True)
    for section, tree in (("params", state.params), ("buffers", buffers), ("slices", state.slices)):
        here.update(plain.encode(dict(tree), section)[1])
    stored = {key: ref for key, ref in opened.refs.items() if key.split("/")[0] in ("params", "buffers", "slices")}
    for key in {**stored, **here}:
        theirs, ours = stored.get(key), plain.ref_of(here[key]) if key in here else None
        if theirs is None or ours is None or (theirs.dtype, theirs.shape) != (ours.dtype, ours.shape):
            rows.append((key, str(theirs) if theirs else None, str(ours) if ours else None))
        else:
            tensors[key] = Target(region=_region(here[key]), tensor=partial(_given, here[key]))
    rows.extend(_slice_rows(opened, state))
    rows.extend(_group_rows(opened, state))
    known = _decoded(opened, "extra")
    rows.extend((plain.join("extra", name), None, "given") for name in extra if name not in known)
    if rows:
        raise mismatch(f"load_sharded: {opened.folder}", _causes(rows), source="checkpoint", advice=_ADVICE)
    # From here on the optimizer's names are parameters, here and there.
    for key, ref in _section(opened, "optimizer"):
        name = plain.unescaped(key.split("/")[2])
        if key.startswith("optimizer/groups/"):
            tensors[key] = _whole(ref, _group_device(key, state))
        else:
            tensors[key] = _optimizer_target(key, ref, state, name, opened.refs[plain.join("params", name)])
    wanted = {plain.join("extra", name) for name in extra}
    return Fit(
        tensors=tensors,
        extra={k: _whole(r, torch.device("cpu")) for k, r in _section(opened, "extra") if "/".join(k.split("/")[:2]) in wanted},
        clock=_clock(opened),
        seed=_seed(opened),
    )


def _causes(rows: list[Row]) -> list[Row]:
    """``rows`` without those that follow from others: slices, optimizer state and groups of parameters that differ."""
    params = {key.split("/")[1] for key, _, _ in rows if key.startswith("params/")}
    others = any(theirs is None or ours is None for key, theirs, ours in rows if key.startswith("params/"))

    def follows(key: str) -> bool:
        section, *parts = key.split("/")
        of_group = section == "optimizer" and parts[0] == "groups" and parts[-1] == "params"
        return section in ("slices", "optimizer") and (not params.isdisjoint(parts) or (of_group and others))

    return [row for row in rows if not follows(row[0])]


def _region(tensor: Tensor) -> Region:
    box = extent(tensor)
    return Region(offset=box.offset, size=box.size)


def _given(tensor: Tensor) -> Tensor:
    return tensor


def _whole(ref: TensorRef, device: torch.device) -> Target:
    """A new plain tensor that holds all of the stored one."""
    make = partial(torch.empty, ref.shape, dtype=layout.DTYPES[ref.dtype], device=device)
    return Target(region=Region(offset=(0,) * len(ref.shape), size=ref.shape), tensor=make)


def _optimizer_target(key: str, ref: TensorRef, state: TrainState, name: str, saved_param: TensorRef) -> Target:
    """A new tensor of an optimizer's state, laid out as the optimizer itself would.

    What has the parameter's shape lies like the parameter. ``step`` does not, even for a scalar parameter, and stays on
    the CPU unless the optimizer counts on the device: both are torch's own convention. What lay with the parameter in
    another shape (a factored second moment) is whole on every rank, a DTensor if the parameter is one.
    """
    param, dtype = state.params[name], layout.DTYPES[ref.dtype]
    counts = key.rsplit("/", 1)[-1] == "step" and not ref.distributed
    if ref.shape == tuple(param.shape) and not counts:
        return Target(region=_region(param), tensor=partial(torch.empty_like, param, dtype=dtype, requires_grad=False))
    on_host = counts and not _counts_on_device(state, param)
    whole = _whole(ref, torch.device("cpu") if on_host else param.device)
    lay_with_param = ref.distributed or (ref.shape != () and not saved_param.distributed)
    # DTensor.new_empty of another shape is replicated, of a plain tensor plain.
    return Target(region=whole.region, tensor=partial(param.new_empty, ref.shape, dtype=dtype)) if lay_with_param else whole


def _group_device(key: str, state: TrainState) -> torch.device:
    """Where a hyperparameter that is a tensor goes: to the one that is there, or else to the CPU."""
    _, _, group, name, *_ = key.split("/")
    there = state.optimizer.param_groups[int(group)].get(plain.unescaped(name))
    return there.device if isinstance(there, Tensor) else torch.device("cpu")


def _counts_on_device(state: TrainState, param: Tensor) -> bool:
    group = next(g for g in state.optimizer.param_groups if any(p is param for p in g["params"]))
    return bool(group.get("capturable") or group.get("fused"))


def _section(opened: Opened, name: str) -> Iterator[tuple[str, TensorRef]]:
    return ((key, ref) for key, ref in opened.refs.items() if key.startswith(f"{name}/"))


def _decoded(opened: Opened, section: str) -> dict[str, Any]:
    """A section with references in place of tensors, which must be a dict with text keys."""
    found = plain.decode(opened.shared[section], section, lambda key, ref: ref)
    if type(found) is not dict or not all(type(key) is str for key in found):
        raise DamagedCheckpointError(f"{layout.index_name(0)}: {section}: needs a dict, got {closed.kind(found)}")
    return found


def _slice_rows(opened: Opened, state: TrainState) -> Iterator[Row]:
    theirs, what = _decoded(opened, "slices"), "a transform"
    for name in {**theirs, **state.slices}:
        if name not in theirs:
            yield plain.join("slices", name), None, what
        elif name not in state.slices:
            yield plain.join("slices", name), what, None


def _group_rows(opened: Opened, state: TrainState) -> Iterator[Row]:
    """Parameter groups must hold the same parameters; hyperparameters may be new here, but not unknown here."""
    optimizer = closed.record(_decoded(opened, "optimizer"), f"{layout.index_name(0)}: optimizer", ("state", "groups"))
    for name, content in _dict(optimizer["state"], "optimizer/state").items():
        _dict(content, f"optimizer/state/{name}")
        if name not in state.params:
            yield plain.join("optimizer/state", name), "state", None
    theirs, ours = optimizer["groups"], optimizer_groups(state)
    if type(theirs) is not list or len(theirs) != len(ours):
        yield "optimizer/groups", f"{len(theirs)} groups", f"{len(ours)} groups"
        return
    for at, (saved, group) in enumerate(zip(theirs, ours, strict=True)):
        where = f"optimizer/groups/{at}"
        _dict(saved, where)
        if saved.get("params") != group["params"]:
            first = next((a or b for a, b in _pairs(saved.get("params"), group["params"]) if a != b), "?")
            yield f"{where}/params", f"{_count(saved.get('params'))} (first difference: {first})", f"{len(group['params'])}"
        for key in saved:
            if key not in group and key not in _ADDED_LATER:
                yield f"{where}/{key}", "a hyperparameter", None


def _pairs(a: Any, b: list[str]) -> Iterator[tuple[Any, Any]]:
    a = a if type(a) is list else []
    for at in range(max(len(a), len(b))):
        yield (a[at] if at < len(a) else None), (b[at] if at < len(b) else None)


def _count(names: Any) -> int:
    return len(names) if type(names) is list else 0


def _dict(value: Any, where: str) -> dict[str, Any]:
    """``value`` as a dict of the decoded values.

    Raises:
        DamagedCheckpointError: it is none.
    """
    if type(value) is not dict:
        raise DamagedCheckpointError(f"{layout.index_name(0)}: {where}: needs a dict, got {closed.kind(value)}")
    return value


def _clock(opened: Opened) -> Clock:
    where = f"{layout.index_name(0)}: clock"
    raw = closed.record(_decoded(opened, "clock"), where, tuple(Clock().state_dict()))
    seconds = raw["seconds"]
    if type(seconds) is not float:
        raise DamagedCheckpointError(f"{where}: seconds: needs a float, got {closed.kind(seconds)}")
    counts = {name: closed.whole(value, f"{where}: {name}") for name, value in raw.items() if name != "seconds"}
    if counts["step"] != opened.manifest.step:
        raise DamagedCheckpointError(f"{where}: is at step {counts['step']}, the manifest at step {opened.manifest.step}")
    return Clock(**cast(dict[str, Any], counts), seconds=seconds)


def _seed(opened: Opened) -> int:
    seed = opened.shared["seed"]
    if type(seed) is not int:
        raise DamagedCheckpointError(f"{layout.index_name(0)}: seed: needs a whole number, got {closed.kind(seed)}")
    return seed
