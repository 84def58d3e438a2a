"""Read the files of a run's ranks, and join them to facts that do not depend on the layout (``RunRecord``).

Facts of a step come in program order: data, loss, state of the optimizer, gradients in the order of backward, learning rate,
parameters, buffers, states of transforms, metrics, evaluations, exports.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import numpy as np

KINDS: Mapping[str, str] = {
    "initial": "initial value of",
    "generator": "generator",
    "ties": "tied parameters",
    "frozen": "frozen parameters",
    "mode": "modules in evaluation mode",
    "samples": "samples",
    "rng": "random state",
    "loss": "loss",
    "optimizer_state": "state of the optimizer",
    "gradient": "gradient of",
    "lr": "learning rate",
    "parameter": "parameter",
    "buffer": "buffer",
    "transform": "state of the transform",
    "variable": "variable",
    "evaluation": "samples of",
    "metric": "metric",
    "exported": "exported",
}
"""Kinds of facts in the order of a step, with their names in texts. Variables come late, because most follow from others."""

TENSORS = ("initial", "gradient", "parameter", "buffer", "transform", "exported")
"""Kinds of facts that are tensors."""

_OF_STEP = ("samples", "rng", "loss", "lr", "ties", "frozen", "mode")
_OF_UPDATES = ("initial", "gradient", "parameter", "buffer", "optimizer", "optimizer_state", "step")

_OF_MODELS = ("initial", "gradient", "parameter", "changed", "buffer")
# Optimizers of a rank, up to which those of two ranks are compared.
_MAX_OPTIMIZERS = 8

BITS = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8, "float8_e4m3fn": 4, "float8_e5m2": 3}
"""Bits of the significand of each dtype; ``2.0 ** -bits`` is the largest relative error of one rounding."""

Row = Mapping[str, Any]
_DECIMALS = re.compile(r"[-+]?\d+\.\d+(?:[eE][-+]?\d+)?|[-+]?\d+[eE][-+]?\d+|\bnan\b|\binf\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFact:
    """A recorded tensor: norm, digest of all bits, and sketch; see ``run_log``. ``last_row`` is the last one with a number."""

    norm: float
    digest: str
    shape: tuple[int, ...]
    dtype: str
    sketch: Any = field(repr=False)
    trains: bool = True
    is_buffer: bool = False
    is_saved: bool = True
    last_row: int = -1


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
        optimizer_index: number of the optimizer.
        kind: one of ``KINDS``.
        name: parameter, buffer, metric or variable.
        value: ``TensorFact``, ``LossFact``, number, text or counter of samples.
        by_rank: value of each rank, if ranks have values of their own.
        order: place among facts of the same kind and step.
        line: line of the script that the fact comes from, as in ``"loop.py:31"``; "" if none is known.
        fields: digests of the tensors of the samples by name.
        shared_fields: the digests of ``fields`` that are equal on all ranks.
        loaded: parts of the samples that a loader has read, if the script has added tensors of its own; empty if not.
        changed: value of a parameter as the next forward begins, if the script changes it after the update on a rank.
        changed_by_rank: digest of that value on each rank.
        is_alone: if True, the ranks did not communicate between the first forward of the step and its update.
        columns: samples along the second axis of the tensors, each with its number; empty if it counts none.
    """

    step: int
    optimizer_index: int
    kind: str
    name: str
    value: Any
    by_rank: tuple[Any, ...] = ()
    order: int = 0
    line: str = ""
    fields: Mapping[str, int] = field(default_factory=dict)
    columns: Counter[str] = field(default_factory=Counter)
    shared_fields: Mapping[str, int] = field(default_factory=dict)
    loaded: Counter[str] = field(default_factory=Counter)
    changed: TensorFact | None = None
    changed_by_rank: tuple[str | None, ...] = ()
    is_alone: bool = False

    @property
    def key(self) -> tuple[int, int, str, str]:
        """Identity of the fact in all runs."""
        return self.step, self.optimizer_index, self.kind, self.name


