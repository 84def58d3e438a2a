"""The profiler on several ranks: who writes, whose clock counts, and what the verdict says of real runs."""

import contextlib
import json
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dtrain as dt
from dtrain import spans
from dtrain.dist.init import get_dist_info
from dtrain.errors import ConfigError, PeerError
from dtrain.profiling.driver import schedule
from dtrain.profiling.profiler import profile, step_profiler
from dtrain.profiling.trace_recorder import measure_clock_offset
from dtrain.report.trace.diagnosis import diagnose
from dtrain.report.trace.merge import merge_traces

AHEAD_NS = 3_600 * 10**9 + 7_000_000  # an hour and seven milliseconds


def ahead(by_ns: int) -> "pytest.MonkeyPatch":
    """This process's clock, set forward from now on."""
    patch, real = pytest.MonkeyPatch(), time.time_ns
    patch.setattr(time, "time_ns", lambda: real() + by_ns)
    return patch


def offsets() -> tuple[int, int]:
    patch = ahead(AHEAD_NS * get_dist_info().rank)
    try:
        return tuple(measure_clock_offset())
    finally:
        patch.undo()


def test_clock_offset_is_measured_within_its_bound(ranks):
    rows = ranks(3).run(offsets)
    assert rows[0] == [0, 0]
    for rank in (1, 2):
        measured, bound = rows[rank]
        assert abs(measured - rank * AHEAD_NS) <= bound + 2000  # float64 has the seconds of a day to some nanoseconds
        assert bound < 1e9  # it is a fraction of a millisecond on a machine that is not busy


def meeting(folder: str, only: list[int] | None) -> list[str]:
    """Some collectives, profiled on a rank whose clock, and so its trace, is ahead."""
    rank = get_dist_info().rank
    patch = ahead(AHEAD_NS * rank)
    try:
        with profile(folder, schedule=schedule(warmup=1, active=2), ranks=only or "all") as prof:
            for _ in range(4):
                dist.all_reduce(torch.ones(100))
                prof.step()
    finally:
        patch.undo()
    for path in Path(folder).glob(f"trace-rank-{rank:05d}*"):  # the profiler asks the system, not Python
        found = json.loads(path.read_text())
        found["baseTimeNanoseconds"] += AHEAD_NS * rank
        path.write_text(json.dumps(found))
    return sorted(path.name for path in Path(folder).iterdir())


def test_merged_traces_share_one_clock(ranks, tmp_path):
    ranks(2).run(meeting, str(tmp_path), None)
    merged = json.loads(merge_traces(tmp_path, tmp_path / "all.json").read_text())
    assert [(row["rank"], row["steps"]) for row in merged["dtrain"]["merged"]] == [(0, [1, 2]), (1, [1, 2])]
    titles = {event["pid"]: event["args"]["name"] for event in merged["traceEvents"] if event["name"] == "process_name"}
    assert (titles[0], titles[1000]) == ("rank 0", "rank 1")
    reduces = {
        pid: [event for event in merged["traceEvents"] if event["name"] == "gloo:all_reduce" and event["pid"] == pid]
        for pid in (0, 1000)
    }
    slack = merged["dtrain"]["merged"][1]["offset_bound_ns"] / 1e3 + 100  # microseconds; the profiler's own clock is not exact
    assert len(reduces[0]) == len(reduces[1000]) == 2
    for mine, theirs in zip(*(sorted(rows, key=lambda event: event["ts"]) for rows in reduces.values()), strict=True):
        for first, second in ((mine, theirs), (theirs, mine)):  # nobody is out before the other is in
            assert first["ts"] + first["dur"] + slack > second["ts"]


def test_only_selected_ranks_write_traces(ranks, tmp_path):
    assert ranks(2).run(meeting, str(tmp_path), [1])[1] == ["trace-rank-00001-step-00000001.pt.trace.json"]


def profiled_elsewhere(folder: str, transform: bool) -> str:
    rank = get_dist_info().rank
    with torch.profiler.profile() if rank == 0 else contextlib.nullcontext():
        try:
            if transform:
                late(folder, 0.0)
            else:
                profile(folder).__enter__()
        except (ConfigError, PeerError) as error:
            return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize("transform", [False, True], ids=["context", "transform"])
def test_other_profiler_on_one_rank_is_refused_on_all_ranks(ranks, tmp_path, transform):
    mine, theirs = ranks(2).run(profiled_elsewhere, str(tmp_path), transform)
    assert mine.startswith("ConfigError: profile: only one profiler can run per process, got a profiler of torch's own")
    assert theirs.startswith("PeerError: profile: rank 0 failed (1 of 2 ranks did): ConfigError: profile: only one profiler")


def loss_fn(model: nn.Module, batch: torch.Tensor) -> dt.LossSum:
    return dt.LossSum(total=model(batch).square().sum(), weight=float(len(batch)))


def late(folder: str, wait_s: float) -> None:
    torch.manual_seed(0)
    model = nn.Linear(16, 16, bias=False)
    dt.shard_model(model, dt.build_mesh(dp_replicate=get_dist_info().world_size), strategy="replicate")
    step = dt.compose_step(loss_fn, [step_profiler(folder, schedule=schedule(skip_first=1, active=3))])
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=1e-6))
    for _ in range(6):
        time.sleep(wait_s)  # a loader that is late
        state, _ = step(state, torch.ones(4, 16))


def test_late_loader_is_diagnosed_as_data_wait(ranks, tmp_path):
    ranks(2).run(late, str(tmp_path), 0.1)
    found = diagnose(tmp_path)
    rules = [finding.rule for finding in found.findings]
    assert rules[0] == "data_wait", str(found)
    assert "communication" not in rules
    assert [(share.steps, share.data_wait_source) for share in found.shares] == [(3, "between")] * 2


def reducing(folder: str) -> None:
    with profile(folder, schedule=schedule(active=2)) as prof:
        for _ in range(4):
            with spans.span("data"):
                batch = torch.ones(8, 8)
            batch @ batch
            dist.all_reduce(torch.ones(1 << 21))
            prof.step()


def test_large_reductions_are_diagnosed_as_communication(ranks, tmp_path):
    ranks(2).run(reducing, str(tmp_path))
    found = diagnose(tmp_path)
    rules = [finding.rule for finding in found.findings]
    assert "communication" in rules, str(found)
    assert "data_wait" not in rules
    assert [(share.steps, share.data_wait_source) for share in found.shares] == [(2, "spans")] * 2
