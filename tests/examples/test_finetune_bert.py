"""A model of another library through the public API: its weights, its outputs, and a run that is resumed."""

import contextlib
import io
import json
import shutil
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
)
from transformers.models.bert.modeling_bert import BertLayer

import dtrain as dt
from example_runs import EXAMPLES, PATIENCE_S, ended, here, last_tensors, launched
from finetune_bert import main
from helpers.classifier import tokenizer_and_config
from helpers.docstrings import read_docstrings

SCRIPT = EXAMPLES / "finetune_bert.py"
ROUNDED = 6e-3  # two of 388 texts: logits of a padded batch are others in the last bits, and four digits are printed
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_labels": 8}

# Gathered weights are the same bits, and so are the kernels; the mask may make another of them be taken.
TOLERANCE = 1e-6


def config(vocab_size: int = 100) -> BertConfig:
    return BertConfig(vocab_size=vocab_size, max_position_embeddings=64, **SIZES)


KINDS = {"classifier": BertForSequenceClassification, "masked": BertForMaskedLM}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Folders from ``save_pretrained``: one file for the model, several files for a model with BERT's pretraining head."""
    torch.manual_seed(3)
    root = tmp_path_factory.mktemp("pretrained")
    BertForSequenceClassification(config()).save_pretrained(root / "classifier")
    BertForMaskedLM(config()).save_pretrained(root / "masked", max_shard_size="10KB")
    assert len(list((root / "masked").glob("*.safetensors"))) > 1
    return {folder.name: folder for folder in root.iterdir()}


def inputs() -> dict[str, torch.Tensor]:
    ids = torch.randint(5, 100, (3, 12), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(12) < torch.tensor([[12], [7], [1]])).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def sharded_bert(strategy: str, kind: type[nn.Module] = BertForSequenceClassification) -> nn.Module:
    with torch.device("meta"):
        model = kind(config())
    model = dt.shard_model(model, dt.build_mesh(), strategy=strategy, blocks=(BertLayer,))
    return dt.materialize(model, seed=0, init=model._init_weights)


def load_and_compare(folder: str, strategy: str) -> list:
    """Names whose values are not those of ``from_pretrained`` in this process, and the largest difference of a logit."""
    kind = KINDS[Path(folder).name]
    model = sharded_bert(strategy, kind)
    done = dt.load_weights_(model, folder)
    reference = kind.from_pretrained(folder).eval()
    expected = reference.state_dict()
    with dt.shard.unshard_params(model):
        unequal = [name for name, param in model.named_parameters() if not torch.equal(param, expected[name])]
    with dt.eval_mode(model):
        logits = model(**inputs()).logits
    with torch.no_grad():
        difference = float((logits - reference(**inputs()).logits).abs().max())
    return [len(done.loaded) == len(list(reference.parameters())), unequal, difference]


@pytest.mark.parametrize("strategy", ["full_shard", "replicate"])
@pytest.mark.parametrize("kind", ["classifier", "masked"])
def test_loaded_weights_and_logits_match_the_unsharded_model(folders, ranks, kind, strategy):
    """The masked model has tied weights, which its files hold once."""
    for complete, unequal, difference in ranks(2).run(load_and_compare, str(folders[kind]), strategy):
        assert complete
        assert unequal == []
        assert difference <= TOLERANCE


def load_encoder(folder: str) -> list:
    model = sharded_bert("full_shard")
    rename = lambda name: None if name.startswith("cls.") else name  # noqa: E731
    done = dt.load_weights_(model, folder, rename=rename, ignore=["classifier.*", "bert.pooler.**"])
    expected = BertForMaskedLM.from_pretrained(folder).state_dict()
    with dt.shard.unshard_params(model):
        params = dict(model.named_parameters())
        unequal = [name for name in done.loaded if not torch.equal(params[name], expected[name])]
    return [len(done.loaded), unequal, sorted(done.kept), sorted(done.left_out)]


