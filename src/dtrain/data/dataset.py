"""``MapDataset``: the protocol of an indexed dataset; ``ColumnDataset`` for tensors and arrays; fingerprints of a dataset;
facts by which ranks compare their data; ``memory_map`` for a TensorDict on disk.

At the end are the functions that know the iterable datasets of other libraries: MosaicML's ``StreamingDataset``, torchdata's
nodes, Hugging Face's streams.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Protocol, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset

from dtrain import storage
from dtrain.data.position import Position
from dtrain.dist.collectives import local_rank_zero_first
from dtrain.dist.rng import derive_seed
from dtrain.errors import ConfigError
from dtrain.typing import Batch, Plain, is_tensordict


class MapDataset(Protocol):
    """A dataset with ``len(dataset)`` and ``dataset[i]``.

    The loader uses each of these optional methods if the dataset has the method:

    - ``__getitems__(indices: list[int]) -> list``: several samples at once, in the order of ``indices``;
    - ``order(seed: int, shuffle) -> SampleOrder``: a sample order of the dataset (a mixture, shards in sequence);
    - ``prefetch(indices: Tensor) -> None``: ``[k]`` int64, the samples that this rank reads soon. The loader calls the method
      in the process of the rank, not in a loader worker. The method must return at once;
    - ``sample_lengths(column: str | None) -> array``: ``[samples]`` integers, the tokens of each sample, for
      ``build_loader(balance=, max_tokens=)``;
    - ``fingerprint() -> dict``: plain data (names, sizes, counts) that differ if the data differ, computed without reading
      the samples;
    - ``close()``.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


Column: TypeAlias = "Tensor | np.ndarray[Any, Any]"
"""Values of all samples: the first axis counts samples."""


@dataclass(frozen=True, slots=True)
class ColumnDataset:
    """Dataset whose samples are the rows of tensors and arrays. A batch takes one index operation per column.

    Args:
        columns: a column, a tuple of columns or a dict of columns, of equal first size; samples have the same structure.
    """

    columns: Column | tuple[Column, ...] | dict[Any, Column]

    def __len__(self) -> int:
        return len(next(iter(self.named_columns().values())))

    def __getitem__(self, index: int) -> Any:
        if isinstance(self.columns, dict):
            return {name: column[index] for name, column in self.columns.items()}
        return tuple(column[index] for column in self.columns) if isinstance(self.columns, tuple) else self.columns[index]

    def named_columns(self) -> dict[Any, Column]:
        """Return the columns by name, or by position in a tuple."""
        if isinstance(self.columns, dict):
            return self.columns
        return dict(enumerate(self.columns if isinstance(self.columns, tuple) else (self.columns,)))

    def read(self, indices: Tensor) -> Batch:
        """Return the batch of the samples at ``indices`` ``[n]``, as ``collate`` would make it of the samples."""
        if isinstance(self.columns, tuple):
            return [_read_rows(column, indices) for column in self.columns]
        if not isinstance(self.columns, dict):
            return _read_rows(self.columns, indices)
        # The first import takes a second or two. Later, ``from`` would take longer than the import itself.
        import tensordict

        return tensordict.TensorDict(
            {name: _read_rows(column, indices) for name, column in self.columns.items()}, batch_size=[len(indices)]
        )


def _read_rows(column: Column, indices: Tensor) -> Tensor:
    if not isinstance(column, Tensor):
        return torch.from_numpy(column[indices.numpy()])
    # On a CPU, index_select copies whole rows, which is faster.
    return column.index_select(0, indices) if type(column) is Tensor and column.device.type == "cpu" else column[indices]


def as_row_dataset(dataset: Any) -> Any:
    """Convert tensors and arrays, and dicts and tuples of them, to a dataset of rows; return any other dataset unchanged.

    Raises:
        ConfigError: a value of a dict is not a tensor or array, or the values have different numbers of rows.
    """
    # A subclass may read its samples in another way.
    if type(dataset) is TensorDataset:
        return ColumnDataset(dataset.tensors)
    if _is_column(dataset):
        return ColumnDataset(dataset)
    if type(dataset) is tuple and dataset and all(isinstance(value, Tensor | np.ndarray) for value in dataset):
        _check_columns(dict(enumerate(dataset)), "tuple")
        return ColumnDataset(dataset)
    if not isinstance(dataset, Mapping) or is_tensordict(dataset):
        return dataset
    # The mapping holds samples by number.
    if dataset and all(number in dataset for number in range(len(dataset))):
        return dataset
    _check_columns(dataset, "dict")
    return ColumnDataset(dict(dataset))


