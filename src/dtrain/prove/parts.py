"""Put together the parts of tensors that ranks hold as plain tensors, to compare them (``find_parts``, ``join_parts``).

In a script's own tensor parallelism, ranks hold rows or columns of a weight. With its own experts, ranks hold some of the
modules, under names that count from 0. The initial values show where a part lies: together, the parts are the whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from dtrain.prove.run_log import digest, sketch
from dtrain.prove.run_records import Fact, Row, RunRecord, TensorFact, matching_name, sort_facts, tensor_fact

_JOINED = ("initial", "gradient", "parameter")
_FLAT = -1
_DIGITS = re.compile(r"\d+")
_Rows = dict[tuple[int, int, str, str], dict[int, Row]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _PartLayout:
    """Layout of the parts of a tensor in the whole.

    Args:
        shape: shape of the whole.
        axis: axis along which it is split; ``_FLAT`` if the elements are split in their order.
        groups: the axis is split within each of so many groups of equal size, as queries, keys and values; 0 if part i has each
            element whose index is i modulo the number of parts.
        count: number of parts.
        is_inner: True if rank r holds part ``r % count``; False if consecutive ranks hold the same part.
    """

    shape: tuple[int, ...]
    axis: int
    groups: int
    count: int
    is_inner: bool = True

    def ranks_of_copies(self, ranks: int) -> list[list[int]]:
        """Return the ranks of each copy of the whole, in the order of the parts."""
        copies = ranks // self.count
        return [
            [part + copy * self.count if self.is_inner else part * copies + copy for part in range(self.count)]
            for copy in range(copies)
        ]

    def join(self, parts: Sequence[Any]) -> Any:
        """Return the whole; None if the parts do not fit."""
        axis, count = self.axis, len(parts)
        if axis == _FLAT:
            flat = np.concatenate([part.reshape(-1) for part in parts])
            size = int(np.prod(self.shape))
            return flat[:size].reshape(self.shape) if 0 <= len(flat) - size < parts[-1].size else None
        length = sum(part.shape[axis] for part in parts)
        # The last part may have padding.
        if not 0 <= length - self.shape[axis] < parts[-1].shape[axis]:
            return None
        if self.groups > 1:
            before, after = parts[0].shape[:axis], parts[0].shape[axis + 1 :]
            split = [part.reshape(*before, self.groups, -1, *after) for part in parts]
            whole = np.concatenate(split, axis + 1).reshape(*before, length, *after)
        elif self.groups == 1:
            whole = np.concatenate(parts, axis)
        else:
            whole = np.empty((*parts[0].shape[:axis], length, *parts[0].shape[axis + 1 :]))
            for number, part in enumerate(parts):
                if len(range(number, length, count)) != part.shape[axis]:
                    return None
                whole[(slice(None),) * axis + (slice(number, None, count),)] = part
        return whole.take(range(self.shape[axis]), axis)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Parts of tensors on the ranks of a run.

    Args:
        layouts: layout of each tensor that ranks hold parts of.
        names: for each rank, the names on one rank by its own names, where they differ.
        unknown: tensors of which no layout has the values of one rank.
    """

    layouts: Mapping[str, _PartLayout]
    names: Sequence[Mapping[str, str]]
    unknown: tuple[str, ...] = ()

    def remark(self) -> str:
        """Return what was put together, or why the run was not compared, in a sentence."""
        if self.unknown:
            return (
                f"Ranks begin with parts of {_and_more(self.unknown)} that are not in the tensor of 1 rank, so losses, "
                "gradients and weights were not compared. Draw the whole on each rank, and keep the part."
            )
        if self.layouts:
            return f"Ranks hold parts of {_and_more(sorted(self.layouts))} as plain tensors, which were put together."
        moved = sorted({name for names in self.names for name in names.values()})
        return f"Ranks hold {_and_more(moved)} under other names, which were compared by their values."


def _and_more(names: Sequence[str]) -> str:
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]


