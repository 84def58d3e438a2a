"""docs/errors.md, the errors of one process: torch's message, and dtrain's."""

from __future__ import annotations

import errno
import os
import resource
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import dtrain as dt
from dtrain.testing import inject_fault
from errors.said import check, raised, told

LOSS = dt.mean_loss(lambda model, batch: model(batch).square().mean(), weight=len)
PATIENCE_S = 300  # for a task of seconds: the machine may be busy


def begun(
    *transforms: dt.Transform, width: int = 1, loader: dt.data.Loader | None = None, **options: float
) -> tuple[dt.step.Step, dt.TrainState]:
    model = nn.Linear(width, width, bias=False)
    step = dt.compose_step(LOSS, transforms)
    return step, step.init(model, torch.optim.SGD(model.parameters(), lr=0.1, **options), loader=loader)


@contextmanager
def taken_port() -> Iterator[int]:
    """Yield a port on loopback with a listener."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


@contextmanager
def closed_port() -> Iterator[int]:
    """Yield a port on loopback without a listener, which no other socket gets."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def by_hand(port: int, rank: int) -> str:
    """Return the message of a process group that is opened without the second of two ranks."""
    address = f"tcp://127.0.0.1:{port}"
    return raised(
        lambda: dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2, timeout=timedelta(seconds=1))
    )


def here(port: int, rank: int, monkeypatch: pytest.MonkeyPatch) -> str:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1"}
    with monkeypatch.context() as environment:
        for name, value in {**place, "MASTER_PORT": port}.items():
            environment.setenv(name, str(value))
        return raised(lambda: dt.init_dist(device="cpu", init_timeout_s=1))


def launched(folder: Path, *options: str, **env: str) -> subprocess.Popen[str]:
    script = folder / "script.py"
    script.write_text("import os\n\nprint(os.environ['MASTER_PORT'])\n")
    command = [sys.executable, "-m", "dtrain", "launch", "-n", "1", *options, str(script)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=folder, env={**os.environ, **env}, **pipes)


def two_nodes(folder: Path, rank: int, port: int, join_s: int) -> subprocess.Popen[str]:
    where = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    return launched(folder, "--nnodes", "2", "--node-rank", str(rank), *where, "--join-timeout", str(join_s))


def last_words(job: subprocess.Popen[str]) -> str:
    said = job.communicate(timeout=PATIENCE_S)[1]
    assert job.returncode == 1, said
    return said


def test_unreachable_node_error_names_the_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closed_port() as port, closed_port() as of_node_0:  # the first port has a listener for a while
        node = two_nodes(tmp_path, 1, of_node_0, 1)
        theirs = by_hand(port, 1), by_hand(port, 0)
        ours = here(port, 0, monkeypatch)
        check("A barrier that times out", by_hand=theirs, here=(ours, last_words(node)))


@pytest.mark.costly
def test_port_in_use_is_avoided_or_raises_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with taken_port() as port:
        node = two_nodes(tmp_path, 0, port, 1)
        alone = launched(tmp_path, "--run-dir", str(tmp_path / "alone"), MASTER_PORT=str(port))
        theirs, ours = by_hand(port, 0), here(port, 0, monkeypatch)
        said = alone.communicate(timeout=PATIENCE_S)
        assert alone.returncode == 0, said
        assert int(said[0]) != port  # on one node the launcher finds a port of its own
        check("A port that is taken", by_hand=(theirs,), here=(ours, last_words(node)))


class Documents:
    """A batch that is an object of one's own."""

    def __init__(self, count: int) -> None:
        self.tokens = torch.arange(count * 4).reshape(count, 4)


def test_unsplittable_batch_is_refused_with_an_explanation() -> None:
    class_of_ones_own = raised(lambda: dt.data.split_batch(Documents(8), 2))
    unlike = raised(lambda: dt.data.split_batch({"x": torch.zeros(8, 3), "y": torch.zeros(6)}, 2))
    check("The batch size of a custom batch", here=(class_of_ones_own, unlike))


def test_persistent_nan_loss_stops_the_run() -> None:
    step, state = begun()

    def train(state: dt.TrainState) -> None:
        for index in range(20):
            state, _ = step(state, torch.full((2, 1), 1.0 if index < 3 else float("nan")))

    check("A loss that is NaN from some step on", here=(raised(lambda: train(state)),))


