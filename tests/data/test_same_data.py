"""Ranks that read different data: the first step names them, before an update. Data that only look different go on."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset, random_split

import dtrain as dt
from dtrain.data.dataset import hash_global_batch, hash_stored_samples


class Files(Dataset):
    """A dataset of the user's, whose samples are numbered files."""

    def __init__(self, files: list) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(float(Path(self.files[index]).stem))


@dataclass
class Noted(Dataset):
    """A dataset that keeps notes of what this process has read, and draws random numbers of its own."""

    rank: int
    losses: torch.Tensor = field(default_factory=lambda: torch.rand(24))
    cache: list = field(default_factory=lambda: [None] * 24)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.rank)
        self.folder = f"/scratch/{self.rank}"
        self.cache[self.rank :: 2] = [torch.ones(1)] * len(self.cache[self.rank :: 2])

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index + self.rng.random())


class Printed(Files):
    """A dataset with a fingerprint of its own."""

    def fingerprint(self) -> dict:
        return {"release": 3}


def hugging_face(rank: int):
    datasets = pytest.importorskip("datasets")
    from datasets.distributed import split_dataset_by_node

    rows = datasets.Dataset.from_dict({"x": [float(number) for number in range(24)]})
    return split_dataset_by_node(rows, rank, 2)


WHOLE = torch.arange(24.0)
DIFFERENT = {
    "a split by the generator of the rank": lambda rank: random_split(WHOLE, [16, 8])[0],
    "a subset by the rank": lambda rank: Subset(TensorDataset(WHOLE), range(rank, 24, 2)),
    "a subset in another order": lambda rank: Subset(WHOLE, np.random.permutation(24)),
    "parts in another order": lambda rank: ConcatDataset([TensorDataset(WHOLE + part) for part in ([1, 2], [2, 1])[rank]]),
    "drawn tensors": lambda rank: torch.randn(24, 2),
    "drawn rows": lambda rank: TensorDataset(torch.rand(24, 3)),
    "drawn samples": lambda rank: [torch.randn(2) for _ in range(24)],
    "files of the rank": lambda rank: Files([f"/data/{number}.png" for number in range(rank, 24, 2)]),
    "files in the order of the folder": lambda rank: Subset(
        Files([Path(f"{k}.png") for k in (range(9), range(8, -1, -1))[rank]]), range(9)
    ),
    "a mixture of subsets": lambda rank: dt.data.mix(
        {"a": Subset(WHOLE, range(rank, 24, 2)), "b": WHOLE}, weights={"a": 1, "b": 1}
    ),
    "a Hugging Face dataset by the rank": hugging_face,
}
SAME = {
    "rows": lambda rank: TensorDataset(WHOLE, WHOLE.long()),
    "notes and random numbers of the rank": Noted,
    "a folder per rank": lambda rank: Files([f"/node{rank}/{number}.png" for number in range(24)]),
    "rounding": lambda rank: WHOLE[:, None] + 1 + rank * 1e-6,
    "a fingerprint": lambda rank: Printed([f"{number}.png" for number in range(rank, 24, 2)]),
}


def train(dataset, workers: int = 0, **options) -> str:
    mesh = dt.build_mesh()
    loader = dt.build_loader(dataset, mesh=mesh, global_batch_size=8, seed=0, num_workers=workers, **options)
    model = dt.shard_model(torch.nn.Linear(1, 1), mesh, strategy="replicate")

    def loss_fn(model, batch):
        values = next(iter(batch.values())) if hasattr(batch, "values") and not torch.is_tensor(batch) else batch
        values = values[0] if isinstance(values, list) else values
        return dt.sum_loss(model(values.reshape(len(values), -1)[:, :1].float())[:, 0])

    step = dt.compose_step(loss_fn)
    state, steps = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1), loader=loader), 0
    try:
        for batch in loader.until("1ep"):
            state, _ = step(state, batch)
            steps += 1
    except dt.errors.StepError as error:
        return f"{steps}: {error}"
    return f"{steps} steps"


class Reading(IterableDataset):
    """Samples ``first``, ``first + step``, ... below ``size``, with noise by a generator of this process."""

    def __init__(self, rank: int, *, first: int = 0, step: int = 1, size: int = 24, noise: float = 0) -> None:
        self.first, self.step, self.size, self.noise = first, step, size, noise
        self.rng = np.random.default_rng(rank)

    def __iter__(self):
        for number in range(self.first, self.size, self.step):
            yield {"x": torch.tensor([number + torch.rand(()) + self.noise * self.rng.random()]), "label": number}


