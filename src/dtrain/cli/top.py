"""``dtrain top``: a run in the terminal, while it goes on."""

from __future__ import annotations

import sys
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dtrain.cli.output import format_bytes
from dtrain.errors import ConfigError, escape_unprintable
from dtrain.report.format import format_count, format_duration

if TYPE_CHECKING:
    from dtrain.report.reading.live import LiveRun, RankSnapshot, RunSnapshot

EXAMPLES = """
dtrain top runs/gpt
dtrain top runs/gpt --once      what it is doing now, as plain text
"""

_LEAST_S, _MOST_S = 0.1, 3600.0
_EVENTS, _METRICS, _RANKS = 6, 4, 64
_STALE_S = 60.0  # a line comes every ten seconds
_NARROW_COLUMNS = 64  # columns; below it the table has only what does not fit elsewhere
_RESERVED_KEYS = ("kind", "attempt", "at", "name")


def top(
    run: Annotated[str, typer.Argument(metavar="RUN_DIR", help="The folder of a run, which may not be there yet.")],
    once: Annotated[bool, typer.Option("--once", help="Print it once, as plain text, and exit.")] = False,
    every: Annotated[
        str,
        typer.Option("--every", metavar="SECONDS", help="How often to look. By default every 2 seconds.", show_default=False),
    ] = "2",
) -> int:
    """Show what a run is doing, live.

    Step, loss, speed, goodput, every rank, and what happened last.

    Reads the files of the run only, so it costs the run nothing. Leave it with Ctrl-C; it ends when the run does.

    Exit codes: 0 the run has ended, or was shown once; 2 bad usage; 130 left with Ctrl-C.
    """
    from dtrain.report.reading.live import LiveRun

    seconds, folder = _parse_interval(every), Path(run)
    if folder.is_file():
        raise ConfigError(f"top: {run!r} is a file; give the folder of a run")
    live = LiveRun(folder)
    if once or sys.stdout is None or not sys.stdout.isatty():
        now = time.time()
        for line in render_text(run, live.refresh(now), now):
            typer.echo(line)
        return 0
    return _follow(run, live, seconds)


def _parse_interval(given: str) -> float:
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not _LEAST_S <= seconds <= _MOST_S:
        raise ConfigError(f"top: --every must be {_LEAST_S:g} to {_MOST_S:g} seconds, got {given!r}; 2 is one")
    return seconds


def _follow(run: str, live: LiveRun, every_s: float) -> int:
    from rich.console import Console
    from rich.live import Live as Screen

    console = Console(file=sys.stdout)
    now = live.refresh(at := time.time())
    try:
        # Not the alternate screen: what was shown last stays in the terminal.
        with Screen(render_screen(run, now, at, console.width, console.height), console=console, auto_refresh=False) as screen:
            while not now.has_ended:
                time.sleep(every_s)
                now = live.refresh(at := time.time())
                screen.update(render_screen(run, now, at, console.width, console.height), refresh=True)
    finally:
        console.show_cursor(True)  # also after Ctrl-C while rich was still beginning, which it does not undo then
    return 0


def render_screen(run: str, now: RunSnapshot, at: float, width: int, height: int) -> Any:
    """The screen, as rich draws it: at most as wide and as high as the terminal."""
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
        table.add_row(*map(Text, row), style=_rank_style(rank))
    parts: list[Any] = [*head]
    if rows:
        parts += [Text(), table]
    if len(rows) > room:
        parts.append(Text(f"and {format_count(len(rows) - room, 'more rank')}", style="dim"))
    parts += [Text(line, style="dim", no_wrap=True, overflow="ellipsis") for line in events]
    return Group(*parts)


def _rank_style(rank: RankSnapshot) -> str:
    if rank.closed:
        return "red" if rank.closed == "failed" else "dim"
    return "yellow" if rank.age_s > _STALE_S else ""


def render_text(run: str, now: RunSnapshot, at: float) -> list[str]:
    """The same as plain lines, with all there is."""
    names, rows = rank_rows(now, narrow=False)
    lines = head_lines(run, now, 10_000)
    if rows:
        widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
        lines += ["", *("  ".join(cell.rjust(size) for cell, size in zip(row, widths, strict=True)) for row in [names, *rows])]
    return lines + event_lines(now, at)


