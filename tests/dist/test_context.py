"""Shutdown hooks: their order, and the error that they are called with."""

import pytest

from dtrain.dist import context
from dtrain.dist.context import DistContext, current_context, register_shutdown_hook


@pytest.fixture(autouse=True)
def new_context(monkeypatch):
    monkeypatch.setattr(context, "_CONTEXT", DistContext())


def test_last_hooks_run_after_all_other_hooks():
    called = []
    register_shutdown_hook("ledger", lambda error: called.append(("ledger", error)), last=True)
    register_shutdown_hook("saves", lambda error: called.append(("saves", error)))
    register_shutdown_hook("sink", lambda error: called.append(("sink", error)))
    current_context().shutdown_hooks.run(None)
    assert called == [("saves", None), ("sink", None), ("ledger", None)]


def test_last_hooks_get_the_error_of_an_earlier_hook():
    heard = []

    def fail(error):
        raise OSError("disk full")

    register_shutdown_hook("ledger", heard.append, last=True)
    register_shutdown_hook("saves", fail)
    with pytest.raises(OSError, match="disk full"):
        current_context().shutdown_hooks.run(None)
    assert [str(error) for error in heard] == ["disk full"]


def test_hook_error_runs_remaining_hooks_and_raises_first_error():
    heard = []

    def fail(error):
        heard.append(error)
        raise OSError(f"disk {len(heard)}")

    register_shutdown_hook("saves", fail)
    register_shutdown_hook("traces", fail)
    register_shutdown_hook("sinks", heard.append)
    with pytest.raises(OSError, match="disk 1"):
        current_context().shutdown_hooks.run(None)
    assert [str(error) for error in heard] == ["None", "disk 1", "disk 1"]
