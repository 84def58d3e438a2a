"""Towards ours: a step that verifies, and that a model loads."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from checkpoint.conversion.models import MODELS, TIED, logits, state_of
from checkpoint.stored import json_of
from dtrain.checkpoint.conversion.convert import convert
from dtrain.checkpoint.layout import CHUNK_BYTES
from dtrain.checkpoint.load import load_sharded
from dtrain.checkpoint.load_weights import load_weights_
from dtrain.checkpoint.reader import open_checkpoint, verify
from dtrain.checkpoint.save import save_sharded
from dtrain.errors import CheckpointMismatchError, ConfigError


@pytest.mark.parametrize("name", MODELS)
def test_hugging_face_folder_round_trips(tmp_path, name):
    model = MODELS[name]()
    model.save_pretrained(tmp_path / "hf", max_shard_size="6KB")
    done = convert(tmp_path / "hf", tmp_path / "root", to="dtrain", step=7)
    assert done.path == tmp_path / "root" / "step-00000007"
    step = verify(tmp_path / "root")
    assert (step.step, step.path, step.world_size, step.scope) == (7, done.path, 1, "weights")
    other = MODELS[name](seed=1)
    load_weights_(other, tmp_path / "root")
    assert torch.equal(logits(other), logits(model))


def test_load_sharded_loads_converted_parameters_and_buffers(tmp_path):
    model, other = (nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)) for _ in range(2))
    model(torch.randn(4, 2))
    save_file(model.state_dict(), tmp_path / "x.safetensors")
    convert(tmp_path / "x.safetensors", tmp_path / "root", to="dtrain", step=7)
    restored = load_sharded(tmp_path / "root", state_of(other), scope="weights")
    assert restored.restored.step == 7
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in other.state_dict().items())


def test_step_folder_name_sets_step_number(tmp_path):
    save_file({"a": torch.ones(3)}, tmp_path / "x.safetensors")
    done = convert(tmp_path / "x.safetensors", tmp_path / "new" / "step-00000012", to="dtrain")
    assert done.path == tmp_path / "new" / "step-00000012"
    assert verify(tmp_path / "new").step == 12


def test_root_with_existing_steps_is_refused(tmp_path):
    save_file({"a": torch.ones(3)}, tmp_path / "x.safetensors")
    convert(tmp_path / "x.safetensors", tmp_path / "root", to="dtrain")
    with pytest.raises(
        ConfigError, match=r"destination must not be in a root of a run, got .* with step-00000000. Name a new root"
    ):
        convert(tmp_path / "x.safetensors", tmp_path / "root" / "step-00000012", to="dtrain")


def test_convert_separates_buffers_from_parameters(tmp_path):
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    model.register_buffer("table", torch.ones(2))
    save_file(model.state_dict(), tmp_path / "x.safetensors")
    done = convert(tmp_path / "x.safetensors", tmp_path / "root", to="dtrain", buffers=["table"])
    sections = {"params": dict(model.named_parameters()), "buffers": dict(model.named_buffers())}
    assert set(open_checkpoint(done.path).refs) == {f"{name}/{key}" for name, tensors in sections.items() for key in tensors}


def test_names_with_slashes_and_dollars_are_kept(tmp_path):
    tensors = {"a/b": torch.ones(2), "$": torch.zeros(3, dtype=torch.int64), "a~1b": torch.ones(()), "": torch.ones(0, 2)}
    save_file(tensors, tmp_path / "x.safetensors")
    convert(tmp_path / "x.safetensors", tmp_path / "root", to="dtrain")
    verify(tmp_path / "root")
    convert(tmp_path / "root", tmp_path / "hf", to="hf")
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    assert weights.keys() == tensors.keys()
    assert all(torch.equal(weights[name], tensors[name]) for name in tensors)


def test_large_tensor_has_blocks_of_its_own(tmp_path):
    save_file({"a": torch.randn(CHUNK_BYTES // 16, 5), "b": torch.randn(7)}, tmp_path / "x.safetensors")
    done = convert(tmp_path / "x.safetensors", tmp_path / "root", to="dtrain")
    assert len(json_of(done.path, "rank-00000.json")["blocks"][0]["ends"]) == 16 + 1
    verify(done.path)


@pytest.mark.parametrize("name", MODELS)
def test_tied_weights_are_stored_once(tmp_path, name):
    model = MODELS[name]()
    save_file({key: tensor.clone() for key, tensor in model.state_dict().items()}, tmp_path / "x.safetensors")
    done = convert(tmp_path / "x.safetensors", tmp_path / "root", to="dtrain", tie=TIED[name])
    assert set(open_checkpoint(done.path).refs) == {f"params/{key}" for key, _ in model.named_parameters()}


def test_tie_renames_alias_stored_alone(tmp_path):
    save_file({"head": torch.ones(3)}, tmp_path / "x.safetensors")
    done = convert(tmp_path / "x.safetensors", tmp_path / "root", to="dtrain", tie={"head": "embedding"})
    assert list(open_checkpoint(done.path).refs) == ["params/embedding"]


def test_unequal_tied_weights_are_refused(tmp_path):
    save_file({"a": torch.ones(3), "b": torch.zeros(3)}, tmp_path / "x.safetensors")
    with pytest.raises(
        CheckpointMismatchError, match=r"tie must map equal tensors, but 'b' and 'a' are both stored and differ. Leave out tie"
    ):
        convert(tmp_path / "x.safetensors", tmp_path / "root", to="dtrain", tie={"b": "a"})


def test_tie_without_stored_name_is_refused(tmp_path):
    save_file({"a": torch.ones(3)}, tmp_path / "x.safetensors")
    with pytest.raises(ConfigError, match="tie must map a name to another, one of which is stored, got 'x': 'y'"):
        convert(tmp_path / "x.safetensors", tmp_path / "root", to="dtrain", tie={"x": "y"})


def test_state_option_selects_one_of_several_states(tmp_path):
    states = {"generator": state_of(nn.Linear(2, 3)), "discriminator": state_of(nn.Linear(3, 1))}
    save_sharded(tmp_path / "root", states)
    convert(tmp_path / "root", tmp_path / "out", to="hf", state="discriminator")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert weights.keys() == {"weight", "bias"}
    assert torch.equal(weights["weight"], states["discriminator"].params["weight"].detach())
    with pytest.raises(ConfigError, match=r"holds the states 'generator', 'discriminator'. Name one with state \(--state\)"):
        convert(tmp_path / "root", tmp_path / "two", to="hf")
    with pytest.raises(CheckpointMismatchError, match=r"'generator', 'discriminator'.*got 'other'"):
        convert(tmp_path / "root", tmp_path / "two", to="hf", state="other")
