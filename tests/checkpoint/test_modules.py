"""State of modules beyond parameters and buffers: extra state, hooks, own state dicts; and odd buffers in a checkpoint."""

import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn

import dtrain as dt
from checkpoint.filled import LAYOUTS, laid_out
from dtrain.dist.init import get_dist_info
from dtrain.errors import CheckpointMismatchError, ConfigError, DtrainError
from dtrain.state import init_state

CASES = [(world, *case) for world in (1, 2) for case in zip(LAYOUTS[world], ("sync", "async") * 2, strict=True)]


class Counted(nn.Linear):
    """A layer with a state of its own."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.calls, self.peak = 0, torch.zeros(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)

    def get_extra_state(self) -> dict[str, Any]:
        return {"calls": self.calls, "peak": self.peak, "pair": (1, None)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        if state["calls"] == 99:
            raise ValueError("99 calls are too many")
        assert state["pair"] == (1, None)
        self.calls, self.peak = state["calls"], state["peak"]


def state_of(model: nn.Module, strategy: str = "none") -> dt.TrainState:
    model = laid_out(model, strategy)
    return init_state(model, torch.optim.SGD(model.parameters(), lr=0.1))


def two(calls: int = 0, peak: float = 0.0) -> nn.Sequential:
    model = nn.Sequential(Counted(), nn.Sequential(Counted(), nn.Linear(2, 2)))
    model[0].calls, model[1][0].calls, model[0].peak = calls, 10 * calls, torch.full((2,), peak)
    return model


def found_in(model: nn.Module) -> list[Any]:
    return [model[0].calls, model[1][0].calls, model[0].peak.tolist()]


def save_counted(root: str, strategy: str, mode: Any, own: bool, several: bool) -> None:
    rank = get_dist_info().rank if own else 0
    state = state_of(two(3 + rank, 1.5 + rank), strategy)
    dt.save_sharded(root, {"g/1": state} if several else state, mode=mode).wait()


def load_counted(root: str, strategy: str, what: Any, several: bool, ignore: list[str]) -> list[Any]:
    state = state_of(two(), strategy)
    try:
        dt.load_sharded(root, {"g/1": state} if several else state, scope=what, ignore=ignore)
    except DtrainError as error:
        return [f"{type(error).__name__}: {error}"]
    return found_in(state.model)


def test_step_is_written_again_if_an_extra_state_has_changed_since(tmp_path):
    state = state_of(two(3))
    assert dt.save_sharded(tmp_path, state).result().written
    assert not dt.save_sharded(tmp_path, state).result().written
    state.model[0].calls = 4
    assert dt.save_sharded(tmp_path, state).result().written
    state = dt.load_sharded(tmp_path, state_of(two()))
    assert not dt.save_sharded(tmp_path, state).result().written
    state.model[0].calls = 5
    assert dt.save_sharded(tmp_path, state).result().written


@pytest.mark.parametrize(("world", "strategy", "mode"), CASES)
def test_extra_state_comes_back_to_its_rank(tmp_path, ranks, world, strategy, mode):
    several = strategy == "shard_grad_op"
    ranks(world).run(save_counted, str(tmp_path), strategy, mode, True, several)
    dt.checkpoint.verify(tmp_path)
    for what in ("all", "weights"):
        for rank, counts in enumerate(ranks(world).run(load_counted, str(tmp_path), strategy, what, several, [])):
            assert counts == [3 + rank, 30 + 10 * rank, [1.5 + rank] * 2]


def test_equal_extra_state_loads_on_any_number_of_ranks(tmp_path, ranks):
    ranks(2).run(save_counted, str(tmp_path), "full_shard", "sync", False, False)
    for world in (1, 2, 3):
        for counts in ranks(world).run(load_counted, str(tmp_path), "full_shard", "all", False, []):
            assert counts == [3, 30, [1.5, 1.5]]


def test_unequal_extra_state_is_refused_on_other_numbers_of_ranks(tmp_path, ranks):
    ranks(2).run(save_counted, str(tmp_path), "full_shard", "sync", True, False)
    for world in (1, 3):
        for (answer,) in ranks(world).run(load_counted, str(tmp_path), "full_shard", "all", False, []):
            assert "the extra state of modules (0._extra_state, 1.0._extra_state) differs between the 2 ranks" in answer
            assert f"this run has {world}. Load on 2 ranks" in answer
        for answer in ranks(world).run(load_counted, str(tmp_path), "full_shard", "all", False, ["**._extra_state"]):
            assert answer == [0, 0, [0.0, 0.0]]


def test_extra_state_that_only_one_side_has_is_refused(tmp_path):
    dt.save_sharded(tmp_path / "with", state_of(two(3)))
    dt.save_sharded(
        tmp_path / "without", state_of(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))))
    )
    plain = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    with pytest.raises(CheckpointMismatchError, match=r"modules/0._extra_state: checkpoint an extra state, here nothing"):
        dt.load_sharded(tmp_path / "with", state_of(plain))
    with pytest.raises(CheckpointMismatchError, match=r"modules/0._extra_state: checkpoint nothing, here an extra state"):
        dt.load_sharded(tmp_path / "without", state_of(two()))
    for name, model in (("without", two()), ("with", plain)):
        loaded = dt.load_sharded(tmp_path / name, state_of(model), ignore=["**._extra_state"])
        assert loaded.restored.ignored == ("0._extra_state", "1.0._extra_state")


def test_extra_state_that_a_module_refuses_changes_nothing(tmp_path):
    dt.save_sharded(tmp_path, state_of(nn.Sequential(*(counted(calls) for calls in (3, 99)))))
    model = nn.Sequential(counted(1), counted(2))
    before = model[0].weight.clone()
    with pytest.raises(ValueError, match="99 calls are too many"):
        dt.load_sharded(tmp_path, state := state_of(model))
    assert [model[0].calls, model[1].calls] == [1, 2]
    assert torch.equal(model[0].weight, before)
    state._check_not_stale("test")


def counted(calls: int) -> Counted:
    module = Counted()
    module.calls = calls
    return module


class Cached(nn.Linear):
    """A layer that derives a value from its weight, when its extra state is set and in a hook after a load."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.scale, self.from_state, self.from_hook = 2.0, 0.0, 0.0
        self.register_load_state_dict_post_hook(Cached.derive)

    def derive(self, _: Any) -> None:
        self.from_hook = float(self.weight.detach().sum())

    def get_extra_state(self) -> float:
        return self.scale

    def set_extra_state(self, state: float) -> None:
        self.scale, self.from_state = state, state * float(self.weight.detach().sum())


