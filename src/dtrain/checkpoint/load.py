"""``load_sharded``: verify and agree first, then copy in.

Pass 1 reads everything this rank will need, checks it against its digests, and checks that it fits; then all ranks agree.
Only then does pass 2 read again (and verify again) and write into the state, so that memory stays near the rank's own
shards and a checkpoint that is refused has changed nothing anywhere.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from torch import Tensor

from dtrain import storage
from dtrain.checkpoint import layout, plain
from dtrain.checkpoint.agree import Agreed, decided_by_rank_0
from dtrain.checkpoint.contents import stateful
from dtrain.checkpoint.digest import VerifiedReader
from dtrain.checkpoint.fill import as_tensor, fill_
from dtrain.checkpoint.find import read_manifest_bytes
from dtrain.checkpoint.layout import Entry
from dtrain.checkpoint.plan import Read, plan_reads
from dtrain.checkpoint.targets import Fit, Target, fit
from dtrain.checkpoint.verify import Opened, check_ranges, choose, open_checkpoint, sound_steps_before, with_buffers_of
from dtrain.dist.collectives import all_gather_json
from dtrain.dist.init import current
from dtrain.dist.rng import seed_all, set_rng_state
from dtrain.errors import CheckpointError, CheckpointMismatchError, ConfigError, DamagedCheckpointError
from dtrain.shard.whole import reshard
from dtrain.state import TrainState

OnDamaged = Literal["raise", "previous"]
_WHERE = "load_sharded"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Restored:
    """What ``load_sharded`` found.

    Args:
        state: the restored state, in place of the one given; that one itself when nothing was there.
        extra: the values of ``extra`` that do not load themselves; as given when nothing was there.
        step: the restored step, None when nothing was there.
        path: its folder.
    """

    state: TrainState
    extra: Mapping[str, Any]
    step: int | None
    path: Path | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class _Verified:
    """What pass 1 found: a checkpoint that is sound, as far as this rank needs it, and fits."""

    opened: Opened
    fit: Fit
    reads: Sequence[Read]
    extra: Mapping[str, Any]
    rng: dict[str, Any] | None


def load_sharded(
    path: Path | str,
    state: TrainState,
    *,
    extra: Mapping[str, Any] | None = None,
    missing_ok: bool = False,
    on_damaged: OnDamaged = "raise",
) -> Restored:
    """Put a checkpoint into ``state``, whatever world size, mesh and strategy it was saved with.

    Args:
        path: the root given to ``save_sharded``, of which the step committed last is taken, or the folder of one step.
        state: from ``Step.init`` or ``new_state``, with model, optimizer and transforms as in the run that was saved.
        extra: by name, objects whose ``load_state_dict`` is called, or default values of plain data. Each must be in the
            checkpoint; what else it holds under ``extra`` is left there. Tensors come back on the CPU.
        missing_ok: whether a root without any checkpoint is fine; the state then comes back as it is.
        on_damaged: what to do when the step fails verification: ``"raise"``, or take the newest older sound one
            (``"previous"``), with a warning.

    Returns:
        The restored state (the one given is spent), plain extras, the step, and its folder.

    Mutates: parameters, persistent buffers, the optimizer, tensors in slices, objects in ``extra``, and, last, the global
    random generators. At the world size of the save each rank's own stream goes on, at another one new streams are derived
    from seed, step and rank. Of buffers that were saved once per rank, rank ``r`` takes those of rank ``r % saved world
    size`` if its model is laid out with ``buffers="local"`` too, and otherwise those of rank 0. When it raises before all
    ranks have verified and agreed, nothing has changed on any of them; an object in ``extra`` that refuses its state may
    leave those before it loaded. Optimizer flags of the machine (``foreach``, ``fused``, ``capturable``,
    ``differentiable``) stay as they are.
    Collective: exchanges of JSON on the control group; every rank must call it. Every rank must see the same files.

    Raises:
        CheckpointError: nothing to load, or it cannot be read.
        DamagedCheckpointError: a committed step fails verification; names the file, and the newest older sound step.
        CheckpointMismatchError: sound, but it does not fit this state; the first ten differences.
        StaleStateError: ``state`` was stepped already.
        PeerError: another rank failed.
    """
    given = dict(extra or {})
    with Agreed(_WHERE):
        state.check_fresh(_WHERE)
        if on_damaged not in ("raise", "previous"):
            raise ConfigError(f"{_WHERE}: on_damaged must be 'raise' or 'previous', got {on_damaged!r}")
    folder = _agree_on_folder(path)
    if folder is None:
        if not missing_ok:
            raise CheckpointError(f"{_WHERE}: there is no checkpoint in {path}; pass missing_ok=True to start without one")
        plain_values = {name: value for name, value in given.items() if name not in stateful(given)}
        return Restored(state=state, extra=plain_values, step=None, path=None)
    found = _verify_together(folder, state, given, on_damaged)
    with Agreed(f"{_WHERE}: extra"):
        for name, thing in stateful(given).items():
            thing.load_state_dict(found.extra[name])
    restored = _apply(found, state)
    values = {name: found.extra[name] for name in given if name not in stateful(given)}
    return Restored(state=restored, extra=values, step=restored.step, path=found.opened.folder)


def _agree_on_folder(path: Path | str) -> Path | None:
    """Rank 0's choice, on every rank."""
    chosen = decided_by_rank_0(_WHERE, lambda: _text(choose(storage.real_path(path), _WHERE)))
    return Path(cast(str, chosen)) if chosen is not None else None


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _verify_together(folder: Path, state: TrainState, extra: Mapping[str, Any], on_damaged: OnDamaged) -> _Verified:
    """Pass 1 on all ranks, on older and older steps if damaged ones may be passed over."""
    while True:
        found, damage, seen = None, None, ""
        with Agreed(_WHERE):
            try:
                seen = hashlib.sha256(read_manifest_bytes(folder)).hexdigest()
                found = _verify(folder, state, extra)
            except DamagedCheckpointError as error:
                damage = str(error)
            except CheckpointMismatchError:  # names the folder itself
                raise
            except CheckpointError as error:
                raise CheckpointError(f"{_WHERE}: {folder}: {error}") from None
        reports = cast(list[list[Any]], all_gather_json([damage, seen]))
        bad = next((f"rank {rank}: {report}" for rank, (report, _) in enumerate(reports) if report is not None), None)
        if bad is None:
            if any(report[1] != seen for report in reports):
                raise CheckpointError(f"{_WHERE}: ranks see different files in {folder}; all nodes must share its file system")
            assert found is not None, "no damage was reported, so pass 1 returned"
            return found
        folder = _previous(folder, bad, on_damaged)


