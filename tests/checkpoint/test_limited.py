"""Saves of less or more than one whole state: several states, weights, adapters, other dtypes, links."""

import os
from dataclasses import replace

import pytest
import safetensors
import torch

import dtrain as dt
from checkpoint.states import digest, names, plain_state, train
from dtrain import storage
from dtrain.checkpoint.checkpoint_info import list_steps
from dtrain.checkpoint.load import load_sharded
from dtrain.checkpoint.reader import open_checkpoint, verify
from dtrain.checkpoint.save import save_sharded
from dtrain.dist.context import Preemption
from dtrain.errors import CheckpointError, CheckpointMismatchError, ConfigError
from mutations import flip_bits


def sections(folder):
    return {key.split("/")[0] for key in open_checkpoint(folder).refs}


def test_several_states_are_saved_as_one_step(tmp_path):
    pair = {"generator": train(plain_state(), 3), "critic/1": train(plain_state(5, optimizer="sgd"), 7)}
    handle = save_sharded(tmp_path, pair, extra={"seen": torch.arange(3)})
    assert handle.step == 3, "that of the first"
    assert verify(tmp_path).step == 3
    opened = open_checkpoint(handle.path)
    assert opened.manifest.states == ("generator", "critic/1")
    for name, state in pair.items():
        selected = opened.select_state(name)
        assert {key for key in selected.refs if key.startswith("params/")} == {f"params/{param}" for param in state.params}
        assert selected.refs.keys() >= {"extra/seen"}
        assert selected.numbers.keys() == selected.refs.keys()
    with pytest.raises(CheckpointMismatchError, match=r"'critic/1'\), got 'discriminator'"):
        opened.select_state("discriminator")
    fresh = {"generator": plain_state(1), "critic/1": plain_state(2, optimizer="sgd")}
    seen = torch.zeros(3, dtype=torch.int64)
    back = load_sharded(tmp_path, fresh, extra={"seen": seen})
    assert {name: digest(state, rng=False) for name, state in back.items()} == {
        name: digest(state, rng=False) for name, state in pair.items()
    }
    assert torch.equal(seen, torch.arange(3))


def test_states_of_different_runs_are_refused(tmp_path):
    first, second = train(plain_state(), 1), train(plain_state(5), 1)
    save_sharded(tmp_path / "a", first)
    save_sharded(tmp_path / "b", second)
    with pytest.raises(ConfigError, match=r"the states \['a', 'b'\] must belong to one run"):
        save_sharded(tmp_path / "c", {"a": first, "b": second})


@pytest.mark.parametrize(
    "bad",
    [{}, {1: None}, {"a": 3}, 3, {"": None}, {"$": None}],
    ids=["none", "number", "value", "no states", "empty name", "taken name"],
)
def test_invalid_state_is_refused(tmp_path, bad):
    if isinstance(bad, dict):
        bad = {name: plain_state() if value is None else value for name, value in bad.items()}
    with pytest.raises(
        ConfigError, match=r"save_sharded: (state must be a TrainState|names of states must be|a must be a TrainState)"
    ):
        save_sharded(tmp_path, bad)


def test_weights_checkpoint_excludes_other_sections_and_whole_saves(tmp_path):
    state = train(plain_state(), 2)
    handle = save_sharded(tmp_path, state, scope="weights")
    assert sections(handle.path) == {"params", "buffers"}
    assert open_checkpoint(handle.path).manifest.sections == ("params", "buffers", "modules", "clock", "seed")
    assert [step.scope for step in list_steps(tmp_path)] == ["weights"]
    with pytest.raises(CheckpointError, match=r"scope must be 'weights' as in step 2 of .*, got 'all'. A run is resumed"):
        save_sharded(tmp_path, state)
    with pytest.raises(CheckpointError, match=r"scope must be 'weights' as in step 2 of .*, got 'trainable'"):
        save_sharded(tmp_path, state, scope="trainable")


