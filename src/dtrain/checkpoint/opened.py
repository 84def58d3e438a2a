"""A checkpoint opened without trusting it: all of it but the tensor data is read and verified."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from dtrain import pulse, storage
from dtrain.checkpoint import closed, layout, plain, rank_index
from dtrain.checkpoint.digest import VerifiedReader
from dtrain.checkpoint.find import read_manifest_bytes
from dtrain.checkpoint.layout import Manifest
from dtrain.checkpoint.plan import StoredBox, stored_boxes
from dtrain.checkpoint.rank_index import Entry, RankIndex
from dtrain.checkpoint.tree import leaves, moved, outlined
from dtrain.errors import CheckpointMismatchError, DamagedCheckpointError
from dtrain.storage import Place


@dataclass(frozen=True, slots=True, kw_only=True)
class DigestedFile:
    """A data file: which rank wrote it, its name, its size, and the digests of its chunks."""

    rank: int
    name: str
    bytes: int
    chunks: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Opened:
    """A checkpoint whose manifest, file list, sizes and indexes are verified; tensor data are not yet.

    Args:
        folder: of the step.
        manifest: as it was read.
        files: all data files, rank by rank; boxes name them by their number in here.
        boxes: the stored boxes of the tensors of the run, by key.
        refs: dtype and shape of the tensors of the run, by key.
        shared: the encoded values of the run: by section; where there are several states, below their names (``of_state``).
        outlines: the same values decoded, with a ``Leaf`` in place of each tensor.
        own: by rank, the boxes of the tensors that it has for itself, by key.
        values: by rank, its encoded values.
    """

    folder: Place
    manifest: Manifest
    files: tuple[DigestedFile, ...]
    boxes: Mapping[str, Sequence[StoredBox]]
    refs: Mapping[str, plain.TensorRef]
    shared: Mapping[str, Any]
    outlines: Mapping[str, Any]
    own: tuple[Mapping[str, StoredBox], ...]
    values: tuple[Any, ...]

    @property
    def world_size(self) -> int:
        """How many ranks wrote it."""
        return len(self.values)

    @contextmanager
    def data(self, number: int) -> Iterator[VerifiedReader]:
        """An open data file."""
        found = self.files[number]
        with storage.FileReader(self.folder / found.name) as file:
            yield VerifiedReader(file, found.name, found.chunks)

    def of_state(self, name: str) -> Opened:
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
        prefix = plain.join(layout.STATES, name) + "/"
        kept = {layout.EXTRA: self.shared[layout.EXTRA]} if layout.EXTRA in self.shared else {}
        return replace(
            self,
            boxes={k.removeprefix(prefix): _named(boxes, prefix) for k, boxes in self.boxes.items() if _inside(k, prefix)},
            refs={k.removeprefix(prefix): ref for k, ref in self.refs.items() if _inside(k, prefix)},
            shared={**self.shared[layout.STATES][name], **kept},
            outlines={section: moved(tree, prefix) for section, tree in self.outlines[layout.STATES][name].items()},
            own=tuple(
                {k.removeprefix(prefix): _named([box], prefix)[0] for k, box in own.items() if _inside(k, prefix)}
                for own in self.own
            ),
            values=tuple(_values_of(values, name, layout.index_name(rank)) for rank, values in enumerate(self.values)),
        )


def _values_of(values: Any, name: str, where: str) -> dict[str, Any]:
    """A rank's values as if it had saved one state alone."""
    values = closed.record(values, f"{where}: values", (layout.STATES, "rng"))
    states = values[layout.STATES]
    if type(states) is not dict or name not in states:
        raise DamagedCheckpointError(f"{where}: values: no state {name!r}")
    return {"rng": values["rng"], **closed.record(states[name], f"{where}: values: {name}", ("buffers",))}


def _inside(key: str, prefix: str) -> bool:
    """Whether a tensor belongs to the state with this prefix, or to none."""
    return key.startswith(prefix) or not key.startswith(f"{layout.STATES}/")


def _named(boxes: Sequence[StoredBox], prefix: str) -> list[StoredBox]:
    return [box._replace(entry=box.entry._replace(key=box.entry.key.removeprefix(prefix))) for box in boxes]


def open_checkpoint(folder: Place) -> Opened:
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
    files = tuple(
        DigestedFile(rank=rank, name=file.name, bytes=file.bytes, chunks=chunks)
        for rank, index in enumerate(indexes)
        for file, chunks in zip(manifest.ranks[rank].data, index.chunks, strict=True)
    )
    shared = _shared(indexes[0], manifest)
    for file, entries in zip(files, _by_file([(*index.boxes, *index.own) for index in indexes], manifest), strict=True):
        _check_apart(entries, f"{layout.index_name(file.rank)}: {file.name}")
    boxes = stored_boxes(_by_file([index.boxes for index in indexes], manifest))
    outlines = {section: outlined(part, section) for section, part in shared.items()}
    refs = {leaf.key: leaf.ref for leaf in leaves(outlines)}
    _check_boxes(boxes, refs, files)
    own = tuple(_own(index, first) for index, first in zip(indexes, _firsts(manifest), strict=True))
    return Opened(
        folder=folder,
        manifest=manifest,
        files=files,
        boxes=boxes,
        refs=refs,
        shared=shared,
        outlines=outlines,
        own=own,
        values=tuple(index.values for index in indexes),
    )


