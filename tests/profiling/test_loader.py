"""A loop over dtrain's own loader: the profiler knows how long it waited."""

import time

import torch

import dtrain as dt
from dtrain.profiling.driver import schedule
from dtrain.profiling.profiler import step_profiler
from dtrain.report.trace.diagnosis import diagnose
from falling import begin


class Slow:
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.02)
        return torch.ones(1)


def test_slow_loader_is_diagnosed_from_data_span(tmp_path):
    loader = dt.build_loader(Slow(), global_batch_size=2, seed=0)
    step, state = begin(step_profiler(tmp_path, schedule=schedule(skip_first=1, active=2)))
    for batch in loader.until(5):
        state, _ = step(state, batch)
    found = diagnose(tmp_path)
    assert [finding.rule for finding in found.findings] == ["data_wait"], str(found)
    assert [share.data_wait_source for share in found.shares] == ["spans"]
    assert found.shares[0].data_wait >= 0.07  # of two steps with two samples each
