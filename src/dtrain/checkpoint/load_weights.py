"""Which stored tensor goes where in a model: by name, renamed where asked for, nothing left over in silence.

``load_weights_``: the weights of another run or project, by name, into a model before its training state is made."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from dtrain import storage
from dtrain.checkpoint import layout, mismatch_report, strict_json, tensor_files, tree_json
from dtrain.checkpoint.checkpoint_info import has_manifest
from dtrain.checkpoint.data_file import as_bytes
from dtrain.checkpoint.mismatch_report import MismatchRow
from dtrain.checkpoint.read_tensors import copy_into_, read_tensors
from dtrain.checkpoint.reader import choose_step
from dtrain.checkpoint.reshard import Region, plan_reads
from dtrain.checkpoint.tensor_files import TensorFiles, open_step
from dtrain.checkpoint.tree_json import TensorRef
from dtrain.dist.collectives import all_gather_json
from dtrain.dist.init import get_dist_info
from dtrain.dist.rank_errors import RaiseOnAllRanks, broadcast_decision
from dtrain.dtensor import shard_box, to_local
from dtrain.errors import CheckpointError, CheckpointMismatchError, ConfigError
from dtrain.fqn import buffers_by_fqn, compile_patterns, modules_by_fqn, parameters_by_fqn
from dtrain.shard.unshard import reshard
from dtrain.state import get_spec
from dtrain.storage import AnyPath

Rename = Callable[[str], str | None] | Mapping[str, str | None]

_ADVICE = "rename= gives stored tensors their names in the model, or leaves them out; missing= allows what need not be stored"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class NameMatch:
    """Which stored tensors go where.

    Args:
        targets: the model's tensor, by stored name.
        names: its name in the model, by stored name.
        duplicates: pairs of stored names that go to one place, of which the first is in ``targets``.
        kept: names in the model of what is not stored, and need not be.
        left_out: stored names that ``rename`` left out.
    """

    targets: Mapping[str, Tensor]
    names: Mapping[str, str]
    duplicates: Sequence[tuple[str, str]]
    kept: Sequence[str]
    left_out: Sequence[str]


def match_by_name(
    refs: Mapping[str, TensorRef], model: nn.Module, rename: Rename | None, missing: Sequence[str], *, where: str
) -> NameMatch:
    """Find the place of each stored tensor.

    Args:
        refs: what is stored, by name.
        model: with real storage.
        rename: the name in the model of each stored name, or None; a function or a mapping.
        missing: patterns of names in the model that need not be stored.
        where: begins every message.

    Raises:
        ConfigError: tensors on the meta device, a pattern or a name in ``rename`` that nothing has, or another kind of value.
        CheckpointMismatchError: what has no place, does not fit there, or is not stored; the first ten in a table.
    """
    here, aliases = _model_tensors(model, where)
    allowed = _missing_matcher(missing, {*here, *aliases}, where)
    names = _apply_rename(refs, rename, where)
    rows: list[MismatchRow] = []
    stored_as: dict[str, str] = {}
    twins = []
    for name, wanted in names.items():
        first = aliases.get(wanted, wanted)
        if first in stored_as:
            twins.append((stored_as[first], name))
            continue
        stored_as[first] = name
        tensor = here.get(first)
        label = name if name == wanted else f"{wanted} (stored as {name})"
        if tensor is None:
            rows.append(mismatch_report.unexpected_row(wanted, str(refs[name]), label=label))
        elif not _fits(refs[name], tensor):
            rows.append(mismatch_report.unequal_row(wanted, refs[name], tree_json.ref_of(tensor), label=label))
    every_name = defaultdict(set, {first: {first} for first in here})
    for alias, first in aliases.items():
        every_name[first].add(alias)
    absent = [first for first in here if first not in stored_as]
    kept = [first for first in absent if any(map(allowed, every_name[first]))]
    rows.extend(mismatch_report.missing_row(first, _describe_tensor(here[first])) for first in absent if first not in kept)
    if rows:
        raise mismatch_report.mismatch_error(where, rows, source="file", advice=_ADVICE)
    if not stored_as:
        raise CheckpointMismatchError(
            f"{where}: none of the {len(refs)} tensors goes into the model; see rename=, which can leave them out"
        )
    return NameMatch(
        targets={name: here[first] for first, name in stored_as.items()},
        names={name: names[name] for name in stored_as.values()},
        duplicates=twins,
        kept=kept,
        left_out=[name for name in refs if name not in names],
    )


def _model_tensors(model: nn.Module, where: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """What is to be loaded, by clean name, and the further names of what sits in several places."""
    params, aliases = parameters_by_fqn(model)
    buffers = buffers_by_fqn(model, persistent_only=True)
    found, aliases = {**params, **buffers}, {**aliases, **_buffer_aliases(buffers, model)}
    meta = [name for name, tensor in found.items() if tensor.is_meta]
    if meta:
        raise ConfigError(
            f"{where}: {len(meta)} of {len(found)} tensors are on the meta device (first: {meta[0]}); call dt.materialize"
        )
    return found, aliases


def _buffer_aliases(buffers: Mapping[str, Tensor], model: nn.Module) -> dict[str, str]:
    """The names in a state dict that ``buffers`` lacks -> the name there: a module in two places has its buffers twice."""
    first = {id(buffer): name for name, buffer in buffers.items()}
    every = {
        f"{prefix}.{key}" if prefix else key: id(buffer)
        for prefix, module in modules_by_fqn(model, include_duplicates=True)
        for key, buffer in module._buffers.items()
    }
    return {name: first[buffer] for name, buffer in every.items() if name not in buffers and buffer in first}


def _missing_matcher(missing: Sequence[str], names: Iterable[str], where: str) -> Callable[[str], bool]:
    if isinstance(missing, str):
        raise ConfigError(f"{where}: missing takes a list of patterns, got the text {missing!r}; write [{missing!r}]")
    if not isinstance(missing, Iterable):
        raise ConfigError(f"{where}: missing takes a list of patterns, got {missing!r}; as in missing=['head.*']")
    names = list(names)
    for pattern in missing:
        if not any(map(compile_patterns([pattern], caller=f"{where}: missing"), names)):
            raise ConfigError(
                f"{where}: missing: no name of the model fits {pattern!r}; * stands for text without a dot, ** for any"
            )
    return compile_patterns(missing, caller=f"{where}: missing")


def _apply_rename(refs: Mapping[str, TensorRef], rename: Rename | None, where: str) -> dict[str, str]:
    """The name in the model of each stored tensor that is not left out."""
    given = {} if rename is None else rename
    if isinstance(given, Mapping):
        stray = [name for name in given if name not in refs]
        if stray:
            raise ConfigError(f"{where}: rename has {stray[0]!r}, which is not stored ({len(stray)} such names)")
        results = {name: given.get(name, name) for name in refs}
    elif not callable(given):
        raise ConfigError(f"{where}: rename takes a function of the stored name, or a mapping, got {given!r}")
    else:
        results = {name: given(name) for name in refs}
    bad = next((name for name, result in results.items() if not isinstance(result, str | None)), None)
    if bad is not None:
        raise ConfigError(f"{where}: rename gives {results[bad]!r} for {bad!r}; needs the name in the model, or None")
    return {name: result for name, result in results.items() if result is not None}


def _fits(ref: TensorRef, tensor: Tensor) -> bool:
    dtype = layout.DTYPES[ref.dtype]
    castable = dtype.is_floating_point and tensor.is_floating_point()
    return ref.shape == tuple(tensor.shape) and (castable or dtype == tensor.dtype)


def _describe_tensor(tensor: Tensor) -> str:
    return f"{layout.DTYPE_NAMES.get(tensor.dtype, tensor.dtype)} {list(tensor.shape)}"


_WHERE = "load_weights_"
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadWeightsResult:
    """What ``load_weights_`` did.

    Args:
        path: the file or folder that was read; of a root, the step.
        loaded: names in the model that have got their values.
        kept: names in the model that were not stored, as ``missing`` allows; their values are as before.
        left_out: stored names that ``rename`` left out.
    """

    path: AnyPath
    loaded: tuple[str, ...]
    kept: tuple[str, ...]
    left_out: tuple[str, ...]


def load_weights_(
    model: nn.Module, path: AnyPath | str, *, rename: Rename | None = None, missing: Sequence[str] = ()
) -> LoadWeightsResult:
    """Copy stored weights into ``model`` by name, every rank reading the bytes of its own shards only.

    Call it after ``shard_model`` and ``materialize`` and before the state is made; ``load_sharded`` is what resumes a run::

        model = dt.materialize(dt.shard_model(model, mesh, blocks=(BertLayer,)), seed=0, init=model._init_weights)
        new_head = {"rename": lambda name: None if name.startswith("cls.") else name, "missing": ["classifier.*"]}
        dt.load_weights_(model, "bert-base", **new_head)

    Args:
        model: sharded or plain, with real storage. Its names are those of the plain model, whatever wraps its modules.
        path: a folder as ``save_pretrained`` of Hugging Face writes it (``model.safetensors``, or several files and
            ``model.safetensors.index.json``), one ``.safetensors`` file, the folder of a step that ``save_sharded`` wrote, or
            its root, of which the newest step is taken.
        rename: from each stored name to the name in the model, or None to leave it out: a function of the name, or a
            mapping, where names that it lacks stay as they are.
        missing: patterns of names in the model that need not be stored (``*`` is text without a dot, ``**`` any text) and
            keep their values then, such as the head of a new task.

    All parameters and persistent buffers of the model must be there under any of their names if they are tied, in the same
    shape; floating dtypes are cast to the model's, others must be the same.

    Mutates: parameters and persistent buffers of ``model``. When it raises before all ranks have agreed, nothing has changed.
    Collective: exchanges of JSON on the control group; every rank must call it, and see the same files.
    Host sync: copies from the host.

    Raises:
        ConfigError: tensors on the meta device, a pattern or a name in ``rename`` that nothing has.
        CheckpointError: there is nothing to load in ``path``, a pickle, or it cannot be read.
        CorruptCheckpointError: a file is malformed; of a step of ours, any byte that is not as it was written.
        CheckpointMismatchError: names, shapes or dtypes that differ, the first ten in a table.
        PeerError: another rank failed.
    """
    path = _resolve_source(cast(str, broadcast_decision(_WHERE, lambda: str(_choose_source(_resolve_source(path))))))
    with RaiseOnAllRanks(_WHERE), _add_path_to_errors(path):
        reshard(model)  # a gathered copy of parameters would hide the shards, which are what is loaded into
        stored = _open_source(path, model)
        match = match_by_name(stored.refs, model, rename, missing, where=f"{_WHERE}: {path}")
        _check_duplicates(stored, path, match)
        landed = _read_regions(stored, {name: _local_region(tensor) for name, tensor in match.targets.items()})
    _check_same_files(stored, path, match)
    with torch.no_grad():
        copy_into_({name: to_local(tensor) for name, tensor in match.targets.items()}, landed)
    loaded = tuple(match.names[name] for name in match.targets)
    return LoadWeightsResult(path=path, loaded=loaded, kept=tuple(match.kept), left_out=tuple(match.left_out))


@contextmanager
def _add_path_to_errors(path: AnyPath) -> Iterator[None]:
    """Put the path before what is wrong with one of its files."""
    try:
        yield
    except CheckpointMismatchError:  # has it already
        raise
    except CheckpointError as error:
        raise type(error)(f"{_WHERE}: {path}: {error}") from None


def _resolve_source(source: AnyPath | str) -> AnyPath:
    """What ``source`` names. A link stays one: what it points to may have a name without a suffix."""
    place = storage.resolve_path(source)
    return place if isinstance(place, storage.RemotePath) else Path(str(source)).absolute()


def _choose_source(path: AnyPath) -> AnyPath:
    """What to read: the file or folder itself, or the newest step of a root of ours."""
    if storage.file_size(path) is not None:
        if Path(path.name).suffix != tensor_files.SUFFIX:
            raise CheckpointError(f"{_WHERE}: {path} is no {tensor_files.SUFFIX} file{_pickle_hint([path.name])}")
        return path
    if not storage.is_folder(path):
        raise CheckpointError(f"{_WHERE}: there is no file or folder {path}; check the path (nothing is downloaded)")
    if has_manifest(path) or tensor_files.is_model_folder(path):
        return path
    step = choose_step(path, _WHERE)
    if step is None:
        names = storage.list_names(path)
        raise CheckpointError(
            f"{_WHERE}: {path} holds no {tensor_files.MODEL_FILE}, no {tensor_files.INDEX_FILE} and no checkpoint of dtrain; it has "
            f"{', '.join(names[:5]) or 'nothing'}{_pickle_hint(names) or f'; name the {tensor_files.SUFFIX} file or the folder'}"
        )
    return step


def _pickle_hint(names: Iterable[str]) -> str:
    found = next((name for name in names if Path(name).suffix in _PICKLE_SUFFIXES), None)
    if found is None:
        return ""
    return (
        f"; {found} may be a pickle, which can run code and is never opened here: load it once where you trust it, and save "
        "it with safetensors.torch.save_model (or save_pretrained)"
    )


def _open_source(path: AnyPath, model: nn.Module) -> TensorFiles:
    if has_manifest(path):
        # Ranks that do not keep buffers of their own must have equal ones: all take those of rank 0.
        return open_step(path, get_dist_info().rank if get_spec(model).buffers == "local" else 0)
    return tensor_files.open_safetensors_folder(path) if storage.is_folder(path) else tensor_files.open_safetensors_file(path)


def _local_region(tensor: Tensor) -> Region:
    box = shard_box(tensor)
    return Region(offset=box.offset, size=box.size)


def _check_duplicates(stored: TensorFiles, path: AnyPath, match: NameMatch) -> None:
    """Tensors that go to one place must be equal there; files of models with tied weights may hold them twice."""
    for first, other in match.duplicates:
        region = _local_region(match.targets[first])
        if stored.refs[first] != stored.refs[other] or _region_bytes(stored, first, region) != _region_bytes(
            stored, other, region
        ):
            raise CheckpointMismatchError(
                f"{_WHERE}: {path}: {first!r} and {other!r} differ, but both go into {match.names[first]!r} of the model; "
                "leave one out with rename="
            )


def _read_regions(stored: TensorFiles, regions: Mapping[str, Region]) -> dict[str, Tensor]:
    sizes = {name: region.size for name, region in regions.items()}
    return read_tensors(sizes, plan_reads(stored.shards, regions), stored.refs, stored.open_file)


def _region_bytes(stored: TensorFiles, name: str, region: Region) -> bytes:
    return bytes(as_bytes(_read_regions(stored, {name: region})[name]))


def _check_same_files(stored: TensorFiles, path: AnyPath, match: NameMatch) -> None:
    names = hashlib.sha256(strict_json.canonical_json(sorted(match.names.items()))).hexdigest()
    everyone = all_gather_json([stored.content_hash, names])
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            raise CheckpointError(
                f"{_WHERE}: rank {rank} and rank 0 see different files in {path}, or rename differs between them; all nodes "
                "must share its file system"
            )