def _check_columns(columns: Mapping[Any, Any], kind: str) -> None:
    sizes = {len(value) if _is_column(value) else None for value in columns.values()}
    if None in sizes or len(sizes) != 1:
        shapes = {
            name: list(value.shape) if isinstance(value, Tensor | np.ndarray) else type(value).__name__
            for name, value in columns.items()
        }
        raise ConfigError(
            f"build_loader: a {kind} is a dataset of rows, so its values must be tensors or arrays of numbers with the same "
            f"first size, got {shapes}. Give tensors of equal length, or a list of samples."
        )


def _is_column(value: Any) -> bool:
    """Return True for a tensor, and for an array of a dtype that torch has, with at least one axis."""
    if not isinstance(value, np.ndarray):
        return isinstance(value, Tensor) and value.ndim > 0
    try:
        torch.from_numpy(np.empty(0, value.dtype))
    except (TypeError, ValueError):
        return False
    return value.ndim > 0


def read_samples(dataset: Any, indices: list[int]) -> list[Any]:
    """Read samples, in one call of ``__getitems__`` if the dataset has the method."""
    many = getattr(dataset, "__getitems__", None)
    return [dataset[index] for index in indices] if many is None else list(many(indices))


def fingerprint_dataset(dataset: Any) -> dict[str, Plain]:
    """Return names, sizes and counts: ``dataset.fingerprint()``, or attributes of a well-known kind of dataset."""
    if hasattr(dataset, "fingerprint"):
        return cast("dict[str, Plain]", dataset.fingerprint())
    facts: dict[str, Plain] = {"count": len(dataset)} if hasattr(dataset, "__len__") else {}
    if isinstance(dataset, ColumnDataset):
        columns = dataset.named_columns().items()
        return {**facts, "columns": {str(name): [str(column.dtype), *column.shape] for name, column in columns}}
    if is_tensordict(dataset):
        tensors = dataset.items(include_nested=True, leaves_only=True)
        return {**facts, "tensors": {str(name): [str(leaf.dtype), *leaf.shape] for name, leaf in sorted(tensors, key=str)}}
    if is_hugging_face(dataset):
        return {**facts, "columns": {name: str(kind) for name, kind in sorted((dataset.features or {}).items())}}
    return facts


def hash_fingerprint(fingerprint: Mapping[str, Plain]) -> int:
    """Hash a fingerprint to a number below 2**52. Equal fingerprints have equal hashes."""
    return derive_seed(_canonical_text(dict(fingerprint))) % 2**52


def _canonical_text(value: Plain) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key!r}:{_canonical_text(value[key])}" for key in sorted(value)) + "}"
    return "[" + ",".join(map(_canonical_text, value)) + "]" if isinstance(value, list) else repr(value)


# Samples and indices that ranks compare, and numbers of one tensor.
_COMPARED_SAMPLES, _COMPARED_INDICES, _COMPARED_NUMBERS = 16, 1024, 4096
_COMPARED_SAMPLES_OF_BATCH = 4
_NESTED_DATASETS = 4


def hash_stored_samples(dataset: Any) -> int:
    """Hash what an indexed dataset stores of a few samples, so that ranks find out if they have different data.

    These are indices of a ``Subset``, rows of tensors and tables, entries of lists. Of another dataset they are its public
    attributes with at least as many entries as samples: file names, whole numbers and rows. No code of the dataset runs, since
    a read may draw random numbers, take long, or open a file before the loader workers start. A dataset with ``fingerprint()``
    is hashed by it alone. The hash is not stored, so that a checkpoint does not depend on it.
    """
    return hash_values([_stored_values(dataset)])


def _stored_values(dataset: Any, depth: int = 0) -> list[Any]:
    # The attributes may be of any library, and a table that cannot be read is not compared.
    try:
        return list(_iter_stored(as_row_dataset(dataset), depth))
    except Exception:  # noqa: BLE001
        return []


