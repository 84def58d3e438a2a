"""Measure the cost of observing: all monitors on, against the same loop with none, not even the sums of the ledger.

    python benchmarks/observe.py                    # two minutes on a free core
    python benchmarks/observe.py --pairs 4000       # a narrower band

A step after which nothing is logged, and one after which all is read and written to every sink that needs no server. The
latter twice: with everything, and without the two transforms that look at tensors, ``norms`` and ``activation_stats``, whose
work is the device's on a GPU, and on a CPU falls to the same thread. All are processor time of the training thread: sinks that
may be slow have a thread of their own. The model is small, so that microseconds can be seen.

Then the ledger alone: the cost of the spans of a step with a ledger that writes a line every ten seconds, and of one line.

How long a report takes, and how large it gets: ``python benchmarks/report.py``.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dtrain as dt
from dtrain import spans
from dtrain.run.run_dir import LedgerWriter
from measure import Figure, compare, interleaved, machine, verdict_line

QUIET_US, LOGGING_US, LEDGER_US = 50.0, 500.0, 5.0
NEVER = 10**9
EVERY = 20  # steps, of which the last one logs
_BEGIN, _END, _STEPPED = spans.begin, spans.end, spans.record_step


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    print(machine())
    with tempfile.TemporaryDirectory() as folder, dt.init_dist():
        for line in [*whole(Path(folder), args.pairs), *ledger(Path(folder))]:
            print(line)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=1000, help="pairs of steps (%(default)s)")
    return parser.parse_args()


def whole(folder: Path, pairs: int) -> list[str]:
    """Print the lines about a quiet step and about a step that logs."""
    dt.open_run(folder / "run", settings={"lr": 1e-3})
    candidates = {
        "bare": bare(),
        "quiet": observed(folder / "quiet", NEVER),
        "logging": observed(folder / "logging", EVERY),
        "host": observed(folder / "host", EVERY, looking=False),
    }
    stretches = {name: partial(stretch, step) for name, step in candidates.items()}
    timings = interleaved(stretches, rounds=pairs // 2, warmup=5, clocks={"thread": time.thread_time})["thread"]
    lines = []
    for name, than, steps, what, limit in (
        ("quiet", "bare", EVERY, "a step that logs nothing, all on", QUIET_US),
        ("logging", "quiet", 1, "a step that logs, all on", LOGGING_US),
        ("host", "quiet", 1, "a step that logs, without norms and activation_stats", LOGGING_US),
    ):
        against = compare(timings[name], timings[than])
        more = Figure(**{end: 1e6 * getattr(against.difference, end) / steps for end in ("value", "low", "high")})
        lines.append(verdict_line(what, more, at_most=limit, unit=" us"))
    return [
        *lines,
        f"  of steps of {1e6 * against.b_s / EVERY:.0f} us; {against.pairs} pairs of {EVERY} steps, of which one logs",
    ]


def stretch(step: Callable[[], None]) -> None:
    """Run several steps, because the time of a single step depends on the state of the caches."""
    for _ in range(EVERY):
        step()


def bare() -> Callable[[], None]:
    """A step of the loop without any observing: spans do nothing."""
    step = dt.compose_step(loss_fn, [dt.transforms.clip_by_norm(1.0)])
    turn = turning(step)

    def run() -> None:
        with unrecorded():
            turn()

    return run


def observed(folder: Path, interval: int, *, looking: bool = True) -> Callable[[], None]:
    """Return a step of the loop with all monitors, which logs every ``interval`` steps; without the monitors in ``looking``."""
    folder.mkdir()
    inside = [
        dt.profiling.snapshot_on_oom(folder / "memory"),
        dt.profiling.step_profiler(folder / "traces", schedule=dt.profiling.schedule(skip_first=NEVER)),
        dt.monitors.watch_loss(),
        *([dt.monitors.norms(interval, by="layer")] if looking else []),
        dt.transforms.clip_by_norm(1.0),
        *([dt.monitors.activation_stats("*", interval)] if looking else []),
    ]
    step = dt.compose_step(loss_fn, inside)
    flops = dt.monitors.mfu(flops_per_sample=1e6, peak=1e12)
    meters = [
        dt.monitors.throughput(),
        flops,
        dt.monitors.eta(NEVER),
        dt.monitors.system_metrics(),
        dt.monitors.memory_stats,
        dt.monitors.learning_rates,
    ]
    stop = dt.monitors.early_stop("loss", patience=NEVER)
    log = dt.loggers.multi(
        dt.loggers.jsonl(folder / "metrics.jsonl"),
        dt.loggers.csv_file(folder / "metrics.csv"),
        dt.loggers.text_file(folder / "metrics.txt"),
        dt.loggers.in_memory(),
        dt.loggers.progress_bar(NEVER, line_every_s=None),
        dt.loggers.tensorboard(folder / "tensorboard"),
    )
    turn = turning(step)

    def run() -> None:
        state, metrics = turn()
        if state.crossed(interval):
            numbers = dt.monitors.collect(state, dt.reduce_metrics(metrics), *meters)
            log(state.step, numbers)
            stop(state, numbers)

    return run


def turning(step: dt.step.Step) -> Callable[[], tuple[dt.TrainState, dt.typing.Metrics]]:
    """Return a function that runs steps one after another on one batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    state = step.init(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
    batch = {"x": torch.randn(16, 64), "y": torch.randint(10, (16,))}

    def turn() -> tuple[dt.TrainState, dt.typing.Metrics]:
        nonlocal state
        state, metrics = step(state, batch)
        return state, metrics

    return turn


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> dt.LossSum:
    """Summed cross entropy."""
    return dt.LossSum(total=F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum"), weight=len(batch["y"]))


@contextmanager
def unrecorded() -> Iterator[None]:
    """A stretch in which spans are not counted."""
    spans.begin, spans.end, spans.record_step = _nothing, _nothing, _nothing  # type: ignore[assignment]
    try:
        yield
    finally:
        spans.begin, spans.end, spans.record_step = _BEGIN, _END, _STEPPED


def _nothing(*_: object, **__: object) -> None:
    pass


def ledger(folder: Path, steps: int = 20_000, rounds: int = 9) -> list[str]:
    """The lines about the ledger alone: the spans of a step of several ranks (a batch, the step, its two records)."""

    def one(step: int) -> None:
        spans.begin("data")
        spans.end()
        spans.begin("step")
        for _ in range(2):
            spans.begin("agree")
            spans.end()
        spans.end()
        spans.record_step(step, samples=step, tokens=step)

    def seconds(run: Callable[[int], None]) -> float:
        begun = time.thread_time()
        for step in range(steps):
            run(step)
        return (time.thread_time() - begun) / steps

    path = folder / "ledger.jsonl"
    path.touch()
    book = LedgerWriter(path, attempt=1, interval=dt.schedules.Duration.parse("10sec"))
    book.open()
    with_spans = [seconds(one) for _ in range(rounds)]
    empty = [seconds(_nothing) for _ in range(rounds)]
    a_step = 1e6 * (median(with_spans) - median(empty))
    lines = []
    for _ in range(200):
        one(steps)
        begun = time.thread_time()
        book.flush()
        lines.append(time.thread_time() - begun)
    book.close("done")
    low, high = (1e6 * (end(with_spans) - median(empty)) for end in (min, max))
    figure = Figure(value=a_step, low=low, high=high)
    return [
        verdict_line("the ledger, a step", figure, at_most=LEDGER_US, unit=" us"),
        f"  a line of it, every ten seconds: {1e6 * median(lines):.0f} us, {os.path.getsize(path) / 204:.0f} bytes",
    ]


if __name__ == "__main__":
    main()
