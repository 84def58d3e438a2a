"""The quick run's choice of rows: its size, its turn, and the rows that stay after a change."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from battery.transforms import ROWS
from sampling import ROOT, Row, Turn, choose, read_turn, row_of, spread, with_sources


def rows(count, keep, group="test_it", sources=()):
    return [Row(name=f"{group}[{index}]", group=group, keep=keep, sources=sources) for index in range(count)]


@pytest.mark.parametrize(("count", "keep"), [(10, 3), (7, 7), (2, 5), (1, 1)])
def test_each_group_keeps_its_number_of_rows(count, keep):
    chosen = choose([*rows(count, keep), *rows(count, keep, "test_other")], Turn(4))
    assert len(chosen) == 2 * min(count, keep)


@pytest.mark.parametrize(("count", "kept"), [(24, 8), (7, 2), (4, 2), (1, 1)])
def test_group_with_a_share_keeps_the_share_and_at_least_two(count, kept):
    assert len(choose(rows(count, 1 / 3), Turn(3))) == kept


@pytest.mark.parametrize(("count", "keep"), [(10, 3), (8, 2), (5, 1)])
def test_consecutive_turns_run_all_rows(count, keep):
    turns = [choose(rows(count, keep), Turn(number)) for number in range(-(-count // keep))]
    assert set.union(*turns) == {row.name for row in rows(count, keep)}
    assert choose(rows(count, keep), Turn(0)) == turns[0]


def test_costly_test_is_one_of_a_group_of_which_an_eighth_runs(request):
    assert row_of(request.node) is None
    request.node.add_marker(pytest.mark.costly)
    assert row_of(request.node) == Row(
        name=request.node.nodeid, group="costly", keep=1 / 8, sources=("tests/test_sampling.py",)
    )


@pytest.mark.costly(by="shared")
@pytest.mark.parametrize(("shared", "other"), [("run", 1), ("run", 2)])
def test_costly_tests_that_share_a_fixture_run_in_one_turn(request, shared, other):
    assert row_of(request.node).name == "tests/test_sampling.py run"


def test_folder_begins_with_its_costly_files(request):
    paths = ["tests/data/test_a.py", "tests/data/test_b.py", "tests/step/test_c.py"]
    items = [copied_to(request.node, ROOT / path) for path in paths]
    items[1].add_marker(pytest.mark.costly)
    places = spread([items[0], *items])
    assert places == {str(ROOT / path): place for path, place in zip(paths, [0.5, 0.0, 0.0], strict=True)}


def copied_to(item: pytest.Item, path: Path) -> pytest.Item:
    """Return the test as one of another file."""
    other = pytest.Function.from_parent(item.parent, name=item.name)
    other.path = path
    return other


def test_changed_source_keeps_its_rows():
    changed = Row(name="test_it[ema]", group="test_it", keep=1, sources=("src/dtrain/transforms/ema.py",))
    for number in range(20):
        turn = Turn(number, frozenset({"src/dtrain/transforms/ema.py", "README.md"}))
        assert "test_it[ema]" in choose([*rows(19, 1), changed], turn)


def test_turn_outside_of_a_repository_is_zero():
    def no_repository(*_):
        raise subprocess.CalledProcessError(128, "git")

    assert read_turn(no_repository) == Turn()


def test_turn_counts_commits_and_reads_changed_files():
    answers = {"rev-list": "12\n", "diff": "tests/a.py\n", "show": "src/b.py\ntests/a.py\n"}
    assert read_turn(lambda command, *_: answers[command]) == Turn(12, frozenset({"tests/a.py", "src/b.py"}))


def test_rows_of_the_battery_name_their_modules():
    marks = {row.values[0]: [mark.args for mark in row.marks] for row in with_sources(ROWS)}
    assert ("transforms/weights/averaging.py",) in marks["ema"]
    assert [name for name, row in ROWS.items() if row.of and not marks[name]] == []
