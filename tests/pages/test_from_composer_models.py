"""docs/from_composer_models.md: every row of the table runs on two ranks, and the tutorial's loop equals one by hand."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import dtrain as dt
from dtrain.dist.init import get_dist_info
from pages.composer_models import exact_match, finetune
from pages.test_ways_in import _CODE, table

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # read by peft
PAGE = "from_composer_models.md"
TOLERANCE = 1e-12  # of float64
SAMPLES, WORDS = 56, ["[PAD]", "[EOS]", "red", "green", "blue"]


def classifier() -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(vocab_size=30, max_position_embeddings=16, **sizes, **dropout)).double()


def sentences(seed: int, count: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        length = int(torch.randint(2, 10, (), generator=generator))
        ids = torch.randint(1, 30, (length,), generator=generator)
        made.append({"input_ids": ids, "labels": int(ids.sum() % 2)})
    return made


def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    ids = [sample["input_ids"] for sample in samples]
    return {
        "input_ids": nn.utils.rnn.pad_sequence(ids, batch_first=True),
        "attention_mask": nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
        "labels": torch.tensor([sample["labels"] for sample in samples]),
    }


def finetune_by_hand(model: PreTrainedModel) -> tuple[list[float], float, float]:
    """The tutorial's loop on torch and transformers, in one process; only the order of the samples is dtrain's."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5, betas=(0.9, 0.98), eps=1e-6, weight_decay=3e-6)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0, total_iters=150)
    losses = []
    for batch in dt.build_loader(sentences(1, SAMPLES), global_batch_size=16, seed=17, collate=collate).until("1ep"):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    batch = collate(sentences(2, 21))
    with torch.no_grad():
        logits = model.eval()(**batch).logits
    hits = (logits.argmax(-1) == batch["labels"]).double().mean().item()
    return losses, F.cross_entropy(logits, batch["labels"]).item(), hits


def finetuned() -> list[Any]:
    state, losses, valid = finetune(classifier(), sentences(1, SAMPLES), sentences(2, 21), collate)
    return [losses, valid["loss"], valid["accuracy"], {name: tensor.tolist() for name, tensor in dt.full_params(state)}]


def test_the_tutorials_loop_has_the_losses_of_a_loop_by_hand(ranks) -> None:
    model = classifier()
    losses, loss, accuracy = finetune_by_hand(model)
    assert len(losses) == 4
    for given, given_loss, given_accuracy, params in ranks(2).run(finetuned):
        assert given == pytest.approx(losses, rel=TOLERANCE)
        assert given_loss == pytest.approx(loss, rel=TOLERANCE)
        assert given_accuracy == pytest.approx(accuracy, rel=TOLERANCE)
        for name, param in model.named_parameters():
            torch.testing.assert_close(torch.tensor(params[name], dtype=param.dtype), param.detach(), rtol=1e-9, atol=1e-12)


def language_model() -> PreTrainedModel:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    ends = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS) - 1, num_hidden_layers=2, **sizes, **ends))


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[PAD]"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", eos_token="[EOS]")


def loss_with_accuracy(model: nn.Module, batch: dict[str, torch.Tensor]) -> dt.LossSum:
    logits, labels = model(input_ids=batch["input_ids"]).logits[:, :-1], batch["labels"][:, 1:]
    loss = dt.cross_entropy(logits, labels)
    hits = (logits.argmax(-1) == labels) & (labels != -100)
    return dt.LossSum(total=loss.total, weight=loss.weight, aux={"accuracy": (hits.sum().float(), loss.weight)})


def dice(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    chances, labels = model(batch["image"]).softmax(-1), F.one_hot(batch["label"], 3)
    return 1 - 2 * (chances * labels).sum() / (chances.sum() + labels.sum())


def given(info: dt.dist.DistInfo) -> dict[str, Any]:
    """Return the names that the rows assume. Ranks have other batches, tasks and prompts."""
    rank = info.rank
    with torch.device("meta"):
        model = language_model()
    ids = torch.tensor([[1, 2, 3, 2], [3, 1, 1, 2]])[: 2 - rank]
    tasks = [
        {"input_ids": ids[:1, : n + 1], "attention_mask": torch.ones(1, n + 1), "answers": ids[:1, :2]} for n in range(3 - rank)
    ]
    names: dict[str, Any] = {"model": model, "init": model._init_weights, "mesh": dt.build_mesh(), "tokenizer": tokenizer()}
    names |= {"batch": {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}, "tasks": tasks}
    names |= {"prompt": {"input_ids": ids[:, : rank + 1], "attention_mask": torch.ones_like(ids[:, : rank + 1])}}
    names |= {"lora": peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")}
    names |= {"hits": torch.tensor(rank + 1.0), "predicted": torch.tensor(3.0), "actual": torch.tensor(2.0 + rank)}
    names |= {"classifier": nn.Linear(4, 3), "images": {"image": torch.ones(2, 4), "label": torch.tensor([0, 2])}}
    names |= {"scores": torch.zeros(2, 3), "targets": torch.tensor([[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]])}
    names |= {"loss_with_accuracy": loss_with_accuracy, "exact_match": exact_match, "dice": dice, "info": info, "F": F}
    names |= {"dt": dt, "torch": torch, "math": math, "peft": peft}
    return names | {"AutoTokenizer": AutoTokenizer, "LlamaDecoderLayer": LlamaDecoderLayer}


def run_rows(folder: str) -> dict[str, Any]:
    names = given(get_dist_info())
    with contextlib.chdir(folder):
        for row in table(PAGE, "Row by row"):
            (code,) = _CODE.findall(row[2])
            try:
                exec(code, names)
            except Exception as error:
                raise AssertionError(f"{row[0]}: {code}") from error
    numbers = {
        key: float(torch.as_tensor(names[key]).detach()) for key in ("nats", "perplexity", "accuracy", "f1", "wrong", "mean")
    }
    return numbers | {"loss": names["valid"]["loss"], "tokens": tuple(names["tokens"].shape), "kept": len(names["done"].kept)}


def test_every_row_runs_on_two_ranks(ranks, tmp_path: Path) -> None:
    assert len(table(PAGE, "Row by row")) >= 20
    language_model().save_pretrained(tmp_path / "base")
    first, second = ranks(2).run(run_rows, str(tmp_path))
    shared = ("nats", "perplexity", "accuracy", "f1", "wrong", "loss")
    assert {key: first[key] for key in shared} == {key: second[key] for key in shared}
    assert first["nats"] == pytest.approx(first["loss"], rel=1e-5)
    assert first["perplexity"] == pytest.approx(math.exp(first["nats"]))
    assert first["f1"] == pytest.approx(2 * 3 / 11)
    assert (first["kept"], first["tokens"][0], second["tokens"][0]) == (8, 2, 1)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.get_input_embeddings().num_embeddings == len(WORDS)
    assert AutoTokenizer.from_pretrained(tmp_path / "merged")("blue")["input_ids"] == [4]
