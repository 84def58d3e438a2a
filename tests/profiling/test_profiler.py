"""The profiler in a loop: its files, when it stops, and that nothing else changes."""

import contextlib
import gc
import gzip
import itertools
import json
import resource
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerAction

import dtrain as dt
from dtrain import spans
from dtrain.dist.init import get_dist_info
from dtrain.errors import ConfigError, PeerError
from dtrain.profiling import profiler
from dtrain.profiling.profiler import (
    ClockOffset,
    ProfileOptions,
    TraceRecorder,
    measure_clock_offset,
    profile,
    schedule,
    step_profiler,
)
from dtrain.profiling.trace.diagnosis import diagnose, kernel_breakdown, memory_timeline
from dtrain.profiling.trace.trace_file import merge_traces, read_trace
from dtrain.testing import memory_budget
from falling import BATCH, LOSS, begin, take, weight

SOON = schedule(skip_first=1, warmup=1, active=2)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def steps(path: Path) -> list[int]:
    return [step.number for step in read_trace(path).steps]


def work() -> None:
    (torch.ones(8, 8) @ torch.ones(8, 8)).sum()


def test_context_records_only_active_steps(tmp_path):
    with profile(tmp_path, schedule=SOON) as prof:
        for _ in range(6):
            work()
            prof.step()
            assert not (torch.autograd._profiler_enabled() and prof._count > 4)
    assert names(tmp_path) == ["trace-rank-00000-step-00000002.pt.trace.json"]
    trace = read_trace(tmp_path / "trace-rank-00000-step-00000002.pt.trace.json")
    assert [step.number for step in trace.steps] == [2, 3]
    assert sum(event.name == "aten::mm" for event in trace.events) == 2


def test_transform_records_active_steps(tmp_path):
    step, state = begin(step_profiler(tmp_path, schedule=SOON), lr=0.1)
    take(step, state, 6)
    trace = read_trace(tmp_path / "trace-rank-00000-step-00000002.pt.trace.json")
    assert [step.number for step in trace.steps] == [2, 3]
    assert all(0 < marked.step_fn_us <= marked.end - marked.start for marked in trace.steps)
    assert names(tmp_path) == ["trace-rank-00000-step-00000002.pt.trace.json"]


def test_each_cycle_writes_one_trace(tmp_path):
    step, state = begin(step_profiler(tmp_path, schedule=schedule(wait=1, active=1, repeat=2), compress=True))
    take(step, state, 8)
    assert names(tmp_path) == [
        "trace-rank-00000-step-00000002.pt.trace.json.gz",
        "trace-rank-00000-step-00000005.pt.trace.json.gz",
    ]
    assert json.loads(gzip.decompress((tmp_path / names(tmp_path)[1]).read_bytes()))["dtrain"]["steps"][0]["step"] == 5


def test_resumed_run_names_traces_by_global_step(tmp_path):
    step, state = begin(lr=0.0)
    state = take(step, state, 3)
    with profile(tmp_path, schedule=schedule(warmup=1, active=1)) as prof:
        for _ in range(2):
            state = take(step, state)
            prof.step()
    assert steps(tmp_path / "trace-rank-00000-step-00000004.pt.trace.json") == [4]


