"""``fork_map``: compute results in forked processes, for functions and arguments that cannot be pickled."""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from dtrain.errors import ConfigError, DtrainError

Item = TypeVar("Item")
Result = TypeVar("Result")


def fork_map(function: Callable[[Item], Result], items: Sequence[Item], *, processes: int) -> Iterator[tuple[int, Result]]:
    """Yield ``(number, function(items[number]))`` in the order in which the results arrive.

    Each item is computed in a forked child of its own, which sees everything that this process has in memory. Only results and
    errors are pickled. If the caller stops early, the children are ended.

    Args:
        function: function of one item.
        items: the items.
        processes: maximum of children at a time; 1 computes in this process.

    Raises:
        DtrainError: the function has raised it in a child.
        ConfigError: a child raised any other error, or was killed.
    """
    if processes == 1 or len(items) < 2:
        yield from ((number, function(item)) for number, item in enumerate(items))
        return
    context = multiprocessing.get_context("fork")
    waiting = list(enumerate(items))[::-1]
    running: dict[Any, tuple[int, BaseProcess]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < processes:
                number, item = waiting.pop()
                receiver, sender = context.Pipe(duplex=False)
                child = context.Process(target=_run_child, args=(function, item, sender), daemon=True)
                with warnings.catch_warnings():
                    # A plan computes nothing in other threads, so no lock can be held in the child.
                    warnings.simplefilter("ignore", DeprecationWarning)
                    child.start()
                sender.close()
                running[receiver] = number, child
            ready: list[Any] = wait(list(running))
            for receiver in ready:
                number, process = running[receiver]
                result: Result = _receive(receiver, process)
                del running[receiver]
                yield number, result
    finally:
        for receiver, (_, process) in running.items():
            process.kill()
            process.join()
            receiver.close()


def _run_child(function: Callable[[Item], Result], item: Item, sender: Connection) -> None:
    try:
        answer: tuple[bool, object] = True, function(item)
    except DtrainError as error:
        answer = False, error
    # The parent raises it as its own error.
    except Exception as error:  # noqa: BLE001
        text = " ".join(str(error).split())
        answer = False, ConfigError(f"plan: {type(error).__name__}: {text}. Run with --processes 1 for the traceback.")
    sender.send(answer)
    sender.close()


def _receive(receiver: Connection, child: BaseProcess) -> Any:
    try:
        has_result, answer = receiver.recv()
    except EOFError:
        child.join()
        raise ConfigError(
            f"plan: a process of the search ended with exit code {child.exitcode}. Free memory, or run with --processes 1."
        ) from None
    child.join()
    receiver.close()
    if not has_result:
        raise answer
    return answer