class Fractions(Reading):
    """Samples without a label."""

    def __iter__(self):
        return (sample["x"] for sample in super().__iter__())


def stream_split_by_node(rank: int):
    datasets = pytest.importorskip("datasets")
    from datasets.distributed import split_dataset_by_node

    return split_dataset_by_node(datasets.Dataset.from_dict({"x": list(range(24))}).to_iterable_dataset(2), rank, 2)


STREAMS = {
    "split by the rank": lambda rank: Reading(rank, first=rank, step=2),
    "split by the rank, fractions": lambda rank: Fractions(rank, first=rank, step=2),
    "Hugging Face": stream_split_by_node,
    "another length": lambda rank: Reading(rank, size=22 + rank),
    "another end": lambda rank: Reading(rank, size=16 + 8 * rank),
    "augmented": lambda rank: Reading(rank, noise=1.0),
    "equal": lambda rank: Fractions(rank),
}


def train_stream(kind: str, workers: int = 0, pre_sharded: bool = False) -> str:
    rank = dt.dist.data_rank(dt.build_mesh())[0]
    dt.seed_all(0, rank)
    return train(STREAMS[kind](rank), workers, shuffle=False, pre_sharded=pre_sharded, start_method="fork")


@pytest.mark.parametrize(
    ("kind", "steps", "workers"),
    [
        ("split by the rank", 0, 0),
        ("split by the rank", 0, 2),
        ("split by the rank, fractions", 0, 0),
        ("Hugging Face", 0, 0),
        ("another length", 2, 0),
    ],
)
def test_different_streams_stop_the_step_on_all_ranks(ranks, kind, steps, workers):
    if kind == "Hugging Face":
        pytest.importorskip("datasets")
    first, second = ranks(2).run(train_stream, kind, workers)
    assert first.startswith(f"{steps}: step: the dataset of rank 1 has other samples than that of rank 0.")
    assert "or pass build_loader(pre_sharded=True)." in first
    assert first == second


def test_streams_that_end_apart_stop_the_step_on_all_ranks(ranks):
    first, second = ranks(2).run(train_stream, "another end")
    assert first.startswith("1: step: only ranks [0] are at the end of their epoch.")
    assert first == second


@pytest.mark.parametrize(
    ("kind", "workers", "pre_sharded"),
    [
        ("augmented", 0, False),
        ("augmented", 2, False),
        ("equal", 0, False),
        ("equal", 2, False),
        ("split by the rank", 0, True),
    ],
)
def test_streams_that_belong_together_train(ranks, kind, workers, pre_sharded):
    assert ranks(2).run(train_stream, kind, workers, pre_sharded) == ["3 steps"] * 2


def train_map(kind: str) -> str:
    rank = dt.dist.data_rank(dt.build_mesh())[0]
    dt.seed_all(0, rank)
    return train({**DIFFERENT, **SAME}[kind](rank))


@pytest.mark.parametrize("kind", DIFFERENT)
def test_different_datasets_stop_the_first_step_on_all_ranks(ranks, kind):
    if "Hugging Face" in kind:
        pytest.importorskip("datasets")
    first, second = ranks(2).run(train_map, kind)
    assert first.startswith("0: step: the dataset of rank 1 has other samples than that of rank 0. Give every rank the whole")
    assert first == second


@pytest.mark.parametrize("kind", SAME)
def test_equal_datasets_train(ranks, kind):
    assert set(ranks(2).run(train_map, kind)) <= {"3 steps", "2 steps"}


def test_comparing_reads_no_sample():
    dataset = Noted(0)
    dataset.__class__ = type("Closed", (Noted,), {"__getitem__": lambda self, index: pytest.fail("read")})
    assert hash_stored_samples(Subset(dataset, [1, 2])) == hash_stored_samples(Subset(Noted(1), [1, 2]))


class Broken(dict):
    def keys(self):
        raise OSError("closed")


@pytest.mark.parametrize(
    "sample",
    [Broken(), {"x": torch.eye(2).to_sparse()}, torch.empty(2, device="meta"), np.array([object()]), [set(), None, Broken]],
)
def test_values_that_cannot_be_hashed_are_left_out(sample):
    assert hash_stored_samples([sample] * 3) == hash_stored_samples([sample] * 3)
    assert hash_global_batch([sample] * 3) == hash_global_batch([sample] * 3)


def test_subsets_of_one_length_resume_by_their_length_as_before():
    saved = dt.build_loader(Subset(WHOLE, range(8)), global_batch_size=4, seed=0).state_dict()
    dt.build_loader(Subset(WHOLE, range(8, 16)), global_batch_size=4, seed=0).load_state_dict(saved)
