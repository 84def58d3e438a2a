"""How a checkpoint lies in its folder: names, the manifest, and each rank's index. Pure: no file is touched here.

::

    root/step-00000100/
        manifest.json            run, step, mesh, the files with sizes and digests; written last, digested by itself
        rank-00000.json          what is where in the data files, their digests, plain values; digested by the manifest
        rank-00000.safetensors   the tensor boxes of rank 0, an ordinary safetensors file; digested chunk by chunk
        rank-00000-frozen.safetensors   of incremental saves: the boxes of parameters that are not trained
        rank-00001.json ...

While it is written, a folder is called ``step-00000100.tmp-<run>-<random>``; one on its way out
``step-00000100.old-<run>-<random>``. Neither is ever read.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, Literal, NamedTuple

import torch

from dtrain.checkpoint import closed
from dtrain.errors import CheckpointError, DamagedCheckpointError

FORMAT, INDEX_FORMAT, VERSION = "dtrain-checkpoint", "dtrain-checkpoint-rank", 1
MANIFEST = "manifest.json"
DIGEST = "xxh3-128"
"""Of data, because it costs next to nothing (sha256 costs more than the disk). It finds what happens to bytes by accident; who
can write into the folder can write a digest as well, whichever it is. JSON files, which are small, are digested by sha256."""
CHUNK_BYTES = 4 * 2**20

Only = Literal["model", "trainable"]
STATE_SECTIONS = ("params", "buffers", "optimizer", "slices", "clock", "seed")
_SECTIONS_OF: dict[tuple[str, ...], tuple[str, ...]] = {
    (): STATE_SECTIONS,
    ("model",): ("params", "buffers", "clock", "seed"),
    ("trainable",): ("params", "clock", "seed"),
}
EXTRA, STATES = "extra", "states"
"""The section of what the caller added, and, where several named states are one checkpoint, the one that they are below."""


def sections_of(only: tuple[str, ...]) -> tuple[str, ...]:
    """What is stored of a state by a save that was limited to ``only``: the names of sections."""
    return _SECTIONS_OF[only]


DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
"""The names of dtypes in safetensors files, and so in ours."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

RUN_ID = re.compile(r"[0-9a-f]{32}")
_XXH3 = re.compile(r"[0-9a-f]{32}")
_STEP = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,17})")
_LEFTOVER = re.compile(r"step-[0-9]{8,18}\.(?:tmp|old)-([0-9a-f]{8})-[0-9a-f]{8}")


def step_name(step: int) -> str:
    """The folder of a step."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step whose folder this is, or None for any other name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def side_name(step: int, purpose: str, run_id: str, random: str) -> str:
    """The folder of a step while it is written (``tmp``) or removed (``old``)."""
    return f"{step_name(step)}.{purpose}-{run_id[:8]}-{random}"


def is_leftover(name: str, run_id: str | None) -> bool:
    """Whether the folder is a side folder of this run, or with None of any."""
    match = _LEFTOVER.fullmatch(name)
    return match is not None and (run_id is None or match[1] == run_id[:8])


def data_name(rank: int, *, frozen: bool = False) -> str:
    """The file of a rank's tensors, or of those that are parameters that are not trained."""
    return f"rank-{rank:05d}{'-frozen' * frozen}.safetensors"


def index_name(rank: int) -> str:
    """The file that says what is in the rank's data file, and holds the rank's plain values."""
    return f"rank-{rank:05d}.json"


