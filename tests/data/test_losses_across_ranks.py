"""Ranks and their loaders: all ranks learn of an error on one rank, and training sees the same data on any number of ranks."""

import pytest
import torch

import dtrain as dt
from dtrain.data.sample_order import ElasticSampler
from samples import Numbers, Troubled, fail, hang


def said(fn, *args) -> str:
    try:
        fn(*args)
    except dt.errors.DtrainError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def trained(loader: dt.data.Loader, mesh, length: str | None = "1ep") -> list[float]:
    torch.manual_seed(0)
    model = dt.shard_model(torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double(), mesh)

    def loss_fn(model, batch):
        x = batch[:, None].double() / 100
        return dt.LossSum(total=((model(x) - x.sin()) ** 2).sum(), weight=len(batch))

    step = dt.compose_step(loss_fn, [])
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for batch in loader if length is None else loader.until(length):
        state, metrics = step(state, batch)
        losses.append(dt.reduce_metrics(metrics)["loss"])
    return losses


def with_trouble_on_rank_1(kind: str, workers: int, length: str | None = "1ep") -> str:
    mesh = dt.build_mesh()
    trouble = {"fails": fail, "hangs": hang}[kind]
    dataset = Troubled(64, 21 if dt.dist.data_rank(mesh)[0] == 1 else -1, trouble)
    options = {
        "global_batch_size": 8,
        "seed": 0,
        "shuffle": False,
        "num_workers": workers,
        "timeout_s": 5.0,
        "start_method": "fork",
    }
    loader = dt.build_loader(dataset, mesh=mesh, **options)
    return said(trained, loader, mesh, length)


@pytest.mark.parametrize(
    ("kind", "workers", "length"), [("fails", 0, "1ep"), ("fails", 0, None), ("fails", 2, "1ep"), ("hangs", 2, "1ep")]
)
def test_unreadable_samples_on_one_rank_stop_all_ranks(ranks, kind, workers, length):
    first, second = ranks(2).run(with_trouble_on_rank_1, kind, workers, length)
    assert first.startswith("PeerError: step: rank 1 could not use its batch")
    assert second.startswith(
        "DataError: loader: sample 21: ValueError" if kind == "fails" else "DataError: loader: no batch from"
    )


def trained_around_trouble(within: bool) -> list[list[int]]:
    mesh = dt.build_mesh()
    rank, count = dt.dist.data_rank(mesh)
    dataset = Troubled(32, 14 if rank == count - 1 else -1, fail)
    loader = dt.build_loader(dataset, mesh=mesh, global_batch_size=8, seed=0, shuffle=False)
    model = dt.shard_model(torch.nn.Linear(1, 1), mesh, strategy="replicate")
    step = dt.compose_step(lambda model, batch: dt.LossSum(total=model(batch[:, None] / 1.0).sum(), weight=len(batch)))
    state, seen, done = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1), loader=loader), list[list[int]](), False
    while not done:
        batches = loader.until("1ep")
        try:
            while (batch := next(batches, None)) is not None:
                try:
                    state, _ = step(state, batch)
                    seen.append(batch.tolist())
                except (dt.errors.DataError, dt.errors.PeerError):
                    if not within:
                        raise
                    loader.skip(4)
            done = True
        except (dt.errors.DataError, dt.errors.PeerError):
            loader.skip(4)
    return seen


@pytest.mark.parametrize("within", [False, True], ids=["new loop", "in the loop"])
def test_skip_after_a_batch_that_one_rank_could_not_read_begins_with_it_on_all_ranks(ranks, within):
    shares = ranks(2).run(trained_around_trouble, within)
    assert [first + second for first, second in zip(*shares, strict=True)] == [
        [*range(8)],
        [*range(12, 20)],
        [*range(20, 28)],
        [*range(28, 32)],
    ]


