"""``load_sharded``: read and verify everything into memory that is not yet the state, agree, then take it over.

Each chunk of a file that this rank needs is read once, and verified as it comes: new tensors of the optimizer become the
state's own, the others are copied into those that are there. So a checkpoint that is refused has changed nothing anywhere, what
was verified is what is taken over, and memory grows by this rank's own shards and a few buffers.
"""

from __future__ import annotations

import hashlib
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeVar, cast

import torch
from torch import Tensor

from dtrain import spans, storage
from dtrain.checkpoint import layout, save_thread
from dtrain.checkpoint.checkpoint_info import skipped_steps
from dtrain.checkpoint.load_plan import RNG, LoadOptions, LoadPlan, parse_ignore
from dtrain.checkpoint.optimizer_state import clear_optimizer_, set_optimizer_
from dtrain.checkpoint.read_checkpoint import LoadedCheckpoint, key_prefix, read_checkpoint
from dtrain.checkpoint.read_tensors import copy_into_
from dtrain.checkpoint.reader import choose_step, iter_sound_steps_before
from dtrain.checkpoint.retention import check_free_space
from dtrain.checkpoint.state_dict import content_key, gc_paused, stateful_extra
from dtrain.checkpoint.tree_json import fill_tensors, keep_skipped
from dtrain.dist.collectives import all_gather_json
from dtrain.dist.init import get_dist_info
from dtrain.dist.rank_errors import RaiseOnAllRanks, broadcast_decision
from dtrain.dist.rng import rng_state, seed_all, set_rng_state
from dtrain.dtensor import to_local
from dtrain.errors import CheckpointError, CheckpointMismatchError, ConfigError, CorruptCheckpointError
from dtrain.shard.unshard import reshard
from dtrain.state import TrainState, mark_interrupted_write
from dtrain.storage import AnyPath

OnCorrupt = Literal["raise", "previous"]
OneOrSeveral = TypeVar("OneOrSeveral", TrainState, Mapping[str, TrainState])
_WHERE = "load_sharded"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadResult(Generic[OneOrSeveral]):
    """What ``load_sharded`` found.

    Args:
        state: the restored state, or states by name, in place of what was given; that itself when nothing was there.
        extra: the values of ``extra`` that do not load themselves; as given when nothing was there.
        step: the step that was read, None when nothing was there.
        path: its folder.
        missing: with ``strict=False``, names in the model (or of transforms) that were not stored, and are as they were; of
            several states, with the state's name and a slash before them.
        unexpected: names that were stored and are not here; a state of several as ``states/<name>``.
    """

    state: OneOrSeveral
    extra: Mapping[str, Any]
    step: int | None
    path: AnyPath | None
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


