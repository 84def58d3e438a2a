"""Two processes at work in one folder, their file operations interleaved one by one: two writers, or a writer and a reader.

Every operation waits at a gate for its turn; the order of turns is drawn. So each draw is another interleaving, also of those
that a machine would show once in a million runs.
"""

from __future__ import annotations

import os
import random
import select
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from checkpoint.faults.kills import scratch
from checkpoint.faults.nursery import LONG_S, Child, apart, fork
from checkpoint.faults.outcome import Outcome, plain
from checkpoint.faults.samples import EXTRA, sample, write
from checkpoint.faults.watched import CALLS

_PATIENCE_S = 0.03  # for a process on the way to its gate; a process that waits for the other never comes there
_STEPS = 2


class Gated:
    """``os`` for a module: one operation of this process at a time, each after a word from the driver."""

    def __init__(self, asks: int, turns: int) -> None:
        self._asks, self._turns = asks, turns
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        return partial(self._call, real) if name in CALLS else real

    def _call(self, real: Callable[..., Any], *args: Any, **options: Any) -> Any:
        with self._lock:
            os.write(self._asks, b"?")
            os.read(self._turns, 1)
            return real(*args, **options)


@dataclass(slots=True, kw_only=True)
class Player:
    """A process, and the pipes of its gate."""

    name: str
    child: Child
    asks: int
    turns: int
    at_gate: bool = False
    done: bool = False

    def go(self) -> None:
        self.at_gate = False
        os.write(self.turns, b"!")

    def close(self) -> None:
        self.child.close()
        os.close(self.asks)
        os.close(self.turns)


def _start(name: str, fn: Callable[..., Any], *args: Any) -> Player:
    asks, theirs = os.pipe()
    their_turns, turns = os.pipe()
    child = fork(_gated, theirs, their_turns, fn, args)
    os.close(theirs)
    os.close(their_turns)
    return Player(name=name, child=child, asks=asks, turns=turns)


