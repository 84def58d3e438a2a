"""A checkpoint opened without trusting it: all of it but the tensor data is read and verified.

Verifying all of a checkpoint, and choosing the step that a path stands for."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from dtrain import heartbeats, storage
from dtrain.checkpoint import layout, rank_index, strict_json, tree_json
from dtrain.checkpoint.checkpoint_info import (
    CheckpointInfo,
    CorruptStep,
    as_step_folder,
    read_info,
    read_manifest_bytes,
    scan_root,
)
from dtrain.checkpoint.data_file import VerifiedReader, chunk_range
from dtrain.checkpoint.layout import Manifest
from dtrain.checkpoint.rank_index import RankIndex, TensorShardEntry
from dtrain.checkpoint.reshard import StoredShard, full_region, index_shards, plan_reads
from dtrain.checkpoint.tree_json import decode_structure, iter_placeholders, strip_prefix
from dtrain.errors import CheckpointError, CheckpointMismatchError, CorruptCheckpointError
from dtrain.storage import AnyPath


@dataclass(frozen=True, slots=True, kw_only=True)
class DigestedFile:
    """A data file: which rank wrote it, its name, its size, and the digests of its chunks."""

    rank: int
    name: str
    bytes: int
    chunks: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class CheckpointReader:
    """A checkpoint whose manifest, file list, sizes and indexes are verified; tensor data are not yet.

    Args:
        folder: of the step.
        manifest: as it was read.
        files: all data files, rank by rank; boxes name them by their number in here.
        shards: the stored boxes of the tensors of the run, by key.
        refs: dtype and shape of the tensors of the run, by key.
        shared: the encoded values of the run: by section; where there are several states, below their names (``select_state``).
        structures: the same values decoded, with a ``Leaf`` in place of each tensor.
        per_rank: by rank, the boxes of the tensors that it has for itself, by key.
        values: by rank, its encoded values.
    """

    folder: AnyPath
    manifest: Manifest
    files: tuple[DigestedFile, ...]
    shards: Mapping[str, Sequence[StoredShard]]
    refs: Mapping[str, tree_json.TensorRef]
    shared: Mapping[str, Any]
    structures: Mapping[str, Any]
    per_rank: tuple[Mapping[str, StoredShard], ...]
    values: tuple[Any, ...]

    @property
    def world_size(self) -> int:
        """How many ranks wrote it."""
        return len(self.values)

    @contextmanager
    def open_data(self, number: int) -> Iterator[VerifiedReader]:
        """An open data file."""
        found = self.files[number]
        with storage.FileReader(self.folder / found.name) as file:
            yield VerifiedReader(file, found.name, found.chunks)

    def select_state(self, name: str) -> CheckpointReader:
        """The part of one of several states, as if it had been saved alone.

        Raises:
            CheckpointMismatchError: there is no state of this name.
        """
        if name not in self.manifest.states:
            there = (
                f"the states {', '.join(map(repr, self.manifest.states))}"
                if self.manifest.states
                else "one state without a name"
            )
            raise CheckpointMismatchError(f"{self.folder}: holds {there}, not {name!r}; load what was saved")
        prefix = tree_json.join_key(layout.STATES, name) + "/"
        kept = {layout.EXTRA: self.shared[layout.EXTRA]} if layout.EXTRA in self.shared else {}
        return replace(
            self,
            shards={
                k.removeprefix(prefix): _strip_key_prefix(boxes, prefix)
                for k, boxes in self.shards.items()
                if _belongs_to(k, prefix)
            },
            refs={k.removeprefix(prefix): ref for k, ref in self.refs.items() if _belongs_to(k, prefix)},
            shared={**self.shared[layout.STATES][name], **kept},
            structures={section: strip_prefix(tree, prefix) for section, tree in self.structures[layout.STATES][name].items()},
            per_rank=tuple(
                {
                    k.removeprefix(prefix): _strip_key_prefix([box], prefix)[0]
                    for k, box in own.items()
                    if _belongs_to(k, prefix)
                }
                for own in self.per_rank
            ),
            values=tuple(_state_values(values, name, layout.index_name(rank)) for rank, values in enumerate(self.values)),
        )


def _state_values(values: Any, name: str, where: str) -> dict[str, Any]:
    """A rank's values as if it had saved one state alone."""
    values = strict_json.read_object(values, f"{where}: values", (layout.STATES, "rng"))
    states = values[layout.STATES]
    if type(states) is not dict or name not in states:
        raise CorruptCheckpointError(f"{where}: values: no state {name!r}")
    return {"rng": values["rng"], **strict_json.read_object(states[name], f"{where}: values: {name}", ("buffers",))}


def _belongs_to(key: str, prefix: str) -> bool:
    """Whether a tensor belongs to the state with this prefix, or to none."""
    return key.startswith(prefix) or not key.startswith(f"{layout.STATES}/")


def _strip_key_prefix(boxes: Sequence[StoredShard], prefix: str) -> list[StoredShard]:
    return [box._replace(entry=box.entry._replace(key=box.entry.key.removeprefix(prefix))) for box in boxes]


