"""Results of the benchmarks for a GPU: the facts of the device, tables of figures, and one JSON file per benchmark.

A file in ``benchmarks/results`` comes from a GPU and names it. A dry run at toy size is marked, and is refused there.
"""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch

from gpu import BENCHMARKS, RESULTS
from measure import Comparison, Figure, gpus, machine

FACTS = ("device", "device_memory_gib", "capability", "driver", "torch", "cuda", "python", "machine", "date", "command")
"""Facts that a file must have to be a result."""

FAILED = "failed"
"""Cell of a row of which something failed."""

Cell = str | int | float | Figure | None


def band(comparison: Comparison) -> str:
    """Return the cell of an A/A band."""
    low, high = comparison.band
    return f"{low:.3f} to {high:.3f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One table of a benchmark.

    Args:
        title: sentence above the table.
        columns: headings with units, one per cell.
        rows: cells; a ``Figure`` is shown with its band, None as an empty cell. An iterator measures each row when it is taken.
        note: sentences below the table.
    """

    title: str
    columns: Sequence[str]
    rows: Iterable[Sequence[Cell]]
    note: str = ""


@dataclass(slots=True, kw_only=True)
class ResultFile:
    """The file of one benchmark, written anew after each row, so that a run that is cut off leaves its finished rows."""

    folder: Path
    name: str
    facts: Mapping[str, Any]
    dry_run: bool
    tables: list[dict[str, Any]] = field(default_factory=list)

    @property
    def path(self) -> Path:
        return self.folder / f"gpu-{self.name}.json"

    @property
    def failed(self) -> bool:
        """True if a cell says ``FAILED``."""
        return any(FAILED in row for table in self.tables for row in table["rows"])

    def add(self, table: Table) -> None:
        """Add a table; print each row and write the file as soon as the row is measured."""
        content = {"title": table.title, "columns": list(table.columns), "rows": [], "note": table.note}
        self.tables.append(content)
        print("\n" + "\n".join(markdown_head(content)), flush=True)
        for row in table.rows:
            content["rows"].append([_as_json(cell) for cell in row])
            self.write(complete=False)
            print(markdown_row(content["rows"][-1]), flush=True)
        if table.note:
            print(f"\n{table.note}", flush=True)

    def write(self, *, complete: bool) -> None:
        """Write the file. Refuses a dry run, or a file without facts, in ``benchmarks/results``."""
        content = {"name": self.name, "dry_run": self.dry_run, "complete": complete, **self.facts, "tables": self.tables}
        if self.folder.resolve() == RESULTS.resolve():
            check_content(content)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(content, indent=1) + "\n")


def _as_json(cell: Cell) -> Any:
    if isinstance(cell, Figure):
        return [float(f"{number:.5g}") for number in (cell.value, cell.low, cell.high)]
    return float(f"{cell:.5g}") if isinstance(cell, float) else cell


def collect_facts(device: torch.device, command: str) -> dict[str, Any]:
    """Return the facts of a run. The facts of a device are empty on a CPU."""
    facts: dict[str, Any] = {"device": "", "device_memory_gib": 0.0, "capability": "", "driver": ""}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts = {
            "device": properties.name,
            "device_memory_gib": round(properties.total_memory / 2**30, 1),
            "capability": f"{properties.major}.{properties.minor}",
            "driver": _driver_version(),
        }
    described = machine().removeprefix("machine: ").splitlines()
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda or "", "python": platform.python_version()}
    today = {"date": str(date.today()), "command": command, "commit": _commit()}
    return {**facts, **versions, "machine": described[0], **today}


def _commit() -> str:
    """Return the short name of the commit that runs; empty in a copy without its history."""
    if shutil.which("git") is None:
        return ""
    command = ["git", "-C", str(RESULTS), "rev-parse", "--short=7", "HEAD"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=30)
    return answer.stdout.strip() if answer.returncode == 0 else ""


def _driver_version() -> str:
    """Return the version of the driver, by ``nvidia-smi`` or the kernel's file; empty if unknown."""
    version = Path("/proc/driver/nvidia/version")
    lines = [gpu.split(", ")[-1] for gpu in gpus()] or (version.read_text().splitlines() if version.exists() else [])
    return next(iter(lines), "")


