"""Open a checkpoint, and verify a whole step.

An open checkpoint has a verified manifest and index. The indexes of ranks are read when a caller needs their files.
``verify_step`` reads every byte, and checks that each tensor is stored completely and once. Its memory does not grow with the
step.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypeVar

from dtrain import storage
from dtrain.checkpoint import layout, tree_json
from dtrain.checkpoint.checkpoint_info import CheckpointInfo, choose_step, notice_removal, read_info, read_manifest, scan_root
from dtrain.checkpoint.data_file import FileOpener, InMemoryFile, OpenedFile, verify_file
from dtrain.checkpoint.index import (
    PlacedShards,
    RankIndex,
    RunIndex,
    ShardKind,
    StoredShard,
    parse_rank_index,
    parse_run_index,
    place_shards,
    shard_kind,
)
from dtrain.checkpoint.layout import Manifest
from dtrain.checkpoint.plan import Region, check_cover
from dtrain.checkpoint.tree_json import state_prefix
from dtrain.errors import CheckpointError, CheckpointMismatchError, CorruptCheckpointError
from dtrain.launch import heartbeats
from dtrain.storage import AnyPath
from dtrain.storage.parallel_parts import for_each_part

T = TypeVar("T")
# Concurrent requests for the indexes of ranks.
_REMOTE_REQUESTS = 8
# Number of the file that holds inline tensors. A data file has the number 1 + 2 * rank, or 2 + 2 * rank if frozen.
_INLINE_FILE = 0


def read_run_index(folder: AnyPath, manifest: Manifest) -> RunIndex:
    """Read and verify ``index.json``."""
    return parse_run_index(_read_json(folder, layout.INDEX, manifest.index_bytes, manifest.index_sha256), manifest)


def read_rank_index(folder: AnyPath, index: RunIndex, rank: int) -> RankIndex:
    """Read and verify the index of a rank."""
    files = index.files[rank]
    data = _read_json(folder, layout.index_name(rank), files.index_bytes, files.index_sha256)
    return parse_rank_index(data, rank, files)


def _read_json(folder: AnyPath, name: str, size: int, sha256: str) -> bytes:
    heartbeats.heartbeat("load")
    if size > layout.MAX_JSON_BYTES:
        raise CorruptCheckpointError(f"{name}: JSON must be at most {layout.MAX_JSON_BYTES} bytes, got {size}")
    with _open_file(folder, name, size) as file:
        data = bytearray(size)
        count = file.read_into(0, memoryview(data))
    if count != size or hashlib.sha256(data).hexdigest() != sha256:
        raise CorruptCheckpointError(f"{name}: sha256 does not match the index of the step")
    return bytes(data)


@contextmanager
def _open_file(folder: AnyPath, name: str, size: int) -> Iterator[storage.FileReader]:
    """Open a file that has ``size`` bytes as far as the index knows. A server is not asked for the size."""
    try:
        with storage.FileReader(folder / name, size=size) as file:
            _check_size(name, file.size, size)
            yield file
    except OSError:
        if not storage.exists(folder / name):
            raise CorruptCheckpointError(f"{name}: file is missing") from None
        _check_size(name, storage.file_size(folder / name), size)
        raise


def _check_size(name: str, actual: int | None, size: int) -> None:
    """Raise unless ``actual``, the size of the file of this name, is ``size``. A folder has the size None."""
    if actual is None:
        raise CorruptCheckpointError(f"{name}: must be a file") from None
    if actual != size:
        raise CorruptCheckpointError(f"{name}: size must be {size} bytes as in the index of the step, got {actual}")


class RankFilesReader:
    """Reader of the files of the ranks of a step. The index of a rank is read once, when it is needed."""

    def __init__(self, folder: AnyPath, index: RunIndex) -> None:
        self._folder, self._index = folder, index
        self._placed: dict[int, PlacedShards] = {}

    def placed(self, rank: int) -> PlacedShards:
        """Return the places of the shards of a rank."""
        if rank not in self._placed:
            index = read_rank_index(self._folder, self._index, rank)
            self._placed[rank] = place_shards(index, self._index, tree_json.tensor_refs(index.values, ""))
        return self._placed[rank]

    def prepare(self, ranks: Iterable[int]) -> None:
        """Read the indexes of these ranks, in parallel from a server."""
        missing = sorted({rank for rank in ranks if rank not in self._placed})
        threads = _REMOTE_REQUESTS if isinstance(self._folder, storage.RemotePath) else 1

        def read(number: int) -> None:
            self.placed(missing[number])

        for_each_part(len(missing), read, threads=threads, name="dtrain-index")

    def file_name(self, number: int) -> str:
        """Return the name of the data file of a number."""
        rank, frozen = divmod(number - 1, 2)
        return layout.INDEX if number == _INLINE_FILE else layout.data_name(rank, frozen=bool(frozen))

    @contextmanager
    def open_data(self, number: int) -> Iterator[OpenedFile]:
        """Open the data file of a number."""
        name = self.file_name(number)
        if number == _INLINE_FILE:
            yield OpenedFile(file=InMemoryFile(self._index.inline), name=name, blocks=None)
            return
        rank, frozen = divmod(number - 1, 2)
        blocks, size = self.placed(rank).blocks[frozen], self._index.files[rank].data_bytes[frozen]
        with _open_file(self._folder, name, size) as file:
            yield OpenedFile(file=file, name=name, blocks=blocks)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class CheckpointReader:
    """Checkpoint with verified manifest and index. The files of ranks are verified when they are read.

    Args:
        folder: folder of the step.
        manifest: manifest of the step.
        index: index of the run.
        refs: dtype and shape of the tensors of the run, by key.
        shared: encoded values of the run by section. Several states are below their names (``select_state``).
        structures: decoded ``shared``, with a ``TensorPlaceholder`` in place of each tensor.
        ranks: reader of the files of the ranks.
        numbers: number of each tensor in the index of the run, by key.
        placed: shards that are known without the index of a rank, by key: of the tensors in the index of the run, and of
            tensors that only one rank has and that are used as tensors of the run.
        state: name of the selected state; None without one.
    """

    folder: AnyPath
    manifest: Manifest
    index: RunIndex
    refs: Mapping[str, layout.TensorRef]
    shared: Mapping[str, Any]
    structures: Mapping[str, Any]
    ranks: RankFilesReader
    numbers: Mapping[str, int]
    placed: Mapping[str, StoredShard]
    state: str | None = None

    @property
    def world_size(self) -> int:
        """Number of ranks that wrote the checkpoint."""
        return self.manifest.world_size

    def find_shards(self, regions: Mapping[str, Region]) -> dict[str, list[StoredShard]]:
        """Return the stored shards that overlap the region of each tensor, in the order of their offset.

        Reads the indexes of the ranks that hold the shards.
        """
        shards: dict[str, list[Any]] = {}
        parts_of: dict[tuple[int, Region], list[tuple[int, ShardKind]]] = {}
        # Shards by rank: number of the tensor, key, and index among the shards of the key. Their bytes are not known before the
        # index of the rank is read.
        unplaced: dict[int, list[tuple[int, str, int]]] = defaultdict(list)
        kinds, tensors = self.index.kinds, self.index.tensors
        for key, region in regions.items():
            if key in self.placed:
                shards[key] = [self.placed[key]]
                continue
            kind = tensors[self.numbers[key]]
            parts = parts_of.get((kind, region))
            if parts is None:
                parts = parts_of[kind, region] = kinds[kind - 1].parts_in(region.offset, region.size)
            file = 1 + kinds[kind - 1].file
            shards[key] = [StoredShard(2 * rank + file, 0, box) for rank, box in parts]
            for position, (rank, _) in enumerate(parts):
                unplaced[rank].append((self.numbers[key], key, position))
        self.ranks.prepare(unplaced)
        for rank, places in unplaced.items():
            begins = self.ranks.placed(rank).begins_of([number for number, _, _ in places])
            for begin, (_, key, position) in zip(begins, places, strict=True):
                shards[key][position] = shards[key][position]._replace(begin=begin)
        return shards

    def section_refs(self, section: str) -> dict[str, layout.TensorRef]:
        """Return the tensors of a section by key."""
        return {key: ref for key, ref in self.refs.items() if key.startswith(f"{section}/")}

    def section_dict(self, section: str) -> dict[str, Any]:
        """Return a section, a dict with string keys, with a ``TensorPlaceholder`` in place of each tensor."""
        values = self.structures[section]
        if type(values) is not dict or not all(type(key) is str for key in values):
            raise CorruptCheckpointError(f"{layout.INDEX}: {section}: must be a dict, got {layout.describe_value(values)}")
        return values

    def values_of(self, rank: int) -> Any:
        """Return the encoded values of a rank."""
        values = self.ranks.placed(rank).values
        return values if self.state is None else state_values(values, self.state, layout.index_name(rank))

    def rank_structure(self, rank: int, section: str, path: str) -> dict[str, Any]:
        """Return a section of the values of a rank, with a ``TensorPlaceholder`` in place of each tensor, below ``path``."""
        values = self.values_of(rank)
        structure = tree_json.decode_structure(values.get(section) if type(values) is dict else None, path)
        if type(structure) is not dict:
            raise CorruptCheckpointError(f"{layout.index_name(rank)}: values: no {section}")
        return structure

    def shards_of_rank(self, rank: int) -> dict[str, StoredShard]:
        """Return the shards of the tensors that only this rank has, by key."""
        placed = self.ranks.placed(rank)
        shards = {key: shard._replace(file=1 + 2 * rank) for key, shard in placed.per_rank.items()}
        return shards if self.state is None else _select(shards, state_prefix(self.state))

    def open_data(self, number: int) -> AbstractContextManager[OpenedFile]:
        """Open a data file."""
        return self.ranks.open_data(number)

    def select_state(self, name: str) -> CheckpointReader:
        """Return the checkpoint of one of several states, as if the state had been saved alone.

        Raises:
            CheckpointMismatchError: there is no state of this name.
        """
        if name not in self.manifest.states:
            stored = ", ".join(map(repr, self.manifest.states)) or "one state without a name"
            raise CheckpointMismatchError(
                f"{self.folder}: state must be one that was saved ({stored}), got {name!r}. Load a saved state."
            )
        prefix, sections = state_prefix(name), self.shared[layout.STATES][name]
        of_run = {key: self.shared[key] for key in (layout.EXTRA, layout.OBJECTS) if key in self.shared}
        return replace(
            self,
            refs=_select(self.refs, prefix),
            numbers=_select(self.numbers, prefix),
            placed=_select(self.placed, prefix),
            shared={**sections, **of_run},
            structures={section: tree_json.decode_structure(values, section) for section, values in sections.items()},
            state=name,
        )


def state_values(values: Any, name: str, location: str) -> dict[str, Any]:
    """Return a rank's values as if the rank had saved one state alone."""
    values = layout.read_object(values, f"{location}: values", (layout.STATES, "rng", layout.EXTRA, layout.OBJECTS))
    states = values[layout.STATES]
    if type(states) is not dict or name not in states:
        raise CorruptCheckpointError(f"{location}: values: no state {name!r}")
    of_state = layout.read_object(states[name], f"{location}: values: {name}", ("buffers", "modules"))
    return {**of_state, **{section: values[section] for section in ("rng", layout.EXTRA, layout.OBJECTS)}}


