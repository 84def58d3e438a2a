"""Inject faults into a program: an error, a kill, a stop or a delay at a named function, on one rank."""

from __future__ import annotations

import errno
import inspect
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
from unittest import mock

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from dtrain.arguments import check_choice, check_int, check_number
from dtrain.dist.init import get_dist_info
from dtrain.errors import ConfigError

FaultAction = Literal["raise", "kill", "stop", "delay"]
FaultTiming = Literal["before", "after"]

FAULT_POINTS = {
    "forward": "torch.nn.Module.__call__",
    "backward": "torch.Tensor.backward",
    "gather": "torch.distributed.fsdp._fully_shard._fsdp_param_group.foreach_all_gather",
    "reduce": "torch.distributed.fsdp._fully_shard._fsdp_param_group.foreach_reduce",
    "reduce_bucket": "dtrain.shard.replicate.dist.all_reduce",
    "step_sync": "dtrain.dist.step_sync.reduce_record",
    "write": "dtrain.storage.local.os.write",
    "write_data": "dtrain.storage.local.os.pwritev",
    "fsync": "dtrain.storage.local.os.fsync",
    "rename": "dtrain.storage.local.os.rename",
}
"""Import paths by short name. A further short name, ``"optimizer"``, is the ``step`` of every torch optimizer."""

# Each optimizer class has its own step, so this point uses torch's hooks instead of an import path.
_OPTIMIZER = "optimizer"


