"""Open a checkpoint and verify all of its files except the tensor data; ``verify`` checks the tensor data as well.

``choose_step`` returns the step that a path names: a step's folder, or the newest step of a root.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from dtrain import heartbeats, storage
from dtrain.checkpoint import layout, strict_json, tree_json
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
from dtrain.checkpoint.rank_index import RankIndex, StoredShard, parse_index
from dtrain.checkpoint.reshard import full_region, index_shards, plan_reads
from dtrain.checkpoint.tree_json import strip_prefix
from dtrain.errors import CheckpointError, CheckpointMismatchError, CorruptCheckpointError
from dtrain.storage import AnyPath

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class DigestedFile:
    """Data file: the rank that wrote the file, name, size in bytes, and digests of the chunks."""

    rank: int
    name: str
    bytes: int
    chunks: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class CheckpointReader:
    """Checkpoint with verified manifest, file list, sizes and indexes. Tensor data are verified when they are read.

    Args:
        folder: folder of the step.
        manifest: manifest of the step.
        files: all data files in the order of ranks; shards refer to a file by its number in this tuple.
        shards: stored shards of the tensors of the run, by key.
        refs: dtype and shape of the tensors of the run, by key.
        shared: encoded values of the run by section. Several states are below their names (``select_state``).
        structures: decoded ``shared``, with a ``TensorPlaceholder`` in place of each tensor.
        per_rank: stored shards of the tensors that only one rank has: by rank, then by key.
        values: encoded values of each rank.
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
        """Number of ranks that wrote the checkpoint."""
        return len(self.values)

    @contextmanager
    def open_data(self, number: int) -> Iterator[VerifiedReader]:
        """Open a data file."""
        info = self.files[number]
        with storage.FileReader(self.folder / info.name) as file:
            yield VerifiedReader(file, info.name, info.chunks)

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
        prefix = tree_json.join_key(layout.STATES, name) + "/"
        extra = {layout.EXTRA: self.shared[layout.EXTRA]} if layout.EXTRA in self.shared else {}
        return replace(
            self,
            shards=_select(self.shards, prefix),
            refs=_select(self.refs, prefix),
            shared={**self.shared[layout.STATES][name], **extra},
            structures={section: strip_prefix(tree, prefix) for section, tree in self.structures[layout.STATES][name].items()},
            per_rank=tuple(_select(shards, prefix) for shards in self.per_rank),
            values=tuple(_state_values(values, name, layout.index_name(rank)) for rank, values in enumerate(self.values)),
        )


def _state_values(values: Any, name: str, location: str) -> dict[str, Any]:
    """Return a rank's values as if the rank had saved one state alone."""
    values = strict_json.read_object(values, f"{location}: values", (layout.STATES, "rng"))
    states = values[layout.STATES]
    if type(states) is not dict or name not in states:
        raise CorruptCheckpointError(f"{location}: values: no state {name!r}")
    return {"rng": values["rng"], **strict_json.read_object(states[name], f"{location}: values: {name}", ("buffers",))}


def _select(by_key: Mapping[str, T], prefix: str) -> dict[str, T]:
    """Select what belongs to the state with this prefix, which is removed from the keys, and what belongs to no state."""
    return {
        key.removeprefix(prefix): value
        for key, value in by_key.items()
        if key.startswith(prefix) or not key.startswith(f"{layout.STATES}/")
    }


