"""Saving and loading in one process: restored values, refused inputs, and the folders on disk."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn

from checkpoint.states import Counter, digest, names, plain_state, train, write_of_another_version
from checkpoint.stored import shards_of
from dtrain.checkpoint.checkpoint_info import latest_checkpoint, list_steps
from dtrain.checkpoint.layout import DTYPES
from dtrain.checkpoint.load import load_sharded
from dtrain.checkpoint.reader import verify
from dtrain.checkpoint.save import Checkpointer, save_sharded
from dtrain.dist.rng import seed_all
from dtrain.errors import CheckpointError, CheckpointMismatchError, ConfigError, CorruptCheckpointError, StaleStateError
from dtrain.schedules.clock import Clock
from dtrain.schedules.durations import RunLength
from dtrain.state import TrainState, init_state


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_resumed_run_equals_uninterrupted_run(tmp_path, optimizer):
    seed_all(1)
    straight = digest(train(plain_state(optimizer=optimizer), 20))
    seed_all(1)
    save_sharded(tmp_path, train(plain_state(optimizer=optimizer), 7))
    seed_all(2)
    random.random()
    restored = load_sharded(tmp_path, plain_state(5, optimizer=optimizer))
    assert restored.step == 7
    assert restored.seed == 0
    assert digest(train(restored, 13)) == straight


@pytest.mark.parametrize("left_out", ["python", "numpy", "torch"])
def test_extra_draw_from_any_generator_changes_result(tmp_path, left_out):
    seed_all(1)
    straight = digest(train(plain_state(), 20))
    seed_all(1)
    save_sharded(tmp_path, train(plain_state(), 7))
    state = load_sharded(tmp_path, plain_state(5))
    {"python": random.random, "numpy": np.random.rand, "torch": lambda: torch.rand(())}[left_out]()
    assert digest(train(state, 13)) != straight


def test_save_leaves_state_unchanged(tmp_path):
    state = train(plain_state(), 3)
    before = digest(state)
    save_sharded(tmp_path, state, extra={"counter": Counter()})
    assert digest(state) == before


def test_loaded_state_equals_saved_state_exactly(tmp_path):
    state = train(plain_state(), 3)
    state.optimizer.param_groups[0]["initial_lr"] = 0.5  # a schedule adds it on first use
    state.optimizer.param_groups[0]["lr"] = float("nan")
    save_sharded(tmp_path, state)
    given = train(plain_state(9), 1)
    given.optimizer.param_groups[0]["foreach"] = False
    restored = load_sharded(tmp_path, given)
    group = restored.optimizer.param_groups[0]
    assert group.pop("foreach") is False, "how the step is computed stays as it was built"
    state.optimizer.param_groups[0].pop("foreach")
    assert digest(restored) == digest(state)
    assert group["betas"] == (0.8, 0.9)
    assert isinstance(group["betas"], tuple)
    assert restored.transform_states["spikes"] == {"worst": float("inf"), "window": (1, 2)}
    step = restored.optimizer.state[next(iter(restored.params.values()))]["step"]
    assert (step.dtype, step.device.type, float(step)) == (torch.float32, "cpu", 3.0)
    with pytest.raises(StaleStateError, match="passed to load_sharded"):
        load_sharded(tmp_path, given)


def test_load_restores_clock_and_keeps_new_run_length(tmp_path):
    saved = train(plain_state(), 3)
    save_sharded(tmp_path, saved)
    longer = RunLength(total="5ep")
    fresh = plain_state(1)
    clock = load_sharded(tmp_path, fresh._replace(clock=Clock(run_length=longer))).clock
    assert replace(clock, run_length=None) == replace(
        saved.clock, _previous=replace(saved.clock._previous, _previous=None), run_length=None
    )
    assert clock.run_length == longer
    assert (clock.crossed("12sp"), clock.crossed("5sp"), clock.crossed("24sp")) == (True, True, False)


def test_clock_crossing_run_fractions_works_after_resume(tmp_path):
    """Neither the clock of a checkpoint nor the one before it knows how long a run is."""
    save_sharded(tmp_path, train(plain_state(), 3))
    clock = load_sharded(tmp_path, plain_state(1)._replace(clock=Clock(run_length=RunLength(total=12)))).clock
    assert (clock.crossed("0.25dur"), clock.crossed("0.3dur"), clock.crossed("0.1dur")) == (True, False, True)


def test_clock_without_previous_field_loads(tmp_path, monkeypatch):
    state_dict = Clock.state_dict
    monkeypatch.setattr(Clock, "state_dict", lambda clock: {k: v for k, v in state_dict(clock).items() if k != "previous"})
    save_sharded(tmp_path, train(plain_state(), 3))
    monkeypatch.undo()
    clock = load_sharded(tmp_path, plain_state(1)).clock
    assert (clock.step, clock._previous) == (3, None)


def test_clock_with_invalid_previous_field_is_refused(tmp_path, monkeypatch):
    state_dict = Clock.state_dict
    monkeypatch.setattr(Clock, "state_dict", lambda clock: {**state_dict(clock), "previous": 3})
    save_sharded(tmp_path, train(plain_state(), 3))
    monkeypatch.undo()
    with pytest.raises(CorruptCheckpointError, match=r"clock: previous: Expected `object \| null`, got `int`"):
        load_sharded(tmp_path, plain_state(1))


def test_load_writes_tensors_in_place(tmp_path):
    save_sharded(tmp_path, train(plain_state(), 1))
    given = plain_state(1)
    where = [p.data_ptr() for p in given.params.values()], given.transform_states["ema"]["shadow"]["last.bias"].data_ptr()
    state = load_sharded(tmp_path, given)
    assert (
        [p.data_ptr() for p in state.params.values()],
        state.transform_states["ema"]["shadow"]["last.bias"].data_ptr(),
    ) == where
    assert all(p.requires_grad and p.is_leaf for p in state.params.values())


def test_load_clears_optimizer_state_saved_empty(tmp_path):
    save_sharded(tmp_path, plain_state())
    state = load_sharded(tmp_path, train(plain_state(), 2))
    assert not state.optimizer.state


def everything_in_one_slice() -> dict:
    values = torch.arange(6).reshape(2, 3)
    tensors = {name: values.to(dtype) for name, dtype in DTYPES.items()}
    return {
        **tensors,
        "scalar": torch.tensor(3, dtype=torch.int8),
        "empty": torch.zeros(0, 4),
        "transposed": torch.arange(6.0).reshape(2, 3).t(),
        "large": torch.arange(300_000, dtype=torch.float64),
        "none": None,
        1: -0.0,
        "deep": [({"x": float("-inf")},)],
    }


def with_tensors_cleared(tree):
    if isinstance(tree, torch.Tensor):
        return torch.zeros_like(tree)
    return {k: with_tensors_cleared(v) for k, v in tree.items()} if isinstance(tree, dict) else tree


def test_every_dtype_and_shape_round_trips(tmp_path):
    content = everything_in_one_slice()
    path = save_sharded(tmp_path, replace(plain_state(), transform_states={"t": content})).path
    for shard in shards_of(path).values():
        assert shard.begin % DTYPES[shard.kind.dtype].itemsize == 0, "every shard is aligned"
    state = load_sharded(tmp_path, replace(plain_state(1), transform_states={"t": with_tensors_cleared(content)}))
    back = state.transform_states["t"]
    assert list(back) == list(content)
    for name, value in content.items():
        if isinstance(value, torch.Tensor):
            assert back[name].dtype == value.dtype
            assert back[name].shape == value.shape
            assert torch.equal(back[name].double(), value.double()), name
        else:
            assert repr(back[name]) == repr(value)


def test_extra_round_trips_by_name(tmp_path):
    counter = Counter()
    counter.state = {"position": 17, "weights": torch.tensor([1.5, 2.5])}
    extra = {"loader": counter, "history": [0.1, float("nan")], "table": {"a": torch.arange(3)}, "unused": [1], "$": [3]}
    save_sharded(tmp_path, plain_state(), extra=extra)
    target = Counter()
    history, table = [], {}
    given = {"loader": target, "history": history, "table": table, "$": [0]}
    load_sharded(tmp_path, plain_state(), extra=given, ignore=["extra/unused"])
    assert target.state["position"] == 17
    assert torch.equal(target.state["weights"], counter.state["weights"])
    assert repr(history) == "[0.1, nan]"
    assert torch.equal(table["a"], torch.arange(3))
    assert given["$"] == [3]


def test_missing_extra_is_refused_by_name(tmp_path):
    save_sharded(tmp_path, plain_state())
    with pytest.raises(CheckpointMismatchError, match="extra/loader: checkpoint nothing, here a value"):
        load_sharded(tmp_path, plain_state(), extra={"loader": Counter()})


def test_failing_extra_load_state_dict_leaves_state_unchanged(tmp_path):
    save_sharded(tmp_path, train(plain_state(), 1), extra={"loader": {"something": "else"}})
    state = plain_state(3)
    before = digest(state)
    with pytest.raises(ValueError, match="what is"):
        load_sharded(tmp_path, state, extra={"loader": Counter()})
    assert digest(state) == before
    state._check_not_stale("here")


def test_load_of_empty_root_requires_missing_ok(tmp_path):
    state = plain_state()
    for root in (tmp_path, tmp_path / "none"):
        with pytest.raises(CheckpointError, match=r"no checkpoint found in .*. Pass missing_ok=True"):
            load_sharded(root, state)
        restored = load_sharded(root, state, extra={"loader": Counter(), "history": []}, missing_ok=True)
        assert (restored is state, restored.restored) == (True, None)
        assert latest_checkpoint(root) is None
        assert list_steps(root) == []


def test_uncommitted_and_unrelated_folders_are_skipped(tmp_path):
    handle = save_sharded(tmp_path, train(plain_state(), 1))
    for name in ("step-00000009", "step-00000008.tmp-01234567-01234567", "notes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank-00000.json").write_text("{}")
    (tmp_path / "latest").write_text("step-00000009")
    assert latest_checkpoint(tmp_path) == handle.path
    assert load_sharded(tmp_path, plain_state()).step == 1
    with pytest.raises(CheckpointError, match=r"step-00000009 has no manifest.json, because its save was not completed"):
        load_sharded(tmp_path / "step-00000009", plain_state())


def test_step_folder_path_loads_that_step(tmp_path):
    state = train(plain_state(), 1)
    save_sharded(tmp_path, state)
    save_sharded(tmp_path, train(state, 1))
    assert load_sharded(tmp_path / "step-00000001", plain_state()).step == 1
    assert load_sharded(str(tmp_path), plain_state()).step == 2


def test_list_steps_describes_each_step(tmp_path):
    state = train(plain_state(), 1)
    first = save_sharded(tmp_path, state)
    second = save_sharded(tmp_path, train(state, 4))
    one, two = list_steps(tmp_path)
    assert (one.step, one.parent_step, one.path, one.world_size, one.serial) == (1, None, first.path, 1, 1)
    assert (two.step, two.parent_step, two.path, two.bytes, two.serial) == (5, 1, second.path, second.result().bytes, 2)
    assert one.run_id == two.run_id == state._run_context.lineage.run_id
    assert names(tmp_path) == ["step-00000001", "step-00000005"]
    assert sum(p.stat().st_size for p in second.path.iterdir() if p.name != "manifest.json") == second.result().bytes
    assert verify(tmp_path) == two
    assert verify(first.path) == one


def test_already_committed_step_is_not_rewritten(tmp_path):
    state = train(plain_state(), 1)
    assert save_sharded(tmp_path, state).result().written
    manifest = tmp_path / "step-00000001" / "manifest.json"
    before = manifest.stat()
    again = save_sharded(tmp_path, state)
    assert (again.result().written, again.result().bytes, again.path) == (False, 0, manifest.parent)
    loaded = load_sharded(tmp_path, plain_state())
    assert not save_sharded(tmp_path, loaded).result().written
    assert (manifest.stat().st_mtime_ns, manifest.stat().st_ino) == (before.st_mtime_ns, before.st_ino)
    assert save_sharded(tmp_path / "elsewhere", loaded).result().written, "another root does not have it"


def test_committed_step_without_manifest_is_rewritten(tmp_path):
    state = train(plain_state(), 1)
    (save_sharded(tmp_path, state).path / "manifest.json").unlink()
    with pytest.warns(UserWarning, match=r"step-00000001 is not a valid checkpoint and was renamed to step-00000001.aside-"):
        assert save_sharded(tmp_path, state).result().written
    verify(tmp_path)
    assert len(names(tmp_path)) == 2, "what was there is kept aside"


def test_overwriting_step_of_other_run_is_refused(tmp_path):
    save_sharded(tmp_path, train(plain_state(), 1))
    other = train(plain_state(1), 1)
    other._run_context.lineage.run_id = "f" * 32
    content = {p: p.read_bytes() for p in (tmp_path / "step-00000001").iterdir()}
    with pytest.raises(
        CheckpointError, match=r"step-00000001 must belong to this run f{32}, got run [0-9a-f]{32}. Save into another"
    ):
        save_sharded(tmp_path, other)
    assert names(tmp_path) == ["step-00000001"]
    assert {p: p.read_bytes() for p in (tmp_path / "step-00000001").iterdir()} == content


def test_resume_from_earlier_step_supersedes_later_steps(tmp_path):
    state = plain_state()
    for _ in range(3):
        state = train(state, 10)
        save_sharded(tmp_path, state)
    old = (tmp_path / "step-00000020" / "rank-00000.safetensors").read_bytes()
    back = load_sharded(tmp_path / "step-00000010", plain_state())
    torch.manual_seed(99)
    back = train(back, 10)
    assert save_sharded(tmp_path, back).result().written
    assert names(tmp_path) == ["step-00000010", "step-00000020", "step-00000030"]
    assert (tmp_path / "step-00000020" / "rank-00000.safetensors").read_bytes() != old
    assert [(c.step, c.parent_step) for c in list_steps(tmp_path)] == [(10, None), (30, 20), (20, 10)]
    restored = load_sharded(tmp_path, plain_state())
    assert restored.step == 20, "the lineage that was left does not come back at the next restart"
    assert digest(restored) == digest(back)
    save_sharded(tmp_path, train(restored, 1), keep_last=2)
    assert names(tmp_path) == ["step-00000020", "step-00000021"]


def test_resume_in_same_process_supersedes_later_steps(tmp_path):
    state = train(plain_state(), 1)
    save_sharded(tmp_path, state)
    state = train(state, 1)
    save_sharded(tmp_path, state)
    state = load_sharded(tmp_path / "step-00000001", state)
    torch.manual_seed(99)
    state = train(state, 1)
    assert save_sharded(tmp_path, state).result().written, "step 2 of the lineage that was left is another step 2"
    assert digest(load_sharded(tmp_path, plain_state())) == digest(state)


def test_keep_last_also_keeps_resumed_step(tmp_path):
    state = plain_state()
    for _ in range(4):
        state = train(state, 1)
        save_sharded(tmp_path, state, keep_last=2)
    assert [c.step for c in list_steps(tmp_path)] == [3, 4]
    state = load_sharded(tmp_path / "step-00000003", plain_state())
    for _ in range(3):
        state = train(state, 5)
        save_sharded(tmp_path, state, keep_last=1)
    assert names(tmp_path) == ["step-00000003", "step-00000018"]
    for name in names(tmp_path):
        verify(tmp_path / name)


def test_keep_last_keeps_steps_of_other_runs(tmp_path):
    save_sharded(tmp_path, train(plain_state(), 1))
    state = train(plain_state(1), 2)
    save_sharded(tmp_path, state, keep_last=1)
    save_sharded(tmp_path, train(state, 1), keep_last=1)
    assert names(tmp_path) == ["step-00000001", "step-00000003"]


def test_save_removes_staging_folders_of_all_runs(tmp_path):
    state = train(plain_state(), 1)
    save_sharded(tmp_path, state)
    run = state._run_context.lineage.run_id[:8]
    for name in (
        f"step-00000002.tmp-{run}-01234567",
        f"step-00000001.old-{run}-01234567",
        "step-00000002.tmp-ffffffff-01234567",
    ):
        (tmp_path / name / "below").mkdir(parents=True)
        (tmp_path / name / "rank-00000.json").touch()
    save_sharded(tmp_path, train(state, 1))
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def test_safetensors_library_reads_saved_tensors(tmp_path):
    state = train(plain_state(), 2)
    path = save_sharded(tmp_path, state).path
    with safe_open(path / "rank-00000.safetensors", framework="pt") as file:
        assert torch.equal(file.get_tensor("params/first.weight"), state.params["first.weight"])
        assert torch.equal(file.get_tensor("buffers/seen"), state.model.seen)
        assert file.get_tensor("optimizer/state/last.bias/exp_avg").shape == (2,)
        assert "optimizer/state/last.bias/step" not in file.keys(), "it is in the index"  # noqa: SIM118  # it is no dict
        assert file.metadata() == {"format": "pt"}
        assert "buffers/scratch" not in file.keys()  # noqa: SIM118  # it is no dict


UNPLAIN = {
    "extra": (
        lambda s: (s, {"loader": {"cursor": object()}}),
        r"extra/loader/cursor: state must be .* got builtins.object",
    ),
    "extra by number": (lambda s: (s, {1: 2}), "extra must have string names, got int 1"),
    "slice": (lambda s: (replace(s, transform_states={"ema": {"f": len}}), {}), r"transforms/ema/f: .* got builtins.builtin"),
    "optimizer": (
        lambda s: (s.optimizer.state[s.params["first.bias"]].update(h=object()), (s, {}))[1],
        "AdamW: state 'h' of first.bias must be a tensor or plain data, got object",
    ),
    "group": (
        lambda s: (s.optimizer.param_groups[0].update(hook=object()), (s, {}))[1],
        "AdamW: state 'hook' of group 0 must be a tensor or plain data, got object",
    ),
    "stray": (
        lambda s: (s.optimizer.state.update({torch.zeros(3): {}}), (s, {}))[1],
        r"optimizer state must belong to a parameter of the model or to a text, got state for a tensor of shape \(3,\)",
    ),
}


@pytest.mark.parametrize(("spoil", "message"), UNPLAIN.values(), ids=UNPLAIN)
def test_unsupported_values_are_refused_before_writing(tmp_path, spoil, message):
    state, extra = spoil(train(plain_state(), 1))
    with pytest.raises(ConfigError, match=message):
        save_sharded(tmp_path / "root", state, extra=extra)
    assert not (tmp_path / "root").exists()


CALLS = {
    "load_sharded": lambda step: load_sharded(step, plain_state()),
    "verify": verify,
    "list_steps": lambda step: list_steps(step.parent),
    "save_sharded": lambda step: save_sharded(step.parent, plain_state()),
}


@pytest.mark.parametrize("call", CALLS)
def test_unsupported_format_version_is_refused(tmp_path, call):
    step = save_sharded(tmp_path, train(plain_state(), 1)).path
    write_of_another_version(step)
    with pytest.raises(
        CheckpointError,
        match=rf"{step}: manifest.json: format version must be 4, got 9. Use the dtrain version that wrote the file.$",
    ):
        CALLS[call](step)


def test_stale_state_is_refused(tmp_path):
    state = train(plain_state(), 1)
    train(state, 1)
    with pytest.raises(StaleStateError, match="save_sharded: this state was stepped already"):
        save_sharded(tmp_path, state)
    assert names(tmp_path) == []


def test_a_root_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "root").write_text("")
    with pytest.raises(CheckpointError, match=r"[nN]ot a directory|must be a directory"):
        save_sharded(tmp_path / "root", plain_state())
    with pytest.raises(CheckpointError, match=r"[nN]ot a directory|must be a directory"):
        load_sharded(tmp_path / "root", plain_state(), missing_ok=True)


def test_relative_and_symlinked_paths_name_same_root(tmp_path, monkeypatch):
    state = train(plain_state(), 1)
    save_sharded(tmp_path / "root", state)
    (tmp_path / "link").symlink_to(tmp_path / "root")
    monkeypatch.chdir(tmp_path)
    for root in ("root", Path("link"), tmp_path / "x" / ".." / "root"):
        assert not save_sharded(root, state).result().written


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("fused", [False, True])
def test_gpu_run_resumes_exactly_and_loads_on_cpu(tmp_path, fused):
    def made(device: str) -> TrainState:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 64), nn.Dropout(0.5), nn.Linear(64, 1))
        model.register_parameter("scale", nn.Parameter(torch.tensor(2.0)))
        model.to(device)
        return init_state(model, torch.optim.AdamW(model.parameters(), fused=fused and device == "cuda"))

    def run(state: TrainState, steps: int) -> TrainState:
        for _ in range(steps):
            state.optimizer.zero_grad()
            (state.model(torch.ones(8, 5, device=state.device)) * state.model.scale).square().sum().backward()
            state.optimizer.step()
            state = state._next(clock=state.clock.tick(samples=8, tokens=0, seconds=0.0))
        return state

    straight = digest(run(made("cuda"), 5))
    save_sharded(tmp_path, run(made("cuda"), 3))
    on_cpu = load_sharded(tmp_path, made("cpu"))
    assert all(t.device.type == "cpu" for content in on_cpu.optimizer.state.values() for t in content.values())
    state = load_sharded(tmp_path, made("cuda"))
    for param, content in state.optimizer.state.items():
        assert {name: t.device.type for name, t in content.items()} == {
            "step": "cuda" if fused else "cpu",
            "exp_avg": "cuda",
            "exp_avg_sq": "cuda",
        }, tuple(param.shape)
    assert digest(run(state, 2)) == straight


class Factored(torch.optim.Optimizer):
    """State of other shapes than the parameter's, and values that are no tensors."""

    def __init__(self, params) -> None:
        super().__init__(params, {"lr": torch.tensor(0.1)})

    def step(self, closure=None) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p] = {
                "row": p.detach().sum(-1),
                "step": torch.tensor(2.0),
                "notes": ["a", (1, None)],
                "low": p.detach().half(),
            }