def _gated(asks: int, turns: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    from dtrain.storage import local

    local.os = Gated(asks, turns)  # type: ignore[assignment]
    return fn(*args)


# --- bodies of the processes ---------------------------------------------------------------------------------------


def load(path: str, state: Any) -> Any:
    """Load a root. The values beside the state, which the sample's first steps have, are ignored."""
    import dtrain as dt

    with suppress(dt.errors.CheckpointMismatchError):
        return dt.load_sharded(path, state)
    try:
        return dt.load_sharded(path, state, ignore=[f"extra/{name}" for name in EXTRA])
    except dt.errors.ConfigError:  # a newer step has come meanwhile, without these values
        return dt.load_sharded(path, state)


def write_steps(root: str, seed: int, resumes: bool, keep_last: int | None, steps: int) -> dict[str, Any]:
    """Save some steps. Return the saved steps in order, and the error that ended it."""
    from checkpoint.states import digest, plain_state, train
    from dtrain.checkpoint.save import save_sharded
    from dtrain.dist.rng import seed_all

    saved: list[tuple[int, str]] = []
    error, pid = "", os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            state = plain_state(seed)
            if resumes:
                state = load(root, state)
                seed_all(seed)
            for _ in range(steps):
                state = train(state, 1)
                save_sharded(root, state, keep_last=keep_last).wait()
                saved.append((state.step, digest(state, rng=False)))
        except Exception as problem:  # noqa: BLE001 - its class is checked elsewhere
            error = f"{type(problem).__name__}: {problem}"
    return {"saved": saved, "error": error, "pid": pid}


def read_newest(root: str) -> dict[str, Any]:
    """Load, once. Return the step, or the error and True if the state is unchanged."""
    from checkpoint.states import digest, plain_state

    state = plain_state(7)
    before = digest(state, rng=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            restored = load(root, state)
        except Exception as problem:  # noqa: BLE001
            return {"error": f"{type(problem).__name__}: {problem}", "same": digest(state, rng=False) == before}
    return {"error": "", "step": restored.step, "digest": digest(restored, rng=False)}


def look(root: str) -> dict[str, Any]:
    """Read each committed step to the last byte; return the steps and the state that each restores."""
    import dtrain as dt
    from checkpoint.states import digest, plain_state

    try:
        folders = {checkpoint.step: checkpoint.path for checkpoint in dt.checkpoint.list_steps(root)}
        for path in folders.values():
            dt.checkpoint.verify(path)
        states = {step: load(path, plain_state()) for step, path in folders.items()}
    except (dt.errors.DtrainError, UserWarning) as error:
        return {"wrong": f"{type(error).__name__}: {error}"}
    return {"wrong": "", "steps": [[step, digest(state, rng=False)] for step, state in states.items()]}


# --- the driver ----------------------------------------------------------------------------------------------------


def interleave(players: list[Player], dice: random.Random) -> list[dict[str, Any]]:
    """Let them take turns until all have answered. In some draws they alternate, in others one of them is far ahead."""
    stays, ahead = dice.choice((0.0, 0.5, 0.8, 0.95)), dice.choice((0.02, 0.5, 0.5, 0.98))
    last: Player | None = None
    deadline = time.monotonic() + LONG_S
    while not all(player.done for player in players):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{[p.name for p in players if not p.done]} never ended")
        _gather(players)
        ready = [player for player in players if player.at_gate]
        if ready:
            ahead_first = ready if dice.random() < ahead else ready[::-1]
            last = last if last in ready and dice.random() < stays else ahead_first[0]
            last.go()
    return [player.child.answer() for player in players]


def _gather(players: list[Player]) -> None:
    """Wait until each is at its gate or has answered, but not for long."""
    deadline = time.monotonic() + _PATIENCE_S
    while moving := [player for player in players if not player.at_gate and not player.done]:
        handles = {player.asks: player for player in moving} | {player.child.pipe: player for player in moving}
        ready = select.select(list(handles), [], [], max(0.0, deadline - time.monotonic()))[0]
        if not ready:
            return
        for handle in ready:
            player = handles[handle]
            if handle == player.child.pipe:
                player.done = True
            elif not player.done:
                player.at_gate = bool(os.read(handle, 1))


def draw(seed: int, k: int) -> list[dict[str, Any]]:
    """One interleaving; the pairs take turns. To be asked of a nursery."""
    dice = random.Random(f"writers {seed} {k}")
    pair = list(PAIRS)[k % len(PAIRS)]
    with scratch() as folder:
        root = str(write(sample("1 rank"), Path(folder)).parent) if "new runs" not in pair else folder
        before = apart(look, root)["steps"]
        players = [_start(name, fn, root, *args) for name, (fn, *args) in PAIRS[pair].items()]
        try:
            answers = dict(zip(PAIRS[pair], interleave(players, dice), strict=True))
        finally:
            for player in players:
                player.close()
        after = apart(look, root)
    came, problems = _judge(before, answers, after)
    return plain([Outcome(fault=pair, came=came, wrong=f"{'; '.join(problems)}" if problems else "")])


PAIRS: dict[str, dict[str, tuple[Any, ...]]] = {
    "two new runs": {
        "one": (write_steps, 0, False, None, _STEPS),
        "other": (write_steps, 11, False, None, _STEPS),
    },
    "one run, resumed twice": {
        "one": (write_steps, 21, True, 2, _STEPS),
        "other": (write_steps, 22, True, 2, _STEPS),
    },
    "a run, and a new one": {
        "one": (write_steps, 21, True, None, _STEPS),
        "other": (write_steps, 11, False, None, _STEPS),
    },
    "a writer that prunes, and a reader": {
        "writer": (write_steps, 21, True, 1, 3),
        "reader": (read_newest,),
    },
}


def _judge(before: list[Any], answers: Mapping[str, dict[str, Any]], after: dict[str, Any]) -> tuple[str, list[str]]:
    """Require that each step was saved by a process, and that each reported save is there, or a later save in its place."""
    if after["wrong"]:
        return "failed", [after["wrong"]]
    problems = [
        f"{name} ended in {answer['error']}"
        for name, answer in answers.items()
        if answer["error"] and not answer["error"].startswith(_CLEAN)
    ]
    writers = [answer for answer in answers.values() if "saved" in answer]
    saved = {tuple(pair) for pair in before} | {tuple(pair) for answer in writers for pair in answer["saved"]}
    there = {tuple(pair) for pair in after["steps"]}
    problems += [f"step {step} is none that was saved" for step, digest in there if (step, digest) not in saved]
    steps = {step for step, _ in there}
    for answer in writers:
        if answer["saved"] and not {step for step, _ in answer["saved"]} & steps:
            problems.append(f"of the steps {answer['saved']} that were saved none is there")
        if not answer["saved"] and not answer["error"]:
            problems.append("a writer neither saved nor raised")
    if any(answer["saved"] for answer in writers) and not there & {tuple(e) for a in writers for e in a["saved"]}:
        problems.append("what was saved is not there")
    reader = answers.get("reader")
    if reader is not None:
        if reader["error"]:
            problems += [] if reader["same"] else ["a load that failed changed the state"]
            return "the reader was refused", problems
        if (reader["step"], reader["digest"]) not in saved:
            problems.append(f"the reader got a state that nobody saved, as step {reader['step']}")
        return "the reader got one of the states", problems
    refused = sum(bool(answer["error"]) for answer in writers)
    return ("both saved, one after the other", "one was refused", "both were refused")[refused], problems


_CLEAN = ("CheckpointError: ", "CorruptCheckpointError: ")
