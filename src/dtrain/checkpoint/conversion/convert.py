"""Convert the weights of a checkpoint to another format: detect the source format, read its tensors, write the target.

The target ``"hf"`` is a folder that ``from_pretrained`` of Hugging Face's transformers reads::

    model.safetensors                      or, if this file would be larger than the limit,
    model-00001-of-00002.safetensors ...   and
    model.safetensors.index.json           {"metadata": {"total_size": ...}, "weight_map": {"<tensor>": "<file>", ...}}
    config.json, tokenizer.json ...        copies of the files passed in

A tied weight is written once, as by ``save_pretrained``; transformers ties weights by its configuration. The target ``"peft"``
is a folder that ``PeftModel.from_pretrained`` reads: ``adapter_model.safetensors`` and ``adapter_config.json``.
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from dtrain import storage
from dtrain.checkpoint import layout
from dtrain.checkpoint.conversion.adapters import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    MergedStream,
    merge_adapter,
    select_adapter,
    untie,
)
from dtrain.checkpoint.layout import DTYPES
from dtrain.checkpoint.weights import (
    MODEL_FILE,
    SOURCE_FORMATS,
    SUFFIX,
    SourceFormat,
    TensorFiles,
    WeightStream,
    are_equal,
    batch_regions,
    detect_format,
    open_weights,
    rename_tensors,
    write_safetensors,
)
from dtrain.dist.collectives import raise_on_all_ranks
from dtrain.dist.init import get_dist_info
from dtrain.errors import CheckpointError, CheckpointMismatchError, ConfigError
from dtrain.storage import AnyPath

_CALLER = "convert"
CAST_DTYPES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
_UNTRUSTED_FORMATS: tuple[SourceFormat, ...] = ("dcp", "pt")
TargetFormat = Literal["hf", "peft", "dtrain", "dcp", "safetensors"]
TARGET_FORMATS: tuple[TargetFormat, ...] = get_args(TargetFormat)
CONFIG_FILE = "config.json"
MAX_SHARD_BYTES = 5 * 10**9
# Files of a tokenizer or a config: JSON, vocabularies, SentencePiece models, chat templates and code of the model.
_COMPANION_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".py")
_MAX_COMPANION_BYTES = 2**28


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertResult:
    """Result of ``convert``.

    Args:
        path: new folder or file; for a step, the folder of the step.
        tensors: number of tensors.
        bytes: size of their data in bytes.
    """

    path: Path
    tensors: int
    bytes: int


def _no_op(nbytes: int) -> None:
    """Default of the callbacks."""


def convert(
    path: Path | str,
    destination: Path | str,
    *,
    to: TargetFormat,
    format: SourceFormat | None = None,
    trust: bool = False,
    dtype: str | None = None,
    tie: Mapping[str, str] | None = None,
    state: str | None = None,
    key: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    config: Path | str | None = None,
    merge: bool = False,
    step: int = 0,
    buffers: Sequence[str] = (),
    on_start: Callable[[int], None] = _no_op,
    on_bytes_written: Callable[[int], None] = _no_op,
) -> ConvertResult:
    """Write the parameters and persistent buffers of a checkpoint in another format, in one process.

    Tensors are read and written in batches, so memory does not grow with the checkpoint (for ``"dcp"``: with its largest
    tensor). The new folder appears by one rename when all files are on the disk::

        bert.config.save_pretrained("companions")
        tokenizer.save_pretrained("companions")
        dt.checkpoint.convert("ckpt", "bert-hf", to="hf", config="companions")
        model = BertForMaskedLM.from_pretrained("bert-hf")

    Args:
        path: root of dtrain (its newest step) or a step; folder that Hugging Face's ``save_pretrained`` wrote, or a
            safetensors file; folder of ``torch.distributed.checkpoint``; file that ``torch.save`` wrote.
        destination: new folder. For ``"dtrain"`` a step's folder if the name is that of a step (``root/step-00000100``), else a
            root with one step. For ``"safetensors"`` the new file if the name ends in ``.safetensors``, else a folder with
            the file ``model.safetensors``.
        to: ``"hf"``, ``"peft"`` (the adapter ``default``), ``"dtrain"`` (a step that holds the model only), ``"dcp"``, or
            ``"safetensors"`` (one file).
        format: ``"dtrain"``, ``"hf"``, ``"dcp"`` or ``"pt"``; None detects the format from file names.
        trust: if True, ``"dcp"`` and ``"pt"`` sources are allowed, although reading them runs their code. A subprocess reads
            them, and first copies their tensors beside ``destination``.
        dtype: ``"fp32"``, ``"bf16"`` or ``"fp16"`` for floating-point tensors; None keeps their dtypes.
        tie: further names of tied weights -> their first name. Both are written; for ``"dtrain"`` only the first. With
            ``merge``, an adapter may change one of them alone; the written config then has ``tie_word_embeddings`` False.
        state: name of the state if a step of dtrain holds several.
        key: path to the dict of the weights in a ``"dcp"`` or ``"pt"`` source, as in ``"state/model"``; for a ``"dcp"``
            target, the dict to write.
        max_shard_bytes: limit of one file in bytes, for ``"hf"``.
        config: for ``"hf"``, ``"peft"`` and ``merge``: the model's ``config.json`` or peft's ``adapter_config.json``, or a
            folder of these files. From a folder, ``"hf"`` also copies generation config and tokenizer. None takes the folder of
            an ``"hf"`` source.
        merge: if True, add the LoRA matrices of the adapter ``default`` to the base weights, for ``"hf"`` and
            ``"safetensors"``.
        step: step of the new checkpoint for ``"dtrain"``, unless ``destination`` names the step.
        buffers: patterns of the names of buffers, for ``"dtrain"`` and sources that do not distinguish them from parameters
            (``*`` matches text without a dot, ``**`` any text). Buffers of batch norms and integer tensors are detected.
        on_start: called with the number of bytes to write, before the first byte is written.
        on_bytes_written: called with the number of further bytes written.

    Raises:
        ConfigError: a missing or untrusted source, an existing ``destination``, or invalid options.
        CheckpointError: an unreadable source, no adapter, or an adapter that cannot be merged.
        CorruptCheckpointError: a source that was changed, as far as its format can tell.
        CheckpointMismatchError: two tensors that ``tie`` declares as one, and that differ.
    """
    # The import of torch.distributed.checkpoint takes a second.
    from dtrain.checkpoint.conversion import write_formats as formats

    source, folder = storage.resolve_path(path), storage.resolve_path(destination)
    if not isinstance(folder, Path):
        raise ConfigError(f"{_CALLER}: destination must be on this machine, got {folder}. Copy the result there afterwards.")
    kind = detect_format(source, _CALLER) if format is None else format
    _check_paths_and_options(source, folder, kind, to, trust, max_shard_bytes, step)
    companions = _read_companions(source, kind, to, merge, config)
    adapter_config = companions.pop(ADAPTER_CONFIG, b"")
    single = MODEL_FILE if to == "safetensors" and folder.suffix == SUFFIX else ""
    named_step = layout.step_of(folder.name)
    step_folder = layout.step_name(step) if to == "dtrain" and named_step is None else ""
    source_key, target_key = (key, None) if kind in _UNTRUSTED_FORMATS else (None, key)
    with _staging_folder(folder, file_name=single) as (staging, result):
        scratch = staging / "source.safetensors"
        files = open_weights(source, kind, caller=_CALLER, state=state, key=source_key, scratch=scratch)
        files = apply_ties(files, tie or {}, once=to == "dtrain")
        weights = _select_weights(files, adapter_config, to=to, merge=merge, dtype=dtype, on_bytes_written=on_bytes_written)
        if isinstance(weights, MergedStream):
            model_config = untie(files, weights.files, weights.updates, adapter_config, companions.pop(CONFIG_FILE, b""))
            companions |= {CONFIG_FILE: model_config} if model_config else {}
        if not weights.dtypes:
            raise CheckpointError(
                f"{_CALLER}: path must hold weights, got {source}. "
                "Save it with save_sharded first, or pass a .safetensors file."
            )
        on_start(weights.bytes)
        if to == "hf":
            formats.write_hugging_face(result, weights, max_shard_bytes=max_shard_bytes, companions=companions)
        elif to == "dcp":
            formats.write_dcp(result, weights, key=target_key)
        elif to == "dtrain":
            storage.make_folders(result / step_folder)
            formats.write_step(result / step_folder, weights, step=step if named_step is None else named_step, buffers=buffers)
        else:
            write_safetensors(result / (ADAPTER_FILE if to == "peft" else MODEL_FILE), weights, weights.dtypes)
            if to == "peft":
                storage.write_file(result / ADAPTER_CONFIG, adapter_config)
        storage.sync_folder(result)
    return ConvertResult(path=folder / step_folder, tensors=len(weights.dtypes), bytes=weights.bytes)


def _select_weights(
    files: TensorFiles,
    adapter_config: bytes,
    *,
    to: TargetFormat,
    merge: bool,
    dtype: str | None,
    on_bytes_written: Callable[[int], None],
) -> WeightStream:
    """Stream all tensors of ``files``, the tensors of the adapter alone, or the base weights with the adapter merged."""
    if not merge:
        selected = select_adapter(files, adapter_config) if to == "peft" else files
        return stream_weights(selected, dtype=dtype, on_bytes_written=on_bytes_written)
    base, updates = merge_adapter(files, adapter_config)
    dtypes = stream_weights(base, dtype=dtype, on_bytes_written=on_bytes_written).dtypes
    return MergedStream(files=base, dtypes=dtypes, on_bytes_written=on_bytes_written, stored=files, updates=updates)


def _check_paths_and_options(
    source: AnyPath, folder: Path, kind: str, to: str, trust: bool, max_shard_bytes: int, step: int
) -> None:
    if to not in TARGET_FORMATS:
        raise ConfigError(f"{_CALLER}: to must be one of {', '.join(TARGET_FORMATS)}, got {to!r}. Choose one of them.")
    if kind not in SOURCE_FORMATS:
        raise ConfigError(
            f"{_CALLER}: format must be one of {', '.join(SOURCE_FORMATS)}, got {kind!r}. "
            "Choose one of them, or leave it out to detect the format."
        )
    if storage.exists(folder):
        raise ConfigError(f"{_CALLER}: destination must not exist, got {folder}. Name a new folder.")
    if max_shard_bytes < 1:
        raise ConfigError(f"{_CALLER}: max_shard_bytes must be at least 1, got {max_shard_bytes}. Pass 5 * 10**9, for example.")
    if step < 0:
        raise ConfigError(f"{_CALLER}: step must be at least 0, got {step}. Omit step to convert the newest step.")
    if to == "dtrain" and layout.step_of(folder.name) is not None and storage.is_folder(folder.parent):
        existing = next((name for name in storage.list_names(folder.parent) if layout.step_of(name) is not None), None)
        if existing is not None:
            raise ConfigError(
                f"{_CALLER}: destination must not be in a root of a run, got {folder.parent} with {existing}. Name a new root."
            )
    if kind in _UNTRUSTED_FORMATS and not trust:
        kind_text = "a pickle" if kind == "pt" else "a folder of torch.distributed.checkpoint, which holds a pickle"
        raise ConfigError(
            f"{_CALLER}: {source} is {kind_text}, and reading it runs its code. Pass trust (--trust) if you know who wrote it."
        )
    if kind in _UNTRUSTED_FORMATS and not isinstance(source, Path):
        raise ConfigError(f"{_CALLER}: path must be on this machine, got {source}. Copy it to this machine first.")


def _read_companions(
    path: AnyPath, kind: SourceFormat, to: TargetFormat, merge: bool, config: Path | str | None
) -> dict[str, bytes]:
    """Return the files to copy beside the weights, and the config of the adapter, by name."""
    if merge and to not in ("hf", "safetensors"):
        raise ConfigError(f"{_CALLER}: merge must be False unless to is 'hf' or 'safetensors', got {to=}. Leave out merge.")
    if config is not None and not merge and to not in ("hf", "peft"):
        raise ConfigError(f"{_CALLER}: config must be None unless to is 'hf' or 'peft', got {to=}. Leave out config.")
    if config is None and kind == "dtrain" and (merge or to in ("hf", "peft")):
        found = _find_pretrained_files(path)
        config = None if found is None else str(found)
    given = path if config is None else storage.resolve_path(config)
    files: dict[str, AnyPath] = {}
    try:
        if (kind == "hf" or config is not None) and storage.is_folder(given):
            names = [name for name in storage.list_names(given) if name.endswith(_COMPANION_SUFFIXES)]
            files = {name: given / name for name in names if not name.endswith(".index.json")}
        elif config is not None:
            is_adapter = to == "peft" or given.name == ADAPTER_CONFIG
            files = {ADAPTER_CONFIG if is_adapter else CONFIG_FILE: given}
        contents = {
            name: storage.read_file(file, limit=_MAX_COMPANION_BYTES)
            for name, file in files.items()
            if to == "hf" or name == ADAPTER_CONFIG
        }
    except OSError as error:
        raise ConfigError(f"{_CALLER}: config must be a readable file: {error}. Name the config.json of the model.") from error
    if (merge or to == "peft") and ADAPTER_CONFIG not in contents:
        raise ConfigError(
            f"{_CALLER}: config must hold {ADAPTER_CONFIG}, got {config!r}. Write the file with "
            "model.peft_config['default'].save_pretrained(folder), and pass the folder."
        )
    return contents


@contextmanager
def _staging_folder(folder: Path, *, file_name: str) -> Iterator[tuple[Path, Path]]:
    """Yield a staging folder beside ``folder``, and a folder in it that is renamed to ``folder`` unless the block raises.

    Args:
        folder: the new folder.
        file_name: file in the inner folder that is renamed to ``folder`` instead, or "".
    """
    storage.make_folders(folder.parent)
    staging = folder.with_name(f"{folder.name}.tmp-{secrets.token_hex(4)}")
    storage.make_folder(staging)
    try:
        storage.make_folder(staging / "result")
        yield staging, staging / "result"
        # The folder may have been created since the first check. A rename would replace an empty folder.
        if storage.exists(folder):
            raise ConfigError(f"{_CALLER}: destination must not exist, got {folder}. Name a new folder.")
        storage.rename(staging / "result" / file_name, folder)
        storage.sync_folder(folder.parent)
    finally:
        storage.remove_folder(staging)


def stream_weights(files: TensorFiles, *, dtype: str | None, on_bytes_written: Callable[[int], None]) -> WeightStream:
    """Stream all tensors of ``files``; floating-point tensors are cast to ``fp32``, ``bf16`` or ``fp16`` unless None.

    Raises:
        ConfigError: another value of ``dtype``.
    """
    if dtype is not None and dtype not in CAST_DTYPES:
        raise ConfigError(
            f"{_CALLER}: dtype must be one of {', '.join(CAST_DTYPES)}, got {dtype!r}. Leave out dtype to keep the dtypes."
        )
    dtypes = {
        name: CAST_DTYPES[dtype] if dtype is not None and DTYPES[ref.dtype].is_floating_point else ref.dtype
        for name, ref in files.refs.items()
    }
    return WeightStream(files=files, dtypes=dtypes, on_bytes_written=on_bytes_written)


def apply_ties(files: TensorFiles, tie: Mapping[str, str], *, once: bool) -> TensorFiles:
    """Return ``files`` with tied tensors (a further name -> the first) under both names, or ``once`` under the first.

    Raises:
        ConfigError: none of two tied names is stored.
        CheckpointMismatchError: both names are stored, and their tensors differ.
    """
    names = {name: name for name in files.refs}
    for alias, first in tie.items():
        stored = next((name for name in (first, alias) if name in files.refs), None)
        if stored is None or alias == first:
            raise ConfigError(
                f"{_CALLER}: tie must map a name to another, one of which is stored, got {alias!r}: {first!r}. "
                f"Pass tie={{'lm_head.weight': 'embed.weight'}}, for example, with names of the source."
            )
        if (
            alias in files.refs
            and first in files.refs
            and not are_equal(files, alias, first, (batch[alias] for batch in batch_regions(files.refs, [alias])))
        ):
            raise CheckpointMismatchError(
                f"{_CALLER}: tie must map equal tensors, but {alias!r} and {first!r} are both stored and differ. Leave out tie."
            )
        names |= {alias: stored, first: stored}
        if once:
            del names[alias]
    return rename_tensors(files, names)


_PRETRAINED_CALLER = "save_pretrained_files"
# Folder below a root with the config and the tokenizer of the model, once for all steps.
_PRETRAINED_FOLDER = "pretrained"


def save_pretrained_files(root: AnyPath | str, *configs: Any) -> AnyPath:
    """Write configs and tokenizers into ``<root>/pretrained``, where ``dt.checkpoint.convert`` finds them.

    Args:
        root: folder or URL of the checkpoints, as for ``save_sharded``; created if missing.
        configs: objects with ``save_pretrained(folder)`` that write no weights: ``model.config``, ``model.generation_config``,
            a tokenizer, ``model.peft_config["default"]``.

    Returns:
        The folder, which ``AutoTokenizer.from_pretrained`` and ``AutoConfig.from_pretrained`` read if it is on this machine.

    Mutates: files. Rank 0 writes, and replaces files of the same names.
    Collective: one exchange of JSON on the control group; every rank must call it.

    Example:
        dt.checkpoint.save_pretrained_files("ckpt", model.config, tokenizer)
        # at the end of the run
        dt.checkpoint.convert("ckpt", "bert-hf", to="hf")

    Raises:
        ConfigError: an object without ``save_pretrained``, or a model, whose weights are in shards. All ranks raise.
        CheckpointError: a failed file operation.
        PeerError: another rank failed.
    """
    folder = storage.resolve_path(root) / _PRETRAINED_FOLDER
    with raise_on_all_ranks(_PRETRAINED_CALLER):
        savers = [_saver(config) for config in configs]
        if get_dist_info().rank == 0:
            with tempfile.TemporaryDirectory() as scratch:
                for save in savers:
                    save(scratch)
                files = {
                    path.relative_to(scratch).as_posix(): path.read_bytes()
                    for path in Path(scratch).rglob("*")
                    if path.is_file()
                }
            for name, content in files.items():
                storage.make_folders((folder / name).parent)
                storage.replace_file(folder / name, content)
    return folder


def _saver(config: Any) -> Callable[[str], object]:
    save: Callable[[str], object] | None = getattr(config, "save_pretrained", None)
    if save is None or hasattr(config, "parameters"):
        raise ConfigError(
            f"{_PRETRAINED_CALLER}: configs must be configs or tokenizers with save_pretrained, got {type(config).__name__}. "
            "Pass model.config and the tokenizer."
        )
    return save


def _find_pretrained_files(source: AnyPath) -> AnyPath | None:
    """Return the folder of the files of a root, or of the root of a step; None if there is none."""
    folder = (source.parent if layout.step_of(source.name) is not None else source) / _PRETRAINED_FOLDER
    return folder if storage.is_folder(folder) else None
