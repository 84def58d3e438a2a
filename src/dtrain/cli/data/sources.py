"""What the sources on the command line stand for: files, in a fixed order, and how each is read."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from dtrain import storage
from dtrain.cli.data.opened import compression_of
from dtrain.errors import ConfigError
from dtrain.storage import Place

Kind = Literal["jsonl", "csv", "tsv", "parquet", "lines", "documents", "files", "hf", "shards"]
KINDS = get_args(Kind)

_BY_SUFFIX: dict[str, Kind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".txt": "lines",
    ".text": "lines",
}
_WHOLE_FOLDERS = ("hf", "shards")
_ADVICE = f"say how with --from, one of {', '.join(KINDS)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """One file, or a folder that is read as a whole.

    Args:
        place: where it is.
        kind: how it is read.
        name: what it is called in messages and in the column ``name``: of a folder's files, from that folder on.
        bytes: its size; of a folder, that of all files in it.
    """

    place: Place
    kind: Kind
    name: str
    bytes: int = 0


def inputs_of(sources: Sequence[str], kind: str | None) -> list[Input]:
    """What is to be read, in order: sources as given, files of a folder or pattern by their names.

    Args:
        sources: files, folders, URLs, patterns.
        kind: how to read them; None: as their names say.

    Raises:
        ConfigError: one does not exist, matches nothing, or its kind cannot be told.
    """
    chosen = cast("Kind | None", kind)
    return [found for source in sources for found in _inputs(source, chosen)]


def _inputs(source: str, kind: Kind | None) -> list[Input]:
    if not source:
        raise ConfigError("a source is empty; name a file, a folder or a pattern")
    if "://" not in source and glob.has_magic(source) and not os.path.lexists(source):
        paths = [Path(path) for path in sorted(glob.glob(source, recursive=True))]
        found = [_file(storage.place(path), str(path), kind) for path in paths if path.is_file()]
        if not found:
            raise ConfigError(f"no file matches {source!r}; ** crosses folders")
        return found
    place = storage.place(source)
    if (size := storage.file_size(place)) is not None:
        return [_file(place, source, kind, size)]
    if not storage.is_folder(place):
        raise ConfigError(f"no such file or folder: {source!r}; check the path")
    return _folder(place, source, kind)


def _file(place: Place, name: str, kind: Kind | None, size: int | None = None) -> Input:
    kind = kind or _kind_of(place.name)
    if kind is None:
        raise ConfigError(f"{name!r}: its name does not tell how to read it; {_ADVICE}")
    if kind in _WHOLE_FOLDERS:
        raise ConfigError(f"{name!r} is a file, and --from {kind} reads folders; {_ADVICE}")
    return Input(place=place, kind=kind, name=name, bytes=(storage.file_size(place) or 0) if size is None else size)


def _kind_of(name: str) -> Kind | None:
    plain = name if compression_of(name) is None else name.rpartition(".")[0]
    return next((kind for suffix, kind in _BY_SUFFIX.items() if plain.lower().endswith(suffix)), None)


def _folder(folder: Place, source: str, kind: Kind | None) -> list[Input]:
    kind = kind or _kind_of_folder(folder, source)
    if kind in _WHOLE_FOLDERS:
        return [Input(place=folder, kind=kind, name=source, bytes=sum(size for _, size in storage.walk_files(folder)))]
    below = [
        found for found in sorted(storage.walk_files(folder)) if not any(part.startswith(".") for part in found[0].split("/"))
    ]
    found = [_file(folder / name, name, kind, size) for name, size in below if kind is not None or _kind_of(name) is not None]
    if not found:
        what = f"none of its {len(below)} files has a name that tells how to read it" if below else "it has no files"
        raise ConfigError(f"{source!r}: {what}; {_ADVICE}")
    return found


def _kind_of_folder(folder: Place, source: str) -> Kind | None:
    names = storage.list_names(folder)
    if "dataset_dict.json" in names:
        splits = [name for name in names if storage.exists(folder / name / "state.json")]
        example = splits[0] if splits else "train"
        raise ConfigError(f"{source!r} has the splits {', '.join(splits)}; name one, as in {source.rstrip('/')}/{example}")
    if {"state.json", "dataset_info.json"} <= set(names):
        return "hf"
    return "shards" if "index.json" in names or any(name.endswith(".tar") for name in names) else None
