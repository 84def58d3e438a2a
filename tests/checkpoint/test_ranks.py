"""Real ranks: any world size and strategy into any other, and failures of one rank, which all ranks raise."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import Replicate, distribute_tensor

from checkpoint.filled import SHARDED, full, like, sharded_state, value_of
from checkpoint.states import Net, digest, names, plain_state, train, watching
from dtrain.checkpoint.load import load_sharded
from dtrain.checkpoint.save import save_sharded
from dtrain.dist.collectives import all_gather_json
from dtrain.dist.dtensor import is_dtensor, to_local
from dtrain.dist.init import get_dist_info
from dtrain.dist.mesh import build_mesh
from dtrain.dist.rng import seed_all
from dtrain.errors import CheckpointError, CorruptCheckpointError, DtrainError
from dtrain.shard.unshard import reshard
from dtrain.state import TrainState, init_state
from mutations import flip_bits


@pytest.mark.parametrize("strategy", SHARDED)
def test_each_element_is_stored_once_across_ranks(saved, strategy):
    path, _ = saved[3, strategy]
    stored: dict[str, int] = {}
    sizes = []
    for rank in range(3):
        with safe_open(path / f"rank-{rank:05d}.safetensors", framework="pt") as file:
            mine = {key: file.get_tensor(key) for key in file.keys() if not key.startswith("rng/")}  # noqa: SIM118
        sizes.append(sum(t.nbytes for t in mine.values()))
        for key, tensor in mine.items():
            stored[key] = stored.get(key, 0) + tensor.numel()
    assert stored["params/first.weight"] == 35
    assert stored["params/last.bias"] == 2
    assert stored["optimizer/state/first.weight/exp_avg"] == 35
    assert stored["buffers/seen"] == 1
    assert "optimizer/state/first.weight/step" not in stored, "it is in the index"
    assert min(sizes) > 0
    if strategy == "replicate":
        assert max(sizes) < 0.5 * sum(sizes), "replicas share the writing"


def trainable(strategy: str, *stream: Any) -> TrainState:
    """Small equal weights on all ranks, and generators that differ; dropout and data draw from them."""
    state = sharded_state(strategy, filled=False, kind=Net)  # a loop by hand does not sum the gradients of uncut tensors
    with torch.no_grad():
        for name, p in state.params.items():
            to_local(p).copy_(to_local(like(p, value_of(name, p.shape).sin())))
    seed_all(*stream, get_dist_info().rank)
    return state


def resume_on_ranks(root: str, strategy: str) -> list:
    expected = digest(train(trainable(strategy, "data"), 5))
    save_sharded(root, train(trainable(strategy, "data"), 3))
    state = trainable(strategy, "other")
    with torch.no_grad():
        state.model(torch.ones(4, 5))  # leaves units gathered: that must not hide the loaded values
    state = load_sharded(root, state)
    return [digest(train(state, 2)), expected]


@pytest.mark.parametrize("strategy", SHARDED)
def test_resumed_sharded_run_equals_uninterrupted_run(tmp_path, ranks, strategy):
    for resumed, straight in ranks(2).run(resume_on_ranks, str(tmp_path), strategy):
        assert resumed == straight


def scalar_on_ranks(root: str) -> list:
    """A scalar parameter has the shape of its own ``step``, which is no DTensor all the same."""
    states = []
    for value in (3.0, 0.0):
        model = nn.Module()
        model.scale = nn.Parameter(distribute_tensor(torch.tensor(value), build_mesh(), [Replicate(), Replicate()]))
        optimizer = torch.optim.AdamW(model.parameters())
        states.append(init_state(model, optimizer))
    content = {"step": torch.tensor(2.0), "exp_avg": like(states[0].params["scale"].detach(), torch.tensor(5.0))}
    states[0].optimizer.state[states[0].params["scale"]] = content
    save_sharded(root, states[0])
    state = load_sharded(root, states[1])
    param = state.params["scale"]
    back = state.optimizer.state[param]
    return [float(full(param.detach())), {key: [is_dtensor(t), float(full(t))] for key, t in back.items()}]


def test_optimizer_step_of_scalar_parameter_is_no_dtensor(tmp_path, ranks):
    for result in ranks(2).run(scalar_on_ranks, str(tmp_path)):
        assert result == [3.0, {"step": [False, 2.0], "exp_avg": [True, 5.0]}]


def attempt_save(root: str, failing_rank: int, operation: int, kind: str) -> list:
    state = sharded_state("full_shard", filled=True)
    save_sharded(root, state)
    state = state._next(clock=state.clock.tick(samples=1, tokens=0, seconds=0.0))
    before = digest(state)
    failed = "nothing"
    fired = get_dist_info().rank != failing_rank
    options = {"operation": operation, "kind": kind} if get_dist_info().rank == failing_rank else {}
    with watching(**options) as watched:
        try:
            save_sharded(root, state)
        except DtrainError as error:
            failed = f"{type(error).__name__}: {error}"
        fired = fired or watched.fired
    unchanged = digest(state) == before
    all_gather_json(None)  # rank 0 removes the side folder, and only then comes here
    entries = names(Path(root))
    return [failed, fired, unchanged, entries, save_sharded(root, state).result().written]


@pytest.mark.parametrize(("kind", "operation"), [("pwritev", 0), ("write", 0), ("fsync", 0), ("fsync", 1), ("open", 0)])
def test_write_failure_on_one_rank_fails_save_on_all(tmp_path, ranks, kind, operation):
    results = ranks(3).run(attempt_save, str(tmp_path), 1, operation, kind)
    for rank, (failed, fired, unchanged, entries, written) in enumerate(results):
        start = (
            "CheckpointError: save_sharded: step 5" if rank == 1 else r"PeerError: save_sharded: step 5: rank 1 failed (1 of 3"
        )
        assert failed.startswith(start)
        assert "No space left on device" in failed
        assert fired
        assert unchanged
        assert entries == ["step-00000004"], "nothing published, nothing left behind"
        assert written


def attempt_load(path: str, strategy: str, flipped_rank: int | None, on_damaged: str) -> list:
    """``flipped_rank`` is served altered bytes by its own disk; the files are as they were."""
    state = sharded_state(strategy, filled=False)
    before = digest(state)
    failed = "nothing"
    options = {"operation": 4, "kind": "preadv", "action": "flip"} if get_dist_info().rank == flipped_rank else {}
    with watching(**options):
        try:
            load_sharded(path, state, extra={"history": []}, on_corrupt=on_damaged)
        except DtrainError as error:
            failed = f"{type(error).__name__}: {error}"
    return [failed, digest(state) == before, state._generation == state._run_context.generation]


def test_read_corruption_on_one_rank_is_refused_on_all(saved, ranks, tmp_path):
    path, _ = saved[3, "full_shard"]
    results = ranks(2).run(attempt_load, str(path), "full_shard", 1, "raise")
    for failed, unchanged, fresh in results:
        assert failed.startswith(f"CorruptCheckpointError: load_sharded: {path} is corrupt: rank 1: rank-0000")
        assert unchanged
        assert fresh


def test_corrupt_rank_file_is_refused_on_all(saved, ranks, tmp_path):
    path = tmp_path / "step-00000004"
    shutil.copytree(saved[2, "full_shard"][0], path)
    flip_bits(path / "rank-00001.safetensors", -5)
    for failed, unchanged, fresh in ranks(2).run(attempt_load, str(tmp_path), "full_shard", None, "previous"):
        assert failed.startswith(f"CorruptCheckpointError: load_sharded: {path} is corrupt: rank ")
        assert "rank-00001.safetensors: bytes from 0 on do not match" in failed
        assert "no older valid step" in failed
        assert unchanged
        assert fresh


class Refusing:
    """Refuses its state on rank 1, after it has drawn random numbers."""

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state: dict) -> None:
        torch.rand(3)
        if get_dist_info().rank == 1:
            raise ValueError("not on this rank")


def attempt_extra(root: str) -> list:
    save_sharded(root, sharded_state("full_shard", filled=True), extra={"loader": Refusing()})
    state = sharded_state("full_shard", filled=False)
    before = digest(state)
    try:
        load_sharded(root, state, extra={"loader": Refusing()})
    except (DtrainError, ValueError) as error:
        return [f"{type(error).__name__}: {error}", digest(state) == before, state._generation == state._run_context.generation]
    return ["nothing"]


def test_extra_failing_on_one_rank_fails_load_on_all(tmp_path, ranks):
    (first, *unchanged), (second, *also) = ranks(2).run(attempt_extra, str(tmp_path))
    assert first.startswith(
        "PeerError: load_sharded: objects of the run: rank 1 failed (1 of 2 ranks did): ValueError: not on this rank"
    )
    assert second == "ValueError: not on this rank"
    assert unchanged == also == [True, True], "tensors, generators, and the state itself"


@pytest.mark.parametrize("name", ["rank-00000.json", "rank-00001.json"])
def test_swapped_rank_files_are_refused(saved, ranks, tmp_path, name):
    path = tmp_path / "step-00000004"
    shutil.copytree(saved[2, "full_shard"][0], path)
    kind = Path(name).suffix
    (path / f"rank-00000{kind}").rename(path / "x")
    (path / f"rank-00001{kind}").rename(path / f"rank-00000{kind}")
    (path / "x").rename(path / f"rank-00001{kind}")
    with pytest.raises(CorruptCheckpointError, match=r"rank-00000.json"):
        load_sharded(tmp_path, sharded_state("none", filled=False))


def unequal(what: str, root: str) -> str:
    state = sharded_state("full_shard", filled=True)
    rank = get_dist_info().rank
    if what == "slice":
        state = replace(state, transform_states={**state.transform_states, "local": {"count": rank}})
    if what == "seed":
        state = replace(state, seed=rank)
    if what == "shape":
        state = replace(state, transform_states={**state.transform_states, "local": {"t": torch.zeros(rank + 1)}})
    extra = {"loader": {"position": rank}} if what == "extra" else {}
    if what == "unplain":
        extra = {"loader": object() if rank == 1 else {}}
    if what == "sharded extra":
        extra = {"teacher": {"w": state.params["first.weight"]}}
    try:
        save_sharded(root, state, extra=extra)
    except DtrainError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


UNEQUAL = {
    "slice": "ConfigError: save_sharded: transforms/local must be equal on all ranks, but ranks [1] differ from rank 0",
    "shape": "ConfigError: save_sharded: transforms/local must be equal on all ranks, but ranks [1] differ from rank 0",
    "seed": "ConfigError: save_sharded: seed must be equal on all ranks, but ranks [1] differ from rank 0",
    "extra": "ConfigError: save_sharded: extra/loader must be equal on all ranks, but ranks [1] differ from rank 0",
    "sharded extra": "ConfigError: save_sharded: extra/teacher/w must be a plain tensor, got a DTensor",
}


@pytest.mark.parametrize("what", UNEQUAL)
def test_unequal_values_across_ranks_are_refused(tmp_path, ranks, what):
    for failed in ranks(2).run(unequal, what, str(tmp_path / "root")):
        assert failed.startswith(UNEQUAL[what])
    assert not (tmp_path / "root").exists()


def test_unsupported_extra_on_one_rank_is_refused_on_all(tmp_path, ranks):
    first, second = ranks(2).run(unequal, "unplain", str(tmp_path / "root"))
    assert first.startswith(
        "PeerError: save_sharded: rank 1 failed (1 of 2 ranks did): ConfigError: save_sharded: extra: loader must be"
    )
    assert second.startswith("ConfigError: save_sharded: extra: loader must be an object")
    assert not (tmp_path / "root").exists()


def other_folder(path: str, elsewhere: str) -> str:
    """Rank 1 sees other content under the same name, as without a shared file system."""
    import dtrain.checkpoint.load as module

    original = module.open_checkpoint
    if get_dist_info().rank == 1:
        module.open_checkpoint = lambda folder, **options: original(Path(elsewhere), **options)
    state = sharded_state("full_shard", filled=False)
    before = digest(state)
    try:
        load_sharded(path, state, extra={"history": []})
    except CheckpointError as error:
        assert digest(state) == before
        return str(error)
    finally:
        module.open_checkpoint = original
    return "nothing"


def test_different_files_across_ranks_are_reported(saved, ranks):
    for failed in ranks(2).run(other_folder, str(saved[1, "replicate"][0]), str(saved[2, "replicate"][0])):
        assert "ranks see different files in" in failed


def change_on_last_rank(root: str, strategy: str) -> list[bool]:
    state = trainable(strategy, 5)
    state = train(state, 1)
    written = []

    def save(**options: Any) -> None:
        written.append(save_sharded(root, state, **options).result().written)

    save()
    with torch.no_grad():
        state.model(torch.ones(2, 5))
        state.model.seen -= 1
    reshard(state.model)
    save(mode="async")
    save()
    if strategy == "full_shard" and get_dist_info().rank == 1:
        to_local(state.params["first.weight"]).data.zero_()
    save()
    save()
    state = load_sharded(root, state)
    save()
    with torch.no_grad():
        state.params["first.weight"].mul_(2)
    save()
    return [*written, digest(load_sharded(root, trainable(strategy, 6)), rng=False) == digest(state, rng=False)]


@pytest.mark.parametrize("strategy", ["full_shard", "replicate"])
def test_step_is_written_again_if_one_rank_has_changed_its_shard(tmp_path, ranks, strategy):
    # The forward counts a buffer, and gathers the parameters.
    changed = strategy == "full_shard"
    expected = [True, True, False, changed, False, False, True, True]
    assert ranks(2).run(change_on_last_rank, str(tmp_path), strategy) == [expected] * 2


def retention_on_ranks(root: str) -> list:
    state = sharded_state("full_shard", filled=True)
    handles = []
    for _ in range(3):
        handles.append(save_sharded(root, state, keep_last=1).result().written)
        handles.append(save_sharded(root, state, keep_last=1).result().written)
        state = state._next(clock=state.clock.tick(samples=1, tokens=0, seconds=0.0))
    reshard(state.model)
    return [handles, state._run_context.lineage.run_id, list(state._run_context.lineage.roots[root].steps)]


def test_keep_last_and_lineage_agree_across_ranks(tmp_path, ranks):
    first, second = ranks(2).run(retention_on_ranks, str(tmp_path))
    assert first == second
    assert first[0] == [True, False] * 3
    assert first[2] == [4, 5, 6]
    assert names(tmp_path) == ["step-00000006"]
    assert json.loads((tmp_path / "step-00000006" / "manifest.json").read_text())["layout"] == {
        "strategy": "full_shard", "axes": ["dp_replicate", "dp_shard"], "shape": [1, 2]
    }  # fmt: skip


def test_plain_state_helper_is_deterministic():
    assert digest(plain_state(), rng=False) == digest(plain_state(), rng=False)
