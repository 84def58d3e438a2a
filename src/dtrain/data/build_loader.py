"""``build_loader``: build the loader of an indexed or iterable dataset."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh

from dtrain.batch import BatchSpec
from dtrain.data.batch_source import BatchSource, MapBatchSource
from dtrain.data.dataset import MapDataset, as_row_dataset, fingerprint_dataset, is_hugging_face
from dtrain.data.fetcher import Fetcher, OnError
from dtrain.data.iterable_batch_source import IterableBatchSource
from dtrain.data.loader import Loader
from dtrain.data.sample_transform import SampleTransform
from dtrain.data.sampling.block_shuffle import BlockShuffle
from dtrain.data.sampling.last_batch import LAST_BATCH_MODES, LastBatch
from dtrain.data.sampling.sample_order import ElasticSampler, SampleOrder
from dtrain.data.third_party import adapt_mosaic, as_iterable, is_mosaic
from dtrain.data.workers import WorkerConfig, workers_for_rank
from dtrain.dist.init import get_dist_info
from dtrain.dist.mesh import data_rank
from dtrain.errors import ConfigError
from dtrain.schedules.hyperparameter import UnitSchedule
from dtrain.typing import Batch, Schedule


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
        dataset: an indexed dataset with a length, equal on every rank: a map-style dataset, a tensor, a ``TensorDict``, a dict
            of tensors (a sample per row), a Hugging Face ``Dataset``, a ``ShardedDataset``, a ``Mixture``. Or an iterable
            dataset: every rank reads the whole stream and keeps its share. An iterable dataset with ``state_dict`` and
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
        >>> loader = dt.build_loader(list(range(10)), global_batch_size=4, seed=0, shuffle=False)
        >>> for batch in loader.until("1ep"):
        ...     print(batch.tolist())
        [0, 1, 2, 3]
        [4, 5, 6, 7]
        [8, 9]

    Raises:
        ConfigError: the dataset is empty, the batch size is below 1, ``last_batch="drop"`` leaves no batch, ``num_workers`` is
            negative, several ranks have no mesh, or ``shuffle`` is True for an iterable dataset.
    """
    dataset = as_row_dataset(dataset)
    if callable(global_batch_size):
        if isinstance(global_batch_size, UnitSchedule) and global_batch_size.unit != "ba":
            raise ConfigError(f"build_loader: global_batch_size must be a schedule of steps, got {global_batch_size.unit!r}")
        if last_batch != "short" or not is_indexed(dataset):
            raise ConfigError("build_loader: a schedule of global_batch_size needs an indexed dataset and last_batch='short'")
    else:
        _check_at_least(global_batch_size=(global_batch_size, 1))
    _check_at_least(num_workers=(num_workers, 0), prefetch_factor=(prefetch_factor, 1))
    for name, text, allowed in (("last_batch", last_batch, LAST_BATCH_MODES), ("on_error", on_error, ("raise", "skip"))):
        if text not in allowed:
            raise ConfigError(f"build_loader: {name} must be one of {', '.join(map(repr, allowed))}, got {text!r}")
    if not timeout_s >= 0:
        raise ConfigError(f"build_loader: timeout_s must be at least 0, got {timeout_s!r}")
    if mesh is None and get_dist_info().world_size > 1:
        raise ConfigError(
            f"build_loader: {get_dist_info().world_size} ranks need a mesh. Pass mesh=, so that the ranks share each batch"
        )
    target = None if device is None else torch.device(device)
    pin = target is not None and target.type == "cuda"
    args = _LoaderArgs(
        global_batch_size=global_batch_size,
        seed=seed,
        shuffle=shuffle,
        data_rank=(0, 1) if mesh is None else data_rank(mesh),
        workers=WorkerConfig(
            count=num_workers, timeout_s=timeout_s, prefetch_factor=prefetch_factor, start_method=start_method, pin_memory=pin
        ),
        collate=collate,
        transform=transform,
        last_batch=last_batch,
        on_error=on_error,
        batch_spec=batch_spec,
        pre_sharded=pre_sharded,
    )
    source: BatchSource = _map_batch_source(dataset, args) if is_indexed(dataset) else _iterable_batch_source(dataset, args)
    known_data = {} if pre_sharded else fingerprint_dataset(dataset)
    return Loader(
        source,
        seed=seed,
        fingerprint=known_data,
        allow_data_change=allow_data_change,
        device=target,
        prefetch_factor=prefetch_factor,
    )


