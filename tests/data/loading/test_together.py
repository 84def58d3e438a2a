"""Ranks and their loaders: what goes wrong on one is known to all, and training sees the same data whatever the ranks."""

import pytest
import torch

import dtrain as dt
from samples import Numbers, Troubled, fail, hang


def said(fn, *args) -> str:
    try:
        fn(*args)
    except dt.DtrainError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def trained(loader: dt.Loader, mesh, length="1ep") -> list[float]:
    torch.manual_seed(0)
    model = dt.shard_model(torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double(), mesh)

    def loss_fn(model, batch):
        x = batch[:, None].double() / 100
        return dt.LossSum(total=((model(x) - x.sin()) ** 2).sum(), weight=len(batch))

    step = dt.compose_step(loss_fn, [])
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for batch in loader.until(length):
        state, metrics = step(state, batch)
        losses.append(dt.reduce_metrics(metrics)["loss"])
    return losses


def with_trouble_on_rank_1(kind: str, workers: int) -> str:
    mesh = dt.build_mesh()
    trouble = {"fails": fail, "hangs": hang}[kind]
    dataset = Troubled(64, 21 if dt.data_rank(mesh)[0] == 1 else -1, trouble)
    options = {
        "global_batch_size": 8,
        "seed": 0,
        "shuffle": False,
        "workers": workers,
        "timeout_s": 5.0,
        "start_method": "fork",
    }
    loader = dt.build_loader(dataset, mesh=mesh, **options)
    return said(trained, loader, mesh)


@pytest.mark.parametrize(("kind", "workers"), [("fails", 0), ("fails", 2), ("hangs", 2)])
def test_all_ranks_stop_when_one_cannot_read_its_samples(ranks, kind, workers):
    first, second = ranks(2).run(with_trouble_on_rank_1, kind, workers)
    assert first.startswith("PeerError: step: rank 1 could not use its batch")
    assert second.startswith(
        "DataError: loader: sample 21: ValueError" if kind == "fails" else "DataError: loader: no batch from"
    )


def evaluated_with_trouble() -> str:
    mesh = dt.build_mesh()
    dataset = Troubled(64, 21 if dt.data_rank(mesh)[0] == 1 else -1, fail)
    loader = dt.build_loader(dataset, mesh=mesh, global_batch_size=8, seed=0, shuffle=False)
    return said(
        dt.evaluate, torch.nn.Linear(1, 1), loader, lambda model, batch: dt.LossSum(total=batch.sum() * 1.0, weight=len(batch))
    )


def test_all_ranks_stop_when_one_cannot_read_in_an_evaluation(ranks):
    first, second = ranks(2).run(evaluated_with_trouble)
    assert "rank 1 (1 of 2 ranks) cannot read or count its batch" in first
    assert second.startswith("DataError: loader: sample 21: ValueError")


def at_other_places(what: str) -> str:
    mesh = dt.build_mesh()
    other = dt.data_rank(mesh)[0] == 1
    seed, size, batch = (int(what == "seed" and other), 64 + 8 * (what == "size" and other), 8)
    loader = dt.build_loader(Numbers(size), mesh=mesh, global_batch_size=batch, seed=seed)
    if what == "position" and other:
        loader.skip(8)
    return said(trained, loader, mesh)


@pytest.mark.parametrize("what", ["seed", "size", "position"])
def test_ranks_at_other_places_in_their_data_are_found_in_the_first_step(ranks, what):
    for text in ranks(2).run(at_other_places, what):
        assert text.startswith("StepError: step: rank 1 is at another place in its data than rank 0, or in other data")


def losses(workers: int) -> list[float]:
    mesh = dt.build_mesh()
    loader = dt.build_loader(Numbers(45), mesh=mesh, global_batch_size=8, seed=3, workers=workers, start_method="fork")
    return trained(loader, mesh, "3ep")


def test_losses_are_the_same_for_every_number_of_ranks(ranks):
    """Float64, so what is left is the order of sums: 1e-12 relative."""
    alone = ranks(1).run(losses, 0)[0]
    assert len(alone) == 18
    for world, workers in ((2, 2), (4, 0)):
        torch.testing.assert_close(ranks(world).run(losses, workers)[0], alone, rtol=1e-12, atol=0)
