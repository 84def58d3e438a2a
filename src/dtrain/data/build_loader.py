"""``build_loader``: build the loader of an indexed or iterable dataset."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, Dataset, Sampler

from dtrain.arguments import check_choice, check_int, check_number, explain_arguments
from dtrain.data.batch import BatchSpec
from dtrain.data.batch_source import BatchOptions, IterableBatchSource, MapBatchSource
from dtrain.data.block_shuffle import BlockShuffle
from dtrain.data.dataset import (
    MapDataset,
    adapt_mosaic,
    as_iterable,
    as_row_dataset,
    fingerprint_dataset,
    is_hugging_face,
    is_mosaic,
)
from dtrain.data.fetcher import ON_ERROR_MODES, Fetcher, OnError, SampleTransform
from dtrain.data.loader import Loader
from dtrain.data.position import LAST_BATCH_MODES, LastBatch
from dtrain.data.sample_order import dataset_order
from dtrain.data.workers import WorkerConfig, workers_for_rank
from dtrain.device import is_accelerator
from dtrain.dist.init import get_dist_info
from dtrain.dist.mesh import data_rank
from dtrain.errors import ConfigError
from dtrain.schedules.hyperparameters import UnitSchedule
from dtrain.typing import Batch, Schedule


@explain_arguments
def build_loader(
    dataset: MapDataset | Iterable[Any],
    *,
    mesh: DeviceMesh | None = None,
    global_batch_size: int | Schedule,
    seed: int,
    shuffle: bool | BlockShuffle = True,
    num_workers: int = 0,
    collate: Callable[[list[Any]], Batch] | None = None,
    transform: SampleTransform | None = None,
    last_batch: LastBatch = "short",
    on_error: OnError = "raise",
    batch_spec: BatchSpec | None = None,
    device: torch.device | str | None = None,
    prefetch_factor: int = 2,
    timeout_s: float = 300.0,
    start_method: str | None = None,
    pre_sharded: bool = False,
    allow_data_change: bool = False,
) -> Loader:
    """Build the loader of this rank's share of ``dataset``.

    Args:
        dataset: an indexed dataset with a length, equal on every rank: a map-style dataset, a Hugging Face ``Dataset``, a
            ``ShardedDataset``, one of ``mix``. Tensors and arrays have a sample per row: a tensor, an array, a tuple or dict of
            them, a ``TensorDataset``, a ``TensorDict``; without ``collate`` and ``transform`` a batch is read at once. Or an
            iterable dataset: every rank reads the whole stream and keeps its share. An iterable dataset with ``state_dict`` and
            ``load_state_dict`` resumes at once, without them by reading the consumed samples again. A MosaicML
            ``StreamingDataset`` keeps its own order and state.
        mesh: device mesh; its data-parallel ranks share each batch, ranks along ``cp`` and ``tp`` receive the same samples.
            Required on several ranks.
        global_batch_size: samples per step over all ranks; or a schedule of the number of the step, rounded down.
        seed: seed of the order and of random numbers drawn while samples are read. Both depend on the seed and epoch only.
        shuffle: if False, the dataset's order; a ``BlockShuffle`` shuffles locally, for data in shards.
        num_workers: loader processes per node, divided over the ranks of the node; 0 loads in the ranks themselves.
        collate: list of samples -> batch; None stacks tensors, and mappings of tensors become a ``TensorDict``.
        transform: ``(sample, generator) -> sample``, with a generator that depends on seed, epoch and sample only.
        last_batch: treatment of a last global batch that is not full: ``"short"`` issues it (a rank may have one sample fewer
            than another rank, or an empty batch, which ``microbatch_step`` weights correctly), ``"drop"`` leaves it out,
            ``"pad"`` fills it up with the first samples of the epoch.
        on_error: treatment of a sample that cannot be read: ``"raise"``, or ``"skip"`` and list it in ``loader.skipped``.
            A missing or damaged shard always raises.
        batch_spec: position of the batch axis in the result of ``collate``; None uses the first axis.
        device: device of the batches, copied while earlier batches are in use; None leaves the batches on the host.
        prefetch_factor: batches that each worker, and the device, prepares in advance.
        timeout_s: seconds without a batch after which a worker counts as hung; 0 disables the limit.
        start_method: start method of the workers: ``"fork"``, ``"forkserver"``, ``"spawn"``; None uses Python's default.
        pre_sharded: if True, an iterable dataset gives each rank different samples, and ranks may run out at different times.
            A resume needs the same number of ranks, and reads the consumed samples again, since a checkpoint has one state for
            all ranks.
        allow_data_change: if True, a resume accepts another dataset than the dataset of the checkpoint.

    Example:
        >>> import dtrain as dt
        >>> loader = dt.build_loader(
        ...     list(range(10)), global_batch_size=4, seed=0, shuffle=False
        ... )
        >>> for batch in loader.until("1ep"):
        ...     print(batch.tolist())
        [0, 1, 2, 3]
        [4, 5, 6, 7]
        [8, 9]

    Raises:
        ConfigError: the dataset is empty, or it is a loader or sampler, the batch size is below 1, ``last_batch="drop"`` leaves
            no batch, ``num_workers`` is negative, several ranks have no mesh, or ``shuffle`` is True for an iterable dataset.
    """
    _refuse_batches(dataset)
    dataset = as_row_dataset(dataset)
    check_int("build_loader", "num_workers", num_workers, minimum=0)
    check_int("build_loader", "prefetch_factor", prefetch_factor)
    check_number("build_loader", "timeout_s", timeout_s, minimum=0)
    check_choice("build_loader", "last_batch", last_batch, LAST_BATCH_MODES)
    check_choice("build_loader", "on_error", on_error, ON_ERROR_MODES)
    info = get_dist_info()
    if mesh is None and info.world_size > 1:
        raise ConfigError(f"build_loader: {info.world_size} ranks need a mesh. Pass mesh=, so that the ranks share each batch.")
    rank, ranks = (0, 1) if mesh is None else data_rank(mesh)
    target = None if device is None else torch.device(device)
    fetcher = Fetcher(dataset=dataset, seed=seed, collate=collate, transform=transform, on_error=on_error)
    options = BatchOptions(
        global_batch_size=_check_batch_size(global_batch_size, dataset, last_batch),
        last_batch=last_batch,
        rank=rank,
        ranks=ranks,
        workers=WorkerConfig(
            count=num_workers,
            timeout_s=timeout_s,
            prefetch_factor=prefetch_factor,
            start_method=start_method,
            pin_memory=target is not None and is_accelerator(target),
        ),
        batch_spec=batch_spec,
    )
    build_source = _map_batch_source if is_indexed(dataset) else _iterable_batch_source
    return Loader(
        build_source(fetcher, options, shuffle, pre_sharded),
        seed=seed,
        fingerprint={} if pre_sharded else fingerprint_dataset(dataset),
        allow_data_change=allow_data_change,
        device=target,
        prefetch_factor=prefetch_factor,
    )


def _refuse_batches(dataset: Any) -> None:
    """Raise ConfigError for an object that makes batches, which the loader would collate once more, and for a sampler."""
    kind = type(dataset)
    if isinstance(dataset, Sampler):
        raise ConfigError(
            f"build_loader: dataset must hold samples, got the sampler {kind.__name__}. "
            "Give the dataset, since the loader has an order of its own."
        )
    node = getattr(dataset, "root", dataset)
    is_dataset = isinstance(dataset, Dataset) or hasattr(dataset, "__getitem__")
    # A loader of torch or a wrapper around one, its iterator, a loader of this library, or a node of torchdata.
    if (
        isinstance(dataset, DataLoader | Loader)
        or kind.__module__.endswith("data.dataloader")
        or (not is_dataset and hasattr(dataset, "collate_fn") and hasattr(dataset, "batch_size"))
        or (type(node).__module__, type(node).__name__) == ("torchdata.nodes.batch", "Batcher")
    ):
        raise ConfigError(
            f"build_loader: dataset must hold samples, got batches of a {kind.__name__}. "
            "Give the dataset from which they are made, and their size over all ranks as global_batch_size."
        )


def _check_batch_size(size: int | Schedule, dataset: Any, last_batch: LastBatch) -> int | Schedule:
    if not callable(size):
        return check_int("build_loader", "global_batch_size", size)
    if isinstance(size, UnitSchedule) and size.unit != "ba":
        raise ConfigError(
            f"build_loader: global_batch_size must be a schedule of steps, got {size.unit!r}. "
            "Write it as a function of batches (ba)."
        )
    if last_batch != "short" or not is_indexed(dataset):
        raise ConfigError(
            "build_loader: a schedule of global_batch_size needs an indexed dataset and last_batch='short'. "
            "Pass last_batch='short', and a dataset with len() and []."
        )
    return size


def _map_batch_source(
    fetcher: Fetcher, options: BatchOptions, shuffle: bool | BlockShuffle, pre_sharded: bool
) -> MapBatchSource:
    if pre_sharded:
        raise ConfigError("build_loader: pre_sharded needs an iterable dataset, but this dataset is indexed. Leave it out.")
    dataset, batch = fetcher.dataset, options.global_batch_size
    size = len(dataset)
    if size < 1:
        raise ConfigError("build_loader: the dataset has no samples. Check the path or the filter that the dataset reads with.")
    if isinstance(shuffle, BlockShuffle) and not hasattr(dataset, "order"):
        raise ConfigError(
            f"build_loader: a {type(dataset).__name__} has no shards to shuffle within. Use shuffle=True, or a ShardedDataset."
        )
    if is_hugging_face(dataset) and fetcher.collate is None and dataset.format["type"] is None:
        fetcher = replace(fetcher, dataset=dataset.with_format("torch"))
    order = dataset_order(dataset, size, fetcher.seed, shuffle)
    if options.last_batch == "drop" and not callable(batch) and order.size < batch:
        raise ConfigError(
            f"build_loader: {order.size} samples are less than one global batch of {batch}. Use last_batch='short'."
        )
    return MapBatchSource(fetcher=fetcher, order=order, options=_divide_workers(options))


def _iterable_batch_source(
    fetcher: Fetcher, options: BatchOptions, shuffle: bool | BlockShuffle, pre_sharded: bool
) -> IterableBatchSource:
    dataset, ranks = fetcher.dataset, options.ranks
    if not hasattr(dataset, "__iter__"):
        raise ConfigError(
            f"build_loader: dataset must have len and [], or be iterable, got a {type(dataset).__name__}. "
            "Define __len__ and __getitem__, or __iter__."
        )
    if shuffle is not False and not is_mosaic(dataset):
        raise ConfigError("build_loader: an iterable dataset has its own order. Use shuffle=False, and shuffle in the dataset.")
    if options.last_batch == "pad":
        raise ConfigError("build_loader: last_batch='pad' needs an indexed dataset. Use last_batch='short' or 'drop'.")
    batch = cast("int", options.global_batch_size)
    adapter = adapt_mosaic(dataset, global_batch_size=batch, ranks=ranks) if is_mosaic(dataset) else None
    if pre_sharded and batch % ranks:
        raise ConfigError(
            f"build_loader: pre_sharded needs a global_batch_size that is divisible by {ranks} ranks, got {batch}. "
            f"Pass a multiple of {ranks} as global_batch_size."
        )
    return IterableBatchSource(
        fetcher=replace(fetcher, dataset=as_iterable(dataset)),
        options=_divide_workers(options, at_most=None if adapter else 1),
        pre_sharded=pre_sharded or adapter is not None,
        adapter=adapter,
    )


def _divide_workers(options: BatchOptions, *, at_most: int | None = None) -> BatchOptions:
    """Replace the node's workers by this rank's part; local rank 0 prints the division."""
    info, total = get_dist_info(), options.workers.count
    shares = [workers_for_rank(total, rank, info.local_world_size) for rank in range(info.local_world_size)]
    shares = [share if at_most is None else min(share, at_most) for share in shares]
    if info.local_rank == 0 and (sum(shares) != total or (len(shares) > 1 and total)):
        why = "" if at_most is None else ", since one worker per rank reads an iterable dataset in order"
        print(
            f"dtrain: build_loader: {total} loader workers for this node are {', '.join(map(str, shares))} for its ranks{why}",
            file=sys.stderr,
        )
    return replace(options, workers=replace(options.workers, count=shares[info.local_rank]))


def is_indexed(dataset: Any) -> bool:
    """Return True if the dataset returns samples by index, in any order."""
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and not is_mosaic(dataset)
