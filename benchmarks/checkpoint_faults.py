"""The full set of checkpoint faults, of which the tests run a quick selection. Can be interrupted and continued.

    python benchmarks/checkpoint_faults.py --out faults.json                      # everything: hours
    python benchmarks/checkpoint_faults.py --out faults.json --row kills --count 200
    python benchmarks/checkpoint_faults.py --out faults.json --show               # the table of the results so far

The file holds seed, counts, dates, machine and outcomes, and the next draw of each row: the same command continues. Prints a
table in Markdown, and exits with 1 after a forbidden outcome. Where N faults had none, its rate is below 3/N with 95%
confidence.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, os.fspath(Path(__file__).parents[1] / "tests"))  # before this folder, which has a checkpoint.py as well

from checkpoint.faults import chains, files, flips, kills, malicious, operations, writers
from checkpoint.faults.nursery import Nursery
from checkpoint.faults.outcome import Outcome, Tally
from measure import machine

_WRITE_EVERY_S = 5.0
Asked = Callable[..., list[dict[str, Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of the table.

    Args:
        title: description of the fault.
        draw: makes some faults; asked of a nursery.
        count: how many faults make the full set; None for all that there are.
        draws: how many draws hold all that there are; asked of a nursery.
    """

    title: str
    draw: Asked
    count: int | None = None
    draws: Callable[[], int] | None = None


ROWS = {
    "kills": Row(title="SIGKILL of a rank, all ranks or the launcher, at random times", draw=kills.draw, count=2000),
    "operations": Row(
        title="a kill, an I/O error or a short write at every file operation of a save",
        draw=operations.draw,
        draws=operations.count_draws,
    ),
    "flips": Row(title="one flipped bit, anywhere", draw=flips.draw, count=100_000),
    "files": Row(title="files truncated, zeroed, swapped, missing, too many", draw=files.draw, draws=files.count_draws),
    "malicious": Row(title="made to do harm", draw=malicious.draw, draws=malicious.count_draws),
    "writers": Row(title="two processes in one folder, interleaved", draw=writers.draw, count=200),
    "chains": Row(title="1 to 10 kills in an epoch, with changing world sizes", draw=chains.draw, count=50),
}


@dataclass(slots=True, kw_only=True)
class Progress:
    """Progress of a row."""

    next: int = 0
    done: bool = False
    seconds: float = 0.0
    first_day: str = ""
    last_day: str = ""
    tally: Tally = field(default_factory=Tally)

    @property
    def said(self) -> str:
        """Describe the progress in a few words."""
        return f"{self.tally.count:,} faults, {self.tally.wrong_count} wrong, {self.seconds:.0f} s"


@dataclass(slots=True, kw_only=True)
class Report:
    """All that is in the file."""

    seed: int
    machines: list[str] = field(default_factory=list)
    rows: dict[str, Progress] = field(default_factory=dict)


def read(path: Path, seed: int | None) -> Report:
    """Read the report of the draws so far; return a new report if there is no file.

    Raises:
        SystemExit: the file is of another seed.
    """
    if not path.exists():
        return Report(seed=seed or 0)
    body = json.loads(path.read_text())
    if seed is not None and body["seed"] != seed:
        raise SystemExit(f"{path} is of seed {body['seed']}, not {seed}: give another --out, or leave --seed out")
    rows = {
        name: Progress(**{**row, "tally": Tally(**{f.name: row["tally"][f.name] for f in fields(Tally)})})
        for name, row in body["rows"].items()
    }
    return Report(seed=body["seed"], machines=body["machines"], rows=rows)


def write(path: Path, report: Report) -> None:
    """Replace the file, so that an interruption leaves the old or the new one."""
    body = {**asdict(report), "bounds": {name: progress.tally.bound for name, progress in report.rows.items()}}
    aside = path.with_name(path.name + ".new")
    aside.write_text(json.dumps(body, indent=1) + "\n")
    os.replace(aside, path)


def go_on(row: Row, progress: Progress, *, seed: int, count: int | None, ask: Asked) -> Iterator[None]:
    """Draw until there are enough; yields after each draw. Mutates: ``progress``."""
    wanted = count or row.count
    last = ask(row.draws) if row.draws is not None else None
    progress.first_day = progress.first_day or _today()
    while not _enough(progress, wanted, last):
        begun = time.monotonic()
        for outcome in _drawn(row, seed, progress.next, ask):
            progress.tally.add(outcome, where=f"seed {seed}, draw {progress.next}: ")
        progress.next += 1
        progress.seconds += time.monotonic() - begun
        progress.last_day = _today()
        yield
    progress.done = _enough(progress, row.count, last)