def open_checkpoint(folder: AnyPath) -> CheckpointReader:
    """Open a step, and verify all of its files except the tensor data.

    Raises:
        CorruptCheckpointError: a file is missing, unexpected, of the wrong size, changed or invalid.
    """
    manifest = layout.parse_manifest(read_manifest_bytes(folder))
    step = layout.step_of(folder.name)
    if step is not None and manifest.step != step:
        raise CorruptCheckpointError(f"{layout.MANIFEST}: step must be {step} as in the folder's name, got {manifest.step}")
    _check_files(folder, manifest)
    indexes = tuple(_read_indexes(folder, manifest))
    files = tuple(
        DigestedFile(rank=rank, name=file.name, bytes=file.bytes, chunks=chunks)
        for rank, index in enumerate(indexes)
        for file, chunks in zip(manifest.ranks[rank].data, index.chunks, strict=True)
    )
    shared = _check_shared(indexes[0], manifest)
    shards = index_shards(index.shards for index in indexes)
    refs: dict[str, tree_json.TensorRef] = {}

    def placeholder(key: str, ref: tree_json.TensorRef) -> tree_json.TensorPlaceholder:
        refs[key] = ref
        return tree_json.TensorPlaceholder(key, ref)

    structures = {section: tree_json.decode(values, section, placeholder) for section, values in shared.items()}
    for index in indexes:
        _check_shards(index, refs)
        _check_per_rank(index)
    return CheckpointReader(
        folder=folder,
        manifest=manifest,
        files=files,
        shards=shards,
        refs=refs,
        shared=shared,
        structures=structures,
        per_rank=tuple(index.per_rank for index in indexes),
        values=tuple(index.values for index in indexes),
    )


def _check_files(folder: AnyPath, manifest: Manifest) -> None:
    found, expected = set(storage.list_names(folder)), {layout.MANIFEST, *manifest.sizes}
    if found != expected:
        missing, foreign = sorted(expected - found), sorted(found - expected)
        name = (missing or foreign)[0]
        raise CorruptCheckpointError(f"{name}: file is missing" if missing else f"{name}: file is not part of the checkpoint")
    for name, size in manifest.sizes.items():
        heartbeats.heartbeat("load")
        actual = storage.file_size(folder / name)
        if actual is None:
            raise CorruptCheckpointError(f"{name}: must be a file")
        if actual != size:
            raise CorruptCheckpointError(f"{name}: size must be {size} bytes as in the manifest, got {actual}")


def _read_indexes(folder: AnyPath, manifest: Manifest) -> Iterator[RankIndex]:
    """Read the indexes of all ranks. Their shards refer to a file by its number among the data files of all ranks."""
    first_file = 0
    for rank, files in enumerate(manifest.ranks):
        heartbeats.heartbeat("load")
        data = storage.read_file(folder / files.index, limit=strict_json.MAX_JSON_BYTES)
        if hashlib.sha256(data).hexdigest() != files.index_sha256:
            raise CorruptCheckpointError(f"{files.index}: sha256 does not match the manifest")
        yield parse_index(data, rank, [file.bytes for file in files.data], first_file=first_file)
        first_file += len(files.data)


def _check_shared(index: RankIndex, manifest: Manifest) -> dict[str, Any]:
    """Return the values of the run, and check their sections against the manifest."""
    location = f"{layout.index_name(0)}: shared"
    extra = (layout.EXTRA,) if manifest.what == "all" else ()
    if not manifest.states:
        return strict_json.read_object(index.shared, location, (*manifest.sections, *extra))
    shared = strict_json.read_object(index.shared, location, (layout.STATES, *extra))
    for name, sections in strict_json.read_object(shared[layout.STATES], f"{location}: states", manifest.states).items():
        strict_json.read_object(sections, f"{location}: states: {name}", manifest.sections)
    return shared


def _check_shards(index: RankIndex, refs: Mapping[str, tree_json.TensorRef]) -> None:
    """Check that each shard of a rank agrees with the tensor that the shared values name."""
    agreeing: set[tuple[int, int]] = set()
    for key, (_, _, kind) in index.shards.items():
        ref = refs.get(key)
        # There are many shards and few kinds of them.
        if (id(ref), id(kind)) in agreeing:
            continue
        if ref is None or kind.dtype != ref.dtype or kind.shape != ref.shape:
            name, found = layout.index_name(index.rank), f"{kind.dtype} {kind.shape}"
            raise CorruptCheckpointError(f"{name}: {key}: must be {ref} as in {layout.index_name(0)}, got {found}")
        agreeing.add((id(ref), id(kind)))


