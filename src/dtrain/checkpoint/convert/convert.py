"""``convert_checkpoint``: the weights of a checkpoint in another format."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from dtrain import storage
from dtrain.checkpoint import layout
from dtrain.checkpoint.convert.hugging_face import CONFIG, write_hugging_face
from dtrain.checkpoint.convert.sources import KINDS, Kind, check_trust, kind_of, open_weights
from dtrain.checkpoint.convert.weights import Weights, tied, weights, write_safetensors
from dtrain.checkpoint.foreign import MODEL, SUFFIX
from dtrain.errors import CheckpointError, ConfigError
from dtrain.storage import Place

Target = Literal["hf", "dtrain", "dcp", "safetensors"]
TARGETS: tuple[Target, ...] = get_args(Target)
MAX_SHARD_BYTES = 5 * 10**9
_MAX_CONFIG_BYTES = 2**24
_WHERE = "convert"


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """What ``convert_checkpoint`` has written.

    Args:
        path: the new folder, or the new file; of a step of ours, the folder of the step.
        tensors: how many.
        bytes: of their data.
    """

    path: Path
    tensors: int
    bytes: int


def _ignore(nbytes: int) -> None:
    """For callers who do not watch."""


def convert_checkpoint(
    source: Path | str,
    out: Path | str,
    *,
    to: Target,
    source_format: Kind | None = None,
    trust: bool = False,
    cast: str | None = None,
    tie: Mapping[str, str] | None = None,
    state: str | None = None,
    key: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    config: Path | str | None = None,
    step: int = 0,
    buffers: Sequence[str] = (),
    begun: Callable[[int], None] = _ignore,
    wrote: Callable[[int], None] = _ignore,
) -> Converted:
    """Write the parameters and persistent buffers of a checkpoint in another format, in one process.

    Tensors are read and written in pieces, so memory does not grow with the checkpoint (towards ``"dcp"``: with its largest
    tensor). The new folder appears by one rename when all of it is on the disk::

        dt.convert_checkpoint("ckpt", "bert-hf", to="hf", config="config.json")
        model = BertForMaskedLM.from_pretrained("bert-hf")

    Args:
        source: a root of ours (its newest step) or a step; a folder that ``save_pretrained`` of Hugging Face wrote, or one
            safetensors file; a folder of ``torch.distributed.checkpoint``; what ``torch.save`` wrote.
        out: the new folder. Towards ``"dtrain"`` a step's folder when it has the name of one (``root/step-00000100``), else
            a root with one step. Towards ``"safetensors"`` the new file when its name ends in ``.safetensors``, else a folder
            with the one file ``model.safetensors``.
        to: ``"hf"``, ``"dtrain"`` (a step that holds the model only), ``"dcp"``, or ``"safetensors"`` (one file).
        source_format: ``"dtrain"``, ``"hf"``, ``"dcp"`` or ``"pt"``; None to see from the names of files.
        trust: needed for ``"dcp"`` and ``"pt"`` sources, because reading those runs what is in them. They are read by a
            process of its own, which copies their tensors beside ``out`` first.
        cast: ``"fp32"``, ``"bf16"`` or ``"fp16"`` for floating tensors; None keeps dtypes.
        tie: further names of tied weights -> their first name. Both are written, towards ``"dtrain"`` only the first.
        state: which of several states of a step of ours.
        key: in a ``"dcp"`` or ``"pt"`` source the path to the dict of the weights, as in ``"state/model"``; towards
            ``"dcp"`` the dict to write them in.
        max_shard_bytes: of one file, towards ``"hf"``.
        config: file that becomes ``config.json``, towards ``"hf"``; by default that of a source folder of the same format.
        step: that the new step has, towards ``"dtrain"``, when ``out`` does not say it.
        buffers: towards ``"dtrain"`` patterns of names of buffers, where the source does not tell them from parameters: ``*``
            is text without a dot, ``**`` any text. Those of batch norms and what is not floating are known without.
        begun: is told how many bytes there are to write, before any is.
        wrote: is told how many more have been written.

    Raises:
        ConfigError: a source that is not there or not trusted, a folder ``out`` that exists, options without sense.
        CheckpointError: the source cannot be read.
        DamagedCheckpointError: the source is not as it was written, as far as its format can tell.
        CheckpointMismatchError: tensors that ``tie`` says are one, and are two.
    """
    path, folder = storage.place(source), storage.place(out)
    if not isinstance(folder, Path):
        raise ConfigError(f"{_WHERE}: {folder} is not on this machine, where new folders are written; copy it there afterwards")
    kind = kind_of(path) if source_format is None else source_format
    _check(folder, kind, to, max_shard_bytes, step)
    check_trust(path, kind, trust=trust)
    content = _config(path, kind, to, config)
    inner = ""
    single = MODEL if to == "safetensors" and folder.suffix == SUFFIX else ""
    with _side_folder(folder, taking=single) as (side, result):
        within = key if kind in ("dcp", "pt") else None
        stored = open_weights(path, kind, scratch=side / "source.safetensors", key=within, state=state)
        stored = tied(stored, tie or {}, once=to == "dtrain")
        given = weights(stored, cast=cast, wrote=wrote)
        if not given.dtypes:
            raise CheckpointError(f"{_WHERE}: {path} holds no weights")
        begun(given.bytes)
        if to == "safetensors":
            write_safetensors(result / MODEL, given, given.dtypes)
            storage.sync_folder(result)
        elif to == "hf":
            write_hugging_face(result, given, max_shard_bytes=max_shard_bytes, config=content)
        elif to == "dcp":
            from dtrain.checkpoint.convert.distributed import write_distributed  # takes a second to import

            write_distributed(result, given, key=None if kind in ("dcp", "pt") else key)
        else:
            inner = _write_step(result, folder, given, step, buffers)
    return Converted(path=folder / inner, tensors=len(given.dtypes), bytes=given.bytes)


def _write_step(result: Path, folder: Path, given: Weights, step: int, buffers: Sequence[str]) -> str:
    """Write ``result`` as the root or step that ``folder`` will be; the name of the step's folder in it, "" if it is one."""
    from dtrain.checkpoint.convert.steps import write_step

    named = layout.step_of(folder.name)
    if named is not None:
        write_step(result, given, step=named, buffers=buffers)
        return ""
    name = layout.step_name(step)
    storage.make_folder(result / name)
    write_step(result / name, given, step=step, buffers=buffers)
    storage.sync_folder(result)
    return name


def _check(folder: Path, kind: str, to: str, max_shard_bytes: int, step: int) -> None:
    if to not in TARGETS:
        raise ConfigError(f"{_WHERE}: to must be one of {', '.join(TARGETS)}, got {to!r}")
    if kind not in KINDS:
        raise ConfigError(f"{_WHERE}: the source's format must be one of {', '.join(KINDS)}, got {kind!r}")
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


def _config(path: Place, kind: Kind, to: Target, config: Path | str | None) -> bytes | None:
    """The content of the new folder's ``config.json``."""
    if config is not None and to != "hf":
        raise ConfigError(f"{_WHERE}: config goes with to='hf', got to={to!r}; leave it out")
    found = path / CONFIG if config is None else storage.place(config)
    if config is None and (to != "hf" or kind != "hf" or storage.file_size(found) is None):
        return None
    try:
        return storage.read_file(found, limit=_MAX_CONFIG_BYTES)
    except OSError as error:
        raise ConfigError(f"{_WHERE}: config: {error}; name the config.json of the model") from error


@contextmanager
def _side_folder(folder: Path, *, taking: str) -> Iterator[tuple[Path, Path]]:
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
