"""The plots of docs/scale.md: points of the page's own tables, and laws as lines. ``python tests/written.py`` draws them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from battery.plot import Plot, svg
from pages.fences import DOCS

IMAGES = DOCS / "images" / "scale"
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
_WORLDS = tuple(2**power for power in range(1, 13))

Line = list[tuple[float, float]]


class Tables:
    """The tables of a page in Markdown."""

    def __init__(self, text: str) -> None:
        self._tables = [
            [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
            for table in re.findall(r"(?:^\|.*\n)+", text, re.M)
        ]

    def rows(self, *head: str) -> list[list[str]]:
        """Return these columns of all tables that have them."""
        tables = [table for table in self._tables if {*head} <= {*table[0]}]
        assert tables, f"no table has the columns {head}"
        return [[row[table[0].index(column)] for column in head] for table in tables for row in table[2:]]

    def points(self, x: str, y: str) -> Line:
        """Return the points of two columns; rows whose first cell is no number alone, or whose second is empty, have none."""
        return [(number(left), number(right)) for left, right in self.rows(x, y) if re.fullmatch(r"[\d,]+", left) and right]


def number(cell: str) -> float:
    """Return the first number of a cell."""
    match = _NUMBER.search(cell)
    assert match is not None, cell
    return float(match[0].replace(",", ""))


def law(function: Callable[[int], float]) -> Line:
    """Return the points of a law at 2 to 4,096 ranks."""
    return [(float(world), function(world)) for world in _WORLDS]


def plots(page: str) -> Iterator[tuple[str, Plot]]:
    """Yield the names and the plots of the page with this text."""
    tables = Tables(page)
    before = [(512.0, 51.0), (4096.0, 409.0)]
    yield (
        "record",
        Plot(
            x="ranks, 8 to a node",
            y="milliseconds of a record of a step",
            lines={
                "before, 50 us between nodes": [(2.0, 0.1), *before],
                "simulated, 100 us between nodes": tables.points("ranks", "record, 100 us"),
                "simulated, 25 us between nodes": tables.points("ranks", "record, 25 us"),
            },
            is_log=True,
        ),
    )
    gloo, record = (tables.points("ranks", name) for name in ("gloo's all-gather of the same size", "record"))
    names = ("gloo's all-gather of the same size", "record of a step, one node")
    yield (
        "record_measured",
        Plot(
            x="ranks",
            y="measured microseconds of processor time of a rank",
            lines=dict(zip(names, (gloo, record), strict=True)),
            points=dict(zip(names, (gloo, record), strict=True)),
            is_log=True,
        ),
    )
    laws = dict(tables.rows("what", "now"))
    files_now = laws["open files of a rank beyond its tensors' groups"].split(": ")[1].split(", ")
    counted = list(zip((2.0, 4.0, 8.0), map(number, files_now[:3]), strict=True))
    connected = [(world, 1 + 2 * count) for world, count in tables.points("ranks", "connections") if world > 8]
    yield (
        "files",
        Plot(
            x="ranks, 8 to a node",
            y="open files of a rank beyond its tensors' groups",
            lines={
                "before: 22 + 2 N": law(lambda world: 22 + 2 * world),
                "now: counted on 2, 4 and 8 ranks; 1 + 2 for each simulated connection": [*counted, *connected],
            },
            points={"now: counted on 2, 4 and 8 ranks; 1 + 2 for each simulated connection": counted},
            is_log=True,
        ),
    )
    yield "bytes", _bytes(tables)
    requests = laws["requests, whole job, beyond data"]
    yield (
        "requests",
        Plot(
            x="ranks",
            y="requests of all ranks to a server in a load",
            lines={
                "before: 4 N^2 + 2 N min(N, 3000), data included": law(
                    lambda world: 4 * world**2 + 2 * world * min(world, 3000)
                ),
                "now, beyond data, for one step in the root: 4 N + 7": law(lambda world: 4 * world + 7),
            },
            points={
                "now, beyond data, for one step in the root: 4 N + 7": [
                    (number(request.split(" at ")[1]), number(request)) for request in requests.split(",")
                ]
            },
            is_log=True,
        ),
    )
    yield (
        "nodes",
        Plot(
            x="nodes",
            y="milliseconds of processor time of node 0's agent in a second without events",
            lines={"measured": (seconds := tables.points("nodes", "a second without events"))},
            points={"measured": seconds},
            is_log=True,
        ),
    )
    yield "links", _links(tables)


def _links(tables: Tables) -> Plot:
    """Plot the planned seconds of collectives as lines, and the measured ones as points."""
    ops = ("all-gather", "all-reduce")
    return Plot(
        x="ranks, each behind a link of 200 Mbit/s",
        y="milliseconds of a collective of 16 MiB",
        lines={f"{op}: planned, and measured points": tables.points("ranks", f"{op}, planned") for op in ops},
        points={f"{op}: planned, and measured points": tables.points("ranks", f"measured {op}") for op in ops},
    )


def _bytes(tables: Tables) -> Plot:
    """Plot the bytes of three parts of a loop: points on one node, then the law at 512 and 4,096 ranks."""
    column = "measured at 2, 4, 8, 16 ranks"
    rows = {name: cells for name, *cells in tables.rows("part of the loop", column, "at 512", "at 4,096")}
    lines, points = {}, {}
    for name in ("`save_sharded`, later", "`load_sharded`", "a later step"):
        small = [(float(2 ** (k + 1)), number(cell) / 1e3) for k, cell in enumerate(re.split(r", ", rows[name][0]))]
        shown = name.replace("`", "")
        lines[shown] = [*small, (512.0, number(rows[name][1])), (4096.0, number(rows[name][2]))]
        points[shown] = small
    return Plot(x="ranks", y="kilobytes that a rank sends over the control plane", lines=lines, points=points, is_log=True)


def files() -> Iterator[tuple[Path, str]]:
    """Yield the path and the content of each plot."""
    for name, plot in plots((DOCS / "scale.md").read_text()):
        yield IMAGES / f"{name}.svg", svg(plot)
