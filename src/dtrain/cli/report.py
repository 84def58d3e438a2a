"""Define ``dtrain report`` and ``dtrain top``: summarize runs as text or as an HTML page, and show the live state of a run."""

from __future__ import annotations

import json
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dtrain import __version__, storage
from dtrain.arguments import format_bytes, format_count, format_duration
from dtrain.cli.parameters import OTHER_HEADING, number, option
from dtrain.errors import ConfigError, escape_unprintable
from dtrain.report.results import describe_command, describe_devices, describe_parameters, format_speed, list_results

if TYPE_CHECKING:
    from dtrain.report.model import Report, RunReport
    from dtrain.report.read_run import LiveRun, RunSnapshot


def report(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN_DIR", help="Folders of runs, as dt.open_run creates them.", show_default=False)
    ],
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            metavar="FILE",
            help="File of the page.  [default: RUN_DIR/report.html, for several runs ./report.html; none with --json]",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON object, for programs.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only the path of the page.")] = False,
) -> int:
    """Summarize the time, speed and metrics of a run.

    Write the report as one HTML page that needs no network. The page begins with the result: losses and metrics, speed,
    parameters, devices and command. Goodput, curves, memory, restarts and checkpoints follow.

    A run may still run, or may have been killed or damaged: the page shows the available data, and lists missing data.

    Exit codes: 0 written; 1 nothing in the folder could be read, or a file could not be written; 2 bad usage, or no run.

    Examples:
        dtrain report runs/gpt                                   writes runs/gpt/report.html
        dtrain report runs/gpt runs/gpt-wide --output two.html   compares them
        dtrain report runs/gpt --json | jq .runs[0].goodput
    """
    from dtrain.report.model import to_json
    from dtrain.report.page import render_page
    from dtrain.report.read_run import read_report

    found = read_report(runs, version=__version__)
    lines = [json.dumps(to_json(found), indent=1, allow_nan=False)] if as_json else []
    if not as_json and not quiet:
        lines += map(escape_unprintable, summarize(found))
    if output is None and not as_json:
        output = str(Path(runs[0] if len(runs) == 1 else ".") / "report.html")
    if output is not None:
        _write_page(Path(output), render_page(found))
        lines += [] if as_json else [escape_unprintable(output)]
    for line in lines:
        typer.echo(line)
    return 0 if any(run.attempts or run.series or run.about for run in found.runs) else 1


def _write_page(path: Path, text: str) -> None:
    """Write a file atomically, because a browser may read the old file, and the disk may be full."""
    if not path.parent.is_dir() or path.is_dir():
        problem = "is a folder" if path.is_dir() else "is in a folder that does not exist"
        raise ConfigError(f"report: --output {problem}, got {str(path)!r}. Name a file in an existing folder.")
    try:
        storage.replace_file(path, text.encode("utf-8", "replace"))
    except OSError as error:
        raise OSError(f"report: {path}: {error.strerror}. Choose another path with --output.") from error


_MAX_CAUSES, _MAX_METRICS, _MAX_NAME_LENGTH, _MAX_LINES = 6, 4, 40, 10


def summarize(report: Report) -> list[str]:
    """Summarize one run in detail, or several runs with one line each, in at most ten lines."""
    if len(report.runs) == 1:
        lines = _run_lines(report.runs[0])
    else:
        runs = report.runs[: _MAX_LINES - 2]
        lines = []
        for run in runs:
            goodput = "" if run.goodput is None else f", goodput {run.goodput.share:.1%}"
            last = run.series["loss"].last if "loss" in run.series else None
            loss = "" if last is None else f", loss {last:.4g}"
            lines.append(f"{_shorten(run.name)}: {_run_state(run)}{goodput}{loss}")
        if len(runs) < len(report.runs):
            lines.append(f"and {format_count(len(report.runs) - len(runs), 'more run')}")
    if report.problems:
        more = len(report.problems) - 1
        rest = f" (and {more} more, in the report)" if more else ""
        lines.append(f"missing: {report.problems[0][:200]}{rest}")
    return lines