def find_parts(record: RunRecord, reference: RunRecord) -> Parts | None:
    """Return where the plain tensors of ranks lie in those of one rank, by their initial values; None if all are whole."""
    wholes = {fact.name: fact for fact in reference.of_kind("initial")}
    rows = [_first_rows(record, rank) for rank in range(len(record.ranks))]
    names = [_other_names(own, wholes) for own in rows]
    by_name = _by_name(rows, names)
    layouts: dict[str, _PartLayout] = {}
    unknown: list[str] = []
    missing = {_DIGITS.sub("#", name) for name in wholes if name not in by_name}
    for name, own in by_name.items():
        if (whole := wholes.get(name)) is None:
            continue
        shapes = [tuple(row["shape"]) for row in own.values()]
        if all(shape == whole.value.shape for shape in shapes):
            # Modules that ranks have drawn for themselves.
            is_drawn = _DIGITS.sub("#", name) in missing and len({row["digest"] for row in own.values()}) > 1
            unknown += [name] * is_drawn
        elif all(np.prod(shape) < np.prod(whole.value.shape) for shape in shapes):
            fitting = _fitting_layouts(record, whole, own)
            if not fitting:
                unknown.append(name)
            elif len(fitting) > 1:
                updates = _rows_of(record, names)
                fitting.sort(key=lambda layout: _distance(record, reference, name, updates, layout))
            layouts.update((name, layout) for layout in fitting[:1])
    if not layouts and not unknown and not any(names):
        return None
    return Parts(layouts=layouts, names=names, unknown=tuple(unknown))


def _first_rows(record: RunRecord, rank: int) -> dict[str, Row]:
    """Return the row of the initial value of each plain tensor of a rank."""
    rows: dict[str, Row] = {}
    for row in record.rows("initial", rank):
        if row["sketch"] is not None and not row.get("buffer"):
            rows.setdefault(row["name"], row)
    return rows


def _other_names(own: Mapping[str, Row], wholes: Mapping[str, Fact]) -> dict[str, str]:
    """Return the names on one rank of the tensors that have them there under other names, as the experts of a rank."""
    by_digest: dict[str, list[str]] = {}
    for name, fact in wholes.items():
        by_digest.setdefault(fact.value.digest, []).append(name)
    prefixes: dict[str, set[str]] = {}
    for name, row in own.items():
        expected, fitting = wholes.get(name), by_digest.get(row["digest"], [])
        if len(fitting) == 1 and (expected is None or expected.value.digest != row["digest"]):
            local, whole = name.split("."), fitting[0].split(".")
            while len(local) > 1 and len(whole) > 1 and local[-1] == whole[-1]:
                del local[-1], whole[-1]
            prefixes.setdefault(".".join(local), set()).add(".".join(whole))
    names = {}
    for name in own:
        # A bias of zeros moves with the weight of its module.
        prefix = max((prefix for prefix in prefixes if name == prefix or name.startswith(f"{prefix}.")), key=len, default=None)
        if prefix is not None and len(prefixes[prefix]) == 1:
            other = next(iter(prefixes[prefix])) + name.removeprefix(prefix)
            if other in wholes and list(wholes[other].value.shape) == own[name]["shape"]:
                names[name] = other
    return names


def _by_name(rows: Sequence[Mapping[str, Row]], names: Sequence[Mapping[str, str]]) -> dict[str, dict[int, Row]]:
    """Return the rows of each tensor by rank, under its name on one rank."""
    by_name: dict[str, dict[int, Row]] = {}
    for rank, own in enumerate(rows):
        for name, row in own.items():
            by_name.setdefault(names[rank].get(name, name), {})[rank] = row
    return by_name


def _fitting_layouts(record: RunRecord, whole: Fact, own: Mapping[int, Row]) -> list[_PartLayout]:
    """Return the layouts with which the parts have all bits of the whole. A tensor of zeros has several."""
    fitting = []
    for layout in (
        _layouts(whole.value.shape, [tuple(row["shape"]) for row in own.values()]) if len(own) == len(record.ranks) else ()
    ):
        joined = _copies(record, own, layout)
        if joined and all(fact is not None and fact.digest == whole.value.digest for fact in joined):
            fitting.append(layout)
    return fitting


def _layouts(shape: tuple[int, ...], shapes: Sequence[tuple[int, ...]]) -> Iterator[_PartLayout]:
    """Yield the layouts that parts of these shapes may have."""
    ranks, part = len(shapes), shapes[0]
    for count in range(ranks, 1, -1):
        if ranks % count:
            continue
        for is_inner in (True, False) if count < ranks else (True,):
            if len(part) != len(shape):
                if len(part) == 1:
                    yield _PartLayout(shape=shape, axis=_FLAT, groups=1, count=count, is_inner=is_inner)
                continue
            axes = [axis for axis in range(len(shape)) if any(other[axis] != shape[axis] for other in shapes)]
            if len(axes) != 1:
                continue
            length = part[axes[0]]
            are_equal = len(set(shapes)) == 1
            for groups in (1, 0, *(number for number in range(2, length) if are_equal and length % number == 0)):
                yield _PartLayout(shape=shape, axis=axes[0], groups=groups, count=count, is_inner=is_inner)


