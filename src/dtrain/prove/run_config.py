"""Describe the runs of a proof (``RunConfig``), and choose them from what the first run of the script has shown."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from dtrain.prove.run_records import BITS, RunRecord

Dtype = Literal["fp64", "fp32", "as written"]
_STEP_OF_DTRAIN = re.compile(r"compose_step|microbatch_step|grad_cache_step|optimizer_in_backward")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """One run of the script on some ranks, and its changes from outside.

    Args:
        name: name of the run, unique in the proof, as in ``"2 ranks, replicate"``.
        folder: folder of the run's records, its output and its current folder.
        script: path of the script.
        args: arguments of the script.
        ranks: number of ranks.
        steps: number of steps to run.
        dtype: dtype of the whole computation.
        strategy: strategy of ``shard_model``; None keeps the script's strategy.
        microbatch_size: microbatch size; None keeps the script's size.
        even_random: if True, random numbers are equal for all samples, so that they do not depend on the layout.
        recompute: if False, activation checkpointing is off.
        kill_after: step after which a rank is killed; None runs to the end.
        kill_rank: the rank that is killed. The other ranks end when they miss it.
        cut_after: number of updates after which a loop by hand without a loader is ended; None is ``RECORDED_LENGTHS`` times
            the steps.
        has_dtrain_loop: if True, the script runs dtrain's step, so the steps of a loop by hand prepare the training.
        first_step: number of the first step in a script that does not use dtrain's step, in a resumed run.
        loop: updates of each optimizer of the loop that is killed, when the run that goes on was saved, by its signature. Other
            optimizers prepare the loop. If it is empty, all optimizers are of the loop.
        activations: if True, record the outputs of all modules in the first forward, and their gradients.
        perturb_seed: seed of changes of the last bit of modules' outputs, which show the effect of rounding; None changes none.
        check_exports: if True, load exported files again, and compare outputs.
        vary_machine: if True, the clock runs faster and the process has more memory, so that numbers about the machine differ.
        experiment: cause that the run takes out of the script, a key of ``EXPERIMENTS``; None takes out none.
        seeds: seeds of the places of the script where ranks have different seeds, for the experiment that makes them equal.
        batches: folder for the batches of training, which a run on one rank writes, and in which other runs find theirs; "" if
            the script reads its own.
        loaders: numbers of torch's loaders whose batches these are.
        whole: shapes of the parameters on one rank by name, in the runs after the first one.
        width: width to which batches are padded, for the experiment that makes them equal; 0 leaves them.
        shifted: parameter that the run moves before the first step, and the share of each element, for a finite difference of
            the loss; None moves none.
    """

    name: str
    folder: str
    script: str
    args: tuple[str, ...] = ()
    ranks: int = 1
    steps: int = 4
    dtype: Dtype = "fp64"
    strategy: str | None = None
    microbatch_size: int | None = None
    even_random: bool = False
    recompute: bool = True
    kill_after: int | None = None
    kill_rank: int = 0
    cut_after: int | None = None
    has_dtrain_loop: bool = False
    first_step: int = 0
    loop: Mapping[str, int] = field(default_factory=dict)
    activations: bool = False
    perturb_seed: int | None = None
    check_exports: bool = False
    vary_machine: bool = False
    experiment: str | None = None
    seeds: Mapping[str, Sequence[int]] = field(default_factory=dict)
    batches: str = ""
    loaders: tuple[int, ...] = ()
    whole: Mapping[str, Sequence[int]] = field(default_factory=dict)
    width: int = 0
    shifted: tuple[str, float] | None = None

    @property
    def may_have_dtrain_loop(self) -> bool:
        """True if the text of the script names functions that make dtrain's step."""
        return bool(_STEP_OF_DTRAIN.search(Path(self.script).read_text(encoding="utf-8", errors="replace")))

    @property
    def work_folder(self) -> Path:
        """Current folder of the ranks."""
        return Path(self.folder, "work")

    def write(self) -> Path:
        """Write the config into its folder, which is created, and return the path."""
        path = Path(self.folder, "run.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.encode(self))
        return path

    @classmethod
    def read(cls, path: Path) -> RunConfig:
        """Read a config that ``write`` has written."""
        return msgspec.json.decode(path.read_bytes(), type=cls)


SAVE_INTERVAL = 2
"""Steps between two saves in a short run: ``state.crossed`` is True after each second step."""

RECORDED_LENGTHS = 10
"""Updates that are recorded of a loop that cannot be shortened, as a multiple of the steps of the run."""

MOVE = 1e-5
"""Share by which a parameter moves for a finite difference of the loss. In float64 its error is some 1e-10."""

SKETCH_SIZE = 2048
"""Largest number of numbers that represent a recorded tensor; see ``run_log``."""


BASE, AGAIN, EVEN = "1 rank", "1 rank, again", "1 rank, even random numbers"
FLOAT32, WRITTEN = "1 rank, float32", "1 rank, as written"
ROUNDED, ROUNDED_AGAIN = "1 rank, other rounding", "1 rank, other rounding, again"
SERVING = (EVEN, FLOAT32, ROUNDED, ROUNDED_AGAIN)
"""Runs that are not rows of the answer."""
_STRATEGIES = ("full_shard", "shard_grad_op", "replicate")


def many_ranks(ranks: int) -> str:
    """Return the name of the run on several ranks that changes nothing else."""
    return f"{ranks} ranks"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """A run, and the run that it is compared with.

    Args:
        config: the run.
        against: name of the other run; empty for a run that only serves others.
        same_layout: if True, also random state and variables must agree.
        after: name of the killed run whose folder this run continues; None otherwise.
        optional: if True, the script may not support what the run changes, so a failure shows nothing.
    """

    config: RunConfig
    against: str = ""
    same_layout: bool = False
    after: str | None = None
    optional: bool = False


def first_runs(script: Path, args: Sequence[str], folder: Path, *, steps: int, keep_precision: bool) -> list[PlannedRun]:
    """Return the run on one rank, and its repetition, which have a folder each in ``folder``."""
    base = RunConfig(
        name=BASE,
        folder=str(folder / "base"),
        script=str(script),
        args=tuple(args),
        steps=steps,
        dtype="as written" if keep_precision else "fp64",
        activations=keep_precision,
        check_exports=True,
    )
    again = _variant(base, "again", name=AGAIN, vary_machine=True)
    return [PlannedRun(config=base), PlannedRun(config=again, against=BASE, same_layout=True)]


def next_runs(base: RunConfig, record: RunRecord, world_sizes: Sequence[int], seed: int) -> list[PlannedRun]:
    """Return the runs that the first run of the script makes possible.

    Args:
        base: the first run.
        record: record of the first run.
        world_sizes: numbers of ranks that are compared with one rank.
        seed: seed of the step after which a run is killed.
    """
    base, keep_precision = replace(base, has_dtrain_loop=bool(record.rows("layout"))), base.dtype == "as written"
    draws = record.note("draws") is not None or record.note("frozen_statistics") is not None
    reference, runs = EVEN if draws else BASE, list[PlannedRun]()

    def plan(name: str, place: str, changes: Mapping[str, object], against: str = "", **comparison: Any) -> None:
        runs.append(PlannedRun(config=_variant(base, place, name=name, **changes), against=against, **comparison))

    if draws:
        plan(EVEN, "even", {"even_random": True})
    written = record.note("sharding")
    for position, ranks in enumerate(world_sizes):
        layout = {"ranks": ranks, "even_random": draws}
        plan(many_ranks(ranks), f"ranks-{ranks}", layout, reference)
        if position == 0 and written is not None and written["strategy"] in (*_STRATEGIES, "no_shard"):
            for strategy in _STRATEGIES:
                if strategy != written["strategy"].replace("no_shard", "replicate"):
                    changes = {**layout, "strategy": strategy}
                    plan(f"{ranks} ranks, {strategy}", f"ranks-{ranks}-{strategy}", changes, reference, optional=True)
    size = other_microbatch_size(record)
    if size is not None:
        changes = {"microbatch_size": size, "even_random": draws}
        plan(f"microbatches of {size}", "microbatch", changes, reference, optional=True)
    if record.note("recompute") is not None:
        off = {"recompute": False}
        plan("activation checkpointing off", "recompute", off, BASE, same_layout=True, optional=True)
    # Random numbers in float64 are others, so the reference of low precision is a run in float32.
    low = record.note("low_precision") is not None or any(
        BITS.get(row["dtype"], 64) < BITS["float32"] for row in record.rows("activation")
    )
    as_written: dict[str, object] = {"dtype": "as written"}
    if keep_precision or low:
        plan(ROUNDED, "rounded", {**as_written, "activations": True, "perturb_seed": 0})
    if keep_precision:
        # The change of one number, such as a loss, may be small by chance.
        plan(ROUNDED_AGAIN, "rounded-2", {**as_written, "perturb_seed": 1})
    if low:
        plan(FLOAT32, "float32", {"dtype": "fp32", "activations": True})
    if not keep_precision and (low or record.rows("exported")):
        plan(WRITTEN, "written", {**as_written, "activations": True}, FLOAT32 if low else "")
    if kills := choose_kills(record, seed):
        signatures, loop = record.signatures, record.loop_of_saves()
        if not base.has_dtrain_loop and len(loop) < len(signatures):
            base = replace(base, loop=dict.fromkeys((signatures[index] for index in loop), 0))
        # transformers' Trainer has another order after a resume in its second epoch, so a loop by hand is killed once.
        for kill_after in dict.fromkeys(kills[::-1] if base.has_dtrain_loop else kills[:1]):
            killed, place = f"killed after step {kill_after}", "-late" * (kill_after != kills[0])
            plan(killed, f"killed{place}", {"kill_after": kill_after})
            plan(f"{killed}, resumed", f"resumed{place}", {}, BASE, same_layout=True, after=killed)
        # With draws, the steps before the kill drew other random numbers, so the parameters differ.
        for ranks in () if draws else world_sizes[:1]:
            plan(f"{killed}, resumed on {ranks} ranks", f"resumed-{ranks}", {"ranks": ranks}, BASE, after=killed)
            rank = random.Random(seed).randrange(ranks)
            lost = f"rank {rank} of {ranks} {killed}"
            plan(lost, "killed-rank", {"ranks": ranks, "kill_after": kill_after, "kill_rank": rank})
            plan(f"{lost}, resumed on 1 rank", "resumed-1", {}, BASE, after=lost)
    return runs


def is_endless(record: RunRecord, steps: int) -> bool:
    """Return True if a loop without a loader was ended, so that later runs end it after ``steps`` updates.

    Not if the first optimizer ended before, because its loop prepares the training.
    """
    last = max((row["step"] for row in record.rows("step") if row["optimizer_index"] == 0), default=0)
    return record.note("loop_cut") is not None and last + 1 >= RECORDED_LENGTHS * steps


def other_microbatch_size(record: RunRecord) -> int | None:
    """Return another microbatch size than that of the record, which leaves a smaller last microbatch; None if there is none."""
    note, rows = record.note("microbatches"), record.rows("step")
    if note is None or not rows:
        return None
    count = len(rows[0]["samples"])
    size = max(1, round(count * 0.4))
    if note["size"] == size:
        size -= 1
    return size if 0 < size < count else None


def choose_kills(record: RunRecord, seed: int) -> tuple[int, int] | None:
    """Return steps at which a run can be killed and go on from a checkpoint: a random one, and the last one.

    Late in a run a checkpoint has more to lose. None without a checkpoint before the last step.
    """
    loop = record.loop_of_saves()
    # Another optimizer may have prepared the loop in more steps.
    last = max((row["step"] for row in record.rows("step") if row["optimizer_index"] in loop), default=0)
    saves = sorted(step for step in {step for step, _ in record.saves(loop)} if 0 < step <= last)
    if not saves:
        return None
    return random.Random(seed).randint(saves[0], last), last


def _variant(base: RunConfig, place: str, **changes: object) -> RunConfig:
    """Return the first run with changes, and with the folder ``place`` beside its folder."""
    only_base = {"activations": False, "check_exports": False, "folder": str(Path(base.folder).with_name(place))}
    return replace(base, **{**only_base, **changes})  # type: ignore[arg-type]