def _previous(folder: Path, reason: str, on_damaged: OnDamaged) -> Path:
    """The step to try instead of a damaged one, found by rank 0; or the error that offers it."""
    older = (candidate.path for candidate in sound_steps_before(folder))
    shared = cast(str | None, decided_by_rank_0(_WHERE, lambda: _text(next(older, None))))
    if shared is None:
        raise DamagedCheckpointError(f"{_WHERE}: {folder} is damaged: {reason}; there is no older sound step beside it")
    if on_damaged == "raise":
        raise DamagedCheckpointError(
            f"{_WHERE}: {folder} is damaged: {reason}; the newest older sound step is {shared}: load that folder, or pass "
            "on_damaged='previous'"
        )
    if current().rank == 0:
        warnings.warn(f"{_WHERE}: {folder} is damaged: {reason}; taking {shared} instead", stacklevel=4)
    return Path(shared)


def _verify(folder: Path, state: TrainState, extra: Mapping[str, Any]) -> _Verified:
    """Pass 1: everything this rank needs is there, is as it was written, and fits. Changes nothing."""
    opened = open_checkpoint(folder)
    # Ranks that do not keep buffers of their own must have equal ones: all take those of rank 0.
    opened = with_buffers_of(opened, current().rank % len(opened.indexes) if state.spec.buffers == "local" else 0)
    fitted = fit(opened, state, extra)
    reads = plan_reads(opened.boxes, {key: target.region for key, target in fitted.tensors.items()})
    check_ranges(opened, ((read.file, read.begin, read.end) for read in reads))
    made = _fill(opened, fitted.extra, plan_reads(opened.boxes, {key: t.region for key, t in fitted.extra.items()}))
    decoded = plain.decode(opened.shared["extra"], "extra", lambda key, ref: made.get(key))  # only what was asked for is read
    decoded = {name: decoded[name] for name in extra}
    return _Verified(opened=opened, fit=fitted, reads=reads, extra=decoded, rng=_rng(opened))


