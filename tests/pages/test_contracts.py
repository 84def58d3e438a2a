"""Docstrings state the contract of each public function: its result, mutations, messages, waits and errors."""

from __future__ import annotations

import builtins
import inspect
import re
from typing import Any

import dtrain as dt
import public

_HEADS = "Args|Returns|Yields|Raises|Mutates|Collective|Host sync|Formula|Source|Example|Examples|Note|Warns"
_HEAD = re.compile(rf"(?:^|(?<=[.;] ))({_HEADS}):\s+", re.M)


def contract(value: Any) -> dict[str, str]:
    """Return the sections of a docstring by heading, each as one line; the part before the first heading is under ``""``."""
    parts = _HEAD.split(inspect.getdoc(value) or "")
    sections = {"": parts[0]}
    for head, body in zip(parts[1::2], parts[2::2], strict=True):
        sections.setdefault(head, re.split(r"\n\n(?=\S)", body)[0])
    return {head: " ".join(body.split()).replace("``", "`") for head, body in sections.items()}


def raised(value: Any) -> list[str]:
    """Return the errors that a docstring lists."""
    body = re.search(r"^Raises:\n((?:[ ]+.*\n?|\n(?=[ ]))*)", inspect.getdoc(value) or "", re.M)
    return re.findall(r"^    (\w+):", body[1], re.M) if body else []


FUNCTIONS = {name: value for name in public.all_names() if inspect.isfunction(value := public.value(name))}


def test_functions_have_a_summary_before_their_sections() -> None:
    assert [name for name, function in FUNCTIONS.items() if not contract(function)[""]] == []


def test_functions_that_write_into_their_arguments_say_what_they_mutate() -> None:
    mutating = {name: contract(function).get("Mutates", "") for name, function in FUNCTIONS.items() if name.endswith("_")}
    assert [name for name, mutates in mutating.items() if re.match(r"(none|nothing)?\.?$", mutates)] == []


def test_gathers_say_their_collectives() -> None:
    gathers = {name: value for name, value in FUNCTIONS.items() if name.startswith("dtrain.dist.") and "gather" in name}
    assert gathers
    assert [name for name, value in gathers.items() if not contract(value).get("Collective")] == []


def test_listed_errors_exist() -> None:
    for name, function in FUNCTIONS.items():
        unknown = [error for error in raised(function) if not hasattr(dt.errors, error) and not hasattr(builtins, error)]
        assert unknown == [], name


def test_contract_is_parsed_from_docstring_headings() -> None:
    def writes_(x: int) -> None:
        """Return the result for ``x``.

        Args:
            x: a number.

        Mutates: ``x``, in
            place. Collective: none. Host sync: one.

        Raises:
            ConfigError: ``x`` is
                wrong.
            StepError: another.
        """

    said = contract(writes_)
    assert (said["Mutates"], said["Collective"], said["Host sync"]) == ("`x`, in place.", "none.", "one.")
    assert raised(writes_) == ["ConfigError", "StepError"]
    assert said[""] == "Return the result for `x`."


def test_contracts_are_those_of_the_docstrings() -> None:
    assert raised(dt.build_mesh) == ["ConfigError", "DistError"]
    assert "one all-reduce" in contract(dt.reduce_metrics)["Collective"]
