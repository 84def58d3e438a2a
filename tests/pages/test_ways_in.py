"""docs/from_*.md: names of theirs are of the release, and every name of ours is there with the options that a row gives."""

from __future__ import annotations

import ast
import importlib
import inspect
import math
import re

import pytest

import dtrain as dt
import public
from pages.fences import DOCS, fences
from pages.test_code_blocks import refusal
from pages.ways_in import PAGES

TABLES = [(page, section) for page, sections in PAGES.items() for section in sections]
_CODE = re.compile(r"`([^`]+)`")


def table(page: str, section: str) -> list[list[str]]:
    """The three cells of each row of a section's table, without its head."""
    body = re.split(rf"^## {re.escape(section)}$", (DOCS / page).read_text(), maxsplit=1, flags=re.M)[1]
    lines = re.split(r"^## ", body, maxsplit=1, flags=re.M)[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert all(len(row) == 3 for row in rows), [row for row in rows if len(row) != 3]
    return rows[2:]


def rows(page: str, section: str) -> list[list[list[str]]]:
    """Return the text in backquotes in the three cells, row by row."""
    return [[_CODE.findall(cell) for cell in row] for row in table(page, section)]


def named(name: str) -> object:
    """Resolve a name on a page: an export of dtrain or a part of an export, or a path in the package."""
    if name.startswith("dtrain."):
        module, _, attribute = name.rpartition(".")
        return getattr(importlib.import_module(module), attribute)
    (public_name,) = public.named_in(f"dt.{name}") or {""}
    assert public_name, f"dtrain has no {name}"
    value, rest = public.value(public_name.replace("dt.", "dtrain.", 1)), name.removeprefix(public_name[3:]).split(".")[1:]
    for field in rest:
        fields = getattr(value, "__dataclass_fields__", {})
        value = fields[field] if field in fields else getattr(value, field)
    return value


def problem(text: str) -> str | None:
    """Return the problem of a piece of dtrain code in a table, or None."""
    if text.startswith("dtrain "):
        return refusal(text.split()[1:])
    if text.startswith("-"):  # an option of the launcher
        return refusal(["launch", *text.split(), *([] if " " in text else ["x"] * text.startswith("--")), "loop.py"])
    call = re.fullmatch(r"([\w.]+)\((\w+=.*)?\)", text)
    name, options = (call[1], re.findall(r"(\w+)=", call[2] or "")) if call else (text, [])
    if re.fullmatch(r"[\w.]+", name):
        name = name.removeprefix("dt.")
        try:
            value = named(name)
        except (AssertionError, AttributeError, ImportError) as error:
            return str(error)
        parameters = inspect.signature(value).parameters if options else {}
        return next((f"{name} has no {option}" for option in options if option not in parameters), None)
    ast.parse(text + (" ..." if text.endswith(":") else ""))
    return next((f"dtrain has no {unknown.removeprefix('dt.')}" for unknown in sorted(public.unknown_in(text))), None)


def test_every_migration_page_is_tested() -> None:
    assert {path.name for path in DOCS.glob("from_*.md")} == set(PAGES)


@pytest.mark.parametrize(("page", "section"), TABLES)
def test_migration_tables_have_names_of_the_library_once(page: str, section: str) -> None:
    theirs = [name for row in rows(page, section) for name in row[0]]
    assert len(theirs) == len(set(theirs))
    assert set(theirs) - set(PAGES[page][section].split()) == set()


@pytest.mark.parametrize(("page", "section"), TABLES)
def test_every_dtrain_name_in_migration_tables_exists_with_its_options(page: str, section: str) -> None:
    calls = re.compile(r"\w+\(\w+=\)")  # in the text column: as in `save_sharded(keep_last=)`
    given = [text_here for _, here, text in rows(page, section) for text_here in (*here, *filter(calls.fullmatch, text))]
    assert given
    assert {text_here: wrong for text_here in given if (wrong := problem(text_here))} == {}


@pytest.mark.parametrize(("page", "section"), TABLES)
def test_rows_without_a_counterpart_give_a_reason(page: str, section: str) -> None:
    for _, here, said in table(page, section):
        assert here == "-" or _CODE.search(here) or "](" in here, here
        assert here != "-" or said, "a row without a counterpart has a reason"


def test_deepspeed_schedules_match_their_formulas() -> None:
    """Its ``get_lr`` after ``t`` calls of ``step`` behind the first; 1,000 steps of warm-up, 10,000 in all."""
    (code,) = [block.text for block in fences(DOCS / "from_deepspeed.md") if "def logarithmic" in block.text]
    names: dict[str, object] = {"dt": dt}
    exec(code, names)

    def rest(t: int) -> float:
        return max(0.0, (10_000 - t) / 9_000)

    for t in (0, 1, 10, 500, 999, 1_000, 1_001, 5_000, 9_999, 10_000, 12_000):
        warm = math.log(t + 1) / math.log(1_000)
        ahead = 1e-4 + (1 - 1e-4) * (1 + math.cos(math.pi * min(1.0, (t - 999) / 9_000))) / 2
        expected = {
            "warmup": warm if t < 1_000 else 1.0,
            "decay": t / 1_000 if t < 1_000 else rest(t),
            "later": warm if t < 1_000 else rest(t),
            "cosine": t / 1_000 if t < 1_000 else ahead,
        }
        for name, value in expected.items():  # the cosine there is one step ahead: at most pi / 2 / 9,000
            assert names[name](t) == pytest.approx(value, abs=2e-4 if name == "cosine" else 1e-9)


def test_deepspeed_lr_range_test_grows_without_bound() -> None:
    """Its ``get_lr`` before step ``t``: 1 + rate * (last_batch_iteration + 1) / size, with a count that begins at -1."""
    ((_, (code,), _),) = [row for row in rows("from_deepspeed.md", "Optimizers and schedules") if row[0] == ["LRRangeTest"]]
    factor = eval(code, {"rate": 0.5, "size": 200})
    assert [factor(t) for t in (0, 100, 200, 2_000)] == [1.0, 1.25, 1.5, 6.0]


def test_torchtitan_loop_schedule_matches_its_formula() -> None:
    """Its ``linear_warmup_stable_decay``: 60 steps, 10 of them warm-up, the last fifth decays."""
    (code,) = [block.text for block in fences(DOCS / "from_torchtitan.md") if "warmup_stable_decay" in block.text]
    nodes = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Assign)]
    lines = [line for node in nodes if re.match(r"(decaying|lr) = ", line := ast.unparse(node))]
    names: dict[str, object] = {"dt": dt, "warmup": 10}
    exec("\n".join(lines), names)
    for t in range(60):
        expected = (t + 1) / 10 if t < 10 else 1.0 if t < 49 else 1 - (t + 1 - 49) / 12
        assert names["lr"](t) == pytest.approx(expected), t


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("shard_model(strategy=)", None),
        ("shard_model(stratgy=)", "shard_model has no stratgy"),
        ("train", "dtrain has no train"),
        ("data.Loader.until", None),
        ("data.Loader.untill", "has no attribute 'untill'"),
        ("dtrain.schedules.composer.linear", None),
        ("dtrain.schedules.composer.line", "has no attribute 'line'"),
        ("if state.crossed(3): dt.save(1)", "dtrain has no save"),
        ("--nnodes 2", None),
        ("--nodes 2", "No such option"),
        ("dtrain lunch", "No such command"),
    ],
)
def test_name_check_detects_missing_names_and_options(text: str, wrong: str | None) -> None:
    message = problem(text)
    assert message is None if wrong is None else wrong in (message or "")