def open_checkpoint(folder: AnyPath) -> CheckpointReader:
    """Read and verify all of a step but the tensor data.

    Raises:
        CorruptCheckpointError: a file is missing, foreign, of the wrong size, altered, or makes no sense.
    """
    manifest = layout.parse_manifest(read_manifest_bytes(folder))
    step = layout.step_of(folder.name)
    if step is not None and manifest.step != step:
        raise CorruptCheckpointError(f"{layout.MANIFEST}: is that of step {manifest.step}, in a folder of step {step}")
    _check_files(folder, manifest)
    indexes = tuple(_read_index(folder, manifest, rank) for rank in range(len(manifest.ranks)))
    files = tuple(
        DigestedFile(rank=rank, name=file.name, bytes=file.bytes, chunks=chunks)
        for rank, index in enumerate(indexes)
        for file, chunks in zip(manifest.ranks[rank].data, index.chunks, strict=True)
    )
    shared = _check_shared(indexes[0], manifest)
    for file, entries in zip(
        files, _group_by_file([(*index.shards, *index.per_rank) for index in indexes], manifest), strict=True
    ):
        _check_disjoint(entries, f"{layout.index_name(file.rank)}: {file.name}")
    boxes = index_shards(_group_by_file([index.shards for index in indexes], manifest))
    outlines = {section: decode_structure(part, section) for section, part in shared.items()}
    refs = {leaf.key: leaf.ref for leaf in iter_placeholders(outlines)}
    _check_shards(boxes, refs, files)
    own = tuple(_check_per_rank(index, first) for index, first in zip(indexes, _first_file_numbers(manifest), strict=True))
    return CheckpointReader(
        folder=folder,
        manifest=manifest,
        files=files,
        shards=boxes,
        refs=refs,
        shared=shared,
        structures=outlines,
        per_rank=own,
        values=tuple(index.values for index in indexes),
    )


def _check_files(folder: AnyPath, manifest: Manifest) -> None:
    found, expected = set(storage.list_names(folder)), {layout.MANIFEST, *manifest.sizes}
    if found != expected:
        missing, foreign = sorted(expected - found), sorted(found - expected)
        name = (missing or foreign)[0]
        raise CorruptCheckpointError(f"{name}: is missing" if missing else f"{name}: is not part of the checkpoint")
    for name, size in manifest.sizes.items():
        heartbeats.heartbeat("load")
        actual = storage.file_size(folder / name)
        if actual != size:
            what = "is not a file" if actual is None else f"has {actual} bytes, the manifest says {size}"
            raise CorruptCheckpointError(f"{name}: {what}")


def _read_index(folder: AnyPath, manifest: Manifest, rank: int) -> RankIndex:
    heartbeats.heartbeat("load")
    files = manifest.ranks[rank]
    data = storage.read_file(folder / files.index, limit=strict_json.MAX_JSON_BYTES)
    if hashlib.sha256(data).hexdigest() != files.index_sha256:
        raise CorruptCheckpointError(f"{files.index}: its sha256 is not the one in the manifest")
    return rank_index.parse_index(data, rank, [file.bytes for file in files.data])


def _first_file_numbers(manifest: Manifest) -> list[int]:
    """The number of each rank's first data file among all."""
    counts = [len(files.data) for files in manifest.ranks]
    return [sum(counts[:rank]) for rank in range(len(counts))]


def _group_by_file(entries: Sequence[Sequence[TensorShardEntry]], manifest: Manifest) -> list[list[TensorShardEntry]]:
    """The ranks' entries by the number of their data file among all."""
    found: list[list[TensorShardEntry]] = [[] for files in manifest.ranks for _ in files.data]
    for first, of_rank in zip(_first_file_numbers(manifest), entries, strict=True):
        for entry in of_rank:
            found[first + entry.file].append(entry)
    return found


def _check_disjoint(entries: Sequence[TensorShardEntry], where: str) -> None:
    """No byte of a file belongs to two boxes: a reader would fetch it for each of them."""
    reach = 0
    for entry in sorted(entries, key=attrgetter("begin")):
        if entry.begin < reach and entry.end > entry.begin:
            raise CorruptCheckpointError(f"{where}: {entry.key}: begins at byte {entry.begin}, inside of another box")
        reach = max(reach, entry.end)


def _check_shared(index: RankIndex, manifest: Manifest) -> dict[str, Any]:
    """The values of the run, which must be what the manifest says the checkpoint holds."""
    where = f"{layout.index_name(0)}: shared"
    extra = () if manifest.only else (layout.EXTRA,)
    if not manifest.states:
        return strict_json.read_object(index.shared, where, (*manifest.sections, *extra))
    shared = strict_json.read_object(index.shared, where, (layout.STATES, *extra))
    for name, sections in strict_json.read_object(shared[layout.STATES], f"{where}: states", manifest.states).items():
        strict_json.read_object(sections, f"{where}: states: {name}", manifest.sections)
    return shared


