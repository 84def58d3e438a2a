"""Where weights come from: which format a path is of, and its tensors by name.

Writes the folder that ``from_pretrained`` of Hugging Face's transformers reads.

::

    model.safetensors                      or, where that would be larger than asked for,
    model-00001-of-00002.safetensors ...   and
    model.safetensors.index.json           {"metadata": {"total_size": ...}, "weight_map": {"<tensor>": "<file>", ...}}
    config.json                            a copy of what was given

A tied weight is there once, as ``save_pretrained`` leaves it; transformers ties by its configuration.

``convert``: the weights of a checkpoint in another format."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Literal, get_args

from dtrain import storage
from dtrain.checkpoint import layout, tensor_files
from dtrain.checkpoint.checkpoint_info import has_manifest, read_manifest
from dtrain.checkpoint.conversion.weight_stream import (
    WeightStream,
    apply_ties,
    group_by_size,
    stream_weights,
    write_safetensors,
)
from dtrain.checkpoint.reader import choose_step
from dtrain.checkpoint.tensor_files import INDEX_FILE, MODEL_FILE, SUFFIX, TensorFiles, open_step
from dtrain.errors import CheckpointError, ConfigError
from dtrain.storage import AnyPath

SourceFormat = Literal["dtrain", "hf", "dcp", "pt"]
SOURCE_FORMATS: tuple[SourceFormat, ...] = get_args(SourceFormat)
PICKLE_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_DCP_METADATA_FILE = ".metadata"  # of a folder of torch.distributed.checkpoint
_UNTRUSTED_FORMATS: tuple[SourceFormat, ...] = ("dcp", "pt")
_PROGRAM = "dtrain.checkpoint.conversion.unpickle_subprocess"
_SOURCE_WHERE = "convert"


def detect_format(path: AnyPath) -> SourceFormat:
    """The format that a path has by its names.

    Raises:
        CheckpointError: none that is known.
    """
    if storage.file_size(path) is not None:
        suffix = PurePath(path.name).suffix
        if suffix == tensor_files.SUFFIX:
            return "hf"
        if suffix in PICKLE_SUFFIXES:
            return "pt"
    elif storage.is_folder(path):
        if has_manifest(path):
            return "dtrain"
        if tensor_files.is_model_folder(path):
            return "hf"
        if storage.exists(path / _DCP_METADATA_FILE):
            return "dcp"
        names = storage.list_names(path)
        if any(layout.step_of(name) is not None for name in (path.name, *names)):
            return "dtrain"
        pickle = next((name for name in names if PurePath(name).suffix in PICKLE_SUFFIXES), None)
        if pickle is not None:
            raise CheckpointError(
                f"{_SOURCE_WHERE}: {path} is a folder of pickles; name one, such as {pickle}, and trust (--trust)"
            )
    else:
        raise ConfigError(f"{_SOURCE_WHERE}: there is no file or folder {path}; check the path")
    raise CheckpointError(
        f"{_SOURCE_WHERE}: {path} is no checkpoint of dtrain, no folder with {tensor_files.MODEL_FILE} or {tensor_files.INDEX_FILE}, no {tensor_files.SUFFIX} "
        f"file, no folder of torch.distributed.checkpoint and no {PICKLE_SUFFIXES[0]} file; name its format"
    )


def check_trust(path: AnyPath, kind: SourceFormat, *, trust: bool) -> None:
    """Refuse what can run code unless it is trusted.

    Raises:
        ConfigError: it is not.
    """
    if kind in _UNTRUSTED_FORMATS and not trust:
        what = "a pickle" if kind == "pt" else "a folder of torch.distributed.checkpoint, which holds a pickle"
        raise ConfigError(
            f"{_SOURCE_WHERE}: {path} is {what}: reading it runs what is in it; pass trust (--trust) if you know who wrote it"
        )
    if kind in _UNTRUSTED_FORMATS and not isinstance(path, Path):
        raise ConfigError(f"{_SOURCE_WHERE}: {path} is not on this machine; copy it here first")


def open_weights(path: AnyPath, kind: SourceFormat, *, scratch: Path | None, key: str | None, state: str | None) -> TensorFiles:
    """The tensors of a model by their names in it.

    Args:
        path: of this kind.
        kind: of the path.
        scratch: a new file, for kinds that run code: a process of its own copies the tensors into it.
        key: of those kinds, the dict that the tensors are in.
        state: of several states of a step of ours, the one that is meant.

    Raises:
        CheckpointError: it cannot be read.
        CorruptCheckpointError: it is not as it was written, as far as that can be known.
    """
    if kind == "dtrain":
        return _open_newest_step(path, state)
    if kind == "hf":
        return (
            tensor_files.open_safetensors_folder(path) if storage.is_folder(path) else tensor_files.open_safetensors_file(path)
        )
    assert scratch is not None, "of a kind that runs code"
    within = [] if key is None else [key]  # "" is the dict at the top
    command = [sys.executable, "-W", "ignore", "-m", _PROGRAM, kind, str(path), str(scratch), *within]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or [f"the reader ended with code {done.returncode}"]
        name, _, message = lines[-1].partition(": ")
        raise ConfigError(message) if name == ConfigError.__name__ else CheckpointError(message or lines[-1])
    return tensor_files.open_safetensors_file(scratch)


def _open_newest_step(path: AnyPath, state: str | None) -> TensorFiles:
    step = choose_step(path, _SOURCE_WHERE)
    if step is None:
        raise CheckpointError(f"{_SOURCE_WHERE}: there is no checkpoint in {path}")
    states = read_manifest(step).states
    if states and state is None:
        raise ConfigError(
            f"{_SOURCE_WHERE}: {step} holds the states {', '.join(map(repr, states))}; name one with state (--state)"
        )
    return open_step(step, 0, state=state)


CONFIG_FILE = "config.json"


def write_hugging_face(folder: Path, given: WeightStream, *, max_shard_bytes: int, config: bytes | None) -> None:
    """Write the folder's files, on the disk when this returns.

    Args:
        folder: there, and empty.
        given: what is written.
        max_shard_bytes: of one file's tensors; a larger tensor has a file of its own.
        config: the content of ``config.json``, None for none.
    """
    files = list(group_by_size(given.sizes, limit=max_shard_bytes))
    if len(files) == 1:
        write_safetensors(folder / MODEL_FILE, given, files[0])
    else:
        names = [f"model-{at:05d}-of-{len(files):05d}.safetensors" for at in range(1, len(files) + 1)]
        for name, of_file in zip(names, files, strict=True):
            write_safetensors(folder / name, given, of_file)
        weight_map = {key: name for name, of_file in zip(names, files, strict=True) for key in of_file}
        index = {"metadata": {"total_size": given.bytes}, "weight_map": weight_map}
        storage.write_file(folder / INDEX_FILE, json.dumps(index, indent=2).encode() + b"\n")
    if config is not None:
        storage.write_file(folder / CONFIG_FILE, config)
    storage.sync_folder(folder)


TargetFormat = Literal["hf", "dtrain", "dcp", "safetensors"]
TARGET_FORMATS: tuple[TargetFormat, ...] = get_args(TargetFormat)
MAX_SHARD_BYTES = 5 * 10**9
_MAX_CONFIG_BYTES = 2**24
_WHERE = "convert"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertResult:
    """What ``convert`` has written.

    Args:
        path: the new folder, or the new file; of a step of ours, the folder of the step.
        tensors: how many.
        bytes: of their data.
    """

    path: Path
    tensors: int
    bytes: int


def _no_op(nbytes: int) -> None:
    """For callers who do not watch."""


def convert(
    source: Path | str,
    destination: Path | str,
    *,
    to: TargetFormat,
    source_format: SourceFormat | None = None,
    trust: bool = False,
    cast: str | None = None,
    tie: Mapping[str, str] | None = None,
    state: str | None = None,
    key: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    config: Path | str | None = None,
    step: int = 0,
    buffers: Sequence[str] = (),
    on_start: Callable[[int], None] = _no_op,
    on_bytes_written: Callable[[int], None] = _no_op,
) -> ConvertResult:
    """Write the parameters and persistent buffers of a checkpoint in another format, in one process.

    Tensors are read and written in pieces, so memory does not grow with the checkpoint (towards ``"dcp"``: with its largest
    tensor). The new folder appears by one rename when all of it is on the disk::

        dt.checkpoint.convert("ckpt", "bert-hf", to="hf", config="config.json")
        model = BertForMaskedLM.from_pretrained("bert-hf")

    Args:
        source: a root of ours (its newest step) or a step; a folder that ``save_pretrained`` of Hugging Face wrote, or one
            safetensors file; a folder of ``torch.distributed.checkpoint``; what ``torch.save`` wrote.
        destination: the new folder. Towards ``"dtrain"`` a step's folder when it has the name of one (``root/step-00000100``), else
            a root with one step. Towards ``"safetensors"`` the new file when its name ends in ``.safetensors``, else a folder
            with the one file ``model.safetensors``.
        to: ``"hf"``, ``"dtrain"`` (a step that holds the model only), ``"dcp"``, or ``"safetensors"`` (one file).
        source_format: ``"dtrain"``, ``"hf"``, ``"dcp"`` or ``"pt"``; None to see from the names of files.
        trust: needed for ``"dcp"`` and ``"pt"`` sources, because reading those runs what is in them. They are read by a
            process of its own, which copies their tensors beside ``destination`` first.
        cast: ``"fp32"``, ``"bf16"`` or ``"fp16"`` for floating tensors; None keeps dtypes.
        tie: further names of tied weights -> their first name. Both are written, towards ``"dtrain"`` only the first.
        state: which of several states of a step of ours.
        key: in a ``"dcp"`` or ``"pt"`` source the path to the dict of the weights, as in ``"state/model"``; towards
            ``"dcp"`` the dict to write them in.
        max_shard_bytes: of one file, towards ``"hf"``.
        config: file that becomes ``config.json``, towards ``"hf"``; by default that of a source folder of the same format.
        step: that the new step has, towards ``"dtrain"``, when ``destination`` does not say it.
        buffers: towards ``"dtrain"`` patterns of names of buffers, where the source does not tell them from parameters: ``*``
            is text without a dot, ``**`` any text. Those of batch norms and what is not floating are known without.
        on_start: is told how many bytes there are to write, before any is.
        on_bytes_written: is told how many more have been written.

    Raises:
        ConfigError: a source that is not there or not trusted, a folder ``destination`` that exists, options without sense.
        CheckpointError: the source cannot be read.
        CorruptCheckpointError: the source is not as it was written, as far as its format can tell.
        CheckpointMismatchError: tensors that ``tie`` says are one, and are two.
    """
    path, folder = storage.resolve_path(source), storage.resolve_path(destination)
    if not isinstance(folder, Path):
        raise ConfigError(f"{_WHERE}: {folder} is not on this machine, where new folders are written; copy it there afterwards")
    kind = detect_format(path) if source_format is None else source_format
    _check_arguments(folder, kind, to, max_shard_bytes, step)
    check_trust(path, kind, trust=trust)
    content = _read_config(path, kind, to, config)
    inner = ""
    single = MODEL_FILE if to == "safetensors" and folder.suffix == SUFFIX else ""
    with _staging_folder(folder, taking=single) as (side, result):
        within = key if kind in ("dcp", "pt") else None
        stored = open_weights(path, kind, scratch=side / "source.safetensors", key=within, state=state)
        stored = apply_ties(stored, tie or {}, once=to == "dtrain")
        given = stream_weights(stored, cast=cast, on_bytes_written=on_bytes_written)
        if not given.dtypes:
            raise CheckpointError(f"{_WHERE}: {path} holds no weights")
        on_start(given.bytes)
        if to == "safetensors":
            write_safetensors(result / MODEL_FILE, given, given.dtypes)
            storage.sync_folder(result)
        elif to == "hf":
            write_hugging_face(result, given, max_shard_bytes=max_shard_bytes, config=content)
        elif to == "dcp":
            from dtrain.checkpoint.conversion.dcp import write_dcp  # takes a second to import

            write_dcp(result, given, key=None if kind in ("dcp", "pt") else key)
        else:
            inner = _write_root_or_step(result, folder, given, step, buffers)
    return ConvertResult(path=folder / inner, tensors=len(given.dtypes), bytes=given.bytes)


def _write_root_or_step(result: Path, folder: Path, given: WeightStream, step: int, buffers: Sequence[str]) -> str:
    """Write ``result`` as the root or step that ``folder`` will be; the name of the step's folder in it, "" if it is one."""
    from dtrain.checkpoint.conversion.write_step import write_step

    named = layout.step_of(folder.name)
    if named is not None:
        write_step(result, given, step=named, buffers=buffers)
        return ""
    name = layout.step_name(step)
    storage.make_folder(result / name)
    write_step(result / name, given, step=step, buffers=buffers)
    storage.sync_folder(result)
    return name


