"""The recorder of wall time: every nanosecond of the main thread is in exactly one span, also after errors in it."""

import os
import threading
import time

import pytest

from dtrain import spans
from dtrain.errors import ConfigError

SHORT_S = 0.004


@pytest.fixture(autouse=True)
def recorder(monkeypatch):
    """A recorder of this test's own, at a clock that only ``pause`` moves."""
    fresh = spans._SpanRecorder()
    monkeypatch.setattr(spans, "_RECORDER", fresh)
    return fresh


@pytest.fixture
def pause(recorder, monkeypatch):
    """``pause(3)``: three seconds pass."""
    now = [recorder.mark]
    monkeypatch.setattr(spans, "perf_counter_ns", lambda: now[0])

    def pass_by(seconds):
        now[0] += int(seconds * 1e9)

    return pass_by


def seconds():
    return {name: total.seconds for name, total in spans.totals().items() if total.seconds}


def open_spans():
    return len(spans._RECORDER.stack)


class Listener:
    def __init__(self):
        self.steps, self.events = 0, []

    def on_step(self):
        self.steps += 1

    def on_event(self, event):
        self.events.append(event)


def test_span_time_excludes_nested_spans(pause):
    pause(1)
    with spans.span("save"):
        pause(2)
        with spans.span("collective"):
            pause(4)
        pause(8)
    pause(16)
    assert seconds() == {"other": 17, "save": 10, "collective": 4}
    assert spans.totals()["save"] == (1, 10.0)


def test_seconds_by_name_sum_to_the_elapsed_time(recorder):
    begun = recorder.mark
    for _ in range(3):
        with spans.span("data"):
            time.sleep(SHORT_S)
            with spans.span("mine"):
                pass
    total = sum(total.seconds for total in spans.totals().values())
    assert total == pytest.approx((recorder.mark - begun) / 1e9, abs=1e-12)
    assert total >= 3 * SHORT_S


def test_nested_span_of_equal_name_counts_its_time_once(pause):
    with spans.span("save"):
        pause(1)
        with spans.span("save"):
            pause(2)
        pause(4)
    assert spans.totals()["save"] == (2, 7.0)
    assert open_spans() == 0


def test_outer_span_continues_after_an_exception(pause):
    def fail():
        with spans.span("data"):
            pause(1)
            raise KeyError

    with spans.span("evaluate"), pytest.raises(KeyError):
        fail()
    pause(2)
    assert seconds() == {"data": 1, "other": 2}


def test_unclosed_span_ends_with_its_outer_span(pause):
    with spans.span("evaluate"):
        spans.begin("data")
        pause(1)
        spans.begin("collective")
    pause(2)
    assert open_spans() == 0
    assert seconds() == {"data": 1, "other": 2}


def test_late_generator_close_ends_no_other_span(pause):
    def batches():
        with spans.span("mine"):
            yield 1

    left = batches()
    next(left)
    with spans.span("evaluate"):
        pause(1)
    left.close()
    pause(2)
    assert open_spans() == 0
    assert seconds() == {"evaluate": 1, "other": 2}


def test_end_by_name_tolerates_unbalanced_inner_spans(pause):
    spans.begin("setup")
    generate = spans.span("mine")
    generate.__enter__()
    spans.begin("step")
    generate.__exit__(None, None, None)  # a generator that is collected in a step takes the step with it
    spans.end("step")
    pause(1)
    spans.begin("data")
    spans.begin("collective")  # never left
    spans.end("data")
    pause(2)
    assert seconds() == {"setup": 3}
    spans.end("setup")
    assert open_spans() == 0


def test_end_without_an_open_span_is_a_no_op(pause):
    spans.end()
    spans.end("compile")
    spans.end("never heard of")
    pause(1)
    assert seconds() == {"other": 1}


def test_outermost_span_counts_only_without_open_spans(pause):
    with spans.outermost_span("collective"):
        pause(1)
    with spans.span("save"), spans.outermost_span("collective"):
        pause(2)
    assert seconds() == {"collective": 1, "save": 2}


def test_nested_outermost_span_counts_once(pause):
    with spans.outermost_span("collective"), spans.outermost_span("collective"):
        pause(1)
    pause(2)
    assert spans.totals()["collective"] == (1, 1.0)
    assert seconds()["other"] == 2


def test_span_time_can_be_reassigned_later(pause):
    with spans.span("step"):
        pause(1)
        move = spans.reassign_later("step")
        pause(2)
        with spans.span("agree"):
            pause(4)
        pause(8)
        move("search")
        pause(16)
    assert seconds() == {"step": 17, "agree": 4, "search": 10}