@dataclass(slots=True, kw_only=True, eq=False)
class RunRecord:
    """All facts of a run.

    Args:
        name: name of the run.
        ranks: rows of each rank, in program order.
        facts: joined facts by key, in the order of the program.
        notes: rows about the whole run, each once.
        numbers: numbers of all sketches of each rank.
    """

    name: str
    ranks: Sequence[Sequence[Row]]
    facts: Mapping[tuple[int, int, str, str], Fact]
    notes: Sequence[Row]
    numbers: Any = field(repr=False)

    def sketch(self, row: Row, rank: int = 0) -> Any:
        """Return the sketch of a row of a rank."""
        begin, count = row["sketch"]
        return self.numbers[rank][begin : begin + count]

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

    def step_rows(self, step: int, optimizer_index: int = 0) -> list[Row]:
        """Return the row of a step of each rank that has one."""
        return [
            row
            for rows in self.ranks
            for row in rows
            if row["kind"] == "step" and (row["step"], row["optimizer_index"]) == (step, optimizer_index)
        ]

    def until(self, steps: int) -> RunRecord:
        """Return the record of the first ``steps`` steps, and of what follows before the next one."""

        def is_before(step: int, kind: str) -> bool:
            return step < steps or (step == steps and kind not in _OF_UPDATES and kind not in _OF_STEP)

        ranks = [[row for row in rows if is_before(row["step"], row["kind"])] for rows in self.ranks]
        facts = {key: fact for key, fact in self.facts.items() if is_before(fact.step, fact.kind)}
        return RunRecord(name=self.name, ranks=ranks, facts=facts, notes=self.notes, numbers=self.numbers)

    def updates_of_rank_0_alone(self) -> int:
        """Return the updates after which the proof has ended a loop on rank 0, if other ranks have none; 0 if not so."""
        is_alone = len(self.ranks) > 1 and not any(self.rows("step", rank) for rank in range(1, len(self.ranks)))
        return len(self.rows("step")) if is_alone and self.note("loop_cut") is not None else 0

    def loop_of_saves(self) -> set[int]:
        """Return the optimizers of the loop that saves: those with an update after the first save, or the last one of all."""
        rows = [row for row in self.ranks[0] if row["kind"] in ("step", "saved")]
        first = next((place for place, row in enumerate(rows) if row["kind"] == "saved"), len(rows))
        indices = [row["optimizer_index"] for row in rows if row["kind"] == "step"]
        later = {row["optimizer_index"] for row in rows[first:] if row["kind"] == "step"}
        return later or {*indices[-1:]}

    def saves(self, loop: Collection[int]) -> list[tuple[int, dict[int, int]]]:
        """Return the step of each save, and the updates of each optimizer of ``loop``, whose first one counts the steps."""
        counts, saves = dict.fromkeys(sorted(loop), 0), list[tuple[int, dict[int, int]]]()
        in_dtrain_loop = bool(self.rows("layout"))
        for row in self.ranks[0]:
            if row["kind"] == "step" and row["optimizer_index"] in counts:
                counts[row["optimizer_index"]] = row["step"] + 1
            elif row["kind"] == "saved":
                saves.append((row["step"] if in_dtrain_loop else next(iter(counts.values()), 0), dict(counts)))
        return saves

    @property
    def signatures(self) -> Mapping[int, str]:
        """Class and shapes of the parameters of each optimizer."""
        return {row["optimizer_index"]: row.get("signature", "") for row in self.rows("optimizer")}

    @property
    def first_steps(self) -> Mapping[int, int]:
        """First step with an update of each optimizer."""
        first: dict[int, int] = {}
        for row in self.rows("step"):
            first[row["optimizer_index"]] = min(row["step"], first.get(row["optimizer_index"], row["step"]))
        return first

    @property
    def steps(self) -> list[int]:
        """Steps with an update, in order. A loop by hand before dtrain's step prepares the training, and does not count."""
        return self.steps_from({})

    def steps_from(self, first_steps: Mapping[int, int]) -> list[int]:
        """Return the steps of each optimizer from its first step on, if ``first_steps`` has one, in order."""
        layout = {row["step"] for row in self.rows("layout")}
        rows = [row for row in self.rows("step") if not layout or row["step"] in layout]
        never = math.inf if first_steps else 0
        return sorted({row["step"] for row in rows if row["step"] >= first_steps.get(row["optimizer_index"], never)})