def _check_shards(
    boxes: Mapping[str, Sequence[StoredShard]], refs: Mapping[str, tree_json.TensorRef], files: Sequence[DigestedFile]
) -> None:
    """The tensors that the shared values name, each agreeing with its boxes."""
    for key, parts in boxes.items():
        ref = refs.get(key)
        for part in parts:
            if ref is None or (part.entry.dtype, part.entry.shape) != (ref.dtype, ref.shape):
                name = layout.index_name(files[part.file].rank)
                found = f"{part.entry.dtype} {part.entry.shape}"
                raise CorruptCheckpointError(f"{name}: {key}: is {found}, {layout.index_name(0)} says {ref}")


def _check_per_rank(index: RankIndex, first: int) -> dict[str, StoredShard]:
    """A rank's own tensors: exactly those that its values name, each whole."""
    name = layout.index_name(index.rank)
    own = {entry.key: entry for entry in index.per_rank}
    named = tree_json.tensor_refs(index.values, "")
    if len(own) != len(index.per_rank) or own.keys() != named.keys():
        raise CorruptCheckpointError(f"{name}: own: needs exactly the tensors of its values")
    for key, ref in named.items():
        if (own[key].dtype, own[key].shape, own[key].size) != (ref.dtype, ref.shape, ref.shape):
            raise CorruptCheckpointError(f"{name}: own: {key}: is not {ref}")
    return {key: StoredShard(file=first + entry.file, entry=entry) for key, entry in own.items()}


def with_buffers_of(opened: CheckpointReader, rank: int) -> CheckpointReader:
    """``opened`` with the buffers that one of its ranks had for itself taken as those of the run; it may have had none."""
    own = {key: box for key, box in opened.per_rank[rank].items() if key.startswith("buffers/")}
    refs = tree_json.tensor_refs(opened.values[rank], "")
    return replace(
        opened,
        shards={**opened.shards, **{key: [box] for key, box in own.items()}},
        refs={**opened.refs, **{key: refs[key] for key in own}},
    )


def verify_step(folder: AnyPath) -> CheckpointReader:
    """Verify every byte of a step, and that each tensor is stored once and whole.

    Raises:
        CorruptCheckpointError: with the file and the reason.
    """
    opened = open_checkpoint(folder)
    verify_data(opened)
    return opened


def verify_data(opened: CheckpointReader, on_bytes: Callable[[int], object] = lambda _: None) -> None:
    """Verify the tensor data of a checkpoint that is open: every byte, and that each tensor is stored once and whole.

    Args:
        opened: the checkpoint.
        on_bytes: told how many bytes were read, chunk by chunk.

    Raises:
        CorruptCheckpointError: with the file and the reason.
    """
    for number, file in enumerate(opened.files):
        with opened.open_data(number) as reader:
            for chunk in chunk_range(0, file.bytes):
                reader.verify([chunk])
                heartbeats.heartbeat("verify")  # one rank may verify older steps while the others wait for it
                on_bytes(min(layout.CHUNK_BYTES, file.bytes - chunk * layout.CHUNK_BYTES))
    plan_reads(opened.shards, {key: full_region(ref.shape) for key, ref in opened.refs.items()})


def verify(path: AnyPath | str) -> CheckpointInfo:
    """Read all of a checkpoint and return its description if every byte is as it was written.

    Args:
        path: the folder of a step, or a root, of which the newest step is verified.

    Raises:
        CorruptCheckpointError: with the file and the reason.
        CheckpointError: there is no checkpoint, or it cannot be read.
    """
    try:
        folder = choose_step(storage.resolve_path(path), "verify")
        if folder is None:
            raise CheckpointError(f"verify: there is no checkpoint in {path}")
        return _verify_and_describe(folder)
    except OSError as error:
        raise CheckpointError(f"verify: {error}") from error


def _verify_and_describe(folder: AnyPath) -> CheckpointInfo:
    try:
        verify_step(folder)
        return read_info(folder)
    except CheckpointError as error:
        raise type(error)(f"verify: {folder}: {error}") from None


def choose_step(path: AnyPath, where: str) -> AnyPath | None:
    """The step that a path stands for: itself, or the newest of a root, None when the root holds none.

    A damaged manifest does not make its step older: it is chosen, for verification to refuse it.

    Raises:
        CheckpointError: a step's folder without a manifest.
    """
    step = as_step_folder(path, where)
    if step is not None:
        return step
    committed, damaged = scan_root(path)
    newest: CheckpointInfo | CorruptStep | None = committed[-1] if committed else None
    if damaged and (newest is None or damaged[-1].step > newest.step):
        newest = damaged[-1]
    return newest.path if newest else None


def iter_sound_steps_before(folder: AnyPath) -> Iterable[CheckpointInfo]:
    """The steps beside ``folder`` that were committed before it and pass deep verification, newest first."""
    committed, _ = scan_root(folder.parent)
    serials = [c.serial for c in committed if c.path == folder]
    step = layout.step_of(folder.name)
    for candidate in reversed(committed):
        # Of a step with a damaged manifest the serial is unknown: its number has to do.
        older = candidate.serial < serials[0] if serials else step is None or candidate.step < step
        if older and candidate.path != folder:
            try:
                verify_step(candidate.path)
            except CorruptCheckpointError:
                continue
            yield candidate
