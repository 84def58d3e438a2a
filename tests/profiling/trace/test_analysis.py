"""Shares of time in traces made by hand; times are in microseconds there, and in seconds in the results."""

import pytest

from dtrain.profiling.trace.diagnosis import OperationTime, kernel_breakdown, sum_windows
from dtrain.profiling.trace.trace_file import parse_trace
from traces_made import kernel, mark, op, trace

US = 1e-6


def share(*events, **about):
    return kernel_breakdown(parse_trace(trace(*events, **about), "x.json"))


def test_cpu_trace_counts_operations_as_compute_and_gaps_as_idle():
    shares = share(
        mark("ProfilerStep#0", 0, 100),
        op("aten::linear", 10, 50),
        op("aten::mm", 20, 45),
        op("aten::add", 60, 70),
        op("aten::late", 95, 130),  # after the step it belongs to no step
    )
    assert (shares.steps, shares.seconds, shares.on_device) == (1, pytest.approx(100 * US), False)
    assert shares.compute == pytest.approx(55 * US)
    assert (shares.communication, shares.copies) == (0, 0)
    assert shares.idle == pytest.approx(45 * US)


def test_cpu_trace_subtracts_overlapped_compute_from_exposed_communication():
    shares = share(
        mark("ProfilerStep#0", 0, 100),
        op("c10d::allreduce_", 10, 12),
        mark("gloo:all_reduce", 11, 61, tid=2),
        op("aten::add", 30, 35, tid=2),  # the backend's own sums
        op("aten::mm", 21, 41),
    )
    assert shares.communication == pytest.approx(51 * US)
    assert shares.exposed_communication == pytest.approx(31 * US)
    assert shares.compute == pytest.approx(20 * US)


def test_collective_inside_operation_is_not_compute():
    shares = share(
        mark("ProfilerStep#0", 0, 100),
        op("autograd::engine::evaluate_function: MmBackward0", 0, 50),
        op("c10d::reduce_scatter_", 10, 40),
    )
    assert (shares.compute, shares.exposed_communication) == (pytest.approx(20 * US), pytest.approx(30 * US))


def test_gpu_trace_counts_kernels():
    shares = share(
        mark("ProfilerStep#0", 0, 100),
        op("aten::mm", 0, 90),
        kernel("gemm", 10, 40),
        kernel("ncclDevKernel_AllReduce_Sum_f32", 30, 70, stream=24),
        kernel("Memcpy HtoD", 75, 80, cat="gpu_memcpy"),
    )
    assert shares.on_device
    assert shares.compute == pytest.approx(30 * US)
    assert (shares.communication, shares.exposed_communication) == (pytest.approx(40 * US), pytest.approx(30 * US))
    assert (shares.copies, shares.idle) == (pytest.approx(5 * US), pytest.approx(35 * US))


STEP = (mark("ProfilerStep#0", 0, 100), mark("dtrain.step", 40, 90))


@pytest.mark.parametrize(
    ("events", "spans", "data", "source"),
    [
        ((*STEP, mark("data", 0, 5)), {"data": 3e-5, "step": 5e-5}, 3e-5, "spans"),
        ((*STEP, mark("data", 0, 5)), {"step": 5e-5}, 5e-6, "marks"),
        ((*STEP, op("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 10, 30)), {}, 2e-5, "marks"),
        (STEP, {"save": 2e-5, "step": 5e-5, "other": 3e-5}, 3e-5, "between"),
        (STEP, {"reduce": 4e-5, "step": 3e-5, "agree": 2e-5, "other": 1e-5}, 1e-5, "between"),
        (STEP, {"loss": 4e-5, "step": 1e-5, "other": 5e-5}, 5e-5, "between"),
        (STEP, {}, 5e-5, "between"),
        (STEP[:1], {}, 0.0, "nothing"),
    ],
    ids=["spans", "mark", "torchs_loader", "between", "reduced", "span_in_the_step", "no_spans", "unknown"],
)
def test_data_wait_uses_most_precise_source(events, spans, data, source):
    shares = share(*events, rank=0, steps=[{"step": 0, "done": True, "spans": spans}])
    assert (shares.data_wait, shares.data_wait_source) == (pytest.approx(data), source)


def test_top_operations_are_sorted_by_self_time():
    shares = share(
        mark("ProfilerStep#0", 0, 1000),
        op("aten::linear", 0, 100),
        op("aten::t", 5, 10),
        op("aten::mm", 10, 90),
        op("aten::mm", 200, 210),
        *(op(f"aten::small{index}", 300 + index, 301 + index) for index in range(20)),
    )
    assert shares.top[0] == OperationTime("aten::mm", pytest.approx(90 * US), 2)
    assert shares.top[1] == OperationTime("aten::linear", pytest.approx(15 * US), 1)
    assert len(shares.top) == 10


def test_windows_of_one_rank_are_summed():
    one = share(mark("ProfilerStep#0", 0, 100), op("aten::mm", 0, 50))
    two = share(mark("ProfilerStep#0", 0, 300), op("aten::mm", 0, 60), op("aten::add", 60, 70))
    both = sum_windows([one, two])
    assert (both.steps, both.seconds, both.compute) == (2, pytest.approx(400 * US), pytest.approx(120 * US))
    assert both.top[0] == OperationTime("aten::mm", pytest.approx(110 * US), 2)


def test_empty_trace_has_zero_duration():
    assert share().seconds == 0
