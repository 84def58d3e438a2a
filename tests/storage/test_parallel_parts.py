"""Numbered parts processed by several threads."""

import threading
import time

import pytest

from dtrain.storage import parallel_parts
from dtrain.storage.parallel_parts import for_each_part


def test_first_error_is_raised():
    both, first = threading.Barrier(2, timeout=90), []

    def fail(part):
        both.wait()
        if part == 1:
            first.append(threading.current_thread())
            raise ValueError("first")
        # The thread of the first error ends.
        while not first or first[0].is_alive():
            time.sleep(0.001)
        raise KeyError("second")

    with pytest.raises(ValueError, match="first"):
        for_each_part(5, fail, threads=2, name="test")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("test")]


def test_interrupt_waits_for_running_parts_only(monkeypatch):
    begun, done = threading.Event(), []

    def work(part):
        begun.set()
        threading.Event().wait(0.05)
        done.append(part)

    def interrupted(*args):
        begun.wait(90)
        raise KeyboardInterrupt

    monkeypatch.setattr(parallel_parts, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        for_each_part(1000, work, threads=2, name="test")
    assert 1 <= len(done) <= 4
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("test")]