class Entry(NamedTuple):
    """One stored box: part ``[offset, offset + size)`` of the tensor ``key`` of ``shape``.

    It is the bytes ``[begin, end)`` of data file number ``file`` of its rank. (A tuple, because there is one for every tensor
    of every rank, which others make by the ten thousand.)
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    begin: int
    end: int
    file: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankIndex:
    """What one rank wrote.

    Args:
        rank: which.
        boxes: parts of tensors that belong to the run as a whole.
        own: tensors that belong to this rank alone.
        chunks: of each data file, the digests of each ``CHUNK_BYTES``, the last one shorter.
        values: the rank's own plain values, encoded.
        shared: the plain values of the run as a whole, encoded, by section; only rank 0 has them.
    """

    rank: int
    boxes: tuple[Entry, ...]
    own: tuple[Entry, ...]
    chunks: tuple[tuple[str, ...], ...]
    values: Any
    shared: dict[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """A file of tensors: its name in the step's folder, and its size."""

    name: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFiles:
    """The files of a rank as the manifest knows them: the digest of the index covers those of the data."""

    index: str
    index_bytes: int
    index_sha256: str
    data: tuple[DataFile, ...]

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes by file name."""
        return {self.index: self.index_bytes, **{file.name: file.bytes for file in self.data}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The mesh that a checkpoint was written on; None and () without one."""

    strategy: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What makes a folder a checkpoint.

    Args:
        run_id: of the run, kept across resumes.
        step: of the state.
        parent_step: the step that this one continued from, None for the first of a run.
        serial: this was the how-manieth commit in its root. The newest checkpoint is the one with the highest serial,
            which after going back to an older step is not the one with the highest step.
        layout: mesh and strategy.
        only: what the save was limited to, () for all of a state.
        states: the names of the states, () for one without a name.
        ranks: the files, by rank.
    """

    run_id: str
    step: int
    parent_step: int | None
    serial: int
    layout: Layout
    only: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    ranks: tuple[RankFiles, ...]

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of every file that the folder holds besides the manifest, by name."""
        return {name: size for files in self.ranks for name, size in files.sizes.items()}

    @property
    def bytes(self) -> int:
        """Size of all ranks' files."""
        return sum(self.sizes.values())

    @property
    def holds(self) -> tuple[str, ...]:
        """The sections of a state that are stored."""
        return sections_of(self.only)


