"""A sink that fails, hangs or is slow: the other sinks and training continue, and one warning comes."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from dtrain import spans
from dtrain.dist.context import current_context
from dtrain.errors import ConfigError
from dtrain.loggers.logger import BackgroundLogger, FailedLogger, close, failed_loggers, fault_tolerant, multi
from dtrain.loggers.records import in_memory
from dtrain.loggers.text import text_file

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


def test_failing_sink_is_dropped_and_others_continue():
    failing, kept, before = Failing(), in_memory(), len(failed_loggers())
    spans.set_listener(heard := Heard())
    try:
        log = multi(failing, kept)
        with pytest.warns(UserWarning, match=r"^Failing: ZeroDivisionError: no luck\. Metrics are no longer logged there\.$"):
            log(0, {"loss": 1.0})
        log(1, {"loss": 1.0})
        log(2, {"loss": 1.0})
    finally:
        spans.set_listener(None)
    assert (failing.calls, failing.closed) == (1, 1)
    assert len(kept.records) == 3
    assert failed_loggers()[before:] == (FailedLogger(name="Failing", step=0, error="ZeroDivisionError: no luck"),)
    assert [(event["name"], event["logger"], event["error"]) for event in heard.events] == [
        ("dropped", "Failing", "ZeroDivisionError: no luck")
    ]


def test_an_error_without_a_text_is_named_by_its_class():
    def failing(step, numbers):
        raise NotImplementedError

    with pytest.warns(UserWarning, match=r"^failing: NotImplementedError\. Metrics are no longer logged there\.$"):
        multi(failing)(0, {})


def test_each_logger_of_several_gets_numbers_of_its_own():
    def changing(step, numbers):
        numbers["loss"] = 0.0

    kept, numbers = in_memory(), {"loss": 5.0}
    multi(changing, kept)(1, numbers)
    assert kept.column("loss") == {1: 5.0}
    assert numbers == {"loss": 5.0}


class Heard:
    def __init__(self) -> None:
        self.events = []

    def on_step(self) -> None:
        pass

    def on_event(self, event) -> None:
        self.events.append(event)


def test_keyboard_interrupt_in_sink_is_propagated():
    def pressed(step, numbers):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        multi(pressed)(1, {})


def test_close_reaches_every_sink_once_and_later_records_are_ignored():
    class Closable:
        calls, closed = 0, 0

        def __call__(self, step, numbers):
            self.calls += 1

        def close(self):
            self.closed += 1

    first, second, kept = Closable(), Closable(), in_memory()
    log = multi(multi(first, kept), fault_tolerant(second))
    log(1, {})
    close(log)
    log(2, {})
    close(log)
    assert [(sink.calls, sink.closed) for sink in (first, second)] == [(1, 1), (1, 1)]
    close(lambda step, numbers: None)  # nothing to do
    assert fault_tolerant(log) is log


def test_sink_failing_to_close_warns():
    log = fault_tolerant(Failing(), name="mine")
    with pytest.warns(UserWarning, match="mine: OSError: nor here. Metrics"):
        close(log)


BAD = {
    "tee": (lambda: multi(3), r"fault_tolerant: logger must be a function of \(step, numbers\), got 3"),
    "guarded": (lambda: fault_tolerant(None), r"fault_tolerant: logger must be a function of .*, got None"),
    "close": (lambda: close("log"), "close: logger must be a function of .*, got 'log'"),
    "patience": (
        lambda: fault_tolerant(print, timeout_s=0),
        "print: timeout_s must be a finite number above 0, got 0",
    ),
    "patience of nan": (lambda: fault_tolerant(print, timeout_s=float("nan")), "above 0, got nan"),
}


@pytest.mark.parametrize(("make", "message"), BAD.values(), ids=BAD)
def test_invalid_arguments_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Release the hanging sink at the end."""
    event = threading.Event()
    yield event
    event.set()