def test_encoder_is_loaded_from_a_model_with_a_different_head(folders, ranks):
    for loaded, unequal, kept, left_out in ranks(2).run(load_encoder, str(folders["masked"])):
        assert loaded == 5 + 16 * SIZES["num_hidden_layers"]
        assert unequal == []
        assert kept == ["bert.pooler.dense.bias", "bert.pooler.dense.weight", "classifier.bias", "classifier.weight"]
        assert "cls.predictions.bias" in left_out


def initial_weights(strategy: str) -> dict[str, list]:
    model = sharded_bert(strategy)
    with dt.shard.unshard_params(model):
        statistics = {
            name: [float(p.std(correction=0)), float(p.mean()), float(p.sum())] for name, p in model.named_parameters()
        }
        ids = model.bert.embeddings.position_ids.tolist()
    return {"parameters": statistics, "position_ids": ids}


def test_initial_weights_match_transformers_on_any_rank_count(ranks):
    with dt.init_dist():
        one = initial_weights("full_shard")
    assert ranks(2).run(initial_weights, "full_shard") == [one, one]
    assert one["position_ids"] == [list(range(64))]
    for name, (std, mean, _) in one["parameters"].items():
        if "LayerNorm.weight" in name:
            assert (std, mean) == (0.0, 1.0), name
        elif name.endswith("bias"):
            assert (std, mean) == (0.0, 0.0), name
        else:
            assert 0.01 < std < 0.03, f"{name}: BERT draws from a normal distribution of 0.02"


