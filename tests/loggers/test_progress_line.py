"""progress_line: the speed is in tokens where tokens are counted, else in samples."""

from types import SimpleNamespace

import pytest

from dtrain.clock import Clock
from dtrain.loggers.text import progress_line


@pytest.mark.parametrize(
    ("counts", "speed"),
    [
        pytest.param({"tokens": 512_000, "samples": 500}, "51,200 tok/s", id="tokens"),
        pytest.param({"samples": 12_340}, "1,234 samples/s", id="samples"),
        pytest.param({"samples": 45}, "4.5 samples/s", id="few-samples"),
        pytest.param({"samples": 1}, "0.1 samples/s", id="hardly-any"),
    ],
)
def test_speed_uses_counted_unit(counts, speed):
    state = SimpleNamespace(clock=Clock(step=20, seconds=10.0, **counts))
    assert progress_line(state, {}, total_steps=40, since=Clock()) == f"step 20/40  {speed}  0:10 left"


def test_tokens_speed_is_omitted_when_no_new_tokens():
    since = Clock(step=10, tokens=500, samples=100)
    state = SimpleNamespace(clock=Clock(step=20, tokens=500, samples=300, seconds=10.0))
    assert progress_line(state, {}, total_steps=20, since=since) == "step 20/20  20 samples/s  0:00 left"
