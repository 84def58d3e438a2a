"""``MapDataset``: the protocol of an indexed dataset; fingerprints of a dataset; ``memory_map`` for a TensorDict on disk."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, cast

from torch import Tensor

from dtrain import storage
from dtrain.dist.collectives import local_rank_zero_first
from dtrain.dist.rng import derive_seed
from dtrain.errors import ConfigError
from dtrain.typing import Plain, is_tensordict


class MapDataset(Protocol):
    """A dataset with ``len(dataset)`` and ``dataset[i]``.

    The loader uses each of these optional methods if the dataset has the method:

    - ``__getitems__(indices: list[int]) -> list``: several samples at once, in the order of ``indices``;
    - ``order(seed: int, shuffle) -> SampleOrder``: a sample order of the dataset (a mixture, shards in sequence);
    - ``prefetch(indices: Tensor) -> None``: ``[k]`` int64, the samples that this rank reads soon. The loader calls the method
      in the process of the rank, not in a loader worker. The method must return at once;
    - ``fingerprint() -> dict``: plain data (names, sizes, counts) that differ if the data differ, computed without reading
      the samples;
    - ``close()``.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def as_row_dataset(dataset: Any) -> Any:
    """Convert a dict of tensors to a dataset of rows (a ``TensorDict``); return any other dataset unchanged.

    Raises:
        ConfigError: a value is not a tensor, or the tensors have different numbers of rows.
    """
    if not isinstance(dataset, Mapping) or is_tensordict(dataset):
        return dataset
    # The mapping holds samples by number.
    if dataset and all(number in dataset for number in range(len(dataset))):
        return dataset
    sizes = {name: len(value) if isinstance(value, Tensor) and value.ndim else None for name, value in dataset.items()}
    if None in sizes.values() or len(set(sizes.values())) != 1:
        shapes = {name: list(v.shape) if isinstance(v, Tensor) else type(v).__name__ for name, v in dataset.items()}
        raise ConfigError(
            "build_loader: a dict is a dataset of rows, so its values must be tensors with the same first size, got "
            f"{shapes}. Give tensors of equal length, or a list of samples"
        )
    # The import takes 0.3 s, and most datasets are not a TensorDict.
    from tensordict import TensorDict

    return TensorDict(dict(dataset), batch_size=[len(next(iter(dataset.values())))])


def read_samples(dataset: Any, indices: list[int]) -> list[Any]:
    """Read samples, in one call of ``__getitems__`` if the dataset has the method."""
    many = getattr(dataset, "__getitems__", None)
    return [dataset[index] for index in indices] if many is None else list(many(indices))


def fingerprint_dataset(dataset: Any) -> dict[str, Plain]:
    """Return names, sizes and counts: ``dataset.fingerprint()``, or attributes of a well-known kind of dataset."""
    if hasattr(dataset, "fingerprint"):
        return cast("dict[str, Plain]", dataset.fingerprint())
    facts: dict[str, Plain] = {"count": len(dataset)} if hasattr(dataset, "__len__") else {}
    if isinstance(dataset, Tensor):
        return {**facts, "dtype": str(dataset.dtype), "shape": list(dataset.shape)}
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
        >>> loader = dt.build_loader(dataset, mesh=mesh, global_batch_size=64, seed=0)  # doctest: +SKIP

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
                raise ConfigError(f"memory_map: make must return a TensorDict with a batch size, got {type(tensors).__name__}")
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
