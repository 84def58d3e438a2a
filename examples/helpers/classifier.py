"""A text classifier of the transformers library: a new model of a size for a laptop, or a model with stored weights.

The weights of a folder go straight into shards: a rank reads the bytes of its own part only, and builds no whole model.
"""

import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, BertConfig, PreTrainedTokenizerFast
from transformers.modeling_layers import GradientCheckpointingLayer

import dtrain as dt
from helpers.docstrings import build_tokenizer

Layer = GradientCheckpointingLayer  # the base of every layer of an encoder in transformers
SIZES = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 2}  # of a new model

_WANTED = ("*.safetensors", "*.json", "*.txt", "*.model")  # of a repository of the hub; the same weights come in other formats
_VOCABULARIES = ("tokenizer.json", "vocab.txt", "vocab.json", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model")
_OLD_NAMES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}  # as the first BERTs have them


def folder_of(name: str | None) -> Path | None:
    """Return the folder of the model: a folder, or a name on the hub, fetched once per node; None for a new model.

    Collective: as ``local_rank_zero_first``.

    Raises:
        SystemExit: no such folder, and no such model on the hub; in one line.
    """
    if name is None or Path(name).is_dir():
        return None if name is None else Path(name)
    with dt.dist.local_rank_zero_first("--model"):
        try:
            return Path(snapshot_download(name, allow_patterns=list(_WANTED), ignore_patterns="*/*"))
        except (OSError, ValueError) as error:  # no such name, no network, a name that cannot be one
            reason = str(error).strip().splitlines()[0]
            raise SystemExit(f"--model {name}: neither a folder here nor to be had from the hub: {reason}") from None


def tokenizer_and_config(folder: Path | None, texts: Sequence[str], names: Sequence[str], seq: int) -> tuple[Any, Any]:
    """Return the folder's tokenizer and config, or new ones: a WordPiece tokenizer of the texts, a small BERT; and class names.

    Raises:
        SystemExit: a file of the folder is missing, or the files do not fit each other, or ``seq``; in one line.
    """
    classes = {"id2label": dict(enumerate(names)), "label2id": {name: number for number, name in enumerate(names)}}
    if folder is None:
        words = build_tokenizer(texts)
        special = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=seq, **special)
        return tokenizer, BertConfig(vocab_size=len(tokenizer), max_position_embeddings=max(seq, 128), **SIZES, **classes)
    if not (folder / "config.json").exists():
        raise SystemExit(f"{folder}: there is no config.json; give a folder that save_pretrained has written")
    if not any((folder / name).exists() for name in _VOCABULARIES):
        raise SystemExit(f"{folder}: there is no tokenizer; write {_VOCABULARIES[0]} there with tokenizer.save_pretrained")
    tokenizer, config = AutoTokenizer.from_pretrained(folder), AutoConfig.from_pretrained(folder, **classes)
    if len(tokenizer) > config.vocab_size:
        raise SystemExit(f"{folder}: {len(tokenizer)} words, the model knows {config.vocab_size}; put its own tokenizer there")
    if seq > (most := getattr(config, "max_position_embeddings", seq)):
        raise SystemExit(f"{folder}: --seq {seq}, but the model has {most} positions; take at most as many")
    return tokenizer, config


def load_into_(model: nn.Module, folder: Path | None, config: Any) -> dt.checkpoint.LoadWeightsResult | None:
    """Copy the stored weights into ``model``; a head for other classes, or for another task, is left out.

    Args:
        model: sharded or plain, of transformers.
        folder: as ``save_pretrained`` writes it, of the whole model or of its encoder alone; None leaves the model as it is.
        config: that the model was made of.

    Returns:
        The loaded names, the names that keep their initial values (a new head), and the left-out names.

    Mutates: ``model``. Collective: as ``load_weights_``, whose errors it raises.
    """
    if folder is None:
        return None
    encoder, own = f"{model.base_model_prefix}.", set(model.state_dict())
    head = {name for name in own if not name.startswith(encoder)}
    stored = AutoConfig.from_pretrained(folder)
    same_classes = stored.num_labels == config.num_labels

    def place(name: str) -> str | None:
        for old, new in _OLD_NAMES.items():
            name = name.replace(old, new)
        own_name = next((candidate for candidate in (name, encoder + name) if candidate in own), None)
        return own_name if same_classes or own_name not in head else None

    may_be_new = [name for name in own if name in head or name.startswith(f"{encoder}pooler.")]
    return dt.load_weights_(model, folder, rename=place, ignore=sorted(may_be_new))


def on_meta(config: Any) -> nn.Module:
    """Build a classifier without storage, with torch's fused norms in the place of hand-written norms.

    Most models use torch's norms already; the warning that no norm was replaced is ignored.
    """
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    config.architectures = [type(model).__name__]
    with warnings.catch_warnings(action="ignore"):
        return dt.surgery.fused_layer_norm(model)


def export(step: Path, folder: Path, config: Any, tokenizer: Any) -> None:
    """Write the weights of a checkpoint as a folder that ``from_pretrained`` loads: with config and tokenizer. On one rank.

    Mutates: ``folder``, which is replaced.
    """
    shutil.rmtree(folder, ignore_errors=True)
    dt.checkpoint.convert(step, folder, to="hf")
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