def head_lines(run: str, now: RunSnapshot, width: int) -> list[str]:
    """What the whole run does, in lines that are not wider than asked for where they can be broken."""
    name = escape_unprintable(Path(run).resolve().name or run)
    if not now.attempt and not now.metrics:
        return [f"nothing is there yet: waiting for {escape_unprintable(run)}"]
    if not now.attempt:
        first = f"{name}  step {now.step:,}  (no ledger)"
    else:
        state = _run_state(now)
        first = f"{name}  attempt {now.attempt}  step {now.step:,}  {format_duration(now.seconds)}  {state}"
    facts = [f"{escape_unprintable(name)} {now.metrics[name]:.4g}" for name in _select_metrics(now.metrics)]
    speeds = (("steps/s", now.steps_per_s), ("samples/s", now.samples_per_s), ("tok/s", now.tokens_per_s))
    facts += [f"{_format_rate(value)} {unit}" for unit, value in speeds if value is not None]
    if now.goodput is not None:
        facts.append(f"goodput {now.goodput:.1%}")
    if now.unreadable:
        facts.append(f"{format_count(now.unreadable, 'line')} unreadable")
    return [first, *_wrap_facts(facts, width)]


def _run_state(now: RunSnapshot) -> str:
    reasons = {each.closed for each in now.ranks}
    if "failed" in reasons:
        return "failed"
    if None not in reasons and reasons:
        return "stopped" if "stopped" in reasons else "done"
    quiet = min((each.age_s for each in now.ranks), default=0.0)
    return f"silent for {format_duration(quiet)}" if quiet > _STALE_S else "running"


def _select_metrics(metrics: dict[str, float]) -> list[str]:
    """Loss and learning rate first, then what has a short name: groups of per-layer numbers have long ones."""
    rated = sorted(metrics, key=lambda name: (name != "loss", name != "lr", "loss" not in name, "/" in name, name))
    return [name for name in rated if len(name) <= 40][:_METRICS]


def _wrap_facts(facts: list[str], width: int) -> list[str]:
    lines: list[str] = []
    for fact in facts:
        if lines and len(lines[-1]) + len(fact) + 2 <= width:
            lines[-1] += f"  {fact}"
        else:
            lines.append(fact)
    return lines


def rank_rows(now: RunSnapshot, *, narrow: bool) -> tuple[list[str], list[list[str]]]:
    """The heads of a table, and a row for each rank."""
    names = ["rank", "step", "age", "compute", "data", "stall"]
    names += [] if narrow else ["save", "RSS", "host", "state"]
    rows = []
    for each in now.ranks[:_RANKS] if narrow else now.ranks:
        shares = [f"{each.shares[cause]:.0%}" if cause in each.shares else "-" for cause in ("compute", "data", "stall")]
        row = [str(each.rank), f"{each.step:,}", format_duration(each.age_s), *shares]
        if not narrow:
            saving = f"{each.shares['checkpoint']:.0%}" if "checkpoint" in each.shares else "-"
            row += [saving, "-" if each.rss_bytes is None else format_bytes(each.rss_bytes)]
            row += [escape_unprintable(each.host)[:30], escape_unprintable(each.closed or "running")]
        rows.append(row)
    return names, rows


def event_lines(now: RunSnapshot, at: float) -> list[str]:
    """What happened last, newest last."""
    lines = []
    for when, rank, event in now.events[-_EVENTS:]:
        fields = " ".join(f"{key}={_format_value(value)}" for key, value in event.items() if key not in _RESERVED_KEYS)
        clock = datetime.fromtimestamp(when).strftime("%H:%M:%S" if at - when < 86400 else "%Y-%m-%d %H:%M:%S")
        lines.append(escape_unprintable(f"{clock}  rank {rank}  {event['name']}  {fields}".rstrip())[:300])
    return ["", *lines] if lines else []


def _format_value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)[:80]


def _format_rate(value: float) -> str:
    for unit in ("", "k", "M", "G"):
        if abs(value) < 1000:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g}T"