def load_sharded(
    path: AnyPath | str,
    state: OneOrSeveral,
    *,
    extra: Mapping[str, Any] | None = None,
    only: Sequence[Literal["model"]] | None = None,
    strict: bool = True,
    ignore: Sequence[str] = (),
    cast: bool = False,
    missing_ok: bool = False,
    on_corrupt: OnCorrupt = "raise",
) -> LoadResult[OneOrSeveral]:
    """Put a checkpoint into ``state``, whatever world size, mesh and placements it was saved with.

    Args:
        path: the root given to ``save_sharded``, a folder or a URL, of which the step committed last is taken; or the folder
            of one step.
        state: from ``Step.init`` or ``init_state``, with model, optimizer and transforms as in the run that was saved; or
            several by name, as they were saved.
        extra: by name, objects whose ``load_state_dict`` is called, or default values of plain data. The names must be those
            that the checkpoint holds, except for those that ``ignore`` lists. Tensors come back on the CPU.
        only: ``("model",)`` takes parameters and buffers, of whole checkpoints or of those that hold only weights, and begins a
            new run with them: optimizer, clock and random generators stay as they are, and transforms make their slices anew
            from what was loaded, if ``Step.init`` made the state.
        strict: whether parameters, buffers and transforms that only one side has are an error. Otherwise they are left as they
            are, or left out, and named in what is returned; a transform that is new makes its slice from what was loaded.
        ignore: patterns (``*`` is text without a dot, ``**`` any text) of what stays as it is here, whatever is stored. Names
            of the model, such as a new head, with their part of the optimizer and of slices; and parts of the checkpoint:
            ``"extra/<name>"``, ``"slices/<transform>"`` (a transform that is here begins anew from what was loaded),
            ``"states/<name>"``, ``"optimizer"``, ``"rng"``. Each must fit something here or in the checkpoint.
        cast: whether floating-point tensors may be stored in another dtype than they have here; the optimizer's follow theirs.
        missing_ok: whether a root without any checkpoint is fine; the state then comes back as it is.
        on_corrupt: what to do when the step fails verification: ``"raise"``, or take the newest older sound one
            (``"previous"``), with a warning.

    Returns:
        The restored state (the one given is spent), plain extras, the step, its folder, and what was left. Rank 0 prints a line
        to standard error that says which step of a root was taken, and why newer ones were not.

    Warns when there is no space in a root for a save of this state.

    Mutates: parameters, persistent buffers, the optimizer, tensors in slices, objects in ``extra``, and, last, the global
    random generators. At the world size of the save each rank's own stream goes on, at another one new streams are derived
    from seed, step and rank; a loader in ``extra`` goes on with the next sample at any of them. Of buffers that were saved
    once per rank, rank ``r`` takes those of rank ``r % saved world size`` if its model is laid out with ``buffers="local"``
    too, and otherwise those of rank 0. Memory grows by this rank's own shards meanwhile, and a few buffers. When it raises
    before all ranks have verified and agreed, nothing has changed on any of them; an object in ``extra`` that refuses its
    state may leave those before it loaded. Optimizer flags of the machine (``foreach``, ``fused``, ``capturable``,
    ``differentiable``) stay as they are. Saves of this process that are under way are waited for.
    Collective: exchanges of JSON on the control group; every rank must call it. Every rank must see the same files.

    Raises:
        CheckpointError: nothing to load, or it cannot be read.
        CorruptCheckpointError: a committed step fails verification; names the file, and the newest older sound step.
        CheckpointMismatchError: sound, but it does not fit this state; the first ten differences.
        ConfigError: an option that cannot be right, or copies of the model that train apart (``local_sgd``).
        StaleStateError: ``state`` was stepped already.
        PeerError: another rank failed.
    """
    given = dict(extra or {})
    with RaiseOnAllRanks(_WHERE):
        _check_arguments({"": state} if isinstance(state, TrainState) else state, given, only, on_corrupt)
        asked = LoadOptions(
            model_only=only is not None, strict=strict, ignore=parse_ignore(ignore, where=f"{_WHERE}: ignore"), cast=cast
        )
    with spans.span("load"):
        save_thread.wait_for_slot(1)
        root = storage.resolve_path(path)
        folder = _agree_on_folder(root)
        if folder is None:
            if not missing_ok:
                raise CheckpointError(f"{_WHERE}: there is no checkpoint in {path}; pass missing_ok=True to start without one")
            _log(f"there is no checkpoint in {root}, beginning anew")
            _warn_if_low_space(root, _min_save_bytes(state))
            plain_values = {name: value for name, value in given.items() if name not in stateful_extra(given)}
            return LoadResult(state=state, extra=plain_values, step=None, path=None)
        with gc_paused():
            restored = _read_and_apply(folder, root, state, given, asked, on_corrupt)
    if not asked.model_only:
        loaded: Any = restored.state
        clock = (loaded if isinstance(loaded, TrainState) else next(iter(loaded.values()))).clock
        spans.set_position(clock.step, samples=clock.samples, tokens=clock.tokens)
        spans.record_event("resumed", step=restored.step, path=str(restored.path))
    return restored


def _read_and_apply(
    folder: AnyPath, root: AnyPath, state: OneOrSeveral, extra: Mapping[str, Any], asked: LoadOptions, on_damaged: OnCorrupt
) -> LoadResult[OneOrSeveral]:
    """Read, agree, and take over."""
    states = {"": state} if isinstance(state, TrainState) else dict(state)
    found: LoadedCheckpoint = _read_on_all_ranks(folder, root, states, extra, asked, on_damaged)
    if folder != root and not asked.model_only:
        _warn_if_low_space(root, found.reader.manifest.bytes)
    _load_extra(found, extra)
    restored: Any = _apply(found, states, asked)
    return LoadResult(
        state=restored[""] if isinstance(state, TrainState) else restored,
        extra={name: found.extra.get(name, value) for name, value in extra.items() if name not in stateful_extra(extra)},
        step=found.reader.manifest.step,
        path=found.reader.folder,
        missing=tuple(_qualified_names(found, "missing")),
        unexpected=(*_qualified_names(found, "unexpected"), *found.skipped_states),
    )


def _check_arguments(states: Any, extra: Mapping[str, Any], only: Any, on_damaged: str) -> None:
    """Refuse what cannot be right; nothing was looked at yet."""
    kinds = list(states.items()) if isinstance(states, Mapping) else [("", states)]
    strange = [thing for name, thing in kinds if type(name) is not str or not isinstance(thing, TrainState)]
    if strange or not kinds:
        kind = type(strange[0] if strange else states).__name__
        raise ConfigError(f"{_WHERE}: needs a TrainState, or a dict of them by their names, got {kind}")
    for state in states.values():
        state._check_not_stale(_WHERE)
        state._check_replicas_joined(_WHERE)
    if on_damaged not in ("raise", "previous"):
        raise ConfigError(f"{_WHERE}: on_damaged must be 'raise' or 'previous', got {on_damaged!r}")
    if only is not None and (isinstance(only, str) or tuple(only) != ("model",)):
        raise ConfigError(f"{_WHERE}: only must be ('model',) or None, got {only!r}")
    if only is not None and extra:
        raise ConfigError(f"{_WHERE}: only=('model',) takes no extra, got {sorted(extra)}; leave out one of the two")


