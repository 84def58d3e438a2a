"""Choose the tests of a quick run: costly families of tests run a few of their rows for each change, by turn.

A parametrized test that runs on real ranks keeps a fifth of its rows, and at least two. ``@pytest.mark.sample(3)`` says another
number. ``sample(3, by="name")`` groups the tests of a file by the value of a parameter instead of by the function, and keeps
three tests of each value. Of the tests of a file that start jobs of the launcher (fixture ``start``) a sixth runs, and of the
files that train an example a quarter. Of all tests with ``@pytest.mark.costly``, which take seconds of a core, an eighth runs.
``costly(by="name")``: the tests of a file with one value of the parameter run in the same turn, as they share a costly fixture.

The rows rotate with the number of commits, so that a few changes run all of them. A row with ``source("transforms/ema.py")``
stays as long as this module has changed, and all rows stay if the test's own file has changed.
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
EXAMPLES = ROOT / "examples"
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
        keep: number of rows of the group that run, or their share, of which at least two run.
        sources: files whose change keeps the row.
    """

    name: str
    group: str
    keep: int | float
    sources: Collection[str] = ()


def choose(rows: Sequence[Row], turn: Turn) -> set[str]:
    """Return the names of the rows that run in this turn.

    Each group is a ring in the order of the hashes of its names. A turn takes the ``keep`` rows after those of the turn before.
    """
    groups = defaultdict[str, dict[str, Row]](dict)
    for row in rows:
        groups[row.group][row.name] = row
    kept = {row.name for row in rows if turn.changed.intersection(row.sources)}
    for name, members in groups.items():
        ring = sorted(members, key=lambda row: crc32(row.encode()))
        (keep,) = {row.keep for row in members.values()}
        keep = min(keep if isinstance(keep, int) else max(2, int(keep * len(ring))), len(ring))
        first = turn.number * keep + crc32(name.encode())
        kept |= {ring[(first + index) % len(ring)] for index in range(keep)}
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


def deselect(config: pytest.Config, items: list[pytest.Item], turn: Turn) -> None:
    """Remove the tests that do not run in this turn from ``items``.

    Mutates: ``items``.
    """
    rows = {item.nodeid: row for item in items if (row := row_of(item)) is not None}
    kept = choose(list(rows.values()), turn)
    left = [item for item in items if item.nodeid in rows and rows[item.nodeid].name not in kept]
    if left:
        gone = {item.nodeid for item in left}
        items[:] = [item for item in items if item.nodeid not in gone]
        config.hook.pytest_deselected(items=left)


def row_of(item: pytest.Item) -> Row | None:
    """Return the row of a test; None for a test that always runs, and for one that the quick run skips anyway."""
    if item.get_closest_marker("skip") is not None:
        return None
    path = item.path.relative_to(ROOT).as_posix()
    if (script := EXAMPLES / item.path.name.removeprefix("test_")).exists() and room_of(item) == "examples":
        return Row(name=path, group="examples", keep=1 / 4, sources=(path, script.relative_to(ROOT).as_posix()))
    callspec, fixtures = getattr(item, "callspec", None), getattr(item, "fixturenames", ())
    mark = item.get_closest_marker("sample")
    sources = (path, *(f"src/dtrain/{source}" for mark in item.iter_markers("source") for source in mark.args))
    if (costly := item.get_closest_marker("costly")) is not None:
        shared = callspec.params[costly.kwargs["by"]] if costly.kwargs else None
        return Row(name=f"{path} {shared}" if costly.kwargs else item.nodeid, group="costly", keep=1 / 8, sources=sources)
    if mark is not None and callspec is not None:
        by = mark.kwargs.get("by")
        group = item.originalname if by is None else callspec.params.get(by)
        return Row(name=item.nodeid, group=f"{path} {group}", keep=mark.args[0], sources=sources)
    if "start" in fixtures and room_of(item) == "launch":
        return Row(name=item.nodeid, group=f"{path} jobs", keep=1 / 6, sources=sources)
    if "ranks" in fixtures and callspec is not None:
        return Row(name=item.nodeid, group=f"{path} {item.originalname}", keep=1 / 5, sources=sources)
    return None


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


def spread(items: Sequence[pytest.Item]) -> dict[str, float]:
    """Return the place of each file in an order in which the files of all folders alternate: a number from 0 to 1 by path.

    So tests that wait for processes run beside tests that compute, during the whole run. Each folder begins with its longest
    files, so that no long one is the last of the run.
    """
    seconds = defaultdict[str, dict[str, float]](lambda: defaultdict(float))
    for item in items:
        seconds[room_of(item)][str(item.path)] += _guess_seconds(item)
    longest_first = (sorted(files, key=files.__getitem__, reverse=True) for files in seconds.values())
    return {path: index / len(paths) for paths in longest_first for index, path in enumerate(paths)}


def _guess_seconds(item: pytest.Item) -> float:
    row = row_of(item)
    if row is None:
        return 0.05
    return 8.0 if row.group in ("costly", "examples") else 1.0
