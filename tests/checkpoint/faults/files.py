"""Whole files truncated, zeroed, swapped, missing, duplicated, or too many: refused by name, with the older step offered."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checkpoint.faults.kills import scratch
from checkpoint.faults.nursery import apart
from checkpoint.faults.outcome import Outcome, plain
from checkpoint.faults.samples import KINDS, sample, states_of, write

Damage = Callable[[Path, str], str]
"""Does it to a file of a step. Returns the name of the file that has to be blamed, "" when there is nothing to do it with."""


def _truncated(fraction: float) -> Damage:
    def damage(step: Path, name: str) -> str:
        os.truncate(step / name, int((step / name).stat().st_size * fraction))
        return name

    return damage


def _one_byte_short(step: Path, name: str) -> str:
    os.truncate(step / name, (step / name).stat().st_size - 1)
    return name


def _one_byte_more(step: Path, name: str) -> str:
    with open(step / name, "ab") as file:
        file.write(b"\n")
    return name


def _zeroed(begin: float, end: float) -> Damage:
    def damage(step: Path, name: str) -> str:
        data = bytearray((step / name).read_bytes())
        low, high = int(begin * len(data)), int(end * len(data))
        data[low:high] = bytes(high - low)
        (step / name).write_bytes(data)
        return name

    return damage


def _missing(step: Path, name: str) -> str:
    (step / name).unlink()
    return name if name != "manifest.json" else ""  # without it, it is no checkpoint: see below


def _swapped_between_ranks(step: Path, name: str) -> str:
    other = name.replace("rank-00000", "rank-00001")
    if other == name or not (step / other).exists():
        return ""
    aside = (step / name).read_bytes()
    (step / name).write_bytes((step / other).read_bytes())
    (step / other).write_bytes(aside)
    return name


def _of_the_older_step(step: Path, name: str) -> str:
    older = step.with_name("step-00000001") / name
    if not older.exists() or older.read_bytes() == (step / name).read_bytes():  # a file that training does not change
        return ""
    shutil.copy(older, step / name)
    return name


def _of_another_run(step: Path, name: str) -> str:
    shutil.copy(step.parent / "other" / step.name / name, step / name)
    # Its manifest is sound in itself, but its statements about the other files do not hold.
    return name if name != "manifest.json" else "index.json"


def _duplicated(step: Path, name: str) -> str:
    renamed = {"manifest": "manifest (1)", "index": "index (1)", "rank-00000": "rank-00007", "rank-00001": "rank-00008"}
    copy = name
    for old, new in renamed.items():
        copy = copy.replace(old, new)
    shutil.copy(step / name, step / copy)
    return copy


def _a_folder_instead(step: Path, name: str) -> str:
    (step / name).unlink()
    (step / name).mkdir()
    return name


def _a_pipe_instead(step: Path, name: str) -> str:
    (step / name).unlink()
    os.mkfifo(step / name)
    return name


def _a_dangling_link_instead(step: Path, name: str) -> str:
    (step / name).unlink()
    (step / name).symlink_to(step / "nowhere")
    return name


def _extra(name_of: str, make: Callable[[Path], object]) -> Damage:
    def damage(step: Path, name: str) -> str:
        if name != "manifest.json":
            return ""  # once is enough
        make(step / name_of)
        return name_of

    return damage


DAMAGE: dict[str, Damage] = {
    "emptied": _truncated(0.0),
    "truncated to the half": _truncated(0.5),
    "one byte short": _one_byte_short,
    "one byte more": _one_byte_more,
    "zeroed": _zeroed(0.0, 1.0),
    "zeroed at the begin": _zeroed(0.0, 0.1),
    "zeroed in the middle": _zeroed(0.4, 0.6),
    "zeroed at the end": _zeroed(0.9, 1.0),
    "missing": _missing,
    "swapped between ranks": _swapped_between_ranks,
    "swapped with the older step's": _of_the_older_step,
    "swapped with another run's": _of_another_run,
    "duplicated": _duplicated,
    "a folder": _a_folder_instead,
    "a pipe": _a_pipe_instead,
    "a dangling link": _a_dangling_link_instead,
    "a foreign file": _extra("notes.txt", lambda path: path.write_text("mine")),
    "a foreign hidden file": _extra(".DS_Store", lambda path: path.touch()),
    "a foreign folder": _extra("more", lambda path: path.mkdir()),
    "the index of a further rank": _extra("rank-00002.json", lambda path: path.write_text("{}")),
}


def count_draws() -> int:
    """One draw for each kind of checkpoint and damage."""
    return len(KINDS) * len(DAMAGE)


def draw(seed: int, k: int) -> list[dict[str, Any]]:
    """One kind of damage to each file of one checkpoint; ``seed`` changes nothing. To be asked of a nursery."""
    if k >= count_draws():
        return []  # all were made
    kind, damage = KINDS[k % len(KINDS)], list(DAMAGE)[k // len(KINDS)]
    root_files, other_files = sample(kind), sample(kind, 11)
    names = sorted({path.split("/")[1] for path in root_files if path.startswith("step-00000002/")})
    with scratch() as folder:
        for name in names:
            write(root_files, Path(folder) / name)
            write(other_files, Path(folder) / name / "other")
        return apart(_damage_each, folder, kind, damage, names)


def _damage_each(folder: str, kind: str, damage: str, names: list[str]) -> list[dict[str, Any]]:
    outcomes = []
    for name in names:
        step = Path(folder) / name / "step-00000002"
        blamed = DAMAGE[damage](step, name)
        if not blamed and damage != "missing":
            continue
        wrong = _not_refused(step, blamed, kind) if blamed else _not_passed_over(step, kind)
        came = "refused by name, the older step offered" if blamed else "not committed, the older step taken"
        outcomes.append(Outcome(fault=damage, came="accepted" if wrong else came, wrong=wrong and f"{name} of {kind}: {wrong}"))
    return plain(outcomes)


def _not_refused(step: Path, blamed: str, kind: str) -> str:
    """Return how the file was accepted, or refused in the wrong words; empty if all is well."""
    import dtrain as dt
    from checkpoint.faults.flips import _digests

    older = str(step.with_name("step-00000001"))
    given = states_of(kind, 7)
    before = _digests(given)
    for what, look in {
        "verify of the step": lambda: dt.checkpoint.verify(step),
        "load_sharded of the step": lambda: dt.load_sharded(step, given, extra={"note": {}, "table": []}),
        "load_sharded of the root": lambda: dt.load_sharded(step.parent, given, extra={"note": {}, "table": []}),
    }.items():
        try:
            look()
        except dt.errors.CorruptCheckpointError as error:
            if blamed not in str(error):
                return f"{what} blamed something else: {error}"
            if what.startswith("load") and older not in str(error):
                return f"{what} did not offer the older step: {error}"
        except Exception as error:  # noqa: BLE001 - any other way to end is a finding
            return f"{what} raised {type(error).__name__}: {error}"
        else:
            return f"{what} accepted it"
    if _digests(given) != before:
        return "the state changed"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        taken = dt.load_sharded(step.parent, given, extra={"note": {}, "table": []}, on_corrupt="previous")
    return "" if taken.step == 1 else f"took step {taken.step} instead"


def _not_passed_over(step: Path, kind: str) -> str:
    """A step without a manifest was never committed."""
    import dtrain as dt

    restored = dt.load_sharded(step.parent, states_of(kind, 7), extra={"note": {}, "table": []})
    return "" if restored.step == 1 else f"took step {restored.step}"
