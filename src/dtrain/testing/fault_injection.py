"""Faults on purpose: an error, a kill, a stop or a delay at a named point of a program, on one rank.

Finding a function by its import path, and putting another in its place for a while."""

from __future__ import annotations

import errno
import inspect
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from importlib import import_module
from itertools import accumulate
from types import ModuleType
from typing import Any, Literal, get_args

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from dtrain.dist.init import get_dist_info
from dtrain.errors import ConfigError

FaultAction = Literal["raise", "kill", "stop", "delay"]
FaultTiming = Literal["before", "after"]

FAULT_POINTS = {
    "forward": "torch.nn.Module.__call__",
    "backward": "torch.Tensor.backward",
    "gather": "torch.distributed.fsdp._fully_shard._fsdp_param_group.foreach_all_gather",
    "reduce": "torch.distributed.fsdp._fully_shard._fsdp_param_group.foreach_reduce",
    "vote": "dtrain.dist.step_sync.all_gather_numbers",
    "write": "dtrain.storage.local.os.write",
    "write_data": "dtrain.storage.local.os.pwritev",
    "sync": "dtrain.storage.local.os.fsync",
    "rename": "dtrain.storage.local.os.rename",
}
"""Short names of the usual points. One more, ``"optimizer"``, is the ``step`` of every torch optimizer."""

_OPTIMIZER = "optimizer"  # each class has a step of its own, so this point is torch's hooks and no path


