"""Measure dtrain beside its peers, row by row, into one JSON file, from which docs/figures.md is made.

    nox -s peers                                              # installs the peers; everything takes about 20 minutes
    nox -s peers -- --quick                                   # few pairs and small sizes, written nowhere: do all rows run?
    python benchmarks/peers.py --only "bare step" --pairs 100 # with the peers that are installed; the other rows stay

A row has candidates: the loop by hand or another floor where the row has one, peers, dtrain. All of them run interleaved in one
process, or one set of processes. They are compared with the ``reference`` of the row; ``measure`` has the arithmetic. A
peer that is not installed is listed as missing, and a row that dtrain loses is published like any other row.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from measure import Figure, Rounds, compare, machine, typical, verdict
from peers_batches import OURS, batch_method
from peers_growth import Method, adapter_step, evaluation, split_of_ids
from peers_rows import (
    Measured,
    async_stall,
    help_time,
    import_time,
    load_memory,
    mds_pass,
    memory_pass,
    no_op,
    resume,
    small_load,
)
from peers_step import BARE, CASES, Case, calls_of_a_step, on_ranks, one_case, one_process

RESULTS = Path(__file__).parent / "results" / "peers.json"
NEEDED = {"Composer": "composer", "mosaicml-streaming": "streaming"}  # by reference; the others need none, or the tests' own
PACKAGES = ("lightning", "accelerate", "mosaicml", "mosaicml-streaming", "torchdata")


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """Amount of every measurement.

    Args:
        pairs: ratios of two short calls, such as steps.
        rounds: rounds of long calls, such as launches and saves; each makes two.
        scale: part of the usual size of datasets and models.
    """

    pairs: int
    rounds: int
    scale: float


FULL = Amount(pairs=400, rounds=5, scale=1.0)
QUICK = Amount(pairs=20, rounds=1, scale=0.05)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of the table.

    Args:
        what: name of the row.
        measure: times, or weighs, all candidates.
        reference: candidate that divides the others.
        at_most: target of dtrain's ratio; of its figure where there is a unit.
        candidates: all candidates of the row, also those not installed; the first ones are the peers or the floor.
        floor: candidate that does the least that can be done; empty where there is none.
        unit: of the figures, if not seconds; the figures themselves are then compared, not their ratio.
    """

    what: str
    measure: Callable[[Amount], Measured]
    reference: str
    at_most: float
    candidates: tuple[str, ...]
    floor: str = ""
    unit: str = ""


