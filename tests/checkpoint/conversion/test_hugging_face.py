"""Conversion to Hugging Face: ``from_pretrained`` loads the model that was saved, bit for bit."""

import json

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from checkpoint.conversion.models import MODELS, TIED, config_of, loaded, logits, saved, state_of
from dtrain.checkpoint.conversion.convert import convert
from dtrain.checkpoint.save import save_sharded
from dtrain.dist.mesh import build_mesh
from dtrain.shard.fsdp import shard_model


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("name", MODELS)
def test_from_pretrained_loads_one_file(tmp_path, name):
    model = MODELS[name]()
    saved(model, tmp_path / "root")
    done = convert(tmp_path / "root", tmp_path / "out", to="hf", config=config_of(model, tmp_path / "config"))
    assert names_in(tmp_path / "out") == ["config.json", "model.safetensors"]
    assert (done.path, done.tensors) == (tmp_path / "out", len(dict(model.named_parameters())))
    assert done.bytes == sum(p.nbytes for p in model.parameters())
    assert torch.equal(logits(loaded(type(model), tmp_path / "out")), logits(model))


@pytest.mark.parametrize("name", MODELS)
def test_from_pretrained_loads_several_files(tmp_path, name):
    model = MODELS[name]()
    saved(model, tmp_path / "root")
    options = {"to": "hf", "config": config_of(model, tmp_path / "config"), "max_shard_bytes": 5000}
    done = convert(tmp_path / "root", tmp_path / "out", **options)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    assert names_in(tmp_path / "out") == ["config.json", *files, "model.safetensors.index.json"]
    assert len(files) > 3
    assert index["metadata"]["total_size"] == done.bytes
    assert torch.equal(logits(loaded(type(model), tmp_path / "out")), logits(model))


def test_folder_of_companions_makes_a_whole_folder(tmp_path):
    model, companions = MODELS["gpt2"](), tmp_path / "companions"
    vocabulary = Tokenizer(WordLevel({"hello": 0, "world": 1, "?": 2}, unk_token="?"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=vocabulary, unk_token="?", chat_template="{{ messages }}")
    model.generation_config.max_new_tokens = 7
    for part in (model.config, model.generation_config, tokenizer):
        part.save_pretrained(companions)
    for name in ("adapter_config.json", "pytorch_model.bin.index.json", "weights.bin", "README.md"):
        (companions / name).write_text("{}")
    convert(saved(model, tmp_path / "root"), tmp_path / "out", to="hf", config=companions, max_shard_bytes=5000)
    convert(tmp_path / "out", tmp_path / "again", to="hf")
    assert "model.safetensors.index.json" not in names_in(tmp_path / "again")
    for folder in (tmp_path / "out", tmp_path / "again"):
        kept = AutoModelForCausalLM.from_pretrained(folder)
        assert torch.equal(logits(kept), logits(model))
        assert kept.generation_config.max_new_tokens == 7
        text = AutoTokenizer.from_pretrained(folder)
        assert (text("world")["input_ids"], text.chat_template) == (tokenizer("world")["input_ids"], "{{ messages }}")
        assert not {"adapter_config.json", "pytorch_model.bin.index.json", "weights.bin", "README.md"} & {*names_in(folder)}


def save_shards(root):
    model = shard_model(MODELS["gpt2"](), build_mesh())
    return str(save_sharded(root, state_of(model)).path)


@pytest.mark.costly
def test_convert_joins_shards_of_several_ranks(tmp_path, ranks):
    path = ranks(2).run(save_shards, str(tmp_path / "root"))[0]
    model = MODELS["gpt2"]()
    convert(path, tmp_path / "out", to="hf", config=config_of(model, tmp_path / "config"))
    assert torch.equal(logits(loaded(type(model), tmp_path / "out")), logits(model))


def test_cast_equals_tensor_to_dtype(tmp_path):
    model = MODELS["gpt2"]()
    done = convert(saved(model, tmp_path / "root"), tmp_path / "out", to="hf", dtype="bf16")
    assert done.bytes == sum(p.nbytes for p in model.parameters()) // 2
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == {name for name, _ in model.named_parameters()}
        for name, param in model.named_parameters():
            assert torch.equal(file.get_tensor(name), param.detach().to(torch.bfloat16)), name


@pytest.mark.parametrize("name", MODELS)
def test_tie_writes_a_weight_under_both_names(tmp_path, name):
    model = MODELS[name]()
    convert(saved(model, tmp_path / "root"), tmp_path / "out", to="hf", tie=TIED[name])
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(model.state_dict())
        for key, tensor in model.state_dict().items():
            assert torch.equal(file.get_tensor(key), tensor), key