def _select(by_key: Mapping[str, T], prefix: str) -> dict[str, T]:
    """Select what belongs to the state with this prefix, which is removed from the keys, and what belongs to no state."""
    return {
        key.removeprefix(prefix): value
        for key, value in by_key.items()
        if key.startswith(prefix) or not key.startswith(f"{layout.STATES}/")
    }


def open_checkpoint(folder: AnyPath, *, check_files: bool = True) -> CheckpointReader:
    """Open a step, and verify its manifest and its index.

    Args:
        folder: folder of the step.
        check_files: if True, compare the names and sizes of all files with the index. One rank of several does so.

    Raises:
        CorruptCheckpointError: a file is missing, unexpected, of the wrong size, changed or invalid.
    """
    manifest = read_manifest(folder)
    sizes = storage.list_sizes(folder) if check_files else {}
    if layout.INDEX in sizes:
        _check_size(layout.INDEX, sizes[layout.INDEX], manifest.index_bytes)
    index = read_run_index(folder, manifest)
    if check_files:
        names = {layout.MANIFEST, layout.INDEX, *index.sizes}
        missing, foreign = names - sizes.keys(), sizes.keys() - names
        if missing or foreign:
            problem = "file is missing" if missing else "file is not part of the checkpoint"
            raise CorruptCheckpointError(f"{min(missing or foreign)}: {problem}")
        for name, size in index.sizes.items():
            _check_size(name, sizes[name], size)
    shared = _check_shared(index.shared, manifest)
    refs: dict[str, layout.TensorRef] = {}

    def placeholder(key: str, ref: layout.TensorRef) -> tree_json.TensorPlaceholder:
        refs[key] = ref
        return tree_json.TensorPlaceholder(key, ref)

    structures = {section: tree_json.decode(values, section, placeholder) for section, values in shared.items()}
    _check_kinds(index, refs)
    return CheckpointReader(
        folder=folder,
        manifest=manifest,
        index=index,
        refs=refs,
        shared=shared,
        structures=structures,
        ranks=RankFilesReader(folder, index),
        numbers=dict(zip(refs, range(len(refs)), strict=True)),
        placed=_place_inline(index, refs),
    )


