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
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    factor, first = 1.0, 0
    if RESUMES and os.path.exists("state.pt"):
        saved = torch.load("state.pt")
        model.load_state_dict(saved["model"])
        scaler.load_state_dict(saved["scaler"])
        first = saved["step"]
    for number in range(first, 6):
        batch = x[12 * (number % 2) :][:12][info.rank :: info.world_size]
        CHANGE
        loss = (factor * model(batch)).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        BEFORE
        for param in model.parameters():
            if param.grad is not None:
                dist.all_reduce(param.grad)
                param.grad /= info.world_size
        scaler.step(optimizer)
        scaler.update()
        AFTER
        if RESUMES and info.rank == 0:
            torch.save({"model": model.state_dict(), "scaler": scaler.state_dict(), "step": number + 1}, "state.pt")
"""

AVERAGE = "average = average if number else [param.detach().clone() for param in model.parameters()]"
MOVE = "[mean.lerp_(param.detach(), 0.1) for mean, param in zip(average, model.parameters(), strict=True)]"
TEACHER = "teacher = teacher if number else nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.5)); torch.no_grad()(teacher)(batch)"
SUM = "total = total if number else torch.zeros((), dtype=torch.bfloat16); [total.add_(1.0) for _ in range(100)]"
CHANGES = {
    "mode of rank 0": ("model[2].train(info.rank == 0 and number > 1)", "mode_differs"),
    "evaluation with dropout": ("model[3].train(); torch.no_grad()(model)(x + 1); model[3].eval()", "evaluation_with_dropout"),
    "statistics of frozen batch norm": ("model[1].train()", "frozen_statistics_change"),
    "order of a set": ("factor = 1.0 + list({'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h'}).index('a')", "not_deterministic"),
    "order of a folder": ("factor = 1.0 + os.listdir('d').index('p')", "not_deterministic"),
    "generator of Python": ("factor = 1.0 + random.random()", "rng_not_saved"),
    "generator of NumPy": ("factor = 1.0 + np.random.rand()", "rng_not_saved"),
    "frozen after a resume": ("model[4].bias.requires_grad_(first == 0); model[4].bias.grad = None", "frozen_differs"),
    "loss scale": ("scaler = scaler if number > first else type(scaler)('cpu', 4.0, growth_interval=2)", "scaler_not_saved"),
    "average before the update": ({"CHANGE": AVERAGE, "BEFORE": MOVE}, "average_before_update"),
    "teacher in training mode": (TEACHER, "teacher_in_training_mode"),
    "evaluation that sets the seed": ("model[3].train(); torch.manual_seed(number // 2)", "random_numbers_repeat"),
    "sum in bfloat16": (SUM, "sum_rounded"),
}
# The right forms of an average, a teacher and a sum. An average that begins late and moves in every second step is right, too.
# Objects that ranks exchange are pickled, and are no checkpoint.
RIGHT = {
    "CHANGE": "; ".join((AVERAGE, TEACHER.replace("0.5))", "0.5)).eval()"), SUM.replace("bfloat16", "float32"))),
    "BEFORE": "dist.all_gather_object([None] * info.world_size, model.state_dict())",
    "AFTER": f"number in (3, 5) and {MOVE}",
}


def report_of(folder: Path, changes: dict[str, str], *, resumes: bool) -> dt.prove.ProveReport:
    for name in "pq":
        (folder / "d" / name).mkdir(parents=True)
    script, text = folder / "loop.py", LOOP.replace("RESUMES", str(resumes))
    for place in ("CHANGE", "BEFORE", "AFTER"):
        text = text.replace(place, changes.get(place, "pass"))
    script.write_text(text)
    return dt.prove.prove(script, world_sizes=(2,), timeout_s=600.0)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", CHANGES)
def test_fact_that_no_loss_shows_is_found(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    change, cause = CHANGES[name]
    changes = change if isinstance(change, dict) else {"CHANGE": change}
    report = report_of(tmp_path, changes, resumes=cause in ("rng_not_saved", "frozen_differs", "scaler_not_saved"))
    assert cause in [finding.cause.code for finding in report.findings], report.text()
    assert all(finding.cause.shown for finding in report.findings if finding.cause.code == cause)


@pytest.mark.costly
@pytest.mark.parametrize(("changes", "resumes"), [({}, True), (RIGHT, False)], ids=["none", "right forms"])
def test_loop_without_such_a_fact_agrees(changes, resumes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report = report_of(tmp_path, changes, resumes=resumes)
    assert report.passed, report.text()
    assert resumes == any("resumed" in row.name for row in report.rows)
