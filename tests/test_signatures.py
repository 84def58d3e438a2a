"""The public surface, written down: a change of a name, a parameter or a default is seen in review as a changed line.

``python tests/written.py`` rewrites ``tests/signatures.txt`` after a change that is meant.
"""

import ast
import dataclasses
import difflib
import functools
import importlib
import inspect
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import public

GOLDEN = Path(__file__).with_name("signatures.txt")
REWRITE = "python tests/written.py"
SPOKEN = ("__call__", "__enter__", "__iter__", "__len__", "__getitem__")  # what syntax calls is public, too
OF_COLLECTIVES = {"dtrain.dist.collectives": "", "dtrain.dist.step_sync": "agree_"}  # and prefix
OF_TORCH = ("all_reduce", "all_gather", "broadcast", "barrier", "reduce_scatter_tensor", "all_gather_into_tensor", "reduce")


def surface() -> list[str]:
    """Return one line for each public name and each public method, sorted by name."""
    lines = []
    for name, module in sorted(public.all_names().items()):
        value = public.value(name)
        lines.append(f"{name}: {described(module, name.rpartition('.')[2], value)}")
        if is_class(value):
            lines += [f"{name}.{line}" for line in members(value)]
    return lines


def is_class(value: Any) -> bool:
    return inspect.isclass(value) and value.__module__.startswith("dtrain.")  # typing.Any is a class in some releases


def described(module: str, name: str, value: Any) -> str:
    if inspect.isfunction(value):
        entered = inspect.isgeneratorfunction(inspect.unwrap(value)) and value is not inspect.unwrap(value)
        return f"{'context manager' if entered else 'function'} {signature(value)}"
    if not is_class(value):
        return f"alias {alias_source(module, name)}"
    bases = ", ".join(base.__name__ for base in value.__bases__ if base is not object)
    if issubclass(value, BaseException):
        return f"exception ({bases})"
    if getattr(value, "_is_protocol", False):
        return "protocol"
    if issubclass(value, tuple):
        return f"named tuple {signature(value)}"
    kind = "dataclass" if dataclasses.is_dataclass(value) else "class"
    return f"{kind} {signature(value)}"


def members(cls: type) -> Iterator[str]:
    """The public methods and properties that a class defines itself; fields are in its constructor."""
    for name, value in sorted(vars(cls).items()):
        if name.startswith("_") and name not in SPOKEN:
            continue
        if inspect.isfunction(value) and not getattr(inspect.unwrap(value), "__qualname__", "").startswith(f"{cls.__name__}."):
            continue  # torch puts a wrapper of an inherited step into the class of an optimizer, once there is one
        if inspect.isfunction(value):
            yield f"{name}: method {signature(value)}"
        elif isinstance(value, classmethod | staticmethod):
            yield f"{name}: {type(value).__name__} {signature(value.__func__)}"
        elif isinstance(value, property):
            yield f"{name}: property -> {annotation(inspect.signature(value.fget).return_annotation)}"
        elif isinstance(value, functools.cached_property):
            yield f"{name}: property -> {annotation(inspect.signature(value.func).return_annotation)}"


def signature(function: Any) -> str:
    """The signature with annotations as they are written in the source, and defaults that do not name addresses."""
    found = inspect.signature(function)
    texts, marked = [], False
    for parameter in found.parameters.values():
        # A field of a record that only the package sets.
        if parameter.name.startswith("_"):
            continue
        if parameter.kind is parameter.VAR_POSITIONAL:
            marked = True
        if parameter.kind is parameter.KEYWORD_ONLY and not marked:
            texts.append("*")
            marked = True
        texts.append(parameter_text(parameter))
        if parameter.kind is parameter.POSITIONAL_ONLY:
            after = [p for p in found.parameters.values() if p.kind is p.POSITIONAL_ONLY][-1]
            texts += ["/"] if parameter is after else []
    silent = inspect.isclass(function) or found.return_annotation is found.empty
    result = "" if silent else f" -> {annotation(found.return_annotation)}"
    return f"({', '.join(texts)}){result}"


def parameter_text(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    text = stars + parameter.name
    if parameter.annotation is not parameter.empty:
        text += f": {annotation(parameter.annotation)}"
    if parameter.default is not parameter.empty:
        default = parameter.default
        text += f" = {default.__name__ if inspect.isroutine(default) else repr(default)}"
    return text


def annotation(value: Any) -> str:
    if isinstance(value, str | typing.ForwardRef):
        return value if isinstance(value, str) else value.__forward_arg__
    return value.__name__ if isinstance(value, type) and not isinstance(value, types.GenericAlias) else str(value)


def alias_source(module: str, name: str) -> str:
    """Return the source text of an alias, because its printed form differs between releases of Python."""
    path = inspect.getsourcefile(importlib.import_module(module))
    for node in ast.parse(Path(path).read_text()).body:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return f"= {ast.unparse(node.value)}"
    raise AssertionError(f"{module}.{name} is neither a class, nor a function, nor assigned in its module")


def functions() -> dict[str, Any]:
    """Public functions, and public methods of public classes, by name."""
    found: dict[str, Any] = {}
    for name in public.all_names():
        value = public.value(name)
        if inspect.isfunction(value):
            found[name] = value
        elif inspect.isclass(value):
            for member, function in vars(value).items():
                own = getattr(function, "__qualname__", "").startswith(f"{value.__name__}.")  # see members()
                if inspect.isfunction(function) and own and not member.startswith("_"):
                    found[f"{name}.{member}"] = function
    return found


def documentation(function: Any) -> str:
    return inspect.getdoc(function) or ""


def runs_collectives(source: str) -> set[str]:
    """Functions and methods of a module that call, themselves or through others of it, what exchanges between ranks."""
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
    found: set[str] = set()
    while more := {name for name, called in calls.items() if called & (exchanges | found)} - found:
        found |= more
    return found


def test_public_signatures_match_the_recorded_list():
    diff = list(
        difflib.unified_diff(GOLDEN.read_text().splitlines(), surface(), "tests/signatures.txt", "dtrain", lineterm="", n=0)
    )
    assert not diff, "\n".join([f"the public surface has changed; if it is meant: {REWRITE}", *diff])


def test_signature_list_contains_no_memory_addresses():
    assert [line for line in surface() if " at 0x" in line] == []


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


SIGNATURES = {
    "keyword only": (lambda x, *, y=1: 0, "(x, *, y = 1)"),
    "positional only": (lambda x, /, y: 0, "(x, /, y)"),
    "rest": (lambda *args, key, **rest: 0, "(*args, key, **rest)"),
    "function as a default": (lambda x=surface: 0, "(x = surface)"),
}


@pytest.mark.parametrize(("function", "expected"), SIGNATURES.values(), ids=SIGNATURES)
def test_signature_is_written_as_in_the_source(function, expected):
    assert signature(function) == expected
