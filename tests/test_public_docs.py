"""The documentation of public functions names the result, the arguments that change, and the collectives that ranks share."""

import ast
import inspect
from functools import cache
from typing import Any

import public

OF_COLLECTIVES = {"dtrain.dist.collectives": "", "dtrain.dist.step_sync": "agree_"}  # and prefix
OF_TORCH = ("all_reduce", "all_gather", "broadcast", "barrier", "reduce_scatter_tensor", "all_gather_into_tensor", "reduce")


def functions() -> dict[str, Any]:
    """Public functions, and public methods of public classes, by name."""
    by_name: dict[str, Any] = {}
    for name in public.all_names():
        value = public.value(name)
        if inspect.isfunction(value):
            by_name[name] = value
        elif inspect.isclass(value):
            for member, function in vars(value).items():
                own = getattr(function, "__qualname__", "").startswith(f"{value.__name__}.")  # see members()
                if inspect.isfunction(function) and own and not member.startswith("_"):
                    by_name[f"{name}.{member}"] = function
    return by_name


def documentation(function: Any) -> str:
    return inspect.getdoc(function) or ""


@cache
def runs_collectives(source: str) -> set[str]:
    """Return functions and methods of a module that call, directly or through its functions, an exchange between ranks."""
    tree = ast.parse(source)
    exchanges = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in OF_COLLECTIVES
        for alias in node.names
        if alias.name[0].islower() and alias.name.startswith(OF_COLLECTIVES[node.module])
    }
    calls = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            calls[node.name] = {ast.unparse(call.func) for call in ast.walk(node) if isinstance(call, ast.Call)}
    exchanges |= {f"dist.{name}" for name in OF_TORCH}
    names: set[str] = set()
    while more := {name for name, called in calls.items() if called & (exchanges | names)} - names:
        names |= more
    return names


def test_function_summaries_state_the_result_or_the_action():
    wrong = []
    for name, function in functions().items():
        first = " ".join(documentation(function).split("\n\n")[0].split())
        if not first.endswith((".", ":", "``")) or first.lower().startswith(
            ("this function", "this method", "function ", "helper ")
        ):
            wrong.append(name)
    assert wrong == []


def test_functions_that_mutate_arguments_document_it():
    named = {name for name in functions() if name.endswith("_")}
    assert named
    assert {name for name in named if "Mutates:" not in documentation(functions()[name])} == set()


def test_functions_with_collectives_document_them():
    exchanging = {
        name: function
        for name, function in functions().items()
        if function.__name__ in runs_collectives(inspect.getsource(inspect.getmodule(function)))
    }
    assert {"dtrain.save_sharded", "dtrain.reduce_metrics"} <= exchanging.keys()
    assert [name for name, function in exchanging.items() if "Collective:" not in documentation(function)] == []


def test_collective_detection_follows_calls_within_a_module():
    source = """
from dtrain.dist.collectives import Group, reduce_sum
def public(): return _private()
def _private(): return reduce_sum(1)
def by_torch(): dist.all_reduce(x)
def other(): return Group()
"""
    assert runs_collectives(source) == {"public", "_private", "by_torch"}