def _check_at_least(**numbers: tuple[int, int]) -> None:
    for name, (value, least) in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"build_loader: {name} must be an integer of at least {least}, got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _LoaderArgs:
    """Checked arguments of ``build_loader``."""

    global_batch_size: int | Schedule
    seed: int
    shuffle: bool | BlockShuffle
    data_rank: tuple[int, int]
    workers: WorkerConfig
    collate: Callable[[list[Any]], Batch] | None
    transform: SampleTransform | None
    last_batch: LastBatch
    on_error: OnError
    batch_spec: BatchSpec | None
    pre_sharded: bool


def _map_batch_source(dataset: Any, args: _LoaderArgs) -> MapBatchSource:
    if args.pre_sharded:
        raise ConfigError("build_loader: pre_sharded needs an iterable dataset, but this dataset is indexed. Leave it out")
    size, batch = len(dataset), args.global_batch_size
    if size < 1:
        raise ConfigError("build_loader: the dataset has no samples")
    if is_hugging_face(dataset) and args.collate is None and dataset.format["type"] is None:
        dataset = dataset.with_format("torch")
    order = _sample_order(dataset, size, args)
    if args.last_batch == "drop" and not callable(batch) and order.size < batch:
        raise ConfigError(
            f"build_loader: {order.size} samples are less than one global batch of {batch}. Use last_batch='short'"
        )
    fetcher = Fetcher(dataset=dataset, seed=args.seed, collate=args.collate, transform=args.transform, on_error=args.on_error)
    return MapBatchSource(
        fetcher=fetcher,
        order=order,
        global_batch_size=batch,
        last_batch=args.last_batch,
        rank=args.data_rank[0],
        ranks=args.data_rank[1],
        workers=_divide_workers(args.workers),
        batch_spec=args.batch_spec,
    )


def _sample_order(dataset: Any, size: int, args: _LoaderArgs) -> SampleOrder:
    if hasattr(dataset, "order"):
        return cast("SampleOrder", dataset.order(args.seed, args.shuffle))
    if isinstance(args.shuffle, BlockShuffle):
        raise ConfigError(
            f"build_loader: a {type(dataset).__name__} has no shards to shuffle within. Use shuffle=True, or a ShardedDataset"
        )
    return ElasticSampler(size=size, seed=args.seed, shuffle=args.shuffle)


def _iterable_batch_source(dataset: Any, args: _LoaderArgs) -> IterableBatchSource:
    if not hasattr(dataset, "__iter__"):
        raise ConfigError(f"build_loader: dataset must have len and [], or be iterable, got a {type(dataset).__name__}")
    if args.shuffle is not False and not is_mosaic(dataset):
        raise ConfigError("build_loader: an iterable dataset has its own order. Use shuffle=False, and shuffle in the dataset")
    if args.last_batch == "pad":
        raise ConfigError("build_loader: last_batch='pad' needs an indexed dataset. Use last_batch='short' or 'drop'")
    (rank, ranks), batch = args.data_rank, args.global_batch_size
    assert not callable(batch), "build_loader refuses a schedule for an iterable dataset"
    adapter = adapt_mosaic(dataset, global_batch_size=batch, ranks=ranks) if is_mosaic(dataset) else None
    if args.pre_sharded and batch % ranks:
        raise ConfigError(
            f"build_loader: pre_sharded needs a global_batch_size that is divisible by {ranks} ranks, got {batch}"
        )
    return IterableBatchSource(
        dataset=as_iterable(dataset),
        seed=args.seed,
        global_batch_size=batch,
        last_batch=args.last_batch,
        rank=rank,
        ranks=ranks,
        workers=_divide_workers(args.workers, at_most=None if adapter else 1),
        pre_sharded=args.pre_sharded or adapter is not None,
        adapter=adapter,
        collate=args.collate,
        transform=args.transform,
        on_error=args.on_error,
        batch_spec=args.batch_spec,
    )


def _divide_workers(workers: WorkerConfig, *, at_most: int | None = None) -> WorkerConfig:
    """Return this rank's part of the node's workers; local rank 0 prints the division."""
    info = get_dist_info()
    ranks = info.local_world_size
    shares = [workers_for_rank(workers.count, rank, ranks) for rank in range(ranks)]
    shares = [share if at_most is None else min(share, at_most) for share in shares]
    if sum(shares) != workers.count or (ranks > 1 and workers.count):
        why = "" if at_most is None else ", since one worker per rank reads an iterable dataset in order"
        if info.local_rank == 0:
            print(
                f"dtrain: build_loader: {workers.count} loader workers for this node are {', '.join(map(str, shares))} for its "
                f"ranks{why}",
                file=sys.stderr,
            )
    return replace(workers, count=shares[info.local_rank])


def is_indexed(dataset: Any) -> bool:
    """Return True if the dataset returns samples by index, in any order."""
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and not is_mosaic(dataset)
