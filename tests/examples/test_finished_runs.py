"""A finished run that is started again trains no step: it evaluates and reports, as the first time.

``test_train_custom.py`` has this test for the shortest example.
"""

import contextlib
import io
import runpy
import sys
from unittest import mock

import pytest
import torch

from dtrain.cli.new import TASKS
from dtrain.cli.new import new as write_loop
from example_runs import here

SHORT = {
    "train_resnet.py": ["--until", "4ba"],
    "train_gan.py": ["--steps", "4", "--save-every", "2"],
    "train_dpo.py": ["--until", "4ba"],
    "train_diffusion.py": ["--until", "5ba"],
    "train_embeddings.py": ["--until", "4ba"],
    "pretrain_bert.py": ["--until", "4ba"],
    "pretrain_gpt.py": ["--steps", "4"],
    "tensor_parallel.py": ["--steps", "4", "--tp", "1"],
    "finetune_bert.py": ["--until", "4ba"],
}
QUICK = ("blank",)


@pytest.fixture
def steps():
    """The numbers of the steps that are trained while the test runs."""
    with mock.patch("dtrain.spans.record_step") as stepped:
        yield lambda: [call.args[0] for call in stepped.call_args_list]


def quick_or_slow(names):
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


def last_line(printed: str) -> str:
    return printed.strip().splitlines()[-1]


@pytest.mark.filterwarnings("ignore:mfu. peak must be given for an unknown device, got 'cpu' in bf16")
@pytest.mark.parametrize("script", quick_or_slow(SHORT))
def test_finished_example_does_not_train_again(script, tmp_path, steps):
    first = here(script, *SHORT[script], out=tmp_path / "out")
    taken = len(steps())
    assert taken > 0
    again = here(script, *SHORT[script], out=tmp_path / "out")
    assert len(steps()) == taken, f"it trained steps {steps()[taken:]}"
    assert last_line(again) == last_line(first)


@pytest.mark.parametrize("task", quick_or_slow(TASKS))
def test_finished_custom_loop_does_not_train_again(task, tmp_path, steps, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_loop("loop.py", task=task)
    monkeypatch.setattr(sys, "argv", ["loop.py", "--until", "4ba"])
    printed, taken = [], []
    for _ in range(2):
        with contextlib.redirect_stdout(io.StringIO()) as out, torch.random.fork_rng(devices=[]):
            runpy.run_path("loop.py", run_name="__main__")
        printed.append(last_line(out.getvalue()))
        taken.append(len(steps()))
    assert taken[0] == taken[1] > 0
    assert printed[0] == printed[1]
