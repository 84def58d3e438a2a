"""Events that the ledger of a run hears."""

import pytest

from dtrain import spans


@pytest.fixture
def events():
    """Return the events for the ledger so far, without their times and without those of models."""
    heard = []

    class Listener:
        def on_step(self):
            spans.schedule_next_check(step=10**12, in_s=1e6)

        def on_event(self, event):
            if event["name"] != "model":
                heard.append({key: value for key, value in event.items() if key != "at"})

    spans.set_listener(Listener())
    yield heard
    spans.set_listener(None)
