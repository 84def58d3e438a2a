"""``build_loader``: the loader that fits a dataset."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh

from dtrain.batch import BatchSpec
from dtrain.data.dataset import MapDataset, fingerprint_of, is_hugging_face, rows_of
from dtrain.data.loading.feed import Feed, MapFeed
from dtrain.data.loading.foreign import as_iterable, checked_mosaic, is_mosaic
from dtrain.data.loading.iterable_feed import IterableFeed
from dtrain.data.loading.loader import Loader
from dtrain.data.loading.reading import OnError, Reader
from dtrain.data.loading.workers import Workers, share_of_workers
from dtrain.data.order.base import Order
from dtrain.data.order.blocks import BlockShuffle
from dtrain.data.order.sampler import ElasticSampler
from dtrain.data.order.tails import TAILS, Tail
from dtrain.data.transforms import SampleTransform
from dtrain.dist.init import current
from dtrain.dist.mesh import data_rank
from dtrain.errors import ConfigError
from dtrain.schedules.hyper import Measured
from dtrain.types import Batch, Schedule


def build_loader(
    dataset: MapDataset | Iterable[Any],
    *,
    mesh: DeviceMesh | None = None,
    global_batch_size: int | Schedule,
    seed: int,
    shuffle: bool | BlockShuffle = True,
    workers: int = 0,
    collate: Callable[[list[Any]], Batch] | None = None,
    transform: SampleTransform | None = None,
    tail: Tail = "short",
    on_error: OnError = "raise",
    batch_spec: BatchSpec | None = None,
    device: torch.device | str | None = None,
    prefetch: int = 2,
    timeout_s: float = 300.0,
    start_method: str | None = None,
    already_split: bool = False,
    data_may_change: bool = False,
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
        workers: loader processes per node, divided over its ranks; 0 loads in the ranks themselves.
        collate: list of samples -> batch. By default tensors are stacked, and samples that are mappings of tensors become a
            ``TensorDict``.
        transform: ``(sample, generator) -> sample``, with a generator that depends on seed, epoch and sample only.
        tail: what happens to a last global batch that is not full: ``"short"`` hands it out (ranks may get one sample fewer
            than others, or an empty batch, which ``microbatch_step`` weights correctly), ``"drop"`` leaves it out, ``"pad"``
            fills it up with the samples that the epoch began with.
        on_error: of a sample that cannot be read: ``"raise"``, or ``"skip"`` it and list it in ``loader.unreadable``.
            A shard that is missing or damaged always raises.
        batch_spec: where the batch axis of what ``collate`` returns is; None takes the first one.
        device: hand batches out on this device, copied while earlier ones are computed on; None leaves them on the host.
        prefetch: batches that each worker, and the device, prepares in advance.
        timeout_s: seconds without a batch after which a worker counts as hanging; 0 waits for ever.
        start_method: of workers: ``"fork"``, ``"forkserver"``, ``"spawn"``; None is Python's own choice.
        already_split: an iterable dataset that gives each rank samples of its own. Ranks may run out at different times. A
            resume, on as many ranks, reads what was consumed, as a checkpoint has one state for all ranks.
        data_may_change: resume also when the dataset is another than the one of the checkpoint.

    Raises:
        ConfigError: no sample, a batch size below 1, no whole batch with ``tail="drop"``, negative workers, several ranks
            without a mesh, a shuffle of what can only be iterated.
    """
    dataset = rows_of(dataset)
    if callable(global_batch_size):
        if isinstance(global_batch_size, Measured) and global_batch_size.unit != "ba":
            raise ConfigError(f"build_loader: global_batch_size is a schedule of steps, got one of {global_batch_size.unit!r}")
        if tail != "short" or not is_indexed(dataset):
            raise ConfigError("build_loader: a schedule of global_batch_size needs a dataset that is indexed, and tail='short'")
    else:
        _check(global_batch_size=(global_batch_size, 1))
    _check(workers=(workers, 0), prefetch=(prefetch, 1))
    for name, text, known in (("tail", tail, TAILS), ("on_error", on_error, ("raise", "skip"))):
        if text not in known:
            raise ConfigError(f"build_loader: {name} must be one of {', '.join(map(repr, known))}, got {text!r}")
    if not timeout_s >= 0:
        raise ConfigError(f"build_loader: timeout_s must be at least 0, got {timeout_s!r}")
    if mesh is None and current().world_size > 1:
        raise ConfigError(f"build_loader: {current().world_size} ranks need mesh=, or each of them would get all the data")
    target = None if device is None else torch.device(device)
    pin = target is not None and target.type == "cuda"
    plan = _Plan(
        global_batch_size=global_batch_size,
        seed=seed,
        shuffle=shuffle,
        place=(0, 1) if mesh is None else data_rank(mesh),
        workers=Workers(count=workers, timeout_s=timeout_s, ahead=prefetch, start_method=start_method, pin=pin),
        collate=collate,
        transform=transform,
        tail=tail,
        on_error=on_error,
        batch_spec=batch_spec,
        already_split=already_split,
    )
    feed: Feed = _map_feed(dataset, plan) if is_indexed(dataset) else _iterable_feed(dataset, plan)
    known_data = {} if already_split else fingerprint_of(dataset)
    return Loader(feed, seed=seed, fingerprint=known_data, may_change=data_may_change, device=target, ahead=prefetch)


