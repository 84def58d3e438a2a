"""Samples a second from MDS shards beside the real mosaicml-streaming: local, from an S3 server, with a cold and a warm cache.

Both read the same shards, which theirs has written, shuffled near by as each does by default, through a loader with the same
workers. That both hand out every sample once is checked before anything is timed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import fsspec
import numpy as np
import torch
from torch.utils.data import DataLoader

import dtrain as dt
from data_loading import all_cpu
from data_peers import mosaicml, servers
from dtrain import storage
from dtrain.data.stream.sharded_dataset import ShardedDataset
from measure import WALL, Run, compare, interleaved, verdict_line

AT_MOST = 1.0  # seconds of a pass against theirs
BATCH = 64
TOKENS = 512  # of a sample, 2 KiB
SHARD_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A way to read the shards.

    Args:
        name: of it.
        workers: loader processes.
        remote: from the server, into a cache; else from the disk, and the dataset is built once.
        warm: all shards are in the cache already. The dataset is built anew for each pass, as when a run is resumed.
    """

    name: str
    workers: int
    remote: bool = False
    warm: bool = False


CASES = (
    Case(name="local", workers=0),
    Case(name="local", workers=2),
    Case(name="S3, warm cache", workers=0, remote=True, warm=True),
    Case(name="S3, cold cache", workers=0, remote=True),
    Case(name="S3, cold cache", workers=2, remote=True),
)

Epoch = Callable[[], Iterator[Any]]


def streaming(folder: Path, rounds: int, samples: int) -> None:
    """Print the time of a pass for each case."""
    if mosaicml() is None:
        print("streaming: mosaicml-streaming is not installed, so there is nothing to compare with")
        return
    torch.set_num_threads(1)
    shards = folder / "shards"
    write(shards, samples)
    with s3_copy(shards) as url:
        for case in CASES:
            where = url if case.remote else str(shards)
            runs = {name: make(case, where, folder, samples) for name, make in (("dtrain", ours), ("mosaicml", theirs))}
            seen = interleaved(runs, rounds=rounds, warmup=1, clocks={"CPU": all_cpu, "wall": WALL})
            _report(f"{case.name}, {case.workers} workers", samples, seen)


def write(folder: Path, samples: int) -> None:
    """The shards, by mosaicml-streaming: tokens, and the number of the sample."""
    draw = np.random.default_rng(0)
    columns = {"tokens": f"ndarray:int32:{TOKENS}", "id": "int"}
    with _theirs().MDSWriter(out=str(folder), columns=columns, size_limit=SHARD_BYTES, hashes=["xxh64"]) as out:
        for number in range(samples):
            out.write({"tokens": draw.integers(50_000, size=TOKENS, dtype=np.int32), "id": number})


def _theirs() -> ModuleType:
    module = mosaicml()
    assert module is not None
    return module


@contextmanager
def s3_copy(folder: Path) -> Iterator[str]:
    """The URL of the same files on an S3 server of this machine, which both sides find in the environment."""
    with servers().s3(behind_proxy=False) as server:
        keys = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": "us-east-1"}
        with patch.dict(os.environ, {**server.environment, **keys, "S3_ENDPOINT_URL": server.options["endpoint_url"]}):
            fsspec.config.set_conf_env(fsspec.config.conf)
            root = storage.resolve_path(server.root())
            for path in sorted(folder.iterdir()):
                storage.create_file(root / path.name, path.read_bytes())
            yield str(root)


def ours(case: Case, where: str, folder: Path, samples: int) -> Run:
    """A pass of dtrain's loader."""

    def built(cache: Path) -> Epoch:
        dataset = ShardedDataset(where, cache=cache)
        loader = dt.build_loader(dataset, global_batch_size=BATCH, seed=0, num_workers=case.workers)
        return lambda: loader.until(f"{loader.position.epoch + 1}ep")

    return _run(case, built, folder / "dtrain", samples)


def theirs(case: Case, where: str, folder: Path, samples: int) -> Run:
    """A pass of torch's loader over their dataset."""

    def built(cache: Path) -> Epoch:
        places = {"remote": where, "local": str(cache)} if case.remote else {"local": where}
        dataset = _theirs().StreamingDataset(**places, shuffle=True, batch_size=BATCH)
        loader = DataLoader(dataset, batch_size=BATCH, num_workers=case.workers)
        return lambda: iter(loader)

    return _run(case, built, folder / "mosaicml", samples)


def _run(case: Case, built: Callable[[Path], Epoch], folder: Path, samples: int) -> Run:
    """Return a function that makes one pass per call, and builds its reader and cache for it."""
    caches = (folder / f"{case.name}-{case.workers}-{number}" for number in count())
    once = built(next(caches)) if not case.remote else None
    warm = next(caches)

    def epoch() -> Iterator[Any]:
        if once is not None:
            return once()
        return built(warm if case.warm else next(caches))()

    ids = torch.cat([torch.as_tensor(batch["id"]).clone() for batch in epoch()])
    if not torch.equal(ids.sort().values, torch.arange(samples)):
        raise SystemExit(f"data: {folder.name}, {case.name}: a pass did not hand out every sample once")

    def run() -> None:
        for _ in epoch():
            pass

    return run


def _report(what: str, samples: int, seen: Mapping[str, Mapping[str, Any]]) -> None:
    for clock, timings in seen.items():
        comparison = compare(timings["dtrain"], timings["mosaicml"])
        megabytes = samples * TOKENS * 4 / 1e6
        rates = f"{samples / comparison.a_s:,.0f} and {samples / comparison.b_s:,.0f} samples/s"
        rates += f", {megabytes / comparison.a_s:.0f} MB/s"
        print(f"{what}, {clock} time of a pass, dtrain against mosaicml-streaming: {comparison}; {rates}")
    ratio = compare(seen["wall"]["dtrain"], seen["wall"]["mosaicml"]).ratio
    print(verdict_line(f"{what}, wall time against mosaicml-streaming's", ratio, at_most=AT_MOST), flush=True)