def keep_open(reader: CheckpointReader, files: ExitStack) -> FileOpener:
    """Return a function that opens data files until ``files`` is closed. A file that is removed meanwhile stays readable."""
    opened: dict[int, OpenedFile] = {}

    def close(context: AbstractContextManager[OpenedFile]) -> None:
        # Every read was verified, so a failing close loses nothing.
        with suppress(OSError):
            context.__exit__(None, None, None)

    def open_file(number: int) -> AbstractContextManager[OpenedFile]:
        if number not in opened:
            context = reader.open_data(number)
            opened[number] = context.__enter__()
            files.callback(close, context)
        return nullcontext(opened[number])

    return open_file


def _check_shared(shared: Any, manifest: Manifest) -> dict[str, Any]:
    """Return the values of the run, and check their sections against the manifest."""
    location = f"{layout.INDEX}: shared"
    of_run = (layout.EXTRA, layout.OBJECTS) if manifest.scope == "all" else ()
    if not manifest.states:
        return layout.read_object(shared, location, (*manifest.sections, *of_run))
    sections = layout.read_object(shared, location, (layout.STATES, *of_run))
    for name, values in layout.read_object(sections[layout.STATES], f"{location}: states", manifest.states).items():
        layout.read_object(values, f"{location}: states: {name}", manifest.sections)
    return sections


