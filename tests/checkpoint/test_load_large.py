"""Large states are verified first, and read again when all ranks have agreed. Here a small state counts as large."""

import os
import shutil
from dataclasses import replace

import pytest
import torch

from checkpoint.states import Counter, WatchedOs, digest, plain_state, train, watching
from checkpoint.stored import shards_of
from dtrain import storage
from dtrain.checkpoint import data_file, layout, load
from dtrain.checkpoint.load import load_sharded
from dtrain.checkpoint.save import save_sharded
from dtrain.errors import CheckpointError, CorruptCheckpointError, StaleStateError
from mutations import flip_bits

DATA = "rank-00000.safetensors"


@pytest.fixture(autouse=True)
def _large(monkeypatch):
    for module in (layout, data_file):
        monkeypatch.setattr(module, "CHUNK_BYTES", 512)
    monkeypatch.setattr(load, "_HELD_BYTES", 0)
    monkeypatch.setattr(load, "_BATCH_BYTES", 300)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("steps", [0, 2], ids=["new", "stepped"])
def test_large_state_loads_bit_for_bit(tmp_path, steps, optimizer):
    saved = train(plain_state(optimizer=optimizer), 3)
    save_sharded(tmp_path, saved, extra={"counter": Counter()})
    expected = digest(saved)
    state = train(plain_state(5, optimizer=optimizer), steps)
    assert digest(load_sharded(tmp_path, state, extra={"counter": Counter()})) == expected


def test_large_weights_load_bit_for_bit(tmp_path):
    saved = train(plain_state(), 3)
    save_sharded(tmp_path, saved, scope="weights")
    loaded = load_sharded(tmp_path, plain_state(5), scope="weights")
    assert all(torch.equal(loaded.params[name], param) for name, param in saved.params.items())


def test_large_several_states_load_bit_for_bit(tmp_path):
    made = {"a": train(plain_state(), 2), "b": train(plain_state(1), 2)}
    save_sharded(tmp_path, made)
    back = load_sharded(tmp_path, {"a": plain_state(5), "b": plain_state(6)})
    assert [digest(back[name], rng=False) for name in made] == [digest(state, rng=False) for state in made.values()]


def test_large_state_loads_into_transposed_and_other_dtypes(tmp_path):
    """Targets that cannot be filled in place."""
    saved = train(plain_state(), 2)
    save_sharded(tmp_path, saved)
    state = plain_state(5)
    first = state.model.first.weight
    first.data = first.detach().t().contiguous().t()
    assert not first.is_contiguous()
    loaded = load_sharded(tmp_path, state)
    assert digest(loaded, rng=False) == digest(saved, rng=False)
    wide = plain_state(5)
    wide.model.double()
    shadow = {name: value.double() for name, value in wide.transform_states["ema"]["shadow"].items()}
    wide = replace(wide, transform_states={**wide.transform_states, "ema": {"shadow": shadow, "updates": 0}})
    loaded = load_sharded(tmp_path, wide, allow_cast=True)
    for name, param in saved.params.items():
        assert loaded.params[name].dtype == torch.float64
        assert torch.equal(loaded.params[name], param.double())


def test_tensors_filled_in_place_count_as_changed(tmp_path):
    """Autograd refuses a backward that saved a tensor before the load."""
    save_sharded(tmp_path, train(plain_state(), 2))
    state = plain_state(5)
    before = {name: param._version for name, param in state.params.items()}
    load_sharded(tmp_path, state)
    assert all(param._version > before[name] for name, param in state.params.items())


@pytest.mark.parametrize("steps", [0, 2], ids=["new", "stepped"])
def test_tensors_that_the_state_lacks_are_read_once(tmp_path, monkeypatch, steps):
    save_sharded(tmp_path, train(plain_state(), 3))
    seen, original = [], load._apply

    def noted(loaded, *args):
        seen.append((set(loaded.held), set(loaded.unread)))
        return original(loaded, *args)

    monkeypatch.setattr(load, "_apply", noted)
    state = train(plain_state(5), steps)
    load_sharded(tmp_path, state)
    ((held, read_again),) = seen
    optimizer = {key for key in held | read_again if key.startswith("optimizer/")}
    assert {f"optimizer/state/{name}/exp_avg" for name in state.params} < optimizer
    # What a state keeps as it is read is on the CPU: on a GPU the step counts of the optimizer only.
    kept = optimizer if state.device.type == "cpu" else {key for key in optimizer if key.endswith("/step")}
    assert held == (set() if steps else kept)
    assert held.isdisjoint(read_again)


