"""A run that is killed 1 to 10 times within an epoch, and resumes each time with another number of ranks.

All ranks die at once at the begin of a step. The number of kills and the number of ranks must not show in the results: every
sample is trained on once in an epoch, in the same batches in the same order, and the weights are those of a run of one rank
that was never killed.
"""

from __future__ import annotations

import random
from dataclasses import asdict, replace
from typing import Any

from checkpoint.faults.kills import launch, scratch
from checkpoint.faults.nursery import apart, end_all, fork
from checkpoint.faults.outcome import Outcome, plain
from checkpoint.faults.training import BATCH, EVERY, SAMPLES, Run, look, read_log

STEPS = SAMPLES // BATCH + 2  # an epoch, and a little of the next one
MOST_KILLS, MOST_RANKS = 10, 4
TOLERANCE = 1e-12  # fp64: sums over other numbers of ranks are rounded differently, in the last bits

_KNOWN: list[tuple[dict[int, list[int]], list[list[float]]]] = []


def undisturbed() -> tuple[dict[int, list[int]], list[list[float]]]:
    """The samples of each step, and the weights at the end. Trained once per process."""
    if not _KNOWN:
        with scratch() as folder:
            _go(Run(folder=folder, steps=STEPS, elastic=True), 1, dies=False)
            log = read_log(folder)
        samples = {line["step"]: line["samples"] for line in log if "step" in line}
        epoch = [i for step in range(1, SAMPLES // BATCH + 1) for i in samples[step]]
        assert sorted(epoch) == list(range(SAMPLES)), "an epoch is every sample once"
        _KNOWN.append((samples, next(line["weights"] for line in log if "done" in line)))
    return _KNOWN[0]


def _go(run: Run, ranks: int, *, dies: bool) -> None:
    child = fork(launch, asdict(run), ranks)
    try:
        child.answer()
        assert not dies, "the run was to be killed and was not"
    except ChildProcessError as error:
        if not dies or "SIGKILL" not in str(error):
            raise
    finally:
        child.close()
        end_all()


def draw(seed: int, k: int, most: int = MOST_KILLS) -> list[dict[str, Any]]:
    """One chain: an outcome for the whole of it. To be asked of a nursery."""
    dice = random.Random(f"chains {seed} {k}")
    samples, weights = undisturbed()
    mode, kills = ("sync", "async")[k % 2], dice.randint(1, most)
    problems: list[str] = []
    with scratch() as folder:
        run = Run(folder=folder, steps=STEPS, elastic=True, mode=mode)
        worlds: list[int] = []
        reached = 1
        for _ in range(kills):
            # At most one interval behind the step of the last death, so that a chain gets somewhere.
            dies_at = dice.randint(reached + 1, max(reached + 1, min(reached + 2 * EVERY, SAMPLES // BATCH)))
            worlds.append(dice.choice([n for n in range(1, MOST_RANKS + 1) if not worlds or n != worlds[-1]]))
            _go(replace(run, dies_at=dies_at), worlds[-1], dies=True)
            reached = max(apart(look, asdict(run))["steps"], default=0)
        worlds.append(dice.randint(1, MOST_RANKS))
        _go(run, worlds[-1], dies=False)
        problems += _differences(folder, worlds, samples, weights)
    shown = f"{kills} kills, {mode}, ranks {worlds}"
    wrong = f"{shown}: {'; '.join(problems)}" if problems else ""
    came = "as if nothing had happened" if not problems else "failed"
    return plain([Outcome(fault=f"chain of kills, {mode}", came=came, wrong=wrong, numbers={"kills in a chain": kills})])


def draw_short(seed: int, k: int) -> list[dict[str, Any]]:
    """A chain of at most four kills. To be asked of a nursery."""
    return draw(seed, k, 4)


def _differences(folder: str, worlds: list[int], samples: dict[int, list[int]], weights: list[list[float]]) -> list[str]:
    """Hold a chain against the run that nothing happened to."""
    problems = []
    logs = {rank: _attempts(read_log(folder, rank)) for rank in range(MOST_RANKS)}
    for number, world in enumerate(worlds):
        # A rank takes part in some attempts only: its n-th attempt is the n-th that had so many ranks.
        parts = [logs[rank][sum(w > rank for w in worlds[:number])] for rank in range(world)]
        steps = sorted({step for log in parts for step in log})
        for step in steps:
            trained = [i for log in parts for i in log.get(step, [])]
            all_there = all(step in log for log in parts)  # the last step of an attempt may be missing in some logs
            if all_there and trained != samples[step]:
                problems.append(f"step {step} on {world} ranks trained on {trained}, not on {samples[step]}")
    done = [line for line in read_log(folder) if "done" in line]
    worst = max(
        abs(a - b) / max(1.0, abs(b))
        for ours, theirs in zip(done[-1]["weights"], weights, strict=True)
        for a, b in zip(ours, theirs, strict=True)
    )
    if not worst <= TOLERANCE:
        problems.append(f"the weights differ by {worst:.1e}")
    return problems


def _attempts(log: list[dict[str, Any]]) -> list[dict[int, list[int]]]:
    """The samples of each step, attempt by attempt."""
    attempts: list[dict[int, list[int]]] = []
    for line in log:
        if "attempt" in line:
            attempts.append({})
        elif "step" in line:
            attempts[-1][line["step"]] = line["samples"]
    return attempts