def _check_kinds(index: RunIndex, refs: Mapping[str, layout.TensorRef]) -> None:
    """Check that the kind of each tensor agrees with the tensor that the shared values name."""
    if len(index.tensors) != len(refs):
        raise CorruptCheckpointError(f"{layout.INDEX}: tensors: must have {len(refs)} numbers, got {len(index.tensors)}")
    agreeing: set[tuple[int, int]] = set()
    for (key, ref), number in zip(refs.items(), index.tensors, strict=True):
        # There are many tensors and few kinds of them.
        if (id(ref), number) in agreeing:
            continue
        if number:
            kind = index.kinds[number - 1]
            if kind.dtype != ref.dtype or kind.shape != ref.shape:
                raise CorruptCheckpointError(f"{layout.INDEX}: {key}: must be {ref}, got {kind.dtype} {list(kind.shape)}")
        elif prod(ref.shape) != 1:
            raise CorruptCheckpointError(f"{layout.INDEX}: {key}: a tensor in the index must have one element, got {ref}")
        agreeing.add((id(ref), number))


def _place_inline(index: RunIndex, refs: Mapping[str, layout.TensorRef]) -> dict[str, StoredShard]:
    """Return the shards of the tensors in the index of the run, by key."""
    dtypes = {key: ref.dtype for (key, ref), number in zip(refs.items(), index.tensors, strict=True) if not number}
    placed, begin = {}, 0
    for key in sorted(dtypes, key=lambda key: (-layout.DTYPES[dtypes[key]].itemsize, key)):
        shape = refs[key].shape
        placed[key] = StoredShard(_INLINE_FILE, begin, shard_kind(dtypes[key], shape, (0,) * len(shape), shape))
        begin += layout.DTYPES[dtypes[key]].itemsize
    if begin != len(index.inline):
        raise CorruptCheckpointError(f"{layout.INDEX}: inline: must have {begin} bytes, got {len(index.inline)}")
    return placed


def with_own_buffers(reader: CheckpointReader, rank: int, names: Collection[str]) -> CheckpointReader:
    """Return ``reader`` with buffers that were saved once per rank as buffers of the run.

    Args:
        reader: reader of the checkpoint.
        rank: rank whose buffers ``names`` are taken, modulo the number of saved ranks. Other buffers are those of rank 0,
            because they must be equal on all ranks.
        names: names of the buffers that each rank has for itself.
    """
    if not reader.index.local_buffers:
        return reader
    own_keys = {tree_json.join_key("buffers", name) for name in names}
    placed, refs = dict(reader.placed), dict(reader.refs)
    for source, is_own in ((0, False), (rank % reader.world_size, True)):
        stored = tree_json.tensor_refs(reader.values_of(source), "")
        for key, shard in reader.shards_of_rank(source).items():
            if key.startswith("buffers/") and (key in own_keys) is is_own:
                placed[key], refs[key] = shard, stored[key]
    return replace(reader, placed=placed, refs=refs)


