"""What comes to its end when ``init_dist``'s block is left, and in which order."""

import pytest

from dtrain.dist import shutdown
from dtrain.dist.shutdown import register_shutdown_hook, run_shutdown_hooks


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch):
    monkeypatch.setattr(shutdown, "_HOOKS", {})
    monkeypatch.setattr(shutdown, "_LAST_HOOKS", {})


def test_the_last_come_after_all_others_whenever_they_were_registered():
    called = []
    register_shutdown_hook("ledger", lambda error: called.append(("ledger", error)), last=True)
    register_shutdown_hook("saves", lambda error: called.append(("saves", error)))
    register_shutdown_hook("sink", lambda error: called.append(("sink", error)))
    run_shutdown_hooks(None)
    assert called == [("saves", None), ("sink", None), ("ledger", None)]


def test_the_last_hear_of_what_the_others_raise():
    heard = []

    def fail(error):
        raise OSError("disk full")

    register_shutdown_hook("ledger", heard.append, last=True)
    register_shutdown_hook("saves", fail)
    with pytest.raises(OSError, match="disk full"):
        run_shutdown_hooks(None)
    assert [str(error) for error in heard] == ["disk full"]


def test_those_after_one_that_raises_end_as_well_and_the_first_error_counts():
    heard = []

    def fail(error):
        heard.append(error)
        raise OSError(f"disk {len(heard)}")

    register_shutdown_hook("saves", fail)
    register_shutdown_hook("traces", fail)
    register_shutdown_hook("sinks", heard.append)
    with pytest.raises(OSError, match="disk 1"):
        run_shutdown_hooks(None)
    assert [str(error) for error in heard] == ["None", "disk 1", "disk 1"]
