"""Count the reads of a resume as the number of ranks grows: bytes, requests and messages on real ranks, and planned at 512.

    python benchmarks/scale_checkpoint.py                    # everything: some minutes
    python benchmarks/scale_checkpoint.py --only plan        # without processes: 512 and 4,096 ranks
    python benchmarks/scale_checkpoint.py --ranks 2 4

Prints Markdown. All figures are counts, except for the seconds and the memory of opening a checkpoint of 4,096 ranks.

- **bytes**: all bytes that a rank reads from files during a load, indexes included, over the bytes of the rank's own shards.
- **requests**: HTTP requests of a load from an S3 server on this machine (moto), and requests that are not for tensor data.
- **plan**: the same bytes from the library's own planning, for a model of 7 B or 65 B parameters with AdamW's state in float32.
- **open**: one rank opens a checkpoint of 4,096 ranks with 3,000 tensors, and plans its reads.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from time import perf_counter as now
from typing import Any
from unittest.mock import patch

from torch.distributed.tensor import Shard

import dtrain as dt
from checkpoint_claims import table
from checkpoint_peers import build
from dtrain.checkpoint import layout, tree_json
from dtrain.checkpoint.data_file import FileLayout, TensorSlot, plan_blocks, plan_file_layout
from dtrain.checkpoint.index import (
    PlacedShards,
    RankIndex,
    RankParts,
    RunIndex,
    merge_parts,
    place_shards,
)
from dtrain.checkpoint.layout import Blocks, TensorRef
from dtrain.checkpoint.plan import ReadItem, Region, plan_fetches, plan_reads
from dtrain.checkpoint.reader import CheckpointReader, RankFilesReader, open_checkpoint
from dtrain.dist.control_plane import Channel
from dtrain.dist.dtensor import compute_shard_box
from dtrain.storage.local import LocalFileReader
from dtrain.testing import run_ranks

SIZE = 1_000_000
"""Parameters of the model on real ranks."""
TIMEOUT_S = 900.0


# Real ranks


def save(root: str, size: int = SIZE) -> int:
    """Save one step of a sharded model with AdamW's state. Returns the bytes of all files."""
    return dt.save_sharded(root, build("large", size, Path(root)).state).result().bytes


def load(root: str, size: int = SIZE) -> dict[str, int]:
    """Load into a new state. Count the bytes that this rank reads, and the bytes of its own shards."""
    run = build("large", size, Path(root), stepped=False)
    counted = {"read": 0, "indexes": 0}
    original = LocalFileReader.read_into

    def read_into(self: LocalFileReader, begin: int, out: memoryview) -> int:
        count = original(self, begin, out)
        counted["read"] += count
        counted["indexes"] += count if str(self._path).endswith(".json") else 0
        return count

    with patch.object(LocalFileReader, "read_into", read_into):
        run.state = dt.load_sharded(root, run.state)
    return {**counted, "own": run.nbytes}


def load_from_server(root: str, environment: Mapping[str, str], size: int = SIZE) -> dict[str, int]:
    """Load from a server, and count the requests of this rank, and those for tensor data."""
    with on_server(environment):
        run = build("large", size, Path("/unused"), stepped=False)
        with counted_requests() as requests:
            run.state = dt.load_sharded(root, run.state)
        return {"requests": len(requests), "data": sum(is_data(path) for path in requests)}


def save_to_server(root: str, environment: Mapping[str, str], size: int = SIZE) -> dict[str, int]:
    """Save to a server, and count the requests of this rank, and those for tensor data."""
    with on_server(environment):
        state = build("large", size, Path("/unused")).state
        with counted_requests() as requests:
            dt.save_sharded(root, state).wait()
        return {"requests": len(requests), "data": sum(is_data(path) for path in requests)}


def is_data(path: str) -> bool:
    """Return True if a request is for tensor data."""
    return ".safetensors" in path


@contextlib.contextmanager
def on_server(environment: Mapping[str, str]) -> Iterator[None]:
    """Use the server that the variables of fsspec name, and close the connections to it afterwards."""
    import fsspec.config

    from dtrain.checkpoint import lock
    from dtrain.storage.remote import disconnect

    with patch.dict(os.environ, environment):
        fsspec.config.set_conf_env(fsspec.config.conf)
        try:
            yield
        finally:
            lock._release_at_exit()
            disconnect()


