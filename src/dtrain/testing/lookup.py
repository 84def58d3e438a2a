"""Finding a function by its import path, and putting another in its place for a while."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from itertools import accumulate
from types import ModuleType
from typing import Any

from dtrain.errors import ConfigError


@contextmanager
def wrapped(path: str, *, before: Callable[[], None] | None = None, after: Callable[[], None] | None = None) -> Iterator[None]:
    """Call ``before`` and ``after`` around the function at ``path``, for as long as the context is open.

    Only those who look the function up by this path are affected. For a path that leads through a module into one that it
    has imported (``"dtrain.storage.local.os.fsync"``), the first of them gets a stand-in for the second: ``os`` stays as it is.

    Mutates: one attribute of a module or class; put back on leaving.

    Raises:
        ConfigError: as ``find``.
    """
    owner, names = _slot(path)
    own = names[0] in getattr(owner, "__dict__", {})
    kept = inspect.getattr_static(owner, names[0], None)
    _put(owner, names[0], _stand_in(owner, names, before or _nothing, after or _nothing), path)
    try:
        yield
    finally:
        if own:
            setattr(owner, names[0], kept)
        else:
            delattr(owner, names[0])  # it was inherited, or loaded on demand


def find(path: str) -> Any:
    """The function or method at ``path``: a module's import path, then attributes.

    Raises:
        ConfigError: there is no such thing, or it is nothing that can be called, or a class.
    """
    found, names = _module(path)
    for name in names:
        try:
            found = getattr(found, name)
        except AttributeError:
            raise ConfigError(
                f"fault: there is nothing at {path!r}: {getattr(found, '__name__', found)} has no {name!r}; give a short name "
                "or the path by which the code looks the function up (`from x import f` copies f into the importing module)"
            ) from None
    if not callable(found):
        raise ConfigError(f"fault: {path!r} is no function but {type(found).__name__}; only calls can fail")
    if isinstance(found, type):
        raise ConfigError(f"fault: {path!r} is a class, which must stay what it is for isinstance; give '{path}.__init__'")
    return found


def _module(path: str) -> tuple[Any, list[str]]:
    """The longest beginning of ``path`` that can be imported, and the names after it, at least one."""
    parts = path.split(".") if isinstance(path, str) else []
    if not parts or not all(parts):
        raise ConfigError(f"fault: {path!r} is no import path; give a short name, or a path such as 'my_loop.load_batch'")
    for cut in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:cut])
        try:
            return import_module(name), parts[cut:]
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # the module is there, but lacks something that it imports itself
    raise ConfigError(f"fault: there is nothing at {path!r}: it begins with no module; give a short name or an import path")


def _slot(path: str) -> tuple[Any, list[str]]:
    """The object whose attribute is replaced, and the names from there on: the last class on the way, or the first module."""
    find(path)
    module, names = _module(path)
    way = list(accumulate(names[:-1], getattr, initial=module))
    last = max((index for index, thing in enumerate(way) if not isinstance(thing, ModuleType)), default=0)
    return way[last], names[last:]


def _stand_in(owner: Any, names: list[str], before: Callable[[], None], after: Callable[[], None]) -> Any:
    """What takes the place of ``owner.<names[0]>`` so that the function at the end of ``names`` is a wrapped one."""
    if len(names) > 1:
        inner = getattr(owner, names[0])
        return _Shadow(inner, names[1], _stand_in(inner, names[1:], before, after))
    kept = inspect.getattr_static(owner, names[0], None)
    if isinstance(kept, (staticmethod, classmethod)):
        return type(kept)(_around(kept.__func__, before, after))
    return _around(getattr(owner, names[0]), before, after)


class _Shadow(ModuleType):
    """A module with one attribute replaced; the rest is looked up in the real one."""

    def __init__(self, module: ModuleType, name: str, value: Any) -> None:
        super().__init__(module.__name__)
        self.__dict__["_module"] = module
        setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)


def _around(function: Callable[..., Any], before: Callable[[], None], after: Callable[[], None]) -> Callable[..., Any]:
    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        before()
        result = function(*args, **kwargs)
        after()
        return result

    return called


def _put(owner: Any, name: str, value: Any, path: str) -> None:
    try:
        setattr(owner, name, value)
    except (TypeError, AttributeError):
        raise ConfigError(
            f"fault: {path!r} belongs to {getattr(owner, '__name__', owner)}, which is built in and cannot be changed; "
            "give a function that calls it"
        ) from None


def _nothing() -> None:
    return None
