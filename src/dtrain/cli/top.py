"""Define ``dtrain top``: show the live state of a run in the terminal."""

from __future__ import annotations

import sys
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dtrain.arguments import format_bytes, format_count, format_duration
from dtrain.cli.parameters import OTHER_HEADING, number, option
from dtrain.errors import ConfigError, escape_unprintable

if TYPE_CHECKING:
    from dtrain.report.live import LiveRun, RankSnapshot, RunSnapshot

EXAMPLES = """
dtrain top runs/gpt
dtrain top runs/gpt --once      the current state, as plain text
"""

_INTERVAL = number(minimum=0.1, maximum=3600, advice="Use 2, for example.")
_EVENTS, _METRICS, _RANKS = 6, 4, 64
# A rank writes a line every ten seconds.
_STALE_S = 60.0
# A narrower table omits some columns.
_NARROW_COLUMNS = 64
_RESERVED_KEYS = ("kind", "attempt", "at", "name")


def top(
    run: Annotated[str, typer.Argument(metavar="RUN_DIR", help="Folder of a run, which need not exist yet.")],
    once: Annotated[bool, typer.Option("--once", help="Print the state once, as plain text, and exit.")] = False,
    every: Annotated[
        float,
        option("top", OTHER_HEADING, "--every SECONDS", "Refresh interval. By default 2 seconds.", _INTERVAL),
    ] = 2.0,
) -> int:
    """Show the live state of a run.

    The screen shows step, loss, speed, goodput, every rank, and the last events.

    The command only reads the files of the run, so it costs the run nothing. Exit with Ctrl-C; it exits when the run ends.

    Exit codes: 0 the run has ended, or was shown once; 2 bad usage; 130 after Ctrl-C.
    """
    from dtrain.report.live import LiveRun

    folder = Path(run)
    if folder.is_file():
        raise ConfigError(f"top: RUN_DIR must be a folder, got the file {run!r}. Name the folder of a run.")
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
    reasons = {rank.closed for rank in now.ranks}
    if "failed" in reasons:
        return "failed"
    if None not in reasons and reasons:
        return "stopped" if "stopped" in reasons else "done"
    silent_s = min((rank.age_s for rank in now.ranks), default=0.0)
    return f"silent for {format_duration(silent_s)}" if silent_s > _STALE_S else "running"


def _select_metrics(metrics: dict[str, float]) -> list[str]:
    """Select loss and learning rate first, then short names, because groups of per-layer metrics have long names."""
    ordered = sorted(metrics, key=lambda name: (name != "loss", name != "lr", "loss" not in name, "/" in name, name))
    return [name for name in ordered if len(name) <= 40][:_METRICS]


def _wrap_facts(facts: list[str], width: int) -> list[str]:
    lines: list[str] = []
    for fact in facts:
        if lines and len(lines[-1]) + len(fact) + 2 <= width:
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