def verify_step(folder: AnyPath) -> CheckpointReader:
    """Verify every byte of a step, and that each tensor is stored completely and once.

    Raises:
        CorruptCheckpointError: names the file and the reason.
    """
    reader = open_checkpoint(folder)
    verify_data(reader)
    return reader


def verify_indexes(reader: CheckpointReader) -> None:
    """Verify the indexes of all ranks, one after the other, and that each tensor is stored completely and once.

    Raises:
        CorruptCheckpointError: names the file and the reason.
    """
    for _ in _iter_ranks(reader):
        pass


def _iter_ranks(reader: CheckpointReader) -> Iterator[RankFilesReader]:
    """Iterate over readers of one rank each, whose indexes are not kept. Checks first that all tensors are complete."""
    keys = dict(zip(reader.index.tensors, reader.refs, strict=True))
    for number, kind in enumerate(reader.index.kinds, 1):
        parts = kind.parts_in((0,) * len(kind.shape), kind.shape)
        check_cover(keys.get(number, f"kinds[{number - 1}]"), [StoredShard(rank, 0, box) for rank, box in parts], kind.shape)
    for rank in range(reader.world_size):
        ranks = RankFilesReader(reader.folder, reader.index)
        values, location = ranks.placed(rank).values, layout.index_name(rank)
        if not reader.manifest.states:
            layout.read_object(values, f"{location}: values", ("buffers", "modules", "rng", layout.EXTRA, layout.OBJECTS))
        for name in reader.manifest.states:
            state_values(values, name, location)
        yield ranks


def verify_data(reader: CheckpointReader, on_bytes: Callable[[int], object] = lambda _: None) -> None:
    """Verify all data and indexes of an open checkpoint. Memory does not grow with the checkpoint.

    Args:
        reader: the checkpoint.
        on_bytes: called with the number of bytes after each part of the tensor data.

    Raises:
        CorruptCheckpointError: names the file and the reason.
    """

    def report(nbytes: int) -> None:
        # One rank may verify older steps while the other ranks wait.
        heartbeats.heartbeat("verify")
        on_bytes(nbytes)

    for rank, ranks in enumerate(_iter_ranks(reader)):
        for frozen in range(len(reader.index.files[rank].data_bytes)):
            with ranks.open_data(1 + 2 * rank + frozen) as opened:
                verify_file(opened, report)


def verify(path: AnyPath | str) -> CheckpointInfo:
    """Read a whole checkpoint, and return its description if every byte matches its digest.

        info = dt.checkpoint.verify("runs/gpt/ckpt")
        print(f"step {info.step}: {info.bytes} bytes verified")

    Args:
        path: folder of a step, or a root, whose newest step is verified.

    Raises:
        CorruptCheckpointError: names the file and the reason.
        CheckpointError: there is no checkpoint, the checkpoint cannot be read, or another process removed it meanwhile.
    """
    try:
        folder = choose_step(storage.resolve_path(path), "verify")
        if folder is None:
            raise CheckpointError(f"verify: no checkpoint found in {path}. Save one with save_sharded, or correct the path.")
        try:
            with notice_removal(folder):
                verify_step(folder)
                return read_info(folder)
        except CheckpointError as error:
            raise type(error)(f"verify: {folder}: {error}") from None
    except OSError as error:
        raise CheckpointError(f"verify: {error}") from error


def iter_sound_steps_before(folder: AnyPath) -> Iterable[CheckpointInfo]:
    """Iterate over the steps of the root that were committed before ``folder`` and pass verification, newest first."""
    committed = scan_root(folder.parent).committed
    serials = [info.serial for info in committed if info.path == folder]
    step = layout.step_of(folder.name)
    for candidate in reversed(committed):
        # The serial of a step with a corrupt manifest is unknown, so its step number is compared instead.
        older = candidate.serial < serials[0] if serials else step is None or candidate.step < step
        if older and candidate.path != folder:
            try:
                verify_step(candidate.path)
            except CorruptCheckpointError:
                continue
            yield candidate
