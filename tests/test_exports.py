"""The public names: sorted, importable, seen by type checkers, and free of side effects until they are used."""

import ast
import importlib
import inspect
import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import dtrain
import dtrain.testing

SIDE_EFFECTS = """
import json, logging, os, signal, sys, threading
env, handlers = dict(os.environ), {s: signal.getsignal(s) for s in signal.valid_signals()}
loggers, threads, hook = set(logging.root.manager.loggerDict), threading.active_count(), sys.excepthook
import dtrain
print(json.dumps({
    "heavy": sorted({"torch", "numpy", "tensordict", "einops", "typer"} & set(sys.modules)),
    "env": dict(os.environ) == env,
    "signals": {s: signal.getsignal(s) for s in signal.valid_signals()} == handlers,
    "loggers": set(logging.root.manager.loggerDict) == loggers and not logging.root.handlers,
    "threads": threading.active_count() == threads,
    "hook": sys.excepthook is hook,
    "dir": sorted(set(dir(dtrain)) - {"__version__"}) == dtrain.__all__,
    "lazy": (dtrain.ConfigError.__name__, "torch" in sys.modules),
}))
"""


def test_all_is_sorted_and_importable():
    assert dtrain.__all__ == sorted(dtrain.__all__)
    for name in dtrain.__all__:
        assert getattr(dtrain, name) is not None


def test_names_for_tests_are_sorted_and_importable():
    assert dtrain.testing.__all__ == sorted(dtrain.testing.__all__)
    assert [name for name in dtrain.testing.__all__ if not hasattr(dtrain.testing, name)] == []


def test_type_checkers_see_the_same_names_from_the_same_modules():
    tree = ast.parse(Path(dtrain.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    seen = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == {name: f"dtrain.{module}" for name, module in dtrain._MODULE_OF.items()}
    assert sorted(seen) == dtrain.__all__


def test_no_exported_name_is_a_submodule():
    submodules = {module.name for module in pkgutil.iter_modules(dtrain.__path__)}
    assert submodules & set(dtrain.__all__) == set()


def test_every_public_name_has_a_docstring_of_its_own():
    bare = []
    for name, module in dtrain._MODULE_OF.items():
        value = getattr(importlib.import_module(f"dtrain.{module}"), name)
        if (isinstance(value, type) or inspect.isfunction(value)) and not value.__doc__:
            bare.append(name)
    assert bare == []


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'Trainer'"):
        dtrain.Trainer  # noqa: B018


def test_import_does_nothing_else():
    out = subprocess.run([sys.executable, "-c", SIDE_EFFECTS], capture_output=True, text=True, check=True).stdout
    assert json.loads(out) == {
        "heavy": [],
        "env": True,
        "signals": True,
        "loggers": True,
        "threads": True,
        "hook": True,
        "dir": True,
        "lazy": ["ConfigError", False],
    }