def training(*transforms: dt.Transform) -> tuple[list[str], list[float]]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
    loss_fn = dt.mean_loss(lambda model, batch: model(batch).square().mean(), weight=len)
    step = dt.compose_step(loss_fn, [*transforms, dt.transforms.clip_by_norm(1.0)])
    state = step.init(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    losses = []
    for number in range(6):
        state, metrics = step(state, torch.arange(8.0).reshape(2, 4) + number)
        losses.append(float(metrics["loss"].total).hex())
    return losses, [value for param in state.params.values() for value in param.detach().flatten().tolist()]


def test_losses_are_bit_equal_with_profiler(tmp_path):
    options = {"record_shapes": True, "memory": True, "stacks": True, "flops": True}
    assert training(step_profiler(tmp_path, schedule=SOON, **options)) == training()
    assert names(tmp_path) == ["trace-rank-00000-step-00000002.pt.trace.json"]


def test_exit_during_active_window_writes_recorded_steps(tmp_path):
    with profile(tmp_path, schedule=schedule(warmup=1, active=10)) as prof:
        for _ in range(3):
            work()
            prof.step()
    assert steps(tmp_path / "trace-rank-00000-step-00000001.pt.trace.json") == [1, 2]  # code after the last step is no step
    assert not torch.autograd._profiler_enabled()


def test_exit_during_warmup_writes_nothing_and_stops_profiler(tmp_path):
    with profile(tmp_path, schedule=schedule(warmup=5)) as prof:
        prof.step()
    assert names(tmp_path) == []
    with torch.profiler.profile(acc_events=True) as after:  # torch 2.11 warns without
        work()
    assert any(event.key == "aten::mm" for event in after.key_averages())


def test_error_in_context_stops_profiler(tmp_path):
    with pytest.raises(RuntimeError, match="mat1"), profile(tmp_path, schedule=schedule(warmup=0, active=3)):
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert not torch.autograd._profiler_enabled()
    assert names(tmp_path) == ["trace-rank-00000-step-00000000.pt.trace.json"]
    with profile(tmp_path / "again", schedule=schedule(warmup=0, active=1)):
        work()
    assert names(tmp_path / "again") == ["trace-rank-00000-step-00000000.pt.trace.json"]


@pytest.mark.parametrize("seam", ["grad", "update"])
def test_error_in_step_stops_profiler(tmp_path, seam):
    def failing(inner):
        def fail(state, *given, **options):
            if state.step == 1:
                raise ZeroDivisionError
            return inner(state, *given, **options)

        return fail

    step, state = begin(
        step_profiler(tmp_path, schedule=schedule(warmup=0, active=9)), dt.Transform(name="failing", **{seam: failing})
    )
    state = take(step, state)
    assert torch.autograd._profiler_enabled()
    with pytest.raises(ZeroDivisionError):
        take(step, state)
    assert not torch.autograd._profiler_enabled()
    assert steps(tmp_path / "trace-rank-00000-step-00000000.pt.trace.json") == [0]


def test_unfinished_window_is_written_when_process_group_closes(tmp_path):
    with dt.init_dist():
        step, state = begin(step_profiler(tmp_path, schedule=schedule(warmup=0, active=9)))
        take(step, state, 2)
        assert names(tmp_path) == []
    assert steps(tmp_path / "trace-rank-00000-step-00000000.pt.trace.json") == [0, 1]


def twice(inner):
    def again(state, batch, *, microbatch_size=None):
        inner(state, batch, microbatch_size=microbatch_size)
        return inner(state, batch, microbatch_size=microbatch_size)

    return again


def test_repeated_gradient_computation_counts_as_one_step(tmp_path):
    step, state = begin(step_profiler(tmp_path, schedule=SOON), dt.Transform(name="twice", grad=twice))
    take(step, state, 5)
    assert steps(tmp_path / "trace-rank-00000-step-00000002.pt.trace.json") == [2, 3]
    step, state = begin(dt.Transform(name="twice", grad=twice), step_profiler(tmp_path / "inside", schedule=SOON))
    take(step, state, 5)
    assert steps(tmp_path / "inside" / "trace-rank-00000-step-00000002.pt.trace.json") == [2, 3]


def test_step_with_skipped_update_is_counted(tmp_path):
    def skipping(inner):
        return lambda state, metrics: inner(state, metrics) if state.step != 1 else (state, metrics)

    step, state = begin(dt.Transform(name="skipping", update=skipping), step_profiler(tmp_path, schedule=SOON))
    state = take(step, state, 6)
    assert state.step == 6
    assert steps(tmp_path / "trace-rank-00000-step-00000002.pt.trace.json") == [2, 3]


def test_optimizer_in_backward_supports_step_profiler(tmp_path):
    model = nn.Linear(1, 1, bias=False)
    step = dt.step.optimizer_in_backward(
        LOSS, [step_profiler(tmp_path, schedule=SOON)], batch_spec=dt.batch_spec(weight=len), microbatch_size=2
    )
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(5):
        state, _ = step(state, BATCH)
    assert steps(tmp_path / "trace-rank-00000-step-00000002.pt.trace.json") == [2, 3]


def test_checkpoint_is_compatible_with_and_without_profiler(tmp_path):
    step, state = begin(step_profiler(tmp_path / "traces", schedule=schedule(skip_first=9)))
    state = take(step, state, 2)
    dt.save_sharded(tmp_path / "root", state)
    _, fresh = begin()
    assert weight(dt.load_sharded(tmp_path / "root", fresh)) == weight(state) == 3.0
    dt.save_sharded(tmp_path / "plain", take(*begin(), 2))
    _, fresh = begin(step_profiler(tmp_path / "traces"))
    assert weight(dt.load_sharded(tmp_path / "plain", fresh)) == 3.0


def test_two_profilers_at_once_are_refused(tmp_path):
    other = r"profile: only one profiler can run per process, got another dt\.profiling\.profile or .*step_profiler\. End the"
    step, state = begin(step_profiler(tmp_path / "b", schedule=schedule(warmup=0)))
    with profile(tmp_path / "a", schedule=SOON):
        with pytest.raises(ConfigError, match=other), profile(tmp_path / "c", schedule=SOON):
            pass
        with pytest.raises(ConfigError, match=other):
            take(step, state)
    with torch.profiler.profile(acc_events=True), pytest.raises(ConfigError, match=r"got a profiler of torch's own"):
        profile(tmp_path / "d", schedule=SOON).__enter__()
    assert names(tmp_path) == []


def test_profile_context_is_single_use(tmp_path):
    prof = profile(tmp_path, schedule=schedule(skip_first=100))
    with pytest.raises(ConfigError, match=r"profile: step\(\) must be called inside the with block"):
        prof.step()
    with prof:
        pass
    with pytest.raises(ConfigError, match=r"profile: context must be new, got a used one"):
        prof.__enter__()


def test_unwritable_folder_warns_once(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    step, state = begin(step_profiler(tmp_path / "file" / "traces", schedule=schedule(warmup=0, active=1, repeat=0)))
    happened: list[dict] = []
    monkeypatch.setattr(spans, "record_event", lambda name, **fields: happened.append({"name": name, **fields}))
    with pytest.warns(UserWarning, match=r"profile: .* This rank writes no more traces"):
        state = take(step, state)
    assert take(step, state, 3).step == 4
    assert not torch.autograd._profiler_enabled()
    assert [(event["name"], event["logger"]) for event in happened] == [("dropped", "profile")]


@pytest.mark.parametrize("compress", [False, True])
def test_full_disk_warns_once_and_leaves_no_files(tmp_path, compress):
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    prof = profile(tmp_path, schedule=schedule(warmup=0, active=2), compress=compress)
    try:
        with prof:
            for _ in range(200):
                work()
            prof.step()
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, usual[1]))
            with pytest.warns(
                UserWarning, match=r"OSError: torch could not write .*\.json(\.gz)?\. Check that the disk is not full"
            ):
                prof.step()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert names(tmp_path) == []