def _check_per_rank(index: RankIndex) -> None:
    """Check the tensors that only this rank has against its values: the same keys, each tensor whole."""
    name = layout.index_name(index.rank)
    refs = tree_json.tensor_refs(index.values, "")
    if index.per_rank.keys() != refs.keys():
        raise CorruptCheckpointError(f"{name}: per_rank: must list exactly the tensors of its values")
    for key, ref in refs.items():
        kind = index.per_rank[key].kind
        if (kind.dtype, kind.shape, kind.size) != (ref.dtype, ref.shape, ref.shape):
            raise CorruptCheckpointError(f"{name}: per_rank: {key}: must be {ref}")


def with_buffers_of(reader: CheckpointReader, rank: int) -> CheckpointReader:
    """Return ``reader`` with the buffers that only ``rank`` has as buffers of the run. The rank may have none."""
    buffers = {key: shard for key, shard in reader.per_rank[rank].items() if key.startswith("buffers/")}
    if not buffers:
        return reader
    refs = tree_json.tensor_refs(reader.values[rank], "")
    return replace(
        reader,
        shards={**reader.shards, **{key: [shard] for key, shard in buffers.items()}},
        refs={**reader.refs, **{key: refs[key] for key in buffers}},
    )


def verify_step(folder: AnyPath) -> CheckpointReader:
    """Verify every byte of a step, and that each tensor is stored completely and once.

    Raises:
        CorruptCheckpointError: names the file and the reason.
    """
    reader = open_checkpoint(folder)
    verify_data(reader)
    return reader


def verify_data(reader: CheckpointReader, on_bytes: Callable[[int], object] = lambda _: None) -> None:
    """Verify the tensor data of an open checkpoint: every byte, and that each tensor is stored completely and once.

    Args:
        reader: the checkpoint.
        on_bytes: called with the number of bytes after each chunk.

    Raises:
        CorruptCheckpointError: names the file and the reason.
    """
    for number, file in enumerate(reader.files):
        with reader.open_data(number) as data:
            for chunk in chunk_range(0, file.bytes):
                data.verify([chunk])
                # One rank may verify older steps while the other ranks wait.
                heartbeats.heartbeat("verify")
                on_bytes(min(layout.CHUNK_BYTES, file.bytes - chunk * layout.CHUNK_BYTES))
    plan_reads(reader.shards, {key: full_region(ref.shape) for key, ref in reader.refs.items()})


def verify(path: AnyPath | str) -> CheckpointInfo:
    """Read a whole checkpoint, and return its description if every byte matches its digest.

        info = dt.checkpoint.verify("runs/gpt/ckpt")
        print(f"step {info.step}: {info.bytes} bytes verified")

    Args:
        path: folder of a step, or a root, whose newest step is verified.

    Raises:
        CorruptCheckpointError: names the file and the reason.
        CheckpointError: there is no checkpoint, or the checkpoint cannot be read.
    """
    try:
        folder = choose_step(storage.resolve_path(path), "verify")
        if folder is None:
            raise CheckpointError(f"verify: no checkpoint found in {path}. Save one with save_sharded, or correct the path.")
        return _verify_and_describe(folder)
    except OSError as error:
        raise CheckpointError(f"verify: {error}") from error


def _verify_and_describe(folder: AnyPath) -> CheckpointInfo:
    try:
        verify_step(folder)
        return read_info(folder)
    except CheckpointError as error:
        raise type(error)(f"verify: {folder}: {error}") from None


def choose_step(path: AnyPath, caller: str) -> AnyPath | None:
    """Return the step that a path names: the folder of a step, or the newest step of a root; None for an empty root.

    A step with a corrupt manifest may be the newest and is then returned, so that verification refuses the step.

    Raises:
        CheckpointError: a step's folder without a manifest.
    """
    step = as_step_folder(path, caller)
    if step is not None:
        return step
    committed, corrupt = scan_root(path)
    newest: CheckpointInfo | CorruptStep | None = committed[-1] if committed else None
    if corrupt and (newest is None or corrupt[-1].step > newest.step):
        newest = corrupt[-1]
    return newest.path if newest else None


def iter_sound_steps_before(folder: AnyPath) -> Iterable[CheckpointInfo]:
    """Iterate over the steps of the root that were committed before ``folder`` and pass verification, newest first."""
    committed, _ = scan_root(folder.parent)
    serials = [c.serial for c in committed if c.path == folder]
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