def evaluated_with_trouble() -> str:
    mesh = dt.build_mesh()
    dataset = Troubled(64, 21 if dt.dist.data_rank(mesh)[0] == 1 else -1, fail)
    loader = dt.build_loader(dataset, mesh=mesh, global_batch_size=8, seed=0, shuffle=False)
    return said(
        dt.evaluate, torch.nn.Linear(1, 1), loader, lambda model, batch: dt.LossSum(total=batch.sum() * 1.0, weight=len(batch))
    )


def test_unreadable_samples_in_an_evaluation_stop_all_ranks(ranks):
    first, second = ranks(2).run(evaluated_with_trouble)
    assert "rank 1 (1 of 2 ranks) cannot read or count its batch." in first
    assert second.startswith("DataError: loader: sample 21: ValueError")


def at_other_places(what: str) -> str:
    mesh = dt.build_mesh()
    other = dt.dist.data_rank(mesh)[0] == 1
    seed, size, batch = (int(what == "seed" and other), 64 + 8 * (what == "size" and other), 8)
    loader = dt.build_loader(Numbers(size), mesh=mesh, global_batch_size=batch, seed=seed)
    if what == "position" and other:
        loader.skip(8)
    return said(trained, loader, mesh)


@pytest.mark.parametrize("what", ["seed", "size", "position"])
def test_first_step_detects_ranks_at_different_data_positions(ranks, what):
    for text in ranks(2).run(at_other_places, what):
        problem = "the dataset of rank 1 has other samples" if what == "size" else "rank 1 is at another place in its data"
        assert text.startswith(f"StepError: step: {problem} than ")


def losses(workers: int) -> list[float]:
    mesh = dt.build_mesh()
    loader = dt.build_loader(Numbers(45), mesh=mesh, global_batch_size=8, seed=3, num_workers=workers, start_method="fork")
    return trained(loader, mesh, "3ep")


def test_losses_are_equal_for_every_number_of_ranks(ranks):
    """Float64, so only the order of sums differs: 1e-12 relative."""
    alone = ranks(1).run(losses, 0)[0]
    assert len(alone) == 18
    for world, workers in ((2, 2), (4, 0)):
        torch.testing.assert_close(ranks(world).run(losses, workers)[0], alone, rtol=1e-12, atol=0)


class Raising:
    """Raise on rank 1 only, at the place that ``what`` names."""

    def __init__(self, what: str, rank: int) -> None:
        self.what, self.rank = what, rank

    def raise_in(self, what):
        if self.rank == 1 and self.what == what:
            raise LookupError("no\nsuch thing")


class Elsewhere(Raising):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        self.raise_in("sample")
        return torch.tensor(index)


class Fetching(Elsewhere):
    def prefetch(self, indices):
        self.raise_in("prefetch")


class Ordered(Elsewhere):
    def order(self, seed, shuffle):
        return Order(self)


class Order(ElasticSampler):
    def __init__(self, dataset):
        super().__init__(size=64)
        object.__setattr__(self, "dataset", dataset)

    def indices(self, epoch, start, stop):
        self.dataset.raise_in("order")
        return super().indices(epoch, start, stop)


class Streamed(Raising):
    def __iter__(self):
        self.raise_in("iter")
        return (torch.tensor(number) for number in range(64))

    def state_dict(self):
        self.raise_in("state_dict")
        return {}

    def load_state_dict(self, state):
        pass


class Short(Streamed):
    """A stream without a sample on rank 1."""

    def __iter__(self):
        return iter([] if self.rank == 1 else [torch.tensor(number) for number in range(64)])


def trouble_at_once(what: str, workers: int, evaluation: bool) -> str:
    mesh = dt.build_mesh()
    rank = dt.dist.data_rank(mesh)[0]
    kinds = {"prefetch": Fetching, "order": Ordered, "iter": Streamed, "state_dict": Streamed, "nothing": Short}
    dataset = kinds.get(what, Elsewhere)(what, rank)

    def told(value, *_):
        dataset.raise_in(what)
        return value if isinstance(value, torch.Tensor) else torch.stack(value)

    options = {"global_batch_size": 8, "seed": 0, "shuffle": False, "num_workers": workers, "start_method": "fork"}
    options |= {what: told} if what in ("transform", "collate") else {}
    options |= {"pre_sharded": True} if what == "nothing" else {}
    loader = dt.build_loader(dataset, mesh=mesh, **options)
    if evaluation:
        model = torch.nn.Linear(1, 1)
        return said(dt.evaluate, model, loader, lambda model, batch: dt.LossSum(total=batch.sum() * 1.0, weight=len(batch)))
    return said(trained, loader, mesh)