def test_common_argument_mistakes_raise_one_line_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = nn.Linear(1, 1), torch.ones(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step, plain = dt.compose_step(LOSS), dt.compose_step(lambda model, batch: model(batch).mean())
    swapped = raised(lambda: step(batch, step.init(model, optimizer)))
    before = raised(lambda: step.init(optimizer, model))
    some = raised(lambda: step.init(model, torch.optim.SGD([model.weight], lr=0.1)))
    mean = raised(lambda: plain(plain.init(model, optimizer), batch))
    monkeypatch.setenv("WORLD_SIZE", "4")
    check("First contact", here=(swapped, before, some, mean, raised(lambda: step.init(model, optimizer))))


class RMS(nn.Module):
    """A norm that is written out."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(dim)), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


def apex() -> object:
    from apex.normalization import FusedLayerNorm

    return FusedLayerNorm


def test_missing_fused_kernel_warns_and_gives_equal_results() -> None:
    model, x = nn.Sequential(RMS(8)), torch.rand(4, 8)
    before = model(x)
    with pytest.warns(UserWarning, match="fused_layer_norm") as caught:
        model = dt.surgery.fused_layer_norm(model)
    torch.testing.assert_close(model(x), before)
    check("A fused kernel that is missing", by_hand=(raised(apex),), here=(told(caught[0].message),))


def written_over(path: Path, model: nn.Module) -> str:
    """Return the message of ``torch.save`` on a disk with room for half of the file; the file that was there before is gone."""
    torch.save(model.state_dict(), path)
    assert raised(lambda: torch.load(path)).startswith("nothing was raised")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size // 2, before[1]))
    try:
        said = raised(lambda: torch.save(model.state_dict(), path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not raised(lambda: torch.load(path)).startswith("nothing was raised")
    return said


def bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors"))


def test_checkpoint_size_matches_the_requested_contents(tmp_path: Path) -> None:
    step, state = begun(width=128, momentum=0.9)
    state, _ = step(state, torch.ones(2, 128))
    by_hand = written_over(tmp_path / "by-hand.pt", state.model)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with inject_fault("raise", at="write_data", error=full):
        ours = raised(lambda: dt.save_sharded(tmp_path / "whole", state))
    assert dt.checkpoint.list_steps(tmp_path / "whole") == []
    dt.save_sharded(tmp_path / "whole", state)
    dt.save_sharded(tmp_path / "weights", state, scope="weights")
    dt.save_sharded(tmp_path / "half", state, scope="weights", dtype=torch.bfloat16)
    whole, weights, half = (bytes_of(tmp_path / name) for name in ("whole", "weights", "half"))
    assert whole >= 2 * weights  # momentum; with Adam it is three times as much
    assert half == pytest.approx(weights / 2, rel=0.01)
    for _ in range(3):
        state, _ = step(state, torch.ones(2, 128))
        dt.save_sharded(tmp_path / "whole", state, keep_last=2)
    assert len(list((tmp_path / "whole").glob("step-*"))) == 2
    check("Checkpoints that are too large", by_hand=(by_hand,), here=(ours,))


class Pictures:
    """Sixteen samples, of which one cannot be decoded."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 9:
            raise ValueError("broken data stream when reading image file")
        return torch.full((1,), float(index))


def test_corrupt_sample_is_named_or_skipped() -> None:
    # No tensors from its worker: torch ends it in a way that would leave the folder behind through which they are passed.
    theirs = raised(lambda: list(DataLoader(Pictures(), batch_size=4, num_workers=1, collate_fn=len)))
    step, state = begun()

    def train(loader: dt.data.Loader, state: dt.TrainState) -> dt.TrainState:
        for batch in loader.until("1ep"):
            state, _ = step(state, batch)
        return state

    loader = dt.build_loader(Pictures(), global_batch_size=4, seed=0, num_workers=1)
    ours = raised(lambda: train(loader, state))
    step, state = begun()
    loader = dt.build_loader(Pictures(), global_batch_size=4, seed=0, num_workers=1, on_error="skip")
    assert train(loader, state).clock.samples == 15
    assert [index for index, _ in loader.skipped.samples] == [9]
    check("A corrupt sample", by_hand=(theirs,), here=(ours,))


def theirs_extended() -> list[float]:
    """The rates of torch's linear decay: a run of 4 steps, then the same run with 8, resumed."""
    rates: list[float] = []
    saved: dict = {}
    for total in (4, 8):
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=total)
        if saved:
            optimizer.load_state_dict(saved["optimizer"])
            scheduler.load_state_dict(saved["scheduler"])
        for _ in range(4):
            rates.append(scheduler.get_last_lr()[0])
            optimizer.step()
            scheduler.step()
        saved = {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    return rates


def one_step_too_many() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=3)
    for _ in range(4):
        optimizer.step()
        scheduler.step()


def ours_extended(folder: Path, schedule_of: int | None = None) -> list[float]:
    """The same here, with the schedule as long as the run, or as given."""
    rates = []
    for total in (4, 8):
        loader = dt.build_loader(torch.ones(4, 1), global_batch_size=1, seed=0)
        step, state = begun(dt.transforms.scale_lr(dt.schedules.linear(1.0, 0.0, schedule_of or total)), loader=loader)
        state = dt.load_sharded(folder, state, missing_ok=True)
        for batch in loader.until(f"{total}ba"):
            state, metrics = step(state, batch)
            rates.append(dt.reduce_metrics(metrics)["lr"] / 0.1)
        dt.save_sharded(folder, state)
    return rates


def test_extended_run_continues_with_nonzero_lr(tmp_path: Path) -> None:
    assert theirs_extended() == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0, 0.0, 0.0, 0.0])
    assert ours_extended(tmp_path / "long") == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.5, 0.375, 0.25, 0.125])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        assert ours_extended(tmp_path / "short", schedule_of=4)[4:] == [0.0] * 4
    (warning,) = [message for message in caught if "scale_lr" in str(message.message)]
    check(
        "A rate of zero after a finished run was extended",
        by_hand=(raised(one_step_too_many),),
        here=(told(warning.message),),
    )