def test_spans_of_other_threads_are_not_counted(pause):
    def work():
        move = spans.reassign_later("step")
        with spans.span("save"), spans.outermost_span("collective"):
            spans.begin("data")
            spans.end()
        move("search")
        spans.end()

    with spans.span("evaluate"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert open_spans() == 1
        pause(1)
    assert {name: total for name, total in spans.totals().items() if total.count} == {"evaluate": (1, 1.0)}


def test_forked_child_counts_separately(pause):
    with spans.span("evaluate"):
        child = os.fork()
        if child == 0:
            pause(8)
            spans.begin("data")
            os._exit(open_spans())
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
        pause(1)
    assert seconds() == {"evaluate": 1}


@pytest.mark.parametrize(
    "name", ["", "x" * 61, "two\nlines", 7, None, ["save"]], ids=["empty", "long", "unprintable", "number", "none", "list"]
)
def test_span_name_must_be_short_printable_text(name):
    with pytest.raises(ConfigError, match="span: name must be a text of 1 to 60 printable characters, got"):
        spans.span(name)


def test_unknown_category_is_refused():
    with pytest.raises(ConfigError, match=r"span: category must be 'compute', 'data', .*, got 'fun'"):
        spans.span("mine", "fun")


def test_span_name_has_one_category():
    spans.span("mine", "data")
    spans.span("mine")
    with pytest.raises(ConfigError, match=r"span: category of 'mine' must be data as before, got 'setup'. Choose another name"):
        spans.span("mine", "setup")
    with pytest.raises(ConfigError, match="span: category of 'save' must be checkpoint as before"):
        spans.span("save", "data")


def test_time_by_category_lists_all_categories(pause):
    with spans.span("generate", "evaluation"):
        pause(1)
    with spans.span("evaluate"):
        pause(2)
    with spans.span("think"):
        pause(4)
    seconds = spans.seconds_by_category(spans.totals())
    assert list(seconds) == list(spans.TIME_CATEGORIES)
    assert {cause: spent for cause, spent in seconds.items() if spent} == {"evaluation": 3, "other": 4}


def test_excess_span_names_are_merged_into_other(pause):
    for step in range(500):
        with spans.span(f"step {step}"):
            pause(1)
    totals = spans.totals()
    assert len(totals) <= spans._MAX_NAMES + 1
    assert totals["step 0"] == (1, 1.0)
    assert "step 499" not in totals
    assert sum(total.seconds for total in totals.values()) == 500
    assert open_spans() == 0


def test_steps_are_counted_at_clock_ticks():
    for step in (1, 2):
        for _ in range(3):
            spans.begin("step", 0)
            spans.end()
        spans.record_step(step, samples=8 * step, tokens=64 * step)
    assert spans.totals()["step"].count == 2
    assert spans.position() == (2, 16, 128)


def test_listener_is_called_at_due_steps(pause):
    listener = Listener()
    spans.set_listener(listener)
    spans.schedule_next_check(step=3, in_s=10)
    told = []
    for step in range(1, 5):
        spans.record_step(step, samples=0, tokens=0)
        told.append(listener.steps)
    assert told == [0, 0, 1, 2]
    spans.schedule_next_check(step=100, in_s=10)
    with spans.span("step"):
        pause(10)
    spans.record_step(5, samples=0, tokens=0)
    assert listener.steps == 3


def test_time_outside_of_spans_is_setup_until_the_first_step_of_a_run(pause):
    pause(1)
    spans.set_listener(Listener())
    pause(2)
    with spans.span("load"):
        pause(4)
    pause(8)
    with spans.span("step"):
        pause(16)
        spans.record_step(1, samples=0, tokens=0)
    pause(32)
    assert seconds() == {"other": 33, "setup": 10, "load": 4, "step": 16}
    spans.set_listener(None)
    pause(64)
    assert seconds()["other"] == 97


def test_events_are_buffered_until_a_listener_is_added():
    for step in range(300):
        spans.record_event("saved", step=step)
    listener = Listener()
    unheard = spans.set_listener(listener)
    assert [event["step"] for event in unheard] == list(range(100, 300))
    spans.record_event("stop", step=1)
    assert [event["name"] for event in listener.events] == ["stop"]
    assert spans.set_listener(None) == []
    assert spans.set_listener(listener) == []


def test_event_fields_do_not_override_name_and_time():
    spans.record_event("dropped", name="jsonl", at=0, logger="jsonl")
    (event,) = spans.set_listener(Listener())
    assert event["name"] == "dropped"
    assert event["at"] > 1e9
    assert event["logger"] == "jsonl"
