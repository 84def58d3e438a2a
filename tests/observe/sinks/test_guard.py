"""A sink that fails, hangs or is slow: the others go on, training goes on, and somebody is told once."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from dtrain import spans
from dtrain.dist.closing import finish_all
from dtrain.errors import ConfigError
from dtrain.observe.sinks import DroppedSink, close_sink, dropped_sinks, guarded, in_memory, tee, text_file
from dtrain.observe.sinks.thread import InThread

PATIENCE_S = 60.0


class Failing:
    def __init__(self) -> None:
        self.calls, self.closed = 0, 0

    def __call__(self, step, numbers):
        self.calls += 1
        raise ZeroDivisionError("no\nluck")

    def close(self):
        self.closed += 1
        raise OSError("nor here")


def test_a_sink_that_fails_is_dropped_and_the_others_go_on():
    failing, kept, before = Failing(), in_memory(), len(dropped_sinks())
    spans.listen(heard := Heard())
    try:
        log = tee(failing, kept)
        with pytest.warns(UserWarning, match=r"^Failing: no luck; metrics are no longer logged there$"):
            log(0, {"loss": 1.0})
        log(1, {"loss": 1.0})
        log(2, {"loss": 1.0})
    finally:
        spans.listen(None)
    assert (failing.calls, failing.closed) == (1, 1)
    assert len(kept.records) == 3
    assert dropped_sinks()[before:] == (DroppedSink(name="Failing", step=0, error="no luck"),)
    assert [(each["name"], each["sink"], each["error"]) for each in heard.events] == [("dropped", "Failing", "no luck")]


class Heard:
    def __init__(self) -> None:
        self.events = []

    def stepped(self) -> None:
        pass

    def happened(self, event) -> None:
        self.events.append(event)


def test_an_interrupt_in_a_sink_is_no_failure_of_it():
    def pressed(step, numbers):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tee(pressed)(1, {})


def test_closing_reaches_every_sink_once_and_what_comes_later_is_ignored():
    class Closable:
        calls, closed = 0, 0

        def __call__(self, step, numbers):
            self.calls += 1

        def close(self):
            self.closed += 1

    first, second, kept = Closable(), Closable(), in_memory()
    log = tee(tee(first, kept), guarded(second))
    log(1, {})
    close_sink(log)
    log(2, {})
    close_sink(log)
    assert [(each.calls, each.closed) for each in (first, second)] == [(1, 1), (1, 1)]
    close_sink(lambda step, numbers: None)  # nothing to do
    assert guarded(log) is log


def test_a_sink_that_fails_to_close_is_told():
    log = guarded(Failing(), name="mine")
    with pytest.warns(UserWarning, match="mine: nor here; metrics"):
        close_sink(log)


BAD = {
    "tee": (lambda: tee(3), r"guarded: needs a sink, a function of \(step, numbers\), got 3"),
    "guarded": (lambda: guarded(None), "guarded: needs a sink, .*, got None"),
    "close": (lambda: close_sink("log"), "close_sink: needs a sink, .*, got 'log'"),
    "patience": (lambda: guarded(print, patience_s=0), "print: patience_s is a number of seconds above 0, got 0"),
    "patience of nan": (lambda: guarded(print, patience_s=float("nan")), "above 0, got nan"),
}


@pytest.mark.parametrize(("make", "message"), BAD.values(), ids=BAD)
def test_what_cannot_be_right_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Lets go what hangs, at the end."""
    event = threading.Event()
    yield event
    event.set()


def until(true) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_sink_in_a_thread_gets_plain_copies_in_their_order():
    kept = in_memory()
    log = guarded(kept, patience_s=PATIENCE_S)
    numbers = {"loss": 1.0}
    for step in range(100):
        numbers["loss"] = float(step)
        log(step, numbers)
    close_sink(log)
    log(100, numbers)
    assert kept.column("loss") == {step: float(step) for step in range(100)}