@dataclass(slots=True, kw_only=True)
class FaultPoint:
    """What happened at a point so far: how often it was reached on this rank, and how often the fault fired there."""

    at: str
    calls: int = field(default=0, init=False)
    fired: int = field(default=0, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def _count_call(self, call: int | None) -> bool:
        with self._lock:  # a background save writes in a thread of its own
            self.calls += 1
            hit = call in (None, self.calls)
            self.fired += hit
            return hit


@contextmanager
def inject_fault(
    action: FaultAction,
    *,
    at: str,
    rank: int | None = None,
    call: int | None = 1,
    when: FaultTiming = "before",
    error: BaseException | None = None,
    seconds: float = 1.0,
) -> Iterator[FaultPoint]:
    """Do something bad at a point of the program that runs inside, and make sure that it happened.

    Args:
        action: ``"raise"`` an exception, ``"kill"`` this process with SIGKILL, ``"stop"`` it with SIGSTOP (it neither runs
            nor ends, like a machine that hangs), ``"delay"`` it. The process is the one that calls: run the code with
            ``run_ranks``, or the test itself is killed.
        at: a short name (``forward``, ``backward``, ``gather``, ``reduce``, ``vote``, ``optimizer``, ``write``, ``write_data``,
            ``sync``, ``rename``; see ``POINTS``), or the import path of any function or method, as the code under test looks it
            up: ``from x import f`` copies ``f``, so the point is then ``"importing_module.f"``. A path that goes through a
            module imported elsewhere (``"dtrain.storage.local.os.fsync"``) changes what *that* module sees, and nobody else.
        rank: the rank that fails; None means every rank. The others run as if there were no fault.
        call: which call fires, counted from 1 on each rank; None means every call.
        when: ``"before"`` the call, in place of it where the action raises or kills, or ``"after"`` it has returned.
        error: what ``"raise"`` raises; by default an ``OSError`` (EIO).
        seconds: how long ``"delay"`` sleeps.

    Returns:
        A context with the ``FaultPoint``. What it replaced is back in place when it is left, in whichever way.

    Mutates: the function at the point, until the context is left.

    Raises:
        ConfigError: there is nothing at ``at``; an argument that cannot be right; or the fault never fired on the rank it was
            meant for (unless something else was raised inside), because then the test has shown nothing.

    Example:
        >>> from dtrain import storage
        >>> with fault("raise", at="dtrain.storage.local.os.mkdir", error=PermissionError("not here")):
        ...     storage.make_folder("/new")
        Traceback (most recent call last):
        PermissionError: not here
    """
    _check_arguments(action, rank, call, when, error, seconds)
    point = FaultPoint(at=at)
    here = get_dist_info().rank
    path = FAULT_POINTS.get(at, at)
    if at != _OPTIMIZER:
        find_function(path)  # an unknown path is an error on every rank, not only on the one that fails
    if rank not in (None, here):
        yield point
        return

    def strike() -> None:
        if point._count_call(call):
            _perform(action, error or OSError(errno.EIO, f"injected fault at {at}, call {point.calls}"), seconds)

    with _hook_optimizer_step(strike, when) if at == _OPTIMIZER else patch_calls(path, **{when: strike}):
        yield point
    if not point.fired:
        raise ConfigError(
            f"fault: {at} was called {point.calls} times on rank {here}, so {call=} never came; is this the path by which the "
            "code under test looks it up (`from x import f` copies f into the importing module)?"
        )


def _check_arguments(
    action: str, rank: int | None, call: int | None, when: str, error: BaseException | None, seconds: float
) -> None:
    if action not in get_args(FaultAction):
        raise ConfigError(f"fault: unknown {action=}; use one of {', '.join(get_args(FaultAction))}")
    if when not in get_args(FaultTiming):
        raise ConfigError(f"fault: unknown {when=}; use one of {', '.join(get_args(FaultTiming))}")
    if rank is not None and (type(rank) is not int or not 0 <= rank < get_dist_info().world_size):
        raise ConfigError(f"fault: {rank=} is none of the {get_dist_info().world_size} ranks, so it would never fire")
    if call is not None and (type(call) is not int or call < 1):
        raise ConfigError(f"fault: calls are counted from 1, got {call=}; None means every call")
    if error is not None and action != "raise":
        raise ConfigError(f"fault: error is for action='raise', got {action=}; leave it out")
    if error is not None and not isinstance(error, BaseException):
        raise ConfigError(f"fault: needs an exception to raise, got {error=}; as in error=OSError('disk full')")
    if not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
        raise ConfigError(f"fault: needs seconds >= 0, got {seconds=}; for ever is what 'stop' does")


def _perform(action: FaultAction, error: BaseException, seconds: float) -> None:
    if action == "raise":
        raise error
    if action == "delay":
        time.sleep(seconds)
    else:
        os.kill(os.getpid(), signal.SIGKILL if action == "kill" else signal.SIGSTOP)


@contextmanager
def _hook_optimizer_step(strike: Callable[[], None], when: FaultTiming) -> Iterator[None]:
    register = register_optimizer_step_pre_hook if when == "before" else register_optimizer_step_post_hook
    handle = register(lambda optimizer, args, kwargs: strike())
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def patch_calls(
    path: str, *, before: Callable[[], None] | None = None, after: Callable[[], None] | None = None
) -> Iterator[None]:
    """Call ``before`` and ``after`` around the function at ``path``, for as long as the context is open.

    Only those who look the function up by this path are affected. For a path that leads through a module into one that it
    has imported (``"dtrain.storage.local.os.fsync"``), the first of them gets a stand-in for the second: ``os`` stays as it is.

    Mutates: one attribute of a module or class; put back on leaving.

    Raises:
        ConfigError: as ``find``.
    """
    owner, names = _find_owner(path)
    own = names[0] in getattr(owner, "__dict__", {})
    kept = inspect.getattr_static(owner, names[0], None)
    _set_attribute(owner, names[0], _make_replacement(owner, names, before or _do_nothing, after or _do_nothing), path)
    try:
        yield
    finally:
        if own:
            setattr(owner, names[0], kept)
        else:
            delattr(owner, names[0])  # it was inherited, or loaded on demand


def find_function(path: str) -> Any:
    """The function or method at ``path``: a module's import path, then attributes.

    Raises:
        ConfigError: there is no such thing, or it is nothing that can be called, or a class.
    """
    found, names = _import_prefix(path)
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


def _import_prefix(path: str) -> tuple[Any, list[str]]:
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


def _find_owner(path: str) -> tuple[Any, list[str]]:
    """The object whose attribute is replaced, and the names from there on: the last class on the way, or the first module."""
    find_function(path)
    module, names = _import_prefix(path)
    way = list(accumulate(names[:-1], getattr, initial=module))
    last = max((index for index, thing in enumerate(way) if not isinstance(thing, ModuleType)), default=0)
    return way[last], names[last:]


def _make_replacement(owner: Any, names: list[str], before: Callable[[], None], after: Callable[[], None]) -> Any:
    """What takes the place of ``owner.<names[0]>`` so that the function at the end of ``names`` is a wrapped one."""
    if len(names) > 1:
        inner = getattr(owner, names[0])
        return _ModuleProxy(inner, names[1], _make_replacement(inner, names[1:], before, after))
    kept = inspect.getattr_static(owner, names[0], None)
    if isinstance(kept, (staticmethod, classmethod)):
        return type(kept)(_call_around(kept.__func__, before, after))
    return _call_around(getattr(owner, names[0]), before, after)


class _ModuleProxy(ModuleType):
    """A module with one attribute replaced; the rest is looked up in the real one."""

    def __init__(self, module: ModuleType, name: str, value: Any) -> None:
        super().__init__(module.__name__)
        self.__dict__["_module"] = module
        setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)


def _call_around(function: Callable[..., Any], before: Callable[[], None], after: Callable[[], None]) -> Callable[..., Any]:
    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        before()
        result = function(*args, **kwargs)
        after()
        return result

    return called


def _set_attribute(owner: Any, name: str, value: Any, path: str) -> None:
    try:
        setattr(owner, name, value)
    except (TypeError, AttributeError):
        raise ConfigError(
            f"fault: {path!r} belongs to {getattr(owner, '__name__', owner)}, which is built in and cannot be changed; "
            "give a function that calls it"
        ) from None


def _do_nothing() -> None:
    return None