@pytest.mark.parametrize("what", ["all", "weights"])
def test_values_derived_from_weights_are_derived_from_the_loaded_weights(tmp_path, what):
    model = Cached()
    dt.save_sharded(tmp_path, state_of(model))
    again, torchs = Cached(), Cached()
    dt.load_sharded(tmp_path, state_of(again), scope=what)
    torchs.load_state_dict(model.state_dict())
    assert torchs.from_hook != 0
    assert (again.from_state, again.from_hook) == (torchs.from_state, torchs.from_hook)
    by_name = Cached()
    dt.load_weights_(by_name, tmp_path)
    assert by_name.from_hook == torchs.from_hook


class OneWay(nn.Linear):
    def get_extra_state(self) -> int:
        return 1


class Pickled(Counted):
    def get_extra_state(self) -> Any:
        return io.BytesIO(b"1")


class AddsEntry(nn.Linear):
    """A layer that stores more than its tensors, as quantized layers of other libraries do."""

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "scale"] = torch.ones(1)


class OwnStateDict(nn.Linear):
    def state_dict(self, *args: Any, **options: Any) -> Any:
        return {**super().state_dict(*args, **options), "epoch": 3}


def adds_by_hook() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.register_state_dict_post_hook(lambda module, entries, prefix, _: entries.update({f"{prefix}note": torch.ones(1)}))
    return layer


