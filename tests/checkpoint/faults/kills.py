"""SIGKILL of one rank, of all ranks, or of the launcher, at a random time of a run; then it is resumed, and killed again.

Two ranks, a save every two steps, until the run is done. After each kill every committed step is read to the last byte; the
state that the next attempt loads is compared with that of the undisturbed run, and so are all losses and the final weights.
"""

from __future__ import annotations

import json
import os
import random
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from checkpoint.faults.nursery import LONG_S, Child, apart, end_all, fork
from checkpoint.faults.outcome import Outcome, plain
from checkpoint.faults.training import EVERY, Run, look, read_log, train

RANKS, STEPS = 2, 24
TARGETS = ("one rank", "all ranks", "the launcher")
SHARE = 0.25  # a kill comes within this part of a whole run's time, so that a run takes many
EARLY = 0.15  # of the kills come before the run has begun to train
MOST = 60  # kills of one run: it must end
IN_FLIGHT = {"sync": 1, "async": 2}  # intervals of work at risk: an asynchronous save may be on its way when the next is due


@dataclass(frozen=True, slots=True, kw_only=True)
class Undisturbed:
    """The undisturbed run: the log of every rank, and its training time."""

    losses: dict[int, str]
    digests: dict[tuple[int, int], str]
    ends: list[dict[str, Any]]
    seconds: float


@dataclass(slots=True, kw_only=True)
class Attempt:
    """One start of the run, and the cause of its end."""

    target: str
    newest: int | None = None
    lost: float = 0.0
    problems: list[str] = field(default_factory=list)


_KNOWN: list[Undisturbed] = []  # of this process: it is the same for all draws


def undisturbed() -> Undisturbed:
    """Trained once per process."""
    if not _KNOWN:
        with scratch() as folder:
            run = Run(folder=folder, steps=STEPS)
            fork_and_finish(run)
            logs = [read_log(folder, rank) for rank in range(RANKS)]
        lines = [(rank, line) for rank, log in enumerate(logs) for line in log]
        times = [line["attempt"] for _, line in lines if "attempt" in line]
        _KNOWN.append(
            Undisturbed(
                losses={line["step"]: line["loss"] for line in logs[0] if "step" in line},
                digests={(rank, line["saving"]): line["digest"] for rank, line in lines if "saving" in line},
                ends=[next(line for line in log if "done" in line) for log in logs],
                seconds=time.monotonic() - min(times),
            )
        )
    return _KNOWN[0]


def fork_and_finish(run: Run) -> None:
    """Run it to its end, launcher and all."""
    child = fork(launch, asdict(run), RANKS)
    try:
        child.answer()
    finally:
        child.close()
        end_all()


