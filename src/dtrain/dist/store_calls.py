"""Make requests to the rendezvous store from threads of their own, because a request to a stopped server never returns."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from dtrain.dist.arrival_marks import Add, Set, SetOnce, Sleep, Spread, StoreAnswer, StoreRequest
from dtrain.errors import DistError

_PROBE_TIMEOUT_S = 2.0

T = TypeVar("T")


def ask_store(store: dist.Store, request: StoreRequest) -> StoreAnswer:
    """Make one request of ``arrival_marks`` to the store, and return its answer."""
    if isinstance(request, Add):
        return store.add(request.key, request.value)
    if isinstance(request, SetOnce):
        return store.compare_set(request.key, "", request.text).decode(errors="replace")
    if isinstance(request, Set):
        store.set(request.key, request.text)
        return None
    if isinstance(request, Sleep):
        time.sleep(request.seconds)
        return time.monotonic()
    assert not isinstance(request, Spread)
    try:
        if request.timeout_s > 0:
            store.wait([request.key], timedelta(seconds=request.timeout_s))
        elif not store.check([request.key]):
            return None
    except dist.DistStoreError:
        return None
    return store.get(request.key).decode(errors="replace")


def call_with_timeout(call: Callable[[], T], *, timeout_s: float, message: str) -> T:
    """Return ``call()``, or raise after ``timeout_s`` seconds. The store's own timeouts do not work if its server is stopped.

    Raises:
        DistError: ``message``. ``call`` continues in its own thread.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # noqa: BLE001 - raised below, in the calling thread
            errors.append(error)

    thread = start_thread(run)
    thread.join(timeout_s)
    if errors:
        raise errors[0]
    if not results:
        raise DistError(message)
    return results[0]


def start_thread(call: Callable[[], None]) -> threading.Thread:
    """Run ``call`` in a thread that does not keep the process alive. A lost store ends the thread."""

    def run() -> None:
        # The store and the process that served it are gone. The message reports what could not be read.
        with suppress(dist.DistError):
            call()

    thread = threading.Thread(target=run, daemon=True, name="dtrain-store")
    thread.start()
    return thread


def clone_store(store: dist.Store, timeout_s: float = 5.0) -> dist.Store:
    """Open another connection to the same store, because a call blocks its connection until the call returns.

    The prefixes of ``store`` are dropped. A store that is not served over TCP is returned unchanged.

    Raises:
        DistStoreError: the process that served the store has ended.
    """
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return store
    try:
        # torch would try again until the timeout.
        socket.create_connection((store.host, store.port), _PROBE_TIMEOUT_S).close()
    except ConnectionRefusedError as error:
        raise dist.DistStoreError(str(error)) from error
    except OSError:
        pass
    return dist.TCPStore(store.host, store.port, None, False, timedelta(seconds=timeout_s), wait_for_workers=False)
