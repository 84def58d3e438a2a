"""The public names: importable, documented, visible to type checkers, and free of side effects until the first use."""

import inspect
import json
import pkgutil
import subprocess
import sys

import pytest

import public
from pages import names_page

SIDE_EFFECTS = """
import json, logging, os, signal, sys, threading
env, handlers = dict(os.environ), {s: signal.getsignal(s) for s in signal.valid_signals()}
loggers, threads, hook = set(logging.root.manager.loggerDict), threading.active_count(), sys.excepthook
import dtrain
print(json.dumps({
    "heavy": sorted({"torch", "numpy", "tensordict", "einops", "typer"} & set(sys.modules)),
    "own": sorted(name for name in sys.modules if name.startswith("dtrain.")),
    "env": dict(os.environ) == env,
    "signals": {s: signal.getsignal(s) for s in signal.valid_signals()} == handlers,
    "loggers": set(logging.root.manager.loggerDict) == loggers and not logging.root.handlers,
    "threads": threading.active_count() == threads,
    "hook": sys.excepthook is hook,
    "lazy": (dtrain.errors.DtrainError.__name__, dtrain.errors.ConfigError.__name__, "torch" in sys.modules),
}))
"""


IMPORT_OF_EVERY_MODULE = """
import importlib, json, os, pkgutil
import torch._dynamo  # sets a variable of its own
import dtrain
before, changed = dict(os.environ), {}
for module in pkgutil.walk_packages(dtrain.__path__, "dtrain."):
    try:
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    except ImportError:  # an extra that is not installed
        continue
    if dict(os.environ) != before:
        changed[module.name] = sorted(dict(os.environ.items() ^ before.items()))
        before = dict(os.environ)
print(json.dumps(changed))
"""

STEP_IMPORT = """
import json, sys
import torch
before = set(sys.modules)
from dtrain import compose_step
print(json.dumps(sorted(set(sys.modules) - before)))
"""
# Packages that take as long to import as half of torch, and that a step of a plain model does not need.
HEAVY_FOR_A_STEP = (
    "torch.distributed.fsdp", "torch.distributed.checkpoint", "torch.distributed.tensor", "torch._dynamo", "torch.onnx",
    "sympy", "dtrain.checkpoint", "tensordict", "einops",
)  # fmt: skip


def test_every_public_name_is_defined_in_its_module():
    for name, module in public.all_names().items():
        assert public.value(name) is getattr(sys.modules[module], name.rpartition(".")[2]), name


@pytest.mark.parametrize("package", public.DOORS)
def test_dir_and_star_list_the_public_names(package):
    module = public.door(package)
    if hasattr(module, "__path__"):
        doors = {door.rpartition(".")[2] for door in public.DOORS if door.rpartition(".")[0] == package}
        assert dir(module) == module.__all__ == sorted({*public.names(package), *doors})


@pytest.mark.parametrize("package", public.DOORS)
def test_no_public_name_is_a_submodule(package):
    """An import of the submodule would replace the function of the same name."""
    module = public.door(package)
    submodules = {info.name for info in pkgutil.iter_modules(getattr(module, "__path__", []))}
    assert submodules & set(public.names(package)) == set()


def test_top_level_exports_at_most_45_names():
    """The top level is the words of a loop."""
    assert len(public.names("dtrain")) <= 45


@pytest.mark.parametrize("package", public.DOORS)
def test_public_names_of_a_package_are_defined_in_its_folder(package):
    elsewhere = {name: module for name, module in public.names(package).items() if not f"{module}.".startswith(f"{package}.")}
    assert elsewhere == {}


@pytest.mark.parametrize("package", public.DOORS)
def test_names_page_lists_the_names_of_every_package(package):
    listed = names_page.read(names_page.PAGE.read_text())[package]
    doors = {door.rpartition(".")[2] for door in public.DOORS if door.rpartition(".")[0] == package}
    module = public.door(package)
    assert sorted(listed) == sorted(set(dir(module)) - doors if hasattr(module, "__path__") else public.names(package))


def test_names_page_is_up_to_date():
    assert names_page.PAGE.read_text() == names_page.page(), "run python tests/written.py"


def test_every_public_name_has_a_docstring_of_its_own():
    values = {name: public.value(name) for name in public.all_names()}
    bare = [
        name for name, value in values.items() if (isinstance(value, type) or inspect.isfunction(value)) and not value.__doc__
    ]
    assert bare == []


@pytest.mark.parametrize("package", public.DOORS)
def test_unknown_name_is_an_attribute_error(package):
    with pytest.raises(AttributeError, match="has no attribute 'Trainer'"):
        public.door(package).Trainer  # noqa: B018


def test_import_has_no_side_effects():
    out = subprocess.run([sys.executable, "-c", SIDE_EFFECTS], capture_output=True, text=True, check=True).stdout
    assert json.loads(out) == {
        "heavy": [],
        "own": ["dtrain.lazy_imports"],
        "env": True,
        "signals": True,
        "loggers": True,
        "threads": True,
        "hook": True,
        "lazy": ["DtrainError", "ConfigError", False],
    }


@pytest.mark.costly
def test_no_module_changes_the_environment_when_imported():
    """A variable such as ``TORCHDYNAMO_DISABLE`` would change the code that runs afterwards in the same process."""
    out = subprocess.run([sys.executable, "-c", IMPORT_OF_EVERY_MODULE], capture_output=True, text=True, check=True).stdout
    assert json.loads(out) == {}


def test_import_of_compose_step_loads_no_sharding_checkpoints_or_compiler():
    out = subprocess.run([sys.executable, "-c", STEP_IMPORT], capture_output=True, text=True, check=True).stdout
    loaded = json.loads(out)
    assert "dtrain.step.compose" in loaded
    assert [name for name in loaded if any(name == heavy or name.startswith(heavy + ".") for heavy in HEAVY_FOR_A_STEP)] == []
    assert len([name for name in loaded if not name.startswith("dtrain")]) < 100