@pytest.mark.parametrize(("on", "switched"), [(False, [True, None]), (True, [])], ids=["was-off", "was-on"])
def test_active_allocation_history_is_not_disabled(tmp_path, monkeypatch, on, switched):
    what = ProfileOptions(folder=tmp_path, record_shapes=False, memory=True, stacks=False, flops=False, compress=False)
    window, calls = TraceRecorder(options=what, offset=ClockOffset(0, 0)), []
    cuda = SimpleNamespace(device=torch.device("cuda"), rank=0, world_size=1)
    monkeypatch.setattr(profiler, "get_dist_info", lambda: cuda)
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: on, raising=False)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda enabled=True, **_: calls.append(enabled))
    window.begin_step(3)
    window.write()
    assert calls == switched


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "memory://bucket/traces"}, r"profile: path must be a local folder, got memory://bucket"),
        ({"schedule": 3}, r"profile: schedule must be a function of a step's index, got 3"),
        ({"ranks": "some"}, r"profile: ranks must be 'all' or a list of ranks from 0 to 0, got 'some'"),
        ({"ranks": []}, r"profile: ranks must be 'all' or a list of ranks from 0 to 0, got \[\]"),
        ({"ranks": [1]}, r"profile: ranks must be 'all' or a list of ranks from 0 to 0, got \[1\]"),
        ({"ranks": [True]}, r"profile: ranks must be 'all' or a list of ranks from 0 to 0, got \[True\]"),
    ],
    ids=["remote", "schedule", "text", "none", "stranger", "bool"],
)
@pytest.mark.parametrize("form", [profile, step_profiler])
def test_invalid_options_are_refused(tmp_path, form, options, message):
    with pytest.raises(ConfigError, match=message):
        form(**{"path": tmp_path, **options})