def read_record(name: str, folder: Path, like: RunRecord | None = None) -> RunRecord:
    """Read the record of a run from its folder. A killed rank may have left half a line, which is skipped.

    Args:
        name: name of the run.
        folder: folder of the run.
        like: record whose optimizers have the same numbers. A resumed run may leave out those that prepare the training.
    """
    ranks: list[list[Row]] = []
    while (path := folder / f"rank-{len(ranks)}.jsonl").exists():
        rows: list[Row] = []
        for line in path.read_text(encoding="utf-8").split("\n"):
            with suppress(ValueError):
                rows.append(json.loads(line))
        # A loop by hand before the start of dtrain's loop prepares the training, and only the first run records it.
        start = next((place for place, row in enumerate(rows) if row["kind"] == "loop_starts"), 0)
        ranks.append([row for place, row in enumerate(rows) if place >= start or row["kind"] not in _OF_UPDATES])
    ranks[1:] = [_number_alike(rows, ranks[0], is_resumed=False) for rows in ranks[1:]]
    if ranks and like is not None and like.ranks and _pairs_of_optimizers(ranks[0], like.ranks[0]):
        ranks = [_number_alike(rows, like.ranks[0], is_resumed=True) for rows in ranks]
    numbers = [_read_numbers(folder / f"rank-{rank}.f64") for rank in range(len(ranks))]
    facts = [*_facts_of_rank_0(ranks, numbers[0]), *_facts_of_steps(ranks), *_facts_of_evaluations(ranks)] if ranks else []
    notes = [row for rows in ranks[:1] for row in rows if row["kind"] == "note"]
    return RunRecord(name=name, ranks=ranks, facts=sort_facts(facts), notes=notes, numbers=numbers)


def _number_alike(rows: list[Row], like: Sequence[Row], *, is_resumed: bool) -> list[Row]:
    """Return the rows of a rank with the numbers of optimizers, and the names of their parameters, that another rank has.

    Rank 0 may train a model before the loop, which the other ranks get, or which a resume loads. Then it is seen first. What
    comes before the first optimizer of ``rows`` gets the place that it has on the other rank, unless a run goes on there.
    """
    pairs = _pairs_of_optimizers(rows, like)
    if not pairs:
        return rows
    numbers = {own["optimizer_index"]: other["optimizer_index"] for own, other in pairs}
    names = {
        name: new
        for own, other in pairs
        if len(own["names"]) == len(other["names"])
        for name, new in zip(own["names"], other["names"], strict=True)
    }
    # Without the models that were seen before, a name may be that of another model.
    is_renamed = any(name != new for name, new in names.items())
    begin = next(place for place, row in enumerate(rows) if row["kind"] == "optimizer")
    earlier = like[: next(place for place, row in enumerate(like) if row is pairs[0][1])]
    start = {} if is_resumed or not earlier else {name: earlier[-1][name] for name in ("step", "optimizer_index")}
    result: list[Row] = []
    for place, row in enumerate(rows):
        changes: dict[str, Any] = {"optimizer_index": numbers.get(row["optimizer_index"], row["optimizer_index"] + len(like))}
        if place < begin:
            changes |= start
        if row["kind"] == "optimizer":
            changes["names"] = [names.get(name, name) for name in row["names"]]
        if is_renamed and row["kind"] in _OF_MODELS:
            if row["name"] not in names:
                continue
            changes["name"] = names[row["name"]]
        result.append({**row, **changes})
    return result


