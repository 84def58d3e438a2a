"""Load weights of another run or project into a model by name, before its training state is made."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from dtrain import storage
from dtrain.arguments import explain_arguments
from dtrain.checkpoint import layout, mismatch, weights
from dtrain.checkpoint.checkpoint_info import StepRemovedError, choose_step, has_manifest, notice_removal, read_manifest
from dtrain.checkpoint.fetch import copy_into_
from dtrain.checkpoint.layout import TensorRef
from dtrain.checkpoint.mismatch import MismatchRow, check_targets
from dtrain.checkpoint.model_state import finish_load
from dtrain.checkpoint.plan import Region, local_region
from dtrain.checkpoint.weights import are_equal, open_safetensors, open_step, read_batch
from dtrain.dist.collectives import all_gather_json, broadcast_decision, raise_on_all_ranks
from dtrain.dist.dtensor import to_local
from dtrain.dist.init import get_dist_info
from dtrain.errors import CheckpointError, CheckpointMismatchError, ConfigError
from dtrain.fqn import buffers_by_fqn, compile_patterns, is_of_peft, modules_by_fqn, parameters_by_fqn
from dtrain.shard.buffers import persistent_buffers
from dtrain.shard.spec import get_spec
from dtrain.shard.unshard import reshard
from dtrain.storage import AnyPath

Rename = Callable[[str], str | None] | Mapping[str, str | None]

_CALLER = "load_weights_"
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_ADVICE = "Pass rename= to map stored names to names in the model or to None, or ignore= for names that need not be stored."
_ADAPTER_ADVICE = (
    "The step is an adapter, saved with scope='trainable'. Load it into the state: "
    "dt.load_sharded(path, state, scope='weights')."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadWeightsResult:
    """Result of ``load_weights_``.

    Args:
        path: file or folder that was read; for a root, the step.
        loaded: names in the model that were loaded.
        kept: names in the model that were not stored and did not change, as ``ignore`` allows.
        left_out: stored names that ``rename`` maps to None.
    """

    path: AnyPath
    loaded: tuple[str, ...]
    kept: tuple[str, ...]
    left_out: tuple[str, ...]


@explain_arguments
def load_weights_(
    model: nn.Module,
    path: AnyPath | str,
    *,
    rename: Rename | None = None,
    ignore: Sequence[str] = (),
    extend_rows: Sequence[str] = (),
) -> LoadWeightsResult:
    """Copy stored weights into ``model`` by name. Every rank reads the bytes of its own shards only.

    Call this function after ``shard_model`` and ``materialize``, and before the state is made. To resume a run, use
    ``load_sharded``::

        model = dt.materialize(
            dt.shard_model(model, mesh, blocks=(BertLayer,)),
            seed=0,
            init=model._init_weights,
        )
        new_head = {
            "rename": lambda name: None if name.startswith("cls.") else name,
            "ignore": ["classifier.*"],
        }
        dt.load_weights_(model, "bert-base", **new_head)

    Args:
        model: sharded or plain model with real storage. Names are the names of the plain model without wrappers.
        path: folder that Hugging Face's ``save_pretrained`` wrote (``model.safetensors``, or several files and
            ``model.safetensors.index.json``), a ``.safetensors`` file, the folder of a step that ``save_sharded`` wrote, or
            its root, whose newest step is read.
        rename: function or mapping from each stored name to the name in the model, or to None to leave out the tensor. Names
            that a mapping lacks do not change.
        ignore: patterns of names in the model that need not be stored (``*`` matches text without a dot, ``**`` any text)
            and then keep their values, such as a new head.
        extend_rows: patterns of names of parameters that may have more rows than stored, such as the embedding of a larger
            vocabulary. The stored rows come first, and the further rows keep their values.

    Under adapters of peft, stored names of the base model need no ``rename``: the tensors go into ``base_layer``, and into the
    trained copies of ``modules_to_save``. Adapters keep their values if the files store none of their tensors.

    All parameters and persistent buffers of the model must be stored in the same shape, tied tensors under any of their names.
    Floating-point dtypes are cast to the dtypes of the model; other dtypes must be equal. The extra state of modules does not
    change. Hooks of ``register_load_state_dict_post_hook`` are called.

    Mutates: parameters and persistent buffers of ``model``. An error before all ranks have agreed changes nothing.
    Collective: exchanges of JSON on the control group; every rank must call it, and see the same files.
    Host sync: copies from the host.

    Raises:
        ConfigError: tensors in memory instead of a path; tensors on the meta device or that cannot be written; a pattern or a
            name in ``rename`` without match.
        CheckpointError: no weights in ``path``, a pickle, or an unreadable file.
        CorruptCheckpointError: an invalid file; for a step, any byte that does not match its digest.
        CheckpointMismatchError: names, shapes or dtypes that differ; lists the first ten.
        PeerError: another rank failed.
    """
    chosen = broadcast_decision(_CALLER, lambda: str(_choose_source(_resolve_source(path))))
    source = _resolve_source(cast(str, chosen))
    with raise_on_all_ranks(_CALLER), _add_path_to_errors(source):
        # A gathered copy of parameters would hide the shards, which are the targets of the load.
        reshard(model)
        advice = _ADVICE
        if has_manifest(source):
            rank, own_buffers = get_dist_info().rank, persistent_buffers(model, get_spec(model), own=True)
            files = open_step(source, rank, own_buffers=own_buffers, check_files=rank == 0)
            advice = _ADAPTER_ADVICE if read_manifest(source).scope == "trainable" else _ADVICE
        else:
            files = open_safetensors(source)
        match = _match_by_name(files.refs, model, rename, ignore, extend_rows, caller=f"{_CALLER}: {source}", advice=advice)
        check_targets({match.names[key]: tensor for key, tensor in match.targets.items()}, f"{_CALLER}: {source}")
        regions = {key: _stored_region(tensor, files.refs[key].shape) for key, tensor in match.targets.items()}
        # Files of models with tied weights may store them twice.
        for first, other in match.duplicates:
            if not are_equal(files, first, other, [regions[first]]):
                raise CheckpointMismatchError(
                    f"{_CALLER}: {source}: {first!r} and {other!r} must be equal, because both are {match.names[first]!r} of "
                    "the model. Leave out one of them with rename=."
                )
        tensors = read_batch(files, regions)
        # Copies of a tensor may have other shards.
        copies = [
            (to_local(copy), read_batch(files, {key: _stored_region(copy, files.refs[key].shape)})[key])
            for key, copies_of_tensor in match.copies.items()
            for copy in copies_of_tensor.values()
        ]
    names = hashlib.sha256(layout.canonical_json(sorted(match.names.items()))).hexdigest()
    hashes_by_rank = all_gather_json([files.content_hash, names])
    for rank, hashes in enumerate(hashes_by_rank):
        if hashes != hashes_by_rank[0]:
            raise CheckpointError(
                f"{_CALLER}: rank {rank} and rank 0 see different files in {source}, or their rename differs. All nodes must "
                "share the file system."
            )
    with torch.no_grad():
        targets = {key: _first_rows(to_local(tensor), tensors[key]) for key, tensor in match.targets.items()}
        copy_into_(targets, tensors)
        for copy, tensor in copies:
            _first_rows(copy, tensor).copy_(tensor)
        finish_load(model, {})
    loaded = tuple(name for key in match.targets for name in (match.names[key], *match.copies.get(key, ())))
    return LoadWeightsResult(path=source, loaded=loaded, kept=tuple(match.kept), left_out=tuple(match.left_out))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class _NameMatch:
    """Match of stored tensors and tensors of the model.

    Args:
        targets: tensor of the model, by stored name.
        names: name in the model, by stored name.
        copies: further tensors of the model that are loaded from the same stored tensor, by name, by stored name.
        duplicates: pairs of stored names of one tensor of the model; the first name is in ``targets``.
        kept: names in the model that are not stored and need not be stored.
        left_out: stored names that ``rename`` maps to None.
    """

    targets: Mapping[str, Tensor]
    names: Mapping[str, str]
    copies: Mapping[str, Mapping[str, Tensor]]
    duplicates: Sequence[tuple[str, str]]
    kept: Sequence[str]
    left_out: Sequence[str]


def _match_by_name(
    refs: Mapping[str, TensorRef],
    model: nn.Module,
    rename: Rename | None,
    ignore: Sequence[str],
    extend_rows: Sequence[str],
    *,
    caller: str,
    advice: str,
) -> _NameMatch:
    """Match stored tensors and tensors of the model by name. ``advice`` is the last sentence of a mismatch.

    Raises:
        ConfigError: tensors on the meta device, a pattern or a name in ``rename`` without match, or an invalid value.
        CheckpointMismatchError: tensors without match or of another shape or dtype; lists the first ten.
    """
    here, aliases = _model_tensors(model, caller)
    allowed = _pattern_matcher("ignore", ignore, {*here, *aliases}, caller)
    may_extend = _pattern_matcher("extend_rows", extend_rows, {*here, *aliases}, caller)
    longer = {aliases.get(name, name) for name in filter(may_extend, (*here, *aliases))}
    base = _base_names(model)
    names, copies = _apply_rename(refs, rename, caller), dict[str, dict[str, Tensor]]()
    rows: list[MismatchRow] = []
    stored_as: dict[str, str] = {}
    duplicates = []
    for name, renamed in list(names.items()):
        model_name, *further = [renamed] if renamed in here or renamed in aliases else base.places.get(renamed, [renamed])
        names[name] = model_name
        first = aliases.get(model_name, model_name)
        if first in stored_as:
            duplicates.append((stored_as[first], name))
            continue
        stored_as[first] = name
        copies[name] = {place: here[place] for place in further if place in here}
        label = name if name == model_name else f"{model_name} (stored as {name})"
        row = _compare(model_name, refs[name], here.get(first), may_extend=first in longer, label=label)
        rows += [] if row is None else [row]
    may_be_absent = {aliases.get(name, name) for name in filter(allowed, (*here, *aliases))}
    copied = {place for places in copies.values() for place in places}
    stored_as |= dict.fromkeys(copied - stored_as.keys(), "")
    if not base.adapters & stored_as.keys():
        may_be_absent |= base.adapters
    absent = [first for first in here if first not in stored_as]
    kept = [first for first in absent if first in may_be_absent]
    for first in absent:
        if first not in may_be_absent:
            dtype_name = layout.DTYPE_NAMES.get(here[first].dtype, here[first].dtype)
            rows.append(mismatch.missing_row(first, f"{dtype_name} {list(here[first].shape)}"))
    if rows:
        raise mismatch.mismatch_error(caller, rows, source="file", advice=advice)
    if not stored_as:
        raise CheckpointMismatchError(
            f"{caller}: at least one of the {len(refs)} tensors must match the model, but rename= leaves out all of them. "
            "Return at least one name of the model from rename=."
        )
    return _NameMatch(
        targets={name: here[first] for first, name in stored_as.items() if name},
        names={name: names[name] for name in stored_as.values() if name},
        copies={name: places for name, places in copies.items() if places},
        duplicates=duplicates,
        kept=kept,
        left_out=[name for name in refs if name not in names],
    )


def _compare(name: str, stored: TensorRef, tensor: Tensor | None, *, may_extend: bool, label: str) -> MismatchRow | None:
    """Return a row if a stored tensor does not fit. With ``may_extend``, the tensor of the model may have more rows."""
    if tensor is None:
        return mismatch.unexpected_row(name, str(stored), label=label)
    if may_extend and stored.shape and stored.shape[0] < tensor.shape[0]:
        stored = replace(stored, shape=(tensor.shape[0], *stored.shape[1:]))
    return mismatch.compare_tensor(name, stored, tensor, allow_cast=True, label=label)


def _model_tensors(model: nn.Module, caller: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors to load by name, and the aliases of shared tensors."""
    params, aliases = parameters_by_fqn(model)
    buffers = buffers_by_fqn(model, persistent_only=True)
    # A module with two names has two names for each buffer.
    first_names = {id(buffer): name for name, buffer in buffers.items()}
    for prefix, module in modules_by_fqn(model, include_duplicates=True):
        for key, buffer in module._buffers.items():
            name = f"{prefix}.{key}" if prefix else key
            if name not in buffers and id(buffer) in first_names:
                aliases[name] = first_names[id(buffer)]
    tensors = {**params, **buffers}
    meta = [name for name, tensor in tensors.items() if tensor.is_meta]
    if meta:
        raise ConfigError(
            f"{caller}: {len(meta)} of {len(tensors)} tensors are on the meta device (first: {meta[0]}). Call dt.materialize."
        )
    return tensors, aliases


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class _BaseNames:
    """Names of tensors of a model in its base model, if peft has put adapters into it.

    Args:
        places: names in the model by name in the base model; the trained copies of ``modules_to_save`` come last.
        adapters: names of the tensors that the base model lacks.
    """

    places: Mapping[str, Sequence[str]]
    adapters: frozenset[str]


