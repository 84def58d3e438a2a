"""The model of the fine-tuning example: its source, the stored weights that it loads, and its output files."""

import warnings
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    DistilBertConfig,
    ElectraConfig,
    RobertaConfig,
)

import dtrain as dt
from helpers.classifier import Layer, export, folder_of, load_into_, on_meta, tokenizer_and_config

TEXTS = ["some words to begin with", "and some more"]
NAMES = ["ham", "spam", "eggs"]
SEQ = 16
SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 90}


def small(kind: type[nn.Module], **options) -> nn.Module:
    torch.manual_seed(5)
    return kind(BertConfig(**SMALL, max_position_embeddings=32, **options))


def built(folder: Path | None) -> tuple[nn.Module, object, object]:
    """A classifier of ``NAMES`` with real storage, its config and its tokenizer."""
    tokenizer, config = tokenizer_and_config(folder, TEXTS, NAMES, SEQ)
    model = on_meta(config)
    return dt.materialize(model, seed=0, init=model._init_weights), config, tokenizer


@pytest.fixture
def folder(tmp_path) -> Path:
    """A classifier of other classes, with a tokenizer, as ``save_pretrained`` writes them."""
    made = tmp_path / "pretrained"
    small(BertForSequenceClassification, num_labels=2).save_pretrained(made)
    tokenizer_and_config(None, TEXTS, NAMES, SEQ)[0].save_pretrained(made)
    return made


def test_new_model_has_its_classes_and_vocabulary():
    model, config, tokenizer = built(None)
    assert config.id2label == {0: "ham", 1: "spam", 2: "eggs"}
    assert config.label2id == {"ham": 0, "spam": 1, "eggs": 2}
    assert config.architectures == ["BertForSequenceClassification"]
    assert len(tokenizer) == config.vocab_size
    assert tokenizer(TEXTS[0])["input_ids"][0] == tokenizer.cls_token_id
    assert model.classifier.weight.shape == (3, config.hidden_size)


def test_folder_of_returns_the_folder_or_none(tmp_path):
    assert folder_of(None) is None
    assert folder_of(str(tmp_path)) == tmp_path


