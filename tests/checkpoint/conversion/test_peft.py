"""Conversion of adapters: peft loads the file that was saved, and merged weights are those of peft."""

import copy
import json
from functools import partial

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

import dtrain as dt
from checkpoint.conversion.models import MODELS, loaded, logits, saved, state_of
from dtrain.checkpoint.conversion import adapters
from dtrain.checkpoint.conversion.convert import convert
from dtrain.checkpoint.save import save_sharded
from dtrain.checkpoint.weights import batch_regions
from dtrain.errors import CheckpointError

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # read by peft
NEAR = {"rtol": 1e-5, "atol": 1e-6}  # of float32: the products are added before the layer instead of after


def classifier() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return BertForSequenceClassification(BertConfig(vocab_size=64, max_position_embeddings=16, **sizes)).eval()


LORA = {
    # Base model, and options of LoRA. GPT-2 has transposed weights, one of them square.
    "gpt2": (MODELS["gpt2"], {"target_modules": ["c_attn", "attn.c_proj"], "fan_in_fan_out": True}),
    "bert": (MODELS["bert"], {"target_modules": ["query", "dense"], "alpha_pattern": {"output.dense": 3}, "use_rslora": True}),
    "classifier": (classifier, {"target_modules": ["value", "word_embeddings"], "modules_to_save": ["classifier"]}),
}


def trained(base: nn.Module, options: dict[str, object]) -> nn.Module:
    """A model of peft with adapters other than zero."""
    model = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(r=2, lora_alpha=5, **options)).eval()
    torch.manual_seed(1)
    for param in model.parameters():
        if param.requires_grad:
            nn.init.normal_(param, std=0.3)
    return model


def write_configs(model: nn.Module, folder) -> None:
    model.config.save_pretrained(folder)
    model.peft_config["default"].save_pretrained(folder)


def export(model, root):
    model.config.save_pretrained("configs")
    model.peft_config["default"].save_pretrained("configs")
    # the adapter for PeftModel.from_pretrained, and the whole model for from_pretrained
    dt.checkpoint.convert(root, "adapter", to="peft", config="configs")
    dt.checkpoint.convert(root, "merged", to="hf", merge=True, config="configs")


@pytest.mark.parametrize("scope", ["trainable", "all"])
@pytest.mark.parametrize("name", LORA)
def test_peft_loads_the_adapter_that_was_saved(tmp_path, name, scope):
    make, options = LORA[name]
    model = trained(make(), options)
    save_sharded(tmp_path / "root", state_of(model), scope=scope)
    write_configs(model, tmp_path / "configs")
    done = convert(tmp_path / "root", tmp_path / "out", to="peft", config=tmp_path / "configs")
    assert sorted(path.name for path in done.path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    with safe_open(done.path / "adapter_model.safetensors", "pt") as file:
        expected = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
        assert set(file.keys()) == set(expected)
    assert torch.equal(logits(peft.PeftModel.from_pretrained(make(), done.path)), logits(model))


@pytest.mark.parametrize("name", LORA)
def test_merged_weights_are_those_of_peft(tmp_path, monkeypatch, name):
    make, options = LORA[name]
    model = trained(make(), options)
    monkeypatch.chdir(tmp_path)
    export(model, saved(model, tmp_path / "root"))
    assert torch.equal(logits(peft.PeftModel.from_pretrained(make(), "adapter")), logits(model))
    kept = loaded(make().__class__, tmp_path / "merged")
    torch.testing.assert_close(logits(kept), logits(model), **NEAR)
    torch.testing.assert_close(dict(kept.named_parameters()), dict(model.merge_and_unload().named_parameters()), **NEAR)


def test_large_weights_are_merged_in_pieces(tmp_path, monkeypatch):
    make, options = LORA["gpt2"]
    model = trained(make(), options)
    write_configs(model, tmp_path / "configs")
    saved(model, tmp_path / "root")
    files = []
    for limit in (2**20, 256):
        monkeypatch.setattr(adapters, "batch_regions", partial(batch_regions, limit=limit))
        out = tmp_path / f"{limit}.safetensors"
        convert(tmp_path / "root", out, to="safetensors", merge=True, config=tmp_path / "configs")
        files.append(load_file(out))
    torch.testing.assert_close(*files, **NEAR)


@pytest.mark.parametrize(
    ("options", "to", "message"),
    [
        (
            {"use_dora": True},
            "hf",
            "merge must be used with plain LoRA, got use_dora. Convert with to='peft', and call merge_and",
        ),
        ({"bias": "all"}, "peft", "all trained tensors must be in the adapter"),
        ({"scope": "trainable"}, "hf", "merge needs the base weights, but the checkpoint lacks 'base_model.model.bert"),
    ],
)
def test_what_cannot_be_converted_is_refused(tmp_path, options, to, message):
    scope = options.pop("scope", "all")
    model = trained(classifier(), {"target_modules": ["value"], **options})
    save_sharded(tmp_path / "root", state_of(model), scope=scope)
    write_configs(model, tmp_path / "configs")
    with pytest.raises(CheckpointError, match=message):
        convert(tmp_path / "root", tmp_path / "out", to=to, merge=to == "hf", config=tmp_path / "configs")
    assert not (tmp_path / "out").exists()


def test_models_without_adapters_are_refused(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "lora_alpha": 1}))
    saved(classifier(), tmp_path / "root")
    for to in ("peft", "hf"):
        with pytest.raises(CheckpointError, match="adapter"):
            convert(tmp_path / "root", tmp_path / "out", to=to, merge=to == "hf", config=tmp_path / "adapter_config.json")


TIED_ADAPTERS = {
    # Options of LoRA for a tied GPT-2, and the tie that makes two weights of one; the trained names differ.
    "embedding": (
        {"target_modules": ["wte", "c_attn"]},
        {"base_model.model.lm_head.weight": "base_model.model.transformer.wte.base_layer.weight"},
    ),
    "copy": (
        {"target_modules": ["c_attn"], "modules_to_save": ["wte"]},
        {"base_model.model.lm_head.weight": "base_model.model.transformer.wte.original_module.weight"},
    ),
    "head": (
        {"target_modules": ["lm_head", "c_attn"]},
        {"base_model.model.lm_head.base_layer.weight": "base_model.model.transformer.wte.weight"},
    ),
}


# peft warns of the tie, and of a linear layer beside transposed ones.
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", TIED_ADAPTERS)
def test_an_adapter_of_one_of_two_tied_weights_unties_them(tmp_path, name):
    options, tie = TIED_ADAPTERS[name]
    model = trained(MODELS["gpt2"](), {"task_type": "CAUSAL_LM", "fan_in_fan_out": True, **options})
    write_configs(model, tmp_path / "configs")
    saved(model, tmp_path / "root")
    with pytest.raises(CheckpointError, match=r"convert: merge .*[pP]ass tie=\{'base_model\.model\.lm_head"):
        convert(tmp_path / "root", tmp_path / "out", to="hf", merge=True, config=tmp_path / "configs")
    convert(tmp_path / "root", tmp_path / "out", to="hf", merge=True, config=tmp_path / "configs", tie=tie)
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is False
    kept = loaded(MODELS["gpt2"]().__class__, tmp_path / "out")
    torch.testing.assert_close(logits(kept), logits(model), **NEAR)
