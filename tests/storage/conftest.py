"""Servers of these tests, each started once."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace

import fsspec.config
import pytest

from dtrain.storage import remote
from dtrain.storage.remote import disconnect
from places import servers


@pytest.fixture(scope="package")
def _started() -> Iterator[Callable[[str], servers.Server]]:
    with contextlib.ExitStack() as stack:
        outcomes: dict[str, servers.Server | BaseException] = {}

        def server(name: str) -> servers.Server:
            if name not in outcomes:
                disconnect()  # a lock of an earlier test may have been given back meanwhile, to a server that was gone
                try:
                    outcomes[name] = stack.enter_context(getattr(servers, name)())
                except BaseException as error:  # noqa: BLE001  # a skip, too, is for every test
                    outcomes[name] = error
            outcome = outcomes[name]
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

        yield server
        disconnect()


@pytest.fixture
def reach(_started: Callable[[str], servers.Server], monkeypatch: pytest.MonkeyPatch) -> Callable[[str], servers.Server]:
    """``reach("s3")``: that server, and this process is set up for it; pauses between tries are short."""

    def ready(name: str) -> servers.Server:
        server = _started(name)
        monkeypatch.setitem(fsspec.config.conf, name, server.options)
        if server.home is not None:
            monkeypatch.setenv("HOME", str(server.home))
        monkeypatch.setattr(remote, "RETRY", replace(remote.RETRY, initial_delay_s=0.001))
        return server

    return ready
