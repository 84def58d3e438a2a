"""Read the files of a run's ranks, and join them to facts that do not depend on the layout (``RunRecord``).

Facts of a step come in program order: data, loss, state of the optimizer, gradients in the order of backward, learning rate,
parameters, buffers, states of transforms, metrics, evaluations, exports.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

KINDS = (
    "initial",
    "generator",
    "ties",
    "samples",
    "rng",
    "loss",
    "optimizer_state",
    "gradient",
    "lr",
    "parameter",
    "buffer",
    "transform",
    "variable",
    "evaluation",
    "metric",
    "exported",
)
"""Kinds of facts in the order of a step. Variables come late, because most of them follow from data and parameters."""

TENSORS = ("initial", "gradient", "parameter", "buffer", "transform", "exported")
"""Kinds of facts that are tensors."""

_OF_UPDATES = ("initial", "gradient", "parameter", "buffer", "optimizer", "optimizer_state", "step")

BITS = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8, "float8_e4m3fn": 4, "float8_e5m2": 3}
"""Bits of the significand of each dtype; ``2.0 ** -bits`` is the largest relative error of one rounding."""

Row = Mapping[str, Any]
_DECIMALS = re.compile(r"[-+]?\d+\.\d+(?:[eE][-+]?\d+)?|[-+]?\d+[eE][-+]?\d+|\bnan\b|\binf\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFact:
    """A recorded tensor: norm, digest of all bits, and sketch; see ``run_log``."""

    norm: float
    digest: str
    shape: tuple[int, ...]
    dtype: str
    sketch: Any = field(repr=False)
    trains: bool = True
    is_buffer: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LossFact:
    """Losses of a step over all microbatches and ranks. ``weight`` is None if the loop did not say the weights."""

    total: float
    weight: float | None
    count: int

    @property
    def mean(self) -> float:
        """The mean that the gradient belongs to; without weights, the mean of the losses."""
        return self.total / (self.weight if self.weight else self.count or 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One fact of a run.

    Args:
        step: step before whose update the fact belongs, from 0.
        part: number of the optimizer.
        kind: one of ``KINDS``.
        name: parameter, buffer, metric or variable.
        value: ``TensorFact``, ``LossFact``, number, text or counter of samples.
        by_rank: value of each rank, if ranks have values of their own.
        order: place among facts of the same kind and step.
    """

    step: int
    part: int
    kind: str
    name: str
    value: Any
    by_rank: tuple[Any, ...] = ()
    order: int = 0

    @property
    def key(self) -> tuple[int, int, str, str]:
        """Identity of the fact in all runs."""
        return self.step, self.part, self.kind, self.name


@dataclass(slots=True, kw_only=True, eq=False)
class RunRecord:
    """All facts of a run.

    Args:
        name: name of the run.
        ranks: rows of each rank, in program order.
        facts: joined facts by key, in the order of the program.
        notes: rows about the whole run, each once.
        numbers: numbers of all sketches of rank 0.
    """

    name: str
    ranks: Sequence[Sequence[Row]]
    facts: Mapping[tuple[int, int, str, str], Fact]
    notes: Sequence[Row]
    numbers: Any = field(repr=False)

    def sketch(self, row: Row) -> Any:
        """Return the sketch of a row of rank 0."""
        begin, count = row["sketch"]
        return self.numbers[begin : begin + count]

    def rows(self, kind: str, rank: int = 0) -> list[Row]:
        """Return the rows of one kind on one rank."""
        # A rank that did not start has no file.
        return [row for row in self.ranks[rank] if row["kind"] == kind] if rank < len(self.ranks) else []

    def note(self, code: str) -> Row | None:
        """Return the first note with ``code``."""
        return next((row for row in self.notes if row["code"] == code), None)

    def of_kind(self, kind: str, step: int | None = None) -> list[Fact]:
        """Return the facts of one kind, in one step or in all steps."""
        return [fact for fact in self.facts.values() if fact.kind == kind and step in (None, fact.step)]

    def step_rows(self, step: int, part: int = 0) -> list[Row]:
        """Return the row of a step of each rank that has one."""
        return [
            row for rows in self.ranks for row in rows if row["kind"] == "step" and (row["step"], row["part"]) == (step, part)
        ]

    @property
    def first_steps(self) -> Mapping[int, int]:
        """First step with an update of each optimizer."""
        first: dict[int, int] = {}
        for row in self.rows("step"):
            first[row["part"]] = min(row["step"], first.get(row["part"], row["step"]))
        return first

    @property
    def steps(self) -> list[int]:
        """Steps with an update, in order. A loop by hand before dtrain's step prepares the training, and does not count."""
        layout = {row["step"] for row in self.rows("layout")}
        return sorted({row["step"] for row in self.rows("step") if not layout or row["step"] in layout})