def _base_names(model: nn.Module) -> _BaseNames:
    """Return the names of a model's tensors in its base model, by the structure of peft's modules, which need not be loaded."""
    modules = dict(modules_by_fqn(model, include_duplicates=True))
    base_of, copies = dict[str, str | None](), set[str]()
    places: dict[str, list[str]] = {}
    adapters = set[str]()
    for name, module in modules.items():
        parent_name, _, key = name.rpartition(".")
        parent = modules[parent_name] if name else None
        base = base_of.get(parent_name, "")
        base_of[name] = _base_name(parent, base, key, is_copy=parent_name in copies)
        if key == "modules_to_save" and base_of[name] is not None and is_of_peft(parent, "AuxiliaryTrainingWrapper"):
            copies.add(name)
        is_adapter = base_of[name] is None or is_of_peft(module, "BaseTunerLayer", "PeftModel")
        for tensor in (*module._parameters, *module._buffers):
            full_name = f"{name}.{tensor}" if name else tensor
            if is_adapter:
                adapters.add(full_name)
            else:
                places.setdefault(f"{base_of[name]}.{tensor}".lstrip("."), []).append(full_name)
    for names in places.values():
        # Trained copies come last.
        names.sort(key=lambda name: ".modules_to_save." in name)
    return _BaseNames(places=places, adapters=frozenset(adapters))


