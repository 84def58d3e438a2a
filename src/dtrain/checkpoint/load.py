"""Load a checkpoint into a state: verify all tensors, agree on all ranks, then apply them.

A refused checkpoint changes nothing on any rank: every chunk that this rank needs is verified before any tensor changes. A
small state, and tensors that a state lacks, are applied from the verified memory. The other tensors of a large state are read
again, and each chunk is verified again: if a file has changed in between, the load raises, and the state is spent. Tensors
that the state has are filled in place, so memory grows by what the state lacks and a few buffers.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar, cast, get_args

import torch
from torch import Tensor

from dtrain import spans, storage
from dtrain.arguments import check_choice, explain_arguments, warn
from dtrain.checkpoint import layout, tree_json
from dtrain.checkpoint.data_file import FileOpener
from dtrain.checkpoint.extra import entry_structures, restore_entries, saved_entries, short_key, stored_entries
from dtrain.checkpoint.fetch import copy_into_, read_tensors
from dtrain.checkpoint.load_plan import (
    OPTIMIZER,
    RNG,
    TRANSFORMS,
    IgnorePatterns,
    LoadOptions,
    LoadPlan,
    parse_ignore,
    plan_load,
)
from dtrain.checkpoint.model_state import (
    clear_optimizer_,
    describe_replaced_options,
    extra_state_modules,
    extra_state_names,
    finish_load,
    set_extra_states,
    set_optimizer_,
)
from dtrain.checkpoint.node_memory import find_memory_root
from dtrain.checkpoint.plan import TensorRead, full_region, group_by_size, plan_tensors
from dtrain.checkpoint.reader import CheckpointReader, keep_open, open_checkpoint, with_own_buffers
from dtrain.checkpoint.retention import check_free_space
from dtrain.checkpoint.save_thread import save_thread
from dtrain.checkpoint.state_dict import content_key, digest_stored_entries, gc_paused, mark_state
from dtrain.checkpoint.step_choice import (
    CorruptMemoryError,
    OnCorrupt,
    StepChoice,
    bring_data,
    choose_on_all_ranks,
    log,
    read_on_all_ranks,
)
from dtrain.checkpoint.tree_json import fill_tensors, keep_skipped, list_placeholders, state_prefix
from dtrain.dist.batch_info import LoaderHistory
from dtrain.dist.collectives import raise_on_all_ranks
from dtrain.dist.dtensor import to_local
from dtrain.dist.init import get_dist_info
from dtrain.dist.reconfigure import is_joining, note_load
from dtrain.dist.rng import check_rng_state, rng_state, seed_all, set_rng_state
from dtrain.errors import CheckpointError, CheckpointMismatchError, ConfigError, CorruptCheckpointError
from dtrain.fqn import buffers_by_fqn
from dtrain.run_context import Lineage
from dtrain.shard.buffers import persistent_buffers
from dtrain.shard.unshard import reshard
from dtrain.state import TrainState, mark_interrupted_write
from dtrain.storage import AnyPath, RemotePath

OneOrSeveral = TypeVar("OneOrSeveral", TrainState, Mapping[str, TrainState])
_CALLER = "load_sharded"
# Tensors of at most this size in all are kept in memory until they are applied.
_HELD_BYTES = 64 * 2**20
# Limit of the tensors that are read at once when a large state is applied.
_BATCH_BYTES = 128 * 2**20


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
            A newer step of the run in memory (``mode="memory"``) comes first. If it is damaged, the step on disk is loaded.
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
    if is_joining():
        # Such a rank loads in ``Checkpointer.retry``, where all ranks load.
        return state
    states: Mapping[str, TrainState] = {"": state} if isinstance(state, TrainState) else state
    with raise_on_all_ranks(_CALLER):
        entries = _check_loadable(states, extra or {}, scope, on_corrupt)
        ignored = parse_ignore(ignore, caller=f"{_CALLER}: ignore")
        options = LoadOptions(model_only=scope == "weights", ignore=ignored, allow_cast=allow_cast)
    note_load(state._run_context for state in states.values())
    with spans.span("load"):
        save_thread().wait_for_slot(1)
        choice = choose_on_all_ranks(folder := storage.resolve_path(root))
        if choice is None:
            if not missing_ok:
                raise CheckpointError(f"{_CALLER}: no checkpoint found in {root}. Pass missing_ok=True to start without one.")
            return _start_from_scratch(folder, states, state, f"no checkpoint found in {folder}")
        try:
            with gc_paused():
                loaded = _read_and_apply(choice, folder, states, entries, options, on_corrupt)
        except CorruptMemoryError as error:
            if not missing_ok:
                raise
            return _start_from_scratch(folder, states, state, str(error).removeprefix(f"{_CALLER}: "))
    first = next(iter(loaded.values()))
    if not options.model_only:
        spans.set_position(first.step, samples=first.clock.samples, tokens=first.clock.tokens)
        restored = first.restored
        tier = "memory" if restored.path.parent == find_memory_root(folder) else "disk"
        spans.record_event("resumed", step=restored.step, path=str(restored.path), tier=tier)
    return cast(Any, first if isinstance(state, TrainState) else loaded)  # type: ignore[no-any-return]


def _start_from_scratch(folder: AnyPath, states: Mapping[str, TrainState], state: OneOrSeveral, reason: str) -> OneOrSeveral:
    """Return the state as it is, at the start of a run without a step."""
    log(f"{reason}; starting from scratch")
    for new_run in states.values():
        new_run._run_context.lineage.roots[str(folder)].looked = True
    # A save holds at least the parameters of all ranks.
    params = (param for new_run in states.values() for param in new_run.params.values())
    _warn_if_low_space(folder, sum(param.numel() * param.itemsize for param in params))
    return state


def _check_loadable(states: Any, extra: Mapping[str, Any], scope: str, on_corrupt: str) -> dict[str, Any]:
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


def _read_and_apply(
    choice: StepChoice,
    path: AnyPath,
    states: Mapping[str, TrainState],
    entries: Mapping[str, Any],
    options: LoadOptions,
    on_corrupt: OnCorrupt,
) -> dict[str, TrainState]:
    """Read on all ranks, agree, and apply. Return the loaded states by name."""
    started_at = time.monotonic()
    with ExitStack() as files:
        if choice.spread is not None:
            with raise_on_all_ranks(_CALLER):
                data_names = _data_files(choice.folder, states, entries, options)
            brought = bring_data(choice, path, data_names)
            if brought is None:
                raise CheckpointError(
                    f"{_CALLER}: no checkpoint found in {path}, and its step in memory does not fit. Enlarge /dev/shm."
                )
            choice = brought
        read = partial(
            read_checkpoint, states=states, entries=entries, options=options, files=files, incomplete=choice.spread is not None
        )
        agreed = read_on_all_ranks(choice, path, read, options.summary(entries), on_corrupt, files)
        loaded, choice = agreed.loaded, agreed.choice
        if not choice.named and not options.model_only:
            _warn_if_low_space(path, loaded.reader.manifest.bytes)
        _restore_objects(states, loaded.values, entries)
        new_states = _apply(loaded, choice, states, options, agreed.entry_digests)
    replaced = [describe_replaced_options(states[name], plan.optimizer) for name, plan in loaded.plans.items()]
    folder, seconds = loaded.reader.folder, time.monotonic() - started_at
    restored = Restored(step=loaded.reader.manifest.step, path=folder, seconds=seconds, ignored=loaded.ignored)
    ignored = f"ignored {', '.join(loaded.ignored[:5])}{', ...' if len(loaded.ignored) > 5 else ''}" if loaded.ignored else ""
    log("; ".join(filter(None, [f"loaded {folder} in {seconds:.2g} s", ignored, agreed.skipped, *replaced])))
    return {name: new_state._replace(restored=restored)._recorded() for name, new_state in new_states.items()}


def _restore_objects(states: Mapping[str, TrainState], values: StoredValues, entries: Mapping[str, Any]) -> None:
    """Load the extra states of modules and the entries. If one refuses, generators and modules get their state back."""
    with ExitStack() as undo:
        undo.callback(set_rng_state, rng_state())
        for name, state in states.items():
            undo.callback(set_extra_states(state.model, values.modules[name], caller=_CALLER))
        restore_entries(entries, values.entries, caller=_CALLER)
        undo.pop_all()


def _warn_if_low_space(root: AnyPath, needed_bytes: int) -> None:
    """Warn on rank 0 at the start of a run if its first save would fail hours later."""
    if get_dist_info().rank == 0:
        try:
            check_free_space(root, needed_bytes, caller=_CALLER)
        except (OSError, CheckpointError) as error:
            warn(f"the next save will fail: {error}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class LoadedCheckpoint:
    """Checkpoint that was read, verified and fits the states, as far as this rank needs the checkpoint.

    Args:
        reader: the open checkpoint.
        plans: plans by the names of the states.
        held: tensors that have been read, on the CPU, by key.
        unread: reads of all other tensors of the states, which have been verified, by key.
        open_file: function that opens the data file of a number.
        values: objects, extra states of modules and random state.
        ignored: names of the model and parts of the checkpoint that match a pattern of ``ignore``.
        entry_digest: ``digest_stored_entries`` of the values before the load gives them to their objects.
    """

    reader: CheckpointReader
    plans: Mapping[str, LoadPlan]
    held: Mapping[str, Tensor]
    unread: Mapping[str, TensorRead]
    open_file: FileOpener
    values: StoredValues
    ignored: tuple[str, ...]
    entry_digest: str

    def iter_tensors(self, state: str, targets: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """Iterate over the verified tensors of a state, in batches of limited size, by their key in the state.

        Args:
            state: name of the state.
            targets: plain tensors to fill in place if possible; a batch then holds the target itself.

        Mutates: ``targets``.

        Raises:
            CorruptCheckpointError: a file has changed since it was verified.
        """
        prefix = state_prefix(state)
        keys_of_state = [prefix + key for key in self.plans[state].regions]
        unread = {key: self.unread[key] for key in keys_of_state if key in self.unread}
        done, total = [key for key in keys_of_state if key not in unread], len(keys_of_state)
        yield {key.removeprefix(prefix): self.held[key] for key in done}
        # Few chunks belong to two batches in the order of the files. Empty tensors have no reads.
        in_order = sorted(unread, key=lambda key: unread[key].reads[0][:2] if unread[key].reads else (-1, -1))
        for keys in group_by_size({key: unread[key].nbytes for key in in_order}, limit=_BATCH_BYTES):
            in_place = {key: targets[name] for key in keys if (name := key.removeprefix(prefix)) in targets}
            try:
                tensors = read_tensors({key: unread[key] for key in keys}, self.open_file, targets=in_place)
            except CorruptCheckpointError as error:
                written = f"{', '.join(done[:10])}{', ...' if len(done) > 10 else ''}" or "none"
                raise CorruptCheckpointError(
                    f"{_CALLER}: {self.reader.folder}: {error}. The file has changed since it was verified. Loaded before: "
                    f"{len(done)} of {total} tensors ({written}), and parts of the next {len(keys)}. "
                    "Build the state again and load again."
                ) from None
            done += keys
            batch = {key.removeprefix(prefix): tensor for key, tensor in tensors.items()}
            yield batch
            # The memory must be free before the next batch is read.
            tensors.clear()
            batch.clear()


def _data_files(
    folder: AnyPath, states: Mapping[str, TrainState], entries: Mapping[str, Any], options: LoadOptions
) -> set[str]:
    """Return the names of the data files that this rank needs; none of a damaged step, which the load refuses later."""
    try:
        reader = open_checkpoint(folder, check_files=False)
        _, reads, values = _plan_states(reader, states, entries, options)
        reads |= values.plan_reads(reader)
    except CorruptCheckpointError:
        return set()
    numbers = {read.file for tensor in reads.values() for read in tensor.reads}
    return {name for name in map(reader.ranks.file_name, numbers) if name != layout.INDEX}


def read_checkpoint(
    folder: AnyPath,
    states: Mapping[str, TrainState],
    entries: Mapping[str, Any],
    options: LoadOptions,
    files: ExitStack,
    *,
    incomplete: bool = False,
) -> LoadedCheckpoint:
    """Verify the tensors that this rank needs, after a check that the checkpoint fits the states. Changes no state.

    First the states are compared with the checkpoint, and the reads of their tensors are planned. Then the values for objects,
    modules and generators are found. Last the tensors of both are read.

    The tensors of a small state are read once, into new memory, and so are tensors that the state lacks and keeps as they are
    read. All other tensors of a large state are verified first, and read and verified again when the load is applied, so that
    a load needs no memory for a second copy of the state.

    Args:
        incomplete: if True, the folder has only the files that the ranks of this node need.

    Mutates: ``files``, which closes the data files.
    """
    # Rank 0 looks for missing and foreign files. Every rank verifies what it reads.
    reader = open_checkpoint(folder, check_files=get_dist_info().rank == 0 and not incomplete)
    ignored = _match_ignored(reader, states, entries, options.ignore)
    plans, reads, values = _plan_states(reader, states, entries, options)
    # A second transfer from a server would take longer than the memory is worth.
    small = isinstance(folder, RemotePath) or sum(tensor.nbytes for tensor in reads.values()) <= _HELD_BYTES
    adopted = {state_prefix(name) + key for name, plan in plans.items() for key in plan.adopted}
    unread = {} if small else {key: tensor for key, tensor in reads.items() if key not in adopted}
    open_file = reader.open_data if small else keep_open(reader, files)
    tensors = read_tensors(
        values.plan_reads(reader) | {key: tensor for key, tensor in reads.items() if key not in unread},
        open_file,
        # Tensors that are copied into the state need no memory of their own.
        shareable={state_prefix(name) + key for name, plan in plans.items() for key in plan.targets},
        verify=[read for tensor in unread.values() for read in tensor.reads],
    )
    values = StoredValues(*fill_tensors(tuple(values), lambda key, ref: tensors[key]))
    if values.rng is not None:
        # The generators are set last, when all other parts have changed.
        try:
            check_rng_state(values.rng)
        except ValueError as error:
            raise CorruptCheckpointError(f"{layout.index_name(get_dist_info().rank)}: values: rng: {error}") from None
    return LoadedCheckpoint(
        reader=reader,
        plans=plans,
        held={key: tensors[key] for key in reads if key in tensors},
        unread=unread,
        open_file=open_file,
        values=values,
        ignored=ignored,
        entry_digest=digest_stored_entries(values.entries, values.modules),
    )


def _plan_states(
    reader: CheckpointReader, states: Mapping[str, TrainState], entries: Mapping[str, Any], options: LoadOptions
) -> tuple[dict[str, LoadPlan], dict[str, TensorRead], StoredValues]:
    """Compare the states with the checkpoint. Return their plans, the reads of their tensors, and the values of objects."""
    _check_states(reader, states, options)
    plans: dict[str, LoadPlan] = {}
    reads: dict[str, TensorRead] = {}
    for name, state in states.items():
        plans[name], reads_of_state = _plan_state(reader, name, state, options)
        reads |= reads_of_state
    return plans, reads, _find_values(reader, states, entries, plans, options)


def _plan_state(
    reader: CheckpointReader, name: str, state: TrainState, options: LoadOptions
) -> tuple[LoadPlan, dict[str, TensorRead]]:
    """Compare a state with the checkpoint, and plan the reads of its tensors."""
    of_state = reader.select_state(name) if name else reader
    of_state = with_own_buffers(of_state, get_dist_info().rank, persistent_buffers(state.model, state.spec, own=True))
    caller = f"{_CALLER}: {reader.folder}{f': {name}' if name else ''}"
    # Without autograd, local shards are obtained faster.
    with torch.no_grad():
        plan = plan_load(of_state, state, options, caller=caller, first=name in ("", *reader.manifest.states[:1]))
    return plan, plan_tensors(of_state.find_shards, plan.regions, of_state.refs, state_prefix(name))


class StoredValues(NamedTuple):
    """Values of a checkpoint that a load gives to objects, modules and generators, at first with placeholders for tensors.

    Args:
        of_run: values of entries that are equal on all ranks, by key, without ignored keys.
        of_rank: values of entries of this rank.
        modules: extra states of modules, by the names of the states and the names of the extra states.
        rng: random state of this rank; None if the checkpoint has another number of ranks, if ignored, or with
            ``scope="weights"``.
    """

    of_run: dict[str, Any]
    of_rank: dict[str, Any]
    modules: dict[str, dict[str, Any]]
    rng: dict[str, Any] | None

    @property
    def entries(self) -> dict[str, Any]:
        """Values of all entries, by key."""
        return {**self.of_run, **self.of_rank}

    def plan_reads(self, reader: CheckpointReader) -> dict[str, TensorRead]:
        """Plan the reads of the tensors of the values, each completely."""
        refs, own_refs = (dict(list_placeholders(tree)) for tree in (self.of_run, list(self[1:])))
        regions, own_regions = ({key: full_region(ref.shape) for key, ref in of.items()} for of in (refs, own_refs))
        tensors = plan_tensors(reader.find_shards, regions, refs)
        if own_refs:
            rank = get_dist_info().rank % reader.world_size
            shards = {key: [shard] for key, shard in reader.shards_of_rank(rank).items()}
            tensors |= plan_tensors(lambda _: shards, own_regions, own_refs)
        return tensors


def _find_values(
    reader: CheckpointReader,
    states: Mapping[str, TrainState],
    entries: Mapping[str, Any],
    plans: Mapping[str, LoadPlan],
    options: LoadOptions,
) -> StoredValues:
    """Find the values to load, with placeholders for tensors."""
    of_run: dict[str, Any] = {}
    of_rank: dict[str, Any] = {}
    rng = None
    if not options.model_only:
        of_run, of_rank = entry_structures(reader, entries, states, options.ignore, caller=_CALLER)
        info, ranks_per_batch = get_dist_info(), next(iter(states.values())).spec.ranks_per_batch
        # The random state applies if the number of ranks, and of ranks that share a batch and a random stream, are equal.
        is_same_job = (reader.world_size, reader.manifest.layout.ranks_per_batch) == (info.world_size, ranks_per_batch)
        if is_same_job and not options.ignore.part(RNG):
            rng = reader.rank_structure(info.rank, "rng", "rng")
    modules = {name: _module_structures(reader, name, plan.modules) for name, plan in plans.items()}
    return StoredValues(of_run, of_rank, modules, rng)


def _match_ignored(
    reader: CheckpointReader, states: Mapping[str, TrainState], entries: Mapping[str, Any], ignore: IgnorePatterns
) -> tuple[str, ...]:
    """Return the ignored names of the models, and the ignored parts, of the states and the checkpoint.

    Raises:
        ConfigError: a pattern that matches none of them.
    """
    if not ignore.patterns:
        return ()
    names = {name for state in states.values() for name in (*state.params, *buffers_by_fqn(state.model, persistent_only=True))}
    names.update(name for state in states.values() for name in extra_state_modules(state.model))
    parts = {OPTIMIZER, RNG, *map(short_key, entries)}
    parts |= {tree_json.join_key(TRANSFORMS, name) for state in states.values() for name in state.transform_states}
    saved = [reader.structures] if not reader.manifest.states else list(reader.structures[layout.STATES].values())
    for tree in saved:
        # Other values than dicts have no keys, and are refused when they are used.
        keys = {section: list(map(str, tree[section])) for section in tree if type(tree[section]) is dict}
        names.update(keys.get("params", ()), keys.get("buffers", ()), extra_state_names(tree))
        parts |= {tree_json.join_key(TRANSFORMS, name) for name in keys.get(TRANSFORMS, ())}
    parts |= set(map(short_key, stored_entries(reader, states))) if reader.manifest.scope == "all" else set()
    parts |= {tree_json.join_key(layout.STATES, name) for name in (*states, *reader.manifest.states)}
    ignore.check_used(names, parts, caller=f"{_CALLER}: ignore")
    return (*sorted(filter(ignore.name, names)), *sorted(filter(ignore.part, parts)))


def _check_states(reader: CheckpointReader, states: Mapping[str, TrainState], options: LoadOptions) -> None:
    """Check that the checkpoint holds the requested states, and no other states except for ignored ones."""
    caller, stored = f"{_CALLER}: {reader.folder}", reader.manifest.states
    if reader.manifest.scope != "all" and not options.model_only:
        raise CheckpointMismatchError(
            f"{caller}: the checkpoint was saved with scope={reader.manifest.scope!r}. Pass scope='weights' to load it."
        )
    if "" in states and stored:
        raise CheckpointMismatchError(
            f"{caller}: the checkpoint holds the states {', '.join(stored)}. Pass a dict of states with these names."
        )
    if "" not in states and not stored:
        raise CheckpointMismatchError(
            f"{caller}: the checkpoint holds one state without a name, got {sorted(states)}. Pass the state itself."
        )
    unknown = sorted(set(states) - set(stored)) if stored else []
    if unknown:
        raise CheckpointMismatchError(
            f"{caller}: states must be among the stored states {', '.join(stored)}, got {', '.join(states)}. "
            f"Leave out {unknown[0]!r}."
        )
    keys = [] if options.model_only else [tree_json.join_key(layout.STATES, name) for name in stored if name not in states]
    skipped = [key for key in keys if not options.ignore.part(key)]
    if skipped:
        name = tree_json.unescape_key(skipped[0].partition("/")[2])
        raise CheckpointMismatchError(
            f"{caller}: states must be the stored states {', '.join(stored)}, got {', '.join(states)}. "
            f'Pass the state {name!r}, too, or ignore=["{skipped[0]}"] to skip the state.'
        )


def _module_structures(reader: CheckpointReader, state: str, names: Sequence[str]) -> dict[str, Any]:
    """Return the extra states of the modules of a state, with placeholders for tensors.

    Raises:
        CheckpointMismatchError: the extra states differ between ranks, and the checkpoint has another number of ranks.
    """
    if not names:
        return {}
    info = get_dist_info()
    of_state = reader.select_state(state) if state else reader
    if reader.world_size != info.world_size and of_state.structures["modules"]["equal"] is not True:
        raise CheckpointMismatchError(
            f"{_CALLER}: {reader.folder}: the extra state of modules ({', '.join(names[:3])}) differs between the "
            f"{reader.world_size} ranks that saved it, and this run has {info.world_size}. Load on {reader.world_size} ranks, "
            f"or ignore={json.dumps(list(names[:3]))} to keep the current extra state."
        )
    rank = info.rank % reader.world_size
    structure = of_state.rank_structure(rank, "modules", f"{state_prefix(state)}modules")
    location = f"{layout.index_name(rank)}: values: modules"
    layout.read_object(structure, location, tuple(extra_state_names(of_state.structures)))
    return {name: structure[name] for name in names}


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
            # A gathered copy of parameters would hide the loaded shards.
            reshard(state.model)
            targets = {key: to_local(tensor) for key, tensor in loaded.plans[name].targets.items()}
            try:
                new_states[name] = _fill_state(state, loaded.plans[name], targets, loaded.iter_tensors(name, targets))
                state._run_context.load_generation = new_states[name]._generation
                finish_load(state.model, loaded.values.modules[name])
                state._run_context.mark = mark_state(new_states[name])
            except BaseException as error:
                mark_interrupted_write(state, _CALLER, error)
                raise
    if options.model_only:
        return new_states
    manifest, folder = loaded.reader.manifest, loaded.reader.folder
    # The next save of this step must write what the load left out.
    key = None if loaded.ignored else content_key(new_states, "all", None, entry_digests)
    lineage = Lineage(run_id=manifest.run_id, resumed_from=str(folder))
    lineage.roots.update(choice.histories(folder, {manifest.step: key}))
    for state in states.values():
        # Earlier commits of this process belong to the abandoned lineage.
        state._run_context.lineage = lineage
    if loaded.values.rng is not None:
        set_rng_state(loaded.values.rng)
    elif not options.ignore.part(RNG):
        first = new_states.get(manifest.states[0] if manifest.states else "", next(iter(new_states.values())))
        seed_all(first.seed, "resume", manifest.step, get_dist_info().rank // first.spec.ranks_per_batch)
    return new_states


def _fill_state(
    state: TrainState, plan: LoadPlan, targets: Mapping[str, Tensor], batches: Iterable[Mapping[str, Tensor]]
) -> TrainState:
    """Load what the plan holds into a state. A plan of weights only starts a new run."""
    # The loaders of the steps before the load do not belong to the loaded run.
    new_state = state._next(_loader_history=LoaderHistory())
    if plan.clock is not None:
        # The length of the run is an option of this run, not of the saved run.
        clock = replace(plan.clock, run_length=state.clock.run_length)
        new_state = new_state._replace(clock=clock, seed=plan.seed)
    if plan.optimizer is not None:
        # The old state is freed before new tensors are allocated.
        clear_optimizer_(state, plan.skipped)
    built = {}
    for batch in batches:
        copy_into_({key: targets[key] for key in batch if key in targets and batch[key] is not targets[key]}, batch)
        built.update({key: plan.builders[key](batch[key]) for key in batch if key not in targets})
    tensors = {**built, **plan.targets}
    if plan.optimizer is not None:
        set_optimizer_(new_state, fill_tensors(plan.optimizer, lambda key, ref: tensors[key]))
    if plan.transforms is not None:
        tree = keep_skipped(plan.transforms, state.transform_states, plan.skipped)
        new_state = new_state._replace(transform_states=fill_tensors(tree, lambda key, ref: tensors[key]))
    init_transforms = state._init_transform_states
    new_names = [name for name in state.transform_states if name not in (plan.transforms or {})]
    if not new_names or init_transforms is None:
        return new_state
    # The state of a new transform, such as an average, must be computed from the loaded parameters.
    initial = init_transforms(new_state)
    transform_states = {**new_state.transform_states, **{name: initial[name] for name in new_names}}
    return new_state._replace(transform_states=transform_states)