def test_trainable_save_stores_only_trainable_parameters(tmp_path):
    state = train(plain_state(), 2)
    for name, param in state.params.items():
        param.requires_grad_(name.startswith("last"))
    handle = save_sharded(tmp_path, state, scope="trainable")
    with safetensors.safe_open(handle.path / "rank-00000.safetensors", "pt") as file:
        assert sorted(file.keys()) == ["params/last.bias", "params/last.weight"]


def test_cast_converts_saved_weights_only(tmp_path):
    state = train(plain_state(), 2)
    handle = save_sharded(tmp_path, state, scope="weights", dtype=torch.bfloat16)
    with safetensors.safe_open(handle.path / "rank-00000.safetensors", "pt") as file:
        for name, param in state.params.items():
            assert torch.equal(file.get_tensor(f"params/{name}"), param.bfloat16())
        assert file.get_tensor("buffers/seen").dtype == torch.int64
    assert all(param.dtype == torch.float32 for param in state.params.values())


BAD = {
    "unknown part": ({"scope": "optimizer"}, r"scope must be 'all', 'weights' or 'trainable', got 'optimizer'"),
    "two parts": ({"scope": ("model", "trainable")}, "scope must be"),
    "old name": ({"scope": "model"}, "scope must be"),
    "extra of a part": ({"scope": "weights", "extra": {"x": 1}}, r"extra must be empty with .*, got \['x'\]"),
    "cast to integers": ({"dtype": torch.int32}, "dtype must be a floating-point dtype, got torch.int32"),
    "keep none": ({"keep_last": 0}, "keep_last must be"),
    "mode": ({"mode": "fast"}, "mode must be 'sync', 'async' or 'memory', got 'fast'"),
}