def test_nonstandard_optimizer_state_round_trips(tmp_path):
    made = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = nn.Linear(3, 4)
        made.append(init_state(model, Factored(model.parameters())))
    made[0].optimizer.step()
    save_sharded(tmp_path, made[0])
    state = load_sharded(tmp_path, made[1])
    assert digest(state) == digest(made[0])
    content = state.optimizer.state[state.params["weight"]]
    assert content["low"].dtype == torch.float16, "nothing is cast to the parameter's dtype"
    assert content["notes"] == ["a", (1, None)]


def test_final_save_of_a_saved_or_loaded_step_writes_nothing(tmp_path):
    state = train(plain_state(), 2)
    checkpoints = Checkpointer(tmp_path, mode="async")
    results = [checkpoints.save(state), checkpoints.save(state), save_sharded(tmp_path, state)]
    assert [pending.result().written for pending in results] == [True, False, False]
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("step-*/*")}
    loaded = load_sharded(tmp_path, plain_state(1))
    assert not save_sharded(tmp_path, loaded).result().written
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("step-*/*")} == before


CHANGES = {
    "a weight": lambda state: nn.init.zeros_(state.model.last.weight),
    "a weight through .data": lambda state: state.model.last.weight.data.zero_(),
    "memory of a weight": lambda state: setattr(state.model.last.weight, "data", torch.zeros(2, 7)),
    "a buffer": lambda state: state.model.seen.add_(1),
    "a buffer that is another tensor": lambda state: setattr(state.model, "seen", torch.tensor(99)),
    "the learning rate": lambda state: state.optimizer.param_groups[0].update(lr=0.125),
    "the optimizer's state": lambda state: state.optimizer.state[state.model.last.weight]["exp_avg"].zero_(),
    "an average": lambda state: state.transform_states["ema"]["shadow"]["last.weight"].zero_(),
}


