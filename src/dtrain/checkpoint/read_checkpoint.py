"""Read and verify the parts of a checkpoint that a load needs.

The tensors of a small state are read once, into new memory, and so are tensors that the state lacks and keeps as they are read.
All other tensors of a large state are verified first, and read and verified again when the load is applied, so that a load
needs no memory for a second copy of the state.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from dtrain.checkpoint import layout, tree_json
from dtrain.checkpoint.data_file import FileOpener, ReadableFile
from dtrain.checkpoint.extra import entry_structures, short_key, stored_entries
from dtrain.checkpoint.load_plan import OPTIMIZER, RNG, TRANSFORMS, LoadOptions, LoadPlan, plan_load
from dtrain.checkpoint.module_state import extra_state_modules, extra_state_names
from dtrain.checkpoint.read_tensors import read_tensors
from dtrain.checkpoint.reader import CheckpointReader, open_checkpoint, with_own_buffers
from dtrain.checkpoint.reshard import ReadItem, Region, ShardFinder, full_region, plan_reads
from dtrain.checkpoint.tree_json import fill_tensors, list_placeholders, state_prefix
from dtrain.dist.init import get_dist_info
from dtrain.dist.rng import check_rng_state
from dtrain.errors import CheckpointMismatchError, CorruptCheckpointError
from dtrain.fqn import buffers_by_fqn
from dtrain.shard.buffer_sync import persistent_buffers
from dtrain.state import TrainState
from dtrain.storage import AnyPath, RemotePath

_CALLER = "load_sharded"
# Tensors of at most this size in all are kept in memory until they are applied.
_HELD_BYTES = 64 * 2**20
# Limit of the tensors that are read at once when a large state is applied.
_BATCH_BYTES = 128 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class LoadedCheckpoint:
    """Checkpoint that was read, verified and fits the states, as far as this rank needs the checkpoint.

    Args:
        reader: the open checkpoint.
        plans: plans by the names of the states.
        held: tensors of each state that have been read, on the CPU, by the names of the states and the keys in the state.
        reads: reads of all other tensors of each state, which have been verified, by the names of the states.
        open_file: function that opens the data file of a number.
        entries: stored values of the entries by key, without ignored keys.
        modules: extra states of modules, by the names of the states and the names of the extra states.
        rng: random state of this rank; None if the checkpoint has another number of ranks, if ignored, or with
            ``scope="weights"``.
        ignored: names of the model and parts of the checkpoint that match a pattern of ``ignore``.
    """

    reader: CheckpointReader
    plans: Mapping[str, LoadPlan]
    held: Mapping[str, Mapping[str, Tensor]]
    reads: Mapping[str, TensorReads]
    open_file: FileOpener
    entries: Mapping[str, Any]
    modules: Mapping[str, Mapping[str, Any]]
    rng: dict[str, Any] | None
    ignored: tuple[str, ...]

    def iter_tensors(self, state: str, targets: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """Iterate over the verified tensors of a state, in batches of limited size, by their key in the state.

        Args:
            state: name of the state.
            targets: plain tensors to fill in place if possible; a batch then holds the target itself.

        Mutates: ``targets``.

        Raises:
            CorruptCheckpointError: a file has changed since it was verified.
        """
        prefix, reads, held = state_prefix(state), self.reads[state], self.held[state]
        yield dict(held)
        done, total = list(held), len(held) + len(reads.sizes)
        for batch in reads.split(_BATCH_BYTES):
            in_place = {key: targets[name] for key in batch.sizes if (name := key.removeprefix(prefix)) in targets}
            try:
                tensors = batch.run(self.open_file, targets=in_place)
            except CorruptCheckpointError as error:
                written = f"{', '.join(done[:10])}{', ...' if len(done) > 10 else ''}" or "none"
                raise CorruptCheckpointError(
                    f"{_CALLER}: {self.reader.folder}: {error}. The file has changed since it was verified. Loaded before: "
                    f"{len(done)} of {total} tensors ({written}), and parts of the next {len(batch.sizes)}. "
                    "Build the state again and load again."
                ) from None
            done += batch.sizes
            found = {key.removeprefix(prefix): tensor for key, tensor in tensors.items()}
            yield found
            # The memory must be free before the next batch is read.
            tensors.clear()
            found.clear()


def read_checkpoint(
    folder: AnyPath, states: Mapping[str, TrainState], entries: Mapping[str, Any], options: LoadOptions, files: ExitStack
) -> LoadedCheckpoint:
    """Verify the tensors that this rank needs, after a check that the checkpoint fits the states. Changes no state.

    Mutates: ``files``, which closes the data files.
    """
    # Rank 0 looks for missing and foreign files. Every rank verifies what it reads.
    reader = open_checkpoint(folder, check_files=get_dist_info().rank == 0)
    ignored: tuple[str, ...] = ()
    if options.ignore.patterns:
        names, parts = _known_names(reader, states, entries)
        options.ignore.check_used(names, parts, caller=f"{_CALLER}: ignore")
        ignored = (*sorted(filter(options.ignore.name, names)), *sorted(filter(options.ignore.part, parts)))
    _check_states(reader, states, options)
    plans, reads, read_now = {}, {}, TensorReads()
    for name, state in states.items():
        part = reader.select_state(name) if name else reader
        part = with_own_buffers(part, get_dist_info().rank, persistent_buffers(state.model, state.spec, own=True))
        caller = f"{_CALLER}: {folder}{f': {name}' if name else ''}"
        # Without autograd, local shards are obtained faster.
        with torch.no_grad():
            plans[name] = plan_load(part, state, options, caller=caller, first=name in ("", *reader.manifest.states[:1]))
        reads[name] = TensorReads()
        reads[name].add(part, plans[name].regions, prefix=state_prefix(name))
    of_run, of_rank = (
        ({}, {}) if options.model_only else entry_structures(reader, entries, states, options.ignore, caller=_CALLER)
    )
    read_now.add_full(reader.find_shards, of_run)
    random = None if options.model_only or options.ignore.part(RNG) else _rng_structure(reader, states)
    modules = {name: _module_structures(reader, name, plan.modules) for name, plan in plans.items()}
    if list_placeholders(own_trees := [random, of_rank, modules]):
        own = {key: [shard] for key, shard in reader.shards_of_rank(get_dist_info().rank % reader.world_size).items()}
        read_now.add_full(lambda regions: own, own_trees)
    # A second transfer from a server would take longer than the memory is worth.
    small = isinstance(folder, RemotePath) or sum(of_state.nbytes for of_state in reads.values()) <= _HELD_BYTES
    held: dict[str, Set[str]] = {name: plan.regions.keys() if small else plan.adopted for name, plan in plans.items()}
    for name, of_state in reads.items():
        read_now.extend(of_state if small else of_state.pop({state_prefix(name) + key for key in held[name]}))
    if small:
        reads = {name: TensorReads() for name in reads}
    open_file = reader.open_data if small else _keep_open(reader, files)
    # Tensors that are copied into the state need no memory of their own.
    copied = {state_prefix(name) + key for name, plan in plans.items() for key in plan.targets}
    tensors = read_now.run(open_file, shareable=copied, verify=[read for of_state in reads.values() for read in of_state.reads])
    return LoadedCheckpoint(
        reader=reader,
        plans=plans,
        held={
            name: {key: tensors[state_prefix(name) + key] for key in plan.regions if key in held[name]}
            for name, plan in plans.items()
        },
        reads=reads,
        open_file=open_file,
        entries=fill_tensors({**of_run, **of_rank}, lambda key, ref: tensors[key]),
        modules=fill_tensors(modules, lambda key, ref: tensors[key]),
        rng=None if random is None else _check_rng(fill_tensors(random, lambda key, ref: tensors[key])),
        ignored=ignored,
    )


def _keep_open(reader: CheckpointReader, files: ExitStack) -> FileOpener:
    """Return a function that opens data files until ``files`` is closed. A file that is removed meanwhile stays readable."""
    opened: dict[int, ReadableFile] = {}

    def open_file(number: int) -> AbstractContextManager[ReadableFile]:
        if number not in opened:
            context = reader.open_data(number)
            opened[number] = context.__enter__()
            files.callback(_close, context)
        return nullcontext(opened[number])

    return open_file


def _close(context: AbstractContextManager[ReadableFile]) -> None:
    # Every read was verified, so a failing close loses nothing.
    with suppress(OSError):
        context.__exit__(None, None, None)


def _known_names(
    reader: CheckpointReader, states: Mapping[str, TrainState], entries: Mapping[str, Any]
) -> tuple[set[str], set[str]]:
    """Return the names of models, and the parts, that the states and the checkpoint have."""
    names = {name for state in states.values() for name in (*state.params, *buffers_by_fqn(state.model, persistent_only=True))}
    names.update(name for state in states.values() for name in extra_state_modules(state.model))
    parts = {OPTIMIZER, RNG, *map(short_key, entries)}
    parts |= {tree_json.join_key(TRANSFORMS, name) for state in states.values() for name in state.transform_states}
    saved = [reader.structures] if not reader.manifest.states else list(reader.structures[layout.STATES].values())
    for tree in saved:
        for section in ("params", "buffers"):
            names.update(_dict_keys(tree.get(section)))
        names.update(extra_state_names(tree))
        parts |= {tree_json.join_key(TRANSFORMS, name) for name in _dict_keys(tree.get(TRANSFORMS))}
    parts |= set(map(short_key, stored_entries(reader, states))) if reader.manifest.scope == "all" else set()
    return names, parts | {tree_json.join_key(layout.STATES, name) for name in (*states, *reader.manifest.states)}


def _dict_keys(tree: Any) -> list[str]:
    """Return the keys of a dict as strings. Other values have none, and are refused when they are used."""
    return [str(key) for key in tree] if type(tree) is dict else []


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


@dataclass(slots=True, eq=False, repr=False)
class TensorReads:
    """Reads of tensors from several parts of a checkpoint: sizes on this rank, and stored dtypes, by key."""

    reads: list[ReadItem] = field(default_factory=list)
    sizes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    refs: dict[str, layout.TensorRef] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Number of bytes to read."""
        return sum(read.end - read.begin for read in self.reads)

    def add(self, part: CheckpointReader, regions: Mapping[str, Region], *, prefix: str) -> None:
        """Add the regions of one state's tensors."""
        reads = plan_reads(part.find_shards(regions), regions)
        self.reads += [read._replace(key=prefix + read.key) for read in reads] if prefix else reads
        self.sizes.update({prefix + key: region.size for key, region in regions.items()})
        self.refs.update({prefix + key: part.refs[key] for key in regions})

    def add_full(self, find_shards: ShardFinder, tree: Any) -> None:
        """Add all tensors of a tree, each completely."""
        refs = dict(list_placeholders(tree))
        regions = {key: full_region(ref.shape) for key, ref in refs.items()}
        self.reads += plan_reads(find_shards(regions), regions)
        self.sizes.update((key, ref.shape) for key, ref in refs.items())
        self.refs.update(refs)

    def extend(self, other: TensorReads) -> None:
        """Add all reads of ``other``."""
        self.reads += other.reads
        self.sizes.update(other.sizes)
        self.refs.update(other.refs)

    def pop(self, keys: Set[str]) -> TensorReads:
        """Return the reads of these tensors, which are removed."""
        popped = TensorReads(
            reads=[read for read in self.reads if read.key in keys],
            sizes={key: size for key, size in self.sizes.items() if key in keys},
            refs={key: ref for key, ref in self.refs.items() if key in keys},
        )
        self.reads = [read for read in self.reads if read.key not in keys]
        self.sizes = {key: size for key, size in self.sizes.items() if key not in keys}
        self.refs = {key: ref for key, ref in self.refs.items() if key not in keys}
        return popped

    def split(self, limit: int) -> Iterator[TensorReads]:
        """Split into reads of whole tensors, of at most ``limit`` bytes unless a single tensor is larger.

        The tensors are in the order of the files, so few chunks belong to two parts.
        """
        by_key: dict[str, list[ReadItem]] = {key: [] for key in self.sizes}
        for read in self.reads:
            by_key[read.key].append(read)
        # Empty tensors have no reads.
        order = sorted(by_key, key=lambda key: by_key[key][0][:2] if by_key[key] else (-1, -1))
        part, part_bytes = TensorReads(), 0
        for key in order:
            size = sum(read.end - read.begin for read in by_key[key])
            if part.reads and part_bytes + size > limit:
                yield part
                part, part_bytes = TensorReads(), 0
            part_bytes += size
            part.reads += by_key[key]
            part.sizes[key], part.refs[key] = self.sizes[key], self.refs[key]
        if part.sizes:
            yield part

    def run(
        self,
        open_file: FileOpener,
        *,
        targets: Mapping[str, Tensor] | None = None,
        shareable: Container[str] = (),
        verify: Sequence[ReadItem] = (),
    ) -> dict[str, Tensor]:
        """Read and verify the tensors. See ``read_tensors``."""
        # In the order of the files.
        self.reads.sort(key=itemgetter(0, 1))
        return read_tensors(self.sizes, self.reads, self.refs, open_file, targets=targets, shareable=shareable, verify=verify)


