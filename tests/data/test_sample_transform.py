"""Random numbers of a transform belong to the sample: the same on any ranks and workers, in any batch, after any resume."""

import pickle
import random
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from dtrain.data.fetcher import apply_transform, seed_per_sample
from dtrain.data.loader import build_loader
from dtrain.dist.mesh import build_mesh
from dtrain.errors import ConfigError

SIZE, BATCH = 23, 5
DATA = torch.arange(SIZE, dtype=torch.float64).unsqueeze(1)


def noisy(sample: Tensor, generator: torch.Generator) -> Tensor:
    """Return the sample's number, and a random draw for it."""
    return torch.cat([sample, torch.rand(2, generator=generator, dtype=torch.float64)])


def mixed(sample: Tensor, generator: torch.Generator) -> Tensor:
    """Return the sample, and a part of another sample that is drawn from the whole dataset."""
    other = DATA[int(torch.randint(SIZE, (), generator=generator))]
    share = torch.rand((), generator=generator, dtype=torch.float64)
    return torch.cat([sample, share * sample + (1 - share) * other])


def drawing(sample: Tensor) -> Tensor:
    drawn = [random.random(), float(np.random.rand()), float(torch.rand((), dtype=torch.float64))]
    return torch.cat([sample, torch.tensor(drawn, dtype=torch.float64)])


TRANSFORMS = {"noisy": noisy, "mixed": mixed, "seeded": seed_per_sample(drawing)}


def rows(name: str, workers: int, batch: int, stop: int, at_once: bool) -> list[list[list[float]]]:
    """This rank's samples of two epochs, batch by batch; the loader is left and resumed after ``stop`` batches."""

    def loader():
        return build_loader(
            list(DATA) if not at_once else DATA,
            mesh=build_mesh(),
            global_batch_size=batch,
            seed=3,
            num_workers=workers,
            start_method="fork",  # other ways import this file by its name
            transform=TRANSFORMS[name],
        )

    first, second = loader(), loader()
    lists = [indices.tolist() for indices in first.until(stop)]
    second.load_state_dict(first.state_dict())
    return lists + [indices.tolist() for indices in second.until("2ep")]


def sorted_epochs(parts: list[list[list[list[float]]]]) -> list[list[list[float]]]:
    """Samples of each epoch in the order of their numbers, from the batches of all ranks."""
    steps = [[row for rows_of_rank in step for row in rows_of_rank] for step in zip(*parts, strict=True)]
    half = len(steps) // 2
    return [sorted(row for step in epoch for row in step) for epoch in (steps[:half], steps[half:])]


@pytest.mark.parametrize("name", TRANSFORMS)
def test_augmentation_does_not_depend_on_ranks_workers_or_resume(ranks, name):
    expected = sorted_epochs(ranks(1).run(rows, name, 0, BATCH, 1, False))
    assert [len(epoch) for epoch in expected] == [SIZE, SIZE]
    assert all(first != second for first, second in zip(*expected, strict=True)), "another epoch draws anew"
    for world_size, workers, batch, stop, at_once in [(1, 2, 5, 3, False), (2, 0, 5, 1, True), (3, 0, 4, 7, False)]:
        epochs = sorted_epochs(ranks(world_size).run(rows, name, workers, batch, stop, at_once))
        assert epochs == expected, (world_size, workers, batch, stop)


def test_random_numbers_differ_by_sample_and_seed():
    keys = [dict(zip(("seed", "epoch", "index"), key, strict=True)) for key in product((0, 1), (0, 1), (0, 1, 2))]
    drawn = {tuple(apply_transform(noisy, torch.zeros(1), **key).tolist()) for key in keys}
    assert len(drawn) == len(keys)


def test_seeded_does_not_change_the_global_generators():
    def states() -> list:
        return [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]

    before = states()
    first, again = (apply_transform(seed_per_sample(drawing), torch.zeros(1), seed=0, epoch=0, index=4) for _ in range(2))
    assert first.equal(again)
    assert states() == before


def test_seeded_can_be_pickled():
    copy = pickle.loads(pickle.dumps(seed_per_sample(drawing)))
    apart = [apply_transform(fn, torch.zeros(1), seed=0, epoch=0, index=4).tolist() for fn in (copy, seed_per_sample(drawing))]
    assert apart[0] == apart[1]


def test_a_transform_that_returns_nothing_is_refused():
    with pytest.raises(ConfigError, match=r"the transform returned None for sample 4\. Return the sample"):
        apply_transform(lambda sample, generator: None, 0, seed=0, epoch=0, index=4)


def test_seeded_needs_a_function():
    with pytest.raises(ConfigError, match="seed_per_sample: fn must be a function of a sample, got 3"):
        seed_per_sample(3)