def read_record(name: str, folder: Path) -> RunRecord:
    """Read the record of a run from its folder. A killed rank may have left half a line, which is skipped."""
    ranks: list[list[Row]] = []
    while (path := folder / f"rank-{len(ranks)}.jsonl").exists():
        ranks.append(_without_preparation(list(_read_rows(path))))
    numbers_path = folder / "rank-0.f64"
    whole = numbers_path.stat().st_size // 8 if numbers_path.exists() else 0
    numbers = np.fromfile(numbers_path, count=whole) if whole else np.empty(0)
    facts = sorted(_facts(ranks, numbers), key=lambda fact: (fact.step, fact.part, KINDS.index(fact.kind), fact.order))
    notes = [row for rows in ranks[:1] for row in rows if row["kind"] == "note"]
    return RunRecord(name=name, ranks=ranks, facts={fact.key: fact for fact in facts}, notes=notes, numbers=numbers)


def _read_rows(path: Path) -> Iterator[Row]:
    for line in path.read_text(encoding="utf-8").split("\n"):
        try:
            yield json.loads(line)
        except ValueError:
            continue


def _without_preparation(rows: list[Row]) -> list[Row]:
    """Drop the updates of a loop by hand before the start of dtrain's loop. Only the first run records them."""
    start = next((place for place, row in enumerate(rows) if row["kind"] == "loop_starts"), 0)
    return [row for place, row in enumerate(rows) if place >= start or row["kind"] not in _OF_UPDATES]


def _facts(ranks: list[list[Row]], numbers: Any) -> Iterator[Fact]:
    if not ranks:
        return
    yield from _tensor_facts(ranks, numbers)
    yield from _step_facts(ranks)
    yield from _variable_facts(ranks[0])
    yield from _metric_facts(ranks[0])
    yield from _evaluation_facts(ranks)


def _tensor_facts(ranks: list[list[Row]], numbers: Any) -> Iterator[Fact]:
    others: dict[tuple[Any, ...], dict[int, str]] = {}
    for rank, rows in enumerate(ranks):
        for row in rows:
            if row["kind"] in TENSORS:
                others.setdefault((row["kind"], row["step"], row.get("part", 0), row["name"]), {})[rank] = row["digest"]
    for place, row in enumerate(ranks[0]):
        if row["kind"] not in TENSORS or row["sketch"] is None:
            continue
        begin, count = row["sketch"]
        part = row.get("part", 0)
        # Backward reaches the last parameters first.
        order = -row["order"] if row["kind"] == "gradient" else place
        digests = others[row["kind"], row["step"], part, row["name"]]
        yield Fact(
            step=row["step"],
            part=part,
            kind=row["kind"],
            name=row["name"],
            value=TensorFact(
                norm=float(row["norm"]),
                digest=row["digest"],
                shape=tuple(row["shape"]),
                dtype=row["dtype"],
                sketch=numbers[begin : begin + count],
                trains=row.get("trains", True),
                is_buffer=row.get("buffer", False),
            ),
            by_rank=tuple(digests.get(rank) for rank in range(len(ranks))),
            order=order,
        )