def _module_structures(reader: CheckpointReader, state: str, names: Sequence[str]) -> dict[str, Any]:
    """Return the extra states of the modules of a state, with placeholders for tensors.

    Raises:
        CheckpointMismatchError: the extra states differ between ranks, and the checkpoint has another number of ranks.
    """
    if not names:
        return {}
    info = get_dist_info()
    part = reader.select_state(state) if state else reader
    if reader.world_size != info.world_size and part.structures["modules"]["equal"] is not True:
        raise CheckpointMismatchError(
            f"{_CALLER}: {reader.folder}: the extra state of modules ({', '.join(names[:3])}) differs between the "
            f"{reader.world_size} ranks that saved it, and this run has {info.world_size}. Load on {reader.world_size} ranks, "
            f"or ignore={json.dumps(list(names[:3]))} to keep the current extra state."
        )
    rank = info.rank % reader.world_size
    structure = part.rank_structure(rank, "modules", f"{state_prefix(state)}modules")
    location = f"{layout.index_name(rank)}: values: modules"
    layout.read_object(structure, location, tuple(extra_state_names(part.structures)))
    return {name: structure[name] for name in names}


def _rng_structure(reader: CheckpointReader, states: Mapping[str, TrainState]) -> dict[str, Any] | None:
    """Return the random state of this rank with placeholders for tensors, or None if the state does not apply.

    The random state applies if the number of ranks, and the number of ranks that share a batch and a random stream, are equal.
    """
    info = get_dist_info()
    ranks_per_batch = next(iter(states.values())).spec.ranks_per_batch
    if (reader.world_size, reader.manifest.layout.ranks_per_batch) != (info.world_size, ranks_per_batch):
        return None
    return reader.rank_structure(info.rank, "rng", "rng")


def _check_rng(random: dict[str, Any]) -> dict[str, Any]:
    """Check that the generators will accept ``random``. They are set last, when all other parts have changed."""
    try:
        check_rng_state(random)
    except ValueError as error:
        raise CorruptCheckpointError(f"{layout.index_name(get_dist_info().rank)}: values: rng: {error}") from None
    return random
