"""Facts of a script that its losses may not show: modes, frozen parameters, orders of sets and folders, global generators."""

from pathlib import Path

import pytest

import dtrain as dt

LOOP = """
import os
import random

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import dtrain as dt

torch.manual_seed(0)
random.seed(0)
np.random.seed(0)
with dt.init_dist() as info:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 2))
    model[1].eval().requires_grad_(False)
    model[3].eval()
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
    factor, first = 1.0, 0
    if RESUMES and os.path.exists("state.pt"):
        saved = torch.load("state.pt")
        model.load_state_dict(saved["model"])
        first = saved["step"]
    for number in range(first, 6):
        batch = x[12 * (number % 2) :][:12][info.rank :: info.world_size]
        CHANGE
        loss = (factor * model(batch)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for param in model.parameters():
            if param.grad is not None:
                dist.all_reduce(param.grad)
                param.grad /= info.world_size
        optimizer.step()
        if RESUMES and info.rank == 0:
            torch.save({"model": model.state_dict(), "step": number + 1}, "state.pt")
"""

CHANGES = {
    "mode of rank 0": ("model[2].train(info.rank == 0 and number > 1)", "mode_differs"),
    "evaluation with dropout": ("model[3].train(); torch.no_grad()(model)(x + 1); model[3].eval()", "evaluation_with_dropout"),
    "statistics of frozen batch norm": ("model[1].train()", "frozen_statistics_change"),
    "order of a set": ("factor = 1.0 + list({'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h'}).index('a')", "not_deterministic"),
    "order of a folder": ("factor = 1.0 + os.listdir('d').index('p')", "not_deterministic"),
    "generator of Python": ("factor = 1.0 + random.random()", "rng_not_saved"),
    "generator of NumPy": ("factor = 1.0 + np.random.rand()", "rng_not_saved"),
    "frozen after a resume": ("model[4].bias.requires_grad_(first == 0); model[4].bias.grad = None", "frozen_differs"),
}


def report_of(folder: Path, change: str, *, resumes: bool) -> dt.prove.ProveReport:
    for name in "pq":
        (folder / "d" / name).mkdir(parents=True)
    script = folder / "loop.py"
    script.write_text(LOOP.replace("CHANGE", change).replace("RESUMES", str(resumes)))
    return dt.prove.prove(script, world_sizes=(2,), timeout_s=600.0)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", CHANGES)
def test_fact_that_no_loss_shows_is_found(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    change, cause = CHANGES[name]
    report = report_of(tmp_path, change, resumes=cause in ("rng_not_saved", "frozen_differs"))
    assert cause in [finding.cause.code for finding in report.findings], report.text()
    assert all(finding.cause.shown for finding in report.findings if finding.cause.code == cause)


@pytest.mark.costly
def test_loop_without_such_a_fact_agrees(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report = report_of(tmp_path, "pass", resumes=True)
    assert report.passed, report.text()
