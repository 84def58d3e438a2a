"""Choose the tests of a quick run: costly families of tests run a few of their rows for each change, by turn.

A parametrized test that runs on real ranks keeps a third of its rows, and at least two. ``@pytest.mark.sample(3)`` says another
number. ``sample(3, by="name")`` groups the tests of a file by the value of a parameter instead of by the function, and keeps
three tests of each value. The rows rotate with the number of commits, so that a few changes run all of them. A row with
``source("transforms/ema.py")`` stays as long as this module has changed, and all rows stay if the test's own file has changed.
``nox -s full`` runs all rows.
"""

from __future__ import annotations

import inspect
import subprocess
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

import dtrain
import public

ROOT = Path(__file__).parents[1]
PACKAGE = Path(dtrain.__file__).parent


@dataclass(frozen=True)
class Turn:
    """State of the repository that decides which rows run.

    Args:
        number: number of commits; 0 outside of a repository.
        changed: paths of the files that the last commit or the working tree changed, relative to the root.
    """

    number: int = 0
    changed: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Row:
    """One collected test of a sampled family.

    Args:
        name: id of the test.
        group: tests of which ``keep`` run.
        keep: number of tests of the group that run; None for a third, and at least two.
        sources: files whose change keeps the row.
    """

    name: str
    group: str
    keep: int | None
    sources: Collection[str] = ()


def choose(rows: Sequence[Row], turn: Turn) -> set[str]:
    """Return the names of the rows that run in this turn.

    Each group is a ring in the order of the hashes of its names. A turn takes the ``keep`` rows after those of the turn before.
    """
    groups = defaultdict[str, list[Row]](list)
    for row in rows:
        groups[row.group].append(row)
    kept = {row.name for row in rows if turn.changed.intersection(row.sources)}
    for name, members in groups.items():
        ring = sorted(members, key=lambda row: crc32(row.name.encode()))
        keep = min(members[0].keep or max(2, len(ring) // 3), len(ring))
        first = turn.number * keep + crc32(name.encode())
        kept |= {ring[(first + index) % len(ring)].name for index in range(keep)}
    return kept


def read_turn(run: Callable[..., str] | None = None) -> Turn:
    """Read the turn from git."""
    run = run or _git
    try:
        number = int(run("rev-list", "--count", "HEAD"))
        changed = run("diff", "--name-only", "HEAD") + run("show", "--name-only", "--format=", "HEAD")
    except (OSError, subprocess.CalledProcessError):
        # An sdist has no repository.
        return Turn()
    return Turn(number=number, changed=frozenset(changed.split()))


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def deselect(config: pytest.Config, items: list[pytest.Item], turn: Turn) -> int:
    """Remove the rows that do not run in this turn from ``items``, and return their number.

    Mutates: ``items``.
    """
    rows = {item.nodeid: row for item in items if (row := _row_of(item)) is not None}
    kept = choose(list(rows.values()), turn)
    left = [item for item in items if item.nodeid in rows and item.nodeid not in kept]
    if left:
        gone = {item.nodeid for item in left}
        items[:] = [item for item in items if item.nodeid not in gone]
        config.hook.pytest_deselected(items=left)
    return len(left)


def _row_of(item: pytest.Item) -> Row | None:
    """Return the row of a test; None for a test that always runs, and for one that the quick run skips anyway."""
    callspec = getattr(item, "callspec", None)
    if callspec is None or item.get_closest_marker("skip") is not None:
        return None
    mark = item.get_closest_marker("sample")
    if mark is None and "ranks" not in getattr(item, "fixturenames", ()):
        return None
    by = mark.kwargs.get("by") if mark is not None else None
    path = item.path.relative_to(ROOT).as_posix()
    return Row(
        name=item.nodeid,
        group=f"{path} {item.originalname if by is None else callspec.params.get(by)}",
        keep=mark.args[0] if mark is not None else None,
        sources=(path, *(f"src/dtrain/{source}" for mark in item.iter_markers("source") for source in mark.args)),
    )


def with_sources(rows: Mapping[str, Any]) -> list[Any]:
    """Return the names of rows as parameters with the modules of their public functions, ``row.of``, as sources."""
    values = {name.rpartition(".")[2]: public.value(name) for name in public.all_names()}
    parameters = []
    for name, row in rows.items():
        functions = [values[function] for function in row.of if callable(values.get(function))]
        files = {inspect.getsourcefile(inspect.unwrap(function)) for function in functions}
        sources = [Path(file).relative_to(PACKAGE).as_posix() for file in files if file is not None]
        parameters.append(pytest.param(name, marks=[pytest.mark.source(*sources)] if sources else ()))
    return parameters


def room_of(item: pytest.Item) -> str:
    """Return the folder of a test in ``tests``, or the file of a test beside the folders."""
    return item.path.relative_to(ROOT / "tests").parts[0]
