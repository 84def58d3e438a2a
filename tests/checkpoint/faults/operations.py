"""A kill, an error or a short write at every single file operation of a save, on one rank.

The save goes through every branch: the run has gone back to step 1, a step 2 of its old lineage is in the way, a
killed save has left a side folder, and older steps are to be removed. Chunks are small, so that a small state has many.
"""

from __future__ import annotations

import random
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from checkpoint.faults.kills import scratch
from checkpoint.faults.nursery import apart, fork_ranks
from checkpoint.faults.outcome import Outcome, plain
from checkpoint.faults.watched import ACTIONS, ERRORS, WRITES, watching

LATE_S = 10.0  # within which every rank has raised
CHUNK = 1024
BATCH = 16  # faults that share the start of the ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class How:
    """One way to save."""

    mode: str
    ranks: int
    threads: int

    def __str__(self) -> str:
        return f"{self.mode}, {self.ranks} rank{'s' * (self.ranks > 1)}, {self.threads} thread{'s' * (self.threads > 1)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Fault of one operation of one rank."""

    rank: int
    at: int
    action: str


EVERY_WAY = tuple(How(mode=m, ranks=r, threads=t) for m, r, t in product(("sync", "async"), (1, 2), (1, 4)))
SIMPLEST = EVERY_WAY[0]


# --- on the ranks --------------------------------------------------------------------------------------------------


def _small_chunks(threads: int) -> None:
    """Small chunks, written by so many threads. Mutates: this process's dtrain."""
    from dtrain.dist import incident
    from dtrain.storage import local

    copies = [module for name, module in list(sys.modules.items()) if name.startswith("dtrain.") and _has_chunks(module)]
    assert copies, "chunks have another name now"
    for module in copies:
        module.CHUNK_BYTES = CHUNK  # type: ignore[attr-defined]
    local.for_each_part = _with_threads(local.for_each_part, threads)
    incident.GRACE_S = 0.5


def _with_threads(for_each_part: Callable[..., None], number: int) -> Callable[..., None]:
    def with_so_many(count: int, do: Callable[[int], None], *, threads: int, name: str) -> None:
        for_each_part(count, do, threads=number, name=name)

    return with_so_many


def _has_chunks(module: object) -> bool:
    return hasattr(module, "CHUNK_BYTES")


def _joined(ranks: int) -> Any:
    """Return this rank. Groups stay open: a rank that has lost a peer cannot close them, and the process ends anyway."""
    import dtrain as dt
    from dtrain.dist.init import get_dist_info

    return dt.init_dist(device="cpu") if ranks > 1 else get_dist_info()


def _begin(root: Path) -> Any:
    """The state that is about to be saved as step 2 again."""
    from checkpoint.states import plain_state, train
    from dtrain.checkpoint.load import load_sharded
    from dtrain.dist.rng import seed_all

    state = load_sharded(root / "step-00000001", plain_state())
    seed_all(5)  # other draws than in the old lineage, and so another step 2
    return train(state, 1)


def _save(root: Path, state: Any, mode: str, *, keep_last: int | None = 1) -> bool:
    """Return True if the save wrote a file."""
    from dtrain.checkpoint.save import save_sharded

    return bool(save_sharded(root, state, keep_last=keep_last, mode=mode).result().written)  # type: ignore[arg-type]


def prepare(root: str) -> None:
    """Make the root that every draw begins with."""
    import dtrain as dt
    from checkpoint.states import plain_state, train
    from dtrain.checkpoint.save import save_sharded

    _small_chunks(1)
    with dt.init_dist(device="cpu") as info:
        # Equal draws on all ranks, so that their replicas are equal.
        dt.seed_all(0)
        state = train(plain_state(), 1)
        for _ in range(2):
            save_sharded(root, state).result()
            last, state = state, train(state, 1)
        if info.rank == 0:
            leftover = Path(root) / f"step-00000009.tmp-{last._run_context.lineage.run_id[:8]}-01234567"
            leftover.mkdir()
            (leftover / "rank-00000.json").touch()


def record(root: str, how: dict[str, Any]) -> dict[str, Any]:
    """The operations of an undisturbed save, and digests of the saved values."""
    from checkpoint.states import digest

    _small_chunks(how["threads"])
    _joined(how["ranks"])
    state = _begin(Path(root))
    with watching() as watched, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _save(Path(root), state, how["mode"])
    return {"calls": watched.calls, "digest": digest(state, rng=False), "writers": watched.writers}


