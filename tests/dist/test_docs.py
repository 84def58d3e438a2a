"""docs/collectives.md: examples run, and names and error lines exist."""

import re
from pathlib import Path

import dtrain as dt
import public
from dtrain.dist.incident_protocol import ArrivalReport, format_missing_ranks

PAGE = (Path(__file__).parents[2] / "docs" / "collectives.md").read_text()


def test_docs_example_runs():
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict = {"dt": dt}
    exec(compile(block, "docs/collectives.md", "exec"), names)  # the page's own text
    assert names["results"] == [{"total": 10.0}, {"total": 10.0}]


def test_shown_error_lines_equal_the_raised_lines():
    late = ArrivalReport(missing=[3], timed_out=True)
    slow = format_missing_ranks("save", world_size=8, timeout_s=600, waited_s=600.0, arrivals=late)
    left = ArrivalReport(missing=[1], notes={1: "ValueError: disk full"})
    gone = format_missing_ranks("save", world_size=8, timeout_s=600, waited_s=0.2, arrivals=left)
    assert f"```text\n{slow}\n{gone}\n```" in PAGE


def test_documented_table_names_are_public():
    table = PAGE[PAGE.index("| function") : PAGE.index("A *record*")]
    names = {name for row in table.split("\n")[2:] if row for name in re.findall(r"`([a-z_.]+)[`(]", row.split("|")[1])}
    assert len(names) == 14
    assert [name for name in names if not public.is_public(name)] == []