def _qualified_names(found: LoadedCheckpoint, what: Literal["missing", "unexpected"]) -> Iterator[str]:
    for name, fitted in found.plans.items():
        yield from (f"{name}/{left}" if name else left for left in getattr(fitted, what))


def _min_save_bytes(state: TrainState | Mapping[str, TrainState]) -> int:
    """What a save of the state takes at the least: the parameters of all ranks."""
    states = [state] if isinstance(state, TrainState) else state.values()
    return sum(param.numel() * param.itemsize for one in states for param in one.params.values())


def _warn_if_low_space(root: AnyPath, needed_bytes: int) -> None:
    """Say at the start of a run what its first save would find out hours later. Rank 0 only."""
    if get_dist_info().rank == 0:
        try:
            check_free_space(root, needed_bytes, where=_WHERE)
        except (OSError, CheckpointError) as error:
            warnings.warn(f"the next save will fail: {error}", stacklevel=3)


def _log(line: str) -> None:
    """One line for people, from rank 0."""
    if get_dist_info().rank == 0:
        print(f"dtrain: {_WHERE}: {line}", file=sys.stderr, flush=True)


def _agree_on_folder(root: AnyPath) -> AnyPath | None:
    """Rank 0's choice, on every rank."""
    chosen = broadcast_decision(_WHERE, lambda: _str_or_none(choose_step(root, _WHERE)))
    return storage.resolve_path(cast(str, chosen)) if chosen is not None else None


def _str_or_none(path: AnyPath | None) -> str | None:
    return None if path is None else str(path)


def _read_on_all_ranks(
    folder: AnyPath,
    root: AnyPath,
    states: Mapping[str, TrainState],
    extra: Mapping[str, Any],
    asked: LoadOptions,
    on_damaged: OnCorrupt,
) -> LoadedCheckpoint:
    """What all ranks have read and agree on, of older and older steps if damaged ones may be passed over."""
    refused: dict[str, str] = {}
    while True:
        found, damage, seen = None, None, ""
        with RaiseOnAllRanks(_WHERE):
            try:
                found = read_checkpoint(folder, states, extra, asked)
                seen = hashlib.sha256(layout.encode_manifest(found.reader.manifest)).hexdigest()
            except CorruptCheckpointError as error:
                damage = str(error)
            except CheckpointMismatchError:  # names the folder itself
                raise
            except CheckpointError as error:
                raise CheckpointError(f"{_WHERE}: {folder}: {error}") from None
        reports = cast(list[list[Any]], all_gather_json([damage, seen, asked.summary(extra)]))
        bad = next((f"rank {rank}: {report}" for rank, (report, _, _) in enumerate(reports) if report is not None), None)
        if bad is None:
            _check_options_equal([summary for _, _, summary in reports])
            if any(report[1] != seen for report in reports):
                raise CheckpointError(f"{_WHERE}: ranks see different files in {folder}; all nodes must share its file system")
            assert found is not None, "no damage was reported, so all was read"
            if folder != root:
                _log_choice(root, folder, refused)
            return found
        del found  # its memory, before the next one is read
        refused[folder.name] = f"damaged: {bad}"
        folder = _previous_sound_step(folder, bad, on_damaged)


def _check_options_equal(summaries: Sequence[str]) -> None:
    """Refuse a load of which ranks ask for different parts: they would go on from different states."""
    for rank, summary in enumerate(summaries):
        if summary != summaries[0]:
            raise ConfigError(
                f"{_WHERE}: rank {rank} asks for other parts than rank 0: {summary}, against {summaries[0]}; pass the same "
                "options on all ranks"
            )


def _log_choice(root: AnyPath, folder: AnyPath, refused: Mapping[str, str]) -> None:
    """Which step was taken, and why newer ones were not."""
    if get_dist_info().rank != 0:
        return
    try:
        others = {**skipped_steps(root, folder), **refused}
    except (OSError, CheckpointError):  # another process may change the root meanwhile: no reason to fail on this rank alone
        others = dict(refused)
    why = "; ".join(f"passed over {name} ({reason})" for name, reason in sorted(others.items()))
    _log(f"taking {folder}{f'; {why}' if why else ''}")