@contextlib.contextmanager
def counted_requests() -> Iterator[list[str]]:
    """Record method and path of every request to S3 of this process, except for heartbeats of the lock."""
    from aiobotocore.httpsession import AIOHTTPSession

    requests: list[str] = []
    original = AIOHTTPSession.send

    async def send(self: Any, request: Any) -> Any:
        if "run.lock" not in request.url:
            requests.append(f"{request.method} {request.url}")
        return await original(self, request)

    with patch.object(AIOHTTPSession, "send", send):
        yield requests


def messages(root: str, size: int = SIZE) -> dict[str, list[list[Any]]]:
    """Save and load once, and note each exchange: its kind, its caller, bytes of this rank and of all ranks."""
    run = build("large", size, Path(root))
    with noted_exchanges() as exchanges:
        dt.save_sharded(root, run.state).wait()
        saved, exchanges[:] = list(exchanges), []
        dt.load_sharded(root, run.state)
    return {"save": saved, "load": exchanges}


@contextlib.contextmanager
def noted_exchanges() -> Iterator[list[list[Any]]]:
    """Note the exchanges of this rank on every channel of the control plane."""
    exchanges: list[list[Any]] = []
    all_gather, gather = Channel.all_gather, Channel.gather

    def noted_all_gather(channel: Channel, payload: bytes, **options: Any) -> list[bytes]:
        result = all_gather(channel, payload, **options)
        exchanges.append(["all_gather", options["caller"], len(payload), sum(map(len, result))])
        return result

    def noted_gather(channel: Channel, payload: bytes, dst: int, **options: Any) -> list[bytes] | None:
        result = gather(channel, payload, dst, **options)
        exchanges.append(["gather", options["caller"], len(payload), sum(map(len, result or ()))])
        return result

    with patch.object(Channel, "all_gather", noted_all_gather), patch.object(Channel, "gather", noted_gather):
        yield exchanges


# Planned


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Shapes of a decoder: its width, the width of its feed-forward layers, layers, and vocabulary."""

    width: int
    inner: int
    layers: int
    vocabulary: int = 32_000

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the parameters by name."""
        wide, inner = self.width, self.inner
        square = {f"attention.{name}": (wide, wide) for name in ("q", "k", "v", "o")}
        block = {
            **square,
            "gate": (inner, wide),
            "up": (inner, wide),
            "down": (wide, inner),
            "norm1": (wide,),
            "norm2": (wide,),
        }
        layers = {f"layers.{layer}.{name}.weight": shape for layer in range(self.layers) for name, shape in block.items()}
        ends = {"embedding.weight": (self.vocabulary, wide), "norm.weight": (wide,), "head.weight": (self.vocabulary, wide)}
        return {**layers, **ends}


MODELS = {
    "7 B": Model(width=4096, inner=11008, layers=32),
    "65 B": Model(width=8192, inner=22016, layers=80),
}


class PlannedRanks(RankFilesReader):
    """Files of the ranks of a checkpoint that is planned only."""

    def __init__(self, planned: Planned) -> None:
        self._planned = planned
        self._placed: dict[int, PlacedShards] = {}
        self.read: set[int] = set()

    def placed(self, rank: int) -> PlacedShards:
        self.read.add(rank)
        if rank not in self._placed:
            self._placed[rank] = place_shards(self._planned.rank_index(rank), self._planned.index, {})
        return self._placed[rank]

    def prepare(self, ranks: Any) -> None:
        pass


