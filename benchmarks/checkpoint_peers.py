"""Ways to save and load a training state on the ranks of a job: dtrain's, DCP's, ``torch.save``, and bare copies and writes.

Each way lists the moments in which it is compared: ``held`` is when the training thread may change parameters again, ``done``
is when the bytes are durable (of a save) or in place (of a load). Objects that a peer can prepare once per run, its tree of
tensors, it may prepare beforehand. No figure profits from unfinished work: all written bytes are flushed to the disk.
"""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter as now
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict

import dtrain as dt
from dtrain.checkpoint import data_file
from dtrain.dist.dtensor import to_local

Moments = dict[str, float]
"""Seconds since the call, by the name of the moment."""

PIECE_BYTES = 4 * 2**20  # of one bare write, as dd's bs=4M
WIDTH = 2048  # of the layers of a large model
SMALL_SHAPE = (16, 16)


class SmallTensors(nn.Module):
    """Model of small parameters only, whose bytes cost nothing beside their names."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.randn(SMALL_SHAPE)) for _ in range(count))


def layers(parameters: int) -> nn.Module:
    """Square linear layers with about so many parameters in all."""
    width = WIDTH
    while 8 * width * width > parameters and width > 8:
        width //= 2
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(max(1, round(parameters / (width * (width + 1)))))))


MODELS: dict[str, Callable[[int], nn.Module]] = {"small": SmallTensors, "large": layers}


@dataclass(slots=True, eq=False, repr=False)
class Run:
    """A training run on this rank, and the objects that peers keep between saves."""

    state: dt.TrainState
    root: Path
    kept: dict[str, Any] = field(default_factory=dict)

    def shards(self) -> dict[str, Tensor]:
        """Return this rank's parameters and optimizer state as plain tensors that share memory with them."""
        tensors = {f"params/{name}": param.detach() for name, param in self.state.params.items()}
        for name, param in self.state.params.items():
            content = self.state.optimizer.state.get(param, {})  # asking with [] would put an empty one there
            tensors |= {f"optimizer/{name}/{key}": value for key, value in content.items()}
        return {key: to_local(tensor) for key, tensor in tensors.items()}

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """Return the result of the first call of ``make``."""
        if name not in self.kept:
            self.kept[name] = make()
        return self.kept[name]

    @property
    def nbytes(self) -> int:
        """Count the bytes of this rank's shards."""
        return sum(tensor.nbytes for tensor in self.shards().values())


def build(model: str, size: int, root: Path, *, stepped: bool = True, device: str = "cpu") -> Run:
    """A run whose model is sharded over all ranks; with AdamW's state if it has ``stepped`` once."""
    torch.manual_seed(0)
    made = MODELS[model](size).to(device)
    made = dt.shard_model(made, dt.build_mesh(), strategy="full_shard", blocks=(nn.Linear,) if model == "large" else ())
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-3)
    run = Run(state=dt.compose_step(_no_loss, []).init(made, optimizer), root=root)
    if stepped:
        for param in made.parameters():
            param.grad = torch.zeros_like(param)
            to_local(param.grad).normal_()
        optimizer.step()
        optimizer.zero_grad()
    return run


def _no_loss(model: nn.Module, batch: dt.typing.Batch) -> dt.LossSum:
    raise AssertionError("this run is saved, not trained")


def digest(run: Run) -> str:
    """Return one digest of everything that this rank would save."""
    seen = xxhash.xxh3_128()
    for tensor in run.shards().values():
        seen.update(_bytes(tensor))
    return seen.hexdigest()


