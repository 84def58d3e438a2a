"""Progress bar of long transfers."""

import io
import sys

import pytest

from dtrain.storage.remote import TransferProgress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("stream", "quiet_s", "shown"),
    [(Terminal(), 0.0, True), (Terminal(), 1e9, False), (io.StringIO(), 0.0, False)],
    ids=["long", "short", "pipe"],
)
def test_bar_is_shown_on_a_terminal_for_long_transfers(monkeypatch, stream, quiet_s, shown):
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    with TransferProgress("writing file", 100, show_after_s=quiet_s) as progress:
        progress.advance(60)
        progress.advance(40)
    assert ("writing file" in stream.getvalue()) is shown