def _step_facts(ranks: list[list[Row]]) -> Iterator[Fact]:
    by_step: dict[tuple[int, int], list[Row]] = {}
    layouts = [next((row for row in rows if row["kind"] == "layout"), None) for rows in ranks]
    # Ranks that share a batch have its samples and losses once.
    counted = [
        rank
        for rank, layout in enumerate(layouts)
        if layout is None or layout["data_rank"] not in [other["data_rank"] for other in layouts[:rank] if other is not None]
    ]
    for rank, rows in enumerate(ranks):
        for row in rows:
            if row["kind"] == "step" and rank in counted:
                by_step.setdefault((row["step"], row["part"]), []).append(row)
    for (step, part), rows in by_step.items():
        samples = [tuple(row["samples"]) for row in rows]
        yield Fact(
            step=step,
            part=part,
            kind="samples",
            name="",
            value=Counter(s for each in samples for s in each),
            by_rank=tuple(samples),
        )
        yield Fact(step=step, part=part, kind="rng", name="", value=rows[0]["rng"], by_rank=tuple(row["rng"] for row in rows))
        losses = [loss for row in rows for loss in row["losses"]]
        weights = [weight for _, weight in losses]
        weight = None if not weights or None in weights else float(sum(weights))
        yield Fact(
            step=step,
            part=part,
            kind="loss",
            name="",
            value=LossFact(total=float(sum(total for total, _ in losses)), weight=weight, count=len(losses)),
            by_rank=tuple(sum(total for total, _ in row["losses"]) for row in rows),
        )
        yield Fact(
            step=step, part=part, kind="lr", name="", value=tuple(rows[0]["lr"]), by_rank=tuple(tuple(r["lr"]) for r in rows)
        )
        yield Fact(step=step, part=part, kind="ties", name="", value=tuple(rows[0]["ties"]))
    for row in ranks[0]:
        if row["kind"] == "optimizer_state":
            value = (row["tensors"], float(row["norm"]))
            yield Fact(step=row["step"], part=row["part"], kind="optimizer_state", name="", value=value)


def _variable_facts(rows: Sequence[Row]) -> Iterator[Fact]:
    for place, row in enumerate(rows):
        if row["kind"] == "variable":
            kind = "generator" if row["type"] == "generator" else "variable"
            yield Fact(step=row["step"], part=0, kind=kind, name=row["name"], value=row, order=place)


def _metric_facts(rows: Sequence[Row]) -> Iterator[Fact]:
    seen: Counter[tuple[int, int, str]] = Counter()
    for place, row in enumerate(rows):
        if row["kind"] == "metrics":
            values = {
                f"{'' if row['source'] == 'log' else row['source'] + ': '}{name}": v for name, v in row["numbers"].items()
            }
        elif row["kind"] == "printed":
            skeleton = _DECIMALS.sub("#", row["text"]).strip()
            texts = _DECIMALS.findall(row["text"])
            values = {f"printed: {skeleton} ({index + 1})": text for index, text in enumerate(texts)}
        else:
            continue
        for name, value in values.items():
            step, part = row["step"], row.get("part", 0)
            seen[step, part, name] += 1
            number = seen[step, part, name]
            label = name if number == 1 else f"{name}, {number}"
            yield Fact(step=step, part=part, kind="metric", name=label, value=value, by_rank=(row,), order=place)


def _evaluation_facts(ranks: list[list[Row]]) -> Iterator[Fact]:
    # An evaluation that only some ranks run, such as that of a codec which rank 0 trains, must not shift the others.
    per_rank = [_evaluations_by_place(rows) for rows in ranks]
    for index, (step, part, number) in enumerate(per_rank[0]):
        rows = [found for evaluations in per_rank if (found := evaluations.get((step, part, number))) is not None]
        by_rank = [[tuple(samples) for samples in each["batches"]] for each in rows]
        # Ranks that all run the same batch repeat it, for example to generate text.
        repeated = Counter(by_rank[0]) if len(by_rank) > 1 else Counter()
        for batches in by_rank[1:]:
            repeated &= Counter(batches)
        everything = Counter(sample for batches in by_rank for samples in batches for sample in samples)
        extra = Counter({batch: count * (len(by_rank) - 1) for batch, count in repeated.items()})
        value = everything - Counter(sample for batch in extra.elements() for sample in batch)
        lists = tuple(tuple(sample for samples in batches for sample in samples) for batches in by_rank)
        name = f"evaluation {number}"
        yield Fact(step=step, part=part, kind="evaluation", name=name, value=value, by_rank=lists, order=index)


def _evaluations_by_place(rows: Sequence[Row]) -> dict[tuple[int, int, int], Row]:
    """Return the evaluations of a rank by step, part, and number among those of the step."""
    seen: Counter[tuple[int, int]] = Counter()
    found = {}
    for row in rows:
        if row["kind"] == "evaluation":
            place = row["step"], row.get("part", 0)
            seen[place] += 1
            found[*place, seen[place]] = row
    return found


def matching_name(name: str, known: Collection[str]) -> str | None:
    """Return the name in ``known`` of an exported tensor, whose name may have another prefix."""
    if name in known:
        return name
    return next((other for other in known if name.endswith(f".{other}") or other.endswith(f".{name}")), None)
