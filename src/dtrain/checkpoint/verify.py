"""Opening a checkpoint without trusting it, and verifying all of it."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dtrain import storage
from dtrain.checkpoint import closed, layout, plain
from dtrain.checkpoint.contents import SECTIONS
from dtrain.checkpoint.digest import VerifiedReader, chunks_of
from dtrain.checkpoint.find import Committed, Damaged, describe, has_manifest, read_manifest_bytes, survey
from dtrain.checkpoint.layout import Manifest, RankIndex
from dtrain.checkpoint.plan import Region, StoredBox, plan_reads, stored_boxes
from dtrain.errors import CheckpointError, DamagedCheckpointError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Opened:
    """A checkpoint whose manifest, file list, sizes and indexes are verified; tensor data are not yet."""

    folder: Path
    manifest: Manifest
    indexes: tuple[RankIndex, ...]
    boxes: dict[str, list[StoredBox]]
    refs: dict[str, plain.TensorRef]

    @property
    def shared(self) -> dict[str, Any]:
        """The encoded values of the run, by section."""
        assert self.indexes[0].shared is not None, "parse_index lets no rank 0 without shared values through"
        return self.indexes[0].shared

    @contextmanager
    def data(self, rank: int) -> Iterator[VerifiedReader]:
        """The open data file of a rank."""
        name = layout.data_name(rank)
        with storage.FileReader(self.folder / name) as file:
            yield VerifiedReader(file, name, self.indexes[rank].chunks)


def open_checkpoint(folder: Path) -> Opened:
    """Read and verify all of a step but the tensor data.

    Raises:
        DamagedCheckpointError: a file is missing, foreign, of the wrong size, altered, or makes no sense.
    """
    manifest = layout.parse_manifest(read_manifest_bytes(folder))
    step = layout.step_of(folder.name)
    if step is not None and manifest.step != step:
        raise DamagedCheckpointError(f"{layout.MANIFEST}: is that of step {manifest.step}, in a folder of step {step}")
    _check_files(folder, manifest)
    indexes = tuple(_read_index(folder, manifest, rank) for rank in range(len(manifest.ranks)))
    boxes = stored_boxes([index.boxes for index in indexes])
    refs = _check_contents(indexes, boxes)
    return Opened(folder=folder, manifest=manifest, indexes=indexes, boxes=boxes, refs=refs)


def _check_files(folder: Path, manifest: Manifest) -> None:
    found = set(storage.list_names(folder))
    if found != manifest.names:
        missing, foreign = sorted(manifest.names - found), sorted(found - manifest.names)
        name = (missing or foreign)[0]
        raise DamagedCheckpointError(f"{name}: is missing" if missing else f"{name}: is not part of the checkpoint")
    for files in manifest.ranks:
        for name, size in ((files.index, files.index_bytes), (files.data, files.data_bytes)):
            actual = storage.file_size(folder / name)
            if actual != size:
                what = "is not a file" if actual is None else f"has {actual} bytes, the manifest says {size}"
                raise DamagedCheckpointError(f"{name}: {what}")


def _read_index(folder: Path, manifest: Manifest, rank: int) -> RankIndex:
    files = manifest.ranks[rank]
    data = storage.read_file(folder / files.index, limit=closed.MAX_JSON_BYTES)
    if hashlib.sha256(data).hexdigest() != files.index_sha256:
        raise DamagedCheckpointError(f"{files.index}: its sha256 is not the one in the manifest")
    return layout.parse_index(data, rank, files.data_bytes)


def _check_contents(indexes: Sequence[RankIndex], boxes: dict[str, list[StoredBox]]) -> dict[str, plain.TensorRef]:
    """The tensors that the shared values name, each agreeing with its boxes."""
    shared, where = indexes[0].shared, layout.index_name(0)
    closed.record(shared, f"{where}: shared", SECTIONS)
    assert shared is not None
    refs = {key: ref for section in SECTIONS for key, ref in plain.refs(shared[section], section).items()}
    for key, parts in boxes.items():
        ref = refs.get(key)
        for part in parts:
            if ref is None or (part.entry.dtype, part.entry.shape) != (ref.dtype, ref.shape):
                name = layout.index_name(part.file)
                raise DamagedCheckpointError(f"{name}: {key}: is {part.entry.dtype} {part.entry.shape}, {where} says {ref}")
    for index in indexes:
        name = layout.index_name(index.rank)
        own = {entry.key: entry for entry in index.own}
        named = plain.refs(index.values, "")
        if len(own) != len(index.own) or own.keys() != named.keys():
            raise DamagedCheckpointError(f"{name}: own: needs exactly the tensors of its values")
        for key, ref in named.items():
            if (own[key].dtype, own[key].shape, own[key].size) != (ref.dtype, ref.shape, ref.shape):
                raise DamagedCheckpointError(f"{name}: own: {key}: is not {ref}")
    return refs


def with_buffers_of(opened: Opened, rank: int) -> Opened:
    """``opened`` with the buffers that one of its ranks had for itself taken as those of the run; it may have had none."""
    index = opened.indexes[rank]
    own = [entry for entry in index.own if entry.key.startswith("buffers/")]
    refs = plain.refs(index.values, "")
    return replace(
        opened,
        boxes={**opened.boxes, **{entry.key: [StoredBox(file=rank, entry=entry)] for entry in own}},
        refs={**opened.refs, **{entry.key: refs[entry.key] for entry in own}},
    )


def check_ranges(opened: Opened, ranges: Iterable[tuple[int, int, int]]) -> None:
    """Verify the chunks that byte ranges ``(rank, begin, end)`` lie in, each once.

    Raises:
        DamagedCheckpointError: with the file.
    """
    needed: dict[int, set[int]] = defaultdict(set)
    for rank, begin, end in ranges:
        needed[rank].update(chunks_of(begin, end))
    for rank in sorted(needed):
        with opened.data(rank) as file:
            file.verify(sorted(needed[rank]))


def verify_deeply(folder: Path) -> Opened:
    """Verify every byte of a step, and that each tensor is stored once and whole.

    Raises:
        DamagedCheckpointError: with the file and the reason.
    """
    opened = open_checkpoint(folder)
    check_ranges(opened, ((rank, 0, files.data_bytes) for rank, files in enumerate(opened.manifest.ranks)))
    plan_reads(opened.boxes, {key: Region(offset=(0,) * len(ref.shape), size=ref.shape) for key, ref in opened.refs.items()})
    return opened


def verify_checkpoint(path: Path | str) -> Committed:
    """Read all of a checkpoint and return its description if every byte is as it was written.

    Args:
        path: the folder of a step, or a root, of which the newest step is verified.

    Raises:
        DamagedCheckpointError: with the file and the reason.
        CheckpointError: there is no checkpoint, or it cannot be read.
    """
    try:
        folder = choose(storage.real_path(path), "verify_checkpoint")
        if folder is None:
            raise CheckpointError(f"verify_checkpoint: there is no checkpoint in {path}")
        return _described_if_sound(folder)
    except OSError as error:
        raise CheckpointError(f"verify_checkpoint: {error}") from error


def _described_if_sound(folder: Path) -> Committed:
    try:
        verify_deeply(folder)
        return describe(folder)
    except CheckpointError as error:
        raise type(error)(f"verify_checkpoint: {folder}: {error}") from None


def choose(path: Path, where: str) -> Path | None:
    """The step that a path stands for: itself, or the newest of a root, None when the root holds none.

    A damaged manifest does not make its step older: it is chosen, for verification to refuse it.

    Raises:
        CheckpointError: a step's folder without a manifest.
    """
    if has_manifest(path):
        return path
    if layout.step_of(path.name) is not None and storage.is_folder(path):
        raise CheckpointError(f"{where}: {path} has no {layout.MANIFEST}: the save was not completed; load another step")
    committed, damaged = survey(path)
    newest: Committed | Damaged | None = committed[-1] if committed else None
    if damaged and (newest is None or damaged[-1].step > newest.step):
        newest = damaged[-1]
    return newest.path if newest else None


def sound_steps_before(folder: Path) -> Iterable[Committed]:
    """The steps beside ``folder`` that were committed before it and pass deep verification, newest first."""
    committed, _ = survey(folder.parent)
    serials = [c.serial for c in committed if c.path == folder]
    step = layout.step_of(folder.name)
    for candidate in reversed(committed):
        # Of a step with a damaged manifest the serial is unknown: its number has to do.
        older = candidate.serial < serials[0] if serials else step is None or candidate.step < step
        if older and candidate.path != folder:
            try:
                verify_deeply(candidate.path)
            except DamagedCheckpointError:
                continue
            yield candidate