REFUSED = {
    "no setter": (lambda: OneWay(2, 2), r"the module '1' \(.*OneWay\) must have set_extra_state.* Define set_extra_state"),
    "pickle": (Pickled, r"modules/1._extra_state: state must be tensors and plain data .*, got _io.BytesIO"),
    "_save_to_state_dict": (lambda: AddsEntry(2, 2), r"the module '1' \(.*AddsEntry\) puts 'scale' into its state dict"),
    "state_dict": (lambda: OwnStateDict(2, 2), r"the module '1' \(.*OwnStateDict\) puts 'epoch' into its state dict"),
    "hook": (adds_by_hook, r"the module '1' \(.*Linear\) puts 'note' into its state dict"),
}


def save_refused(root: str, strategy: str, mode: Any) -> dict[str, str]:
    refusals = {}
    for name, (make, _) in REFUSED.items():
        state = state_of(nn.Sequential(nn.Linear(2, 2), make()), strategy)
        try:
            dt.save_sharded(root, state, mode=mode)
        except ConfigError as error:
            refusals[name] = str(error)
    return refusals


@pytest.mark.parametrize(("world", "strategy", "mode"), CASES)
def test_module_whose_state_would_be_lost_is_refused(tmp_path, ranks, world, strategy, mode):
    for refusals in ranks(world).run(save_refused, str(tmp_path / "root"), strategy, mode):
        assert refusals.keys() == REFUSED.keys()
        for name, (_, message) in REFUSED.items():
            assert re.search(message, refusals[name])
    assert not (tmp_path / "root").exists()


class Renamed(nn.Linear):
    """A layer whose state dict is in the format of another library."""

    def state_dict(self, *args: Any, **options: Any) -> Any:
        entries = super().state_dict(*args, **options)
        prefix = options.get("prefix", "")
        entries[f"{prefix}kernel"] = entries.pop(f"{prefix}weight").t().clone()
        return entries


class LeavesOut(nn.Linear):
    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        del destination[prefix + "bias"]


class WithoutOptions(nn.Linear):
    def state_dict(self) -> Any:
        return {"weight": self.weight}


@pytest.mark.parametrize("kind", [Renamed, LeavesOut, WithoutOptions])
def test_state_dict_that_renames_or_leaves_out_entries_does_not_matter(tmp_path, kind):
    model = kind(2, 2)
    dt.save_sharded(tmp_path, state_of(model))
    again = kind(2, 2)
    dt.load_sharded(tmp_path, state_of(again))
    assert torch.equal(again.weight, model.weight)
    assert torch.equal(again.bias, model.bias)


def parametrized() -> nn.Sequential:
    normed = nn.utils.parametrizations
    return nn.Sequential(normed.weight_norm(nn.Linear(3, 3)), normed.spectral_norm(nn.Linear(3, 3)), nn.BatchNorm1d(3))


def test_parametrized_model_round_trips(tmp_path):
    saved = parametrized()
    saved(torch.randn(4, 3))
    dt.save_sharded(tmp_path, state_of(saved))
    again = parametrized()
    dt.load_sharded(tmp_path, state_of(again))
    assert saved.state_dict().keys() == again.state_dict().keys()
    assert all(map(torch.equal, saved.state_dict().values(), again.state_dict().values()))


# Buffers


def with_buffer(buffer: torch.Tensor) -> nn.Module:
    model = nn.Linear(4, 4)
    model.register_buffer("odd", buffer)
    return model


def test_expanded_buffer_is_refused_by_the_save(tmp_path):
    message = r"save_sharded: buffers/odd must have memory for each element, got an expanded tensor with strides \(0,\)"
    with pytest.raises(ConfigError, match=message):
        dt.save_sharded(tmp_path / "root", state_of(with_buffer(torch.tensor([3.0]).expand(6))))
    assert not (tmp_path / "root").exists()
    dt.save_sharded(tmp_path / "root", state_of(with_buffer(torch.zeros(1, 4).expand(1, 4))))