def _base_name(parent: nn.Module | None, base: str | None, key: str, *, is_copy: bool) -> str | None:
    """Return the name of the module ``key`` of ``parent`` in the base model, where ``parent`` has the name ``base``."""
    if base is None or is_copy:
        return base
    if is_of_peft(parent, "PeftModel"):
        return base if key == "base_model" else None
    if is_of_peft(parent, "BaseTuner") and key == "model":
        return base
    if is_of_peft(parent, "BaseTunerLayer", "AuxiliaryTrainingWrapper"):
        return base if key in ("base_layer", "original_module", "modules_to_save") else None
    return f"{base}.{key}".lstrip(".")


def _stored_region(tensor: Tensor, shape: Sequence[int]) -> Region:
    """Return this rank's region of a tensor, without the rows beyond the stored shape."""
    region = local_region(tensor)
    if tuple(shape) == tuple(tensor.shape):
        return region
    rows = max(0, min(region.size[0], shape[0] - region.offset[0]))
    return Region(offset=(min(region.offset[0], shape[0]), *region.offset[1:]), size=(rows, *region.size[1:]))


def _first_rows(target: Tensor, tensor: Tensor) -> Tensor:
    return target if target.shape == tensor.shape else target[: len(tensor)]


def _pattern_matcher(parameter: str, patterns: Sequence[str], names: Iterable[str], caller: str) -> Callable[[str], bool]:
    if isinstance(patterns, str):
        raise ConfigError(
            f"{caller}: {parameter} must be a list of patterns, got the string {patterns!r}. Write [{patterns!r}]."
        )
    if not isinstance(patterns, Iterable):
        raise ConfigError(
            f"{caller}: {parameter} must be a list of patterns such as ['head.*'], got {patterns!r}. "
            "Put a single pattern into a list."
        )
    names = list(names)
    for pattern in patterns:
        if not any(map(compile_patterns([pattern], caller=f"{caller}: {parameter}"), names)):
            raise ConfigError(
                f"{caller}: {parameter} must match names of the model, got {pattern!r}. * matches text without a dot, ** any "
                "text. Print [name for name, _ in model.named_parameters()] to see the names."
            )
    return compile_patterns(patterns, caller=f"{caller}: {parameter}")


