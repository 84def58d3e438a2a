"""The example of a loop that makes its own data: its samples, its loss, learning, and kills between and inside rollouts."""

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torch import nn

import dtrain as dt
from example_runs import EXAMPLES, PATIENCE_S, ended, here, job, last_tensors, launched, ranks_of, wait_until
from helpers.gpt import GPT
from helpers.sorting import ASK, DIGITS, generate, prompts, roll_out, score
from train_grpo import CONFIG, grpo_loss

# Four updates a rollout: saves lie inside of rollouts, and one between two.
STEPS = ("--steps", "12", "--save-every", "2")
# Another number of ranks adds the same numbers of float32 in another order.
TOLERANCE = 1e-4


def test_score_is_the_share_of_digits_in_place():
    texts = torch.tensor([[3, 1, 2, 0, ASK, 0, 1, 2, 3], [5, 5, 1, 2, ASK, 1, 2, 5, 0], [9, 8, 7, 6, ASK, 9, 8, 7, 6]])
    assert score(texts).tolist() == [1.0, 0.75, 0.0]


class Counting(nn.Module):
    """Policy whose next token is the number of tokens so far, with the probability of one in two."""

    def forward(self, tokens, *, logits=True):
        return torch.nn.functional.one_hot(torch.full_like(tokens, tokens.shape[1]), 11).double() * torch.tensor(10.0).log()


def test_draws_choose_tokens_by_their_probability():
    model, asked = Counting(), prompts(torch.arange(3), "a")
    assert generate(model, asked)[0][0, DIGITS + 1 :].tolist() == [5, 6, 7, 8]
    # Of 20 parts the expected token has 10 and each other one 1.
    draws = torch.tensor([[0.0, 0.2499, 0.2501, 0.999], [0.249, 0.251, 0.74, 0.951]]).double()
    texts, log_probs = generate(model, asked[:2], draws)
    assert texts[:, DIGITS + 1 :].tolist() == [[0, 4, 5, 10], [4, 5, 7, 10]]
    chances = torch.tensor([[1, 1, 1, 1], [1, 1, 10, 1]]).double() / 20
    torch.testing.assert_close(log_probs, chances.log())


def test_sample_depends_on_its_number_and_not_on_the_rank():
    torch.manual_seed(0)
    model = GPT(CONFIG).double()

    def rows(*groups: int, rollout: int = 0) -> TensorDict:
        return roll_out(model, torch.tensor(groups), 4, rollout, seed=0, device=torch.device("cpu"))

    whole, part = rows(0, 1, 2, 3), rows(1, 3)
    assert part["number"].tolist() == [4, 5, 6, 7, 12, 13, 14, 15]
    assert torch.equal(part["texts"], whole["texts"][part["number"]])
    torch.testing.assert_close(part["advantage"], whole["advantage"][part["number"]], rtol=0, atol=1e-12)
    assert not torch.equal(rows(0, 1, 2, 3, rollout=1)["texts"], whole["texts"])
    of_group = whole["advantage"].view(4, 4)
    torch.testing.assert_close(of_group.sum(1), torch.zeros(4).double(), rtol=0, atol=1e-9)


def test_loss_clips_the_ratio_and_measures_the_distance_to_the_reference():
    torch.manual_seed(0)
    model = GPT(CONFIG).double()
    batch = roll_out(model, torch.arange(2), 4, 0, seed=0, device=torch.device("cpu"))
    batch["reference"], expected = batch["log_probs"].clone(), batch["advantage"].sum() * -DIGITS
    loss = grpo_loss(0.5)(model, batch)
    torch.testing.assert_close(loss.total, expected, rtol=0, atol=1e-9)
    assert loss.aux["kl"][0].item() == pytest.approx(0.0, abs=1e-9)
    # The policy has become twice as likely as at the rollout, and as the reference.
    far = {**batch, "log_probs": batch["log_probs"] - 0.6931471805599453, "advantage": torch.ones(8).double()}
    far["reference"] = far["log_probs"]
    loss = grpo_loss(0.5)(model, far)
    kl = 0.5 + 0.6931471805599453 - 1
    assert loss.total.item() == pytest.approx(8 * DIGITS * (0.5 * kl - 1.2), rel=1e-9)
    assert loss.aux["clipped"][0] == 8 * DIGITS


def numbers(out: Path) -> dict[int, dict[str, float]]:
    records = dt.loggers.read_jsonl(out / "metrics.jsonl")
    return {step: {name: value for name, value in record.items() if name != "time"} for step, record in records.items()}


def kill(out: Path, updates: int) -> None:
    """Start the example on two ranks, and kill a rank behind this number of updates."""
    command = [sys.executable, "-m", "dtrain", "launch", "-n", "2", str(EXAMPLES / "train_grpo.py"), "--out", str(out), *STEPS]
    with job(command, out.parent) as (process, mark):
        wait_until(
            lambda: (out / "metrics.jsonl").exists() and len(dt.loggers.read_jsonl(out / "metrics.jsonl")) >= updates,
            f"update {updates}",
        )
        os.kill(ranks_of(mark)[updates % 2], signal.SIGKILL)
        assert process.wait(timeout=PATIENCE_S) == 137


@pytest.mark.costly
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds the job's processes in /proc")
@pytest.mark.parametrize("updates", [3, pytest.param(4, marks=pytest.mark.slow), pytest.param(9, marks=pytest.mark.slow)])
def test_killed_run_ends_bit_equal_and_alike_on_one_rank(tmp_path, updates):
    launched("train_grpo.py", *STEPS, out=tmp_path / "whole")
    kill(tmp_path / "killed", updates)
    shutil.copytree(tmp_path / "killed", tmp_path / "other")
    launched("train_grpo.py", *STEPS, out=tmp_path / "killed")
    assert last_tensors(tmp_path / "killed") == last_tensors(tmp_path / "whole")
    assert numbers(tmp_path / "killed") == numbers(tmp_path / "whole")
    here("train_grpo.py", *STEPS, out=tmp_path / "other")
    first, second = numbers(tmp_path / "whole"), numbers(tmp_path / "other")
    assert first.keys() == second.keys() == set(range(1, 13))
    for step, record in first.items():
        assert record == pytest.approx(second[step], rel=TOLERANCE, abs=1e-5), step


@pytest.mark.slow
def test_policy_learns_to_sort(tmp_path):
    end = ended(launched("train_grpo.py", "--steps", "120", out=tmp_path / "out"))
    assert end.what == "held-out score"
    assert end.baseline < 0.2
    assert end.value > end.baseline + 0.3


@pytest.mark.slow
def test_runs_on_other_ranks_agree():
    report = dt.prove.prove(str(EXAMPLES / "train_grpo.py"), ["--steps", "8"])
    assert report.passed, report.text()