@pytest.mark.parametrize(("options", "message"), BAD.values(), ids=BAD)
def test_invalid_options_are_refused_before_writing(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        save_sharded(tmp_path / "root", plain_state(), **options)
    assert not (tmp_path / "root").exists()


@pytest.fixture
def adapter():
    """A state most of which is not trained."""
    state = plain_state()
    for name, param in state.params.items():
        param.requires_grad_(name.startswith("last"))
    optimizer = torch.optim.SGD([param for param in state.params.values() if param.requires_grad], lr=0.1)
    return replace(state, optimizer=optimizer)


def test_errors_about_adapter_name_the_scope_that_loads_it(tmp_path, adapter):
    trained = train(adapter, 1)
    save_sharded(tmp_path, trained, scope="trainable")
    with pytest.raises(
        CheckpointMismatchError, match=r"saved with scope='trainable'\..*dt.load_sharded\(path, state, scope='weights'\)"
    ):
        dt.load_weights_(plain_state().model, tmp_path)
    with pytest.raises(
        ConfigError, match=r"scope must be 'all' or 'weights', got 'trainable'\. Load an adapter, .*with scope='weights'"
    ):
        load_sharded(tmp_path, plain_like(adapter), scope="trainable")
    loaded = load_sharded(tmp_path, plain_like(adapter), scope="weights")
    assert loaded.params["last.bias"].equal(trained.params["last.bias"])


def links(root):
    return [os.stat(root / name / "rank-00000-frozen.safetensors").st_nlink for name in names(root)]


def test_incremental_save_links_frozen_parameters(tmp_path, adapter):
    for count in (1, 2, 3):
        adapter = train(adapter, 1)
        save_sharded(tmp_path, adapter, incremental=True, mode="async" if count == 3 else "sync").wait()
        assert links(tmp_path) == [count] * count
        assert verify(tmp_path).step == count
    expected = digest(adapter, rng=False)
    save_sharded(tmp_path, train(adapter, 1), incremental=True, keep_last=1)
    assert links(tmp_path) == [1], "a step is whole without those that its files came from"
    assert digest(load_sharded(tmp_path, plain_like(adapter)), rng=False) != expected
    assert verify(tmp_path).step == 4


def plain_like(state):
    other = plain_state(1)
    for name, param in other.params.items():
        param.requires_grad_(state.params[name].requires_grad)
    return replace(other, optimizer=torch.optim.SGD([p for p in other.params.values() if p.requires_grad], lr=0.1))


def test_incremental_save_rewrites_changed_frozen_file(tmp_path, adapter):
    save_sharded(tmp_path, train(adapter, 1), incremental=True)
    with torch.no_grad():
        adapter.params["first.bias"][0] += 1
    state = load_sharded(tmp_path, plain_like(adapter))
    with torch.no_grad():
        state.params["first.bias"][0] += 1
    save_sharded(tmp_path, train(state, 1), incremental=True)
    assert links(tmp_path) == [1, 1]


def test_incremental_save_copies_without_link_support(tmp_path, adapter, monkeypatch):
    class NoLinks:
        def __getattr__(self, name):
            return refuse if name == "link" else getattr(os, name)

    def refuse(*args, **options):
        raise OSError(95, "Operation not supported")

    adapter = train(adapter, 1)
    save_sharded(tmp_path, adapter, incremental=True)
    monkeypatch.setattr(storage.local, "os", NoLinks())
    save_sharded(tmp_path, train(adapter, 1), incremental=True)
    assert links(tmp_path) == [1, 1]
    assert verify(tmp_path).step == 2


def test_same_step_with_changed_states_is_rewritten(tmp_path):
    first, second = train(plain_state(), 2), train(plain_state(5), 2)
    pair = {"a": first, "b": second}
    assert save_sharded(tmp_path, pair).result().written
    assert not save_sharded(tmp_path, pair).result().written
    pair["b"] = train(second, 1)
    assert save_sharded(tmp_path, pair).result().written, "its number is that of the first, but the second has moved on"
    back = load_sharded(tmp_path, {"a": plain_state(1), "b": plain_state(2)})
    assert digest(back["b"], rng=False) == digest(pair["b"], rng=False)
    assert not save_sharded(tmp_path, back).result().written


def test_incremental_save_does_not_link_corrupt_file(tmp_path, adapter):
    adapter = train(adapter, 1)
    path = save_sharded(tmp_path, adapter, incremental=True).path / "rank-00000-frozen.safetensors"
    flip_bits(path, -1)
    save_sharded(tmp_path, train(adapter, 1), incremental=True)
    assert links(tmp_path) == [1, 1]
    assert verify(tmp_path).step == 2


def test_space_check_ignores_linked_files(tmp_path, adapter, monkeypatch):
    adapter = train(adapter, 1)
    save_sharded(tmp_path, adapter, incremental=True)
    main, _ = ((tmp_path / names(tmp_path)[0] / f"rank-00000{kind}.safetensors").stat().st_size for kind in ("", "-frozen"))
    monkeypatch.setattr("dtrain.storage.free_bytes", lambda path: main)
    save_sharded(tmp_path, train(adapter, 1), incremental=True)
    with pytest.raises(CheckpointError, match="must be at least"):
        save_sharded(tmp_path / "whole", train(plain_like(adapter), 1))


def test_parent_step_belongs_to_same_root(tmp_path):
    state = train(plain_state(), 1)
    save_sharded(tmp_path / "a", state)
    save_sharded(tmp_path / "weights", state, scope="weights")
    state = train(state, 1)
    save_sharded(tmp_path / "b", state)
    save_sharded(tmp_path / "a", state)
    assert [step.parent_step for step in list_steps(tmp_path / "b")] == [None]
    assert [step.parent_step for step in list_steps(tmp_path / "a")] == [None, 1]


def test_weights_save_does_not_count_as_preemption_save(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(Preemption, "is_agreed", lambda _: True)
    monkeypatch.setattr(Preemption, "record_save", lambda _, *, after_agreement: said.append(after_agreement))
    state = train(plain_state(), 1)
    save_sharded(tmp_path / "weights", state, scope="weights")
    save_sharded(tmp_path / "whole", state)
    assert said == [False, True]


def test_negative_views_are_saved_with_resolved_values(tmp_path):
    big = torch.complex(torch.zeros(40_000), torch.arange(40_000.0)).conj().imag
    assert big.is_neg()
    path = save_sharded(tmp_path, plain_state(), extra={"x": big}).path
    with safetensors.safe_open(path / "rank-00000.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("extra/x"), -torch.arange(40_000.0))
