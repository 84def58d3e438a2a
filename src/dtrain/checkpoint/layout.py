"""How a checkpoint lies in its folder: names, dtypes, the manifest (for the index see ``rank_index``). Pure: touches no file.

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
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, Literal

import torch

from dtrain.checkpoint import strict_json
from dtrain.dist.mesh import MODEL_AXES
from dtrain.errors import CheckpointError, CorruptCheckpointError

FORMAT, VERSION = "dtrain-checkpoint", 1
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 16 * 2**20  # of tens of thousands of ranks
DIGEST = "xxh3-128"
"""Of data, because it costs next to nothing (sha256 costs more than the disk). It finds what happens to bytes by accident; who
can write into the folder can write a digest as well, whichever it is. JSON files, which are small, are digested by sha256."""
CHUNK_BYTES = 4 * 2**20

SaveScope = Literal["model", "trainable"]
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
_STEP_NAME = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,17})")
_STAGING_NAME = re.compile(r"step-[0-9]{8,18}\.(?:tmp|old)-[0-9a-f]{8}-[0-9a-f]{8}")


def step_name(step: int) -> str:
    """The folder of a step."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step whose folder this is, or None for any other name."""
    match = _STEP_NAME.fullmatch(name)
    return int(match[1]) if match else None


def staging_name(step: int, purpose: str, run_id: str, random: str) -> str:
    """The folder of a step while it is written (``tmp``) or removed (``old``)."""
    return f"{step_name(step)}.{purpose}-{run_id[:8]}-{random}"


def is_staging_name(name: str) -> bool:
    """Whether the folder is a side folder."""
    return _STAGING_NAME.fullmatch(name) is not None


def data_name(rank: int, *, frozen: bool = False) -> str:
    """The file of a rank's tensors, or of those that are parameters that are not trained."""
    return f"rank-{rank:05d}{'-frozen' * frozen}.safetensors"


def index_name(rank: int) -> str:
    """The file that says what is in the rank's data file, and holds the rank's plain values."""
    return f"rank-{rank:05d}.json"


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
class MeshLayout:
    """The mesh that a checkpoint was written on; None and () without one."""

    strategy: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]

    @property
    def ranks_per_batch(self) -> int:
        """How many ranks worked on one batch together."""
        return prod(size for axis, size in zip(self.axes, self.shape, strict=False) if axis in MODEL_AXES)


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
    layout: MeshLayout
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
    def sections(self) -> tuple[str, ...]:
        """The sections of a state that are stored."""
        return sections_of(self.only)


