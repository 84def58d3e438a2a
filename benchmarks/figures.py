"""Write the tables of docs/figures.md and docs/gpu.md that benchmarks leave as JSON.

    python benchmarks/figures.py            # writes the pages
    python benchmarks/figures.py --check    # changes nothing; exits with 1 if a page differs from the files

A table stands between ``<!-- benchmarks/results/NAME.json -->`` and ``<!-- end of NAME.json -->``; the list of runs
on a GPU between ``<!-- runs on a GPU -->`` and ``<!-- end of runs on a GPU -->``, and their tables between marks of results.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gpu_results
from peers import ROWS
from recipes import RECIPES, Run, table

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "figures.md"
GPU_PAGE = ROOT / "docs" / "gpu.md"
_TABLE = re.compile(r"(<!-- benchmarks/results/([\w-]+)\.json -->\n)(.*?)(?=<!-- end of \2\.json -->)", re.S)
_GPU_PARTS = re.compile(r"(<!-- (runs|results) on a GPU -->\n)(.*?)(?=<!-- end of \2 on a GPU -->)", re.S)


def peers(content: Mapping[str, Any]) -> str:
    """A line for each row and clock, also for rows that were not measured yet; each row with its own time and load."""
    lines = ["| what | clock | floor | peers | dtrain | A/A band | target | verdict | measured |", "|" + "---|" * 9]
    for what in (row.what for row in ROWS):
        row = content["rows"].get(what)
        if row is None:
            lines.append(f"| {what} | | | | | | | not measured | |")
            continue
        lines += [f"| {' | '.join(_cells(what, row, clock, seen))} |" for clock, seen in row["clocks"].items()]
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    return "\n".join(lines) + f"\n\nMeasured on {content['machine']}; {versions}.\n"


def _cells(what: str, row: Mapping[str, Any], clock: str, seen: Mapping[str, Any]) -> list[str]:
    shown = {name: _shown(candidate, row["unit"]) for name, candidate in seen["candidates"].items()}
    shown |= dict.fromkeys(seen["missing"], "not installed")
    floor = f"{row['floor']} {shown[row['floor']]}" if row["floor"] else ""
    peers = "<br>".join(f"{name} {text}" for name, text in shown.items() if _is_peer(name, row["floor"]))
    ours = "<br>".join(f"{name.removeprefix('dtrain, ')} {text}" for name, text in shown.items() if name.startswith("dtrain,"))
    low, high = seen["band"]
    target = f"{row['at_most']:g} {row['unit']}".strip()
    verdict = "**not met**" if seen["verdict"] == "not met" else seen["verdict"]
    cells = (what, clock, floor, peers, "<br>".join(filter(None, (shown["dtrain"], ours))), f"{low:.3f} to {high:.3f}")
    return [*cells, target, verdict, f"{row['measured']['at']}, load {row['measured']['load']:g}"]


def _is_peer(name: str, floor: str) -> bool:
    return name != floor and not name.startswith("dtrain")


def _shown(figures: Mapping[str, Any], unit: str) -> str:
    """A ratio with the time behind it, or a figure in its unit."""
    value, ratio = figures["value"][0], figures["ratio"][0]
    if unit:
        return f"{value:.0f} {unit}"
    scale, short = next((scale, short) for scale, short in ((1.0, "s"), (1e3, "ms"), (1e6, "us")) if value * scale >= 1)
    return f"{ratio:.3g} ({value * scale:.3g} {short})"


def recipes(content: Mapping[str, Any]) -> str:
    """A table for each recipe."""
    runs = {name: [Run(**run) for run in content["recipes"][name]] for name in RECIPES}
    return "\n".join(table(name, recipe, runs[name]) for name, recipe in RECIPES.items())


TABLES: Mapping[str, Callable[[Mapping[str, Any]], str]] = {"peers": peers, "recipes": recipes}


def with_tables(page: str) -> str:
    """The page with the tables as the files have them."""

    def written(match: re.Match[str]) -> str:
        content = json.loads((ROOT / "benchmarks" / "results" / f"{match[2]}.json").read_text())
        return f"{match[1]}\n{TABLES[match[2]](content)}\n"

    return _TABLE.sub(written, page)


def with_gpu_tables(page: str, folder: Path = gpu_results.RESULTS) -> str:
    """The page of a GPU with the tables as the files in ``folder`` have them.

    Raises:
        ValueError: a file does not name its device, or is a dry run.
    """
    contents = gpu_results.read_results(folder)
    parts = {"runs": gpu_results.page_summary(contents), "results": gpu_results.page_results(contents)}
    return _GPU_PARTS.sub(lambda match: f"{match[1]}\n{parts[match[2]]}\n", page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if a page would change")
    check = parser.parse_args().check
    for page, tables in ((PAGE, with_tables), (GPU_PAGE, with_gpu_tables)):
        text = page.read_text()
        written = tables(text)
        if text == written:
            continue
        if check:
            raise SystemExit(f"docs/{page.name} is not what benchmarks/results says: run python benchmarks/figures.py")
        page.write_text(written)


if __name__ == "__main__":
    main()
