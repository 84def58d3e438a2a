"""One flipped bit, anywhere in any file of a step: refused by deep verification, and by a load."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from checkpoint.faults.kills import scratch
from checkpoint.faults.nursery import apart
from checkpoint.faults.outcome import Outcome, plain
from checkpoint.faults.samples import KINDS, sample, states_of, write

BATCH = 100  # flips that share a fork and a checkpoint


@contextmanager
def flipped(path: Path, bit: int) -> Iterator[None]:
    """The file with one bit the other way round."""
    handle = os.open(path, os.O_RDWR)
    try:
        (byte,) = os.pread(handle, 1, bit // 8)
        os.pwrite(handle, bytes([byte ^ 1 << bit % 8]), bit // 8)
        yield
        os.pwrite(handle, bytes([byte]), bit // 8)
    finally:
        os.close(handle)


def draw(seed: int, k: int) -> list[dict[str, Any]]:
    """A batch of flips in one checkpoint. To be asked of a nursery."""
    kind = KINDS[k % len(KINDS)]
    with scratch() as folder:
        step = write(sample(kind), Path(folder))
        return apart(_flip, str(step), kind, f"flips {seed} {k}")


def _flip(folder: str, kind: str, seed: str) -> list[dict[str, Any]]:
    dice, step = random.Random(seed), Path(folder)
    sizes = {path.name: path.stat().st_size for path in sorted(step.iterdir())}
    names = list(sizes)
    outcomes = []
    given = states_of(kind, 7)
    before = _digests(given)
    for number in range(BATCH):
        # Half of them anywhere, half of them in a file drawn first: data would get nearly all of them, and a manifest none.
        weights = list(sizes.values()) if number % 2 else [1] * len(names)
        name = dice.choices(names, weights)[0]
        bit = dice.randrange(8 * sizes[name])
        with flipped(step / name, bit):
            wrong = [_not_refused(step, name, given)]
        if (number + 1) % 50 == 0 and _digests(given) != before:
            wrong.append("a refused load has changed the state")
        outcomes.append(
            Outcome(
                fault=f"a bit of {_what(name)}, {kind}",
                came="refused" if not any(wrong) else "accepted",
                wrong="".join(f"bit {bit} of {name}: {text}" for text in wrong if text),
            )
        )
    _still_sound(step, given)
    return plain(outcomes)


def _what(name: str) -> str:
    if name == "manifest.json":
        return "the manifest"
    return "an index" if name.endswith(".json") else "data"


def _digests(given: Any) -> list[str]:
    from checkpoint.states import digest

    return [digest(state, rng=False) for state in (given.values() if isinstance(given, dict) else [given])]


def _not_refused(step: Path, name: str, given: Any) -> str:
    """Return how a step with a flip in the file ``name`` was accepted; empty if refused."""
    import dtrain as dt

    for what, look in (("verify", lambda: dt.checkpoint.verify(step)), ("load_sharded", lambda: _load(step, given))):
        try:
            look()
        except dt.errors.CorruptCheckpointError as error:
            if name not in str(error):
                return f"{what} named another file: {error}"
        else:
            return f"{what} accepted it"
    return ""


def _load(step: Path, given: Any) -> Any:
    import dtrain as dt

    return dt.load_sharded(step, given, extra={"note": {}, "table": []})


def _still_sound(step: Path, given: Any) -> None:
    """Restore every bit and load the step: it was refused for the flipped bit and nothing else."""
    import dtrain as dt

    dt.checkpoint.verify(step)
    _load(step, given)
