"""Faults on purpose: an error, a kill, a stop or a delay at a named point of a program, on one rank."""

from __future__ import annotations

import errno
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, get_args

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from dtrain.dist.init import current
from dtrain.errors import ConfigError
from dtrain.testing.lookup import find, wrapped

Action = Literal["raise", "kill", "stop", "delay"]
When = Literal["before", "after"]

POINTS = {
    "forward": "torch.nn.Module.__call__",
    "backward": "torch.Tensor.backward",
    "gather": "torch.distributed.fsdp._fully_shard._fsdp_param_group.foreach_all_gather",
    "reduce": "torch.distributed.fsdp._fully_shard._fsdp_param_group.foreach_reduce",
    "vote": "dtrain.dist.control.all_gather_numbers",
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

    def _reached(self, call: int | None) -> bool:
        with self._lock:  # a background save writes in a thread of its own
            self.calls += 1
            hit = call in (None, self.calls)
            self.fired += hit
            return hit


@contextmanager
def fault(
    action: Action,
    *,
    at: str,
    rank: int | None = None,
    call: int | None = 1,
    when: When = "before",
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
    _check(action, rank, call, when, error, seconds)
    point = FaultPoint(at=at)
    here = current().rank
    path = POINTS.get(at, at)
    if at != _OPTIMIZER:
        find(path)  # an unknown path is an error on every rank, not only on the one that fails
    if rank not in (None, here):
        yield point
        return

    def strike() -> None:
        if point._reached(call):
            _act(action, error or OSError(errno.EIO, f"injected fault at {at}, call {point.calls}"), seconds)

    with _optimizer_step(strike, when) if at == _OPTIMIZER else wrapped(path, **{when: strike}):
        yield point
    if not point.fired:
        raise ConfigError(
            f"fault: {at} was called {point.calls} times on rank {here}, so {call=} never came; is this the path by which the "
            "code under test looks it up (`from x import f` copies f into the importing module)?"
        )


def _check(action: str, rank: int | None, call: int | None, when: str, error: BaseException | None, seconds: float) -> None:
    if action not in get_args(Action):
        raise ConfigError(f"fault: unknown {action=}; use one of {', '.join(get_args(Action))}")
    if when not in get_args(When):
        raise ConfigError(f"fault: unknown {when=}; use one of {', '.join(get_args(When))}")
    if rank is not None and (type(rank) is not int or not 0 <= rank < current().world_size):
        raise ConfigError(f"fault: {rank=} is none of the {current().world_size} ranks, so it would never fire")
    if call is not None and (type(call) is not int or call < 1):
        raise ConfigError(f"fault: calls are counted from 1, got {call=}; None means every call")
    if error is not None and action != "raise":
        raise ConfigError(f"fault: error is for action='raise', got {action=}; leave it out")
    if error is not None and not isinstance(error, BaseException):
        raise ConfigError(f"fault: needs an exception to raise, got {error=}; as in error=OSError('disk full')")
    if not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
        raise ConfigError(f"fault: needs seconds >= 0, got {seconds=}; for ever is what 'stop' does")


def _act(action: Action, error: BaseException, seconds: float) -> None:
    if action == "raise":
        raise error
    if action == "delay":
        time.sleep(seconds)
    else:
        os.kill(os.getpid(), signal.SIGKILL if action == "kill" else signal.SIGSTOP)


@contextmanager
def _optimizer_step(strike: Callable[[], None], when: When) -> Iterator[None]:
    register = register_optimizer_step_pre_hook if when == "before" else register_optimizer_step_post_hook
    handle = register(lambda optimizer, args, kwargs: strike())
    try:
        yield
    finally:
        handle.remove()
