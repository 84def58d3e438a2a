"""What a launcher knows about its ranks when it has asked them, kept beside what they wrote down, and both read again later."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dtrain import wire
from dtrain.launch.hang.collectives import parse_record
from dtrain.launch.hang.explain import Evidence
from dtrain.launch.hang.watch import Seen

REPORT = "report.txt"
_TOGETHER_S = 600.0  # between what launchers of several nodes write about the same hang


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What the launcher has seen of one rank, from outside."""

    rank: int
    pid: int | None = None  # None: its process has ended
    seen: Seen | None = None  # what it reported; None: it has not come to init_dist's block
    quiet_s: float | None = None  # since then, when it was asked
    ended: int | None = None
    died: int | None = None
    state: str = ""
    cut_short: bool = False  # it ended while it wrote its stacks, perhaps of it: what it wrote tells of the wrong thread


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What one launcher knows about the ranks of its node. ``at`` is in seconds since 1970."""

    node_rank: int
    at: float
    world_size: int
    timeout_s: float | None  # None: somebody has asked
    ranks: tuple[Known, ...]

    @property
    def report(self) -> str:
        """The file about these ranks: the only one, unless there are ranks on other nodes."""
        return report_name(self.node_rank, alone=len(self.ranks) == self.world_size)


def report_name(node_rank: int, *, alone: bool) -> str:
    """The file, in the folder of the records, in which a launcher writes the whole."""
    return REPORT if alone else f"report-node-{node_rank}.txt"


def write_account(folder: Path, account: Account) -> None:
    """Write what the launcher knows into ``folder``, atomically.

    Raises:
        OSError: the folder is gone, or the disk is full.
    """
    path = folder / f"launcher-{account.node_rank:05d}.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(account)), encoding="utf-8")
    os.replace(partial, path)


def read_accounts(folder: Path) -> list[Account]:
    """What launchers have written into ``folder`` about the last time they asked, by node; damaged ones are left out."""
    found = [account for path in matching(folder, "launcher-*.json") if (account := _parse(read(path))) is not None]
    last = max(found, key=lambda account: account.at, default=None)
    if last is None:
        return []
    # What is older is of an earlier launch in the same folder, perhaps on more nodes.
    return [one for one in found if one.world_size == last.world_size and last.at - one.at <= _TOGETHER_S]


def _parse(text: str) -> Account | None:
    try:
        fields = json.loads(text)
        return Account(**{**fields, "ranks": tuple(_known(one) for one in fields["ranks"])})
    except (ValueError, KeyError, TypeError):
        return None


def _known(fields: Mapping[str, Any]) -> Known:
    seen = fields["seen"]
    return Known(**{**fields, "seen": None if seen is None else Seen(**seen)})


def found_ranks(folder: Path) -> list[Known]:
    """The ranks that wrote something into ``folder``; of what their launcher knew, nothing."""
    names = {path.stem for pattern in ("rank-*.json", "rank-*.stacks") for path in matching(folder, pattern)}
    numbers = sorted(int(number) for name in names if (number := name.removeprefix("rank-")).isdecimal())
    return [Known(rank=number) for number in numbers]


def evidence_of(folder: Path, ranks: Collection[Known]) -> list[Evidence]:
    """All that is known about these ranks: what they wrote into ``folder``, and what was seen from outside."""
    return [
        Evidence(
            rank=one.rank,
            pid=one.pid,
            seen=one.seen,
            quiet_s=one.quiet_s,
            ended=one.ended,
            died=one.died,
            state=one.state,
            record=parse_record(read(folder / wire.blackbox_file(Path(), one.rank).name)),
            stacks="" if one.cut_short else read(folder / wire.stacks_file(Path(), one.rank).name),
        )
        for one in ranks
    ]


def merged(accounts: Collection[Account]) -> Account | None:
    """One account of the ranks of all nodes; None without any."""
    last = max(accounts, key=lambda account: account.at, default=None)
    if last is None:
        return None
    timeouts = [account.timeout_s for account in accounts if account.timeout_s is not None]
    ranks = sorted((one for account in accounts for one in account.ranks), key=lambda one: one.rank)
    return replace(last, ranks=tuple(ranks), timeout_s=max(timeouts, default=None))


def forget(folder: Path, ranks: Collection[int]) -> None:
    """Remove what these ranks wrote down before, so that what is found afterwards is new.

    Their files of stacks are emptied and stay: a rank has its own open, since the handler of a signal can open none.
    """
    for rank in ranks:
        with contextlib.suppress(OSError):
            (folder / wire.blackbox_file(Path(), rank).name).unlink()
        with contextlib.suppress(OSError):
            os.truncate(folder / wire.stacks_file(Path(), rank).name, 0)


def read(path: Path) -> str:
    """The text of a file; empty when it was never written, or its process has ended."""
    try:
        return path.read_text(encoding="utf-8", errors="backslashreplace")
    except OSError:
        return ""


def matching(folder: Path, pattern: str) -> list[Path]:
    """The files of a folder by name; none of one that is not there, or that its launcher is removing at this moment."""
    try:
        return sorted(folder / name for name in fnmatch.filter(os.listdir(folder), pattern))
    except OSError:
        return []