def test_expanded_tensor_of_a_transform_is_refused_by_the_save(tmp_path):
    state = state_of(nn.Linear(2, 2)).with_transform_state("own", {"rate": torch.zeros(1).expand(3)})
    with pytest.raises(ConfigError, match="save_sharded: transforms/own/rate must have memory for each element"):
        dt.save_sharded(tmp_path / "root", state)
    assert not (tmp_path / "root").exists()


def read_only(tmp_path: Path) -> torch.Tensor:
    np.save(tmp_path / "values.npy", np.zeros(6, dtype=np.float32))
    return torch.from_numpy(np.load(tmp_path / "values.npy", mmap_mode="r"))


def inference(_: Path) -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(6)


TARGETS = {
    "expanded": (lambda _: torch.tensor([3.0]).expand(6), "got an expanded tensor"),
    "inference": (inference, "got a tensor that was made in inference mode"),
    "meta": (lambda _: torch.zeros(6, device="meta"), "got a tensor on the meta device"),
    "read-only": (read_only, "got a tensor in read-only memory"),
}


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable:UserWarning")
@pytest.mark.parametrize(("make", "message"), TARGETS.values(), ids=TARGETS)
def test_target_that_cannot_be_written_is_refused_before_any_write(tmp_path, make, message):
    dt.save_sharded(tmp_path / "root", state_of(with_buffer(torch.ones(6))))
    model = with_buffer(make(tmp_path))
    before, state = model.weight.clone(), state_of(model)
    with pytest.raises(ConfigError, match=f"buffers/odd must .*{message}.*"):
        dt.load_sharded(tmp_path / "root", state)
    if message != "got a tensor on the meta device":
        with pytest.raises(ConfigError, match=f"odd must .*{message}.*"):
            dt.load_weights_(model, tmp_path / "root")
    assert torch.equal(model.weight, before)
    state._check_not_stale("test")


def test_overlapping_and_shared_buffers_round_trip(tmp_path):
    def make(value: float) -> nn.Module:
        base = torch.arange(5.0) * value
        model = nn.Sequential(with_buffer(base.as_strided((3, 2), (1, 1))), with_buffer(base[1:4]), with_buffer(base[:2]))
        model.append(nn.Linear(4, 4))
        model[3].register_buffer("odd", model[1].odd)
        return model

    dt.save_sharded(tmp_path, state_of(make(3.0)))
    again = make(0.0)
    dt.load_sharded(tmp_path, state_of(again))
    assert again[0].odd.tolist() == [[0.0, 3.0], [3.0, 6.0], [6.0, 9.0]]
    assert again[3].odd is again[1].odd
    assert again[3].odd.tolist() == [3.0, 6.0, 9.0]


def save_bytes(root: str, strategy: str, mode: Any) -> None:
    dt.save_sharded(root, state_of(small_floats(1), strategy), mode=mode).wait()


SMALL_FLOATS = ("float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz")


def small_floats(start: int) -> nn.Module:
    model = nn.Linear(4, 4)
    for name in SMALL_FLOATS:
        model.register_buffer(name, torch.arange(start, start + 12, dtype=torch.uint8).view(3, 4).view(getattr(torch, name)))
    return model


def load_bytes(root: str, strategy: str) -> list[Any]:
    model = small_floats(100)
    dt.load_sharded(root, state_of(model, strategy))
    return [getattr(model, name).view(torch.uint8).flatten().tolist() for name in SMALL_FLOATS]


@pytest.mark.parametrize(("world", "mode"), [(1, "sync"), (2, "async")])
def test_small_floats_are_stored_by_their_bytes(tmp_path, ranks, world, mode):
    ranks(world).run(save_bytes, str(tmp_path), "full_shard", mode)
    assert ranks(world).run(load_bytes, str(tmp_path), "full_shard") == [[list(range(1, 13))] * 3] * world
    with safe_open(tmp_path / "step-00000000" / "rank-00000.safetensors", framework="pt") as file:
        stored = {file.get_tensor(key).dtype for key in file.keys()}  # noqa: SIM118  # it is no dict
    assert torch.float8_e8m0fnu in stored or world == 2