def test_a_sink_that_hangs_is_dropped_and_holds_nobody(gate):
    kept, before = in_memory(), len(dropped_sinks())

    def hanging(step, numbers):
        gate.wait()

    apart = guarded(hanging, patience_s=0.5)
    log = tee(apart, kept)
    log(1, {})
    until(lambda: apart._trouble() is not None)
    with pytest.warns(UserWarning, match=r"hanging: no answer for 0\.5 s; metrics are no longer logged there"):
        log(2, {})
    log(3, {})
    close_sink(log)
    assert len(kept.records) == 3
    assert [(each.name, each.step) for each in dropped_sinks()[before:]] == [("hanging", 2)]


def test_a_sink_that_hangs_at_the_end_is_waited_for_only_so_long(gate):
    log = guarded(lambda step, numbers: gate.wait(), name="slow", patience_s=PATIENCE_S)
    log._close_s = 0.1
    log(1, {})
    with pytest.warns(UserWarning, match=r"slow: was not done 0\.1 s after the end; [01] records still wait"):
        close_sink(log)


def test_a_sink_that_fails_in_its_thread_is_told_where_the_loop_is():
    failing = Failing()
    log = guarded(failing, patience_s=PATIENCE_S)
    log(1, {})
    until(lambda: failing.calls)
    with pytest.warns(UserWarning, match="Failing: no luck"):
        close_sink(log)


def test_records_that_a_slow_sink_has_no_room_for_are_left_out(gate):
    seen, taken = [], threading.Event()

    class Slow:
        def write(self, records):
            taken.set()
            gate.wait()
            seen.extend(record.step for record in records)

        def close(self, *, failed):
            seen.append(failed)

    log = InThread("slow", Slow, prepared=dict, patience_s=PATIENCE_S, most=3)
    log(0, {})
    assert taken.wait(PATIENCE_S)
    for step in (1, 2, 3):
        log(step, {})
    with pytest.warns(UserWarning, match="slow: is slower than the loop logs; 3 records wait"):
        log(4, {})
    log(5, {})
    gate.set()
    close_sink(log)
    assert seen == [0, 1, 2, 3, False]


def test_numbers_that_cannot_be_prepared_drop_the_sink(gate):
    log = InThread("odd", in_memory, prepared=lambda numbers: 1 / 0, patience_s=PATIENCE_S)
    with pytest.warns(UserWarning, match="odd: division by zero"):
        log(1, {})


def test_all_are_closed_when_the_block_of_init_dist_is_left(tmp_path):
    said = []

    class Told:
        def write(self, records):
            said.extend(record.step for record in records)

        def close(self, *, failed):
            said.append(failed)

    lines = text_file(tmp_path / "log.txt", flush_every=100)
    log = tee(InThread("told", Told, prepared=dict, patience_s=PATIENCE_S), lines)
    log(1, {})
    finish_all(ValueError("training failed"))
    assert said == [1, True]
    assert (tmp_path / "log.txt").read_text().endswith("step 1\n")


def test_all_are_closed_at_the_end_of_the_process(tmp_path):
    program = f"""
from dtrain.observe.sinks import guarded, tee, text_file
from dtrain.observe.sinks.thread import InThread
class Told:
    def write(self, records):
        pass
    def close(self, *, failed):
        print("failed", failed, flush=True)
class Slow:
    def __call__(self, step, numbers):
        import time
        time.sleep(0.2)
    def close(self):
        print("closed", flush=True)
told = InThread("told", Told, prepared=dict, patience_s=30.0)
log = tee(told, guarded(Slow(), patience_s=30.0), text_file({str(tmp_path / "log.txt")!r}, flush_every=100))
log(1, {{"loss": 1.0}})
raise ValueError("training failed")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout) == (1, "failed True\nclosed\n"), done.stderr
    assert (tmp_path / "log.txt").read_text().endswith("step 1  loss 1\n")
