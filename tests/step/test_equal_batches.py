"""Data that every rank reads alike are noticed in the first steps, and nothing else is taken for that."""

import warnings

import torch
from torch.utils.data import DataLoader, TensorDataset

import dtrain as dt
from dtrain.dist.init import get_dist_info

SAMPLES = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))


def loss_fn(model, batch):
    return dt.LossSum(total=model(batch).square().sum(), weight=len(batch))


def warned(batches, *transforms, loss_fn=loss_fn, mesh=None, **options) -> list[str]:
    """The warnings of a training over ``batches``."""
    steps = dt.compose_step(loss_fn, transforms)
    model = dt.shard_model(torch.nn.Linear(4, 2), mesh or dt.build_mesh())
    state = steps.init(model, torch.optim.SGD(model.parameters(), lr=0.01), **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in batches:
            state, _ = steps(state, batch)
    return [str(warning.message) for warning in caught if "equal batches" in str(warning.message)]


def fed(kind: str) -> list[str]:
    rank = get_dist_info().rank
    plain = list(DataLoader(TensorDataset(SAMPLES), batch_size=8, shuffle=False))
    if kind == "plain loader":
        return warned([batch for (batch,) in plain])
    if kind == "nested batches":
        nested = [{"x": batch, "name": "same"} for batch in plain]
        return warned(nested, loss_fn=lambda model, batch: loss_fn(model, batch["x"][0]))
    if kind == "permuted views":
        return warned([batch.T.contiguous().T for (batch,) in plain])
    if kind == "two batches":
        return warned([batch for (batch,) in plain[:2]])
    if kind == "our loader":
        return warned(dt.build_loader(SAMPLES, mesh=dt.build_mesh(), global_batch_size=8, seed=0).until("2ep"))
    if kind == "equal first batch":
        return warned([SAMPLES[:8], *(SAMPLES[i + rank : i + rank + 8] for i in range(8))])
    if kind == "some values differ":
        return warned([torch.cat([SAMPLES[:8], torch.full((1, 4), float(rank + step))]) for step in range(4)])
    if kind == "other sizes":
        return warned([SAMPLES[: 8 + rank]] * 4)
    if kind == "a rank without samples":
        return warned([SAMPLES[: 8 * (rank == 0)]] * 4)
    if kind == "two equal batches with two gradients each":
        return warned(
            [SAMPLES[:8], SAMPLES[8:16], *(SAMPLES[i + rank : i + rank + 8] for i in range(4))], dt.transforms.sam(0.05)
        )
    if kind == "equal first batch with a search":
        batches = [SAMPLES[:8], *(SAMPLES[i + rank : i + rank + 8] for i in range(4))]
        with dt.testing.memory_budget(2**20):
            return warned(batches, dt.auto_microbatch())
    if kind == "one batch for ever":
        return warned([SAMPLES[:8]] * 20)
    if kind == "four steps on each batch":
        return warned([batch for (batch,) in plain for _ in range(4)])
    if kind == "wanted":
        return warned([batch for (batch,) in plain], allow_equal_batches=True)
    if kind == "context parallel":
        return warned([SAMPLES[:8]] * 4, mesh=dt.build_mesh(cp=2))
    raise AssertionError(kind)


def test_equal_batches_on_all_ranks_warn_once(ranks):
    first, second = ranks(2).run(fed, "plain loader")
    assert first == [
        "step: the first batches of all 2 data-parallel ranks are equal, so the ranks train on the same samples. Give each "
        "rank its own samples, with dt.build_loader(..., mesh=mesh) or torch's DistributedSampler. If equal batches are "
        "intended, pass step.init(..., allow_equal_batches=True)."
    ]
    assert second == []  # once for the job
    for kind in ("nested batches", "permuted views", "four steps on each batch"):
        assert len(ranks(2).run(fed, kind)[0]) == 1, kind


def test_different_batches_do_not_warn(ranks):
    kinds = ("two batches", "our loader", "equal first batch", "some values differ", "other sizes", "a rank without samples")
    once = ("two equal batches with two gradients each", "equal first batch with a search", "one batch for ever")
    for kind in (*kinds, *once, "wanted", "context parallel"):
        assert ranks(2).run(fed, kind) == [[], []], kind


def hashed(kind: str) -> int:
    """Return the number of hashed batches."""
    from dtrain.step import sanity_checks

    looked = []
    original = sanity_checks.hash_batch
    sanity_checks.hash_batch = lambda batch: looked.append(1) or original(batch)
    try:
        fed(kind)
    finally:
        sanity_checks.hash_batch = original
    return len(looked)


def test_only_the_first_batches_are_hashed(ranks):
    assert ranks(2).run(hashed, "plain loader") == [3, 3]
    assert ranks(2).run(hashed, "our loader") == [1, 1]  # the first comparison has warned
    assert ranks(2).run(hashed, "one batch for ever") == [16, 16]
    assert ranks(2).run(hashed, "wanted") == [0, 0]
    assert ranks(2).run(hashed, "context parallel") == [0, 0]


def test_single_process_skips_the_equal_batch_check(monkeypatch):
    from dtrain.step import sanity_checks

    monkeypatch.setattr(sanity_checks, "hash_batch", lambda batch: 1 / 0)
    step = dt.compose_step(loss_fn)
    model = torch.nn.Linear(4, 2)
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.01))
    assert step(state, SAMPLES)[0].step == 1
