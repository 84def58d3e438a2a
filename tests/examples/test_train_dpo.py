"""The example of a policy beside its frozen reference: its pairs, learning, and exact resumes."""

import math
import shutil

import pytest
import torch
from torch import nn

import dtrain as dt
from example_runs import ended, launched
from helpers.preferences import HELD_OUT_EVERY, log_probability, pairs_in, read_pairs
from train_dpo import LENGTH, PROMPT, dpo_loss

SOURCE = b'''import os

def first(a, b):
    """Say which."""
    return a if a < b else b

class C:
    async def second(self):
        """Two lines,

        and an empty one.
        """

        self.x = 1
        return self

def bare(x):
    return x

def only_told(x):
    """There is no body to be left."""

def escaped(x):
    """A \\ in it."""
    return x
'''


def test_pairs_share_a_prompt_and_differ_by_the_docstring():
    first, second = pairs_in(SOURCE, prompt=8, length=24)
    assert first == b'(a, b):\n    """Say which' + b"(a, b):\n    return a if "
    assert second == b'(self):\n        """Two l' + b"(self):\n        self.x ="


def test_functions_near_a_text_end_are_excluded():
    assert pairs_in(SOURCE, prompt=40, length=50) == pairs_in(SOURCE, prompt=40, length=50)[:1]
    assert pairs_in(SOURCE[:60], prompt=8, length=60) == []


def test_held_out_set_is_whole_files_without_duplicates(tmp_path):
    files = [tmp_path / f"{number}.py" for number in range(2 * HELD_OUT_EVERY)]
    for number, file in enumerate(files):
        file.write_bytes(SOURCE.replace(b"first(a", b"first(a%d" % number))
    pairs = read_pairs(16, 32, files)
    assert len(pairs.text) == sum(len(file.read_bytes()) for file in files) - sum(
        len(file.read_bytes()) for file in files[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    )
    told = {bytes(row.tolist()) for row in pairs.held_out["chosen"]}
    assert told == {b'f first(a9, b):\n    """Say which', b' first(a19, b):\n    """Say which'}
    assert len(pairs.held_out) == 2, "the second function is the same in every file, so it is trained on"
    assert len(pairs.train) == 2 * HELD_OUT_EVERY - 2 + 1
    assert torch.equal(pairs.train["chosen"][:, :16], pairs.train["rejected"][:, :16])


def test_files_without_pairs_are_refused(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match=r"1 files have 0 pairs to train on and 0 to test with; give more files"):
        read_pairs(8, 16, [tmp_path / "a.py"])


class Constant(nn.Module):
    """The same distribution over two bytes everywhere."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor([math.log(p), math.log(1 - p)]))

    def forward(self, x):
        return self.logits.expand(*x.shape, 2)


def test_log_probability_covers_the_tokens_after_the_prompt():
    texts = torch.tensor([[1, 1, 0, 0, 1], [0, 1, 1, 1, 1]])
    log_probs = log_probability(Constant(0.75), texts, 2)
    assert log_probs.tolist() == pytest.approx([2 * math.log(0.75) + math.log(0.25), 3 * math.log(0.25)])


def test_loss_matches_the_paper():
    """-log sigmoid(beta * (change of the chosen text - change of the rejected one)), which is log 2 where nothing has moved."""
    chosen = torch.zeros(3, LENGTH, dtype=torch.int64)
    batch = {"chosen": chosen, "rejected": chosen + (torch.arange(LENGTH) >= PROMPT)}
    n, policy, reference = LENGTH - PROMPT, Constant(0.6), Constant(0.5)
    loss = dpo_loss(reference, 0.1)(policy, batch)
    margin = 0.1 * n * (math.log(0.6 / 0.5) - math.log(0.4 / 0.5))
    assert loss.total.item() == pytest.approx(3 * math.log1p(math.exp(-margin)), rel=1e-5)
    assert loss.weight == 3
    assert {name: (float(a), b) for name, (a, b) in loss.aux.items() if name != "nats"} == {"right": (3, 3), "moved": (3, 3)}
    loss.total.backward()
    assert policy.logits.grad.abs().sum() > 0
    assert reference.logits.grad is None
    still = dpo_loss(reference, 0.1)(reference, batch)
    assert still.total.item() == pytest.approx(3 * math.log(2), rel=1e-5)
    alone = dpo_loss(None, 0.1)(policy, batch)
    assert alone.total.item() == pytest.approx(3 * math.log1p(math.exp(-0.1 * n * math.log(0.6 / 0.4))), rel=1e-5)


@pytest.mark.slow
def test_short_run_learns_the_preference(tmp_path):
    printed = launched("train_dpo.py", "--read", "30ba", "--until", "20ba", out=tmp_path / "run")
    ending = ended(printed)
    assert ending.what.endswith("held-out preference accuracy")
    assert ending.value > max(ending.baseline + 0.2, 0.6), printed
    moved = dt.loggers.read_jsonl(tmp_path / "run" / "policy" / "metrics.jsonl")
    assert moved[20]["loss"] < math.log(2) / 2, "log 2 is where nothing has moved"
    assert [checkpoint.step for checkpoint in dt.checkpoint.list_steps(tmp_path / "run" / "reference" / "checkpoints")] == [30]


@pytest.mark.slow
def test_complete_run_writes_docstrings_and_resumed_run_matches_it(tmp_path):
    printed = launched("train_dpo.py", out=tmp_path / "whole")
    ending = ended(printed)
    assert ending.value > 0.85
    assert ending.baseline < 0.5
    assert "the reference writes 0 with a docstring, the policy 16" in printed
    # Killed after the save of step 50 in either part: the newer checkpoint and the lines after it are not there yet.
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    for name, left in (("policy", "step-00000100"), ("reference", "step-00000300")):
        shutil.rmtree(tmp_path / "parts" / name / "checkpoints" / left)
    again = launched("train_dpo.py", out=tmp_path / "parts")
    assert again.splitlines()[-4:] == printed.splitlines()[-4:]
    records = [dt.loggers.read_jsonl(tmp_path / run / "policy" / "metrics.jsonl") for run in ("whole", "parts")]
    for record in records:
        for numbers in record.values():
            numbers.pop("time")
    assert records[0] == records[1]
