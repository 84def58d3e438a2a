"""Numbered parts processed by several threads."""

import threading

import pytest

from dtrain.storage.parallel_parts import for_each_part


def test_first_error_is_raised():
    both, first = threading.Barrier(2, timeout=90), []

    def fail(number):
        if number == 1:
            first.append(threading.current_thread())
        both.wait()
        if number == 1:
            raise ValueError("first")
        first[0].join(90)
        raise KeyError("second")

    with pytest.raises(ValueError, match="first"):
        for_each_part(5, fail, threads=2, name="test")


def test_interrupt_waits_for_running_parts_only(monkeypatch):
    begun, done = threading.Event(), []

    class Interrupted(threading.Thread):
        def join(self, timeout=None):
            begun.wait(90)
            if not done:
                done.append("asked")
                raise KeyboardInterrupt
            super().join(timeout)
            done.append("joined")

    def work(number):
        begun.set()
        threading.Event().wait(0.05)

    monkeypatch.setattr(threading, "Thread", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        for_each_part(1000, work, threads=2, name="test")
    assert done == ["asked", "joined", "joined"]
