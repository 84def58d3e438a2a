"""A model of another library through the public API: its weights, its outputs, and a run that is resumed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification
from transformers.models.bert.modeling_bert import BertLayer

import dtrain as dt
from finetune_bert import main, tokenizer_and_config

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "finetune_bert.py"
PATIENCE_S = 300  # for anything that takes seconds: the machine may be busy
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_labels": 8}

# Gathered weights are the same bits, and so are the kernels; the mask may make another of them be taken.
TOLERANCE = 1e-6


def config(vocab_size: int = 100) -> BertConfig:
    return BertConfig(vocab_size=vocab_size, max_position_embeddings=64, **SIZES)


KINDS = {"classifier": BertForSequenceClassification, "masked": BertForMaskedLM}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """What ``save_pretrained`` writes: one file for the model itself, several for one with BERT's pretraining head."""
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
    with dt.unsharded(model):
        unequal = [name for name, param in model.named_parameters() if not torch.equal(param, expected[name])]
    with dt.evaluating(model):
        logits = model(**inputs()).logits
    with torch.no_grad():
        difference = float((logits - reference(**inputs()).logits).abs().max())
    return [len(done.loaded) == len(list(reference.parameters())), unequal, difference]


@pytest.mark.parametrize("strategy", ["full_shard", "replicate"])
@pytest.mark.parametrize("kind", ["classifier", "masked"])
def test_loaded_weights_and_logits_are_those_of_the_unsharded_model(folders, ranks, kind, strategy):
    """The masked one has tied weights, which its files hold once."""
    for complete, unequal, difference in ranks(2).run(load_and_compare, str(folders[kind]), strategy):
        assert complete
        assert unequal == []
        assert difference <= TOLERANCE


def load_encoder(folder: str) -> list:
    model = sharded_bert("full_shard")
    rename = lambda name: None if name.startswith("cls.") else name  # noqa: E731
    done = dt.load_weights_(model, folder, rename=rename, missing=["classifier.*", "bert.pooler.**"])
    expected = BertForMaskedLM.from_pretrained(folder).state_dict()
    with dt.unsharded(model):
        found = dict(model.named_parameters())
        unequal = [name for name in done.loaded if not torch.equal(found[name], expected[name])]
    return [len(done.loaded), unequal, sorted(done.kept), sorted(done.left_out)]


def test_the_encoder_is_taken_from_a_model_with_another_head(folders, ranks):
    for loaded, unequal, kept, left_out in ranks(2).run(load_encoder, str(folders["masked"])):
        assert loaded == 5 + 16 * SIZES["num_hidden_layers"]
        assert unequal == []
        assert kept == ["bert.pooler.dense.bias", "bert.pooler.dense.weight", "classifier.bias", "classifier.weight"]
        assert "cls.predictions.bias" in left_out


def initial_weights(strategy: str) -> dict[str, list]:
    model = sharded_bert(strategy)
    with dt.unsharded(model):
        found = {name: [float(p.std(correction=0)), float(p.mean()), float(p.sum())] for name, p in model.named_parameters()}
        ids = model.bert.embeddings.position_ids.tolist()
    return {"parameters": found, "position_ids": ids}


def test_initial_weights_are_those_of_the_library_and_do_not_depend_on_the_ranks(ranks):
    one, two = ranks(1).run(initial_weights, "full_shard")[0], ranks(2).run(initial_weights, "full_shard")[0]
    assert one == two
    assert one["position_ids"] == [list(range(64))]
    for name, (std, mean, _) in one["parameters"].items():
        if "LayerNorm.weight" in name:
            assert (std, mean) == (0.0, 1.0), name
        elif name.endswith("bias"):
            assert (std, mean) == (0.0, 0.0), name
        else:
            assert 0.01 < std < 0.03, f"{name}: BERT draws from a normal distribution of 0.02"


def environment() -> dict[str, str]:
    """With one thread per process, and without the network for the other library."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def run(*launcher: str, out: Path, folder: Path) -> str:
    arguments = ["--out", str(out), "--weights", str(folder), "--until", "6ba", "--save-every", "3ba"]
    done = subprocess.run(
        [sys.executable, *launcher, str(SCRIPT), *arguments],
        cwd=out.parent, capture_output=True, text=True, timeout=PATIENCE_S, env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def last_shards(out: Path) -> dict[str, bytes]:
    folder = dt.latest_checkpoint(out / "checkpoints")
    assert folder is not None
    files = {path.name: load_file(path) for path in folder.glob("*.safetensors")}
    return {f"{file} {key}": tensor.numpy().tobytes() for file, tensors in files.items() for key, tensor in tensors.items()}


def test_a_run_from_saved_weights_resumes_bit_for_bit(tmp_path):
    torch.manual_seed(4)
    folder = tmp_path / "pretrained"
    BertForSequenceClassification(config(vocab_size=4000)).save_pretrained(folder)  # room for the example's vocabulary
    launch = ["-m", "dtrain", "launch", "-n", "2"]
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    assert "held-out loss" in run(*launch, out=straight, folder=folder)
    shutil.copytree(straight / "checkpoints" / "step-00000003", resumed / "checkpoints" / "step-00000003")
    run(*launch, out=resumed, folder=folder)
    losses = {step: record["loss"] for step, record in dt.read_jsonl(straight / "metrics.jsonl").items()}
    again = {step: record["loss"] for step, record in dt.read_jsonl(resumed / "metrics.jsonl").items()}
    assert list(losses) == [1, 2, 3, 4, 5, 6]
    assert again == {step: losses[step] for step in (4, 5, 6)}
    assert last_shards(resumed) == last_shards(straight)


def test_a_vocabulary_that_is_larger_than_the_models_is_refused(folders):
    with pytest.raises(SystemExit, match=r"classifier: \d+ words, the model knows 100; put its tokenizer.json there"):
        tokenizer_and_config(folders["classifier"], [f"word{at}" for at in range(100)])


def test_help_says_how_to_run_it(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--help"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    assert "dtrain launch -n 2 examples/finetune_bert.py" in capsys.readouterr().out