def test_memory_option_writes_timeline_and_budget_snapshot(tmp_path):
    with memory_budget(1 << 20), profile(tmp_path, schedule=schedule(warmup=0, active=1), memory=True):
        kept = torch.zeros(1000)
        torch.zeros(2000)
    path = tmp_path / "trace-rank-00000-step-00000000.pt.trace.json"
    held = [sample.bytes for sample in memory_timeline(path)["cpu"]]
    assert [round(bytes, -3) for bytes in held] == [4000, 12000, 4000]  # and those of an open mark
    assert json.loads((tmp_path / "memory-rank-00000-step-00000000.json").read_text())["storages"][0]["bytes"] == kept.nbytes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_trace_contains_kernels_and_memory(tmp_path):
    with dt.init_dist(device="cuda"):
        held = torch.ones(512, 512, device="cuda")
        with profile(tmp_path, schedule=schedule(warmup=1, active=2), memory=True) as prof:
            for _ in range(4):
                held @ held
                prof.step()
    path = tmp_path / "trace-rank-00000-step-00000001.pt.trace.json"
    share = kernel_breakdown(path)
    assert share.on_device
    assert 0 < share.compute < share.seconds
    assert max(sample.bytes for sample in memory_timeline(path)["cuda:0"]) >= held.nbytes
    assert (tmp_path / "memory-rank-00000-step-00000001.pickle").stat().st_size > 0


def test_step_deleted_during_window_ends_it(tmp_path):
    step, state = begin(step_profiler(tmp_path, schedule=schedule(warmup=0, active=9)))
    take(step, state, 2)
    del step, state
    gc.collect()
    assert not torch.autograd._profiler_enabled()
    assert steps(tmp_path / "trace-rank-00000-step-00000000.pt.trace.json") == [0, 1]


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
    diagnosis = diagnose(tmp_path)
    assert [finding.rule for finding in diagnosis.findings] == ["data_wait"], str(diagnosis)
    assert [share.data_wait_source for share in diagnosis.shares] == ["spans"]
    assert diagnosis.shares[0].data_wait >= 0.07  # of two steps with two samples each


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


@pytest.mark.costly
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
        content = json.loads(path.read_text())
        content["baseTimeNanoseconds"] += AHEAD_NS * rank
        path.write_text(json.dumps(content))
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
        for first, second in ((mine, theirs), (theirs, mine)):  # no rank leaves before the other has entered
            assert first["ts"] + first["dur"] + slack > second["ts"]


def test_only_selected_ranks_write_traces(ranks, tmp_path):
    assert ranks(2).run(meeting, str(tmp_path), [1])[1] == ["trace-rank-00001-step-00000001.pt.trace.json"]


def profiled_elsewhere(folder: str, transform: bool) -> str:
    rank = get_dist_info().rank
    with torch.profiler.profile(acc_events=True) if rank == 0 else contextlib.nullcontext():
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
    ranks(2).run(late, str(tmp_path), 0.3)
    diagnosis = diagnose(tmp_path)
    # A busy machine may stop a rank anywhere, so the absent findings are tested on traces by hand.
    assert "data_wait" in [finding.rule for finding in diagnosis.findings], str(diagnosis)
    assert all(share.data_wait >= 3 * 0.3 for share in diagnosis.shares)
    assert [(share.steps, share.data_wait_source) for share in diagnosis.shares] == [(3, "between")] * 2


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
    diagnosis = diagnose(tmp_path)
    assert "communication" in [finding.rule for finding in diagnosis.findings], str(diagnosis)
    assert [(share.steps, share.data_wait_source) for share in diagnosis.shares] == [(2, "spans")] * 2


TORCH = {
    "skip": ProfilerAction.NONE,
    "wait": ProfilerAction.NONE,
    "warmup": ProfilerAction.WARMUP,
    "active": ProfilerAction.RECORD,
    "save": ProfilerAction.RECORD_AND_SAVE,
}


def test_phases_match_torch_schedule():
    grid = list(itertools.product((0, 1, 3), (0, 2), (1, 2), (1, 3), (0, 1, 2)))
    for skip_first, wait, warmup, active, repeat in grid:
        options = {"skip_first": skip_first, "wait": wait, "warmup": warmup, "active": active, "repeat": repeat}
        ours, theirs = schedule(**options), torch.profiler.schedule(**options)
        assert [TORCH[ours(index)] for index in range(25)] == [theirs(index) for index in range(25)], options
    assert len(grid) == 72
    assert [schedule()(index) for index in range(6)] == ["warmup", "active", "active", "active", "save", "skip"]


@pytest.mark.parametrize(
    ("name", "value", "least"),
    [("skip_first", -1, 0), ("wait", 1.0, 0), ("warmup", True, 0), ("active", 0, 1), ("repeat", None, 0)],
)
def test_invalid_phase_lengths_are_refused(name, value, least):
    with pytest.raises(ConfigError, match=f"schedule: {name} must be an integer of at least {least}, got {value}"):
        schedule(**{name: value})
