"""Define ``dtrain report``: write an HTML page about one run or several runs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dtrain import __version__
from dtrain.errors import ConfigError, escape_unprintable

if TYPE_CHECKING:
    from dtrain.report.model import Report

EXAMPLES = """
dtrain report runs/gpt                                   writes runs/gpt/report.html
dtrain report runs/gpt runs/gpt-wide --output two.html   compares them
dtrain report runs/gpt --json | jq .runs[0].goodput
dtrain report runs/gpt --png pictures
"""

_NOTHING_EXIT_CODE = 1


def report(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN_DIR", help="Folders of runs, as dt.open_run creates them.", show_default=False)
    ],
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            metavar="FILE",
            help="File of the page; by default RUN_DIR/report.html, for several runs ./report.html, and no page with "
            "--json or --png.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON object, for programs.")] = False,
    png: Annotated[
        str | None,
        typer.Option("--png", metavar="DIR", help="Write the charts as pictures, with matplotlib.", show_default=False),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only the paths of written files.")] = False,
) -> int:
    """Write a page about the time, speed and metrics of a run.

    The page is one HTML file that needs no network. It shows metrics, goodput, speed, memory, restarts and checkpoints.

    A run may still run, or may have been killed or damaged: the page shows the available data, and lists missing data.

    Exit codes: 0 written; 1 nothing in the folder could be read, or a file could not be written; 2 bad usage, or no run.
    """
    from dtrain.report.reading.read_report import read_report
    from dtrain.report.summary import summarize

    found = read_report(runs, version=__version__)
    page = output
    if output is None and not as_json and png is None:
        page = str(Path(runs[0] if len(runs) == 1 else ".") / "report.html")
    written = []
    if page is not None:
        written.append(_write_page(page, _render_page(found)))
    if png is not None:
        written.append(_write_pictures(found, png))
    if as_json:
        typer.echo(_render_json(found))
    else:
        for line in [] if quiet else summarize(found):
            typer.echo(escape_unprintable(line))
        for path in written:
            typer.echo(escape_unprintable(path))
    return 0 if any(run.attempts or run.series or run.about for run in found.runs) else _NOTHING_EXIT_CODE


def _render_page(found: Report) -> str:
    from dtrain.report.page.html import render_page

    return render_page(found)


def _render_json(found: Report) -> str:
    from dtrain.report.model import to_json

    return json.dumps(to_json(found), indent=1, allow_nan=False)


def _write_pictures(found: Report, folder: str) -> str:
    from dtrain.report.png import write_pngs

    Path(folder).mkdir(parents=True, exist_ok=True)
    write_pngs(found, Path(folder))
    return folder


def _write_page(path: str, text: str) -> str:
    """Write a file atomically, because a browser may read the old file, and the disk may be full."""
    page_path = Path(path)
    if not page_path.parent.is_dir() or page_path.is_dir():
        problem = "is a folder" if page_path.is_dir() else "is in a folder that does not exist"
        raise ConfigError(f"report: --output {problem}, got {path!r}. Name a file in an existing folder.")
    partial = page_path.with_name(f".{page_path.name[:100]}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8", errors="replace")
        partial.replace(page_path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OSError(f"report: {path}: {error.strerror}. Choose another path with --output.") from error
    return path