def _enough(progress: Progress, wanted: int | None, last: int | None) -> bool:
    if last is not None and progress.next >= last:
        return True
    return wanted is not None and progress.tally.count >= wanted


def _drawn(row: Row, seed: int, k: int, ask: Asked) -> list[Outcome]:
    """Return the outcomes of a draw; a draw that fails counts as a wrong outcome."""
    try:
        return [Outcome(**outcome) for outcome in ask(row.draw, seed, k)]
    except (RuntimeError, OSError, EOFError) as error:
        return [Outcome(fault="a draw", came="could not be made", wrong=str(error)[-2000:])]


def _today() -> str:
    return datetime.now().astimezone().strftime("%Y-%m-%d")


def table(report: Report) -> Iterator[str]:
    """The lines of the table in Markdown."""
    yield "| what happens | faults | went wrong | less than, with 95% | came to | largest |"
    yield "|---|---|---|---|---|---|"
    for name, row in ROWS.items():
        progress = report.rows.get(name)
        if progress is not None and progress.tally.count:
            yield _line(row, progress)


def _line(row: Row, progress: Progress) -> str:
    tally = progress.tally
    came: dict[str, int] = {}
    for kinds in tally.kinds.values():
        for what, number in kinds.items():
            came[what] = came.get(what, 0) + number
    shown = ", ".join(f"{number:,} {what}" for what, number in sorted(came.items(), key=lambda item: -item[1]))
    largest = ", ".join(f"{name} {value:.3g}" for name, value in sorted(tally.largest.items()))
    bound = f"{tally.bound:.2g}" if not tally.wrong_count else "-"
    days = progress.first_day if progress.first_day == progress.last_day else f"{progress.first_day} to {progress.last_day}"
    rest = "" if progress.done else ", unfinished"
    cells = (f"{row.title} ({days}{rest})", f"{tally.count:,}", f"{tally.wrong_count}", bound, shown, largest)
    return f"| {' | '.join(cells)} |"


def show(report: Report) -> None:
    """Print the results so far."""
    print(f"- seed: {report.seed}")
    for line in report.machines:
        print(f"- {line}")
    print()
    print("\n".join(table(report)))
    for name, progress in report.rows.items():
        for line in progress.tally.wrong:
            print(f"\n{name}: {line}")


class Asking:
    """Asks a nursery, and a new one when it has died. A context manager."""

    def __init__(self) -> None:
        self._nursery = Nursery()

    def __call__(self, fn: Callable[..., Any], *args: Any) -> Any:
        try:
            return self._nursery.ask(fn, *args)
        except (EOFError, OSError):
            self._nursery.__exit__()
            self._nursery = Nursery()
            raise

    def __enter__(self) -> Asking:
        return self

    def __exit__(self, *_: object) -> None:
        self._nursery.__exit__()


def run(path: Path, report: Report, names: Mapping[str, Row], count: int | None) -> None:
    """Make the rows' faults, and keep the file up to date. Mutates: ``report``."""
    here = "; ".join(machine().splitlines())
    if here.split(", load")[0] not in {line.split(", load")[0] for line in report.machines}:
        report.machines.append(here)
    written = time.monotonic()
    try:
        with Asking() as ask:
            for name, row in names.items():
                progress = report.rows.setdefault(name, Progress())
                for _ in go_on(row, progress, seed=report.seed, count=count, ask=ask):
                    if time.monotonic() - written > _WRITE_EVERY_S:
                        write(path, report)
                        written = time.monotonic()
                        print(f"{name}: {progress.said}", file=sys.stderr, flush=True)
    finally:
        write(path, report)


def main() -> None:
    """Continue where the file ends, and print the table."""
    parser = argparse.ArgumentParser(description="The full set of faults for checkpoints.")
    parser.add_argument("--out", type=Path, required=True, help="file of results; a run continues it")
    parser.add_argument("--row", action="append", choices=list(ROWS), help="may be repeated; all rows without it")
    parser.add_argument("--count", type=int, help="faults in each row; the full set without it")
    parser.add_argument("--seed", type=int, help="of all draws; 0 without it")
    parser.add_argument("--show", action="store_true", help="print the results so far, and run nothing")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    report = read(options.out, options.seed)
    if not options.show:
        try:
            run(options.out, report, {name: ROWS[name] for name in options.row or ROWS}, options.count)
        except KeyboardInterrupt:
            show(report)
            raise SystemExit(130) from None
    show(report)
    if any(progress.tally.wrong_count for progress in report.rows.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
