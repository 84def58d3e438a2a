"""Make reports from a few numbers, for the page."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest

from dtrain.report import model

START = 1_760_000_000.0


def series(values: Sequence[float], *, step_s: float = 0.5, every: int = 1) -> model.MetricSeries:
    steps = np.arange(1, len(values) + 1, dtype=float) * every
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    return model.MetricSeries(
        steps=steps,
        values=np.array(values, dtype=float),
        tokens=steps * 262144.0,
        times=steps * step_s,
        count=len(values),
        non_finite=sum(not math.isfinite(value) for value in values),
        last=finite[-1],
        last_step=int(steps[-1]),
        low=min(finite),
        high=max(finite),
    )


def timeline(edges: Sequence[float], attempts: int, steps: int) -> model.Timeline:
    count = len(edges) - 1
    rows = []
    for number in range(count):
        share = random.Random(number).random()
        shares = {"compute": 0.75 + 0.1 * share, "data": 0.1 * (1 - share), "stall": 0.05, "communication": 0.03, "other": 0.02}
        if number % 17 == 5:
            shares |= {"compute": 0.5, "checkpoint": 0.25}
        if number in (len(edges) // 3, 2 * len(edges) // 3):
            shares = {"restart": 1.0}
        if number == 0:
            shares = {"setup": 0.7, "compile": 0.3}
        rows.append(shares)
    seconds = np.diff(edges)
    causes = {
        cause: np.array([row.get(cause, 0.0) for row in rows]) * seconds for cause in sorted({c for r in rows for c in r})
    }
    done = np.full(count, steps / count)
    return model.Timeline(
        at=np.array(edges[:-1]),
        seconds=seconds,
        attempt=np.array([1.0 + number * attempts // len(edges) for number in range(count)]),
        by_cause=causes,
        step=np.cumsum(done),
        compute_s=causes["compute"],
        steps=done,
        samples=done * 256,
        tokens=done * 262144,
    )


def attempt(number, times, steps, ranks, outcome, *, lost=(0, 0.0), error=None, down_s=0.0, **by_cause) -> model.AttemptReport:
    return model.AttemptReport(
        number=number, at=times[0], ended_at=times[1], outcome=outcome, error=error, first_step=steps[0], last_step=steps[1],
        resumed_from=f"checkpoints/step-{steps[0]:08d}" if steps[0] else None, world_size=ranks, hosts=["node-0"],
        setup_s=by_cause["setup"], lost_steps=lost[0], lost_s=lost[1], down_s=down_s, by_cause=by_cause,
    )  # fmt: skip


def run_report(name: str = "gpt", *, steps: int = 1000, ranks: int = 8, seed: int = 0, points: int = 500) -> model.RunReport:
    noise = random.Random(seed)
    every, length = max(1, steps // points), steps * 0.5 + 90
    count = steps // every
    loss = [8 / math.sqrt(1 + number * every / 50) + 1.5 + 0.2 * noise.random() + 0.2 * seed for number in range(count)]
    error = "rank 3: RuntimeError: CUDA error: device-side assert"
    attempts = [
        attempt(1, (0.0, 178.0), (0, 340), ranks, "killed", lost=(40, 20.0), compute=140.0, restart=20.0, setup=8.0, data=10.0),
        attempt(2, (215.0, 430.0), (300, 720), ranks, "failed", lost=(20, 10.0), error=error, down_s=37.0, compute=180.0,
                communication=10.0, restart=10.0, setup=8.0),
        attempt(3, (450.0, length), (700, steps), ranks, "done", down_s=20.0, compute=100.0, communication=5.0, setup=9.5),
    ]  # fmt: skip
    causes = {"compute": 0.7, "data": 0.06, "stall": 0.05, "communication": 0.03, "checkpoint": 0.02, "evaluation": 0.02,
              "compile": 0.01, "restart": 0.08, "setup": 0.01, "other": 0.02}  # fmt: skip
    by_cause = {cause: share * length for cause, share in causes.items()}
    rows = [
        model.RankReport(
            rank=rank,
            host=f"node-{rank // 4}",
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
        timeline=timeline(cuts, 3, steps),
        goodput=model.GoodputReport(
            total_s=length,
            productive_s=by_cause["compute"],
            share=0.7,
            by_cause=by_cause,
            down_s=57.0,
            repeated_setup_s=17.5,
            lost_s=30.0,
        ),
        series={
            "loss": series([*loss[:-2], math.nan, math.inf], every=every),
            "eval/loss": series([loss[number] + 0.2 for number in range(0, count, 50)], every=every * 50),
            "norm/gradient": series([1 + noise.random() for _ in range(count)], every=every),
            "lr": series(
                [3e-4 * min(1, number * every / 100) * (1 - number / count * 0.9) for number in range(count)], every=every
            ),
            "mfu": series([0.41 + 0.02 * noise.random() for _ in range(count)], every=every),
            "speed/tokens_per_s": series([520_000 + 9000 * noise.random() for _ in range(count)], every=every),
        },
        gauges={"rss_bytes": model.GaugeSeries(times=np.array(cuts), values=2.1e9 + 3e6 * np.arange(121), ranks=[3] * 121)},
        checkpoints=[
            {
                "step": step,
                "attempt": 1,
                "at": step * 0.55,
                "blocked_s": 0.4 + 0.3 * noise.random(),
                "duration_s": 3.2 + noise.random() if step != 700 else None,
                "bytes": 1_500_000_000,
            }
            for step in range(steps // 10, steps + 1, steps // 10)
        ],
        checkpoint_count=10,
        slowest=[
            model.SlowRank(
                rank=3,
                host="node-0",
                stall_s=0.6,
                waited_for_s=58.0,
                most="data",
                most_s=59.0,
                text="rank 3 spent 59 s more on data than the median rank; the others waited for it",
            )
        ],
        events=[
            {"at": time_s, "name": name, "attempt": attempt, "rank": rank, "step": step, "fields": fields}
            for time_s, name, attempt, rank, step, fields in (
                (8.0, "save", 1, 0, 100, {"blocked_s": 0.41}),
                (215.0, "resumed", 2, 0, 300, {"path": "checkpoints/step-00000300"}),
                (430.0, "out_of_memory", 2, 3, 720, {"size": 64}),
            )
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
        differences={"settings.lr": {1: 3e-4, 2: 3e-4, 3: 2e-4}},
        missing=[],
    )  # fmt: skip


def report_of(*runs: model.RunReport, problems: Sequence[str] = (), title: str = "Run gpt") -> model.Report:
    return model.Report(version="0.1.0", title=title, written_at=START + 7200, runs=list(runs), problems=list(problems))


def bare(name: str = "bare") -> model.RunReport:
    """Make a run with nothing but its name."""
    return model.RunReport(name=name, folder=f"runs/{name}", missing=["no ledger", "no metrics.jsonl"])


class Made:
    """The functions above, for tests, which cannot import this file."""

    run = staticmethod(run_report)
    report = staticmethod(report_of)
    bare = staticmethod(bare)
    series = staticmethod(series)


@pytest.fixture(scope="session")
def made() -> type[Made]:
    return Made
