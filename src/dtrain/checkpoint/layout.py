"""How a checkpoint lies in its folder: names, the manifest, and each rank's index. Pure: no file is touched here.

::

    root/step-00000100/
        manifest.json            run, step, mesh, the files with sizes and digests; written last, digested by itself
        rank-00000.json          what is where in the data file, sha256 of its chunks, plain values; digested by the manifest
        rank-00000.safetensors   the tensor boxes of rank 0, an ordinary safetensors file; digested chunk by chunk
        rank-00001.json ...

While it is written, a folder is called ``step-00000100.tmp-<run>-<random>``; one on its way out
``step-00000100.old-<run>-<random>``. Neither is ever read.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import torch

from dtrain.checkpoint import closed
from dtrain.errors import CheckpointError, DamagedCheckpointError

FORMAT, INDEX_FORMAT, VERSION = "dtrain-checkpoint", "dtrain-checkpoint-rank", 1
MANIFEST = "manifest.json"
CHUNK_BYTES = 16 * 2**20

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


def is_leftover(name: str, run_id: str) -> bool:
    """Whether the folder is a side folder of this run."""
    match = _LEFTOVER.fullmatch(name)
    return match is not None and match[1] == run_id[:8]


def data_name(rank: int) -> str:
    """The file of a rank's tensors."""
    return f"rank-{rank:05d}.safetensors"