def _check_files(folder: Place, manifest: Manifest) -> None:
    found, expected = set(storage.list_names(folder)), {layout.MANIFEST, *manifest.sizes}
    if found != expected:
        missing, foreign = sorted(expected - found), sorted(found - expected)
        name = (missing or foreign)[0]
        raise DamagedCheckpointError(f"{name}: is missing" if missing else f"{name}: is not part of the checkpoint")
    for name, size in manifest.sizes.items():
        pulse.beat("load")
        actual = storage.file_size(folder / name)
        if actual != size:
            what = "is not a file" if actual is None else f"has {actual} bytes, the manifest says {size}"
            raise DamagedCheckpointError(f"{name}: {what}")


def _read_index(folder: Place, manifest: Manifest, rank: int) -> RankIndex:
    pulse.beat("load")
    files = manifest.ranks[rank]
    data = storage.read_file(folder / files.index, limit=closed.MAX_JSON_BYTES)
    if hashlib.sha256(data).hexdigest() != files.index_sha256:
        raise DamagedCheckpointError(f"{files.index}: its sha256 is not the one in the manifest")
    return rank_index.parse_index(data, rank, [file.bytes for file in files.data])


def _firsts(manifest: Manifest) -> list[int]:
    """The number of each rank's first data file among all."""
    counts = [len(files.data) for files in manifest.ranks]
    return [sum(counts[:rank]) for rank in range(len(counts))]


def _by_file(entries: Sequence[Sequence[Entry]], manifest: Manifest) -> list[list[Entry]]:
    """The ranks' entries by the number of their data file among all."""
    found: list[list[Entry]] = [[] for files in manifest.ranks for _ in files.data]
    for first, of_rank in zip(_firsts(manifest), entries, strict=True):
        for entry in of_rank:
            found[first + entry.file].append(entry)
    return found


def _check_apart(entries: Sequence[Entry], where: str) -> None:
    """No byte of a file belongs to two boxes: a reader would fetch it for each of them."""
    reach = 0
    for entry in sorted(entries, key=attrgetter("begin")):
        if entry.begin < reach and entry.end > entry.begin:
            raise DamagedCheckpointError(f"{where}: {entry.key}: begins at byte {entry.begin}, inside of another box")
        reach = max(reach, entry.end)


def _shared(index: RankIndex, manifest: Manifest) -> dict[str, Any]:
    """The values of the run, which must be what the manifest says the checkpoint holds."""
    where = f"{layout.index_name(0)}: shared"
    extra = () if manifest.only else (layout.EXTRA,)
    if not manifest.states:
        return closed.record(index.shared, where, (*manifest.holds, *extra))
    shared = closed.record(index.shared, where, (layout.STATES, *extra))
    for name, sections in closed.record(shared[layout.STATES], f"{where}: states", manifest.states).items():
        closed.record(sections, f"{where}: states: {name}", manifest.holds)
    return shared


def _check_boxes(
    boxes: Mapping[str, Sequence[StoredBox]], refs: Mapping[str, plain.TensorRef], files: Sequence[DigestedFile]
) -> None:
    """The tensors that the shared values name, each agreeing with its boxes."""
    for key, parts in boxes.items():
        ref = refs.get(key)
        for part in parts:
            if ref is None or (part.entry.dtype, part.entry.shape) != (ref.dtype, ref.shape):
                name = layout.index_name(files[part.file].rank)
                found = f"{part.entry.dtype} {part.entry.shape}"
                raise DamagedCheckpointError(f"{name}: {key}: is {found}, {layout.index_name(0)} says {ref}")


def _own(index: RankIndex, first: int) -> dict[str, StoredBox]:
    """A rank's own tensors: exactly those that its values name, each whole."""
    name = layout.index_name(index.rank)
    own = {entry.key: entry for entry in index.own}
    named = plain.refs(index.values, "")
    if len(own) != len(index.own) or own.keys() != named.keys():
        raise DamagedCheckpointError(f"{name}: own: needs exactly the tensors of its values")
    for key, ref in named.items():
        if (own[key].dtype, own[key].shape, own[key].size) != (ref.dtype, ref.shape, ref.shape):
            raise DamagedCheckpointError(f"{name}: own: {key}: is not {ref}")
    return {key: StoredBox(file=first + entry.file, entry=entry) for key, entry in own.items()}


def with_buffers_of(opened: Opened, rank: int) -> Opened:
    """``opened`` with the buffers that one of its ranks had for itself taken as those of the run; it may have had none."""
    own = {key: box for key, box in opened.own[rank].items() if key.startswith("buffers/")}
    refs = plain.refs(opened.values[rank], "")
    return replace(
        opened,
        boxes={**opened.boxes, **{key: [box] for key, box in own.items()}},
        refs={**opened.refs, **{key: refs[key] for key in own}},
    )