def _apply_rename(refs: Mapping[str, TensorRef], rename: Rename | None, caller: str) -> dict[str, str]:
    """Return the name in the model of each stored tensor, without names that ``rename`` maps to None."""
    mapping = {} if rename is None else rename
    if isinstance(mapping, Mapping):
        unknown = [name for name in mapping if name not in refs]
        if unknown:
            raise ConfigError(
                f"{caller}: rename must have stored names, got {unknown[0]!r} ({len(unknown)} such names). "
                "Remove these entries from rename=, or use the names that the file stores."
            )
        results = {name: mapping.get(name, name) for name in refs}
    elif not callable(mapping):
        raise ConfigError(
            f"{caller}: rename must be a function of the stored name, or a mapping, got {mapping!r}. "
            f"Pass rename={{'old.weight': 'new.weight'}}, for example."
        )
    else:
        results = {name: mapping(name) for name in refs}
    bad = next((name for name, result in results.items() if not isinstance(result, str | None)), None)
    if bad is not None:
        raise ConfigError(
            f"{caller}: rename must return a name in the model or None for {bad!r}, got {results[bad]!r}. "
            "Return None to leave a tensor out."
        )
    return {name: result for name, result in results.items() if result is not None}


@contextmanager
def _add_path_to_errors(path: AnyPath) -> Iterator[None]:
    """Add the path to errors about its files."""
    try:
        with notice_removal(path) if has_manifest(path) else nullcontext():
            yield
    except (CheckpointMismatchError, StepRemovedError):  # The message names the path already.
        raise
    except CheckpointError as error:
        raise type(error)(f"{_CALLER}: {path}: {error}") from None