def _rng(opened: Opened) -> dict[str, Any] | None:
    """The random state of this rank, or None when the checkpoint is of another number of ranks."""
    info = current()
    if len(opened.indexes) != info.world_size:
        return None
    index = opened.indexes[info.rank]
    encoded = index.values.get("rng") if type(index.values) is dict else None
    if type(encoded) is not dict:
        raise DamagedCheckpointError(f"{layout.index_name(info.rank)}: values: no rng")
    entries = {entry.key: entry for entry in index.own}
    with opened.data(info.rank) as file:
        return cast(dict[str, Any], plain.decode(encoded, "rng", lambda key, ref: _tensor_of(file, entries[key])))


def _tensor_of(file: VerifiedReader, entry: Entry) -> Tensor:
    return as_tensor(file.read(entry.begin, entry.end), entry.dtype, entry.size)


def _fill(opened: Opened, targets: Mapping[str, Target], reads: Iterable[Read]) -> dict[str, Tensor]:
    """The targets' tensors, filled. Mutates: those that belong to the state."""
    made = {key: target.tensor() for key, target in targets.items()}
    fill_(made, reads, opened.refs, opened.data)
    return made


def _apply(found: _Verified, state: TrainState) -> TrainState:
    """Pass 2. From its beginning the given state is spent: an error in it leaves parameters of two steps behind."""
    fitted, opened = found.fit, found.opened
    manifest = opened.manifest
    fresh = state.successor(clock=fitted.clock, seed=fitted.seed)
    advice = "; parameters may be half loaded: build the state anew and load again"
    with Agreed(_WHERE, advice=advice):
        reshard(state.model)  # a gathered copy of parameters would hide what is loaded into the shards
        state.optimizer.state.clear()  # frees its memory before the new tensors are made
        made = _fill(opened, fitted.tensors, found.reads)
        optimizer = plain.decode(opened.shared["optimizer"], "optimizer", lambda key, ref: made[key])
        slices = plain.decode(opened.shared["slices"], "slices", lambda key, ref: made[key])
        _set_optimizer(fresh, optimizer)
    shared = state.shared
    shared.run_id, shared.parent_step = manifest.run_id, manifest.step
    shared.committed.clear()  # what this process committed belongs to the lineage that it leaves
    shared.committed[str(opened.folder.parent)] = {manifest.step}
    shared.resumed_from = str(opened.folder)
    if found.rng is not None:
        set_rng_state(found.rng)
    else:
        seed_all(fitted.seed, "resume", manifest.step, current().rank)
    return _with_slices(fresh, slices)


def _with_slices(state: TrainState, slices: dict[str, Any]) -> TrainState:
    for name, content in slices.items():
        state = state.with_slice(name, content)
    return state


def _set_optimizer(state: TrainState, saved: dict[str, Any]) -> None:
    """Assign the optimizer's state as it was saved. ``Optimizer.load_state_dict`` would cast it to the parameter's dtype.

    Mutates: ``state.optimizer``.
    """
    for name, content in saved["state"].items():
        state.optimizer.state[state.params[name]] = content
    for group, values in zip(state.optimizer.param_groups, saved["groups"], strict=True):
        group.update({key: value for key, value in values.items() if key != "params"})