ALL_STEPS = ("by hand", "Fabric", "Accelerate", "dtrain", "dtrain, microbatch_step by hand")
ON_RANKS = ("by hand", "Fabric", "dtrain")
# Calls of a step, at most: 1.2 and 1.4 times those by hand, 617 with Python 3.11 and torch 2.13.
CALLS: tuple[tuple[Case, int], ...] = ((BARE, 740), (CASES[1], 860))
METHODS: tuple[Method, ...] = ("plain", "EMA", "auto_microbatch")
EVALUATIONS: Mapping[str, int | Literal["auto"] | None] = {
    "whole batches": None,
    "parts of 8": 8,
    '`microbatch_size="auto"`': "auto",
}
LOADERS = ("DataLoader", "StatefulDataLoader", "dtrain", "dtrain, TensorDict")
row_by_hand = partial(Row, floor="by hand", reference="by hand")
ROWS: tuple[Row, ...] = (
    row_by_hand(
        what="bare step of a tiny MLP, 4 microbatches, one process, the loss read each step",
        measure=lambda amount: one_process(amount.pairs),
        candidates=ALL_STEPS,
        at_most=BARE.at_most,
    ),
    row_by_hand(
        what="bare step with a fused optimizer, otherwise the same",
        measure=lambda amount: one_process(amount.pairs, fused=True),
        candidates=ALL_STEPS,
        at_most=BARE.at_most,
    ),
    *(
        row_by_hand(
            what=f"bare step, {case.name}, the loss read each step",
            measure=lambda amount, case=case: one_case(amount.pairs, case),
            candidates=("by hand", "dtrain"),
            at_most=case.at_most,
        )
        for case in CASES
    ),
    *(
        row_by_hand(
            what=f"calls of a bare step in Python and C, {case.name}, the loss read each step",
            measure=lambda amount, case=case: calls_of_a_step(case),
            candidates=("by hand", "dtrain"),
            at_most=at_most,
            unit="calls",
        )
        for case, at_most in CALLS
    ),
    row_by_hand(
        what="step of a tiny MLP, 2 ranks, FSDP2, reductions in the last microbatch only",
        measure=lambda amount: on_ranks(amount.pairs, strategy="full_shard"),
        candidates=ON_RANKS,
        at_most=1.05,
    ),
    row_by_hand(
        what="step of a tiny MLP, 2 ranks, data parallel (by hand: DDP with `no_sync`)",
        measure=lambda amount: on_ranks(amount.pairs, strategy="replicate"),
        candidates=ON_RANKS,
        at_most=1.05,
    ),
    row_by_hand(
        what="step of a tiny MLP, 4 ranks, data parallel (by hand: DDP with `no_sync`)",
        measure=lambda amount: on_ranks(amount.pairs // 2, strategy="replicate", world=4),
        candidates=ON_RANKS,
        at_most=1.15,
    ),
    *(
        row_by_hand(
            what=f"split of a batch of {samples} samples with a list of ids, microbatches of 1",
            measure=lambda amount, samples=samples: split_of_ids(amount.pairs, samples=samples),
            candidates=("by hand", "dtrain"),
            at_most=1.2,
        )
        for samples in (64, 256, 1024)
    ),
    *(
        row_by_hand(
            what=f"step of a tiny MLP beside 2,000 frozen parameters, {method}",
            measure=lambda amount, method=method: adapter_step(amount.pairs, method=method),
            candidates=("by hand", "dtrain", "dtrain, 20 frozen"),
            at_most=1.1,
        )
        for method in METHODS
    ),
    *(
        row_by_hand(
            what=f"evaluation of a tiny MLP over 16 batches of 32, {how}",
            measure=lambda amount, size=size: evaluation(amount.pairs, size=size),
            candidates=("by hand", "dtrain"),
            at_most=1.1,
        )
        for how, size in EVALUATIONS.items()
    ),
    Row(
        what="loader, tensors in memory, no workers",
        measure=lambda amount: memory_pass(amount.rounds, amount.scale, dataset="tensors"),
        candidates=LOADERS,
        reference="DataLoader",
        at_most=1.00,
    ),
    Row(
        what="loader, small mappings, no workers",
        measure=lambda amount: memory_pass(amount.rounds, amount.scale, dataset="small mappings"),
        candidates=LOADERS,
        reference="DataLoader",
        at_most=1.02,
    ),
    Row(
        what="load of 5,000 small tensors, 2 ranks",
        measure=lambda amount: small_load(amount.rounds, amount.scale),
        candidates=("DCP", "dtrain"),
        reference="DCP",
        at_most=0.05,
    ),
    Row(
        what="stall of an async save of 1.2 GB, 2 ranks",
        measure=lambda amount: async_stall(amount.rounds, amount.scale),
        candidates=("memcpy", "DCP, stager reused", "dtrain"),
        floor="memcpy",
        reference="memcpy",
        at_most=1.2,
    ),
    Row(
        what="memory of a rank in a load of 1.2 GB on 2 ranks, above the model's own",
        measure=lambda amount: load_memory(min(amount.rounds, 2), amount.scale),
        candidates=("DCP", "dtrain"),
        reference="DCP",
        at_most=150.0,
        unit="MB",
    ),
    Row(
        what="`from dtrain import compose_step` (target: 1.45 s where torch takes 1.27 s)",
        measure=lambda amount: import_time(amount.rounds),
        candidates=("torch", "Accelerate", "dtrain"),
        floor="torch",
        reference="torch",
        at_most=1.142,
    ),
    *(
        Row(
            what=f"{method} of a batch of 128 images of 3x32x32",
            measure=lambda amount, method=method: batch_method(amount.pairs, method=method),
            candidates=("Composer", "dtrain"),
            reference="Composer",
            at_most=1.0,
        )
        for method in OURS
    ),
    Row(
        what="`dtrain --help`",
        measure=lambda amount: help_time(amount.rounds),
        candidates=("Python alone", "torchrun", "dtrain"),
        floor="Python alone",
        reference="torchrun",
        at_most=0.15,
    ),
    Row(
        what="launch of a script that does nothing, 2 ranks, `--no-preload`",
        measure=lambda amount: no_op(amount.rounds),
        candidates=("Python alone", "torchrun", "dtrain"),
        floor="Python alone",
        reference="torchrun",
        at_most=0.15,
    ),
    *(
        Row(
            what=f"MDS shards from disk, {workers or 'no'} workers",
            measure=lambda amount, workers=workers: mds_pass(amount.rounds, amount.scale, workers=workers),
            candidates=("mosaicml-streaming", "dtrain"),
            reference="mosaicml-streaming",
            at_most=0.22,
        )
        for workers in (0, 2)
    ),
    Row(
        what="resume in the middle of 20 M shuffled samples, to the first batch",
        measure=lambda amount: resume(amount.rounds, amount.scale),
        candidates=("StatefulDataLoader", "dtrain"),
        reference="StatefulDataLoader",
        at_most=0.01,
    ),
)


def judged(row: Row, timings: Mapping[str, Rounds]) -> dict[str, Any]:
    """Every candidate's figures on one clock, and the verdict on dtrain's."""
    reference = timings[row.reference]
    candidates: dict[str, Any] = {}
    for name in row.candidates:
        if name in timings:
            against = compare(timings[name], reference)
            candidates[name] = {"value": rounded(typical(timings[name])), "ratio": rounded(against.ratio)}
    ours = compare(timings["dtrain"], reference)
    figure = typical(timings["dtrain"]) if row.unit else ours.ratio
    return {
        "candidates": candidates,
        "missing": [name for name in row.candidates if name not in timings],
        "band": [round(edge, 3) for edge in ours.band],
        "pairs": ours.pairs,
        "verdict": verdict(figure, at_most=row.at_most),
    }


def rounded(figure: Figure) -> list[float]:
    """The figure, its lowest and its highest, with four digits that count."""
    return [float(f"{number:.4g}") for number in (figure.value, figure.low, figure.high)]


def measured(row: Row, amount: Amount) -> dict[str, Any] | None:
    """Measure one row; None where the package that it is compared with is not installed."""
    package = NEEDED.get(row.reference)
    if package is not None and find_spec(package) is None:
        return None
    return {
        "floor": row.floor,
        "reference": row.reference,
        "at_most": row.at_most,
        "unit": row.unit,
        "clocks": {clock: judged(row, timings) for clock, timings in row.measure(amount).items()},
    }


def versions() -> dict[str, str]:
    """Versions of the peers that are installed."""
    by_package = {}
    for package in PACKAGES:
        try:
            by_package[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return by_package


def line(what: str, result: Mapping[str, Any]) -> str:
    """A row as text, a line for each clock."""
    unit = result["unit"]
    lines = []
    for clock, seen in result["clocks"].items():
        shown = ", ".join(
            f"{name} {candidate['value'][0]:.4g}{unit or ' s'} ({candidate['ratio'][0]:.3g})"
            for name, candidate in seen["candidates"].items()
        )
        missing = f"; missing: {', '.join(seen['missing'])}" if seen["missing"] else ""
        low, high = seen["band"]
        lines.append(
            f"{what}, {clock}: {shown}{missing}; A/A band {low} to {high}, {seen['pairs']} pairs, "
            f"target {result['at_most']:g}{unit}: {seen['verdict']}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORDS", help="rows whose name contains one of these")
    parser.add_argument("--pairs", type=int, help=f"ratios of short calls (default: {FULL.pairs})")
    parser.add_argument("--rounds", type=int, help=f"of long calls, two each (default: {FULL.rounds})")
    parser.add_argument("--quick", action="store_true", help="few pairs and small sizes; writes no file")
    parser.add_argument("--out", type=Path, default=RESULTS, help="rows that are there already stay unless measured again")
    args = parser.parse_args()
    rows = [row for row in ROWS if any(words in row.what for words in args.only)]
    if not rows:
        parser.error(f"--only names no row, got {args.only}")
    amount = QUICK if args.quick else FULL
    amount = replace(amount, pairs=args.pairs or amount.pairs, rounds=args.rounds or amount.rounds)
    warnings.filterwarnings("ignore", module="torch")  # of the peers' use of torch
    logging.getLogger("streaming").setLevel(logging.ERROR)
    print(machine(), flush=True)
    for row in rows:
        # The load before the row begins, since the row itself is a load.
        begun = {"at": f"{datetime.now():%Y-%m-%d %H:%M}", "load": round(os.getloadavg()[0], 1)}
        result = measured(row, amount)
        print(f"{row.what}: {row.reference} is not installed" if result is None else line(row.what, result), flush=True)
        if result is not None and not args.quick:
            write(args.out, {row.what: {"measured": begun, **result}})  # after each: an interrupted run leaves these


def write(path: Path, results: Mapping[str, Any]) -> None:
    """Write rows beside the rows of the file, in the order of the table."""
    rows = {**(json.loads(path.read_text())["rows"] if path.exists() else {}), **results}
    seen_on = machine().removeprefix("machine: ").splitlines()
    content = {
        "machine": re.sub(r", load [\d.]+", "", seen_on[0]),  # a load belongs to a row
        "versions": {
            **dict(package.split(" ", 1) for package in seen_on[-1].removeprefix("versions: ").split(", ")),
            **versions(),
        },
        "rows": {row.what: rows[row.what] for row in ROWS if row.what in rows},
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