def _pairs_of_optimizers(rows: Sequence[Row], like: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Return the optimizers of two ranks that are the same, in order; an empty list if all have the same numbers.

    They have equal classes and shapes of parameters, and the nearest numbers of updates; of several, the last ones.
    """
    both = [[row for row in one if row["kind"] == "optimizer"] for one in (rows, like)]
    few, many = sorted(both, key=len)
    if not few or len(few) == len(many) or len(many) > _MAX_OPTIMIZERS:
        return []
    updates = [Counter(row["optimizer_index"] for row in one if row["kind"] == "step") for one in (rows, like)]
    counts = {id(row): updates[number][row["optimizer_index"]] for number, one in enumerate(both) for row in one}
    choices = [
        chosen
        for chosen in combinations(many, len(few))
        if all(a.get("signature") == b.get("signature") for a, b in zip(few, chosen, strict=True))
    ]
    if not choices:
        return []

    def distance(chosen: tuple[Row, ...]) -> int:
        return sum(abs(counts[id(a)] - counts[id(b)]) for a, b in zip(few, chosen, strict=True))

    chosen = min(reversed(choices), key=distance)
    return list(zip(few, chosen, strict=True)) if few is both[0] else list(zip(chosen, few, strict=True))


def _read_numbers(path: Path) -> Any:
    whole = path.stat().st_size // 8 if path.exists() else 0
    return np.fromfile(path, count=whole) if whole else np.empty(0)


def sort_facts(facts: Iterable[Fact]) -> dict[tuple[int, int, str, str], Fact]:
    """Return facts by key, in the order of the program."""
    order = {kind: place for place, kind in enumerate(KINDS)}
    ordered = sorted(facts, key=lambda fact: (fact.step, fact.optimizer_index, order[fact.kind], fact.order))
    return {fact.key: fact for fact in ordered}


def tensor_fact(row: Row, numbers: Any) -> TensorFact:
    """Return the tensor of a row, whose sketch is ``numbers``."""
    return TensorFact(
        norm=float(row["norm"]),
        digest=row["digest"],
        shape=tuple(row["shape"]),
        dtype=row["dtype"],
        sketch=numbers,
        trains=row.get("trains", True),
        is_buffer=row.get("buffer", False),
        is_saved=row.get("saved", True),
        last_row=row.get("last_row", -1),
    )


def _fact(row: Row, kind: str, name: str, value: Any, *, by_rank: Iterable[Any] = (), **more: Any) -> Fact:
    return Fact(
        step=row["step"],
        optimizer_index=row["optimizer_index"],
        kind=kind,
        name=name,
        value=value,
        by_rank=tuple(by_rank),
        **{"line": row.get("line", ""), **more},
    )


def _line_of_step(row: Row | None, kind: str) -> str:
    """Return the line of the script that makes a fact of a step: reads the samples, computes the loss, or updates."""
    lines = {} if row is None else row.get("lines", {})
    places = {"samples": ("read", "forward"), "loss": ("backward", "forward")}.get(kind, ("update",))
    return next((lines[place] for place in places if lines.get(place)), "")


def _facts_of_rank_0(ranks: list[list[Row]], numbers: Any) -> Iterator[Fact]:
    """Yield tensors, variables, metrics and the states of optimizers, which rank 0 writes."""
    digests: dict[tuple[Any, ...], dict[int, str]] = {}
    for rank, rows in enumerate(ranks):
        for row in rows:
            if row["kind"] in (*TENSORS, "changed"):
                digests.setdefault((row["kind"], row["step"], row["optimizer_index"], row["name"]), {})[rank] = row["digest"]
    changes = {(row["step"], row["optimizer_index"], row["name"]): row for row in ranks[0] if row["kind"] == "changed"}
    seen: Counter[tuple[int, int, str]] = Counter()
    steps = {(row["step"], row["optimizer_index"]): row for row in ranks[0] if row["kind"] == "step"}
    for place, row in enumerate(ranks[0]):
        kind = row["kind"]
        if kind in TENSORS and row["sketch"] is not None:
            begin, count = row["sketch"]
            tensor = tensor_fact(row, numbers[begin : begin + count])
            by_rank = digests[kind, row["step"], row["optimizer_index"], row["name"]]
            # Backward reaches the last parameters first.
            order = -row["order"] if kind == "gradient" else place
            line = "" if kind == "initial" else _line_of_step(steps.get((row["step"], row["optimizer_index"])), kind)
            more: dict[str, Any] = {"order": order, "line": line}
            place_of = row["step"], row["optimizer_index"], row["name"]
            if kind == "parameter" and (later := digests.get(("changed", *place_of))) is not None:
                change = changes.get(place_of, row)
                first, length = change["sketch"]
                more["changed"] = tensor_fact({**row, **change}, numbers[first : first + length])
                more["changed_by_rank"] = tuple(later.get(rank, by_rank.get(rank)) for rank in range(len(ranks)))
            yield _fact(row, kind, row["name"], tensor, by_rank=map(by_rank.get, range(len(ranks))), **more)
        elif kind == "variable":
            yield _fact(row, "generator" if row["type"] == "generator" else "variable", row["name"], row, order=place)
        elif kind == "optimizer_state":
            line = _line_of_step(steps.get((row["step"], row["optimizer_index"])), kind)
            yield _fact(row, kind, "", (row["tensors"], float(row["norm"])), line=line)
        for name, value in _read_metrics(row):
            key = row["step"], row["optimizer_index"], name
            seen[key] += 1
            label = name if seen[key] == 1 else f"{name}, {seen[key]}"
            yield _fact(row, "metric", label, value, by_rank=(row,), order=place)


def _read_metrics(row: Row) -> Iterator[tuple[str, Any]]:
    """Yield the numbers of a row by name: of a logger or ``reduce_metrics``, or those in a printed line."""
    if row["kind"] == "metrics":
        prefix = "" if row["source"] == "log" else f"{row['source']}: "
        yield from ((prefix + name, value) for name, value in row["numbers"].items())
    elif row["kind"] == "printed":
        skeleton = _DECIMALS.sub("#", row["text"]).strip()
        yield from ((f"printed: {skeleton} ({number})", text) for number, text in enumerate(_DECIMALS.findall(row["text"]), 1))


def _facts_of_steps(ranks: list[list[Row]]) -> Iterator[Fact]:
    """Yield samples, random state, loss, rates and tied parameters, joined over ranks."""
    by_step: dict[tuple[int, int], list[Row]] = {}
    data_ranks = [
        next((row["data_rank"] for kind in ("layout", "shared_batch") for row in rows if row["kind"] == kind), None)
        for rows in ranks
    ]
    for rank, rows in enumerate(ranks):
        # Ranks that share a batch have its samples and losses once.
        if data_ranks[rank] is None or data_ranks[rank] not in data_ranks[:rank]:
            for row in rows:
                if row["kind"] == "step":
                    by_step.setdefault((row["step"], row["optimizer_index"]), []).append(row)
    for rows in by_step.values():
        first, losses = rows[0], [loss for row in rows for loss in row["losses"]]
        weights = [weight for _, weight in losses]
        loss = LossFact(
            total=float(sum(total for total, _ in losses)),
            weight=None if not weights or None in weights else float(sum(weights)),
            count=len(losses),
        )
        own = [row for place, row in enumerate(rows) if not any(_share_batch(row, other) for other in rows[:place])]
        samples = [tuple(row["samples"]) for row in own]
        fields = {name: sum(row["fields"].get(name, 0) for row in own) % 2**64 for row in own for name in row["fields"]}
        line = {kind: _line_of_step(first, kind) for kind in ("samples", "loss", "lr")}
        columns = Counter(chain.from_iterable(row.get("columns", ()) for row in own))
        shared = {
            name: number for name, number in own[0]["fields"].items() if all(row["fields"].get(name) == number for row in own)
        }
        of_samples = {
            "line": line["samples"],
            "fields": fields,
            "shared_fields": shared if len(own) > 1 else {},
            "columns": columns,
            "loaded": Counter(chain.from_iterable(row.get("loaded", ()) for row in own)),
            "is_alone": len(own) > 1 and all(row.get("alone", False) for row in own),
        }
        yield _fact(first, "samples", "", Counter(chain.from_iterable(samples)), by_rank=samples, **of_samples)
        yield _fact(first, "rng", "", first["rng"], by_rank=(row["rng"] for row in rows))
        by_rank = (sum(total for total, _ in row["losses"]) for row in rows)
        yield _fact(first, "loss", "", loss, by_rank=by_rank, line=line["loss"])
        yield _fact(first, "lr", "", tuple(first["lr"]), by_rank=(tuple(row["lr"]) for row in rows), line=line["lr"])
        yield _fact(first, "ties", "", tuple(first["ties"]))
        for kind, name in (("frozen", "frozen"), ("mode", "evaluating")):
            yield _fact(first, kind, "", tuple(first.get(name, ())), by_rank=(tuple(row.get(name, ())) for row in rows))


def _share_batch(row: Row, other: Row) -> bool:
    """Return True if two ranks of a loop by hand compute parts of the same samples, or of the model."""
    if not row["samples"] or row["samples"] != other["samples"]:
        return False
    parts = row.get("parts", ()), other.get("parts", ())
    return (all(parts) and parts[0] != parts[1]) or any(":forward" in event for event in row.get("events", ()))


def _facts_of_evaluations(ranks: list[list[Row]]) -> Iterator[Fact]:
    # An evaluation that only some ranks run, such as that of a codec which rank 0 trains, must not shift the others.
    per_rank: list[dict[tuple[int, int, int], Row]] = []
    for rows in ranks:
        seen, evaluations = Counter[tuple[int, int]](), dict[tuple[int, int, int], Row]()
        for row in rows:
            if row["kind"] == "evaluation":
                step, optimizer_index = row["step"], row["optimizer_index"]
                seen[step, optimizer_index] += 1
                evaluations[step, optimizer_index, seen[step, optimizer_index]] = row
        per_rank.append(evaluations)
    for index, (place, first) in enumerate(per_rank[0].items()):
        by_rank = [
            [tuple(samples) for samples in evaluations[place]["batches"]] for evaluations in per_rank if place in evaluations
        ]
        # Ranks that all run the same batch repeat it, for example to generate text.
        repeated = Counter(by_rank[0]) if len(by_rank) > 1 else Counter()
        for batches in by_rank[1:]:
            repeated &= Counter(batches)
        lists = [tuple(chain.from_iterable(batches)) for batches in by_rank]
        extra = Counter({batch: count * (len(by_rank) - 1) for batch, count in repeated.items()})
        value = Counter(chain.from_iterable(lists)) - Counter(chain.from_iterable(extra.elements()))
        yield _fact(first, "evaluation", f"evaluation {place[2]}", value, by_rank=lists, order=index)


def matching_name(name: str, names: Collection[str]) -> str | None:
    """Return the name in ``names`` of an exported tensor, whose name may have another prefix."""
    if name in names:
        return name
    return next((other for other in names if name.endswith(f".{other}") or other.endswith(f".{name}")), None)