def _iter_stored(dataset: Any, depth: int) -> Iterator[Any]:
    if depth > _NESTED_DATASETS:
        return
    if hasattr(dataset, "fingerprint"):
        yield dataset.fingerprint()
        for source in getattr(dataset, "sources", {}).values():
            yield _stored_values(source, depth + 1)
    elif isinstance(dataset, Subset):
        yield [len(dataset.indices), *_spread(dataset.indices, _COMPARED_INDICES), _stored_values(dataset.dataset, depth + 1)]
    elif isinstance(dataset, ConcatDataset):
        yield [_stored_values(part, depth + 1) for part in dataset.datasets]
    elif isinstance(dataset, ColumnDataset):
        yield {str(name): _spread(column) for name, column in dataset.named_columns().items()}
    elif is_tensordict(dataset):
        for name, leaf in sorted(dataset.items(include_nested=True, leaves_only=True), key=str):
            yield [str(name), _spread(leaf)]
    elif is_hugging_face(dataset):
        # A table of Arrow has the stored values, without decoding and transforms.
        yield dataset.with_format("arrow")[_spread_positions(len(dataset), _COMPARED_SAMPLES)].to_pylist()
    # A subclass may run code of its own.
    elif type(dataset) in (list, tuple):
        yield _spread(dataset)
    else:
        yield from _iter_attributes(dataset, depth)


def _iter_attributes(dataset: Any, depth: int) -> Iterator[Any]:
    """Yield the values of attributes that belong to samples. Notes of the loop, such as a table of losses, are left out."""
    for name, value in sorted(vars(dataset).items()):
        if name.startswith("_"):
            continue
        if isinstance(value, Dataset) or is_hugging_face(value):
            yield [name, _stored_values(value, depth + 1)]
        elif isinstance(value, Tensor | np.ndarray):
            is_table = value.ndim > 0 and len(value) >= len(dataset)
            if is_table and (value.ndim > 1 or not _is_float(value)):
                yield [name, _spread(value)]
        elif (isinstance(value, list | tuple) or hasattr(value, "iloc")) and len(value) >= len(dataset):
            rows = _spread(value)
            # A cache of samples, which a rank fills as it reads, holds None or tensors.
            if all(map(_is_plain, rows)):
                yield [name, rows]


def _is_float(value: Any) -> bool:
    return value.is_floating_point() if isinstance(value, Tensor) else value.dtype.kind in "fcO"


def _is_plain(value: Any) -> bool:
    is_container = isinstance(value, list | tuple)
    return (
        all(map(_is_plain, value)) if is_container else isinstance(value, str | bytes | int | PurePath | np.integer | np.str_)
    )


def _spread(values: Any, count: int = _COMPARED_SAMPLES) -> list[Any]:
    """Return the first, the last, and entries in between of a sequence, the rows of a table, or those of a tensor or array."""
    positions = _spread_positions(len(values), count)
    rows = getattr(values, "iloc", values)
    entries = [rows[position] for position in positions]
    if isinstance(values, Tensor):
        return [entry.cpu() for entry in entries]
    return [entry.to_dict() if hasattr(entry, "to_dict") else entry for entry in entries]