def table(folder: Path) -> Path:
    """Texts of which some words tell the class, in no order."""
    path = folder / "mail.jsonl"
    words = [["win", "free", "car"], ["lunch", "noon", "thanks"]]
    rows = [
        {"text": f"{words[number % 2][number % 3]} {number} and so on", "label": ["spam", "ham"][number % 2]}
        for number in range(60)
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def pretrained(folder: Path) -> Path:
    """A tiny BERT with a tokenizer that has room for the words of the table."""
    torch.manual_seed(4)
    BertForSequenceClassification(config(vocab_size=200)).save_pretrained(folder / "pretrained")
    texts = [json.loads(line)["text"] for line in table(folder).read_text().splitlines()]
    tokenizer_and_config(None, texts, ["spam", "ham"], 16)[0].save_pretrained(folder / "pretrained")
    return folder / "pretrained"


def run_here(folder: Path, *options: str) -> str:
    """Return this rank's output of a run of the script in this process, on a tiny model and table; on rank 0 the ending."""
    sys.argv = ["finetune_bert.py", "--model", str(folder / "pretrained"), "--data", str(folder / "mail.jsonl")]
    sys.argv += ["--out", str(folder / "run"), "--batch", "4", "--seq", "16", "--workers", "0", *options]
    with contextlib.redirect_stdout(io.StringIO()) as out, warnings.catch_warnings(action="ignore"):  # a CPU has no peak
        main()
    return out.getvalue()


def logged(out: Path, name: str) -> dict[int, float]:
    return {step: record[name] for step, record in dt.loggers.read_jsonl(out / "metrics.jsonl").items() if name in record}


def steps_of(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").glob("step-*"))


def run_twice(folder: str) -> dict[str, bool]:
    """Compare the end of a run with the end of the same run after its last epoch was lost."""
    out = Path(folder) / "run"
    how = ["--lr", "1e-3", "--precision", "bf16", "--batch", "8", "--microbatch", "2", "--spare-norms"]
    seen = []
    for _ in range(2):
        printed = run_here(Path(folder), *how)
        seen.append((printed, last_tensors(out), logged(out, "loss"), logged(out, "held_out/loss")))
        kept = steps_of(out)
        if len(dt.dist.all_gather_json(kept)) and dist.get_rank() == 0:
            shutil.rmtree(out / "checkpoints" / kept[-1])
            (out / "metrics.jsonl").unlink()
        dt.dist.all_gather_json("removed")
    (first, shards, loss, judged), (second, shards_again, loss_again, judged_again) = seen
    return {
        "prints the same": first == second,
        "ends as a run does": dist.get_rank() != 0 or ended(first).what.endswith("held-out accuracy"),
        "keeps two": kept == ["step-00000012", "step-00000018"],
        "logs each epoch": list(judged) == [6, 12, 18],
        "does the last epoch again": judged_again == {18: judged[18]} and loss_again == {18: loss[18]},
        "has the same weights and optimizer": shards == shards_again,
    }


def test_a_run_from_saved_weights_resumes_bit_for_bit(tmp_path, ranks):
    """The run uses bf16, microbatches of 2, two groups of parameters, and keeps two checkpoints."""
    pretrained(tmp_path)
    for checks in ranks(2).run(run_twice, str(tmp_path), timeout_s=PATIENCE_S):
        assert [what for what, holds in checks.items() if not holds] == []


def test_run_without_improvement_stops_early_and_stays_stopped(tmp_path):
    """The learning rate changes nothing. The second start trains no step, the third start has more patience."""
    pretrained(tmp_path)
    out = tmp_path / "run"
    how = [
        "--until",
        "5ep",
        "--lr",
        "1e-30",
        "--weight-decay",
        "0",
        "--microbatch",
        "0",
        "--without",
        "recompute",
        "warmup",
        "clip",
    ]
    first = run_here(tmp_path, *how)
    losses = logged(out, "held_out/loss")
    assert list(losses) == [12, 24, 36], "two epochs after the first, which is the best"
    assert len(set(losses.values())) == 1
    assert run_here(tmp_path, *how) == first
    assert logged(out, "held_out/loss") == losses
    run_here(tmp_path, *how, "--patience", "5ep")
    assert list(logged(out, "held_out/loss")) == [12, 24, 36, 48, 60]


def held_out_accuracy(folder: Path) -> float:
    """Return the accuracy of plain transformers on the held-out docstrings, for a folder that the script has exported."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    _, held_out = read_docstrings().parts()
    given = tokenizer(held_out.texts, truncation=True, max_length=128, padding=True, return_tensors="pt")
    names = [model.config.id2label[number] for number in range(len(held_out.names))]
    with torch.no_grad():
        predicted = model(**given).logits.argmax(-1).tolist()
    right = sum(names[number] == held_out.names[label] for number, label in zip(predicted, held_out.labels, strict=True))
    return right / len(predicted)


@pytest.mark.slow
@pytest.mark.parametrize(("until", "better"), [("40ba", 1.5), ("3ep", 3.0)], ids=["short", "whole"])
def test_trained_model_and_its_export_exceed_the_majority_baseline(tmp_path, until, better):
    out = tmp_path / "run"
    end = ended(launched("finetune_bert.py", "--until", until, out=out))
    assert end.what.endswith("held-out accuracy")
    assert 0.1 < end.baseline < 0.3
    assert end.value > better * end.baseline
    assert held_out_accuracy(out / "export") == pytest.approx(end.value, abs=ROUNDED)
    for name in ("speed/samples_per_s", "speed/tokens_per_s", "speed/flops_per_s", "lr", "memory/rss_bytes"):
        assert logged(out, name), f"{name} is in no record"
    assert "held_out/accuracy" in (out / "run.log").read_text()
    assert len(steps_of(out)) == 2


def test_invalid_table_raises_one_line_without_traceback(tmp_path):
    wrong = tmp_path / "mail.csv"
    wrong.write_text("body,label\nx,1\n")
    with pytest.raises(SystemExit) as end:
        here("finetune_bert.py", "--data", str(wrong), out=tmp_path / "run")
    assert end.value.code == f"{wrong}: row 1 has no column 'text'; its columns are body, label: rename one of them"


def test_help_shows_the_run_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--help"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    printed = capsys.readouterr().out
    assert "dtrain launch -n 2 examples/finetune_bert.py" in printed
    assert all(default in printed for default in ("(3ep)", "(64)", "(8)", "(128)", "(0.01)", "(2ep)", "(4)", "(42)", "2e-5"))