def test_hub_name_resolves_to_the_cached_snapshot(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository, commit = tmp_path / "models--people--small-bert", "0" * 40
    (repository / "snapshots" / commit).mkdir(parents=True)
    (repository / "snapshots" / commit / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    assert folder_of("people/small-bert") == repository / "snapshots" / commit


@pytest.mark.parametrize("name", ["people/none", "no/name/at/all"])
def test_unknown_model_name_raises_a_one_line_error(tmp_path, monkeypatch, name):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(SystemExit, match=rf"--model {name}: neither a folder here nor to be had from the hub: ") as end:
        folder_of(name)
    assert len(str(end.value).splitlines()) == 1


def without(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).unlink()


def test_folder_without_config_or_tokenizer_raises_a_one_line_error(folder):
    without(folder, "tokenizer.json")
    with pytest.raises(SystemExit, match=r"pretrained: there is no tokenizer; write tokenizer\.json there with"):
        tokenizer_and_config(folder, TEXTS, NAMES, SEQ)
    without(folder, "config.json")
    with pytest.raises(SystemExit, match=r"pretrained: there is no config\.json; give a folder that save_pretrained"):
        tokenizer_and_config(folder, TEXTS, NAMES, SEQ)


def test_oversized_vocabulary_or_sequence_raises_a_one_line_error(folder):
    with pytest.raises(SystemExit, match=r"pretrained: --seq 33, but the model has 32 positions; take at most as many"):
        tokenizer_and_config(folder, TEXTS, NAMES, 33)
    tokenizer_and_config(None, [f"word{number}" for number in range(100)], NAMES, SEQ)[0].save_pretrained(folder)
    with pytest.raises(SystemExit, match=r"pretrained: \d+ words, the model knows 90; put its own tokenizer there"):
        tokenizer_and_config(folder, TEXTS, NAMES, SEQ)


def saved(folder: Path, kind: str) -> nn.Module:
    """Replace the weights of ``folder``, and the config that goes with them."""
    made = {
        "other classes": lambda: small(BertForSequenceClassification, num_labels=2),
        "these classes": lambda: small(BertForSequenceClassification, num_labels=3),
        "masked": lambda: small(BertForMaskedLM),
        "encoder": lambda: small(BertModel),
        "old names": lambda: small(BertForMaskedLM),
    }[kind]()
    made.save_pretrained(folder)
    if kind == "old names":
        old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
        tensors = load_file(folder / "model.safetensors")
        for now, before in old.items():
            tensors = {name.replace(now, before): tensor for name, tensor in tensors.items()}
        assert any("gamma" in name for name in tensors)
        save_file(tensors, folder / "model.safetensors")
    return made


HEAD = {"classifier.weight", "classifier.bias"}
POOLER = {"bert.pooler.dense.weight", "bert.pooler.dense.bias"}
NEW = {
    "other classes": HEAD,
    "these classes": set(),
    "masked": HEAD | POOLER,
    "encoder": HEAD,
    "old names": HEAD | POOLER,
}


@pytest.mark.parametrize("kind", NEW)
def test_loaded_weights_equal_the_stored_ones_except_the_head(folder, kind):
    reference = saved(folder, kind)
    model, config, _ = built(folder)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    done = load_into_(model, folder, config)
    assert set(done.kept) == NEW[kind]
    stored = {
        name if name.startswith(("bert.", "classifier.")) else f"bert.{name}": t for name, t in reference.state_dict().items()
    }
    for name, tensor in model.state_dict().items():
        expected = before[name] if name in NEW[kind] else stored[name]
        assert torch.equal(tensor, expected), name


def test_missing_encoder_weight_raises(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["bert.encoder.layer.1.output.dense.weight"]
    save_file(tensors, folder / "model.safetensors")
    model, config, _ = built(folder)
    with pytest.raises(dt.errors.CheckpointMismatchError, match=r"bert\.encoder\.layer\.1\.output\.dense\.weight"):
        load_into_(model, folder, config)


def test_load_without_a_folder_returns_none():
    assert load_into_(nn.Linear(2, 2), None, None) is None


OTHERS = {
    "distilbert": DistilBertConfig(vocab_size=90, dim=16, hidden_dim=32, n_layers=2, n_heads=2, max_position_embeddings=32),
    "roberta": RobertaConfig(**SMALL, max_position_embeddings=32),
    "electra": ElectraConfig(**SMALL, embedding_size=16, max_position_embeddings=32),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_encoders_have_layers_to_shard_and_weights_to_load(tmp_path, kind):
    torch.manual_seed(6)
    reference = AutoModelForSequenceClassification.from_config(OTHERS[kind])
    reference.save_pretrained(tmp_path)
    tokenizer_and_config(None, TEXTS, NAMES, SEQ)[0].save_pretrained(tmp_path)
    model, config, _ = built(tmp_path)
    assert sum(isinstance(module, Layer) for module in model.modules()) == 2
    done = load_into_(model, tmp_path, config)
    assert len(done.loaded) > 2 * len(done.kept)
    assert not any(name.startswith(model.base_model_prefix) for name in done.kept)
    loaded = dict(model.named_parameters())
    assert all(torch.equal(loaded[name], tensor) for name, tensor in reference.named_parameters() if name in done.loaded)


class WrittenOutNorm(nn.Module):
    """A layer norm in several operations."""

    def __init__(self, dim: int, eps: float = 1e-12) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x - x.mean(-1, keepdim=True)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight + self.bias


def test_handwritten_norms_are_fused_and_torch_norms_kept(monkeypatch):
    _, config = tokenizer_and_config(None, TEXTS, NAMES, SEQ)
    assert sum(isinstance(module, nn.LayerNorm) for module in on_meta(config).modules()) == 5
    made = BertForSequenceClassification(config)
    made.bert.embeddings.LayerNorm = WrittenOutNorm(config.hidden_size)
    monkeypatch.setattr(AutoModelForSequenceClassification, "from_config", lambda *_, **__: made)
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # that a CPU fuses none either
        assert isinstance(on_meta(config).bert.embeddings.LayerNorm, nn.LayerNorm)


def test_transformers_loads_an_export_with_equal_outputs(tmp_path):
    model, config, tokenizer = built(None)
    state = dt.compose_step(lambda model, batch: None, []).init(model, torch.optim.SGD(model.parameters(), lr=0.1))
    dt.save_sharded(tmp_path / "weights", state, scope="weights")
    folder = tmp_path / "export"
    for _ in range(2):  # the second time over existing files
        export(tmp_path / "weights", folder, config, tokenizer)
    theirs = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    words = AutoTokenizer.from_pretrained(folder)
    assert type(theirs) is BertForSequenceClassification
    assert theirs.config.id2label == {0: "ham", 1: "spam", 2: "eggs"}
    assert words(TEXTS)["input_ids"] == tokenizer(TEXTS)["input_ids"]
    given = words(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        assert torch.equal(theirs(**given).logits, model.eval()(**given).logits)
