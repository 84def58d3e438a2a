"""Models of transformers made from a configuration, with random weights, and their outputs for a text."""

from pathlib import Path

import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from dtrain.checkpoint.save import save_sharded
from dtrain.state import TrainState, init_state


def gpt2(seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    ends = {"bos_token_id": 0, "eos_token_id": 1}
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2, **ends)).eval()


def bert(seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return BertForMaskedLM(BertConfig(vocab_size=64, max_position_embeddings=16, **sizes)).eval()


MODELS = {"bert": bert, "gpt2": gpt2}
"""Both tie the output layer to the input embedding; BERT ties a bias, too."""
TIED = {
    "bert": {
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    "gpt2": {"lm_head.weight": "transformer.wte.weight"},
}


def state_of(model: nn.Module) -> TrainState:
    return init_state(model, torch.optim.AdamW(model.parameters()), seed=0)


def saved(model: nn.Module, root: Path) -> Path:
    """The root of a checkpoint of the model and its optimizer."""
    save_sharded(root, state_of(model))
    return root


def config_of(model: PreTrainedModel, folder: Path) -> Path:
    """The model's ``config.json``."""
    model.config.save_pretrained(folder)
    return folder / "config.json"


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(12).reshape(2, 6)).logits


def loaded(kind: type[PreTrainedModel], folder: Path) -> PreTrainedModel:
    """Return the model that ``from_pretrained`` loads from a folder without a warning."""
    model, complaints = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(complaints.values()), complaints
    return model