def until(true) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_background_sink_gets_plain_copies_in_order():
    kept = in_memory()
    log = fault_tolerant(kept, timeout_s=PATIENCE_S)
    numbers = {"loss": 1.0}
    for step in range(100):
        numbers["loss"] = float(step)
        log(step, numbers)
    close(log)
    log(100, numbers)
    assert kept.column("loss") == {step: float(step) for step in range(100)}


def test_hanging_sink_is_dropped_without_blocking_others(gate):
    kept, before = in_memory(), len(failed_loggers())

    def hanging(step, numbers):
        gate.wait()

    apart = fault_tolerant(hanging, timeout_s=0.5)
    log = multi(apart, kept)
    log(1, {})
    until(lambda: apart._find_failure() is not None)
    with pytest.warns(UserWarning, match=r"hanging: TimeoutError: no answer for 0\.5 s. Metrics are no longer logged there"):
        log(2, {})
    log(3, {})
    close(log)
    assert len(kept.records) == 3
    assert [(failure.name, failure.step) for failure in failed_loggers()[before:]] == [("hanging", 2)]


def test_close_waits_for_hanging_sink_only_until_timeout(gate):
    log = fault_tolerant(lambda step, numbers: gate.wait(), name="slow", timeout_s=PATIENCE_S)
    log._close_timeout_s = 0.1
    log(1, {})
    with pytest.warns(UserWarning, match=r"slow: TimeoutError: not finished 0\.1 s after the end\. [01] records? still queued"):
        close(log)


def test_failure_in_background_sink_warns_in_main_thread():
    failing = Failing()
    log = fault_tolerant(failing, timeout_s=PATIENCE_S)
    log(1, {})
    until(lambda: failing.calls)
    with pytest.warns(UserWarning, match="Failing: ZeroDivisionError: no luck"):
        close(log)


def test_slow_sink_drops_records_beyond_queue_limit(gate):
    seen, taken = [], threading.Event()

    class Slow:
        def write(self, records):
            taken.set()
            gate.wait()
            seen.extend(record.step for record in records)

        def close(self, *, failed):
            seen.append(failed)

    log = BackgroundLogger("slow", Slow, convert=dict, timeout_s=PATIENCE_S, max_queued=3)
    log(0, {})
    assert taken.wait(PATIENCE_S)
    for step in (1, 2, 3):
        log(step, {})
    with pytest.warns(UserWarning, match="slow: logger must be as fast as the loop, got 3 queued records"):
        log(4, {})
    log(5, {})
    gate.set()
    close(log)
    assert seen == [0, 1, 2, 3, False]


def test_conversion_error_drops_sink(gate):
    log = BackgroundLogger("odd", in_memory, convert=lambda numbers: 1 / 0, timeout_s=PATIENCE_S)
    with pytest.warns(UserWarning, match="odd: ZeroDivisionError: division by zero"):
        log(1, {})


def test_loggers_are_closed_at_end_of_init_dist_block(tmp_path):
    said = []

    class Told:
        def write(self, records):
            said.extend(record.step for record in records)

        def close(self, *, failed):
            said.append(failed)

    lines = text_file(tmp_path / "log.txt", flush_every=100)
    log = multi(BackgroundLogger("told", Told, convert=dict, timeout_s=PATIENCE_S), lines)
    log(1, {})
    current_context().shutdown_hooks.run(ValueError("training failed"))
    assert said == [1, True]
    assert (tmp_path / "log.txt").read_text().endswith("step 1\n")


@pytest.mark.costly
def test_loggers_are_closed_at_process_exit(tmp_path):
    program = f"""
from dtrain.loggers import fault_tolerant, multi, text_file
from dtrain.loggers.logger import BackgroundLogger
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
told = BackgroundLogger("told", Told, convert=dict, timeout_s=30.0)
log = multi(told, fault_tolerant(Slow(), timeout_s=30.0), text_file({str(tmp_path / "log.txt")!r}, flush_every=100))
log(1, {{"loss": 1.0}})
raise ValueError("training failed")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout) == (1, "failed True\nclosed\n"), done.stderr
    assert (tmp_path / "log.txt").read_text().endswith("step 1  loss 1\n")