def _copies(record: RunRecord, own: Mapping[int, Row], layout: _PartLayout) -> list[TensorFact | None]:
    """Return the whole of each copy, put together from the parts of its ranks; None where that does not fit."""
    return [
        _joined(record, [(rank, own.get(rank)) for rank in ranks], layout)
        for ranks in layout.ranks_of_copies(len(record.ranks))
    ]


def _joined(record: RunRecord, rows: Sequence[tuple[int, Row | None]], layout: _PartLayout) -> TensorFact | None:
    parts = []
    for rank, row in rows:
        values = None if row is None or row["sketch"] is None else record.sketch(row, rank)
        if row is None or values is None or len(values) != np.prod(row["shape"]):
            return None
        parts.append(np.asarray(values).reshape(row["shape"]))
    whole = layout.join(parts)
    if whole is None:
        return None
    flat = torch.from_numpy(np.ascontiguousarray(whole).reshape(-1))
    first = rows[0][1]
    assert first is not None
    values = {"norm": float(torch.linalg.vector_norm(flat)), "digest": digest(flat), "shape": layout.shape}
    return replace(tensor_fact(first, sketch(flat)), **values)


def _distance(record: RunRecord, reference: RunRecord, name: str, rows: _Rows, layout: _PartLayout) -> float:
    """Return how far the first gradient and update of a tensor are from those of one rank, if its parts lie in this way."""
    total = 0.0
    for kind in ("gradient", "parameter"):
        fact = next((fact for fact in reference.of_kind(kind) if fact.name == name), None)
        if fact is not None:
            own = rows.get((fact.step, fact.optimizer_index, kind, name), {})
            whole = next(iter(_copies(record, own, layout)), None)
            total += np.inf if whole is None else float(np.linalg.norm(whole.sketch - fact.value.sketch))
    return total


def _rows_of(record: RunRecord, names: Sequence[Mapping[str, str]]) -> _Rows:
    """Return the rows of tensors by rank, under the key of their fact on one rank."""
    found: _Rows = {}
    for rank, rows in enumerate(record.ranks):
        for row in rows:
            if row["kind"] in _JOINED:
                key = row["step"], row["optimizer_index"], row["kind"], names[rank].get(row["name"], row["name"])
                found.setdefault(key, {})[rank] = row
    return found


def join_parts(record: RunRecord, parts: Parts) -> RunRecord:
    """Return the record with whole tensors in the place of parts, and without tensors that cannot be put together."""
    facts = dict(record.facts)
    moved = set(parts.layouts) | {name for names in parts.names for pair in names.items() for name in pair}
    for key, fact in record.facts.items():
        is_part = matching_name(fact.name, parts.layouts) is not None and fact.kind in ("exported", "transform", "buffer")
        if fact.kind in _JOINED and (fact.name in moved or fact.name in parts.unknown):
            del facts[key]
        elif is_part and fact.value.shape != parts.layouts[str(matching_name(fact.name, parts.layouts))].shape:
            # A file or an average of the part.
            del facts[key]
    for key, own in _rows_of(record, parts.names).items():
        name = key[3]
        if name in parts.unknown or key in facts:
            continue
        if (whole := _whole_fact(record, parts, key, own)) is not None:
            facts[key] = whole
    return replace(record, facts=sort_facts(facts.values()))


def _whole_fact(record: RunRecord, parts: Parts, key: tuple[int, int, str, str], own: Mapping[int, Row]) -> Fact | None:
    """Return the fact of a tensor with its value on each rank; None if the parts do not fit."""
    step, optimizer_index, kind, name = key
    layout, value = parts.layouts.get(name), None
    by_rank: list[str | None] = [None] * len(record.ranks)
    if layout is None:
        rank, row = next(iter(own.items()))
        if row["sketch"] is None:
            return None
        value = tensor_fact(row, record.sketch(row, rank))
        by_rank = [own[rank]["digest"] if rank in own else None for rank in range(len(record.ranks))]
    else:
        for ranks, copy in zip(layout.ranks_of_copies(len(record.ranks)), _copies(record, own, layout), strict=True):
            if copy is None:
                return None
            value = value or copy
            for rank in ranks:
                by_rank[rank] = copy.digest
    before = record.facts.get(key)
    order = next(iter(own.values()))
    place = before.order if before is not None else -order.get("order", 0)
    line = before.line if before is not None else ""
    return Fact(
        step=step,
        optimizer_index=optimizer_index,
        kind=kind,
        name=name,
        value=value,
        by_rank=tuple(by_rank),
        order=place,
        line=line,
    )