def check_content(content: Mapping[str, Any]) -> None:
    """Refuse a file that does not say where its figures come from.

    Raises:
        ValueError: a dry run, or a fact that is missing or empty.
    """
    name = f"gpu-{content.get('name', '?')}.json"
    if content.get("dry_run") is not False:
        raise ValueError(f"{name}: a dry run at toy size is no result. Write it to another folder with --out.")
    missing = [fact for fact in FACTS if not content.get(fact)]
    if missing:
        raise ValueError(f"{name}: facts must not be empty, got no {', '.join(missing)}. Run the benchmark on a GPU again.")


def read_results(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """Return the contents of all result files by benchmark.

    Raises:
        ValueError: a file that is no result, of an unknown benchmark, or without the commit that ran.
    """
    contents = {}
    for path in sorted(folder.glob("gpu-*.json")):
        content = json.loads(path.read_text())
        check_content(content)
        if not content.get("commit"):
            raise ValueError(f"{path.name}: commit must not be empty. Write the commit that ran into the file.")
        if content["name"] not in BENCHMARKS or path.stem != f"gpu-{content['name']}":
            raise ValueError(f"{path.name}: the name must be that of a benchmark, got {content['name']!r}. Rename the file.")
        contents[content["name"]] = content
    return contents


def shown(cell: Any) -> str:
    """Return a cell of a file as text."""
    if isinstance(cell, list):
        value, low, high = (_number(number) for number in cell)
        return f"{value} ({low} to {high})"
    if isinstance(cell, bool) or cell is None:
        return "" if cell is None else str(cell)
    return _number(cell) if isinstance(cell, int | float) else str(cell)


def _number(value: float) -> str:
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def markdown(table: Mapping[str, Any]) -> str:
    """Return a table of a file as Markdown."""
    lines = [*markdown_head(table), *map(markdown_row, table["rows"])]
    return "\n".join([*lines, *(["", table["note"]] if table["note"] else [])])


def markdown_head(table: Mapping[str, Any]) -> list[str]:
    return [f"{table['title']}:", "", f"| {' | '.join(table['columns'])} |", "|" + "---|" * len(table["columns"])]


def markdown_row(row: Sequence[Any]) -> str:
    return f"| {' | '.join(shown(cell) for cell in row)} |"


def page_results(contents: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the part of the page with the tables of all results, each with the conditions of its run."""
    sections = []
    for name, content in ((name, contents[name]) for name in BENCHMARKS if name in contents):
        ended = "" if content["complete"] else " The run was cut off; the rows are those that were finished."
        remark = f" {content['remark']}" if content.get("remark") else ""
        ran = f"`{content['command']}`, {content['date']}, {content['device']}, torch {content['torch']}.{remark}{ended}"
        sections += [f"### `{name}`", ran, *(markdown(table) for table in content["tables"])]
    return "\n\n".join(sections) + "\n"


def device_sentence(contents: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the sentence about devices that all pages share."""
    runs = sorted(
        {f"of commit {c['commit']} on one {c['device']} on {c['date']} (torch {c['torch']})" for c in contents.values()}
    )
    if not runs:
        return "Tests and figures come from CPUs; nothing was run on a GPU."
    return f"Tests and figures come from CPUs, except {'a run' if len(runs) == 1 else 'runs'} {', '.join(runs)}."


def page_summary(contents: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the list of runs with commands, dates and devices; then the names of the rest."""
    said = device_sentence(contents)
    if not contents:
        return f"{said}\n"
    lines = [said, "", "| benchmark | commit | date | device | driver | CUDA | torch | Python |", "|" + "---|" * 8]
    for name in (name for name in BENCHMARKS if name in contents):
        content = contents[name]
        device = f"{content['device']}, {content['device_memory_gib']:g} GiB"
        run = (f"`{name}`", content["commit"], content["date"])
        cells = (*run, device, content["driver"], content["cuda"], content["torch"], content["python"])
        lines.append(f"| {' | '.join(cells)} |")
    rest = ", ".join(f"`{name}`" for name in BENCHMARKS if name not in contents)
    return "\n".join([*lines, *(["", f"No result yet: {rest}."] if rest else [])]) + "\n"
