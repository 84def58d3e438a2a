"""Reports made up from a few numbers, for the page."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from dtrain.report import model

START = 1_760_000_000.0


def series(
    values: Sequence[float], *, step_s: float = 0.5, marks: Sequence[tuple[int, str]] = (), every: int = 1
) -> model.MetricSeries:
    steps = [(number + 1) * every for number in range(len(values))]
    return model.MetricSeries(
        steps=steps,
        values=list(values),
        tokens=[step * 262144.0 for step in steps],
        times=[step * step_s for step in steps],
        marks=[model.NonFiniteMark(step=step, what=what, tokens=step * 262144.0, at=step * step_s) for step, what in marks],
        count=len(values) + len(marks),
        bad=len(marks),
        last=values[-1],
        last_step=steps[-1],
        low=min(values),
        high=max(values),
        low_step=1,
        high_step=1,
    )


def slices(edges: Sequence[float], attempts: int) -> list[model.TimeSlice]:
    found = []
    for number, (start, end) in enumerate(itertools.pairwise(edges)):
        length, share = end - start, random.Random(number).random()
        shares = {"compute": 0.75 + 0.1 * share, "data": 0.1 * (1 - share), "stall": 0.05, "communication": 0.03, "other": 0.02}
        if number % 17 == 5:
            shares |= {"compute": 0.5, "checkpoint": 0.25}
        if number in (len(edges) // 3, 2 * len(edges) // 3):
            shares = {"restart": 1.0}
        if number == 0:
            shares = {"setup": 0.7, "compile": 0.3}
        found.append(
            model.TimeSlice(
                at=start,
                seconds=length,
                attempt=1 + number * attempts // len(edges),
                by_cause={name: part * length for name, part in shares.items()},
            )
        )
    return found


def run_report(name: str = "gpt", *, steps: int = 1000, ranks: int = 8, seed: int = 0, points: int = 500) -> model.RunReport:
    noise = random.Random(seed)
    every, length = max(1, steps // points), steps * 0.5 + 90
    count = steps // every
    loss = [8 / math.sqrt(1 + number * every / 50) + 1.5 + 0.2 * noise.random() + 0.2 * seed for number in range(count)]
    attempts = [
        model.AttemptReport(
            number=1,
            at=0.0,
            ended_at=178.0,
            how="killed",
            error=None,
            first_step=0,
            last_step=340,
            resumed_from=None,
            world_size=ranks,
            hosts=["node-0"],
            setup_s=8.0,
            lost_steps=40,
            lost_s=20.0,
            down_s=0.0,
        ),
        model.AttemptReport(
            number=2,
            at=215.0,
            ended_at=430.0,
            how="failed",
            error="rank 3: RuntimeError: CUDA error: device-side assert",
            first_step=300,
            last_step=720,
            resumed_from="checkpoints/step-00000300",
            world_size=ranks,
            hosts=["node-0"],
            setup_s=8.0,
            lost_steps=20,
            lost_s=10.0,
            down_s=37.0,
        ),
        model.AttemptReport(
            number=3,
            at=450.0,
            ended_at=length,
            how="done",
            error=None,
            first_step=700,
            last_step=steps,
            resumed_from="checkpoints/step-00000700",
            world_size=ranks,
            hosts=["node-0"],
            setup_s=9.5,
            lost_steps=0,
            lost_s=0.0,
            down_s=20.0,
        ),
    ]
    causes = {
        "compute": 0.7,
        "data": 0.06,
        "stall": 0.05,
        "communication": 0.03,
        "checkpoint": 0.02,
        "evaluation": 0.02,
        "compile": 0.01,
        "restart": 0.08,
        "setup": 0.01,
        "other": 0.02,
    }
    by_cause = {cause: share * length for cause, share in causes.items()}
    rows = [
        model.RankReport(
            rank=rank,
            host=f"node-{rank // 4}",
            attempts=[],
            timeline=[],
            by_span={},
            by_cause=by_cause | ({"data": 0.16 * length, "stall": 0.001 * length} if rank == 3 else {"stall": 0.1 * length}),
        )
        for rank in range(ranks)
    ]
    cuts = [length * number / 120 for number in range(121)]
    return model.RunReport(
        name=name,
        folder=f"runs/{name}",
        started_at=START,
        duration_s=length,
        attempts=attempts,
        ranks=rows,
        timeline=slices(cuts, 3),
        goodput=model.GoodputReport(
            total_s=length,
            productive_s=by_cause["compute"],
            share=0.7,
            by_cause=by_cause,
            down_s=57.0,
            again_s=17.5,
            lost_s=30.0,
        ),
        series={
            "loss": series(loss, marks=[(412, "nan"), (413, "inf")], every=every),
            "eval/loss": series([loss[number] + 0.2 for number in range(0, count, 50)], every=every * 50),
            "norm/gradient": series([1 + noise.random() for _ in range(count)], every=every),
            "lr": series(
                [3e-4 * min(1, number * every / 100) * (1 - number / count * 0.9) for number in range(count)], every=every
            ),
            "mfu": series([0.41 + 0.02 * noise.random() for _ in range(count)], every=every),
            "speed/tokens_per_s": series([520_000 + 9000 * noise.random() for _ in range(count)], every=every),
        },
        speed=[
            model.SpeedSample(
                at=cut,
                seconds=length / 120,
                attempt=1,
                step=int(number * steps / 120),
                steps_per_s=2.0,
                samples_per_s=512.0,
                tokens_per_s=480_000 + 30_000 * noise.random(),
                steps_per_compute_s=2.4,
                samples_per_compute_s=600.0,
                tokens_per_compute_s=620_000 + 9000 * noise.random(),
            )
            for number, cut in enumerate(cuts[:-1])
        ],
        gauges={
            "rss_bytes": model.GaugeSeries(
                times=cuts,
                values=[2.1e9 + 3e6 * number for number in range(121)],
                ranks=[3] * 121,
                by_rank=dict.fromkeys(range(ranks), 2000000000.0),
            )
        },
        checkpoints=[
            model.CheckpointReport(
                step=step,
                attempt=1,
                at=step * 0.55,
                held_s=0.4 + 0.3 * noise.random(),
                duration_s=3.2 + noise.random() if step != 700 else None,
                bytes=1_500_000_000,
            )
            for step in range(steps // 10, steps + 1, steps // 10)
        ],
        checkpoint_count=10,
        slowest=[
            model.SlowRank(
                rank=3,
                host="node-0",
                stall_s=0.6,
                waited_for_s=58.0,
                compute_s=410.0,
                most="data",
                most_s=59.0,
                text="rank 3 spent 59 s more on data than the median rank; the others waited for it",
            )
        ],
        events=[
            model.RunEvent(at=8.0, name="save", attempt=1, rank=0, step=100, fields={"held_s": 0.41}),
            model.RunEvent(at=215.0, name="resumed", attempt=2, rank=0, step=300, fields={"path": "checkpoints/step-00000300"}),
            model.RunEvent(at=430.0, name="out_of_memory", attempt=2, rank=3, step=720, fields={"size": 64}),
        ],
        event_counts={"save": 10, "resumed": 2, "out_of_memory": 1},
        about={
            number: {
                "command": ["pretrain_gpt.py", "--lr", "0.0003"],
                "commit": "0123456789abcdef",
                "settings": {
                    "lr": 3e-4 if number < 3 else 2e-4,
                    "layers": 12 + seed,
                    "optimizer": {"name": "adamw", "betas": [0.9, 0.95]},
                },
                "versions": {"torch": "2.13.0", "dtrain": "0.1.0"},
            }
            for number in (1, 2, 3)
        },
        differences=[model.AttemptDifference(name="settings.lr", values={1: 3e-4, 2: 3e-4, 3: 2e-4})],
        missing=[],
    )


def report_of(*runs: model.RunReport, problems: Sequence[str] = (), title: str = "Run gpt") -> model.Report:
    return model.Report(version="0.1.0", title=title, written_at=START + 7200, runs=list(runs), problems=list(problems))


def bare(name: str = "bare") -> model.RunReport:
    """A run of which there is nothing but its name."""
    return replace(
        run_report(name),
        started_at=None,
        duration_s=0.0,
        attempts=[],
        ranks=[],
        timeline=[],
        goodput=None,
        series={},
        speed=[],
        gauges={},
        checkpoints=[],
        checkpoint_count=0,
        slowest=[],
        events=[],
        event_counts={},
        about={},
        differences=[],
        missing=["no ledger", "no metrics.jsonl"],
    )


class Made:
    """The functions above, for tests, which cannot import this file."""

    run = staticmethod(run_report)
    report = staticmethod(report_of)
    bare = staticmethod(bare)
    series = staticmethod(series)


@pytest.fixture(scope="session")
def made() -> type[Made]:
    return Made
