"""The example of two states in one loop: it learns, on two processes as on one, and resumes from its checkpoint."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dtrain as dt
from dtrain.loggers.records import read_jsonl
from example_runs import Ending, ended, here, launched

DISTANCE = "held_out/energy_distance"


def run(out: Path, *, steps: int, save_every: int = 100, how=launched) -> tuple[dict[int, dict], Ending]:
    """The records of a run on two processes (or in this one, with ``how=here``), by step, and how it ended."""
    printed = how("train_gan.py", "--steps", str(steps), "--save-every", str(save_every), out=out)
    records = {step: dict(record) for step, record in read_jsonl(out / "metrics.jsonl").items()}
    for record in records.values():
        record.pop("time")
    return records, ended(printed)


def distances(records: dict[int, dict]) -> dict[int, float]:
    return {step: record[DISTANCE] for step, record in records.items() if DISTANCE in record}


@pytest.mark.slow
def test_training_on_two_ranks_moves_towards_the_ring(tmp_path):
    records, _ = run(tmp_path / "run", steps=100)
    assert list(records) == [1, *range(10, 101, 10)]
    by_step = distances(records)
    assert list(by_step) == [1, 100]
    assert by_step[100] < 0.5 * by_step[1]


@pytest.mark.slow
def test_training_on_two_ranks_learns_the_ring(tmp_path):
    records, end = run(tmp_path / "run", steps=400)
    by_step = distances(records)
    assert list(by_step) == [1, 100, 200, 300, 400]
    assert by_step[1] > 0.4
    assert end.value < 0.8 * end.baseline, "nearer to the ring than any normal distribution"


def test_resumed_run_ends_with_the_numbers_of_an_uninterrupted_run(tmp_path):
    """The test compares both states, and the noise, which is drawn from the global generator."""
    whole = run(tmp_path / "whole", steps=100, how=here)
    first, _ = run(tmp_path / "parts", steps=70, how=here)
    assert list(distances(first)) == [1, 70]
    records, end = run(tmp_path / "parts", steps=100, how=here)
    del records[70][DISTANCE]  # measured at the end of the first part
    assert (records, end) == whole


@pytest.mark.slow
def test_interrupted_run_ends_with_the_numbers_of_an_uninterrupted_run(tmp_path):
    whole = run(tmp_path / "whole", steps=500)
    run(tmp_path / "parts", steps=130, save_every=130)
    records, end = run(tmp_path / "parts", steps=500)
    del records[130][DISTANCE]
    assert (records, end) == whole


def networks(norm: bool) -> list[nn.Sequential]:
    torch.manual_seed(0)
    return [
        nn.Sequential(
            nn.Linear(a, 8), nn.BatchNorm1d(8) if norm else nn.Identity(), nn.LeakyReLU(0.2), nn.Linear(8, b)
        ).double()
        for a, b in ((3, 2), (2, 1))
    ]


def points(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    return torch.randn(8, 2, generator=draw).double(), torch.randn(8, 3, generator=draw).double()


def discriminator_loss(model, batch):
    return dt.LossSum(
        total=(F.softplus(-model(batch["real"])) + F.softplus(model(batch["fake"]))).sum(), weight=len(batch["real"])
    )


def trained_by_steps(strategy: str, norm: bool) -> list[dict[str, list[float]]]:
    """Parameters and buffers of both networks after four steps in the pattern of the example."""
    mesh, rank, ranks = dt.build_mesh(), torch.distributed.get_rank(), torch.distributed.get_world_size()
    generator, discriminator = (dt.shard_model(model, mesh, strategy=strategy) for model in networks(norm))

    def generator_loss(model, batch):
        return dt.LossSum(total=F.softplus(-discriminator(batch["fake"])).sum(), weight=len(batch["fake"]))

    generator_step, discriminator_step = dt.compose_step(generator_loss), dt.compose_step(discriminator_loss)
    g = generator_step.init(generator, torch.optim.AdamW(generator.parameters(), lr=1e-2))
    d = discriminator_step.init(discriminator, torch.optim.AdamW(discriminator.parameters(), lr=1e-2))
    for step in range(4):
        real, noise = (tensor.chunk(ranks)[rank] for tensor in points(step))
        fake = generator(noise)
        d, _ = discriminator_step(d, {"real": real, "fake": fake.detach()})
        g, _ = generator_step(g, {"fake": fake})
    return [
        {name: value.flatten().tolist() for name, value in (*dt.full_params(state), *state.model.named_buffers())}
        for state in (g, d)
    ]


def trained_by_hand(norm: bool) -> list[dict[str, list[float]]]:
    """The same four steps in plain torch."""
    generator, discriminator = networks(norm)
    one, two = (torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (generator, discriminator))
    for step in range(4):
        real, noise = points(step)
        fake = generator(noise)
        discriminator.zero_grad()
        (F.softplus(-discriminator(real)) + F.softplus(discriminator(fake.detach()))).mean().backward()
        two.step()
        generator.zero_grad()
        F.softplus(-discriminator(fake)).mean().backward()
        one.step()
    return [
        {name: value.flatten().tolist() for name, value in model.state_dict().items()} for model in (generator, discriminator)
    ]


@pytest.mark.parametrize(("count", "norm"), [(1, True), (2, False)], ids=["batch norm", "two ranks"])
def test_pattern_of_the_example_equals_plain_torch(ranks, count, norm):
    """On two ranks each rank normalizes its own half, so batch norm is compared on one rank only."""
    expected = trained_by_hand(norm)
    for strategy in ("full_shard", "replicate"):
        for trained in ranks(count).run(trained_by_steps, strategy, norm):
            for network, values in zip(trained, expected, strict=True):
                assert network.keys() == values.keys()
                for name, value in values.items():
                    assert network[name] == pytest.approx(value, rel=1e-12, abs=1e-12), name
