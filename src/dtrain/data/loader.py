"""``build_loader``: batches for this rank, with a position that is a few integers.

torch's ``DataLoader`` fetches and collates, in worker processes if wanted; which samples, and how far the run has come, is
decided here. The position counts samples that were *handed out*, so what workers have fetched ahead is not in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, Protocol

from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, default_collate

from dtrain import pulse
from dtrain.batch import BatchSpec, narrow_batch
from dtrain.clock import Duration
from dtrain.data.sampler import ElasticSampler, rank_share
from dtrain.dist.control import post_batch
from dtrain.dist.init import current
from dtrain.dist.mesh import data_rank
from dtrain.dist.rng import generator
from dtrain.errors import CheckpointMismatchError, ConfigError
from dtrain.types import Batch

Tail = Literal["short", "drop"]


class MapDataset(Protocol):
    """A dataset that is indexed: ``len(dataset)`` and ``dataset[i]`` (and, if it has it, ``__getitems__``)."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """How far a loader has come: whole epochs, samples of the current one (over all ranks); batches and samples in all."""

    epoch: int = 0
    samples: int = 0
    batches: int = 0
    total: int = 0


def _reached(goal: Duration, at: Position) -> bool:
    return {"ep": at.epoch, "ba": at.batches, "sp": at.total}[goal.unit] >= goal.value


class Loader:
    """Batches of one rank, in an order that depends on seed and epoch only. Made by ``build_loader``.

    Global batch ``k`` of an epoch is the same set of samples for every number of ranks; a rank gets a contiguous share of
    it. ``state_dict`` and ``load_state_dict`` carry the position, so a loader goes into ``extra`` of a checkpoint.
    """

    def __init__(
        self,
        dataset: MapDataset,
        *,
        sampler: ElasticSampler,
        global_batch_size: int,
        rank: int,
        ranks: int,
        workers: int,
        collate: Callable[[list[Any]], Batch],
        tail: Tail,
        batch_spec: BatchSpec | None = None,
    ) -> None:
        self.dataset = dataset
        self.sampler = sampler
        self.global_batch_size = global_batch_size
        self.rank, self.ranks = rank, ranks
        self.workers = workers
        self.collate = collate
        self.tail: Tail = tail
        self.batch_spec = batch_spec
        self.position = Position()

    @property
    def epoch_samples(self) -> int:
        """Samples that one epoch hands out over all ranks."""
        whole = len(self.dataset) // self.global_batch_size * self.global_batch_size
        return whole if self.tail == "drop" else len(self.dataset)

    def steps_per_epoch(self) -> int:
        """Batches in one whole epoch."""
        return -(-self.epoch_samples // self.global_batch_size)

    def total_steps(self, length: Duration | int | str) -> int:
        """Steps from the start of the run to ``length``, in epochs, batches or samples.

        Raises:
            ConfigError: a unit that a loader cannot count (tokens, seconds).
        """
        goal = Duration.parse(length)
        if goal.unit == "ba":
            return goal.value
        if goal.unit == "ep":
            return goal.value * self.steps_per_epoch()
        if goal.unit == "sp":
            epochs, rest = divmod(goal.value, self.epoch_samples)
            return epochs * self.steps_per_epoch() + -(-rest // self.global_batch_size)
        raise ConfigError(
            f"loader: cannot count steps in {goal.unit!r} ({goal}); give epochs (ep), batches (ba) or samples (sp)"
        )

    def until(self, length: Duration | int | str) -> Iterator[Batch]:
        """Batches from the current position up to ``length`` of the whole run; nothing when it is reached already.

        A batch counts as consumed when it is handed out: a checkpoint taken in the loop body resumes at the next one. While the
        body runs, a step learns from here whether the batch is the last of its epoch; so the clock's epochs are those of the
        loader that handed out a batch last, and a loop that fetches ahead of its steps sees them end early.

        Raises:
            ConfigError: a unit that a loader cannot count, or the position was moved while the loop was running.
        """
        goal = Duration.parse(length)
        self.total_steps(goal)  # refuses the unit
        while not _reached(goal, self.position):
            at = self.position
            for batch in self._fetch(at, goal):
                if self.position is not at:
                    raise ConfigError("loader: its position was moved in the middle of until(); run one such loop at a time")
                bounds = self._bounds(at)
                at = self.position = self._after(at)
                post_batch(epoch_ends=at.samples == 0, spare=None if self._has_share(*bounds) else batch)
                try:
                    yield self._trimmed(batch, *bounds)
                finally:
                    post_batch()

    def one_pass(self) -> Iterator[Batch]:
        """Every sample of an epoch once, from its start, without moving the position: for evaluation."""
        at = Position(epoch=self.position.epoch)
        for batch in self._fetch(at, Duration(at.epoch + 1, "ep")):
            yield self._trimmed(batch, *self._bounds(at))
            at = self._after(at)

    def state_dict(self) -> dict[str, int]:
        """The position, and what it is only meaningful with: dataset size, seed and shuffle."""
        return {**asdict(self.position), **self._identity()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue where ``state`` was taken. The global batch size, ranks and workers may differ.

        Raises:
            CheckpointMismatchError: another dataset size, seed or shuffle, under which the position means other samples.
        """
        for key, mine in self._identity().items():
            if state.get(key) != mine:
                raise CheckpointMismatchError(
                    f"loader: the saved position was in a dataset with {key}={state.get(key)}, this one has {key}={mine}; "
                    "resume with the same data, or leave the loader out of extra to start over"
                )
        at = Position(**{field.name: int(state[field.name]) for field in fields(Position)})
        # With another batch size and tail="drop" an epoch may be shorter than the position in it.
        over = at.samples >= self.epoch_samples
        self.position = replace(at, epoch=at.epoch + 1, samples=0) if over else at

    def _identity(self) -> dict[str, int]:
        return {"size": self.sampler.size, "seed": self.sampler.seed, "shuffle": int(self.sampler.shuffle)}

    def _bounds(self, at: Position) -> tuple[int, int]:
        """First and last position of the global batch at ``at``."""
        return at.samples, min(at.samples + self.global_batch_size, self.epoch_samples)

    def _after(self, at: Position) -> Position:
        start, stop = self._bounds(at)
        moved = replace(at, samples=stop, batches=at.batches + 1, total=at.total + stop - start)
        return replace(moved, epoch=at.epoch + 1, samples=0) if stop >= self.epoch_samples else moved

    def _plan(self, begin: Position, goal: Duration) -> Iterator[list[int]]:
        """Dataset indices of this rank's next batches, to the end of the epoch or to the goal."""
        at = begin
        while at.epoch == begin.epoch and not _reached(goal, at):
            start, stop = self._bounds(at)
            first, end = rank_share(start, stop, self.rank, self.ranks)
            # A rank without a sample fetches one all the same: an empty batch needs the shapes of a real one. Twice, since
            # BatchNorm cannot run on a single value.
            first, end, times = (first, end, 1) if end > first else (start, start + 1, 2)
            yield self.sampler.indices(at.epoch, first, end).tolist() * times
            at = self._after(at)

    def _has_share(self, start: int, stop: int) -> bool:
        first, end = rank_share(start, stop, self.rank, self.ranks)
        return end > first

    def _trimmed(self, batch: Batch, start: int, stop: int) -> Batch:
        return batch if self._has_share(start, stop) else narrow_batch(batch, 0, 0, self.batch_spec)

    def _fetch(self, begin: Position, goal: Duration) -> Iterator[Batch]:
        seeds = generator("cpu", self.sampler.seed, "workers", begin.epoch, begin.samples, self.rank)
        source: DataLoader[Any] = DataLoader(
            self.dataset,  # type: ignore[arg-type]
            batch_sampler=_Plan(lambda: self._plan(begin, goal)),
            num_workers=self.workers,
            collate_fn=self.collate,
            generator=seeds,  # its own: torch would draw from the global one, and a resumed run would differ
        )
        batches = iter(source)
        while True:
            pulse.beat("waiting for data")
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch

    def __repr__(self) -> str:
        at = self.position
        size = f"size={len(self.dataset)}, global_batch_size={self.global_batch_size}"
        return f"Loader({size}, epoch={at.epoch}, samples={at.samples})"