def _resolve_source(source: AnyPath | str) -> AnyPath:
    """Return the absolute path. Links are not resolved, because the name of their target may have no suffix."""
    if isinstance(source, Mapping):
        raise ConfigError(
            f"{_CALLER}: path must be a file, a folder or a URL, got tensors in memory ({type(source).__name__}). Call "
            "model.load_state_dict(tensors) before shard_model, which copies the values of rank 0 to all ranks, or write a "
            "file with safetensors.torch.save_file."
        )
    path = storage.resolve_path(source)
    return path if isinstance(path, storage.RemotePath) else Path(str(source)).absolute()


def _choose_source(path: AnyPath) -> AnyPath:
    """Choose the file or folder to read: the path itself, or the newest step of a root."""
    if storage.file_size(path) is not None:
        if Path(path.name).suffix != weights.SUFFIX:
            raise CheckpointError(f"{_CALLER}: path must be a {weights.SUFFIX} file, got {path}.{_pickle_hint([path.name])}")
        return path
    if not storage.is_folder(path):
        raise CheckpointError(f"{_CALLER}: path must exist, got {path}. Check the path, because nothing is downloaded.")
    if has_manifest(path) or weights.is_model_folder(path):
        return path
    step = choose_step(path, _CALLER)
    if step is None:
        names = storage.list_names(path)
        raise CheckpointError(
            f"{_CALLER}: {path} must hold {weights.MODEL_FILE}, {weights.INDEX_FILE} or a checkpoint of dtrain, "
            f"got {', '.join(names[:5]) or 'an empty folder'}."
            f"{_pickle_hint(names) or f' Name the {weights.SUFFIX} file or the folder.'}"
        )
    return step


def _pickle_hint(names: Iterable[str]) -> str:
    pickle = next((name for name in names if Path(name).suffix in _PICKLE_SUFFIXES), None)
    if pickle is None:
        return ""
    return (
        f" {pickle} may be a pickle, which can run code and is never opened. Load the pickle where you trust it, and save the "
        "model with safetensors.torch.save_model (or save_pretrained)."
    )
