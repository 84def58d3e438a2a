"""The example of experts with a balancing bias: equal active parameters, and equal results on other ranks after a kill."""

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import dtrain as dt
from example_runs import ended, here, launched
from helpers.experts import ExpertGPT, expert_loss, weigh
from helpers.gpt import GPT, GPTConfig
from train_moe import CONFIG, EXPERTS, TOP_K

# Other ranks add the same numbers of float32 in another order.
TOLERANCE = 1e-4
STEPS = ("--until", "8ba", "--save-every", "3ba", "--microbatch", "4")


def active_parameters(model: nn.Module) -> int:
    """Count the parameters that a row passes through, without routers."""
    total = sum(param.numel() for name, param in model.named_parameters() if "router" not in name)
    idle = sum(param.numel() * (EXPERTS - TOP_K) // EXPERTS for name, param in model.named_parameters() if ".experts." in name)
    return total - idle


def test_baseline_has_equal_active_parameters():
    assert active_parameters(ExpertGPT(CONFIG, EXPERTS, TOP_K)) == sum(param.numel() for param in GPT(CONFIG).parameters())


def test_one_expert_is_the_dense_model():
    """With one expert the gate is 1, so the same weights make the same function."""
    config = GPTConfig(n_layer=2, n_head=2, dim=8, max_seq=6, vocab=11)
    torch.manual_seed(0)
    dense, sparse = GPT(config).double(), ExpertGPT(config, 1, 1).double()
    weights = {name.replace("mlp_norm", "experts_norm"): value for name, value in dense.state_dict().items()}
    weights = {
        name.replace("mlp.", "experts.").replace(".weight", "") if ".mlp." in name else name: value
        for name, value in weights.items()
    }
    weights = {name: value[None] if ".experts." in name else value for name, value in weights.items()}
    missing, unexpected = sparse.load_state_dict(weights, strict=False)
    assert not unexpected
    assert all(".router." in name for name in missing)
    ids = torch.randint(11, (3, 6))
    hidden, routings = sparse(ids)
    torch.testing.assert_close(sparse.head(hidden), dense(ids), rtol=0.0, atol=1e-12)
    loss = expert_loss(sparse, {"input_ids": ids, "labels": ids})
    assert weigh({"labels": ids}) == {"loss": 18, "sequence": 3, "z": 18}
    assert {name: float(weight) for name, (_, weight) in loss.terms.items()} == {"sequence": 3, "z": 18}
    assert len(routings) == 2


def numbers(out: Path) -> dict[int, dict[str, float]]:
    records = dt.loggers.read_jsonl(out / "experts" / "metrics.jsonl")
    return {step: {name: value for name, value in record.items() if name != "time"} for step, record in records.items()}


def cut(whole: Path, out: Path, step: int) -> Path:
    """Return a copy of the run as a kill left it, whose last checkpoint is that of ``step``."""
    shutil.copytree(whole, out)
    for folder in (out / "experts" / "checkpoints").glob("step-*"):
        if int(folder.name.removeprefix("step-")) > step:
            shutil.rmtree(folder)
    return out


def biases(out: Path) -> dict[str, torch.Tensor]:
    model = ExpertGPT(CONFIG, EXPERTS, TOP_K)
    dt.load_weights_(model, out / "experts" / "checkpoints")
    return {name: buffer for name, buffer in model.named_buffers() if name.endswith((".bias", ".share"))}


@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_killed_run_ends_alike_on_other_ranks(tmp_path, n):
    printed = here("train_moe.py", *STEPS, out=tmp_path / "whole")
    assert ended(printed).what == "held-out loss"
    killed = cut(tmp_path / "whole", tmp_path / "killed", 6)
    again = launched("train_moe.py", *STEPS, out=killed, n=n)
    assert ended(again).value == pytest.approx(ended(printed).value, abs=2e-4)
    first, second = numbers(tmp_path / "whole"), numbers(killed)
    assert first.keys() == second.keys() == set(range(1, 9))
    for step, record in first.items():
        assert record == pytest.approx(second[step], rel=TOLERANCE, abs=1e-9), step
    expected, found = biases(tmp_path / "whole"), biases(killed)
    assert max(bias.abs().max() for name, bias in expected.items() if name.endswith("bias")) > 0.02
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0.0, atol=1e-6), name


@pytest.mark.slow
def test_experts_learn_as_the_dense_model_and_the_bias_balances(tmp_path):
    """Each expert has seen a quarter of the bytes, so experts do not win in so short a run."""
    printed = launched("train_moe.py", "--until", "100ba", out=tmp_path / "out")
    end = ended(printed)
    assert end.value < 1.03 * end.baseline, printed
    launched("train_moe.py", "--until", "100ba", "--rate", "0", out=tmp_path / "free")
    balanced, free = (numbers(tmp_path / name)[100]["max_violation"] for name in ("out", "free"))
    assert balanced < 0.5 * free