_MANIFEST_FIELDS = (
    "format", "version", "run_id", "step", "parent_step", "serial", "layout", "only", "states", "ranks",
)  # fmt: skip
_RANK_FIELDS = ("index", "index_bytes", "index_sha256", "data")
_FILE_FIELDS = ("name", "bytes")
_LAYOUT_FIELDS = ("strategy", "axes", "shape")
_INDEX_FIELDS = ("format", "version", "rank", "chunk_bytes", "digest", "chunks", "kinds", "boxes", "own", "values", "shared")
_KIND_FIELDS = ("dtype", "shape", "offset", "size", "file")
_ROW = [str, int, int]


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of ``manifest.json``: readable JSON whose last field digests the canonical JSON of all before it."""
    return _signed({"format": FORMAT, "version": VERSION, **asdict(manifest)})


def _signed(body: dict[str, Any]) -> bytes:
    return json.dumps({**body, "sha256": hashlib.sha256(closed.canonical(body)).hexdigest()}, indent=1).encode() + b"\n"


def parse_manifest(data: bytes) -> Manifest:
    """The manifest that these bytes are.

    Raises:
        DamagedCheckpointError: not exactly what ``encode_manifest`` writes.
        CheckpointError: sound, but of another format version.
    """
    body = closed.parse(data, MANIFEST)
    if type(body) is not dict or type(body.get("sha256")) is not str:
        raise DamagedCheckpointError(f"{MANIFEST}: not an object with a sha256")
    digest = body.pop("sha256")
    if hashlib.sha256(closed.canonical(body)).hexdigest() != digest:
        raise DamagedCheckpointError(f"{MANIFEST}: its sha256 does not match its content")
    _check_format(body, MANIFEST, FORMAT)
    if _signed(body) != data:
        raise DamagedCheckpointError(f"{MANIFEST}: the text was altered (the values were not)")
    raw = closed.record(body, MANIFEST, _MANIFEST_FIELDS)
    ranks = closed.items(raw["ranks"], f"{MANIFEST}: ranks", rank_files)
    for rank, files in enumerate(ranks):
        names, known = [file.name for file in files.data], [data_name(rank), data_name(rank, frozen=True)]
        if files.index != index_name(rank) or not names or names != known[: len(names)]:
            raise DamagedCheckpointError(f"{MANIFEST}: ranks[{rank}]: foreign file names {closed.kind([files.index, *names])}")
    if not ranks:
        raise DamagedCheckpointError(f"{MANIFEST}: ranks: needs at least one")
    return Manifest(
        run_id=closed.text(raw["run_id"], f"{MANIFEST}: run_id", RUN_ID),
        step=closed.whole(raw["step"], f"{MANIFEST}: step"),
        parent_step=closed.optional(raw["parent_step"], f"{MANIFEST}: parent_step", closed.whole),
        serial=closed.whole(raw["serial"], f"{MANIFEST}: serial"),
        layout=_parse_layout(raw["layout"], f"{MANIFEST}: layout"),
        only=_parse_only(raw["only"]),
        states=_parse_states(raw["states"]),
        ranks=ranks,
    )


def _parse_only(value: Any) -> tuple[str, ...]:
    only = closed.items(value, f"{MANIFEST}: only", closed.text)
    if only not in _SECTIONS_OF:
        raise DamagedCheckpointError(f"{MANIFEST}: only: unknown value {closed.kind(value)}")
    return only


def _parse_states(value: Any) -> tuple[str, ...]:
    names = closed.items(value, f"{MANIFEST}: states", closed.text)
    if len(set(names)) != len(names) or "" in names:
        raise DamagedCheckpointError(f"{MANIFEST}: states: a name is given twice, or empty: {closed.kind(value)}")
    return names


def _check_format(body: Any, where: str, name: str) -> None:
    if type(body) is not dict or body.get("format") != name:
        raise DamagedCheckpointError(f"{where}: not a file of format {name!r}")
    if type(body.get("version")) is not int:
        raise DamagedCheckpointError(f"{where}: version: needs a whole number, got {closed.kind(body.get('version'))}")
    if body["version"] != VERSION:
        raise CheckpointError(
            f"{where}: has format version {body['version']}, this dtrain reads version {VERSION}; use the dtrain that wrote it"
        )


def rank_files(value: Any, where: str = "rank files") -> RankFiles:
    """The files of a rank from their JSON form.

    Raises:
        DamagedCheckpointError: not of that form.
    """
    raw = closed.record(value, where, _RANK_FIELDS)
    return RankFiles(
        index=closed.text(raw["index"], f"{where}: index"),
        index_bytes=closed.whole(raw["index_bytes"], f"{where}: index_bytes"),
        index_sha256=closed.text(raw["index_sha256"], f"{where}: index_sha256", closed.SHA256),
        data=closed.items(raw["data"], f"{where}: data", _data_file),
    )


def _data_file(value: Any, where: str) -> DataFile:
    raw = closed.record(value, where, _FILE_FIELDS)
    return DataFile(name=closed.text(raw["name"], f"{where}: name"), bytes=closed.whole(raw["bytes"], f"{where}: bytes"))


def _parse_layout(value: Any, where: str) -> Layout:
    raw = closed.record(value, where, _LAYOUT_FIELDS)
    return Layout(
        strategy=closed.text(raw["strategy"], f"{where}: strategy"),
        axes=closed.items(raw["axes"], f"{where}: axes", closed.text),
        shape=closed.wholes(raw["shape"], f"{where}: shape"),
    )


def encode_index(index: RankIndex) -> bytes:
    """The bytes of ``rank-<rank>.json``.

    Raises:
        CheckpointError: more JSON than would be read back.
    """
    body = {"format": INDEX_FORMAT, "version": VERSION, "chunk_bytes": CHUNK_BYTES, "digest": DIGEST, **_plain_index(index)}
    data = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
    if len(data) > closed.MAX_JSON_BYTES:
        raise CheckpointError(
            f"{index_name(index.rank)}: {len(data)} bytes of plain values and index, at most {closed.MAX_JSON_BYTES} "
            "are taken; put large plain data into tensors"
        )
    return data


def _plain_index(index: RankIndex) -> dict[str, Any]:
    """The fields of the index. Boxes are rows ``[key, kind, begin]``; what they have in common is said once, in ``kinds``.

    A model may have many boxes, all of which every rank parses when it loads, and has few kinds of them.
    """
    kinds: dict[tuple[Any, ...], int] = {}

    def row(entry: Entry) -> list[Any]:
        kind = (entry.dtype, entry.shape, entry.offset, entry.size, entry.file)
        return [entry.key, kinds.setdefault(kind, len(kinds)), entry.begin]

    boxes, own = [row(entry) for entry in index.boxes], [row(entry) for entry in index.own]
    return {
        "rank": index.rank,
        "kinds": [dict(zip(_KIND_FIELDS, kind, strict=True)) for kind in kinds],
        "boxes": boxes,
        "own": own,
        "chunks": index.chunks,
        "values": index.values,
        "shared": index.shared,
    }


def parse_index(data: bytes, rank: int, sizes: Sequence[int]) -> RankIndex:
    """The index of ``rank``, whose data files have ``sizes`` bytes.

    Raises:
        DamagedCheckpointError: not what ``encode_index`` writes, or boxes that leave their tensor or the file.
        CheckpointError: sound, but of another format version.
    """
    where = index_name(rank)
    body = closed.parse(data, where)
    _check_format(body, where, INDEX_FORMAT)
    raw = closed.record(body, where, _INDEX_FIELDS)
    found = raw["rank"], raw["chunk_bytes"], raw["digest"]
    if found != (rank, CHUNK_BYTES, DIGEST):
        raise DamagedCheckpointError(f"{where}: is of rank {found[0]!r} with {found[2]!r} of chunks of {found[1]!r} bytes")
    chunks = closed.items(raw["chunks"], f"{where}: chunks", _digests)
    counts = [len(of_file) for of_file in chunks]
    if counts != [-(-size // CHUNK_BYTES) for size in sizes]:
        raise DamagedCheckpointError(f"{where}: {counts} chunk digests for files of {list(sizes)} bytes")
    if (raw["shared"] is None) != (rank != 0) or (rank == 0 and type(raw["shared"]) is not dict):
        raise DamagedCheckpointError(f"{where}: shared: rank 0 and no other holds an object of shared values")
    kinds = closed.items(raw["kinds"], f"{where}: kinds", lambda value, place: _parse_kind(value, place, sizes))
    return RankIndex(
        rank=rank,
        boxes=_parse_entries(raw["boxes"], f"{where}: boxes", kinds),
        own=_parse_entries(raw["own"], f"{where}: own", kinds),
        chunks=chunks,
        values=raw["values"],
        shared=raw["shared"],
    )


def _digests(value: Any, where: str) -> tuple[str, ...]:
    return closed.items(value, where, _digest)


def _digest(value: Any, where: str) -> str:
    return closed.text(value, where, _XXH3)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """What boxes have in common, how many bytes each of them has, and how many the file that they are in."""

    dtype: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    file: int
    bytes: int
    file_bytes: int


def _parse_kind(value: Any, where: str, sizes: Sequence[int]) -> _Kind:
    raw = closed.record(value, where, _KIND_FIELDS)
    dtype, file = closed.text(raw["dtype"], where), closed.whole(raw["file"], where)
    shape, offset, size = (closed.wholes(raw[name], where) for name in ("shape", "offset", "size"))
    if dtype not in DTYPES:
        raise DamagedCheckpointError(f"{where}: unknown dtype {dtype!r}")
    if not len(shape) == len(offset) == len(size) or any(a + n > full for a, n, full in zip(offset, size, shape, strict=True)):
        raise DamagedCheckpointError(f"{where}: box {offset}+{size} leaves its shape {shape}")
    if file >= len(sizes):
        raise DamagedCheckpointError(f"{where}: lies in data file {file} of {len(sizes)}")
    nbytes = prod(size) * DTYPES[dtype].itemsize
    return _Kind(dtype=dtype, shape=shape, offset=offset, size=size, file=file, bytes=nbytes, file_bytes=sizes[file])


def _parse_entries(value: Any, where: str, kinds: Sequence[_Kind]) -> tuple[Entry, ...]:
    if type(value) is not list:
        raise DamagedCheckpointError(f"{where}: needs a list, got {closed.kind(value)}")
    for row in value:
        if (
            type(row) is not list
            or len(row) != 3
            or type(row[0]) is not str
            or type(row[1]) is not int
            or type(row[2]) is not int
        ):
            raise DamagedCheckpointError(f"{where}: needs rows of a key, a kind, and a first byte, got {closed.kind(row)}")
        key, number, begin = row
        if not 0 <= number < len(kinds):
            raise DamagedCheckpointError(f"{where}: {key}: is of kind {number}, of which there are {len(kinds)}")
        if begin < 0 or begin + kinds[number].bytes > kinds[number].file_bytes:
            raise DamagedCheckpointError(
                f"{where}: {key}: {kinds[number].bytes} bytes from {begin} on, in a file of {kinds[number].file_bytes}"
            )
    common = [(kind.dtype, kind.shape, kind.offset, kind.size, kind.bytes, kind.file) for kind in kinds]
    return tuple(
        Entry(key, dtype, shape, offset, size, begin, begin + nbytes, file)
        for key, number, begin in value
        for dtype, shape, offset, size, nbytes, file in (common[number],)
    )
