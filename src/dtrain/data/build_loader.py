"""``build_loader``: the loader that fits a dataset."""

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
    """A ``Loader`` of this rank's share of ``dataset``.

    Args:
        dataset: indexed, with a length, and the same on every rank: a map-style dataset, a tensor, a ``TensorDict`` or a dict
            of tensors (a sample per row), a Hugging Face ``Dataset``, a ``ShardedDataset``, a ``Mixture``. Or one that can only
            be iterated: every rank reads it whole and keeps its share; with ``state_dict`` and ``load_state_dict`` it resumes
            at once, without them by reading what was consumed. A MosaicML ``StreamingDataset`` keeps its own order and state.
        mesh: its data-parallel ranks share each batch, and those along ``cp`` and ``tp`` get the same; needed when there are
            several ranks.
        global_batch_size: samples per step over all ranks; or a schedule of such, rounded down, of the number of the step.
        seed: the order depends on it and on the epoch, and on nothing else; so does what is drawn while samples are read.
        shuffle: False keeps the dataset's order; a ``BlockShuffle`` shuffles near by, for data in shards.
        num_workers: loader processes per node, divided over its ranks; 0 loads in the ranks themselves.
        collate: list of samples -> batch. By default tensors are stacked, and samples that are mappings of tensors become a
            ``TensorDict``.
        transform: ``(sample, generator) -> sample``, with a generator that depends on seed, epoch and sample only.
        last_batch: what happens to a last global batch that is not full: ``"short"`` hands it out (ranks may get one sample fewer
            than others, or an empty batch, which ``microbatch_step`` weights correctly), ``"drop"`` leaves it out, ``"pad"``
            fills it up with the samples that the epoch began with.
        on_error: of a sample that cannot be read: ``"raise"``, or ``"skip"`` it and list it in ``loader.skipped``.
            A shard that is missing or damaged always raises.
        batch_spec: where the batch axis of what ``collate`` returns is; None takes the first one.
        device: hand batches out on this device, copied while earlier ones are computed on; None leaves them on the host.
        prefetch_factor: batches that each worker, and the device, prepares in advance.
        timeout_s: seconds without a batch after which a worker counts as hanging; 0 waits for ever.
        start_method: of workers: ``"fork"``, ``"forkserver"``, ``"spawn"``; None is Python's own choice.
        pre_sharded: an iterable dataset that gives each rank samples of its own. Ranks may run out at different times. A
            resume, on as many ranks, reads what was consumed, as a checkpoint has one state for all ranks.
        allow_data_change: resume also when the dataset is another than the one of the checkpoint.

    Raises:
        ConfigError: no sample, a batch size below 1, no whole batch with ``last_batch="drop"``, negative workers, several ranks
            without a mesh, a shuffle of what can only be iterated.
    """
    dataset = as_row_dataset(dataset)
    if callable(global_batch_size):
        if isinstance(global_batch_size, UnitSchedule) and global_batch_size.unit != "ba":
            raise ConfigError(f"build_loader: global_batch_size is a schedule of steps, got one of {global_batch_size.unit!r}")
        if last_batch != "short" or not is_indexed(dataset):
            raise ConfigError(
                "build_loader: a schedule of global_batch_size needs a dataset that is indexed, and last_batch='short'"
            )
    else:
        _check_at_least(global_batch_size=(global_batch_size, 1))
    _check_at_least(num_workers=(num_workers, 0), prefetch_factor=(prefetch_factor, 1))
    for name, text, known in (("last_batch", last_batch, LAST_BATCH_MODES), ("on_error", on_error, ("raise", "skip"))):
        if text not in known:
            raise ConfigError(f"build_loader: {name} must be one of {', '.join(map(repr, known))}, got {text!r}")
    if not timeout_s >= 0:
        raise ConfigError(f"build_loader: timeout_s must be at least 0, got {timeout_s!r}")
    if mesh is None and get_dist_info().world_size > 1:
        raise ConfigError(
            f"build_loader: {get_dist_info().world_size} ranks need mesh=, or each of them would get all the data"
        )
    target = None if device is None else torch.device(device)
    pin = target is not None and target.type == "cuda"
    plan = _LoaderArgs(
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
    feed: BatchSource = _map_batch_source(dataset, plan) if is_indexed(dataset) else _iterable_batch_source(dataset, plan)
    known_data = {} if pre_sharded else fingerprint_dataset(dataset)
    return Loader(
        feed,
        seed=seed,
        fingerprint=known_data,
        allow_data_change=allow_data_change,
        device=target,
        prefetch_factor=prefetch_factor,
    )


def _check_at_least(**numbers: tuple[int, int]) -> None:
    for name, (value, least) in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"build_loader: {name} must be a whole number of at least {least}, got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _LoaderArgs:
    """The arguments of ``build_loader``, checked."""

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


def _map_batch_source(dataset: Any, plan: _LoaderArgs) -> MapBatchSource:
    if plan.pre_sharded:
        raise ConfigError("build_loader: pre_sharded is for datasets that can only be iterated; this one has indices")
    size, batch = len(dataset), plan.global_batch_size
    if size < 1:
        raise ConfigError("build_loader: the dataset has no samples")
    if is_hugging_face(dataset) and plan.collate is None and dataset.format["type"] is None:
        dataset = dataset.with_format("torch")
    order = _sample_order(dataset, size, plan)
    if plan.last_batch == "drop" and not callable(batch) and order.size < batch:
        raise ConfigError(
            f"build_loader: {order.size} samples are less than one global batch of {batch}; use last_batch='short'"
        )
    reader = Fetcher(dataset=dataset, seed=plan.seed, collate=plan.collate, transform=plan.transform, on_error=plan.on_error)
    return MapBatchSource(
        fetcher=reader,
        order=order,
        global_batch_size=batch,
        last_batch=plan.last_batch,
        rank=plan.data_rank[0],
        ranks=plan.data_rank[1],
        workers=_divide_workers(plan.workers),
        batch_spec=plan.batch_spec,
    )


def _sample_order(dataset: Any, size: int, plan: _LoaderArgs) -> SampleOrder:
    if hasattr(dataset, "order"):
        return cast("SampleOrder", dataset.order(plan.seed, plan.shuffle))
    if isinstance(plan.shuffle, BlockShuffle):
        raise ConfigError(
            f"build_loader: a {type(dataset).__name__} has no shards to shuffle within; give shuffle=True, or a ShardedDataset"
        )
    return ElasticSampler(size=size, seed=plan.seed, shuffle=plan.shuffle)


def _iterable_batch_source(dataset: Any, plan: _LoaderArgs) -> IterableBatchSource:
    if not hasattr(dataset, "__iter__"):
        raise ConfigError(f"build_loader: a {type(dataset).__name__} can neither be indexed (len and []) nor iterated")
    if plan.shuffle is not False and not is_mosaic(dataset):
        raise ConfigError("build_loader: an iterable dataset has its own order; give shuffle=False, and shuffle in the dataset")
    if plan.last_batch == "pad":
        raise ConfigError("build_loader: last_batch='pad' needs a dataset that is indexed; give last_batch='short' or 'drop'")
    (rank, ranks), batch = plan.data_rank, plan.global_batch_size
    assert not callable(batch), "refused before"
    own = adapt_mosaic(dataset, global_batch_size=batch, ranks=ranks) if is_mosaic(dataset) else None
    if plan.pre_sharded and batch % ranks:
        raise ConfigError(f"build_loader: pre_sharded needs a global_batch_size that {ranks} ranks can divide, got {batch}")
    return IterableBatchSource(
        dataset=as_iterable(dataset),
        seed=plan.seed,
        global_batch_size=batch,
        last_batch=plan.last_batch,
        rank=rank,
        ranks=ranks,
        workers=_divide_workers(plan.workers, at_most=None if own else 1),
        pre_sharded=plan.pre_sharded or own is not None,
        adapter=own,
        collate=plan.collate,
        transform=plan.transform,
        on_error=plan.on_error,
        batch_spec=plan.batch_spec,
    )


def _divide_workers(workers: WorkerConfig, *, at_most: int | None = None) -> WorkerConfig:
    """This rank's part of a node's workers, said once per node."""
    info = get_dist_info()
    ranks = info.local_world_size
    shares = [workers_for_rank(workers.count, rank, ranks) for rank in range(ranks)]
    shares = [share if at_most is None else min(share, at_most) for share in shares]
    if sum(shares) != workers.count or (ranks > 1 and workers.count):
        why = "" if at_most is None else ", since what can only be iterated is read in one order"
        if info.local_rank == 0:
            print(
                f"dtrain: build_loader: {workers.count} loader workers for this node are {', '.join(map(str, shares))} for its "
                f"ranks{why}",
                file=sys.stderr,
            )
    return replace(workers, count=shares[info.local_rank])


def is_indexed(dataset: Any) -> bool:
    """Whether samples can be had by number, in any order."""
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and not is_mosaic(dataset)