def test_damage_is_refused_before_anything_changes(tmp_path):
    path = save_sharded(tmp_path, train(plain_state(), 2), extra={"counter": Counter()}).path / DATA
    state = train(plain_state(5), 1)
    before = digest(state)
    header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    for byte in range(header, path.stat().st_size, 100):
        flip_bits(path, byte)
        with pytest.raises(CorruptCheckpointError, match=f"{DATA}: bytes from {byte // 512 * 512} on do not match"):
            load_sharded(tmp_path, state, extra={"counter": Counter()})
        flip_bits(path, byte)
        assert digest(state) == before
        state._check_not_stale("here")


@pytest.fixture
def first_pass(monkeypatch):
    """Number of reads before the state changes, of the last load."""
    counts, original = {}, load._apply

    def counted(*args):
        counts["reads"] = len(storage.local.os.calls) if isinstance(storage.local.os, WatchedOs) else 0
        return original(*args)

    monkeypatch.setattr(load, "_apply", counted)
    return counts


@pytest.mark.parametrize("action", ["fail", "flip"])
def test_failing_read_changes_nothing_or_is_reported(tmp_path, action, first_pass):
    """A read that fails while the state is verified changes nothing. A read that fails afterwards leaves a spent state."""
    path = save_sharded(tmp_path, train(plain_state(), 1)).path
    with watching(kind="preadv") as watched:
        load_sharded(path, plain_state())
    total, verified = len(watched.calls), first_pass["reads"]
    assert 2 < verified < total
    for operation in range(total):
        state = train(plain_state(7), 2)
        before = digest(state)
        with watching(operation=operation, kind="preadv", action=action) as failing, pytest.raises(CheckpointError) as caught:
            load_sharded(path, state)
        assert failing.fired
        if operation < verified:
            assert digest(state) == before
            state._check_not_stale("here")
        else:
            assert "uild the state again and load again" in str(caught.value)
            with pytest.raises(StaleStateError):
                state._check_not_stale("here")


def test_file_that_changes_between_the_passes_is_named_with_the_loaded_tensors(tmp_path, monkeypatch):
    path = save_sharded(tmp_path, train(plain_state(), 2)).path / DATA
    last = max(shard.begin for shard in shards_of(path.parent).values())
    original = load._apply

    def damage_then_apply(*args):
        flip_bits(path, last)
        return original(*args)

    monkeypatch.setattr(load, "_apply", damage_then_apply)
    with pytest.raises(
        CorruptCheckpointError,
        match=rf"{DATA}: bytes from \d+ on do not match their digest. The file has changed since it was verified. "
        r"Loaded before: [1-9]\d* of \d+ tensors \(\S+/.*\), and parts of the next \d+. Build the state again and load again",
    ):
        load_sharded(tmp_path, plain_state(5))


def test_step_removed_between_the_passes_loads(tmp_path, monkeypatch):
    """A retention of another process removes the step. The open files stay readable."""
    saved = train(plain_state(), 2)
    path = save_sharded(tmp_path, saved).path
    expected, original = digest(saved), load._apply

    def remove_then_apply(*args):
        shutil.rmtree(path)
        return original(*args)

    monkeypatch.setattr(load, "_apply", remove_then_apply)
    handles = len(os.listdir("/proc/self/fd"))
    assert digest(load_sharded(tmp_path, plain_state(5))) == expected
    assert len(os.listdir("/proc/self/fd")) == handles


def test_refused_load_closes_its_files(tmp_path):
    path = save_sharded(tmp_path, train(plain_state(), 2)).path / DATA
    flip_bits(path, -1)
    handles = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(CorruptCheckpointError):
            load_sharded(tmp_path, plain_state(5))
    assert len(os.listdir("/proc/self/fd")) == handles


def test_optimizer_tensors_are_filled_in_place_unless_they_share_memory(tmp_path):
    saved = train(plain_state(), 3)
    save_sharded(tmp_path, saved)
    expected = digest(saved, rng=False)
    state = train(plain_state(5), 1)
    contents = [state.optimizer.state[param] for param in state.params.values()]
    before = [content["exp_avg"] for content in contents]  # held, so that the load cannot take freed memory at the same address
    contents[1]["exp_avg"] = contents[0]["exp_avg"].view(-1)[: contents[1]["exp_avg"].numel()].view_as(contents[1]["exp_avg"])
    contents[2]["exp_avg"] = state.params["last.weight"].detach()
    loaded = load_sharded(tmp_path, state)
    assert digest(loaded, rng=False) == expected
    after = [loaded.optimizer.state[param]["exp_avg"] for param in loaded.params.values()]
    in_place = [new.data_ptr() == old.data_ptr() for new, old in zip(after, before, strict=True)]
    assert in_place == [True, False, False, True]