@dataclass(frozen=True, kw_only=True, eq=False)
class Planned:
    """Checkpoint of a fully sharded model with AdamW's state, planned as the library plans, without data.

    Args:
        shapes: shapes of the parameters by name.
        ranks: ranks that write.
    """

    shapes: Mapping[str, tuple[int, ...]]
    ranks: int

    @cached_property
    def keys(self) -> dict[str, tuple[int, ...]]:
        """Shape of each sharded tensor, by key."""
        shapes = {f"params/{name}": shape for name, shape in self.shapes.items()}
        for name, shape in self.shapes.items():
            shapes |= {f"optimizer/state/{name}/{key}": shape for key in ("exp_avg", "exp_avg_sq")}
        return shapes

    @cached_property
    def shared(self) -> dict[str, Any]:
        """Encoded values of the run."""
        tensor = {name: f"$dtensor F32 {list(shape)}" for name, shape in self.shapes.items()}
        state = {name: {"step": "$tensor F32 []", "exp_avg": text, "exp_avg_sq": text} for name, text in tensor.items()}
        groups = [{"lr": 1e-4, "betas": {"$": "tuple", "items": [0.9, 0.95]}, "params": list(self.shapes)}]
        return {"params": tensor, "buffers": {}, "optimizer": {"state": state, "groups": groups}, "seed": 0}

    @cached_property
    def refs(self) -> dict[str, TensorRef]:
        """Descriptions of all tensors by key."""
        refs: dict[str, TensorRef] = {}
        for section, values in self.shared.items():
            refs |= tree_json.tensor_refs(values, section)
        return refs

    @cached_property
    def steps(self) -> frozenset[str]:
        """Tensors that are in the index."""
        return frozenset(key for key in self.refs if key.endswith("/step"))

    def regions(self, rank: int) -> dict[str, Region]:
        """Return the shards of a rank."""
        boxes = {shape: self.box(shape, rank) for shape in {*self.keys.values()}}
        sharded = {key: boxes[shape] for key, shape in self.keys.items()}
        return {key: sharded.get(key, Region((), ())) for key in self.refs}

    def box(self, shape: tuple[int, ...], rank: int) -> Region:
        """Return the rows of a rank."""
        own = compute_shard_box(shape, (self.ranks,), (rank,), (Shard(0),))
        return Region(own.offset, own.size)

    def file(self, rank: int) -> FileLayout:
        """Return the layout of the data file of a rank."""
        regions = self.regions(rank)
        held = {key: regions[key].size for key in self.keys if 0 not in regions[key].size}
        return plan_file_layout(TensorSlot.of(key, "F32", size) for key, size in held.items())

    def rank_index(self, rank: int) -> RankIndex:
        """Return the index of a rank, with digests of nothing."""
        file = self.file(rank)
        ends = plan_blocks(file)
        begins = [file.ranges[key][0] for key in self.refs if key in file.ranges]
        digests = hashlib.sha256(b"").hexdigest()[:32] * len(ends)
        values = {"buffers": {}, "rng": {"words": list(range(2**31, 2**31 + 625))}}
        blocks = (Blocks(ends, digests),)
        return RankIndex(digest=layout.DIGEST, rank=rank, begins=begins, per_rank=[], blocks=blocks, values=values)

    def parts(self, rank: int) -> RankParts:
        """Return the report of a rank to rank 0 at the commit."""
        regions = self.regions(rank)
        held = {key: (0, *regions[key]) for key in self.keys if 0 not in regions[key].size}
        return RankParts.of(list(self.refs), held)

    @cached_property
    def index(self) -> RunIndex:
        """Index of the run."""
        kinds, tensors = merge_parts(self.refs, self.steps, [self.parts(rank) for rank in range(self.ranks)])
        size = self.file(0).size
        files = tuple(layout.RankFiles(200_000, "0" * 64, (size,)) for _ in range(self.ranks))
        inline = bytes(4 * len(self.steps))
        return RunIndex(files=files, kinds=kinds, tensors=tensors, inline=inline, local_buffers=False, shared=self.shared)

    @cached_property
    def index_bytes(self) -> int:
        """Bytes of the index of the run, and of a manifest."""
        return len(layout.encode_index(self.index, layout.INDEX)) + 1000

    def reader(self) -> CheckpointReader:
        """Return a reader, which has read nothing yet."""
        nothing: dict[str, Any] = {"folder": None, "manifest": None, "shared": {}, "structures": {}}
        placed: dict[str, Any] = dict.fromkeys(self.steps)
        numbers = {key: number for number, key in enumerate(self.refs)}
        return CheckpointReader(
            index=self.index, refs=self.refs, numbers=numbers, ranks=PlannedRanks(self), placed=placed, **nothing
        )

    def resume(self, rank: int, ranks: int) -> dict[str, float]:
        """Count the reads of a rank of another job, of ``ranks`` ranks."""
        target = Planned(shapes=self.shapes, ranks=ranks)
        regions = {key: region for key, region in target.regions(rank).items() if key in self.keys}
        reader = self.reader()
        reads = plan_reads(reader.find_shards(regions), regions)
        fetched = sum(end - begin for begin, end in fetches_of(reads, reader.ranks))
        files = {read.file for read in reads}
        own = sum(read.end - read.begin for read in reads) + 4 * len(self.steps)
        ranks_read = [(number - 1) // 2 for number in files]
        indexes = sum(len(layout.encode_index(self.rank_index(source), layout.index_name(source))) for source in ranks_read)
        read = fetched + indexes + self.index_bytes
        return {"own": own, "read": read, "ratio": read / own, "files": len(files), "indexes": indexes + self.index_bytes}


def fetches_of(reads: Sequence[ReadItem], ranks: RankFilesReader) -> Iterator[tuple[int, int]]:
    """Iterate over the byte ranges that are fetched for reads."""
    for number in {read.file for read in reads}:
        blocks = ranks.placed((number - 1) // 2).blocks[0]
        for fetch in plan_fetches(blocks, [read for read in reads if read.file == number], is_remote=False):
            yield fetch.begin, fetch.end


def spread(ranks: int, count: int) -> list[int]:
    """Return some ranks, the first and the last among them."""
    return sorted({round(index * (ranks - 1) / max(1, count - 1)) for index in range(min(count, ranks))})


# A checkpoint of many ranks


def write_wide(folder: Path, ranks: int, tensors: int, rank: int) -> None:
    """Write a step of so many ranks: manifest, index, the index of one rank, and files of the right size without content."""
    shapes = {f"layers.{layer}.weight": (4 * ranks, 64) for layer in range(tensors // 3)}
    planned = Planned(shapes=shapes, ranks=ranks)
    data = layout.encode_index(planned.rank_index(rank), layout.index_name(rank))
    size = planned.file(rank).size
    files = tuple(layout.RankFiles(len(data), hashlib.sha256(data).hexdigest(), (size,)) for _ in range(ranks))
    sections = {"modules": {"names": [], "equal": True}, "transforms": {}, "clock": {}, "extra": {}, "objects": {}}
    planned_index = planned.index
    index = RunIndex(
        files=files, kinds=planned_index.kinds, tensors=planned_index.tensors, inline=planned_index.inline, local_buffers=False,
        shared={**planned_index.shared, **sections},
    )  # fmt: skip
    run_data = layout.encode_index(index, layout.INDEX)
    folder.mkdir(parents=True)
    for number in range(ranks):
        for name, nbytes in files[number].sizes(number).items():
            with open(folder / name, "wb") as file:
                file.truncate(nbytes)
    (folder / layout.index_name(rank)).write_bytes(data)
    (folder / layout.INDEX).write_bytes(run_data)
    manifest = layout.Manifest(
        run_id="0" * 32, step=1, parent_step=None, serial=1, scope="all", states=(), world_size=ranks,
        layout=layout.MeshLayout(strategy="full_shard", axes=("dp_replicate", "dp_shard"), shape=(1, ranks)),
        bytes=len(run_data) + ranks * (len(data) + size), index_bytes=len(run_data),
        index_sha256=hashlib.sha256(run_data).hexdigest(),
    )  # fmt: skip
    (folder / layout.MANIFEST).write_bytes(layout.encode_manifest(manifest))


def open_wide(folder: Path, ranks: int, tensors: int, rank: int, *, check_files: bool) -> dict[str, float]:
    """Open a step as one rank does, and plan its reads. Returns seconds, processor time, and growth of the peak memory."""
    shapes = {f"layers.{layer}.weight": (4 * ranks, 64) for layer in range(tensors // 3)}
    regions = {key: region for key, region in Planned(shapes=shapes, ranks=ranks).regions(rank).items() if region.size}
    before, begun, used = peak_bytes(reset=True), now(), sum(os.times()[:2])
    reader = open_checkpoint(folder, check_files=check_files)
    reads = plan_reads(reader.find_shards(regions), regions)
    seconds, cpu = now() - begun, sum(os.times()[:2]) - used
    return {"seconds": seconds, "cpu": cpu, "bytes": peak_bytes() - before, "reads": len(reads)}


def peak_bytes(*, reset: bool = False) -> int:
    """Return the peak of this process's memory; with ``reset``, from now on."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


# Tables


def print_bytes(ranks: Sequence[int], root: Path) -> None:
    """Print the bytes on real ranks, on the same number of ranks and on other numbers."""
    rows = []
    for world in ranks:
        folder = str(root / f"of-{world}")
        run_ranks(save, world, folder, timeout_s=TIMEOUT_S)
        for other in (world, world // 2, world * 2):
            if other in (*ranks, 1):
                by_rank = run_ranks(load, other, folder, timeout_s=TIMEOUT_S)
                worst = max(by_rank, key=lambda figures: figures["read"] / figures["own"])
                cells = (f"{world} to {other}", worst["own"], worst["read"], worst["indexes"])
                ratio, target = worst["read"] / worst["own"], 1.05 if other == world else 1.15
                rows.append(f"| {' | '.join(map(str, cells))} | {ratio:.3f} | {target} | {met(ratio <= target)} |")
    print("### Bytes that a resume reads, on real ranks (the worst rank)\n")
    table("ranks | own shards | read | of these indexes | read / own | at most | verdict", rows)


def print_requests(ranks: Sequence[int], root: Path) -> None:
    """Requests to a server on real ranks."""
    rows = []
    with moto() as environment:
        for world in ranks:
            url = f"s3://bucket/of-{world}"
            saved = run_ranks(save_to_server, world, url, environment, timeout_s=TIMEOUT_S)
            loaded = run_ranks(load_from_server, world, url, environment, timeout_s=TIMEOUT_S)
            for name, by_rank in (("save", saved), ("load", loaded)):
                beyond = [figures["requests"] - figures["data"] for figures in by_rank]
                total, data = sum(figures["requests"] for figures in by_rank), sum(figures["data"] for figures in by_rank)
                verdict = met(max(beyond) <= 20) if name == "load" else ""
                rows.append(
                    f"| {name} | {world} | {total} | {data} | {sum(beyond)} | {max(beyond)} | {beyond[-1]} | {verdict} |"
                )
    print("### Requests to S3 (moto), one step in the root\n")
    head = "of | ranks | whole job | for data | beyond data | most of a rank (rank 0) | of the last rank | at most 20"
    table(head, rows)


def print_plan() -> None:
    """Bytes from the plan."""
    rows = []
    cases = [("7 B", 512, other) for other in (512, 256, 384, 1024)]
    cases += [("7 B", 64, 48), ("65 B", 512, 512), ("65 B", 512, 384), ("65 B", 4096, 4096)]
    for name, ranks, other in cases:
        planned = Planned(shapes=MODELS[name].shapes(), ranks=ranks)
        # torch.chunk leaves nothing to the last ranks if the rows do not divide: they read the index only.
        by_rank = [figures for rank in spread(other, 9) if (figures := planned.resume(rank, other))["own"] > 10**6]
        worst = max(by_rank, key=lambda figures: figures["ratio"])
        mean = sum(figures["read"] for figures in by_rank) / sum(figures["own"] for figures in by_rank)
        target = 1.05 if ranks == other else 1.15
        files = max(figures["files"] for figures in by_rank)
        report = len(json.dumps(planned.parts(0).encode()))
        sizes = (f"{worst['own'] / 1e6:.1f} MB", f"{worst['indexes'] / 1e6:.2f} MB", files, report)
        cells = (name, f"{ranks} to {other}", *sizes)
        verdict = met(worst["ratio"] <= target)
        rows.append(f"| {' | '.join(map(str, cells))} | {mean:.3f} | {worst['ratio']:.3f} | {target} | {verdict} |")
    print("### Bytes that a resume reads, planned (the worst of up to nine ranks)\n")
    head = "model | ranks | own shards | indexes | data files | bytes to rank 0 at a commit"
    table(f"{head} | mean read / own | worst | at most | verdict", rows)


def print_open(root: Path) -> None:
    """Opening a checkpoint of 4,096 ranks in a new process."""
    rows = []
    for ranks, tensors in ((8, 3000), (512, 3000), (4096, 3000)):
        folder = root / f"wide-{ranks}" / "step-00000001"
        write_wide(folder, ranks, tensors, 7)
        for check in (False, True):
            command = [sys.executable, __file__, "--open", str(folder), str(ranks), str(tensors), str(int(check))]
            text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            seconds, cpu, nbytes = map(float, text.split())
            index = (folder / layout.INDEX).stat().st_size
            what = "rank 0, which looks at all files" if check else "any other rank"
            verdict = met(seconds <= 3 and nbytes <= 300e6)
            rows.append(
                f"| {ranks:,} x {tensors:,} | {what} | {index / 1e6:.2f} MB | {cpu:.2f} s | {seconds:.2f} s | "
                f"{nbytes / 1e6:.0f} MB | {verdict} |"
            )
    print("### Open a checkpoint and plan the reads of one rank\n")
    table("ranks x tensors | as | index.json | processor | seconds | memory | at most 3 s, 300 MB", rows)


def print_messages(ranks: Sequence[int], root: Path) -> None:
    """Exchanges of JSON of a save and a load."""
    rows = []
    for world in ranks:
        by_call = run_ranks(messages, world, str(root / f"messages-{world}"), timeout_s=TIMEOUT_S)[0]
        for what in ("save", "load"):
            by_function: dict[str, list[int]] = {}
            for function, _, sent, received in by_call[what]:
                count = by_function.setdefault(function, [0, 0, 0])
                count[:] = count[0] + 1, count[1] + sent, count[2] + received
            for function, (count, sent, received) in sorted(by_function.items()):
                rows.append(f"| {what} | {world} | {function} | {count} | {sent} | {received} |")
    print("### Exchanges between ranks, as rank 0 sees them\n")
    table("of | ranks | exchange | calls | bytes sent by rank 0 | bytes of all ranks", rows)


def met(is_met: bool) -> str:
    """Return the verdict."""
    return "met" if is_met else "**missed**"


@contextlib.contextmanager
def moto() -> Iterator[dict[str, str]]:
    """Start an S3 server on this machine. Gives the variables that name it."""
    program = (
        "from moto.server import ThreadedMotoServer as S; import threading; s = S('127.0.0.1', 0, verbose=False); "
        "s.start(); print(s.get_host_and_port()[1], flush=True); threading.Event().wait()"
    )
    keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}
    server = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **keys},
    )
    try:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        environment = {**keys, "FSSPEC_S3_ENDPOINT_URL": url}
        with patch.dict(os.environ, keys):
            import s3fs

            s3fs.S3FileSystem(endpoint_url=url, skip_instance_cache=True).mkdir("bucket")
        yield environment
    finally:
        server.terminate()
        server.wait()


PARTS: Mapping[str, Callable[[Sequence[int], Path], None]] = {
    "bytes": print_bytes,
    "requests": print_requests,
    "messages": print_messages,
    "plan": lambda ranks, root: print_plan(),
    "open": lambda ranks, root: print_open(root),
}


def main() -> None:
    if sys.argv[1:2] == ["--open"]:
        folder, ranks, tensors, check = sys.argv[2:]
        figures = open_wide(Path(folder), int(ranks), int(tensors), 7, check_files=check == "1")
        print(figures["seconds"], figures["cpu"], figures["bytes"])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], help="numbers of real ranks (%(default)s)")
    parser.add_argument("--only", choices=PARTS, nargs="+", help="some parts")
    given = parser.parse_args()
    for name, measure in PARTS.items():
        if given.only is None or name in given.only:
            with tempfile.TemporaryDirectory() as folder:
                measure(given.ranks, Path(folder))


if __name__ == "__main__":
    main()
