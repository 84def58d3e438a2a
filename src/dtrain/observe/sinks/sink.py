"""``Sink``: what a place for metrics is, and ``tee``: several of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from dtrain.errors import ConfigError
from dtrain.observe.sinks.guard import guarded


@runtime_checkable
class Sink(Protocol):
    """A function ``sink(step, numbers)``. It may have a ``close()``, for what it still holds back."""

    def __call__(self, step: int, numbers: Mapping[str, Any], /) -> None: ...


def tee(*sinks: Sink) -> Sink:
    """A sink that gives each record to all ``sinks``, in their order; one that fails is dropped, and the others go on.

    Args:
        sinks: functions of ``(step, numbers)``, such as ``jsonl(...)`` or one of your own, which is made ``guarded``.

    Raises:
        ConfigError: something that cannot be called.

    Example:
        >>> from dtrain.observe.sinks import in_memory
        >>> kept = in_memory()
        >>> log = tee(kept, lambda step, numbers: print(step, sorted(numbers)))
        >>> log(10, {"loss": 0.5, "lr": 0.1})
        10 ['loss', 'lr']
        >>> kept.column("loss")
        {10: 0.5}
    """
    return _Tee(tuple(guarded(sink) for sink in sinks))


class _Tee:
    __slots__ = ("_sinks",)
    drops_itself = True  # each of them does

    def __init__(self, sinks: tuple[Sink, ...]) -> None:
        self._sinks = sinks

    def __call__(self, step: int, numbers: Mapping[str, Any], /) -> None:
        for sink in self._sinks:
            sink(step, numbers)

    def close(self) -> None:
        for sink in self._sinks:
            close_sink(sink)


def close_sink(sink: Sink) -> None:
    """Let a sink write what it holds back, and end; what it is given afterwards is ignored.

    Seldom needed: when ``init_dist``'s block is left, and at the end of the process, all sinks are closed.

    Args:
        sink: any; one without ``close`` has nothing to do.

    Raises:
        ConfigError: no sink.
    """
    if not callable(sink):
        raise ConfigError(f"close_sink: needs a sink, a function of (step, numbers), got {sink!r}")
    close = getattr(sink, "close", None)
    if close is not None:
        close()
