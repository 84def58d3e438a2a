"""What the loader asks of a dataset, and what it can find out about one.

``memory_map``: a TensorDict on disk that all ranks of a node read through one page cache."""

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
    """A dataset that is indexed: ``len(dataset)`` and ``dataset[i]``.

    The loader looks for these by name, and goes without those that are not there:

    - ``__getitems__(indices: list[int]) -> list``: a batch of samples at once, in that order;
    - ``order(seed: int, shuffle) -> Order``: an order of its own (a mixture, shards that are read one after another);
    - ``prefetch(indices: Tensor) -> None``: ``[k]`` int64, what this rank reads soon. Called in the process of the rank, not in
      its loader workers, and returns at once;
    - ``fingerprint() -> dict``: plain data (names, sizes, counts) that is equal where the data are, as far as can be told
      without reading them;
    - ``close()``.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def as_row_dataset(dataset: Any) -> Any:
    """A dict of tensors as a dataset of rows (a ``TensorDict``); any other dataset as it is.

    Raises:
        ConfigError: values that are no tensors, or tensors with different numbers of rows.
    """
    if not isinstance(dataset, Mapping) or is_tensordict(dataset):
        return dataset
    if dataset and all(number in dataset for number in range(len(dataset))):  # samples by number
        return dataset
    sizes = {name: len(value) if isinstance(value, Tensor) and value.ndim else None for name, value in dataset.items()}
    if None in sizes.values() or len(set(sizes.values())) != 1:
        shapes = {name: list(v.shape) if isinstance(v, Tensor) else type(v).__name__ for name, v in dataset.items()}
        raise ConfigError(
            "build_loader: a dict is a dataset of rows, so its values must be tensors with the same first size, got "
            f"{shapes}. Give tensors of equal length, or a list of samples"
        )
    from tensordict import TensorDict  # takes 0.3 s, and most datasets are none

    return TensorDict(dict(dataset), batch_size=[len(next(iter(dataset.values())))])


def fingerprint_dataset(dataset: Any) -> dict[str, Plain]:
    """Names, sizes and counts of ``dataset``: its own ``fingerprint()``, or what can be seen of a well-known kind."""
    if hasattr(dataset, "fingerprint"):
        return cast("dict[str, Plain]", dataset.fingerprint())
    seen: dict[str, Plain] = {"count": len(dataset)} if hasattr(dataset, "__len__") else {}
    if isinstance(dataset, Tensor):
        return {**seen, "dtype": str(dataset.dtype), "shape": list(dataset.shape)}
    if is_tensordict(dataset):
        tensors = dataset.items(include_nested=True, leaves_only=True)
        return {**seen, "tensors": {str(name): [str(leaf.dtype), *leaf.shape] for name, leaf in sorted(tensors, key=str)}}
    if is_hugging_face(dataset):
        return {**seen, "columns": {name: str(kind) for name, kind in sorted((dataset.features or {}).items())}}
    return seen


def hash_fingerprint(fingerprint: Mapping[str, Plain]) -> int:
    """A number for a fingerprint, below 2**52: equal where the fingerprints are."""
    return derive_seed(_canonical_text(dict(fingerprint))) % 2**52


def _canonical_text(value: Plain) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key!r}:{_canonical_text(value[key])}" for key in sorted(value)) + "}"
    return "[" + ",".join(map(_canonical_text, value)) + "]" if isinstance(value, list) else repr(value)


def is_hugging_face(dataset: Any) -> bool:
    """Whether ``dataset`` is a ``Dataset`` of Hugging Face's ``datasets``, without importing that."""
    return type(dataset).__module__.startswith("datasets.") and hasattr(dataset, "with_format")


def memory_map(path: str | Path, make: Callable[[], Any]) -> Any:
    """The ``TensorDict`` in ``path``, memory-mapped; made and written there first, once per node, if there is none.

    Tensors then take memory once per node and not once per rank and loader worker, and starting costs no reading.

    Args:
        path: of tensordict's own format; on a disk of the node.
        make: ``() -> TensorDict`` with a batch size ``[n]``; runs on local rank 0 only, and only if there is no folder.

    Collective: one exchange of JSON; all ranks must call it.

    Raises:
        ConfigError: ``make`` gives no TensorDict, or one without a first axis; on local rank 0, the others raise a PeerError.
    """
    from tensordict import TensorDict, TensorDictBase  # takes a second or two to import

    where = storage.real_path(path)
    with local_rank_zero_first("memory_map") as first:
        if first and not storage.exists(where):
            made = make()
            if not isinstance(made, TensorDictBase) or not made.batch_dims:
                raise ConfigError(f"memory_map: make must give a TensorDict with a batch size, got {type(made).__name__}")
            # Renamed when it is whole: a folder that is there can be read.
            part = where.with_name(f"{where.name}.tmp-{secrets.token_hex(4)}")
            storage.make_folders(part.parent)
            try:
                cast("Any", made).memmap(part)
                storage.rename(part, where)
            finally:
                if storage.exists(part):
                    storage.remove_folder(part)
        return TensorDict.load_memmap(where)