def suffer(folder: str, how: dict[str, Any], faults: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Save once for each fault, each in a root of its own, and return the outcome on this rank."""

    _small_chunks(how["threads"])
    rank = _joined(how["ranks"]).rank
    return [_suffer(Path(folder) / str(number), How(**how), Fault(**fields), rank) for number, fields in enumerate(faults)]


def _suffer(root: Path, how: How, fault: Fault, rank: int) -> dict[str, Any]:
    from checkpoint.states import digest, train

    state = _begin(root)
    before = digest(state)
    mine = fault.rank == rank
    error, written, begun = None, False, time.monotonic()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with watching(operation=fault.at if mine else None, action=fault.action) as watched:
            try:
                written = _save(root, state, how.mode)
            except Exception as problem:  # noqa: BLE001 - its class is checked elsewhere
                error = problem
            seconds = time.monotonic() - begun
    answer = {
        "fired": watched.fired,
        "error": type(error).__name__ if error else "",
        "text": str(error) if error else "",
        "warned": [str(warning.message) for warning in caught],
        "seconds": seconds,
        "same": digest(state) == before,
        "written": written,
        "manifest": _manifest(root),
    }
    if fault.action == "kill":
        return answer  # this is a survivor: it has lost its peer for good
    answer["invalid"] = _invalid(root)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            answer["again"] = _save(root, state, how.mode, keep_last=None)
            _save(root, train(state, 1), how.mode, keep_last=None)
        except Exception as problem:  # noqa: BLE001
            answer["again"] = f"{type(problem).__name__}: {problem}"
    return answer


def _invalid(root: Path) -> str:
    """Return the step whose contents cannot be trusted."""
    import dtrain as dt

    try:
        for name in ("step-00000001", "step-00000002"):
            dt.checkpoint.verify(root / name)
    except dt.errors.CheckpointError as error:
        return str(error)
    return ""


def _manifest(root: Path) -> str:
    from dtrain.checkpoint.layout import MANIFEST

    path = root / "step-00000002" / MANIFEST
    return path.read_text() if path.exists() else ""


def check(roots: list[str]) -> list[dict[str, Any]]:
    """Return the verified steps of roots, the state that the newest restores, and whether a run continues from it."""
    _small_chunks(1)
    return [_check(root) for root in roots]


def _check(root: str) -> dict[str, Any]:
    import dtrain as dt
    from checkpoint.states import digest, plain_state, train

    try:
        checkpoints = dt.checkpoint.list_steps(root)
        for checkpoint in checkpoints:
            dt.checkpoint.verify(checkpoint.path)
        restored = dt.load_sharded(root, plain_state())
        loaded = digest(restored, rng=False)
        dt.save_sharded(root, train(restored, 5)).result()
    except (dt.errors.DtrainError, UserWarning) as error:
        return {"wrong": f"{type(error).__name__}: {error}"}
    return {
        "wrong": "",
        "steps": sorted(checkpoint.step for checkpoint in checkpoints),
        "step": restored.step,
        "digest": loaded,
        "names": _folders(Path(root)),
    }


def _folders(root: Path) -> list[str]:
    return sorted(entry.name for entry in root.iterdir() if entry.is_dir())


# --- in the nursery ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A way to save, when nothing happens to it."""

    calls: tuple[tuple[str, ...], ...]
    manifest: str
    old: str
    new: str


_KNOWN: dict[How, Known] = {}


def _known(how: How, folder: Path) -> Known:
    """Recorded once per process."""
    if how not in _KNOWN:
        root = _copy(how, folder / "recorded")
        answers = _ask_all(how.ranks, record, str(root), asdict(how))
        untouched = _copy(how, folder / "untouched")
        manifest = _manifest(untouched)
        before, after = apart(check, [str(untouched), str(root)])
        assert (before["wrong"], before["step"], before["steps"]) == ("", 2, [1, 2]), before
        assert after["wrong"] == "", after
        assert after["digest"] == answers[0]["digest"] != before["digest"], "the new step is as the old one: nothing to tell"
        parts = answers[0]["calls"].count("pwritev")
        assert parts >= 2 * how.threads, f"only {parts} parts for {how.threads} threads"
        assert (answers[0]["writers"] > 1) == (how.threads > 1), f"{answers[0]['writers']} threads wrote, not {how.threads}"
        calls = tuple(tuple(answer["calls"]) for answer in answers)
        _KNOWN[how] = Known(calls=calls, manifest=manifest, old=before["digest"], new=after["digest"])
    return _KNOWN[how]


@cache
def _template(ranks: int) -> dict[str, bytes]:
    """The files of the root that every draw begins with."""
    with scratch() as folder:
        root = Path(folder) / "root"
        _ask_all(ranks, prepare, str(root))
        names = [path for path in root.rglob("*") if path.is_file() and path.parent != root]  # a lock is its holder's alone
        return {str(path.relative_to(root)): path.read_bytes() for path in names}


def _copy(how: How, root: Path) -> Path:
    for name, data in _template(how.ranks).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def _ask_all(ranks: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    with fork_ranks(ranks, fn, *args) as children:
        return [child.answer() for child in children]


def faults_of(how: How, *, actions: Sequence[str] = ACTIONS) -> list[Fault]:
    """Every fault of a way to save."""
    with scratch() as folder:
        calls = _known(how, Path(folder)).calls
    return [
        Fault(rank=rank, at=index, action=action)
        for rank, names in enumerate(calls)
        for index, name in enumerate(names)
        for action in actions
        if action != "short write" or name in WRITES
    ]


def outcomes(how: How, faults: Sequence[Fault]) -> list[Outcome]:
    """Return the outcomes of these faults, without faults whose operation the save did not reach."""
    if not faults:
        return []
    with scratch() as folder:
        reference = _known(how, Path(folder))
        errors = [fault for fault in faults if fault.action != "kill"]
        kills = [fault for fault in faults if fault.action == "kill"]
        roots = [_copy(how, Path(folder) / "errors" / str(number)) for number in range(len(errors))]
        answers = _ask_all(how.ranks, suffer, str(Path(folder) / "errors"), asdict(how), list(map(asdict, errors)))
        left = [_copy(how, Path(folder) / "kills" / str(number) / "0") for number in range(len(kills))]
        survivors = [_kill(how, fault, root) for fault, root in zip(kills, left, strict=True)]
        after = apart(check, [str(root) for root in [*roots, *left]])
    results = [
        _of_error(how, reference, fault, [answer[number] for answer in answers], after[number])
        for number, fault in enumerate(errors)
    ]
    results += [
        None if told is None else _outcome(how, reference, fault, *_after_kill(reference, fault, told, seen))
        for fault, told, seen in zip(kills, survivors, after[len(errors) :], strict=True)
    ]
    return [outcome for outcome in results if outcome is not None]


def _outcome(how: How, reference: Known, fault: Fault, came: str, problems: list[str], seconds: float = 0.0) -> Outcome:
    names = reference.calls[fault.rank]
    place = f"operation {fault.at} ({names[fault.at] if fault.at < len(names) else 'one more'}) of rank {fault.rank}"
    wrong = f"{fault.action} at {place}: {'; '.join(problems)}" if problems else ""
    return Outcome(fault=f"{fault.action}; {how}", came=came, wrong=wrong, numbers={"seconds until all had raised": seconds})


def _of_error(how: How, reference: Known, fault: Fault, answers: list[dict[str, Any]], after: dict[str, Any]) -> Outcome | None:
    """Check a failed operation: all ranks raise and nothing has changed, or no rank raises and the step is there."""
    if not answers[fault.rank]["fired"]:
        return None
    raised = [answer["error"] for answer in answers]
    problems = [f"rank {rank}: the training state changed" for rank, answer in enumerate(answers) if not answer["same"]]
    problems += [answer["invalid"] for answer in answers if answer["invalid"]]
    problems += [f"{name}: {a['text']}" for name, a in zip(raised, answers, strict=True) if name not in _CLEAN]
    slowest = max(answer["seconds"] for answer in answers)
    if slowest > LATE_S:
        problems.append(f"took {slowest:.1f} s")
    if any(raised) and not all(raised):
        problems.append(f"raised on some ranks only: {raised}")
    published = answers[0]["manifest"] != reference.manifest
    if published == any(raised):
        problems.append(f"raised {raised}, and the step was {'' if published else 'not '}published")
    if any(answer["again"] is not any(raised) for answer in answers):
        problems.append(f"saving again: {[answer['again'] for answer in answers]}")
    if after["wrong"] or after["steps"] != [1, 2, 3]:
        problems.append(f"afterwards: {after}")
    elif any("." in name for name in after["names"]):
        problems.append(f"litter: {after['names']}")
    told = any(answer["warned"] for answer in answers)
    came = "raised, nothing published" if any(raised) else f"harmless{', with a warning' if told else ''}"
    return _outcome(how, reference, fault, came, problems, slowest if any(raised) else 0.0)


_CLEAN = ("", "CheckpointError", "PeerError")


def _kill(how: How, fault: Fault, root: Path) -> dict[int, dict[str, Any]] | None:
    """Kill a rank in an operation. Return the survivors' answers; None when the save did not come to the operation."""
    survivors = {}
    with fork_ranks(how.ranks, suffer, str(root.parent), asdict(how), [asdict(fault)]) as children:
        for rank, child in enumerate(children):
            try:
                survivors[rank] = child.answer()[0]
            except ChildProcessError as error:
                if rank != fault.rank or "before it answered" not in str(error):
                    raise
    return None if fault.rank in survivors else survivors


def _after_kill(
    reference: Known, fault: Fault, survivors: dict[int, dict[str, Any]], after: dict[str, Any]
) -> tuple[str, list[str], float]:
    problems = [f"rank {rank}: the training state changed" for rank, answer in survivors.items() if not answer["same"]]
    slowest = max((answer["seconds"] for answer in survivors.values()), default=0.0)
    if slowest > LATE_S:
        problems.append(f"took {slowest:.1f} s")
    if after["wrong"]:
        return "failed", [*problems, after["wrong"]], slowest
    states = {(1, 2): {reference.old: "the older step 2 stays", reference.new: "the new step 2 is committed"}}
    came = states.get(tuple(after["steps"]), {}).get(after["digest"], "")
    if after["steps"] == [1]:
        came = "between the renames, step 1 is the newest"
    if not came:
        problems.append(f"loads neither of the two states: {after}")
    if any("." in name for name in after["names"]):
        problems.append(f"litter: {after['names']}")
    if any(not answer["error"] for answer in survivors.values()) and "new" not in came:
        problems.append(f"a rank was told of a success: {survivors}")
    return came, problems, slowest


def draw(seed: int, k: int) -> list[dict[str, Any]]:
    """Batch ``k`` of all faults, each way to save in turn, in an order drawn from ``seed``. To be asked of a nursery."""
    return plain(_outcomes_of_batch(seed, k, BATCH))


def draw_small(seed: int, k: int) -> list[dict[str, Any]]:
    """Batch ``k`` of half the size. To be asked of a nursery."""
    return plain(_outcomes_of_batch(seed, k, BATCH // 2))


def _outcomes_of_batch(seed: int, k: int, size: int) -> list[Outcome]:
    how = EVERY_WAY[k % len(EVERY_WAY)]
    every = faults_of(how)
    random.Random(f"operations {seed} {how}").shuffle(every)
    start = k // len(EVERY_WAY) * size
    return outcomes(how, every[start : start + size])


def draw_simplest(seed: int, k: int) -> list[dict[str, Any]]:
    """Batch ``k`` of every operation of the simplest save. To be asked of a nursery."""
    return plain(outcomes(SIMPLEST, _of_simplest(seed)[k * BATCH : (k + 1) * BATCH]))


def count_simplest() -> int:
    """Return the number of faults. To be asked of a nursery."""
    return len(_of_simplest(0))


def draw_alternating(seed: int, k: int) -> list[dict[str, Any]]:
    """Batch ``k`` of one fault at every operation of the simplest save. To be asked of a nursery."""
    return plain(outcomes(SIMPLEST, _alternating(seed)[k * BATCH : (k + 1) * BATCH]))


def count_alternating() -> int:
    """Return the number of faults. To be asked of a nursery."""
    return len(_alternating(0))


def _alternating(seed: int) -> list[Fault]:
    """Return a kill at operations of even number, an error at the others and, at a write, also a short write."""
    return [fault for fault in _of_simplest(seed) if (fault.action == "kill") == (fault.at % 2 == 0)]


def _of_simplest(seed: int) -> list[Fault]:
    """Return at every operation a kill and one of the errors in turn, and at every write a short write."""
    named = tuple(ERRORS)
    return [
        fault
        for fault in faults_of(SIMPLEST)
        if fault.action not in ERRORS or fault.action == named[(seed + fault.at) % len(named)]
    ]


def count_draws() -> int:
    """Return the number of draws that make every fault once; some of the last are empty. To be asked of a nursery."""
    return -(-max(len(faults_of(how)) for how in EVERY_WAY) // BATCH) * len(EVERY_WAY)
