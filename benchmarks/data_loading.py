"""Samples a second of dtrain's loader beside torchdata's and torch's, with the same workers.

Each candidate is built once and then runs through whole shuffled epochs, its workers' start included. That all of them hand out
every sample once, in batches of the same size, is checked before anything is timed.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from time import process_time
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset, default_collate
from torchdata.stateful_dataloader import StatefulDataLoader

import dtrain as dt
from dtrain.data.position import Position, parse_length
from measure import WALL, Run, child_cpu, compare, interleaved, typical, verdict_line

AT_MOST = 1 / 0.98  # seconds of a pass: at least 0.98 of the peer's samples a second
PEERS: Mapping[str, Any] = {"StatefulDataLoader": StatefulDataLoader, "DataLoader": DataLoader}


class Rows:
    """Tokens with a label: a small mapping of tensors a sample."""

    def __init__(self, size: int) -> None:
        self.input_ids = torch.randint(50_000, (size, 128), generator=torch.Generator().manual_seed(0))
        self.ids = torch.arange(size)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.input_ids[index], "id": self.ids[index]}


class Compressed:
    """Small compressed images: a sample is decompressed, cropped, mirrored and normalised, in a quarter of a millisecond."""

    side, margin = 96, 8

    def __init__(self, size: int) -> None:
        ramp = torch.arange(self.side).add(torch.arange(self.side)[:, None]).expand(3, -1, -1)
        draw = torch.Generator().manual_seed(0)
        noise = torch.randint(8, (64, 3, self.side, self.side), generator=draw)
        self.files = [zlib.compress((ramp + one).to(torch.uint8).numpy().tobytes()) for one in noise]
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        raw = bytearray(zlib.decompress(self.files[index % len(self.files)]))
        image = torch.frombuffer(raw, dtype=torch.uint8).view(3, self.side, self.side)
        image = image[:, self.margin : -self.margin, self.margin : -self.margin].flip(-1)
        return {"image": image.float().div_(255).sub_(0.5).div_(0.25), "id": torch.tensor(index)}


class Table:
    """A TensorDict as torch's loaders need it.

    ``StatefulDataLoader`` would take the rows themselves for a dataset with a state, and send all of them with each batch.
    """

    def __init__(self, rows: TensorDict) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> TensorDict:
        return self.rows[index]

    def __getitems__(self, indices: list[int]) -> TensorDict:
        return self.rows[torch.tensor(indices)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A dataset to be read in batches.

    Args:
        name: of the dataset.
        build: the dataset of so many samples; may put files in the folder.
        ids: the numbers of the samples in a batch.
        size: samples of one pass.
        batch_size: samples of a batch.
        peers: the dataset as torch's loaders take it, and how they collate.
    """

    name: str
    build: Callable[[int, Path], Any]
    ids: Callable[[Any], Tensor]
    size: int
    batch_size: int = 64
    peers: Callable[[Any], tuple[Any, Any]] = lambda dataset: (dataset, None)


def _tensors(size: int, folder: Path) -> TensorDataset:
    return TensorDataset(torch.rand(size, 3, 32, 32), torch.arange(size))


def _tensordict(size: int, folder: Path) -> TensorDict:
    rows = Rows(size)
    return TensorDict({"input_ids": rows.input_ids, "id": rows.ids}, batch_size=[size]).memmap(folder / f"td-{size}")


def _whole(batch: Any) -> Any:
    return batch


WORKS = (
    Work(name="tensors", build=_tensors, ids=lambda batch: batch[1], size=16_384),
    Work(name="small mappings", build=lambda size, folder: Rows(size), ids=lambda batch: batch["id"], size=16_384),
    Work(
        name="TensorDict on disk",
        build=_tensordict,
        ids=lambda batch: batch["id"],
        size=32_768,
        peers=lambda dataset: (Table(dataset), _whole),  # by batches, which is four times as fast as by samples
    ),
    Work(name="decoded images", build=lambda size, folder: Compressed(size), ids=lambda batch: batch["id"], size=1_024),
)


def ours(work: Work, dataset: Any, workers: int) -> Callable[[], Iterator[Any]]:
    """Epochs of dtrain's loader, one per call."""
    loader = dt.build_loader(dataset, global_batch_size=work.batch_size, seed=0, num_workers=workers)
    return lambda: loader.until(f"{loader.position.epoch + 1}ep")


def theirs(make: Any, work: Work, dataset: Any, workers: int) -> Callable[[], Iterator[Any]]:
    """Epochs of a peer's loader, one per call."""
    given, collate = work.peers(dataset)
    loader = make(given, batch_size=work.batch_size, shuffle=True, num_workers=workers, collate_fn=collate)
    return lambda: iter(loader)


def drained(epoch: Callable[[], Iterator[Any]]) -> Run:
    """Return a function that makes one pass per call and does nothing with the batches."""

    def run() -> None:
        for _ in epoch():
            pass

    return run