def launch(values: dict[str, Any], ranks: int) -> list[int]:
    """Run the launcher's process. Its own output goes into a file beside the logs."""
    from dtrain.dist import incident
    from dtrain.launch import spawn_function

    incident.GRACE_S, spawn_function._FAILURE_COLLECT_S = (
        0.3,
        0.1,
    )  # how long the ranks that are left wait for word from a dead one
    noise = os.open(Path(values["folder"]) / "stderr", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(noise, 2)
    return spawn_function.spawn(train, values, world_size=ranks)


@contextmanager
def scratch() -> Iterator[str]:
    """A folder that is gone afterwards."""
    folder = tempfile.mkdtemp(prefix="faults-")
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def draw_short(seed: int, k: int) -> list[dict[str, Any]]:
    """One run, killed a few times. To be asked of a nursery."""
    return draw(seed, k, 6)


def draw(seed: int, k: int, most: int = MOST) -> list[dict[str, Any]]:
    """One run, killed until it is done: an outcome for each kill. To be asked of a nursery."""
    dice = random.Random(f"kills {seed} {k}")
    reference = undisturbed()
    mode = ("sync", "async")[k % 2]
    with scratch() as folder:
        run = Run(folder=folder, steps=STEPS, mode=mode)
        attempts = []
        while (attempt := _attempt(run, dice, reference, last=len(attempts) >= most)) is not None:
            attempts.append(attempt)
            if attempt.problems:
                break
        else:
            problems = _compare(run, reference, attempts)
            if problems and attempts:
                attempts[-1].problems += problems
            elif problems:
                raise AssertionError(f"a run that was not killed: {problems}")
    return plain([_outcome(attempt, mode) for attempt in attempts])


def _outcome(attempt: Attempt, mode: str) -> Outcome:
    came = "began anew, nothing was committed yet" if attempt.newest is None else "resumed"
    return Outcome(
        fault=f"{attempt.target}, {mode}",
        came="failed" if attempt.problems else came,
        wrong="; ".join(attempt.problems),
        numbers={f"steps of work lost, {mode}": attempt.lost},
    )


def _attempt(run: Run, dice: random.Random, reference: Undisturbed, *, last: bool) -> Attempt | None:
    """Start the run and kill it; None when it was done before that."""
    attempt = Attempt(target=dice.choice(TARGETS))
    early, delay, who = dice.random() < EARLY, dice.random() * reference.seconds * SHARE, dice.randrange(RANKS)
    before = len([line for line in read_log(run.folder) if "attempt" in line])
    child = fork(launch, asdict(run), RANKS)
    try:
        if last:
            child.answer()
            return None
        if not early:
            _await_begin(run, child, before + 1)
        time.sleep(delay)
        if _has_answered(child):
            child.answer()  # raises if it failed by itself
            return None
        _kill(child, attempt, who)
    except (ChildProcessError, TimeoutError) as error:
        attempt.problems.append(f"the run failed by itself: {error}")
    finally:
        child.close()
        late = end_all()
    if late:
        attempt.problems.append(f"processes {late} lived on")
    _judge(run, attempt)
    return attempt


def _await_begin(run: Run, child: Child, attempts: int) -> None:
    """Until every rank has loaded, and so begins to train."""
    deadline = time.monotonic() + LONG_S
    while any(
        sum("attempt" in line for line in read_log(run.folder, rank)) < attempts for rank in range(RANKS)
    ) and not _has_answered(child):
        if time.monotonic() > deadline:
            raise TimeoutError("the ranks never began")
        time.sleep(0.002)


def _has_answered(child: Child) -> bool:
    return bool(select.select([child.pipe], [], [], 0)[0])


def _kill(child: Child, attempt: Attempt, who: int) -> None:
    """Send SIGKILL, and wait until the launcher has ended the job, unless the launcher itself was killed."""
    ranks = _children(child.pid)
    if len(ranks) < RANKS:
        attempt.target = "the launcher"  # it has not started them all
    victims = {"one rank": ranks[who : who + 1], "all ranks": ranks, "the launcher": [child.pid]}[attempt.target]
    for pid in victims:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    if attempt.target != "the launcher":
        try:
            child.answer()  # the run was done in this very moment
        except ChildProcessError as error:
            if "SIGKILL" not in str(error):
                raise


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def _judge(run: Run, attempt: Attempt) -> None:
    """Inspect the files that the kill has left. Mutates: ``attempt``."""
    seen = apart(look, asdict(run))
    if seen["wrong"]:
        attempt.problems.append(seen["wrong"])
    lines = [line for rank in range(RANKS) for line in read_log(run.folder, rank)]
    attempt.newest = max(seen["steps"], default=None)
    newest = attempt.newest or 0
    acknowledged = max((line["acknowledged"] for line in lines if "acknowledged" in line), default=0)
    if newest < acknowledged:
        attempt.problems.append(f"lost: step {acknowledged} was said to be saved, the newest is {newest}")
    attempt.lost = max(_last_step(run) - newest, 0)
    allowed = EVERY * IN_FLIGHT[run.mode]
    if attempt.lost > allowed:
        attempt.problems.append(f"{attempt.lost} steps of work lost, at most {allowed} may be")


def _last_step(run: Run) -> int:
    """Return the last step of the last attempt."""
    reached = 0
    for rank in range(RANKS):
        current = 0
        for line in read_log(run.folder, rank):
            if "attempt" in line:
                current = line["loaded"] or 0
            current = line.get("step", current)
        reached = max(reached, current)
    return reached


def _compare(run: Run, reference: Undisturbed, attempts: list[Attempt]) -> list[str]:
    """Compare a killed and finished run with the undisturbed run."""
    problems = []
    logs = [read_log(run.folder, rank) for rank in range(RANKS)]
    for rank, log in enumerate(logs):
        for line in log:
            if "step" in line and line["loss"] != reference.losses.get(line["step"]):
                problems.append(f"another loss at step {line['step']}")
            if line.get("loaded") is not None and line["digest"] != reference.digests.get((rank, line["loaded"])):
                problems.append(f"rank {rank} loaded another state than that of step {line['loaded']}")
    ends = [[line for line in log if "done" in line] for log in logs]
    for rank, (end, expected) in enumerate(zip(ends, reference.ends, strict=True)):
        different = [name for name in expected if not end or end[-1][name] != expected[name]]
        if different:
            problems.append(f"rank {rank} ended with another {', '.join(different)}")
    newest = {attempt.newest for attempt in attempts}
    for line in logs[0]:
        if "attempt" in line and line["loaded"] not in newest | {None}:
            problems.append(f"loaded step {line['loaded']}, which was never the newest")
    problems += _litter(run, logs[0])
    return problems


def _litter(run: Run, log: list[dict[str, Any]]) -> list[str]:
    """Return leftovers of killed saves that no later save has removed.

    A start that was killed before its first commit was a run of its own, which nobody can continue: its unfinished files are
    left to ``prune``. And a start that finds nothing more to do saves nothing.
    """
    last = max(index for index, line in enumerate(log) if "attempt" in line)
    if not any("saving" in line for line in log[last:]):
        return []
    seen = apart(look, asdict(run))
    leftover = [name for name in seen["names"] if "." in name and seen["run"] in name]
    return [f"litter: {leftover}"] if leftover else []


def spoiled() -> dict[str, list[str]]:
    """Return the findings about runs with a planted fault, which must be detected. To be asked of a nursery."""
    reference, problems = undisturbed(), {}
    with scratch() as folder:
        run = Run(folder=folder, steps=STEPS)
        fork_and_finish(run)
        for name, spoil in _SPOILS.items():
            spoil(run)
            attempt = Attempt(target="all ranks")
            _judge(run, attempt)
            problems[name] = [*attempt.problems, *_compare(run, reference, [attempt])]
            for rank in range(RANKS):
                log = Path(folder) / f"log-{rank}"
                log.write_text("".join(line for line in log.read_text().splitlines(keepends=True) if "spoiled" not in line))
    return problems


def _append(run: Run, **line: Any) -> None:
    with open(Path(run.folder) / "log-0", "a") as file:
        file.write(json.dumps({**line, "spoiled": True}) + "\n")


def _flip_newest(run: Run) -> None:
    path = run.root / f"step-{STEPS:08d}" / "rank-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


_SPOILS: dict[str, Callable[[Run], None]] = {
    "nothing": lambda run: None,
    "another loss": lambda run: _append(run, step=3, loss="0x1p+3"),
    "another state loaded": lambda run: _append(run, attempt=0.0, loaded=STEPS, digest="0"),
    "a commit lost": lambda run: _append(run, acknowledged=STEPS + EVERY),
    "work lost": lambda run: _append(run, step=STEPS + 5, loss="0x1p+3"),
    "litter": lambda run: (run.root / f"step-00000099.tmp-{_run_id(run)}-01234567").mkdir(),
    "a flipped bit": _flip_newest,
}


def _run_id(run: Run) -> str:
    return str(apart(look, asdict(run))["run"])