@dataclass(frozen=True, slots=True)
class _Plan:
    """A batch sampler for torch's ``DataLoader``: lists of indices."""

    make: Callable[[], Iterator[list[int]]]

    def __iter__(self) -> Iterator[list[int]]:
        return self.make()


def build_loader(
    dataset: MapDataset,
    *,
    mesh: DeviceMesh | None = None,
    global_batch_size: int,
    seed: int,
    shuffle: bool = True,
    workers: int = 0,
    collate: Callable[[list[Any]], Batch] | None = None,
    tail: Tail = "short",
    batch_spec: BatchSpec | None = None,
) -> Loader:
    """A ``Loader`` of this rank's share of ``dataset``.

    Args:
        dataset: indexed, with a length; the same on every rank.
        mesh: its data-parallel ranks share each batch, and those along ``cp`` and ``tp`` get the same; needed when there are
            several ranks.
        global_batch_size: samples per step over all ranks.
        seed: the order depends on it and on the epoch, and on nothing else.
        shuffle: False keeps the dataset's order.
        workers: loader processes per rank; 0 loads in the rank itself.
        collate: list of samples -> batch; by default torch's ``default_collate``.
        tail: what happens to a last global batch that is not full: ``"short"`` hands it out (ranks may get one sample fewer
            than others, or an empty batch, which ``microbatch_step`` weights correctly), ``"drop"`` leaves it out.
        batch_spec: where the batch axis of what ``collate`` returns is; None takes the first one.

    Raises:
        ConfigError: no sample, a batch size below 1, no whole batch with ``tail="drop"``, negative workers, several ranks
            without a mesh.
    """
    size = len(dataset)
    for name, value, least in (("global_batch_size", global_batch_size, 1), ("workers", workers, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"build_loader: {name} must be a whole number of at least {least}, got {value!r}")
    if tail not in ("short", "drop"):
        raise ConfigError(f"build_loader: tail must be 'short' or 'drop', got {tail!r}")
    if size < 1:
        raise ConfigError("build_loader: the dataset has no samples")
    if tail == "drop" and size < global_batch_size:
        raise ConfigError(
            f"build_loader: {size} samples are less than one global batch of {global_batch_size}; use tail='short'"
        )
    if mesh is None and current().world_size > 1:
        raise ConfigError(f"build_loader: {current().world_size} ranks need mesh=, or each of them would get all the data")
    rank, ranks = (0, 1) if mesh is None else data_rank(mesh)
    return Loader(
        dataset,
        sampler=ElasticSampler(size=size, seed=seed, shuffle=shuffle),
        global_batch_size=global_batch_size,
        rank=rank,
        ranks=ranks,
        workers=workers,
        collate=collate or default_collate,
        tail=tail,
        batch_spec=batch_spec,
    )
