"""Import the packages of a script once for all ranks of a proof: ``script_imports``, and this module's import in the server.

The packages are imported before the proof changes torch, so a module may hold a function of torch that a rank replaces later.
``replaced_functions`` gives it the replacement.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from dtrain.launch.starter import imported_names, program_sources

IMPORTS = "DTRAIN_PROVE_IMPORTS"
"""Environment variable with the names that the server of the ranks imports."""

# Packages that every rank imports, or that a rank imports in no time.
_KNOWN = {*sys.stdlib_module_names, "torch", "dtrain", "numpy"}
# Packages whose functions a proof replaces.
_CHANGED = ("torch", "dtrain", "safetensors", "numpy", "time", "glob", "os", "random", "builtins")
# A package may read the environment when it is imported.
_SETS_ENVIRONMENT = re.compile(r"environ\s*\[[^]]*\]\s*=[^=]|environ\.(setdefault|update)|putenv|load_dotenv")


def script_imports(script: Path) -> tuple[str, ...]:
    """Return the names that a script and its modules import from installed packages; none if they set variables."""
    names = dict[str, None]()
    for text, folder in program_sources(script):
        if _SETS_ENVIRONMENT.search(text):
            return ()
        for name in imported_names(text):
            top = name.partition(".")[0]
            if top not in _KNOWN and not (folder / f"{top}.py").is_file() and not (folder / top).is_dir():
                names[name] = None
    return tuple(names)


def _import_all(names: list[str]) -> None:
    for name in names:
        # The script meets the same error in its own import, or catches it.
        with contextlib.suppress(BaseException):
            package, _, attribute = name.rpartition(".")
            # A package may load its names on demand.
            if not hasattr(sys.modules.get(package), attribute):
                importlib.import_module(name)


@contextmanager
def replaced_functions() -> Iterator[None]:
    """Give the functions that the context replaces to the modules that have imported them already."""
    originals = [
        (module, name, value) for module in loaded_modules(_CHANGED) for name, value in vars(module).items() if callable(value)
    ]
    yield
    replacements = {
        id(value): vars(module)[name] for module, name, value in originals if vars(module).get(name, value) is not value
    }
    unchanged = {id(module) for module in loaded_modules({*_CHANGED, *sys.stdlib_module_names})}
    replace_functions(replacements, [module for module in loaded_modules() if id(module) not in unchanged])


def replace_functions(replacements: Mapping[int, Any], modules: Iterable[ModuleType]) -> None:
    """Replace functions, by ``id``, where modules have imported them, and as default arguments of the modules' functions."""
    for module in modules:
        for name, value in list(vars(module).items()):
            if id(value) in replacements:
                setattr(module, name, replacements[id(value)])
            elif isinstance(value, FunctionType) and (defaults := getattr(inspect.unwrap(value), "__kwdefaults__", None)):
                defaults |= {key: replacements[id(default)] for key, default in defaults.items() if id(default) in replacements}


def loaded_modules(packages: Collection[str] | None = None) -> list[ModuleType]:
    """Return the imported modules, or those of some packages."""
    return [
        module
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and (packages is None or name.partition(".")[0] in packages)
    ]


# The server of the ranks imports this module for its effect.
_import_all(os.environ.get(IMPORTS, "").split())
