"""A run of each example: its report explains the time and has the result, its progress is shown, and it ends once.

A finished run that is started again trains no step: it evaluates and reports, as the first time.
"""

import contextlib
import io
import re
import runpy
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

from dtrain import spans
from dtrain.cli.main import TASKS
from dtrain.cli.main import new as write_loop
from dtrain.report.model import RunReport
from dtrain.report.read_run import read_run
from dtrain.report.results import describe_command, describe_parameters
from example_runs import here

SHORT = {
    "train_custom.py": ["--until", "20ba"],
    "train_resnet.py": ["--until", "4ba"],
    "train_moe.py": ["--until", "3ba"],
    "train_grpo.py": ["--steps", "4"],
    "train_gan.py": ["--steps", "4", "--save-every", "2"],
    "train_dpo.py": ["--read", "5ba", "--until", "5ba"],
    "train_diffusion.py": ["--until", "5ba"],
    "train_embeddings.py": ["--until", "4ba"],
    "pretrain_bert.py": ["--until", "4ba"],
    "pretrain_gpt.py": ["--steps", "4"],
    "tensor_parallel.py": ["--steps", "4", "--tp", "1"],
    "finetune_bert.py": ["--until", "10ba", "--batch", "16", "--seq", "32"],
}
# Those that no other test in the quick set runs, and the template.
QUICK = (
    "blank", "train_custom.py", "train_embeddings.py", "train_dpo.py", "train_diffusion.py", "pretrain_bert.py",
    "finetune_bert.py",
)  # fmt: skip
# Largest part of the wall time that no span explains.
MOST_OTHER = 0.1


@pytest.fixture
def steps():
    """The numbers of the steps that are trained while the test runs."""
    with mock.patch("dtrain.spans.record_step", wraps=spans.record_step) as stepped:
        yield lambda: [call.args[0] for call in stepped.call_args_list]


def quick_or_slow(names):
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


def last_line(printed: str) -> str:
    return printed.strip().splitlines()[-1]


def runs_in(out: Path) -> list[RunReport]:
    """Return the runs that an example has recorded."""
    folders = [out] if (out / "ledger").exists() else sorted(path for path in out.iterdir() if (path / "ledger").exists())
    return [read_run(folder, now=time.time()) for folder in folders]


def unexplained(run: RunReport) -> float:
    """Return the share of the time that no span explains, from ``open_run`` on: this process has begun long before."""
    setup_s = sum(attempt.setup_s for attempt in run.attempts)
    return run.goodput.by_cause.get("other", 0.0) / (run.goodput.total_s - setup_s)


@pytest.mark.filterwarnings("ignore:mfu. peak must be given for an unknown device, got 'cpu' in bf16")
@pytest.mark.sample(1)
@pytest.mark.parametrize("script", quick_or_slow(SHORT))
def test_example_explains_its_time_and_does_not_train_again(script, tmp_path, steps, capsys):
    first = here(script, *SHORT[script], out=tmp_path / "out")
    assert re.search(r"^step \d+/\d+  (loss|generator) \d", capsys.readouterr().err, re.M), "the progress bar, as lines"
    runs = runs_in(tmp_path / "out")
    assert runs
    for run in runs:
        assert unexplained(run) < MOST_OTHER, run.ranks[0].by_span
        assert describe_parameters(run)
        assert describe_command(run)
    assert any(name.startswith("held_out/") for run in runs for name in run.series)
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