def _check_arguments(folder: Path, kind: str, to: str, max_shard_bytes: int, step: int) -> None:
    if to not in TARGET_FORMATS:
        raise ConfigError(f"{_WHERE}: to must be one of {', '.join(TARGET_FORMATS)}, got {to!r}")
    if kind not in SOURCE_FORMATS:
        raise ConfigError(f"{_WHERE}: the source's format must be one of {', '.join(SOURCE_FORMATS)}, got {kind!r}")
    if storage.exists(folder):
        raise ConfigError(f"{_WHERE}: {folder} exists; name a folder that does not")
    if max_shard_bytes < 1:
        raise ConfigError(f"{_WHERE}: max_shard_bytes must be at least 1, got {max_shard_bytes}; 5 GB is usual")
    if step < 0:
        raise ConfigError(f"{_WHERE}: step must be at least 0, got {step}")
    if to == "dtrain" and layout.step_of(folder.name) is not None and storage.is_folder(folder.parent):
        beside = next((name for name in storage.list_names(folder.parent) if layout.step_of(name) is not None), None)
        if beside is not None:
            raise ConfigError(f"{_WHERE}: {folder.parent} has checkpoints of a run ({beside}); name a folder of its own")


def _read_config(path: AnyPath, kind: SourceFormat, to: TargetFormat, config: Path | str | None) -> bytes | None:
    """The content of the new folder's ``config.json``."""
    if config is not None and to != "hf":
        raise ConfigError(f"{_WHERE}: config goes with to='hf', got to={to!r}; leave it out")
    found = path / CONFIG_FILE if config is None else storage.resolve_path(config)
    if config is None and (to != "hf" or kind != "hf" or storage.file_size(found) is None):
        return None
    try:
        return storage.read_file(found, limit=_MAX_CONFIG_BYTES)
    except OSError as error:
        raise ConfigError(f"{_WHERE}: config: {error}; name the config.json of the model") from error


@contextmanager
def _staging_folder(folder: Path, *, taking: str) -> Iterator[tuple[Path, Path]]:
    """Yield a folder beside ``folder``, and one in it that becomes ``folder`` if nothing goes wrong.

    Args:
        folder: the new folder.
        taking: the file in the inner folder that becomes ``folder`` instead, or "".
    """
    storage.make_folders(folder.parent)
    side = folder.with_name(f"{folder.name}.tmp-{secrets.token_hex(4)}")
    storage.make_folder(side)
    try:
        storage.make_folder(side / "result")
        yield side, side / "result"
        if storage.exists(folder):  # since it was looked for; an empty folder would be replaced
            raise ConfigError(f"{_WHERE}: {folder} exists by now; name a folder that does not")
        storage.rename(side / "result" / taking, folder)
        storage.sync_folder(folder.parent)
    finally:
        storage.remove_folder(side)
