"""``load_weights_``: the weights of another run or project, by name, into a model before its training state is made."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from dtrain import storage
from dtrain.checkpoint import closed, foreign
from dtrain.checkpoint.agree import Agreed, decided_by_rank_0
from dtrain.checkpoint.data_file import as_bytes
from dtrain.checkpoint.fill import copy_into_, land
from dtrain.checkpoint.find import has_manifest
from dtrain.checkpoint.matching import Match, Rename, match_by_name
from dtrain.checkpoint.plan import Region, plan_reads
from dtrain.checkpoint.stored import Stored, in_checkpoint
from dtrain.checkpoint.verify import choose
from dtrain.dist.collectives import all_gather_json
from dtrain.dist.init import current
from dtrain.errors import CheckpointError, CheckpointMismatchError
from dtrain.shard.whole import reshard
from dtrain.state import spec_of
from dtrain.storage import Place
from dtrain.tensors import extent, local

_WHERE = "load_weights_"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedWeights:
    """What ``load_weights_`` did.

    Args:
        path: the file or folder that was read; of a root, the step.
        loaded: names in the model that have got their values.
        kept: names in the model that were not stored, as ``missing`` allows; their values are as before.
        left_out: stored names that ``rename`` left out.
    """

    path: Place
    loaded: tuple[str, ...]
    kept: tuple[str, ...]
    left_out: tuple[str, ...]


def load_weights_(
    model: nn.Module, source: Place | str, *, rename: Rename | None = None, missing: Sequence[str] = ()
) -> LoadedWeights:
    """Copy stored weights into ``model`` by name, every rank reading the bytes of its own shards only.

    Call it after ``shard_model`` and ``materialize`` and before the state is made; ``load_sharded`` is what resumes a run::

        model = dt.materialize(dt.shard_model(model, mesh, blocks=(BertLayer,)), seed=0, init=model._init_weights)
        new_head = {"rename": lambda name: None if name.startswith("cls.") else name, "missing": ["classifier.*"]}
        dt.load_weights_(model, "bert-base", **new_head)

    Args:
        model: sharded or plain, with real storage. Its names are those of the plain model, whatever wraps its modules.
        source: a folder as ``save_pretrained`` of Hugging Face writes it (``model.safetensors``, or several files and
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
        CheckpointError: there is nothing to load in ``source``, a pickle, or it cannot be read.
        DamagedCheckpointError: a file is malformed; of a step of ours, any byte that is not as it was written.
        CheckpointMismatchError: names, shapes or dtypes that differ, the first ten in a table.
        PeerError: another rank failed.
    """
    path = _place(cast(str, decided_by_rank_0(_WHERE, lambda: str(_choose(_place(source))))))
    with Agreed(_WHERE), _naming(path):
        reshard(model)  # a gathered copy of parameters would hide the shards, which are what is loaded into
        stored = _open(path, model)
        match = match_by_name(stored.refs, model, rename, missing, where=f"{_WHERE}: {path}")
        _check_twins(stored, path, match)
        landed = _read(stored, {name: _region(tensor) for name, tensor in match.targets.items()})
    _check_equal(stored, path, match)
    with torch.no_grad():
        copy_into_({name: local(tensor) for name, tensor in match.targets.items()}, landed)
    loaded = tuple(match.names[name] for name in match.targets)
    return LoadedWeights(path=path, loaded=loaded, kept=tuple(match.kept), left_out=tuple(match.left_out))


@contextmanager
def _naming(path: Place) -> Iterator[None]:
    """Put the path before what is wrong with one of its files."""
    try:
        yield
    except CheckpointMismatchError:  # has it already
        raise
    except CheckpointError as error:
        raise type(error)(f"{_WHERE}: {path}: {error}") from None


def _place(source: Place | str) -> Place:
    """What ``source`` names. A link stays one: what it points to may have a name without a suffix."""
    place = storage.place(source)
    return place if isinstance(place, storage.RemotePath) else Path(str(source)).absolute()


def _choose(path: Place) -> Place:
    """What to read: the file or folder itself, or the newest step of a root of ours."""
    if storage.file_size(path) is not None:
        if Path(path.name).suffix != foreign.SUFFIX:
            raise CheckpointError(f"{_WHERE}: {path} is no {foreign.SUFFIX} file{_about_pickles([path.name])}")
        return path
    if not storage.is_folder(path):
        raise CheckpointError(f"{_WHERE}: there is no file or folder {path}; check the path (nothing is downloaded)")
    if has_manifest(path) or foreign.is_model_folder(path):
        return path
    step = choose(path, _WHERE)
    if step is None:
        names = storage.list_names(path)
        raise CheckpointError(
            f"{_WHERE}: {path} holds no {foreign.MODEL}, no {foreign.INDEX} and no checkpoint of dtrain; it has "
            f"{', '.join(names[:5]) or 'nothing'}{_about_pickles(names) or f'; name the {foreign.SUFFIX} file or the folder'}"
        )
    return step


def _about_pickles(names: Iterable[str]) -> str:
    found = next((name for name in names if Path(name).suffix in _PICKLES), None)
    if found is None:
        return ""
    return (
        f"; {found} may be a pickle, which can run code and is never opened here: load it once where you trust it, and save "
        "it with safetensors.torch.save_model (or save_pretrained)"
    )


def _open(path: Place, model: nn.Module) -> Stored:
    if has_manifest(path):
        # Ranks that do not keep buffers of their own must have equal ones: all take those of rank 0.
        return in_checkpoint(path, current().rank if spec_of(model).buffers == "local" else 0)
    return foreign.in_folder(path) if storage.is_folder(path) else foreign.in_file(path)


def _region(tensor: Tensor) -> Region:
    box = extent(tensor)
    return Region(offset=box.offset, size=box.size)


def _check_twins(stored: Stored, path: Place, match: Match) -> None:
    """Tensors that go to one place must be equal there; files of models with tied weights may hold them twice."""
    for first, other in match.twins:
        region = _region(match.targets[first])
        if stored.refs[first] != stored.refs[other] or _bytes_of(stored, first, region) != _bytes_of(stored, other, region):
            raise CheckpointMismatchError(
                f"{_WHERE}: {path}: {first!r} and {other!r} differ, but both go into {match.names[first]!r} of the model; "
                "leave one out with rename="
            )


def _read(stored: Stored, regions: Mapping[str, Region]) -> dict[str, Tensor]:
    sizes = {name: region.size for name, region in regions.items()}
    return land(sizes, plan_reads(stored.boxes, regions), stored.refs, stored.open_file)


def _bytes_of(stored: Stored, name: str, region: Region) -> bytes:
    return bytes(as_bytes(_read(stored, {name: region})[name]))


def _check_equal(stored: Stored, path: Place, match: Match) -> None:
    names = hashlib.sha256(closed.canonical(sorted(match.names.items()))).hexdigest()
    everyone = all_gather_json([stored.identity, names])
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            raise CheckpointError(
                f"{_WHERE}: rank {rank} and rank 0 see different files in {path}, or rename differs between them; all nodes "
                "must share its file system"
            )