def scramble_(run: Run) -> None:
    """Change all tensors of this rank, so that each save writes new values. Mutates: the run."""
    for tensor in run.shards().values():
        tensor.fill_(-3.0)


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way to save and, if the way supports it, to load again.

    Args:
        save: writes the run below a folder, which is new for every call unless ``one_root``.
        load: reads the files of ``save`` into the run.
        ready: made before each timed call, and not timed.
        one_root: the folder is the same for every call, as in a real run; the step is a new one.
        direct: not every file system can do it.
        bare: moves bytes that are not the run's.
    """

    save: Callable[[Run, Path], Moments]
    load: Callable[[Run, Path], Moments] | None = None
    ready: Callable[[Run], object] = lambda run: None
    one_root: bool = False
    direct: bool = False
    bare: bool = False


def _next_step(run: Run) -> None:
    run.state = run.state._next(clock=replace(run.state.clock, step=run.state.step + 1))


def _dtrain(run: Run, folder: Path) -> Moments:
    begun = now()
    dt.save_sharded(folder, run.state)
    return {"done": now() - begun}


def _dtrain_async(run: Run, folder: Path) -> Moments:
    begun = now()
    handle = dt.save_sharded(folder, run.state, mode="async")
    handle.wait_staged()
    held = now() - begun
    handle.wait()
    return {"held": held, "done": now() - begun}


def _dtrain_without_digests(run: Run, folder: Path) -> Moments:
    with patch.object(data_file, "_digest_blocks", lambda serialized, ends, numbers: "0" * 32 * len(numbers)):
        return _dtrain(run, folder)


def _dtrain_load(run: Run, folder: Path) -> Moments:
    begun = now()
    run.state = dt.load_sharded(folder, run.state)
    return {"done": now() - begun}


def _tree(run: Run) -> dict[str, Any]:
    """The state as DCP saves it: nested names to live tensors. Made anew when a load has put others in their place."""
    shards = run.shards()
    held = run.kept.get("tree")
    if held is None or any(a.data_ptr() != b.data_ptr() for a, b in zip(held[0].values(), shards.values(), strict=True)):
        model, optim = get_state_dict(run.state.model, run.state.optimizer)
        run.kept["tree"] = held = (shards, {"model": model, "optim": optim})
    tree: dict[str, Any] = held[1]
    return tree


@contextmanager
def _quietly() -> Iterator[None]:
    """Warnings of a peer about its own insides are not our subject."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _dcp(run: Run, folder: Path) -> Moments:
    tree = _tree(run)
    with _quietly():
        begun = now()
        dcp.save(tree, checkpoint_id=folder)
        return {"done": now() - begun}


def _dcp_async(run: Run, folder: Path, stager: DefaultStager | None = None) -> Moments:
    """Save with DCP's async save. With its default stager the call returns when all is staged; else a future resolves then."""
    tree = _tree(run)
    group = run.once("group", lambda: dist.new_group(backend="gloo"))  # its thread uses it alone
    with _quietly():
        begun = now()
        answer = dcp.async_save(tree, checkpoint_id=folder, async_stager=stager, process_group=group)
        if stager is not None:
            answer.staging_completion.result()
        held = now() - begun
        (answer if stager is None else answer.upload_completion).result()
        return {"held": held, "done": now() - begun}


def _dcp_async_reused(run: Run, folder: Path) -> Moments:
    cuda = torch.cuda.is_available()
    options = StagingOptions(
        use_pinned_memory=cuda, use_shared_memory=False, use_async_staging=True, use_non_blocking_copy=cuda
    )
    return _dcp_async(run, folder, run.once("stager", lambda: DefaultStager(options)))


def _dcp_load(run: Run, folder: Path) -> Moments:
    tree = _tree(run)
    with _quietly():
        begun = now()
        dcp.load(tree, checkpoint_id=folder)  # into the live tensors: get_state_dict's are those
        return {"done": now() - begun}