@pytest.mark.parametrize("after", ["save", "async save", "load"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_step_is_written_again_if_the_state_has_changed_since(tmp_path, change, after):
    state = train(plain_state(), 1)
    save_sharded(tmp_path, state, mode="async" if after == "async save" else "sync")
    state = load_sharded(tmp_path, plain_state(1)) if after == "load" else state
    assert not save_sharded(tmp_path, state).result().written
    with torch.no_grad():
        change(state)
    assert save_sharded(tmp_path, state).result().written
    assert digest(load_sharded(tmp_path, plain_state(1)), rng=False) == digest(state, rng=False)
    assert not save_sharded(tmp_path, state).result().written


def test_step_is_not_written_again_after_forwards_that_change_nothing(tmp_path):
    state = train(plain_state(), 1)
    save_sharded(tmp_path / "a", state)
    with torch.inference_mode():
        state.model.last(state.model.first(torch.ones(2, 5)))
    state.model.last(torch.ones(2, 7)).sum().backward()
    save_sharded(tmp_path / "weights", state, scope="weights", dtype=torch.bfloat16)
    assert not save_sharded(tmp_path / "a", state).result().written
    assert not save_sharded(tmp_path / "weights", state, scope="weights", dtype=torch.bfloat16).result().written


def state_with(model: nn.Module, **options: Any) -> TrainState:
    return init_state(model, torch.optim.AdamW(model.parameters(), **options))


def test_load_tells_which_options_of_the_script_it_replaces(tmp_path, capsys):
    save_sharded(tmp_path, state_with(nn.Linear(1, 1), lr=1e-2))
    changed = {"lr": 1e-3, "betas": (0.5, 0.9), "weight_decay": 0.01, "fused": True}
    state = load_sharded(tmp_path, state_with(nn.Linear(1, 1), **changed))
    said = capsys.readouterr().err
    assert "options of the checkpoint replace those here: lr 0.001 -> 0.01, betas (0.5, 0.9) -> (0.9, 0.999); to keep" in said
    assert "set it after the load: state.optimizer.param_groups[0]['lr'] = 0.001\n" in said
    assert state.optimizer.param_groups[0]["lr"] == 1e-2
    # The script is the same at the next resume.
    save_sharded(tmp_path / "next", state)
    load_sharded(tmp_path / "next", state_with(nn.Linear(1, 1), **changed))
    load_sharded(tmp_path, state_with(nn.Linear(1, 1), **changed), ignore=["optimizer"])
    assert "replace" not in capsys.readouterr().err


@pytest.mark.parametrize("by", ["scheduler", "hand"])
def test_load_does_not_tell_of_options_that_training_has_changed(tmp_path, capsys, by):
    def start() -> tuple[TrainState, Any]:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1) if by == "scheduler" else None
        return init_state(model, optimizer, stateful={"scheduler": scheduler} if scheduler else {}), scheduler

    state, scheduler = start()
    for number in range(3):
        state.optimizer.step()
        if scheduler is None:
            state.optimizer.param_groups[0]["lr"] = 1e-2 / (number + 2)
        else:
            scheduler.step()
    rate = state.optimizer.param_groups[0]["lr"]
    save_sharded(tmp_path, state)
    state = load_sharded(tmp_path, start()[0])
    assert state.optimizer.param_groups[0]["lr"] == rate
    assert "replace" not in capsys.readouterr().err