def _previous_sound_step(folder: AnyPath, reason: str, on_damaged: OnCorrupt) -> AnyPath:
    """The step to try instead of a damaged one, found by rank 0; or the error that offers it."""
    older = (candidate.path for candidate in iter_sound_steps_before(folder))
    shared = cast(str | None, broadcast_decision(_WHERE, lambda: _str_or_none(next(older, None))))
    if shared is None:
        raise CorruptCheckpointError(f"{_WHERE}: {folder} is damaged: {reason}; there is no older sound step beside it")
    if on_damaged == "raise":
        raise CorruptCheckpointError(
            f"{_WHERE}: {folder} is damaged: {reason}; the newest older sound step is {shared}: load that folder, or pass "
            "on_damaged='previous'"
        )
    if get_dist_info().rank == 0:
        warnings.warn(f"{_WHERE}: {folder} is damaged: {reason}; taking {shared} instead", stacklevel=4)
    return storage.resolve_path(shared)


def _load_extra(found: LoadedCheckpoint, given: Mapping[str, Any]) -> None:
    """Give the objects of ``extra`` their states. They may draw random numbers before they refuse."""
    random = rng_state()
    try:
        with RaiseOnAllRanks(f"{_WHERE}: extra"):
            for name, thing in stateful_extra(given).items():
                if name in found.extra:
                    thing.load_state_dict(found.extra[name])
    except Exception:
        set_rng_state(random)
        raise


def _apply(found: LoadedCheckpoint, states: Mapping[str, TrainState], asked: LoadOptions) -> dict[str, TrainState]:
    """Put what was read into the states. From the beginning the given ones are spent: an error leaves tensors of two steps."""
    fresh = {}
    advice = "; parameters may be half loaded: build the state anew and load again"
    with RaiseOnAllRanks(_WHERE, advice=advice), torch.no_grad():
        for name, state in states.items():
            fitted = found.plans[name]
            landed = {key: found.tensors[key_prefix(name) + key] for key in fitted.regions}
            with mark_interrupted_write(state, _WHERE):
                fresh[name] = _start_from_weights(state, fitted, landed) if asked.model_only else _resume(state, fitted, landed)
    if asked.model_only:
        return fresh
    manifest, folder = found.reader.manifest, found.reader.folder
    for state in states.values():
        shared = state.run_context
        shared.run_id = manifest.run_id
        shared.committed_steps.clear()  # what this process committed belongs to the lineage that it leaves
        shared.committed_steps[str(folder.parent)] = {manifest.step: content_key(fresh, (), None)}
        shared.resumed_from = str(folder)
    if found.rng is not None:
        set_rng_state(found.rng)
    elif not asked.ignore.part(RNG):
        first = fresh.get(manifest.states[0] if manifest.states else "", next(iter(fresh.values())))
        seed_all(first.seed, "resume", manifest.step, get_dist_info().rank // first.spec.ranks_per_batch)
    return fresh


def _start_from_weights(state: TrainState, fitted: LoadPlan, landed: Mapping[str, Tensor]) -> TrainState:
    """The state with other weights, at the beginning of a run of its own."""
    fresh = state._next()
    _copy_tensors(state, fitted, landed)
    make = state.run_context.init_transform_states
    return fresh if make is None else fresh._replace(transform_states=make(fresh))


def _resume(state: TrainState, fitted: LoadPlan, landed: Mapping[str, Tensor]) -> TrainState:
    """The state as it was saved."""
    clock = None if fitted.clock is None else replace(fitted.clock, run=state.clock.run)  # how long it is to be is new
    fresh = state._next(clock=clock, seed=fitted.seed)
    _copy_tensors(state, fitted, landed)
    if fitted.optimizer is not None:
        clear_optimizer_(state, fitted.skipped)  # frees its memory before more is made on the device
        made = {key: make(landed[key]) for key, make in fitted.builders.items()}
        set_optimizer_(fresh, fill_tensors(fitted.optimizer, lambda key, ref: made[key]))
    slices = fill_tensors(
        keep_skipped(fitted.slices, state.transform_states, fitted.skipped), lambda key, ref: fitted.targets[key]
    )
    fresh = fresh._replace(transform_states=slices)
    make_slices = state.run_context.init_transform_states
    new = [name for name in state.transform_states if name not in (fitted.slices or {})]
    if not new or make_slices is None:
        return fresh
    begun = make_slices(fresh)  # an average that is new in this run would be one of parameters that are gone
    return fresh._replace(transform_states={**slices, **{name: begun[name] for name in new}})


def _copy_tensors(state: TrainState, fitted: LoadPlan, landed: Mapping[str, Tensor]) -> None:
    reshard(state.model)  # a gathered copy of parameters would hide what is loaded into the shards
    copy_into_({key: to_local(tensor) for key, tensor in fitted.targets.items()}, landed)