@pytest.mark.parametrize("evaluation", [False, True], ids=["training", "evaluation"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("what", ["sample", "transform", "collate", "prefetch", "order", "iter", "state_dict", "nothing"])
def test_first_batch_error_on_one_rank_stops_all_ranks(ranks, what, workers, evaluation):
    first, second = ranks(2).run(trouble_at_once, what, workers, evaluation)
    assert "rank 1" in first
    assert "\n" not in first + second
    if what == "nothing":
        assert "the dataset returned no sample in a whole epoch" in second
    else:
        assert second.startswith("DataError: loader: ")
        assert second.endswith("LookupError: no such thing")


def transformed_failure(name: str) -> str:
    mesh = dt.build_mesh()
    loader = dt.build_loader(
        Troubled(64, 21 if dt.dist.data_rank(mesh)[0] == 1 else -1, fail), mesh=mesh, global_batch_size=8, seed=0, shuffle=False
    )
    model = dt.shard_model(torch.nn.Linear(1, 1), mesh)

    def loss_fn(model, batch):
        return dt.LossSum(total=model(batch[:, None].float()).sum(), weight=len(batch))

    transforms = {
        "on_batch": [dt.transforms.on_batch(lambda batch, generator: batch + 1, name="more")],
        "clip": [dt.transforms.clip_by_norm(1.0)],
        "ema": [dt.transforms.ema(0.9)],
        "auto": [dt.auto_microbatch(initial_size=2)],
    }
    step = dt.compose_step(loss_fn, transforms[name])
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def run(state):
        for batch in loader.until("1ep"):
            state, _ = step(state, batch)

    return said(run, state)


@pytest.mark.parametrize("name", ["on_batch", "clip", "ema", "auto"])
def test_data_error_stops_all_ranks_under_any_transform(ranks, name):
    first, second = ranks(2).run(transformed_failure, name)
    assert first.startswith("PeerError: step: rank 1 could not use its batch")
    assert second.startswith("DataError: loader: sample 21: ValueError")


def mapped_losses(auto: bool) -> list[float]:
    """Batches of TensorDicts, of which some ranks have none at the end of an epoch."""
    mesh = dt.build_mesh()
    data = [{"x": torch.tensor([number / 10.0, 1.0]), "more": {"y": torch.tensor(number)}} for number in range(13)]
    loader = dt.build_loader(data, mesh=mesh, global_batch_size=6, seed=1)
    torch.manual_seed(0)
    model = dt.shard_model(torch.nn.Linear(2, 1).double(), mesh)

    def loss_fn(model, batch):
        error = model(batch["x"].double())[:, 0] - batch["more", "y"]
        return dt.LossSum(total=(error**2).sum(), weight=len(batch))

    step = dt.compose_step(loss_fn, [dt.auto_microbatch(initial_size=2)] if auto else [])
    state, losses = step.init(model, torch.optim.SGD(model.parameters(), lr=0.01)), []
    for batch in loader.until("2ep"):
        state, metrics = step(state, batch)
        losses.append(dt.reduce_metrics(metrics)["loss"])
    assert state.clock.epoch == 2
    return losses


@pytest.mark.parametrize("auto", [False, True], ids=["whole", "auto"])
def test_ranks_without_samples_take_part_with_empty_tensordicts(ranks, auto):
    alone = ranks(1).run(mapped_losses, False)[0]
    assert len(alone) == 6
    torch.testing.assert_close(ranks(3).run(mapped_losses, auto)[2], alone, rtol=1e-12, atol=0)