_MANIFEST_FIELDS = (
    "format", "version", "run_id", "step", "parent_step", "serial", "layout", "only", "states", "ranks",
)  # fmt: skip
_RANK_FIELDS = ("index", "index_bytes", "index_sha256", "data")
_FILE_FIELDS = ("name", "bytes")
_LAYOUT_FIELDS = ("strategy", "axes", "shape")


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of ``manifest.json``: readable JSON whose last field digests the canonical JSON of all before it."""
    return _sign({"format": FORMAT, "version": VERSION, **asdict(manifest)})


def _sign(body: dict[str, Any]) -> bytes:
    return (
        json.dumps({**body, "sha256": hashlib.sha256(strict_json.canonical_json(body)).hexdigest()}, indent=1).encode() + b"\n"
    )


def parse_manifest(data: bytes) -> Manifest:
    """The manifest that these bytes are.

    Raises:
        CorruptCheckpointError: not exactly what ``encode_manifest`` writes.
        CheckpointError: sound, but of another format version.
    """
    body = strict_json.parse_json(data, MANIFEST)
    if type(body) is not dict or type(body.get("sha256")) is not str:
        raise CorruptCheckpointError(f"{MANIFEST}: not an object with a sha256")
    digest = body.pop("sha256")
    if hashlib.sha256(strict_json.canonical_json(body)).hexdigest() != digest:
        raise CorruptCheckpointError(f"{MANIFEST}: its sha256 does not match its content")
    check_format(body, MANIFEST, FORMAT)
    if _sign(body) != data:
        raise CorruptCheckpointError(f"{MANIFEST}: the text was altered (the values were not)")
    raw = strict_json.read_object(body, MANIFEST, _MANIFEST_FIELDS)
    ranks = strict_json.read_list(raw["ranks"], f"{MANIFEST}: ranks", parse_rank_files)
    for rank, files in enumerate(ranks):
        names, known = [file.name for file in files.data], [data_name(rank), data_name(rank, frozen=True)]
        if files.index != index_name(rank) or not names or names != known[: len(names)]:
            raise CorruptCheckpointError(
                f"{MANIFEST}: ranks[{rank}]: foreign file names {strict_json.describe_value([files.index, *names])}"
            )
    if not ranks:
        raise CorruptCheckpointError(f"{MANIFEST}: ranks: needs at least one")
    return Manifest(
        run_id=strict_json.read_str(raw["run_id"], f"{MANIFEST}: run_id", RUN_ID),
        step=strict_json.read_int(raw["step"], f"{MANIFEST}: step"),
        parent_step=strict_json.read_optional(raw["parent_step"], f"{MANIFEST}: parent_step", strict_json.read_int),
        serial=strict_json.read_int(raw["serial"], f"{MANIFEST}: serial"),
        layout=_parse_layout(raw["layout"], f"{MANIFEST}: layout"),
        only=_parse_only(raw["only"]),
        states=_parse_states(raw["states"]),
        ranks=ranks,
    )


def _parse_only(value: Any) -> tuple[str, ...]:
    only = strict_json.read_list(value, f"{MANIFEST}: only", strict_json.read_str)
    if only not in _SECTIONS_OF:
        raise CorruptCheckpointError(f"{MANIFEST}: only: unknown value {strict_json.describe_value(value)}")
    return only


def _parse_states(value: Any) -> tuple[str, ...]:
    names = strict_json.read_list(value, f"{MANIFEST}: states", strict_json.read_str)
    if len(set(names)) != len(names) or "" in names:
        raise CorruptCheckpointError(
            f"{MANIFEST}: states: a name is given twice, or empty: {strict_json.describe_value(value)}"
        )
    return names


def check_format(body: Any, where: str, name: str) -> None:
    """Refuse what is not a file of the format ``name``, or of another version of it."""
    if type(body) is not dict or body.get("format") != name:
        raise CorruptCheckpointError(f"{where}: not a file of format {name!r}")
    if type(body.get("version")) is not int:
        raise CorruptCheckpointError(
            f"{where}: version: needs a whole number, got {strict_json.describe_value(body.get('version'))}"
        )
    if body["version"] != VERSION:
        raise CheckpointError(
            f"{where}: has format version {body['version']}, this dtrain reads version {VERSION}; use the dtrain that wrote it"
        )


def parse_rank_files(value: Any, where: str = "rank files") -> RankFiles:
    """The files of a rank from their JSON form.

    Raises:
        CorruptCheckpointError: not of that form.
    """
    raw = strict_json.read_object(value, where, _RANK_FIELDS)
    return RankFiles(
        index=strict_json.read_str(raw["index"], f"{where}: index"),
        index_bytes=strict_json.read_int(raw["index_bytes"], f"{where}: index_bytes"),
        index_sha256=strict_json.read_str(raw["index_sha256"], f"{where}: index_sha256", strict_json.SHA256),
        data=strict_json.read_list(raw["data"], f"{where}: data", _parse_data_file),
    )


def _parse_data_file(value: Any, where: str) -> DataFile:
    raw = strict_json.read_object(value, where, _FILE_FIELDS)
    return DataFile(
        name=strict_json.read_str(raw["name"], f"{where}: name"), bytes=strict_json.read_int(raw["bytes"], f"{where}: bytes")
    )


def _parse_layout(value: Any, where: str) -> MeshLayout:
    raw = strict_json.read_object(value, where, _LAYOUT_FIELDS)
    return MeshLayout(
        strategy=strict_json.read_str(raw["strategy"], f"{where}: strategy"),
        axes=strict_json.read_list(raw["axes"], f"{where}: axes", strict_json.read_str),
        shape=strict_json.read_ints(raw["shape"], f"{where}: shape"),
    )