def _run_lines(run: RunReport) -> list[str]:
    lines = [f"{_shorten(run.name)}: {_run_state(run)}"]
    if results := list_results(run)[:_MAX_METRICS]:
        lines.append("result: " + ", ".join(f"{_shorten(name)} {result}" for name, result in results))
    parameters = f"{count} parameter{'s' * (count != '1')}" if (count := describe_parameters(run)) else ""
    if run_facts := [fact for fact in (format_speed(run), parameters, describe_devices(run), describe_command(run)) if fact]:
        lines.append(f"run: {', '.join(run_facts)[:200]}")
    goodput = run.goodput
    if goodput is not None:
        productive, total = format_duration(goodput.productive_s), format_duration(goodput.total_s)
        lines.append(f"goodput: {goodput.share:.1%}, {productive} of {total} in steps that count")
        largest = sorted(((spent, cause) for cause, spent in goodput.by_cause.items()), reverse=True)[:_MAX_CAUSES]
        if goodput.total_s > 0:
            lines.append("time: " + ", ".join(f"{cause} {spent / goodput.total_s:.1%}" for spent, cause in largest))
    if len(run.attempts) > 1 and goodput is not None:
        lost = sum(each.lost_steps for each in run.attempts)
        down, setup, lost_time = map(format_duration, (goodput.down_s, goodput.repeated_setup_s, goodput.lost_s))
        lost_steps = format_count(lost, "step")
        lines.append(f"restarts: {len(run.attempts) - 1}; down {down}, set up again {setup}, lost {lost_steps} and {lost_time}")
    if errors := [f"attempt {each.number}, {each.error}" for each in run.attempts if each.error]:
        lines.append(f"failed: {errors[-1][:200]}")
    if run.checkpoint_count:
        blocked = [each["blocked_s"] for each in run.checkpoints if each["blocked_s"] is not None]
        total, longest = format_duration(sum(blocked)), format_duration(max(blocked, default=0.0))
        stall = f"; blocked training for {total} in all, {longest} at most" if blocked else ""
        lines.append(f"checkpoints: {run.checkpoint_count}{stall}")
    if run.slowest:
        lines.append(f"slow: {run.slowest[0].text[:200]}")
    return lines


def _run_state(run: RunReport) -> str:
    if not run.attempts:
        last = max((series.last_step for series in run.series.values()), default=None)
        return "no ledger" if last is None else f"no ledger; step {last:,}"
    last_attempt = run.attempts[-1]
    ranks = format_count(last_attempt.world_size, "rank")
    return f"{last_attempt.outcome} at step {last_attempt.last_step:,}, after {format_duration(run.duration_s)} on {ranks}"


def _shorten(name: str) -> str:
    return name if len(name) <= _MAX_NAME_LENGTH else name[: _MAX_NAME_LENGTH - 1] + "…"


_INTERVAL = number(minimum=0.1, maximum=3600, advice="Use 2, for example.")
_EVENTS, _METRICS, _RANKS = 6, 4, 64
# A rank writes a line every ten seconds.
_STALE_S = 60.0
# A narrower table omits some columns.
_NARROW_COLUMNS = 64
_RESERVED_KEYS = ("kind", "attempt", "at", "name")


def top(
    run: Annotated[str, typer.Argument(metavar="RUN_DIR", help="Folder of a run, as dt.open_run creates it.")],
    once: Annotated[bool, typer.Option("--once", help="Print the state once, as plain text, and exit.")] = False,
    every: Annotated[
        float,
        option("top", OTHER_HEADING, "--every SECONDS", "Time between two refreshes.  [default: 2]", _INTERVAL),
    ] = 2.0,
) -> int:
    """Show the live state of a run.

    The screen shows step, loss, speed, goodput, every rank, and the last events.

    The command only reads the files of the run, so it costs the run nothing. Exit with Ctrl-C; it exits when the run ends.

    Exit codes: 0 the run has ended, or was shown once; 2 bad usage, or no such folder; 130 after Ctrl-C.

    Examples:
        dtrain top runs/gpt
        dtrain top runs/gpt --once      the current state, as plain text
    """
    from dtrain.report.read_run import LiveRun

    folder = Path(run)
    if not folder.is_dir():
        problem = "the file " if folder.is_file() else ""
        missing = "" if folder.is_file() else ", which is not there"
        raise ConfigError(
            f"top: RUN_DIR must be the folder of a run, got {problem}{run!r}{missing}. Pass the folder of dt.open_run."
        )
    live = LiveRun(folder)
    if once or sys.stdout is None or not sys.stdout.isatty():
        now = time.time()
        for line in render_text(run, live.refresh(now), now):
            typer.echo(line)
        return 0
    return _follow(run, live, every)


def _follow(run: str, live: LiveRun, every_s: float) -> int:
    from rich.console import Console
    from rich.live import Live as Screen

    console = Console(file=sys.stdout)
    now = live.refresh(at := time.time())
    try:
        # The last state stays in the terminal, unlike with the alternate screen.
        with Screen(render_screen(run, now, at, console.width, console.height), console=console, auto_refresh=False) as screen:
            while not now.has_ended:
                time.sleep(every_s)
                now = live.refresh(at := time.time())
                screen.update(render_screen(run, now, at, console.width, console.height), refresh=True)
    finally:
        # rich does not restore the cursor after a Ctrl-C during its start.
        console.show_cursor(True)
    return 0