def check_pass(name: str, work: Work, epoch: Callable[[], Iterator[Any]], size: int) -> None:
    """Stop here if a pass does not hand out every sample once, in batches of the right size."""
    ids = [work.ids(batch).clone() for batch in epoch()]
    sizes = {len(one) for one in ids[:-1]}
    if sizes - {work.batch_size} or not torch.equal(torch.cat(ids).sort().values, torch.arange(size)):
        raise SystemExit(f"data: {work.name}, {name}: a pass did not hand out every sample once; batches of {sorted(sizes)}")


def all_cpu() -> float:
    """CPU seconds of this process and of its workers that have ended."""
    return process_time() + child_cpu()


def passes(work: Work, dataset: Any, size: int, workers: int) -> dict[str, Run]:
    """A pass per call through the loader of each candidate, checked once."""
    epochs = {"dtrain": ours(work, dataset, workers)}
    epochs |= {name: theirs(make, work, dataset, workers) for name, make in PEERS.items()}
    for name, epoch in epochs.items():
        check_pass(name, work, epoch, size)
    return {name: drained(epoch) for name, epoch in epochs.items()}


def in_memory(name: str, size: int, folder: Path) -> dict[str, Run]:
    """Passes without workers through a dataset in memory; dtrain's also through the same rows in a TensorDict."""
    work = next(work for work in WORKS if work.name == name)
    dataset = work.build(size, folder)
    tensors = dataset.tensors if isinstance(dataset, TensorDataset) else (dataset.input_ids, dataset.ids)
    table = replace(work, ids=lambda batch: batch["id"])
    whole = ours(table, TensorDict(dict(zip(("x", "id"), tensors, strict=True)), batch_size=[size]), 0)
    check_pass("dtrain, TensorDict", table, whole, size)
    return {**passes(work, dataset, size, 0), "dtrain, TensorDict": drained(whole)}


def loading(folder: Path, rounds: int, scale: float) -> None:
    """Print the time of a pass over each dataset, without workers and with two."""
    torch.set_num_threads(1)  # as workers do; CPU time is then the work that is done
    for work in WORKS:
        size = max(2 * work.batch_size, int(work.size * scale))
        dataset = work.build(size, folder)
        for workers in (0, 2):
            runs = passes(work, dataset, size, workers)
            seen = interleaved(runs, rounds=rounds, warmup=1, clocks={"CPU": all_cpu, "wall": WALL})
            _report(f"{work.name}, {workers} workers", size, seen, "wall" if workers else "CPU")


def _report(what: str, size: int, seen: Mapping[str, Mapping[str, Any]], judged: str) -> None:
    """Both clocks; the verdict is on the time of the work where one process does it all, else on the time waited."""
    for name in PEERS:
        for clock, timings in seen.items():
            comparison = compare(timings["dtrain"], timings[name])
            rates = f"{size / comparison.a_s:,.0f} and {size / comparison.b_s:,.0f} samples/s"
            print(f"{what}, {clock} time of a pass, dtrain against {name}: {comparison}; {rates}")
    for name in PEERS:
        ratio = compare(seen[judged]["dtrain"], seen[judged][name]).ratio
        print(verdict_line(f"{what}, {judged} time against {name}'s", ratio, at_most=AT_MOST), flush=True)


def layers(rounds: int, scale: float) -> None:
    """Print the time of a batch of small mappings as the parts of dtrain's loader are added step by step, beside torch's."""
    torch.set_num_threads(1)
    work = next(work for work in WORKS if work.name == "small mappings")
    size = max(2 * work.batch_size, int(work.size * scale) // work.batch_size * work.batch_size)
    dataset, batches = work.build(size, Path()), size // work.batch_size
    loader = dt.build_loader(dataset, global_batch_size=work.batch_size, seed=0)
    source, goal = loader._source, parse_length(f"{batches}ba")

    def requests() -> Iterator[Any]:
        return source._requests(source.epoch_batches(), Position(), goal, deque())

    def shuffled() -> list[list[int]]:
        return [indices.tolist() for indices in torch.randperm(size).split(work.batch_size)]

    def read(indices: list[int]) -> list[Any]:
        return [dataset[index] for index in indices]

    def whole() -> Iterator[Any]:
        loader.position = Position()
        return loader.until(goal)

    parts = {
        "torch's collate in a loop": lambda: map(default_collate, map(read, shuffled())),
        "dtrain's collate in a loop": lambda: map(dt.data.collate, map(read, shuffled())),
        "+ order": lambda: (dt.data.collate(read(request.indices.tolist())) for request in requests()),
        "+ errors": lambda: map(source.fetcher._fetch, requests()),
        "+ random numbers": lambda: map(source.fetcher.__getitem__, requests()),
        "+ items": lambda: source.items(Position(), goal),
        "+ position: the whole loader": whole,
        "DataLoader": theirs(DataLoader, work, dataset, 0),
    }
    seen = interleaved({name: drained(layer) for name, layer in parts.items()}, rounds=2 * rounds, clocks={"CPU": all_cpu})
    for name, timings in seen["CPU"].items():
        print(f"small mappings, a batch of {work.batch_size}, {name}: {typical(timings).value / batches * 1e6:.0f} us")