def _check(**numbers: tuple[int, int]) -> None:
    for name, (value, least) in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"build_loader: {name} must be a whole number of at least {least}, got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """The arguments of ``build_loader``, checked."""

    global_batch_size: int | Schedule
    seed: int
    shuffle: bool | BlockShuffle
    place: tuple[int, int]
    workers: Workers
    collate: Callable[[list[Any]], Batch] | None
    transform: SampleTransform | None
    tail: Tail
    on_error: OnError
    batch_spec: BatchSpec | None
    already_split: bool


def _map_feed(dataset: Any, plan: _Plan) -> MapFeed:
    if plan.already_split:
        raise ConfigError("build_loader: already_split is for datasets that can only be iterated; this one has indices")
    size, batch = len(dataset), plan.global_batch_size
    if size < 1:
        raise ConfigError("build_loader: the dataset has no samples")
    if is_hugging_face(dataset) and plan.collate is None and dataset.format["type"] is None:
        dataset = dataset.with_format("torch")
    order = _order(dataset, size, plan)
    if plan.tail == "drop" and not callable(batch) and order.size < batch:
        raise ConfigError(f"build_loader: {order.size} samples are less than one global batch of {batch}; use tail='short'")
    reader = Reader(dataset=dataset, seed=plan.seed, collate=plan.collate, transform=plan.transform, on_error=plan.on_error)
    return MapFeed(
        reader=reader,
        order=order,
        global_batch_size=batch,
        tail=plan.tail,
        rank=plan.place[0],
        ranks=plan.place[1],
        workers=_divided(plan.workers),
        batch_spec=plan.batch_spec,
    )


def _order(dataset: Any, size: int, plan: _Plan) -> Order:
    if hasattr(dataset, "order"):
        return cast("Order", dataset.order(plan.seed, plan.shuffle))
    if isinstance(plan.shuffle, BlockShuffle):
        raise ConfigError(
            f"build_loader: a {type(dataset).__name__} has no shards to shuffle within; give shuffle=True, or a ShardedDataset"
        )
    return ElasticSampler(size=size, seed=plan.seed, shuffle=plan.shuffle)


def _iterable_feed(dataset: Any, plan: _Plan) -> IterableFeed:
    if not hasattr(dataset, "__iter__"):
        raise ConfigError(f"build_loader: a {type(dataset).__name__} can neither be indexed (len and []) nor iterated")
    if plan.shuffle is not False and not is_mosaic(dataset):
        raise ConfigError("build_loader: an iterable dataset has its own order; give shuffle=False, and shuffle in the dataset")
    if plan.tail == "pad":
        raise ConfigError("build_loader: tail='pad' needs a dataset that is indexed; give tail='short' or 'drop'")
    (rank, ranks), batch = plan.place, plan.global_batch_size
    assert not callable(batch), "refused before"
    own = checked_mosaic(dataset, global_batch_size=batch, ranks=ranks) if is_mosaic(dataset) else None
    if plan.already_split and batch % ranks:
        raise ConfigError(f"build_loader: already_split needs a global_batch_size that {ranks} ranks can divide, got {batch}")
    return IterableFeed(
        dataset=as_iterable(dataset),
        seed=plan.seed,
        global_batch_size=batch,
        tail=plan.tail,
        rank=rank,
        ranks=ranks,
        workers=_divided(plan.workers, at_most=None if own else 1),
        already_split=plan.already_split or own is not None,
        own_state=own,
        collate=plan.collate,
        transform=plan.transform,
        on_error=plan.on_error,
        batch_spec=plan.batch_spec,
    )


def _divided(workers: Workers, *, at_most: int | None = None) -> Workers:
    """This rank's part of a node's workers, said once per node."""
    info = current()
    ranks = info.local_world_size
    shares = [share_of_workers(workers.count, rank, ranks) for rank in range(ranks)]
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
