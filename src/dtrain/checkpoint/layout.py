"""Define the layout of a checkpoint folder: file names, dtype names, the manifest and the index of a rank. Pure functions.

::

    root/step-00000100/
        manifest.json            run, step, mesh; written last, digested by itself
        index.json               all files, the ranks that hold each tensor, plain values; digested by the manifest
        rank-00000.json          places and digests of the data of rank 0; digested by the index
        rank-00000.safetensors   tensor shards of rank 0, an ordinary safetensors file; digested block by block
        rank-00000-frozen.safetensors   of incremental saves: shards of parameters that are not trained
        rank-00001.json ...

A load reads the manifest, the index, and the files of the ranks that hold what it needs. Only the index grows with the number
of ranks, by about 90 bytes each.

During a save the folder is named ``step-00000100.tmp-<run>-<random>``, and during a removal
``step-00000100.old-<run>-<random>``. Folders with such names are never read.
"""

from __future__ import annotations

import hashlib
import json
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from dataclasses import dataclass
from math import inf, prod
from typing import Annotated, Any, Literal, NoReturn, TypeVar

import msgspec
import torch
from msgspec import Meta, Struct

from dtrain.arguments import single_line
from dtrain.dist.mesh import MODEL_AXES
from dtrain.errors import CheckpointError, CorruptCheckpointError

T = TypeVar("T")
# The limit is per file, and the writer refuses larger files, too.
MAX_JSON_BYTES = 256 * 2**20
Count = Annotated[int, msgspec.Meta(ge=0)]

FORMAT, VERSION = "dtrain-checkpoint", 4
MANIFEST, INDEX = "manifest.json", "index.json"
# A manifest does not grow with the model or the number of ranks.
MAX_MANIFEST_BYTES = 16 * 2**20
DIGEST = "xxh3-128"
"""Digest of data, far faster than sha256, against accidental changes. JSON files are small and digested by sha256."""
CHUNK_BYTES = 4 * 2**20
"""Limit of a block, and the size of the parts in which files are written and read."""

MAX_RANKS = 2**20

SaveScope = Literal["all", "weights", "trainable"]
SECTIONS: dict[SaveScope, tuple[str, ...]] = {
    "all": ("params", "buffers", "modules", "optimizer", "transforms", "clock", "seed"),
    "weights": ("params", "buffers", "modules", "clock", "seed"),
    "trainable": ("params", "clock", "seed"),
}
"""Stored sections of a state by the scope of the save."""
EXTRA, OBJECTS, STATES = "extra", "objects", "states"
"""Sections of the caller's extra objects, of the run's loader and stateful objects, and of the named states if several."""


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
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
"""Dtypes by their names in safetensors files."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_STEP_NAME = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,17})")
_STAGING_NAME = re.compile(r"step-[0-9]{8,18}\.(?:tmp|old)-[0-9a-f]{8}-[0-9a-f]{8}")


def step_name(step: int) -> str:
    """Return the name of a step's folder."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step of a folder name, or None for any other name."""
    match = _STEP_NAME.fullmatch(name)
    return int(match[1]) if match else None


def staging_name(step: int, purpose: str, run_id: str, random: str) -> str:
    """Return the name of a step's folder during a save (``tmp``) or a removal (``old``)."""
    return f"{step_name(step)}.{purpose}-{run_id[:8]}-{random}"


def is_staging_name(name: str) -> bool:
    """Return True if the name is that of a staging folder."""
    return _STAGING_NAME.fullmatch(name) is not None


def data_name(rank: int, *, frozen: bool = False) -> str:
    """Return the name of a rank's data file, or of its file of parameters that are not trained."""
    return f"rank-{rank:05d}{'-frozen' * frozen}.safetensors"


def index_name(rank: int) -> str:
    """Return the name of a rank's index file."""
    return f"rank-{rank:05d}.json"


