"""Examples in docstrings run, and none of them is lost from the run by accident."""

import doctest
import importlib
import pkgutil

import pytest

import dtrain

MODULES = [m.name for m in pkgutil.walk_packages(dtrain.__path__, "dtrain.") if not m.name.endswith("__main__")]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_pass(name):
    module = importlib.import_module(name)
    result = doctest.testmod(module, extraglobs={"torch": importlib.import_module("torch")})
    assert result.failed == 0


def test_docstring_examples_are_collected():
    finder = doctest.DocTestFinder()
    examples = sum(len(test.examples) for name in MODULES for test in finder.find(importlib.import_module(name)))
    assert examples >= 10
