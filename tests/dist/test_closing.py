"""What comes to its end when ``init_dist``'s block is left, and in which order."""

import pytest

from dtrain.dist import closing
from dtrain.dist.closing import before_closing, finish_all


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch):
    monkeypatch.setattr(closing, "_FINISHES", {})
    monkeypatch.setattr(closing, "_LAST", {})


def test_the_last_come_after_all_others_whenever_they_were_registered():
    called = []
    before_closing("ledger", lambda error: called.append(("ledger", error)), last=True)
    before_closing("saves", lambda error: called.append(("saves", error)))
    before_closing("sink", lambda error: called.append(("sink", error)))
    finish_all(None)
    assert called == [("saves", None), ("sink", None), ("ledger", None)]


def test_the_last_hear_of_what_the_others_raise():
    heard = []

    def fail(error):
        raise OSError("disk full")

    before_closing("ledger", heard.append, last=True)
    before_closing("saves", fail)
    with pytest.raises(OSError, match="disk full"):
        finish_all(None)
    assert [str(error) for error in heard] == ["disk full"]


def test_those_after_one_that_raises_end_as_well_and_the_first_error_counts():
    heard = []

    def fail(error):
        heard.append(error)
        raise OSError(f"disk {len(heard)}")

    before_closing("saves", fail)
    before_closing("traces", fail)
    before_closing("sinks", heard.append)
    with pytest.raises(OSError, match="disk 1"):
        finish_all(None)
    assert [str(error) for error in heard] == ["None", "disk 1", "disk 1"]