def index_name(rank: int) -> str:
    """The file that says what is in the rank's data file, and holds the rank's plain values."""
    return f"rank-{rank:05d}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One stored box: part ``[offset, offset + size)`` of the tensor ``key`` of ``shape``, at bytes ``[begin, end)``."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankIndex:
    """What one rank wrote.

    Args:
        rank: which.
        boxes: parts of tensors that belong to the run as a whole.
        own: tensors that belong to this rank alone.
        chunks: sha256 of each ``CHUNK_BYTES`` of the data file, the last one shorter.
        values: the rank's own plain values, encoded.
        shared: the plain values of the run as a whole, encoded, by section; only rank 0 has them.
    """

    rank: int
    boxes: tuple[Entry, ...]
    own: tuple[Entry, ...]
    chunks: tuple[str, ...]
    values: Any
    shared: dict[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFiles:
    """The two files of a rank as the manifest knows them: the digest of the index covers those of the data."""

    index: str
    index_bytes: int
    index_sha256: str
    data: str
    data_bytes: int


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
        ranks: the files, by rank.
    """

    run_id: str
    step: int
    parent_step: int | None
    serial: int
    layout: Layout
    ranks: tuple[RankFiles, ...]

    @property
    def names(self) -> set[str]:
        """Every file that the folder holds."""
        return {MANIFEST, *(r.index for r in self.ranks), *(r.data for r in self.ranks)}

    @property
    def bytes(self) -> int:
        """Size of all ranks' files."""
        return sum(r.index_bytes + r.data_bytes for r in self.ranks)


_MANIFEST_FIELDS = ("format", "version", "run_id", "step", "parent_step", "serial", "layout", "ranks")
_RANK_FIELDS = ("index", "index_bytes", "index_sha256", "data", "data_bytes")
_LAYOUT_FIELDS = ("strategy", "axes", "shape")
_INDEX_FIELDS = ("format", "version", "rank", "chunk_bytes", "chunks", "boxes", "own", "values", "shared")
_ENTRY_FIELDS = ("key", "dtype", "shape", "offset", "size", "begin", "end")


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
    ranks = closed.items(raw["ranks"], f"{MANIFEST}: ranks", _rank_files)
    for rank, files in enumerate(ranks):
        if (files.index, files.data) != (index_name(rank), data_name(rank)):
            raise DamagedCheckpointError(f"{MANIFEST}: ranks[{rank}]: foreign file names {files.index!r}, {files.data!r}")
    if not ranks:
        raise DamagedCheckpointError(f"{MANIFEST}: ranks: needs at least one")
    return Manifest(
        run_id=closed.text(raw["run_id"], f"{MANIFEST}: run_id", RUN_ID),
        step=closed.whole(raw["step"], f"{MANIFEST}: step"),
        parent_step=closed.optional(raw["parent_step"], f"{MANIFEST}: parent_step", closed.whole),
        serial=closed.whole(raw["serial"], f"{MANIFEST}: serial"),
        layout=_parse_layout(raw["layout"], f"{MANIFEST}: layout"),
        ranks=ranks,
    )


def _check_format(body: Any, where: str, name: str) -> None:
    if type(body) is not dict or body.get("format") != name:
        raise DamagedCheckpointError(f"{where}: not a file of format {name!r}")
    if type(body.get("version")) is not int:
        raise DamagedCheckpointError(f"{where}: version: needs a whole number, got {closed.kind(body.get('version'))}")
    if body["version"] != VERSION:
        raise CheckpointError(
            f"{where}: has format version {body['version']}, this dtrain reads version {VERSION}; use the dtrain that wrote it"
        )


def _rank_files(value: Any, where: str) -> RankFiles:
    raw = closed.record(value, where, _RANK_FIELDS)
    return RankFiles(
        index=closed.text(raw["index"], f"{where}: index"),
        index_bytes=closed.whole(raw["index_bytes"], f"{where}: index_bytes"),
        index_sha256=closed.text(raw["index_sha256"], f"{where}: index_sha256", closed.SHA256),
        data=closed.text(raw["data"], f"{where}: data"),
        data_bytes=closed.whole(raw["data_bytes"], f"{where}: data_bytes"),
    )


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
    body = {"format": INDEX_FORMAT, "version": VERSION, "chunk_bytes": CHUNK_BYTES, **asdict(index)}
    data = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
    if len(data) > closed.MAX_JSON_BYTES:
        raise CheckpointError(
            f"{index_name(index.rank)}: {len(data)} bytes of plain values and index, at most {closed.MAX_JSON_BYTES} "
            "are taken; put large plain data into tensors"
        )
    return data


def parse_index(data: bytes, rank: int, data_bytes: int) -> RankIndex:
    """The index of ``rank``, whose data file has ``data_bytes``.

    Raises:
        DamagedCheckpointError: not what ``encode_index`` writes, or boxes that leave their tensor or the file.
        CheckpointError: sound, but of another format version.
    """
    where = index_name(rank)
    body = closed.parse(data, where)
    _check_format(body, where, INDEX_FORMAT)
    raw = closed.record(body, where, _INDEX_FIELDS)
    if raw["rank"] != rank or raw["chunk_bytes"] != CHUNK_BYTES:
        raise DamagedCheckpointError(f"{where}: is of rank {raw['rank']!r} with chunks of {raw['chunk_bytes']!r} bytes")
    chunks = closed.items(raw["chunks"], f"{where}: chunks", _sha256)
    if len(chunks) != -(-data_bytes // CHUNK_BYTES):
        raise DamagedCheckpointError(f"{where}: {len(chunks)} chunk digests for {data_bytes} bytes")
    if (raw["shared"] is None) != (rank != 0) or (rank == 0 and type(raw["shared"]) is not dict):
        raise DamagedCheckpointError(f"{where}: shared: rank 0 and no other holds an object of shared values")
    index = RankIndex(
        rank=rank,
        boxes=closed.items(raw["boxes"], f"{where}: boxes", _parse_entry),
        own=closed.items(raw["own"], f"{where}: own", _parse_entry),
        chunks=chunks,
        values=raw["values"],
        shared=raw["shared"],
    )
    for entry in (*index.boxes, *index.own):
        _check_entry(entry, where, data_bytes)
    return index


def _sha256(value: Any, where: str) -> str:
    return closed.text(value, where, closed.SHA256)


def _parse_entry(value: Any, where: str) -> Entry:
    raw = closed.record(value, where, _ENTRY_FIELDS)
    return Entry(
        key=closed.text(raw["key"], where),
        dtype=closed.text(raw["dtype"], where),
        shape=closed.wholes(raw["shape"], where),
        offset=closed.wholes(raw["offset"], where),
        size=closed.wholes(raw["size"], where),
        begin=closed.whole(raw["begin"], where),
        end=closed.whole(raw["end"], where),
    )


def _check_entry(entry: Entry, where: str, data_bytes: int) -> None:
    if entry.dtype not in DTYPES:
        raise DamagedCheckpointError(f"{where}: {entry.key}: unknown dtype {entry.dtype!r}")
    inside = len(entry.shape) == len(entry.offset) == len(entry.size) and all(
        at + rows <= full for at, rows, full in zip(entry.offset, entry.size, entry.shape, strict=True)
    )
    if not inside:
        raise DamagedCheckpointError(f"{where}: {entry.key}: box {entry.offset}+{entry.size} leaves its shape {entry.shape}")
    needed = prod(entry.size) * DTYPES[entry.dtype].itemsize
    if entry.end - entry.begin != needed or entry.end > data_bytes:
        raise DamagedCheckpointError(
            f"{where}: {entry.key}: bytes [{entry.begin}, {entry.end}) for a box of {needed} bytes in a file of {data_bytes}"
        )