def compile_schema(kind: type[T]) -> type[T]:
    """Evaluate the annotations of a struct at import, so that reading an untrusted file compiles no code."""
    msgspec.json.Decoder(kind)
    return kind


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRef:
    """Description of a tensor in a tree: safetensors dtype name, global shape, and True if the tensor was a DTensor."""

    dtype: str
    shape: tuple[int, ...]
    distributed: bool

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class Blocks(Struct, frozen=True, forbid_unknown_fields=True):
    """Blocks of a data file: the byte after each block, and the hex digests of all blocks, 32 digits each."""

    ends: list[Count]
    digests: Annotated[str, Meta(pattern=r"\A[0-9a-f]*\Z")]

    def numbers_of(self, begin: int, end: int) -> range:
        """Return the numbers of the blocks that contain the bytes ``[begin, end)``."""
        return range(bisect_right(self.ends, begin), bisect_left(self.ends, end) + 1) if end > begin else range(0)

    def begin_of(self, number: int) -> int:
        """Return the first byte of a block."""
        return self.ends[number - 1] if number else 0


class RankFiles(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Files of a rank: size and digest of its index, and sizes of its data files, the second of frozen parameters."""

    index_bytes: Count
    index_sha256: Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
    data_bytes: tuple[Annotated[int, Meta(ge=0, le=2**63 - 1)], ...]

    def sizes(self, rank: int) -> dict[str, int]:
        """Return the sizes in bytes by file name."""
        data = {data_name(rank, frozen=bool(number)): size for number, size in enumerate(self.data_bytes)}
        return {index_name(rank): self.index_bytes, **data}


class MeshLayout(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Mesh that a checkpoint was written on; ``axes`` and ``shape`` are () without a mesh."""

    strategy: str
    axes: tuple[str, ...]
    shape: tuple[Count, ...]

    @property
    def ranks_per_batch(self) -> int:
        """Number of ranks that shared one batch."""
        return prod(size for axis, size in zip(self.axes, self.shape, strict=False) if axis in MODEL_AXES)


@compile_schema
class Manifest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Manifest of a checkpoint. A folder with a valid manifest is a checkpoint.

    Args:
        run_id: id of the run, kept across resumes.
        step: step of the state.
        parent_step: step that the run continued from; None for the first step of a run.
        serial: number of the commit in its root. The newest checkpoint has the highest serial. After a run went back to an
            older step, this is not the highest step.
        layout: mesh and strategy.
        scope: scope of the save.
        states: names of the states; () for an unnamed state.
        world_size: number of ranks that wrote the checkpoint.
        bytes: total size of all files but the manifest in bytes.
        index_bytes: size of ``index.json``.
        index_sha256: digest of ``index.json``, which covers the digests of all other files.
    """

    run_id: Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]
    step: Count
    parent_step: Count | None
    serial: Count
    layout: MeshLayout
    scope: SaveScope
    states: tuple[str, ...]
    world_size: Annotated[int, Meta(ge=1, le=MAX_RANKS)]
    bytes: Count
    index_bytes: Annotated[int, Meta(ge=0, le=MAX_JSON_BYTES)]
    index_sha256: Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]

    @property
    def sections(self) -> tuple[str, ...]:
        """Stored sections of a state."""
        return SECTIONS[self.scope]


def encode_manifest(manifest: Manifest) -> bytes:
    """Encode ``manifest.json``: readable JSON, whose last field is the digest of the canonical JSON of all other fields."""
    return _sign({"format": FORMAT, "version": VERSION, **msgspec.to_builtins(manifest)})


def _sign(body: dict[str, Any]) -> bytes:
    digest = hashlib.sha256(canonical_json(body)).hexdigest()
    return json.dumps({**body, "sha256": digest}, indent=1).encode() + b"\n"


def parse_manifest(data: bytes) -> Manifest:
    """Parse a manifest.

    Raises:
        CorruptCheckpointError: bytes that ``encode_manifest`` does not write.
        CheckpointError: a valid manifest of another format version.
    """
    body = parse_json(data, MANIFEST)
    if type(body) is not dict or type(body.get("sha256")) is not str:
        raise CorruptCheckpointError(f"{MANIFEST}: must be an object with a sha256")
    digest = body.pop("sha256")
    if hashlib.sha256(canonical_json(body)).hexdigest() != digest:
        raise CorruptCheckpointError(f"{MANIFEST}: sha256 does not match the content")
    check_format(body, MANIFEST, FORMAT)
    if _sign(body) != data:
        raise CorruptCheckpointError(f"{MANIFEST}: the text was changed, the values were not")
    fields = {name: value for name, value in body.items() if name not in ("format", "version")}
    manifest = convert(fields, Manifest, MANIFEST)
    if len(set(manifest.states)) != len(manifest.states) or "" in manifest.states:
        raise CorruptCheckpointError(f"{MANIFEST}: states: names must be unique and not empty, got {manifest.states}"[:300])
    return manifest


def check_format(body: Any, location: str, name: str) -> None:
    """Raise if ``body`` is not of the format ``name``, or of another version."""
    if type(body) is not dict or body.get("format") != name:
        raise CorruptCheckpointError(f"{location}: must be a file of format {name!r}")
    if type(body.get("version")) is not int:
        raise CorruptCheckpointError(f"{location}: version: must be an integer, got {describe_value(body.get('version'))}")
    if body["version"] != VERSION:
        raise CheckpointError(
            f"{location}: format version must be {VERSION}, got {body['version']}. Use the dtrain version that wrote the file."
        )


def canonical_json(value: Any) -> bytes:
    """Return the canonical JSON text of a value: keys sorted, no spaces, ASCII, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def encode_index(index: Struct, name: str) -> bytes:
    """Encode an index of this file name as compact JSON.

    Raises:
        CheckpointError: more JSON than ``parse_json`` accepts.
    """
    data = json.dumps(msgspec.to_builtins(index), separators=(",", ":"), allow_nan=False).encode()
    if len(data) > MAX_JSON_BYTES:
        raise CheckpointError(
            f"{name}: plain values and index must be at most {MAX_JSON_BYTES} bytes, got {len(data)}. "
            "Store large plain data as tensors."
        )
    return data


def parse_json(data: bytes, location: str) -> Any:
    """Parse a JSON text.

    Raises:
        CorruptCheckpointError: invalid JSON, too large, nested too deeply, a duplicate key, NaN or Infinity.
    """
    if len(data) > MAX_JSON_BYTES:
        raise CorruptCheckpointError(f"{location}: JSON must be at most {MAX_JSON_BYTES} bytes, got {len(data)}")
    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_reject_duplicate_keys,
            parse_constant=_reject_constant,
            parse_float=_parse_finite_float,
        )
    except RecursionError:
        raise CorruptCheckpointError(f"{location}: JSON is nested too deeply") from None
    # JSONDecodeError and UnicodeDecodeError are ValueErrors. An integer of 5,000 digits raises ValueError, too.
    except ValueError as error:
        raise CorruptCheckpointError(f"{location}: not valid JSON ({single_line(error)[:200]})") from None


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        [(duplicate, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"duplicate key {duplicate!r}")
    return values


def _parse_finite_float(text: str) -> float:
    value = float(text)
    if value in (inf, -inf):
        raise ValueError(f"{text[:40]} is too large for a float")
    return value


def _reject_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not allowed")


def convert(value: Any, kind: type[T], location: str) -> T:
    """Convert parsed JSON to a frozen struct of msgspec, without casts: ``True`` is no integer.

    Raises:
        CorruptCheckpointError: a missing or unknown field, or a field of another type; names the field.
    """
    try:
        return msgspec.convert(value, kind)
    # msgspec cannot encode half of a surrogate pair, which JSON may hold as an escape.
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        message, _, path = str(error).partition(" - at `$")
        field = path.strip("`.")
        raise CorruptCheckpointError(f"{location}: {field}{': ' if field else ''}{message}") from None


def read_object(value: Any, location: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Return ``value`` as an object with exactly the fields ``names``."""
    if type(value) is not dict:
        raise CorruptCheckpointError(f"{location}: must be an object, got {describe_value(value)}")
    if value.keys() != set(names):
        missing, unknown = sorted(set(names) - value.keys()), sorted(value.keys() - set(names))
        raise CorruptCheckpointError(
            f"{location}: must have exactly the expected fields. Missing: {_format_names(missing)}. "
            f"Unknown: {_format_names(unknown)}."
        )
    return value


def _format_names(names: list[str]) -> str:
    """Format the first ten names for an error message, each shortened."""
    shown = [repr(name) if len(name) <= 60 else f"{name[:57]!r}..." for name in names[:10]]
    return f"[{', '.join(shown)}{', ...' if len(names) > len(shown) else ''}]"


def describe_value(value: Any) -> str:
    """Describe a value shortly for an error message."""
    shown = repr(value)
    return f"{type(value).__name__} {shown if len(shown) <= 60 else shown[:57] + '...'}"