@dataclass(slots=True, kw_only=True)
class FaultPoint:
    """Counts of one fault point: calls on this rank, and calls at which the fault fired."""

    at: str
    calls: int = field(default=0, init=False)
    fired: int = field(default=0, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def _count_call(self, call: int | None) -> bool:
        # A background save writes in its own thread.
        with self._lock:
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
    """Inject a fault at a function that runs inside the context, and raise if the fault never fired.

    Args:
        action: ``"raise"`` an exception, ``"kill"`` this process with SIGKILL, ``"stop"`` it with SIGSTOP (a hang), or
            ``"delay"`` the call. The action hits the calling process, so run the code with ``run_ranks``.
        at: a short name (``forward``, ``backward``, ``gather``, ``reduce``, ``reduce_bucket``, ``step_sync``, ``optimizer``,
            ``write``, ``write_data``, ``fsync``, ``rename``), or the import path of any function or method, as the tested code
            looks it up: ``from x import f`` copies ``f``, so the path is then ``"importing_module.f"``. A path through an
            imported module (``"dtrain.storage.local.os.fsync"``) changes only the view of *that* module.
        rank: rank that fails; None means every rank. The other ranks run without a fault.
        call: number of the call that fires, from 1 on each rank; None means every call.
        when: ``"before"`` the call, or ``"after"`` its return.
        error: exception for ``"raise"``; None raises an ``OSError`` (EIO).
        seconds: duration of ``"delay"``.

    Returns:
        A context with the ``FaultPoint``. The original function is restored at its end, also after an error.

    Mutates: the function at the point, until the context ends.

    Example:
        >>> import dtrain as dt
        >>> with dt.testing.inject_fault(
        ...     "raise", at="write", error=OSError("disk full")
        ... ):  # doctest: +SKIP
        ...     dt.save_sharded("ckpt", state)
        Traceback (most recent call last):
        OSError: disk full

    Raises:
        ConfigError: there is no function at ``at``, an argument is invalid, or the fault never fired on its rank. If the block
            raises another error, that error is raised instead.
    """
    _check_fault(action, rank, call, when, error, seconds)
    point = FaultPoint(at=at)
    own_rank = get_dist_info().rank
    path = FAULT_POINTS.get(at, at)
    if at != _OPTIMIZER:
        # An unknown path is an error on every rank, not only on the rank that fails.
        find_function(path)
    if rank not in (None, own_rank):
        yield point
        return

    def fire() -> None:
        if point._count_call(call):
            if action == "raise":
                raise error or OSError(errno.EIO, f"injected fault at {at}, call {point.calls}")
            if action == "delay":
                time.sleep(seconds)
            else:
                os.kill(os.getpid(), signal.SIGKILL if action == "kill" else signal.SIGSTOP)

    hook = register_optimizer_step_pre_hook if when == "before" else register_optimizer_step_post_hook
    with hook(lambda optimizer, args, kwargs: fire()) if at == _OPTIMIZER else patch_calls(path, **{when: fire}):
        yield point
    if not point.fired:
        raise ConfigError(
            f"inject_fault: {at} was called {point.calls} times on rank {own_rank}, so {call=} never fired. Check that the "
            "tested code looks the function up by this path (`from x import f` copies f into the importing module)."
        )


def _check_fault(
    action: str, rank: int | None, call: int | None, when: str, error: BaseException | None, seconds: float
) -> None:
    check_choice("inject_fault", "action", action, get_args(FaultAction))
    check_choice("inject_fault", "when", when, get_args(FaultTiming))
    if rank is not None:
        check_int("inject_fault", "rank", rank, minimum=0, maximum=get_dist_info().world_size - 1)
    if call is not None:
        check_int("inject_fault", "call", call, advice="Or pass call=None for every call.")
    if error is not None and action != "raise":
        raise ConfigError(f"inject_fault: error needs action='raise', got {action=}. Leave out error.")
    if error is not None and not isinstance(error, BaseException):
        raise ConfigError(f"inject_fault: error must be an exception, got {error!r}. Write error=OSError('disk full').")
    check_number("inject_fault", "seconds", seconds, minimum=0, advice="Or use 'stop'.")


@contextmanager
def patch_calls(
    path: str, *, before: Callable[[], None] | None = None, after: Callable[[], None] | None = None
) -> Iterator[None]:
    """Call ``before`` and ``after`` around the function at ``path``, inside the context.

    Only lookups by this path are affected. For a path through an imported module (``"dtrain.storage.local.os.fsync"``), the
    importing module gets a proxy of the imported module, and ``os`` itself does not change.

    Mutates: one attribute of a module or class, restored at the end.

    Raises:
        ConfigError: as ``find_function``.
    """
    find_function(path)
    module, names = _import_prefix(path)
    objects = list(accumulate(names[:-1], getattr, initial=module))
    # Replace an attribute of the last class of the path, or of the first module.
    last = max((index for index, item in enumerate(objects) if not isinstance(item, ModuleType)), default=0)
    owner, names = objects[last], names[last:]
    replacement = _make_replacement(owner, names, before or (lambda: None), after or (lambda: None))
    patch = mock.patch.object(owner, names[0], replacement)
    try:
        patch.start()
    except (TypeError, AttributeError):
        raise ConfigError(
            f"inject_fault: {path!r} belongs to {getattr(owner, '__name__', owner)}, which is built in and cannot be changed. "
            "Use a function that calls it."
        ) from None
    try:
        yield
    finally:
        patch.stop()


def find_function(path: str) -> Any:
    """Return the function or method at ``path``: a module's import path, then attributes.

    Raises:
        ConfigError: there is no such object, or the object is a class or not callable.
    """
    target, names = _import_prefix(path)
    for name in names:
        try:
            target = getattr(target, name)
        except AttributeError:
            raise ConfigError(
                f"inject_fault: there is nothing at {path!r}: {getattr(target, '__name__', target)} has no {name!r}. Pass a "
                "short name or the path by which the code looks the function up (`from x import f` copies f into the importing "
                "module)."
            ) from None
    if not callable(target):
        raise ConfigError(f"inject_fault: {path!r} must be a function, got {type(target).__name__}. Only calls can fail.")
    if isinstance(target, type):
        raise ConfigError(f"inject_fault: {path!r} is a class and cannot be replaced. Use '{path}.__init__'.")
    return target


def _import_prefix(path: str) -> tuple[Any, list[str]]:
    """Return the longest prefix of ``path`` that can be imported, and the names after it, at least one."""
    parts = path.split(".") if isinstance(path, str) else []
    if not parts or not all(parts):
        raise ConfigError(
            f"inject_fault: at must be a short name or an import path such as 'my_loop.load_batch', got {path!r}. "
            "Name a function of an importable module."
        )
    for cut in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:cut])
        try:
            return import_module(name), parts[cut:]
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                # The module exists, but one of its own imports is missing.
                raise
    raise ConfigError(
        f"inject_fault: there is nothing at {path!r}: no module begins the path. Pass a short name or an import path."
    )


def _make_replacement(owner: Any, names: list[str], before: Callable[[], None], after: Callable[[], None]) -> Any:
    """Return the replacement of ``owner.<names[0]>``, in which the function at the end of ``names`` is wrapped."""
    if len(names) > 1:
        inner = getattr(owner, names[0])
        return _ModuleProxy(inner, names[1], _make_replacement(inner, names[1:], before, after))
    original = inspect.getattr_static(owner, names[0], None)
    if isinstance(original, (staticmethod, classmethod)):
        return type(original)(_call_around(original.__func__, before, after))
    return _call_around(getattr(owner, names[0]), before, after)


class _ModuleProxy(ModuleType):
    """Proxy of a module with one attribute replaced."""

    def __init__(self, module: ModuleType, name: str, value: Any) -> None:
        super().__init__(module.__name__)
        self.__dict__["_module"] = module
        setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)


def _call_around(function: Callable[..., Any], before: Callable[[], None], after: Callable[[], None]) -> Callable[..., Any]:
    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        before()
        result = function(*args, **kwargs)
        after()
        return result

    return wrapper
