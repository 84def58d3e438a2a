"""Load a checkpoint into a state: verify all tensors, agree on all ranks, then apply them.

A refused checkpoint changes nothing on any rank: every chunk that this rank needs is verified before any tensor changes. A
small state, and tensors that a state lacks, are applied from the verified memory. The other tensors of a large state are read
again, and each chunk is verified again: if a file has changed in between, the load raises, and the state is spent. Tensors
that the state has are filled in place, so memory grows by what the state lacks and a few buffers.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor

from dtrain import spans, storage
from dtrain.arguments import check_choice, explain_arguments
from dtrain.checkpoint.extra import restore_objects, saved_entries
from dtrain.checkpoint.fetch import copy_into_
from dtrain.checkpoint.load_plan import OPTIMIZER, RNG, LoadOptions, LoadPlan, parse_ignore
from dtrain.checkpoint.model_state import clear_optimizer_, finish_load, set_optimizer_
from dtrain.checkpoint.retention import check_free_space
from dtrain.checkpoint.save_thread import save_thread
from dtrain.checkpoint.state_dict import content_key, gc_paused
from dtrain.checkpoint.step_choice import OnCorrupt, StepChoice, choose_on_all_ranks, log, read_on_all_ranks
from dtrain.checkpoint.tree_json import fill_tensors, keep_skipped
from dtrain.dist.batch_info import LoaderHistory
from dtrain.dist.collectives import raise_on_all_ranks
from dtrain.dist.dtensor import to_local
from dtrain.dist.init import get_dist_info
from dtrain.dist.rng import seed_all, set_rng_state
from dtrain.errors import CheckpointError, ConfigError
from dtrain.run_context import Lineage
from dtrain.shard.unshard import reshard
from dtrain.state import TrainState, mark_interrupted_write
from dtrain.storage import AnyPath

OneOrSeveral = TypeVar("OneOrSeveral", TrainState, Mapping[str, TrainState])
_CALLER = "load_sharded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """Checkpoint that a state was loaded from: ``state.restored``.

    Args:
        step: step of the checkpoint.
        path: folder of the step.
        seconds: duration of the load.
        ignored: names of the model and parts of the checkpoint that ``ignore`` left out.
    """

    step: int
    path: AnyPath
    seconds: float
    ignored: tuple[str, ...] = ()


@explain_arguments
def load_sharded(
    root: AnyPath | str,
    state: OneOrSeveral,
    *,
    extra: Mapping[str, Any] | None = None,
    scope: Literal["all", "weights"] = "all",
    ignore: Sequence[str] = (),
    allow_cast: bool = False,
    missing_ok: bool = False,
    on_corrupt: OnCorrupt = "raise",
) -> OneOrSeveral:
    """Load a checkpoint into ``state``, for any world size, mesh and placements of the save, and return the loaded state.

    The loader and the stateful objects of ``Step.init`` are loaded with the state. Short form of ``Checkpointer(root).load``.

        state = step.init(model, optimizer, loader=loader)
        state = dt.load_sharded("runs/gpt/ckpt", state, missing_ok=True)
        print("resumed at step", state.step)

    Args:
        root: root passed to ``save_sharded`` (a folder or a URL), whose last committed step is loaded; or the folder of a step.
        state: state from ``Step.init`` or ``init_state``, with model, optimizer and transforms as in the saved run; or several
            states by name, as they were saved.
        extra: objects with ``load_state_dict``, or dicts, lists and tensors, which are filled in place, by name, as in the
            save. The names must be the stored names, except for names in ``ignore``. New tensors are on the CPU.
        scope: "all" loads the whole state. "weights" loads parameters and buffers, from whole checkpoints or
            checkpoints of weights, and starts a new run: optimizer, clock and random generators do not change, and transforms
            are initialized again from the loaded parameters if ``Step.init`` made the state.
        ignore: patterns (``*`` matches text without a dot, ``**`` any text) of names that do not change. Either names of the
            model, such as a new head (``"head.**"``), with their optimizer and transform state; or parts of the checkpoint:
            ``"loader"``, ``"stateful/<name>"``, ``"extra/<name>"``, ``"transforms/<transform>"`` (the transform is initialized
            from the loaded parameters), ``"states/<name>"``, ``"optimizer"``, ``"rng"``. Each pattern must match a name in the
            state or the checkpoint. Without a pattern, a name that only one side has is an error.
        allow_cast: if True, floating-point tensors may be stored in another dtype than in the model. Optimizer state is cast
            alike.
        missing_ok: if True, a root without checkpoint is no error, and the state is returned unchanged.
        on_corrupt: "raise" raises if the step fails verification; "previous" loads the newest older valid step instead, with
            a warning.

    Returns:
        The loaded state, or the dict of states; the states passed in are spent. ``state.restored`` is the ``Restored``: step,
        folder, seconds and ignored names. Rank 0 prints them in one line to standard error, with the reasons why newer steps
        were skipped.

    Warns if the root has no space for a save of this state.

    Mutates: parameters, persistent buffers, the optimizer, tensors of transforms, loader and objects, and, last, the global
    random generators. At the world size of the save each rank continues its own random stream; at another world size new
    streams are derived from seed, step and rank. The loader continues with the next sample at any world size. If
    buffers were saved once per rank, rank ``r`` loads the buffers of rank ``r % saved world size`` if its model has
    ``buffers="own"`` too, and otherwise the buffers of rank 0. If an error is raised before all ranks have verified and
    agreed, nothing has changed on any rank. If an object refuses its state, earlier objects may have been loaded.
    The extra state of modules is set before and again after their tensors, and hooks of
    ``register_load_state_dict_post_hook`` are called.
    Optimizer options of the machine (``foreach``, ``fused``, ``capturable``, ``differentiable``) do not change. Saves in
    progress in this process are awaited.
    Collective: exchanges of JSON on the control group; every rank must call it. Every rank must see the same files.

    Raises:
        CheckpointError: no checkpoint, or a checkpoint that cannot be read.
        CorruptCheckpointError: a committed step fails verification; names the file, and the newest older valid step.
        CheckpointMismatchError: a valid checkpoint that does not fit this state, also if only one of them has a loader; lists
            the first ten differences.
        ConfigError: an invalid option, a loader in ``extra``, a tensor that cannot be written, or
            replicas that train separately (``local_sgd``).
        StaleStateError: ``state`` was stepped already.
        PeerError: another rank failed.
    """
    with raise_on_all_ranks(_CALLER):
        entries = _check_arguments({"": state} if isinstance(state, TrainState) else state, extra or {}, scope, on_corrupt)
        ignored = parse_ignore(ignore, caller=f"{_CALLER}: ignore")
        options = LoadOptions(model_only=scope == "weights", ignore=ignored, allow_cast=allow_cast)
    with spans.span("load"):
        save_thread().wait_for_slot(1)
        folder = storage.resolve_path(root)
        choice = choose_on_all_ranks(folder)
        if choice is None:
            if not missing_ok:
                raise CheckpointError(f"{_CALLER}: no checkpoint found in {root}. Pass missing_ok=True to start without one.")
            log(f"no checkpoint found in {folder}; starting from scratch")
            for each in [state] if isinstance(state, TrainState) else state.values():
                each._run_context.lineage.roots[str(folder)].looked = True
            _warn_if_low_space(folder, _min_save_bytes(state))
            return state
        with gc_paused():
            loaded: Any = _read_and_apply(choice, folder, state, entries, options, on_corrupt)
    if not options.model_only:
        first = loaded if isinstance(loaded, TrainState) else next(iter(loaded.values()))
        spans.set_position(first.step, samples=first.clock.samples, tokens=first.clock.tokens)
        spans.record_event("resumed", step=first.restored.step, path=str(first.restored.path))
    result: OneOrSeveral = loaded
    return result


def _read_and_apply(
    choice: StepChoice,
    path: AnyPath,
    state: OneOrSeveral,
    entries: Mapping[str, Any],
    options: LoadOptions,
    on_corrupt: OnCorrupt,
) -> Any:
    """Read on all ranks, agree, and apply. Return the state or the states."""
    started_at = time.monotonic()
    states = {"": state} if isinstance(state, TrainState) else dict(state)
    with ExitStack() as files:
        read = read_on_all_ranks(choice, path, states, entries, options, on_corrupt, files)
        loaded, choice = read.loaded, read.choice
        if not choice.named and not options.model_only:
            _warn_if_low_space(path, loaded.reader.manifest.bytes)
        restore_objects(states, loaded.modules, entries, loaded.entries, caller=_CALLER)
        new_states = _apply(loaded, choice, states, options, read.entry_digests)
    folder, seconds = loaded.reader.folder, time.monotonic() - started_at
    restored = Restored(step=loaded.reader.manifest.step, path=folder, seconds=seconds, ignored=loaded.ignored)
    names = ", ".join(loaded.ignored[:5]) + (", ..." if len(loaded.ignored) > 5 else "")
    parts = [f"loaded {folder} in {seconds:.2g} s", f"ignored {names}" if names else "", read.skipped]
    log("; ".join(filter(None, parts)))
    new_states = {name: new_state._replace(restored=restored)._recorded() for name, new_state in new_states.items()}
    return new_states[""] if isinstance(state, TrainState) else new_states


def _check_arguments(states: Any, extra: Mapping[str, Any], scope: str, on_corrupt: str) -> dict[str, Any]:
    """Check the arguments before any file is read. Return the entries to load, by key."""
    items = list(states.items()) if isinstance(states, Mapping) else [("", states)]
    invalid = [value for name, value in items if type(name) is not str or not isinstance(value, TrainState)]
    if invalid or not items:
        kind = type(invalid[0] if invalid else states).__name__
        raise ConfigError(f"{_CALLER}: state must be a TrainState, or a dict of states by name, got {kind}. Call step.init.")
    for state in states.values():
        state._check_not_stale(_CALLER)
        state._check_replicas_joined(_CALLER)
    check_choice(_CALLER, "on_corrupt", on_corrupt, get_args(OnCorrupt))
    if scope == "trainable":
        raise ConfigError(
            f"{_CALLER}: scope must be 'all' or 'weights', got 'trainable'. Load an adapter, a step that was saved with "
            "scope='trainable', with scope='weights'."
        )
    check_choice(_CALLER, "scope", scope, ("all", "weights"))
    if scope == "weights" and extra:
        raise ConfigError(
            f"{_CALLER}: extra must be empty with scope='weights', got {sorted(extra)}. Pass only one of the two."
        )
    entries = saved_entries(states, extra, _CALLER)
    return {} if scope == "weights" else entries


def _min_save_bytes(state: TrainState | Mapping[str, TrainState]) -> int:
    """Return a lower bound of the bytes of a save: the parameters of all ranks."""
    states = [state] if isinstance(state, TrainState) else state.values()
    return sum(param.numel() * param.itemsize for one in states for param in one.params.values())


def _warn_if_low_space(root: AnyPath, needed_bytes: int) -> None:
    """Warn on rank 0 at the start of a run if its first save would fail hours later."""
    if get_dist_info().rank == 0:
        try:
            check_free_space(root, needed_bytes, caller=_CALLER)
        except (OSError, CheckpointError) as error:
            warnings.warn(f"the next save will fail: {error}", stacklevel=4)


def _apply(
    loaded: LoadedCheckpoint,
    choice: StepChoice,
    states: Mapping[str, TrainState],
    options: LoadOptions,
    entry_digests: Sequence[str],
) -> dict[str, TrainState]:
    """Apply the loaded tensors to the states, which are then spent: an error leaves tensors of two steps in them."""
    new_states = {}
    advice = ". Parameters may be half loaded. Build the state again and load again."
    with raise_on_all_ranks(_CALLER, advice=advice), torch.no_grad():
        for name, state in states.items():
            plan = loaded.plans[name]
            # A gathered copy of parameters would hide the loaded shards.
            reshard(state.model)
            targets = {key: to_local(tensor) for key, tensor in plan.targets.items()}
            with mark_interrupted_write(state, _CALLER):
                apply = _start_from_weights if options.model_only else _resume
                new_states[name] = apply(state, plan, targets, loaded.iter_tensors(name, targets))
                state._run_context.load_generation = new_states[name]._generation
                finish_load(state.model, loaded.modules[name])
    if options.model_only:
        return new_states
    manifest, folder = loaded.reader.manifest, loaded.reader.folder
    # The next save of this step must write what the load left out.
    key = None if loaded.ignored else content_key(new_states, "all", None, entry_digests)
    lineage = Lineage(run_id=manifest.run_id, resumed_from=str(folder))
    lineage.roots[str(folder.parent)] = choice.history({manifest.step: key})
    for state in states.values():
        # Earlier commits of this process belong to the abandoned lineage.
        state._run_context.lineage = lineage
    if loaded.rng is not None:
        set_rng_state(loaded.rng)
    elif not options.ignore.part(RNG):
        first = new_states.get(manifest.states[0] if manifest.states else "", next(iter(new_states.values())))
        seed_all(first.seed, "resume", manifest.step, get_dist_info().rank // first.spec.ranks_per_batch)
    return new_states


def _start_from_weights(
    state: TrainState, plan: LoadPlan, targets: Mapping[str, Tensor], batches: Iterable[Mapping[str, Tensor]]
) -> TrainState:
    """Load weights only, and start a new run."""
    new_state = state._next(_loader_history=LoaderHistory())
    _apply_tensors(plan, targets, batches)
    init_transforms = state._init_transform_states
    return new_state if init_transforms is None else new_state._replace(transform_states=init_transforms(new_state))


def _resume(
    state: TrainState, plan: LoadPlan, targets: Mapping[str, Tensor], batches: Iterable[Mapping[str, Tensor]]
) -> TrainState:
    """Load the whole state."""
    # The length of the run is an option of this run, not of the saved run.
    clock = None if plan.clock is None else replace(plan.clock, run_length=state.clock.run_length)
    # The loaders of the steps before the load do not belong to the loaded run.
    new_state = state._next(clock=clock, seed=plan.seed, _loader_history=LoaderHistory())
    if plan.optimizer is not None:
        # The old state is freed before new tensors are allocated.
        clear_optimizer_(state, plan.skipped)
    built = _apply_tensors(plan, targets, batches)
    if plan.optimizer is not None:
        kept = {key: tensor for key, tensor in plan.targets.items() if key.startswith(f"{OPTIMIZER}/")}
        tensors = {**built, **kept}
        set_optimizer_(new_state, fill_tensors(plan.optimizer, lambda key, ref: tensors[key]))
    tree = keep_skipped(plan.transforms, state.transform_states, plan.skipped)
    transform_states = fill_tensors(tree, lambda key, ref: plan.targets[key])
    new_state = new_state._replace(transform_states=transform_states)
    init_transforms = state._init_transform_states
    new_names = [name for name in state.transform_states if name not in (plan.transforms or {})]
    if not new_names or init_transforms is None:
        return new_state
    # The state of a new transform, such as an average, must be computed from the loaded parameters.
    initial = init_transforms(new_state)
    return new_state._replace(transform_states={**transform_states, **{name: initial[name] for name in new_names}})


def _apply_tensors(plan: LoadPlan, targets: Mapping[str, Tensor], batches: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Fill the targets from the batches, and return the tensors that the plan builds."""
    built = {}
    for batch in batches:
        copy_into_({key: targets[key] for key in batch if key in targets and batch[key] is not targets[key]}, batch)
        built.update({key: plan.builders[key](batch[key]) for key in batch if key not in targets})
    return built