def render_screen(run: str, now: RunSnapshot, at: float, width: int, height: int) -> Any:
    """Build the screen for rich, limited to the size of the terminal."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    head = [Text(line, style="bold" if not number else "", no_wrap=True, overflow="ellipsis")
            for number, line in enumerate(head_lines(run, now, width))]  # fmt: skip
    names, rows = rank_rows(now, narrow=width < _NARROW_COLUMNS)
    events = event_lines(now, at)
    room = max(1, height - len(head) - len(events) - 4)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in names:
        table.add_column(name, justify="left" if name in ("host", "state") else "right", no_wrap=True, overflow="ellipsis")
    for row, rank in zip(rows[:room], now.ranks, strict=False):
        ended_style = "red" if rank.closed == "failed" else "dim" if rank.closed else ""
        table.add_row(*map(Text, row), style=ended_style or ("yellow" if rank.age_s > _STALE_S else ""))
    parts: list[Any] = [*head]
    if rows:
        parts += [Text(), table]
    if len(rows) > room:
        parts.append(Text(f"and {format_count(len(rows) - room, 'more rank')}", style="dim"))
    parts += [Text(line, style="dim", no_wrap=True, overflow="ellipsis") for line in events]
    return Group(*parts)


def render_text(run: str, now: RunSnapshot, at: float) -> list[str]:
    """Return the state as plain lines, without limits."""
    names, rows = rank_rows(now, narrow=False)
    lines = head_lines(run, now, 10_000)
    if rows:
        widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
        lines += ["", *("  ".join(cell.rjust(size) for cell, size in zip(row, widths, strict=True)) for row in [names, *rows])]
    return lines + event_lines(now, at)


def head_lines(run: str, now: RunSnapshot, width: int) -> list[str]:
    """Return the lines about the whole run, wrapped to ``width`` if possible."""
    name = escape_unprintable(Path(run).resolve().name or run)
    if not now.attempt and not now.metrics:
        return [f"no data yet: waiting for {escape_unprintable(run)}"]
    if not now.attempt:
        first = f"{name}  step {now.step:,}  (no ledger)"
    else:
        reasons = {rank.closed for rank in now.ranks}
        silent_s = min((rank.age_s for rank in now.ranks), default=0.0)
        state = f"silent for {format_duration(silent_s)}" if silent_s > _STALE_S else "running"
        if reasons and None not in reasons:
            state = "stopped" if "stopped" in reasons else "done"
        if "failed" in reasons:
            state = "failed"
        first = f"{name}  attempt {now.attempt}  step {now.step:,}  {format_duration(now.seconds)}  {state}"
    # Loss and learning rate are first, then short names, because groups of per-layer metrics have long names.
    names = sorted(now.metrics, key=lambda name: (name != "loss", name != "lr", "loss" not in name, "/" in name, name))
    shown = [name for name in names if len(name) <= _MAX_NAME_LENGTH][:_METRICS]
    facts = [f"{escape_unprintable(name)} {now.metrics[name]:.4g}" for name in shown]
    speeds = (("steps/s", now.steps_per_s), ("samples/s", now.samples_per_s), ("tok/s", now.tokens_per_s))
    facts += [f"{_format_rate(value)} {unit}" for unit, value in speeds if value is not None]
    if now.goodput is not None:
        facts.append(f"goodput {now.goodput:.1%}")
    if now.unreadable:
        facts.append(f"{format_count(now.unreadable, 'line')} unreadable")
    lines = [first]
    if now.last_death:
        lines += [escape_unprintable(f"last death: {now.last_death}")[:200], ""]
    for fact in facts:
        if len(lines) > 1 and len(lines[-1]) + len(fact) + 2 <= width:
            lines[-1] += f"  {fact}"
        else:
            lines.append(fact)
    return lines


def rank_rows(now: RunSnapshot, *, narrow: bool) -> tuple[list[str], list[list[str]]]:
    """Return the column names of the table, and a row for each rank."""
    names = ["rank", "step", "age", "compute", "data", "stall"]
    names += [] if narrow else ["save", "RSS", "host", "state"]
    rows = []
    for rank in now.ranks[:_RANKS] if narrow else now.ranks:
        shares = [f"{rank.shares[cause]:.0%}" if cause in rank.shares else "-" for cause in ("compute", "data", "stall")]
        row = [str(rank.rank), f"{rank.step:,}", format_duration(rank.age_s), *shares]
        if not narrow:
            saving = f"{rank.shares['checkpoint']:.0%}" if "checkpoint" in rank.shares else "-"
            row += [saving, "-" if rank.rss_bytes is None else format_bytes(rank.rss_bytes)]
            row += [escape_unprintable(rank.host)[:30], escape_unprintable(rank.closed or "running")]
        rows.append(row)
    return names, rows


def event_lines(now: RunSnapshot, at: float) -> list[str]:
    """Return the last events, newest last."""
    lines = []
    for when, rank, event in now.events[-_EVENTS:]:
        fields = " ".join(
            f"{key}={f'{value:.4g}' if isinstance(value, float) else str(value)[:80]}"
            for key, value in event.items()
            if key not in _RESERVED_KEYS and not isinstance(value, dict)
        )
        clock = datetime.fromtimestamp(when).strftime("%H:%M:%S" if at - when < 86400 else "%Y-%m-%d %H:%M:%S")
        lines.append(escape_unprintable(f"{clock}  rank {rank}  {event['name']}  {fields}".rstrip())[:300])
    return ["", *lines] if lines else []


def _format_rate(value: float) -> str:
    for unit in ("", "k", "M", "G"):
        if abs(value) < 1000:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g}T"