def _spread_positions(size: int, count: int) -> list[int]:
    return sorted({position * (size - 1) // max(count - 1, 1) for position in range(count)}) if size else []


def hash_global_batch(samples: Sequence[Any]) -> int:
    """Hash a global batch of an iterable dataset, which each rank reads in whole: the number of samples, and a few of them.

    Fractions and images count only if a sample has no whole number, string or label, since a rank may augment them by chance.
    """
    chosen = _spread(samples, _COMPARED_SAMPLES_OF_BATCH)
    return hash_values([len(samples), *(hash_values([sample], discrete_only=True) for sample in chosen)])


def hash_values(values: Sequence[Any], *, discrete_only: bool = False) -> int:
    """Hash nested values to a number below 2**52. Numbers count to three digits, since processors round differently.

    Args:
        values: containers, tensors, arrays, numbers, strings and paths, of which the last part counts.
        discrete_only: if True, leave out fractions and images if there is anything else: an augmentation may change them.
    """
    discrete: list[str] = []
    continuous: list[str] = []
    _collect_facts(values, discrete, continuous)
    used = discrete if discrete_only and discrete else [*discrete, "", *continuous]
    return derive_seed(*used) % 2**52


def _collect_facts(value: Any, discrete: list[str], continuous: list[str]) -> None:
    """Append the facts of ``value``; none if it cannot be read. Mutates: ``discrete`` and ``continuous``."""
    # Containers and tensors may be of any library.
    with suppress(Exception):
        _collect_readable(value, discrete, continuous)


def _collect_readable(value: Any, discrete: list[str], continuous: list[str]) -> None:
    if isinstance(value, np.generic):
        value = value.item()
    # A memory-mapped tensor is of the module of TensorDicts, too.
    if isinstance(value, Tensor | np.ndarray):
        _collect_numbers(value, discrete, continuous)
    elif isinstance(value, Mapping) or is_tensordict(value):
        for key in value.keys():  # noqa: SIM118 - a TensorDict iterates over its rows.
            before = len(discrete), len(continuous)
            _collect_facts(value[key], discrete, continuous)
            if (len(discrete), len(continuous)) != before:
                continuous.append(str(key))
    elif isinstance(value, list | tuple):
        for entry in value:
            _collect_facts(entry, discrete, continuous)
    elif isinstance(value, bytes):
        discrete.append(hashlib.blake2b(value, digest_size=8).hexdigest())
    elif isinstance(value, str | PurePath):
        # Each node may have a folder of its own.
        discrete.append(str(value).replace("\\", "/").rpartition("/")[2])
    elif isinstance(value, bool | int):
        discrete.append(str(value))
    elif isinstance(value, float):
        continuous.append(f"{value:.3g}")


def _collect_numbers(value: Any, discrete: list[str], continuous: list[str]) -> None:
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biuf":
            _collect_facts(value.tolist(), discrete, continuous)
            return
        flat = value.reshape(-1)
    # The numbers of other tensors are on a device, or split over ranks.
    elif value.device.type != "cpu" or hasattr(value, "device_mesh"):
        return
    else:
        flat = value.detach().reshape(-1)
    flat = flat[:: max(len(flat) // _COMPARED_NUMBERS, 1)]
    if isinstance(flat, Tensor):
        flat = (flat.double() if flat.is_floating_point() else flat).numpy()
    if flat.dtype.kind == "f":
        continuous += [f"{float(flat.mean()):.3g}", f"{float(np.abs(flat).mean()):.3g}"] if flat.size else []
    else:
        (discrete if value.ndim < 2 else continuous).append(hashlib.blake2b(flat.tobytes(), digest_size=8).hexdigest())


def is_hugging_face(dataset: Any) -> bool:
    """Return True if ``dataset`` is a ``Dataset`` of Hugging Face's ``datasets``. The check does not import ``datasets``."""
    return type(dataset).__module__.startswith("datasets.") and hasattr(dataset, "with_format")


def memory_map(path: str | Path, make: Callable[[], Any]) -> Any:
    """Memory-map the ``TensorDict`` in ``path``. If ``path`` does not exist, local rank 0 calls ``make`` and writes it first.

    The tensors take memory once per node, not once per rank and loader worker. Opening reads no data.

    Args:
        path: folder in tensordict's format, on a disk of the node.
        make: ``() -> TensorDict`` with a batch size ``[n]``; called on local rank 0 only, if the folder does not exist.

    Collective: one exchange of JSON; all ranks must call it.

    Example:
        >>> import dtrain as dt
        >>> def make():
        ...     return TensorDict({"x": torch.randn(1000, 8)}, batch_size=[1000])
        >>> dataset = dt.data.memory_map("/tmp/train_rows", make)  # doctest: +SKIP
        >>> loader = dt.build_loader(
        ...     dataset, mesh=mesh, global_batch_size=64, seed=0
        ... )  # doctest: +SKIP

    Raises:
        ConfigError: ``make`` does not return a TensorDict with a first axis. Local rank 0 raises the ConfigError, the other
            ranks raise a PeerError.
    """
    # The import takes a second or two.
    from tensordict import TensorDict, TensorDictBase

    folder = storage.real_path(path)
    with local_rank_zero_first("memory_map") as first:
        if first and not storage.exists(folder):
            tensors = make()
            if not isinstance(tensors, TensorDictBase) or not tensors.batch_dims:
                raise ConfigError(
                    f"memory_map: make must return a TensorDict with a batch size, got {type(tensors).__name__}. "
                    "Return tensordict.TensorDict(tensors, batch_size=[count])."
                )
            # The folder is renamed only when it is complete, so that a folder with the final name can always be read.
            partial = folder.with_name(f"{folder.name}.tmp-{secrets.token_hex(4)}")
            storage.make_folders(partial.parent)
            try:
                cast("Any", tensors).memmap(partial)
                storage.rename(partial, folder)
            finally:
                if storage.exists(partial):
                    storage.remove_folder(partial)
        return TensorDict.load_memmap(folder)


def has_state(dataset: Any) -> bool:
    """Return True if an iterable dataset has a complete state of its own."""
    return hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict") and not drops_samples_on_resume(dataset)


def is_mosaic(dataset: Any) -> bool:
    """Return True if ``dataset`` is a ``StreamingDataset`` of mosaicml-streaming. The check does not import ``streaming``."""
    return _is_instance_by_name(dataset, "streaming.", "StreamingDataset")


def is_indexed(dataset: Any) -> bool:
    """Return True if the dataset returns samples by index, in any order."""
    # torch's base class has a ``[]`` that only raises, and an iterable may have a length.
    if isinstance(dataset, IterableDataset):
        return False
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and not is_mosaic(dataset)


@dataclass(frozen=True, slots=True)
class MosaicAdapter:
    """State of a ``StreamingDataset``, which the dataset keeps in memory that its loader workers share.

    The dataset splits its samples over ranks and workers from environment variables. It resumes on any number of them.
    """

    dataset: Any

    def state_at(self, after: Position) -> Plain:
        """Return the dataset's state at ``after``, in the current epoch or at the start of the next epoch."""
        state = self.dataset.state_dict(after.samples, True)
        return cast("Plain", state if after.samples else {**state, "epoch": state["epoch"] + 1, "sample_in_epoch": 0})

    def load(self, state: Plain) -> None:
        """Load a state. Mutates: the dataset's shared memory, which the next iteration reads."""
        self.dataset.load_state_dict(state)
        # The dataset ignores the state of an epoch that it has begun already.
        self.dataset.next_epoch = cast("dict[str, Any]", state)["epoch"]


def adapt_mosaic(dataset: Any, *, global_batch_size: int, ranks: int) -> MosaicAdapter:
    """Return the adapter of ``dataset``, after a check of the dataset's batch size per rank.

    Raises:
        ConfigError: the batch size is not this rank's part of the global batch.
    """
    if dataset.batch_size is None or dataset.batch_size * ranks != global_batch_size:
        raise ConfigError(
            f"build_loader: the StreamingDataset must have batch_size={global_batch_size // ranks}, so that {ranks} ranks make "
            f"global_batch_size={global_batch_size}, got batch_size={dataset.batch_size}. "
            "Make the StreamingDataset with this batch_size."
        )
    return MosaicAdapter(dataset)


def as_iterable(dataset: Any) -> Any:
    """Return ``dataset``, or a torchdata ``Loader`` of a torchdata node: an iterable with a state."""
    if not _is_instance_by_name(dataset, "torchdata.nodes.", "BaseNode"):
        return dataset
    # torchdata is imported only if the user has a torchdata node.
    from torchdata.nodes import Loader

    return cast("Callable[[Any], Any]", Loader)(dataset)


def drops_samples_on_resume(dataset: Any) -> bool:
    """Return True if a resume of ``dataset`` loses samples: Hugging Face's streams do not save their shuffle buffer.

    The check reads private attributes, since there is no public one. If it fails, ``datasets`` warns about the lost samples.
    """
    if not type(dataset).__module__.startswith("datasets."):
        return False
    streams: list[Any] = [getattr(dataset, "_ex_iterable", None)]
    for stream in streams:
        if type(stream).__name__ == "BufferShuffledExamplesIterable" and getattr(stream, "buffer_size", 2) > 1:
            return True
        # The loop also visits the streams that it appends.
        streams += [stream.ex_iterable] if hasattr(stream, "ex_iterable") else getattr(stream, "ex_iterables", [])
    return False


def restarts_each_iteration(dataset: Any) -> bool:
    """Return True if each iteration of ``dataset`` begins at its start or at a state just loaded, as torchdata's loaders do."""
    return _is_instance_by_name(dataset, "torchdata.nodes.", "Loader")


def _is_instance_by_name(dataset: Any, package: str, name: str) -> bool:
    return any(kind.__module__.startswith(package) and kind.__name__ == name for kind in type(dataset).__mro__)
