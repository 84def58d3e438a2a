"""The thread that carries out saves, in their order, while training goes on: one for each process, whatever it saves.

Its collectives run on the ``background`` group, which no other thread uses. So ranks agree on the order of saves by calling
``save_sharded`` in the same order, and on nothing else.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from dtrain import pulse, spans
from dtrain.dist.closing import before_closing
from dtrain.errors import CheckpointError

T = TypeVar("T")
_LOOK_S = 0.5  # while waiting: how often to tell the launcher that the save gets on


@dataclass(slots=True, eq=False)
class Task(Generic[T]):
    """A piece of work in the thread: its result, and how far it is."""

    name: str
    future: Future[T] = field(init=False, repr=False)
    moved: int = 0  # goes up with every piece that is done
    seen: bool = False  # somebody was told that it failed
    given_up: bool = False  # nobody waits for it any more, and what it works on may change

    def advance(self) -> None:
        """Note that the work gets on. Called by the threads that do it.

        Raises:
            CheckpointError: it was given up.
        """
        self.moved += 1
        self.check()

    def check(self) -> None:
        """Raise if the work is not wanted any more."""
        if self.given_up:
            raise CheckpointError(f"{self.name} was interrupted")

    def result(self, timeout_s: float | None = None) -> T:
        """What the work returned; waits for it.

        Raises:
            TimeoutError: not within ``timeout_s`` seconds.
            Exception: what the work raised.
        """
        with spans.outermost("save"):
            return self._waited(timeout_s)

    def _waited(self, timeout_s: float | None) -> T:
        moved = self.moved
        if not self.future.done():
            pulse.beat("save")
        while True:
            step_s = _LOOK_S if timeout_s is None else min(_LOOK_S, timeout_s)
            try:
                result = self.future.result(step_s)
            except NotYet:
                if self.future.done():  # just now; or it was the work that ran out of time
                    self.seen = self.future.exception() is not None
                    return self.future.result()
                if timeout_s is not None and (timeout_s := timeout_s - step_s) <= 0:
                    raise TimeoutError(f"{self.name} has not ended yet") from None
                if self.moved != moved:
                    moved = self.moved
                    pulse.beat("save")
            except BaseException:
                self.seen = self.future.done()  # else an interrupt while waiting
                _rest(wait=self.seen)
                raise
            else:
                _rest(wait=True)
                return result


@dataclass(slots=True, eq=False)
class _Process:
    """The thread of this process and what it has to do; a fork has none of it."""

    pid: int = 0
    thread: ThreadPoolExecutor | None = None
    tasks: list[Task[object]] = field(default_factory=list)
    registered: bool = False
    ended: ThreadPoolExecutor | None = None  # the last one that has nothing to do any more
    guard: threading.Lock = field(default_factory=threading.Lock)


_PROCESS = _Process()


def submit(name: str, work: Callable[[Task[T]], T]) -> Task[T]:
    """Have ``work`` done by the thread, after all that it was given before.

    Args:
        name: for messages.
        work: gets its own task, to tell how far it is.
    """
    process = _here()
    if not process.registered:
        process.registered = True
        before_closing("saves", _finish)
        atexit.register(_exit, os.getpid())
    task: Task[T] = Task(name)
    with process.guard:
        if process.thread is None:
            process.thread = ThreadPoolExecutor(1, thread_name_prefix="dtrain-save")
        task.future = process.thread.submit(work, task)
        process.tasks = [old for old in process.tasks if _matters(old)]
        process.tasks.append(task)  # type: ignore[arg-type]
    task.future.add_done_callback(_rest)
    return task


def _rest(_: object = None, *, wait: bool = False) -> None:
    """Let the thread end when it has nothing to do: a process without threads may be forked.

    Called at the end of each task by the thread itself, and by who has waited for one.
    """
    process = _here()
    with process.guard:
        if process.thread is not None and all(task.future.done() for task in process.tasks):
            process.ended, process.thread = process.thread, None
            process.ended.shutdown(wait=False)
        ended = process.ended
    if wait and ended is not None:
        ended.shutdown()


def make_room(most: int) -> None:
    """Wait until fewer than ``most`` tasks are under way, whatever becomes of the others."""
    running = [task for task in _here().tasks if not task.future.done()]
    for task in running[: max(0, len(running) - most + 1)]:
        wait(task)


def wait(task: Task[T]) -> None:
    """Wait for the end of a task; a failure of it stays to be raised."""
    before = task.seen
    try:
        task.result()
    except Exception:  # noqa: BLE001 - kept in the task
        task.seen = before


def unseen_failure() -> bool:
    """Whether a task has failed and nobody was told."""
    return any(_failed(task) for task in _here().tasks)


def drain() -> None:
    """Wait for all tasks, and raise the first failure that nobody was told of.

    Raises:
        Exception: that failure; the others are notes of it.
    """
    tasks = list(_here().tasks)
    for task in tasks:
        wait(task)
    errors = []
    for task in tasks:
        if _failed(task):
            task.seen = True
            errors.append(task.future.exception())
    if errors and errors[0] is not None:
        for other in errors[1:]:
            errors[0].add_note(f"after it, too: {other}")
        raise errors[0]


def _here() -> _Process:
    if _PROCESS.pid != os.getpid():
        _PROCESS.pid, _PROCESS.thread, _PROCESS.tasks, _PROCESS.registered = os.getpid(), None, [], False
        _PROCESS.ended, _PROCESS.guard = None, threading.Lock()
    return _PROCESS


def _failed(task: Task[object]) -> bool:
    return not task.seen and task.future.done() and task.future.exception() is not None


def _matters(task: Task[object]) -> bool:
    return not task.future.done() or _failed(task)


def _finish(error: BaseException | None) -> None:
    """At the end of ``init_dist``'s block: the saves that were begun are finished, also when the loop has failed."""
    try:
        drain()
    except Exception as failure:
        if error is None or isinstance(error, SystemExit):  # a program that thinks that all is well
            raise
        error.add_note(f"besides, a save in the background failed: {failure}")


def _exit(pid: int) -> None:
    """At the end of a process that never left such a block: a failure that nobody was told of is its exit code."""
    if pid != os.getpid():
        return
    try:
        drain()
    except Exception as failure:  # noqa: BLE001 - what an exit handler raises does not change the exit code
        traceback.print_exception(failure)
        message = "dtrain: a save in the background failed and the program has ended without asking for it"
        print(message, file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(1)
