"""The whole about a hang in one file: the message, the groups' last collectives rank by rank, and all stacks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Mapping
from datetime import datetime
from pathlib import Path

from dtrain.launch.hang.collectives import Group, History
from dtrain.launch.hang.explain import Evidence, name_ranks
from dtrain.launch.verdict import describe_end


def write_report(path: Path, lines: Collection[str], evidence: Collection[Evidence], *, at: float) -> None:
    """Write the report to ``path``, atomically; a folder that is gone or a full disk costs the report only.

    Args:
        path: the file.
        lines: the message, which comes first, up to an empty line.
        evidence: what it rests on.
        at: when the ranks were asked, in seconds since 1970.
    """
    text = "\n".join((*lines, "", f"as of {moment(at)}", "", *_groups(evidence), *_ranks(evidence), ""))
    partial = path.with_suffix(".partial")
    with contextlib.suppress(OSError):
        partial.write_text(text, encoding="utf-8", errors="backslashreplace")
        os.replace(partial, path)


def moment(at: float) -> str:
    """A time in seconds since 1970, as a reader wants it: this machine's clock."""
    return datetime.fromtimestamp(at).astimezone().isoformat(sep=" ", timespec="seconds")


def message_of(report: str) -> str:
    """The message with which a report begins."""
    return report.partition("\n\n")[0]


def _groups(evidence: Collection[Evidence]) -> Iterator[str]:
    """Each group, and where each of its ranks is in it."""
    records = {one.rank: one.record for one in evidence if one.record is not None}
    groups: dict[Group, dict[int, History]] = {}
    for rank, record in sorted(records.items()):
        for group, history in record.histories.items():
            groups.setdefault(group, {})[rank] = history
    for group, told in sorted(groups.items(), key=lambda item: (item[0].id, item[0].backend)):
        yield f"group {group.name} ({group.backend}): {name_ranks(group.ranks)}"
        for rank in group.ranks:
            yield f"  rank {rank}: {_last(told[rank]) if rank in told else _nothing(rank, records)}"
        yield ""


def _last(history: History) -> str:
    """The last collective that is done, and those that wait."""
    waiting = [str(one) for _, one in sorted(history.collectives.items()) if one.waits]
    done = [str(one) for _, one in sorted(history.collectives.items()) if not one.waits]
    return f"last done {done[-1] if done else 'not known'}" + (f"; waits in {', '.join(waiting)}" if waiting else "")


def _nothing(rank: int, records: Mapping[int, object]) -> str:
    return "no collective yet" if rank in records else "wrote nothing down"


def _ranks(evidence: Collection[Evidence]) -> Iterator[str]:
    for one in sorted(evidence, key=lambda one: one.rank):
        yield f"rank {one.rank}: {', '.join(_state(one))}"
        for group, history in one.record.histories.items() if one.record is not None else ():
            yield f"  last collectives of group {group.name} ({group.backend})"
            for _, collective in sorted(history.collectives.items()):
                yield f"    {collective} {list(collective.sizes)}{' waits' if collective.waits else ''}"
        yield "  stacks" if one.stacks.strip() else "  its stacks are not known"
        yield from (f"    {line}" for line in one.stacks.splitlines())
        yield ""


def _state(one: Evidence) -> Iterator[str]:
    if one.ended is not None:
        yield describe_end(one.ended)
    elif one.seen is None:
        yield "has not come to init_dist's block" if one.record is None else "its launcher wrote nothing about it"
    else:
        yield {
            "open": "in init_dist's block",
            "leaving": "at the end of init_dist's block",
            "closed": "has left init_dist's block",
        }[one.seen.phase]
    if one.doing:
        yield f"{one.doing}, point of progress {one.passed}"
    if one.quiet_s is not None:
        yield f"last heard of {one.quiet_s:.1f} s before"
    if one.pid is not None:
        yield f"process {one.pid}"
    if one.state:
        yield f"its state {one.state}"
    if one.died is not None:
        yield f"ended when it was asked ({describe_end(one.died)})"