def _own_file(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"rank-{dist.get_rank()}"


def _torch_save(run: Run, folder: Path) -> Moments:
    path, shards = _own_file(folder), run.shards()
    begun = now()
    with open(path, "wb") as file:
        torch.save(shards, file)
        file.flush()
        os.fsync(file.fileno())
    return {"done": now() - begun}


def _torch_load(run: Run, folder: Path) -> Moments:
    path, shards = _own_file(folder), run.shards()
    begun = now()
    loaded = torch.load(path, weights_only=True)
    for key, tensor in shards.items():
        tensor.copy_(loaded[key])
    return {"done": now() - begun}


def _flat(run: Run) -> tuple[memoryview, memoryview]:
    """Two page-aligned buffers with as many bytes as this rank's shards, the first of them noise."""

    def make() -> tuple[memoryview, memoryview]:
        buffers = [memoryview(mmap.mmap(-1, run.nbytes)) for _ in range(2)]
        noise = np.random.default_rng(dist.get_rank())
        for offset in range(0, run.nbytes, PIECE_BYTES):
            buffers[0][offset : offset + PIECE_BYTES] = noise.bytes(min(PIECE_BYTES, run.nbytes - offset))
        return buffers[0], buffers[1]

    made: tuple[memoryview, memoryview] = run.once("flat", make)
    return made


def _write(path: Path, data: memoryview, *, direct: bool = False) -> None:
    """Write as ``dd bs=4M conv=fsync`` does, or with ``oflag=direct``, past the page cache."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if direct else 0), 0o644)
    try:
        whole = len(data) // mmap.PAGESIZE * mmap.PAGESIZE if direct else len(data)
        for offset in range(0, whole, PIECE_BYTES):
            rest = data[offset : min(offset + PIECE_BYTES, whole)]
            while rest:
                rest = rest[os.write(handle, rest) :]
        os.fsync(handle)
    finally:
        os.close(handle)


def _raw(run: Run, folder: Path, *, direct: bool = False) -> Moments:
    path, data = _own_file(folder), _flat(run)[0]
    begun = now()
    _write(path, data, direct=direct)
    return {"done": now() - begun}


def _raw_direct(run: Run, folder: Path) -> Moments:
    return _raw(run, folder, direct=True)


def _raw_read(run: Run, folder: Path) -> Moments:
    path, data = _own_file(folder), _flat(run)[1]
    begun = now()
    with open(path, "rb", buffering=0) as file:
        offset = 0
        while got := file.readinto(data[offset:]):
            offset += got
    return {"done": now() - begun}


def _memcpy(run: Run, folder: Path) -> Moments:
    source, target = (torch.frombuffer(buffer, dtype=torch.uint8) for buffer in _flat(run))
    begun = now()
    target.copy_(source)
    return {"done": now() - begun}


def takes_direct(folder: Path) -> bool:
    """Return True if the file system accepts writes past the page cache on every rank."""
    probe = folder / f"probe-{dist.get_rank()}"
    takes = torch.ones(1)
    try:
        _write(probe, memoryview(mmap.mmap(-1, mmap.PAGESIZE)), direct=True)
    except OSError:
        takes.zero_()
    finally:
        probe.unlink(missing_ok=True)
    dist.all_reduce(takes, op=dist.ReduceOp.MIN)
    return bool(takes.item())


SAVES = {
    "dtrain": Way(save=_dtrain, ready=_next_step, one_root=True),
    "dtrain without digests": Way(save=_dtrain_without_digests, ready=_next_step, one_root=True),
    "dtrain async": Way(save=_dtrain_async, ready=_next_step, one_root=True),
    "DCP": Way(save=_dcp, ready=_tree),
    "DCP async": Way(save=_dcp_async, ready=_tree),
    "DCP async, stager reused": Way(save=_dcp_async_reused, ready=_tree),
    "torch.save, a file per rank": Way(save=_torch_save),
    "raw write + fsync": Way(save=_raw, ready=_flat),
    "raw write past the page cache + fsync": Way(save=_raw_direct, ready=_flat, direct=True),
    "memcpy": Way(save=_memcpy, ready=_flat),
}
LOADS = {
    "dtrain": Way(save=_dtrain, load=_dtrain_load),
    "DCP": Way(save=_dcp, load=_dcp_load, ready=_tree),
    "torch.load, a file per rank": Way(save=_torch_save, load=_torch_load),
    "raw read": Way(save=_raw, load=_raw_read, ready=_flat, bare=True),
}
